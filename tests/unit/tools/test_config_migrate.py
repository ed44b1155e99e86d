"""tools/config_migrate.py: what each rule writes, says and leaves out; the recipe it makes loads and is minimal."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_rl.utils.config import build_master_config, load_config
from tools import config_cli, config_migrate
from tools.migration.engine import CONFIGS, Kind, Migration, exists, migrate, schema_keys
from tools.migration.from_nemo_rl import NEMO_RL
from tools.migration.from_verl_speco import DRAFTER, TRAINING, VERL_SPECO
from tools.migration.rules import Project, Rule, leaves

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "migration"
EVERY_RULE = FIXTURES / "nemo_rl_every_rule.yaml"
VERL = FIXTURES / "verl_speco_base.yaml"
ALGORITHMS = ("EAGLE1", "EAGLE2", "EAGLE3", "PEAGLE", "DFLASH", "DSPARK", "DOMINO")
MEGATRON = "policy: {megatron_cfg: {enabled: true, %s}, dtensor_cfg: {enabled: false}, optimizer: null}"


@pytest.fixture
def of_nemo_rl(tmp_path: Path) -> Any:
    """Makes a recipe in NeMo-RL's layout, beside its parent, and migrates it."""
    shutil.copy(FIXTURES / "nemo_rl_base.yaml", tmp_path)

    def make(text: str = "", *overrides: str) -> Migration:
        path = tmp_path / "recipe.yaml"
        path.write_text(f"defaults: nemo_rl_base.yaml\n{text}", encoding="utf-8")
        return migrate(NEMO_RL, path, overrides)

    return make


def of_verl(*overrides: str) -> Migration:
    return migrate(VERL_SPECO, VERL, overrides)


def drafter(*overrides: str) -> Migration:
    return of_verl(*(f"{DRAFTER}.{text}" for text in overrides))


def keys_of(result: Migration, kind: Kind) -> set[str]:
    return {remark.key for remark in result.of(kind)}


def loaded(result: Migration, directory: Path) -> Any:
    """The recipe where recipes belong, in a copy of examples/configs: loaded, validated and minimal."""
    configs = directory / "configs"
    shutil.copytree(CONFIGS, configs, dirs_exist_ok=True)
    path = configs / "recipes" / "llm" / "migrated.yaml"
    path.write_text(result.text(), encoding="utf-8")
    assert config_cli.main(["minimize-check", str(path)]) == 0
    return build_master_config(load_config(path))


def test_plain_recipe_holds_what_differs(of_nemo_rl: Any, tmp_path: Path) -> None:
    result = of_nemo_rl(
        "grpo: {num_prompts_per_step: 64, max_num_steps: 500}\n"
        "policy: {model_name: org/policy, max_total_sequence_length: 1024, train_micro_batch_size: 2}\n"
        "data: {default: {prompt_file: null}}\n"
    )
    assert yaml.safe_load(result.text()) == {
        "defaults": "../../grpo_math_1B.yaml",
        "grpo": {"num_prompts_per_step": 64, "max_num_steps": 500},
        "policy": {
            "model_name": "org/policy",
            "train_micro_batch_size": 2,
            "logprob_batch_size": "${policy.train_micro_batch_size}",
            "max_total_sequence_length": 1024,
            "sequence_packing": {"enabled": True},
        },
        "data": {"num_workers": 1},
        "logger": {"tensorboard_enabled": False, "monitor_gpus": True},
    }
    cfg = loaded(result, tmp_path)
    assert cfg.policy.generation.max_new_tokens == 1024
    assert cfg.policy.sequence_packing.train_mb_tokens == 2048
    assert {remark.kind for remark in result.remarks} == {"nothing"}


def test_draft_keeps_its_path_once(of_nemo_rl: Any, tmp_path: Path) -> None:
    draft = "enabled: true, model_name: org/draft, loss_weight: 0.1, aux_layer_indices: [1, 17, 32]"
    result = of_nemo_rl(
        f"policy: {{draft: {{{draft}}}, generation: {{vllm_kwargs: {{speculative_config: {{method: eagle3, "
        "model: '${policy.draft.model_name}', num_speculative_tokens: 3, draft_tensor_parallel_size: 1}}}}\n"
    )
    cfg = loaded(result, tmp_path)
    assert (cfg.policy.draft.model_name, cfg.policy.draft.loss_weight) == ("org/draft", 0.1)
    assert cfg.policy.draft.aux_layer_indices == (1, 17, 32)
    assert cfg.policy.generation.vllm_kwargs["speculative_config"] == {
        "method": "eagle3",
        "num_speculative_tokens": 3,
        "draft_tensor_parallel_size": 1,
    }
    assert keys_of(result, "left out") == {"policy.generation.vllm_kwargs.speculative_config.model"}


