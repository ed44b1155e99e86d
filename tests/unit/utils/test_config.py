"""The loader: inheritance, overrides, interpolation, messages."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.errors import ConfigError
from nemo_rl.models.automodel.draft.config import DefaultDraftConfig, DraftConfig, DraftConfigBase
from nemo_rl.utils.config import build_master_config, load_config, load_tree, to_dict
from nemo_rl.utils.config_schema import discriminator_values, sibling_classes

MINIMAL: dict[str, Any] = {"policy": {"model_name": "some/model"}}


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


@pytest.fixture
def base_file(tmp_path: Path) -> Path:
    return write(
        tmp_path / "base.yaml",
        """
        policy:
          model_name: some/model
          train_micro_batch_size: 2
          optimizer: {name: torch.optim.AdamW, kwargs: {lr: 1e-3, weight_decay: 0.1}}
          scheduler:
            - {name: torch.optim.lr_scheduler.ConstantLR, kwargs: {factor: 1.0}}
        """,
    )


def problem(tree: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        build_master_config(tree)
    return str(caught.value)


# --- inheritance


def test_child_wins_and_mappings_merge(base_file: Path) -> None:
    child = write(base_file.parent / "child.yaml", "defaults: base.yaml\npolicy: {optimizer: {kwargs: {lr: 2e-3}}}\n")
    assert load_tree(child)["policy"]["optimizer"]["kwargs"] == {"lr": 2e-3, "weight_decay": 0.1}


def test_lists_are_replaced_not_merged(base_file: Path) -> None:
    child = write(base_file.parent / "child.yaml", "defaults: base.yaml\npolicy: {scheduler: null}\n")
    assert load_tree(child)["policy"]["scheduler"] is None


def test_defaults_are_relative_to_the_file_that_names_them(base_file: Path) -> None:
    middle = write(base_file.parent / "a" / "middle.yaml", "defaults: ../base.yaml\ngrpo: {seed: 1}\n")
    leaf = write(base_file.parent / "a" / "b" / "leaf.yaml", "defaults: ../middle.yaml\ngrpo: {val_period: 7}\n")
    assert middle.is_file()
    cfg = build_master_config(load_config(leaf))
    assert (cfg.grpo.seed, cfg.grpo.val_period, cfg.policy.train_micro_batch_size) == (1, 7, 2)


def test_later_parent_wins_over_earlier(base_file: Path) -> None:
    write(base_file.parent / "other.yaml", "policy: {train_micro_batch_size: 8}\n")
    child = write(base_file.parent / "child.yaml", "defaults: [base.yaml, other.yaml]\n")
    assert load_tree(child)["policy"]["train_micro_batch_size"] == 8
    child = write(base_file.parent / "child.yaml", "defaults: [other.yaml, base.yaml]\n")
    assert load_tree(child)["policy"]["train_micro_batch_size"] == 2


def test_override_marker_replaces_the_parents_mapping(base_file: Path) -> None:
    child = write(
        base_file.parent / "child.yaml",
        "defaults: base.yaml\npolicy: {optimizer: {name: torch.optim.SGD, kwargs: {_override_: true, lr: 0.1}}}\n",
    )
    assert load_tree(child)["policy"]["optimizer"] == {"name": "torch.optim.SGD", "kwargs": {"lr": 0.1}}


def test_inheritance_cycle_is_named(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml", "defaults: b.yaml\n")
    write(tmp_path / "b.yaml", "defaults: a.yaml\n")
    with pytest.raises(ConfigError, match=r"inherits from itself .*a\.yaml -> .*b\.yaml -> .*a\.yaml"):
        load_tree(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("defaults: absent.yaml\n", r"defaults: got '.*absent.yaml'; no such file", id="parent-missing"),
        pytest.param("defaults: 3\n", r"defaults: got 3; must be a path or a list of paths", id="defaults-type"),
        pytest.param("a: [1\n", "is not valid YAML", id="not-yaml"),
        pytest.param("a: 1\na: 2\n", "is not valid YAML", id="key-twice"),
        pytest.param("- 1\n", "must be a mapping", id="list"),
    ],
)
def test_malformed_file(tmp_path: Path, text: str, message: str) -> None:
    file = write(tmp_path / "file.yaml", text)
    with pytest.raises(ConfigError, match=message):
        load_config(file)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing.yaml'; no such file"):
        load_config(tmp_path / "nothing.yaml")


# --- interpolation


def test_default_that_follows_another_key() -> None:
    cfg = build_master_config(
        {"policy": {"model_name": "m", "max_total_sequence_length": 96, "train_micro_batch_size": 3}}
    )
    assert cfg.policy.generation.vllm_cfg.max_model_len == 96
    assert cfg.policy.dynamic_batching.train_mb_tokens == 96 * 3
    assert cfg.policy.tokenizer.name == "m"
    assert cfg.grpo.reward_shaping.max_response_length == 96


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("${mul:6,7}", 42),
        ("${mul:2,3,4}", 24),
        ("${add:40,2}", 42),
        ("${sub:50,8}", 42),
        ("${floordiv:85,2}", 42),
        ("${max:1,${min:42,50}}", 42),
        ("${mul:${grpo.num_prompts_per_step},2}", 64),
    ],
)
def test_functions(expression: str, value: int) -> None:
    assert build_master_config(MINIMAL | {"grpo": {"seed": expression}}).grpo.seed == value


def test_division_gives_a_float() -> None:
    assert build_master_config(MINIMAL | {"loss_fn": {"ratio_clip_max": "${div:1,4}"}}).loss_fn.ratio_clip_max == 0.25


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        pytest.param("${grpo.sed}", r"grpo\.seed: cannot be resolved: .*'grpo\.sed' not found", id="missing-key"),
        pytest.param("${nothing:1}", r"grpo\.seed: cannot be resolved: Unsupported interpolation type", id="function"),
        pytest.param("${grpo.seed}", r"grpo\.seed: cannot be resolved: Recursive", id="itself"),
        pytest.param("${div:1,0}", r"cannot be resolved: .*division by zero", id="zero"),
    ],
)
def test_interpolation_that_cannot_be_resolved(expression: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_master_config(MINIMAL | {"grpo": {"seed": expression}})


def test_defaults_are_not_marked_as_given(base_file: Path) -> None:
    file = write(base_file.parent / "child.yaml", "defaults: base.yaml\npolicy: {draft: {ttt_steps: 3}}\n")
    assert build_master_config(load_config(file)).policy.draft.model_fields_set == {"algo", "ttt_steps"}


def test_dump_builds_an_equal_configuration() -> None:
    cfg = build_master_config({"policy": {"model_name": "m", "scheduler": None}, "grpo": {"seed": 3}})
    assert build_master_config(to_dict(cfg)) == cfg
    assert to_dict(cfg)["policy"]["dtensor_cfg"]["_v2"] is True


# --- overrides


@pytest.mark.parametrize(
    ("override", "keys", "value"),
    [
        pytest.param("grpo.seed=7", "grpo.seed", 7, id="int"),
        pytest.param("policy.optimizer.kwargs.lr=1e-4", "policy.optimizer.kwargs.lr", 1e-4, id="exponent"),
        pytest.param("policy.scheduler=null", "policy.scheduler", None, id="null"),
        pytest.param(
            "policy.generation.stop_strings=[a, 'b']", "policy.generation.stop_strings", ["a", "b"], id="list"
        ),
        pytest.param("data.reasoning_gym={task: gcd}", "data.reasoning_gym", {"task": "gcd"}, id="mapping"),
        pytest.param("data.reasoning_gym.task=gcd", "data.reasoning_gym", {"task": "gcd"}, id="into-null-section"),
        pytest.param("logger.log_dir=a=b", "logger.log_dir", "a=b", id="equals-sign"),
        pytest.param("policy.scheduler.0.kwargs.factor=0.5", "policy.scheduler.0.kwargs.factor", 0.5, id="list-item"),
        pytest.param(
            "++policy.generation.vllm_kwargs.speculative_config.num_speculative_tokens=3",
            "policy.generation.vllm_kwargs.speculative_config.num_speculative_tokens",
            3,
            id="add-to-free-form",
        ),
    ],
)
def test_override(base_file: Path, override: str, keys: str, value: Any) -> None:
    node: Any = load_config(base_file, [override])
    for key in keys.split("."):
        node = node[int(key)] if isinstance(node, list) else node[key]
    assert node == value


def test_override_inside_a_default_block_keeps_the_rest_of_it(tmp_path: Path) -> None:
    file = write(tmp_path / "f.yaml", "policy: {model_name: m}\n")
    cfg = build_master_config(load_config(file, ["policy.optimizer.kwargs.lr=1.0e-4"]))
    assert cfg.policy.optimizer.kwargs["lr"] == 1e-4
    assert cfg.policy.optimizer.kwargs["betas"] == [0.9, 0.999]


def test_overrides_apply_before_interpolation(base_file: Path) -> None:
    cfg = build_master_config(load_config(base_file, ["policy.max_total_sequence_length=77", "grpo.seed=${sub:80,3}"]))
    assert cfg.policy.generation.max_new_tokens == 77
    assert cfg.grpo.seed == 77


def test_delete_returns_to_the_default(base_file: Path) -> None:
    cfg = build_master_config(load_config(base_file, ["~policy.train_micro_batch_size"]))
    assert cfg.policy.train_micro_batch_size == 4
    cfg = build_master_config(load_config(base_file, ["~policy.optimizer.kwargs.weight_decay"]))
    assert cfg.policy.optimizer.kwargs == {"lr": 1e-3}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        pytest.param("grpo.max_num_step=3", r"nearest valid name is grpo\.max_num_steps", id="misspelt"),
        pytest.param("gpro.seed=3", r"gpro: .*nearest valid name is grpo\.", id="misspelt-section"),
        pytest.param("++grpo.foo=3", r"grpo\.foo: got an unknown key", id="add-to-closed-section"),
        pytest.param("policy.generation.vllm_kwargs.x=3", r"Write \+\+policy.generation.vllm_kwargs.x", id="add"),
        pytest.param("grpo.seed.x=3", r"grpo\.seed\.x: got an unknown key", id="below-a-number"),
        pytest.param("policy.scheduler.9.kwargs=3", r"policy\.scheduler\.9: got an unknown key", id="no-such-item"),
        pytest.param("grpo.seed", r"must be key=value", id="no-value"),
        pytest.param("--grpo.seed=3", r"must be key=value", id="dashes"),
        pytest.param("grpo.seed=[1", r"is not valid YAML", id="bad-value"),
        pytest.param("~grpo.sed", r"not set; nothing to delete", id="delete-unknown"),
    ],
)
def test_override_that_cannot_apply(base_file: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_master_config(load_config(base_file, [override]))


# --- messages


def test_unknown_key_suggests_the_nearest_name() -> None:
    text = problem({"policy": {"model_name": "m", "draft": {"los_weight": 1.0}}})
    assert text.startswith(
        "policy.draft.los_weight: got an unknown key; the nearest valid name is policy.draft.loss_weight"
    )


def test_unknown_key_without_a_near_name_lists_the_valid_ones() -> None:
    text = problem({"policy": {"model_name": "m"}, "cluster": {"zzz": 1}})
    assert "cluster.zzz" in text
    assert "device, gpus_per_node, num_nodes, object_store_memory" in text


@pytest.mark.parametrize(
    ("tree", "parts"),
    [
        pytest.param({"grpo": {"seed": "seven"}}, ["grpo.seed: got 'seven'", "must be an integer"], id="string"),
        pytest.param({"grpo": {"seed": "7"}}, ["grpo.seed: got '7'", "must be an integer"], id="quoted-number"),
        pytest.param({"grpo": {"seed": True}}, ["grpo.seed: got True", "must be an integer"], id="bool-for-int"),
        pytest.param({"grpo": {"seed": 1.5}}, ["grpo.seed: got 1.5", "must be an integer"], id="float-for-int"),
        pytest.param({"grpo": {"normalize_rewards": 1}}, ["got 1", "must be true or false"], id="int-for-bool"),
        pytest.param({"grpo": {"num_prompts_per_step": 0}}, ["got 0", "must be > 0"], id="below-bound"),
        pytest.param({"grpo": 3}, ["grpo: got 3", "must be a mapping"], id="section-is-number"),
        pytest.param({"cluster": {"device": "tpu"}}, ["got 'tpu'", "'auto', 'cuda' or 'cpu'"], id="literal"),
        pytest.param({"logger": {"log_dir": ""}}, ["logger.log_dir: got ''", "must not be empty"], id="empty"),
        pytest.param({"checkpointing": {"metric_name": "accuracy"}}, ["got 'accuracy'", "must match"], id="pattern"),
    ],
)
def test_wrong_value_names_key_value_and_what_is_allowed(tree: dict[str, Any], parts: list[str]) -> None:
    text = problem(MINIMAL | tree)
    assert all(part in text for part in parts), text


def test_wrong_value_says_what_the_key_is() -> None:
    assert "num_prompts_per_step is: Prompts per step." in problem(MINIMAL | {"grpo": {"num_prompts_per_step": -1}})


def test_all_problems_are_reported_at_once() -> None:
    text = problem({"policy": {"model_name": "m", "max_grad_norm": -1.0}, "grpo": {"seed": "x", "sed": 1}})
    assert text.startswith("3 problems in the configuration:\n")
    assert all(f"  - {key}: got" in text for key in ("grpo.seed", "grpo.sed", "policy.max_grad_norm"))


def test_missing_required_key_is_named_although_others_interpolate_it() -> None:
    assert problem({}).startswith("policy.model_name: got nothing; is required.")


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        ([], "at least one scheduler class"),
        ([{"kwargs": {}}], "policy.scheduler.0: got .*must have either `name`"),
        ([{"name": "a.B"}, {"name": "a.C"}], "2 schedules need 1 increasing milestones, got \\[\\]"),
        ([{"name": "a.B"}, {"name": "a.C"}, {"name": "a.D"}, {"milestones": [5, 3]}], "2 increasing milestones"),
        ([{"name": "NotADottedPath"}], "policy.scheduler.0.name: got 'NotADottedPath'"),
    ],
)
def test_scheduler_list(scheduler: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_master_config({"policy": {"model_name": "m", "scheduler": scheduler}})


def test_configuration_is_frozen() -> None:
    cfg = build_master_config(MINIMAL)
    with pytest.raises(ValueError, match="frozen"):
        cfg.grpo.seed = 3


DRAFT_CLASSES = sibling_classes(DraftConfig)


@pytest.mark.parametrize("cls", DRAFT_CLASSES, ids=lambda cls: cls.__name__)
def test_algo_chooses_the_class_of_the_draft(cls: type[DraftConfigBase]) -> None:
    for algo in discriminator_values(cls):
        draft = build_master_config({"policy": {"model_name": "m", "draft": {"algo": algo}}}).policy.draft
        assert type(draft) is cls
        assert draft.algo == algo


def test_a_draft_without_algo_is_the_default_one() -> None:
    assert type(build_master_config({"policy": {"model_name": "m", "draft": {"seed": 3}}}).policy.draft) is (
        DefaultDraftConfig
    )
    assert "policy.draft.algo: got 'othr'; must be one of 'eagle3', " in problem(
        {"policy": {"model_name": "m", "draft": {"algo": "othr"}}}
    )


@pytest.mark.parametrize("cls", DRAFT_CLASSES, ids=lambda cls: cls.__name__)
def test_an_option_of_another_algorithm_names_its_owners(cls: type[DraftConfigBase]) -> None:
    """Every option of every algorithm, given to every other one that lacks it."""
    foreign = {key for other in DRAFT_CLASSES for key in other.model_fields} - cls.model_fields.keys()
    assert foreign
    algo = discriminator_values(cls)[0]
    text = problem({"policy": {"model_name": "m", "draft": {"algo": algo, **dict.fromkeys(foreign, 1)}}})
    lines = {line.split(":")[0].split(".")[-1]: line for line in text.splitlines() if "got an option" in line}
    assert lines.keys() == foreign
    for key, line in lines.items():
        assert f"{key}: got an option of another algo; policy.draft.algo is '{algo}', and {key} belongs to" in line
        named = set(re.findall(r"'(\w+)'", line.split("belongs to")[1].split(".")[0]))
        owners = [other for other in DRAFT_CLASSES if key in other.model_fields]
        assert named == {value for other in owners for value in discriminator_values(other)}
        assert "Remove the key, or set policy.draft.algo" in line


def test_an_option_of_another_algorithm_on_the_command_line(base_file: Path) -> None:
    with pytest.raises(ConfigError, match="ttt_steps belongs to 'eagle3'"):
        load_config(base_file, ["policy.draft.ttt_steps=3", "policy.draft.algo=peagle"])
    with pytest.raises(ConfigError, match="num_depths belongs to 'peagle'"):
        load_config(base_file, ["policy.draft.num_depths=3"])


def test_the_algorithm_may_stand_behind_its_options(base_file: Path) -> None:
    tree = load_config(base_file, ["policy.draft.num_depths=3", "policy.draft.algo=peagle"])
    assert build_master_config(tree).policy.draft.num_depths == 3


def test_a_misspelt_option_is_no_option_of_another_algorithm() -> None:
    text = problem({"policy": {"model_name": "m", "draft": {"algo": "peagle", "num_depth": 3}}})
    assert text.startswith("policy.draft.num_depth: got an unknown key; the nearest valid name is ")


@pytest.mark.parametrize(
    "key", ["total_token", "total_tokens", "depth", "top_k", "eagle_topk", "threshold", "tree_choices"]
)
@pytest.mark.parametrize("algo", ["eagle2", "eagle3", "dflash"])
def test_options_of_a_draft_tree_are_refused_with_the_reason(key: str, algo: str) -> None:
    text = problem({"policy": {"model_name": "m", "draft": {"algo": algo, key: 4}}})
    assert text.startswith(f"policy.draft.{key}: got an option that does not exist here; must be absent: the engine")
    assert "no draft tree" in text
    assert "Remove the key" in text


def test_a_refused_key_is_no_field_of_any_section() -> None:
    """A pattern that matches a field would only hide that the field exists."""
    fields = {key for cls in DRAFT_CLASSES for key in cls.model_fields}
    assert {key for key in fields if DraftConfigBase.reason_to_refuse(key)} == set()