def test_draft_that_is_off_leaves_no_trace_and_another_one_stays(of_nemo_rl: Any, tmp_path: Path) -> None:
    spec = "{method: eagle3, model: org/fixed, num_speculative_tokens: 2}"
    result = of_nemo_rl(f"policy: {{generation: {{vllm_kwargs: {{speculative_config: {spec}}}}}}}")
    cfg = loaded(result, tmp_path)
    assert "draft" not in result.recipe["policy"]
    assert cfg.policy.generation.vllm_kwargs["speculative_config"]["model"] == "org/fixed"


def test_dapo_recipe_inherits_the_dapo_exemplar(of_nemo_rl: Any, tmp_path: Path) -> None:
    result = of_nemo_rl(
        "grpo: {use_dynamic_sampling: true, batch_multiplier: 3, use_leave_one_out_baseline: false,\n"
        "  reward_shaping: {enabled: true, overlong_buffer_length: 2048, max_response_length: 14336}}\n"
        "loss_fn: {reference_policy_kl_penalty: 0.0, ratio_clip_max: 0.28, ratio_clip_c: 10}\n"
        "policy: {max_total_sequence_length: 16384}\n"
        "data: {train: {dataset_name: DAPOMath17K}, validation: {dataset_name: DAPOMathAIME2024},\n"
        "  default: {prompt_file: null}}\n"
    )
    cfg = loaded(result, tmp_path)
    assert result.exemplar == "dapo_math_1B.yaml"
    assert "loss_fn" not in result.recipe
    # The exemplar has a file; their null has to survive.
    assert result.recipe["data"]["prompt_file"] is None
    assert (cfg.data.dataset_name, cfg.data.val_data_path) == ("DAPOMath17K", "BytedTsinghua-SIA/AIME-2024")
    assert (cfg.data.val_split, cfg.grpo.use_leave_one_out_baseline) == ("train", False)
    # What DAPO's exemplar changes and their file does not speak of is said, not hidden.
    assert "grpo.reward_scaling.target_min" in keys_of(result, "to decide")


def test_megatron_recipe_loses_its_backend_and_says_so(of_nemo_rl: Any, tmp_path: Path) -> None:
    result = of_nemo_rl(MEGATRON % "tensor_model_parallel_size: 4, optimizer: {lr: 3.0e-7}")
    cfg = loaded(result, tmp_path)
    assert (cfg.policy.megatron_cfg.enabled, cfg.policy.dtensor_cfg.tensor_parallel_size) == (False, 1)
    assert {remark.key: remark.value for remark in result.of("left out")} == {"policy.megatron_cfg*": "2 keys"}
    decide = {remark.key: (remark.value, remark.text) for remark in result.of("to decide")}
    assert decide["policy.megatron_cfg.optimizer.lr"] == (
        "3.0e-07",
        "Megatron's; if wanted, set policy.optimizer.kwargs.lr",
    )
    assert "policy.dtensor_cfg.tensor_parallel_size" in decide["policy.megatron_cfg.tensor_model_parallel_size"][1]
    assert "policy.optimizer" in decide
    assert "policy.megatron_cfg.pipeline_model_parallel_size" not in decide


def test_nested_data_becomes_flat(of_nemo_rl: Any, tmp_path: Path) -> None:
    result = of_nemo_rl(
        "data:\n"
        "  train: {data_path: train.jsonl, input_key: question, split: null, prompt_file: p.txt}\n"
        "  validation: {data_path: val.jsonl, input_key: query}\n"
        "  default: {dataset_name: ResponseDataset, input_key: input, output_key: solution, env_name: math}\n",
        "~data.train.dataset_name",
    )
    data = loaded(result, tmp_path).data
    assert (data.dataset_name, data.train_data_path, data.val_data_path) == (
        "ResponseDataset",
        "train.jsonl",
        "val.jsonl",
    )
    assert (data.input_key, data.output_key, data.prompt_file) == ("question", "solution", "p.txt")
    assert {"data.validation.input_key"} <= keys_of(result, "to decide")


@pytest.mark.parametrize(
    ("text", "key", "words"),
    [
        ("data: {train: [{dataset_name: a}, {dataset_name: b}]}", "data.train", "one data set of each kind"),
        ("data: {train: {dataset_name: DeepScaler}}", "data.train.dataset_name", "ResponseDataset"),
        ("data: {validation: {dataset_name: AIME2024}}", "data.validation.dataset_name", "val_data_path"),
        ("policy: {dtensor_cfg: {context_parallel_size: 2}}", "policy.dtensor_cfg.context_parallel_size", "must be 1"),
        ("loss_fn: {use_cispo: true}", "loss_fn.use_cispo", "another loss"),
        ("env: {math: {math_verify_impl: dapo_math_verify}}", "env.math.math_verify_impl", "rewards can differ"),
    ],
)
def test_what_has_no_counterpart_is_asked(of_nemo_rl: Any, text: str, key: str, words: str) -> None:
    result = of_nemo_rl(text)
    found = {remark.key: remark.text for remark in result.of("to decide")}
    assert words in found[key]
    result.check()


def test_values_are_translated(of_nemo_rl: Any, tmp_path: Path) -> None:
    result = of_nemo_rl(
        "grpo: {val_period: -1, adv_estimator: {normalize_rewards: false}}\n"
        "checkpointing: {metric_name: null}\n"
        "policy: {sequence_packing: {algorithm: modified_ffd}, optimizer: {name: torch.optim.SGD}, generation: "
        "{vllm_cfg: {kv_cache_dtype: fp8}, vllm_kwargs: {max_num_seqs: 32, moe_backend: triton}}}\n"
    )
    cfg = loaded(result, tmp_path)
    assert (cfg.grpo.val_period, cfg.grpo.normalize_rewards) == (0, False)
    assert cfg.policy.sequence_packing.algorithm == "modified_first_fit_decreasing"
    assert cfg.policy.generation.vllm_cfg.max_num_seqs == 32
    assert cfg.policy.generation.vllm_kwargs == {"kv_cache_dtype": "fp8", "moe_backend": "triton"}
    # Another class: the arguments that only the exemplar's class has must not reach it.
    assert set(cfg.policy.optimizer.kwargs) == {"lr", "betas", "eps"}


def test_an_unknown_key_is_reported_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(FIXTURES / "nemo_rl_base.yaml", tmp_path)
    path = tmp_path / "recipe.yaml"
    path.write_text("defaults: nemo_rl_base.yaml\ngrpo: {brand_new: 1}\nnew_section: {a: {b: 2}}\n", encoding="utf-8")
    assert config_migrate.main(["nemo-rl", str(path)]) == 1
    out, err = capsys.readouterr()
    assert "brand_new" not in out
    assert "Unknown, left out" in err
    assert "grpo.brand_new" in err
    assert "new_section.a.b" in err
    assert config_migrate.main(["nemo-rl", str(path), "--allow-unknown"]) == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("grpo: [1\n", "is not valid YAML"),
        ("defaults: missing.yaml\n", "no such file"),
        ("- 1\n", "must be a mapping"),
    ],
)
def test_unreadable_files_exit_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    assert config_migrate.main(["nemo-rl", str(path)]) == 2
    out, err = capsys.readouterr()
    assert (out, words in err) == ("", True)
    assert config_migrate.main(["verl-speco", str(tmp_path / "absent.yaml")]) == 2


def test_an_invalid_result_is_printed_and_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    override = "policy.generation.top_p=0.9"
    assert config_migrate.main(["nemo-rl", str(FIXTURES / "nemo_rl_base.yaml"), override]) == 2
    out, err = capsys.readouterr()
    assert "top_p: 0.9" in out
    assert "policy.generation.top_p: got 0.9" in err


@pytest.mark.parametrize("text", ["grpo.seed", "=1", "--seed=1", "a..b=1", "grpo.seed=[1"])
def test_a_bad_override_exits_with_2(text: str) -> None:
    path = str(FIXTURES / "nemo_rl_base.yaml")
    with pytest.raises(config_migrate.ConfigError):
        migrate(NEMO_RL, Path(path), [text])


def test_verl_configuration(tmp_path: Path) -> None:
    result = of_verl()
    cfg = loaded(result, tmp_path)
    assert (cfg.grpo.num_prompts_per_step, cfg.grpo.num_generations_per_prompt) == (64, 5)
    # 16 prompts of 5 samples.
    assert cfg.policy.train_global_batch_size == 80
    assert (cfg.loss_fn.ratio_clip_min, cfg.loss_fn.ratio_clip_max, cfg.loss_fn.ratio_clip_c) == (0.1, 0.28, 3.0)
    assert (cfg.loss_fn.reference_policy_kl_penalty, cfg.loss_fn.reference_policy_kl_type) == (0.001, "k3")
    assert (cfg.grpo.use_leave_one_out_baseline, cfg.grpo.normalize_rewards) == (False, True)
    assert (cfg.policy.max_total_sequence_length, cfg.policy.generation.max_new_tokens) == (1536, 1024)
    assert (cfg.policy.optimizer.kwargs["lr"], cfg.policy.scheduler, cfg.policy.max_grad_norm) == (1e-6, None, 0.5)
    assert cfg.policy.generation.top_k is None
    assert cfg.policy.generation.vllm_kwargs["mm_processor_cache_gb"] == 0
    assert (cfg.data.train_data_path, cfg.data.val_data_path) == ("train.parquet", "val.parquet")
    assert cfg.checkpointing.checkpoint_dir == "checkpoints/project/experiment"
    assert (cfg.checkpointing.keep_top_k, cfg.checkpointing.metric_name) == (2, None)
    assert (cfg.logger.wandb_enabled, cfg.logger.tensorboard_enabled) == (True, False)
    assert (cfg.cluster.num_nodes, cfg.cluster.gpus_per_node) == (2, 8)
    draft = cfg.policy.draft
    assert (draft.algo, draft.model_name, draft.train_every, draft.warmup_steps) == ("eagle3", "org/draft", 5, 7)
    assert (draft.optimizer.kwargs["lr"], draft.optimizer.kwargs["weight_decay"]) == (2e-5, 0.01)
    assert draft.ttt_steps == 5
    assert cfg.policy.generation.num_speculative_tokens == 3
    assert result.of("unknown") == []


@pytest.mark.parametrize(
    ("algo", "k", "expected"),
    [
        ("EAGLE1", 3, {"num_layers": 2, "hidden_loss_weight": 0.5, "token_loss_weight": 0.2, "feature_noise": 0.1}),
        ("EAGLE2", 3, {"algo": "eagle2", "feature_noise": 0.1}),
        ("PEAGLE", 3, {"num_layers": 4, "num_depths": 6, "mask_token_id": 11, "draft_vocab_size": 32000}),
        ("DFLASH", 4, {"block_size": 16, "loss_decay": 6.0, "num_layers": 2, "aux_layer_indices": (1, 5)}),
        # Null and missing keys of DSpark and Domino fall back to DFlash's.
        ("DSPARK", 4, {"block_size": 7, "num_anchors": 32, "mask_token_id": 9, "loss_decay": 6.0, "num_layers": 5}),
        ("DSPARK", 4, {"ce_loss_weight": 0.2, "l1_loss_weight": 0.45, "markov_rank": 128, "markov_head_type": "gated"}),
        ("DOMINO", 4, {"block_size": 12, "num_anchors": 512, "emb_dim": 128, "gru_hidden_dim": 512, "num_layers": 2}),
        ("DOMINO", 4, {"shift_label": False, "base_loss_weight": 0.5, "base_loss_steps": 2000}),
    ],
)
def test_settings_of_each_draft(tmp_path: Path, algo: str, k: int, expected: dict[str, Any]) -> None:
    result = drafter(f"speculative_algorithm={algo}")
    cfg = loaded(result, tmp_path)
    assert cfg.policy.draft.algo == algo.lower()
    assert {name: getattr(cfg.policy.draft, name) for name in expected} == expected
    assert cfg.policy.generation.num_speculative_tokens == k
    assert result.of("unknown") == []


def test_a_static_draft_and_collected_rollouts_have_no_training_settings(tmp_path: Path) -> None:
    static = loaded(drafter("enable_drafter_training=false"), tmp_path)
    assert (static.policy.draft.static, static.policy.draft.train_every) == (True, 1)
    result = drafter("training.mode=collect_only", "training.feature_store.path=store")
    cfg = loaded(result, tmp_path)
    assert (cfg.rollout_store.mode, cfg.rollout_store.dir) == ("collect_only", "store")
    assert {f"{TRAINING}.mode", f"{TRAINING}.feature_store.path"} <= keys_of(result, "changed")
    offline = loaded(drafter("training.mode=offline"), tmp_path)
    assert (offline.draft_run.source, offline.draft_run.max_num_steps, offline.policy.draft.seed) == (
        "rollouts",
        400,
        3,
    )


def test_no_draft_leaves_no_trace(tmp_path: Path) -> None:
    result = drafter("enable=false")
    cfg = loaded(result, tmp_path)
    assert not cfg.policy.draft_enabled
    assert "draft" not in result.recipe["policy"]
    assert "speculative_config" not in cfg.policy.generation.vllm_kwargs


def test_k_beyond_what_is_trained_is_asked_not_guessed() -> None:
    result = drafter("training.ttt_length=1")
    assert "ttt_steps" not in result.recipe["policy"]["draft"]
    assert f"{TRAINING}.ttt_length" in keys_of(result, "to decide")
    result.check()


def test_filtered_groups_are_dynamic_sampling(tmp_path: Path) -> None:
    result = of_verl(
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.max_num_gen_batches=8",
        "algorithm.filter_groups.metric=acc",
        "data.gen_batch_size=192",
        "reward.reward_kwargs.overlong_buffer_cfg.enable=true",
        f"{DRAFTER}.enable=false",
    )
    grpo = loaded(result, tmp_path).grpo
    assert result.exemplar == "dapo_math_1B.yaml"
    assert (grpo.dynamic_sampling_max_gen_batches, grpo.batch_multiplier) == (8, 3)
    shaping = grpo.reward_shaping
    assert (shaping.overlong_buffer_length, shaping.overlong_buffer_penalty, shaping.max_response_length) == (
        256,
        0.5,
        1000,
    )
    assert "reward.reward_kwargs.something_else" in keys_of(result, "to decide")


def test_hydra_groups_beside_the_file_are_read_and_others_named(tmp_path: Path) -> None:
    (tmp_path / "speco_base.yaml").write_text(f"{{{DRAFTER.split('.')[0]}: {{rollout: {{n: 7}}}}}}", encoding="utf-8")
    path = tmp_path / "config.yaml"
    text = "defaults: [ppo_trainer, speco_base, {override model_engine: veomni}, _self_]\ndata: {train_batch_size: 8}\n"
    path.write_text(text, encoding="utf-8")
    result = migrate(VERL_SPECO, path)
    assert result.recipe["grpo"] == {"num_prompts_per_step": 8, "num_generations_per_prompt": 7}
    named = {(remark.key, remark.value) for remark in result.of("to decide")}
    assert ("defaults", "ppo_trainer") in named
    # Keys that decide a run and are not in the file: the inherited value is named.
    assert ("actor_rollout_ref.actor.optim.lr", "absent") in named


def every_migration(project: Project) -> list[Migration]:
    """Migrations that reach every rule between them."""
    if project is NEMO_RL:
        base, switched = FIXTURES / "nemo_rl_base.yaml", ["policy.megatron_cfg.enabled=true", "policy.optimizer=null"]
        return [migrate(NEMO_RL, base, ["data.default=null"]), migrate(NEMO_RL, EVERY_RULE, switched)]
    found = [drafter(f"speculative_algorithm={algo}") for algo in ALGORITHMS]
    return [*found, drafter("training.mode=offline"), of_verl("actor_rollout_ref.actor.megatron={seed: 1}")]


def ident(rule: Rule) -> str:
    return rule.theirs[0]


@pytest.fixture(scope="module", params=[NEMO_RL, VERL_SPECO], ids=lambda project: project.name)
def reaching(request: pytest.FixtureRequest) -> tuple[Project, list[Migration]]:
    """A project, and migrations that reach every rule of it."""
    return request.param, every_migration(request.param)


def test_every_rule_is_reached(reaching: tuple[Project, list[Migration]]) -> None:
    project, results = reaching
    reached = {id(rule) for result in results for rule in result.rules}
    assert [ident(rule) for rule in project.rules if id(rule) not in reached] == []


@pytest.mark.parametrize("project", [NEMO_RL, VERL_SPECO], ids=lambda project: project.name)
def test_rules_write_keys_that_exist(project: Project) -> None:
    named = {key.removesuffix(".*") for rule in project.rules for key in rule.ours}
    keys = schema_keys()[0]
    assert sorted(key for key in named if not (exists(key) or any(name.startswith(f"{key}.") for name in keys))) == []
    assert [ours for ours in project.expected.values() if not exists(ours)] == []


def test_migrations_write_keys_that_exist(reaching: tuple[Project, list[Migration]]) -> None:
    for result in reaching[1]:
        written = [".".join(key) for key, _ in leaves(result.recipe)]
        assert written
        assert [key for key in written if not exists(key)] == []


def test_what_is_left_out_has_a_reason(reaching: tuple[Project, list[Migration]]) -> None:
    project, results = reaching
    for result in results:
        assert [remark for remark in result.remarks if remark.kind != "nothing" and not remark.text] == []
    silent = [rule for rule in project.rules if not (rule.ours or rule.read or rule.quiet or rule.says)]
    assert [ident(rule) for rule in silent] == []


def test_help_and_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert config_migrate.main(["--table", "nemo-rl"]) == 0
    assert capsys.readouterr().out.startswith("<!-- nemo-rl: made by")
    with pytest.raises(SystemExit) as stop:
        config_migrate.main(["nemo-rl"])
    assert stop.value.code == 2
