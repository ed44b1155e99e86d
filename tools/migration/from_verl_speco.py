"""Rules for configurations of verl-SpeCo (verl-project/verl-SpeCo on verl 0.8, Hydra)."""

from __future__ import annotations

from functools import partial
from typing import Any

from tools.migration.from_verl import ACTOR, MODEL, ROLLOUT, VERL_ROWS, VLLM
from tools.migration.rules import (
    NOTHING,
    Ask,
    Entry,
    Outcome,
    Project,
    Put,
    Row,
    Rule,
    Source,
    asked,
    is_on,
    left_out,
    moved,
    nothing_to_set,
)

DRAFTER = f"{ROLLOUT}.drafter"
TRAINING = f"{DRAFTER}.training"
SPEC = "policy.generation.vllm_kwargs.speculative_config"
K = f"{SPEC}.num_speculative_tokens"

EAGLE = ("eagle1", "eagle2", "eagle3", "peagle")
BLOCK = ("dflash", "dspark", "domino")
BLOCK_NAMES = {
    "block_size": "block_size",
    "num_anchors": "num_anchors",
    "loss_decay_gamma": "loss_decay",
    "mask_token_id": "mask_token_id",
}
SHAPE = ("block_size", "num_layers", "markov_rank", "markov_head_type", "emb_dim", "gru_hidden_dim", "num_depths")
BLOCK_LOSS = (
    "max_window",
    "loss_mode",
    "sampled_ce_negatives",
    "front_position_*",
    "hard_sample_ratio",
    "hidden_size",
    "l1_chunk_size",
    "debug_log*",
)

OFFLINE_PLUMBING = (
    "save_interval_steps",
    "save_final_checkpoint",
    "eval_interval_steps",
    "gradient_accumulation_steps",
    "nproc_per_node",
    "nnodes",
    "node_rank",
    "master_addr",
    "master_port",
    "standalone",
)
TRAINING_PLUMBING = (
    "skip_heavy_cleanup_after_drafter_training",
    "park_hccl_after_drafter_training",
    "save_full_drafter_checkpoint",
    "resume_trainer_state_from_checkpoint",
    "fsdp_config.*",
)

has_draft = is_on(f"{DRAFTER}.enable")


def algo_of(source: Source) -> str:
    """Return our name of the draft algorithm."""
    return str(source.get(f"{DRAFTER}.speculative_algorithm", "EAGLE3")).lower()


def trains_draft(source: Source) -> bool:
    """Tell whether the draft is trained in this run; only then may settings of its training be given here."""
    is_trained = source.get(f"{DRAFTER}.enable_drafter_training", True)
    return has_draft(source) and is_trained and source.get(f"{TRAINING}.mode") != "collect_only"


def is_offline(source: Source) -> bool:
    """Tell whether the draft is trained from stored features, without RL."""
    return source.get(f"{TRAINING}.mode") == "offline"


def _of_algo(*names: str) -> Any:
    return lambda source: has_draft(source) and algo_of(source) in names


def _static(entry: Entry) -> Any:
    return NOTHING if entry.value else True


def _algo(entry: Entry) -> Any:
    return str(entry.value).lower()


def _k_of_eagle(entry: Entry) -> Any:
    return entry.value if algo_of(entry.source) in EAGLE else NOTHING


def _k_of_blocks(entry: Entry) -> Any:
    is_read = algo_of(entry.source) in BLOCK or entry.source.get(f"{DRAFTER}.rollout.spec_steps") is None
    return entry.value if is_read else NOTHING


def _unroll(entry: Entry) -> Any:
    k = entry.source.get(f"{DRAFTER}.rollout.spec_steps")
    if isinstance(k, int) and entry.value < k:
        return Ask(f"less than K = {k}: a draft proposes at most policy.draft.ttt_steps tokens; its default stays")
    return entry.value


def _draft_schedule(entry: Entry) -> Any:
    style = entry.source.get(f"{TRAINING}.warmup_style") or entry.source.get(f"{TRAINING}.lr_scheduler_type")
    return None if style == "constant" else Ask("set policy.draft.scheduler: torch classes with their arguments")


def _mode(entry: Entry) -> Outcome:
    if entry.value == "collect_only":
        return Put({"rollout_store.mode": "collect_only"}, "rollouts are stored; features: true adds hidden states")
    if entry.value == "offline":
        return Put({"draft_run.source": "rollouts"}, "run it with examples/run_draft.py")
    return NOTHING if entry.value == "online" else Ask("modes here: see rollout_store.mode and draft_run.source")


def _store(entry: Entry) -> Outcome:
    return Put({"rollout_store.dir": entry.value}, "stores of verl-SpeCo are not read: record anew")


def _overrides(entry: Entry) -> Outcome:
    return Put({entry.key.replace(f"{DRAFTER}.vllm.speculative_config_overrides", SPEC): entry.value})


def _put(ours: str, entry: Entry) -> Put:
    is_loaded = entry.source.get(f"{DRAFTER}.model_path") is not None
    note = "shape of a new draft there: if the loaded draft has another, remove it" if is_loaded else ""
    return Put({f"policy.draft.{ours}": entry.value}, note if ours in SHAPE else "")


def _family(name: str, ours: str) -> Rule:
    """A setting that each block draft has; DSpark and Domino fall back to DFlash's where their own is null."""

    def read(entry: Entry) -> Outcome:
        algo, family = algo_of(entry.source), entry.name.split("_")[0]
        own = entry.source.get(f"{TRAINING}.{algo}_{name}")
        counts = family == algo or (family == "dflash" and algo in BLOCK and own is None)
        return _put(ours, entry) if counts and entry.value is not None else NOTHING

    return Rule(
        tuple(f"{TRAINING}.{family}_{name}" for family in BLOCK), (f"policy.draft.{ours}",), read, live=has_draft
    )


def _own(algo: tuple[str, ...], prefix: str, names: dict[str, str]) -> tuple[Rule, ...]:
    """Settings of one algorithm: their name behind the prefix, our name."""
    return tuple(
        Rule(
            (f"{TRAINING}.{prefix}_{name}",),
            (f"policy.draft.{ours}",),
            partial(_put, ours),
            off=(None,),
            live=_of_algo(*algo),
        )
        for name, ours in names.items()
    )


def _same_names(*names: str) -> dict[str, str]:
    return {name: name for name in names}


SPECO_ROWS = (
    Row("`drafter.enable`", "`policy.draft.enabled`", (moved(f"{DRAFTER}.enable", "policy.draft.enabled"),)),
    Row(
        "`drafter.enable_drafter_training: false`",
        "`policy.draft.static: true`",
        (Rule((f"{DRAFTER}.enable_drafter_training",), ("policy.draft.static",), _static, live=has_draft),),
    ),
    Row(
        "`drafter.speculative_algorithm: EAGLE3`",
        "`policy.draft.algo: eagle3` (also `eagle1`, `eagle2`, `peagle`, `dflash`, `dspark`, `domino`)",
        (Rule((f"{DRAFTER}.speculative_algorithm",), ("policy.draft.algo",), _algo, live=has_draft),),
    ),
    Row(
        "`drafter.model_path`",
        "`policy.draft.model_name`",
        (moved(f"{DRAFTER}.model_path", "policy.draft.model_name", live=has_draft),),
    ),
    Row(
        "`drafter.checkpoint_path`",
        "nothing to set: checkpoints hold the draft, and the same command resumes",
        (
            left_out(
                f"{DRAFTER}.checkpoint_path",
                says="checkpoints hold the draft, and the same command resumes",
                off=(None,),
                live=has_draft,
            ),
            nothing_to_set(f"{DRAFTER}.world_size"),
        ),
    ),
    Row(
        "`drafter.rollout.spec_steps` of EAGLE, `spec_verify_tokens` of block drafts",
        "`policy.generation.vllm_kwargs.speculative_config.num_speculative_tokens`",
        (
            Rule((f"{DRAFTER}.rollout.spec_steps",), (K,), _k_of_eagle, off=(None,), live=has_draft),
            Rule((f"{DRAFTER}.rollout.spec_verify_tokens",), (K,), _k_of_blocks, off=(None,), live=has_draft),
        ),
    ),
    Row(
        "`drafter.rollout.spec_topk`",
        "leave out: vLLM drafts a chain, options of trees are refused",
        (
            left_out(
                f"{DRAFTER}.rollout.spec_topk", says="vLLM drafts a chain, not a tree", off=(1, None), live=has_draft
            ),
            nothing_to_set(f"{DRAFTER}.rollout.cuda_graph_max_bs"),
        ),
    ),
    Row(
        "`drafter.vllm.allow_lossy_speculative_sampling`",
        "does not exist: rollouts are always exact",
        (
            left_out(
                f"{DRAFTER}.vllm.allow_lossy_speculative_sampling", says="rollouts are always exact", off=(False, None)
            ),
        ),
    ),
    Row(
        "`drafter.vllm.draft_tensor_parallel_size`, `speculative_config_overrides`",
        "the same keys of `speculative_config`",
        (
            moved(
                f"{DRAFTER}.vllm.draft_tensor_parallel_size",
                f"{SPEC}.draft_tensor_parallel_size",
                off=(None,),
                live=has_draft,
            ),
            Rule(
                (f"{DRAFTER}.vllm.speculative_config_overrides*",), (SPEC,), _overrides, off=({}, None), live=has_draft
            ),
            left_out(
                f"{DRAFTER}.vllm.max_model_len",
                f"{DRAFTER}.vllm.enforce_eager",
                says="follows from the engine's own settings",
                off=(None,),
                live=has_draft,
            ),
        ),
    ),
    Row(
        "`training.training_interval_steps`",
        "`policy.draft.train_every`",
        (moved(f"{TRAINING}.training_interval_steps", "policy.draft.train_every", live=trains_draft),),
    ),
    Row(
        "`training.publish_interval_steps`",
        "every refit sends policy and draft together",
        (
            left_out(
                f"{TRAINING}.publish_*",
                f"{TRAINING}.draft_update_*",
                says="every refit sends policy and draft together",
                off=(0, None),
                live=has_draft,
            ),
        ),
    ),
    Row(
        "`training.batch_size_per_gpu`, `train_batches_per_cycle`",
        "`policy.draft.train_global_batch_size`: a divisor of the policy's batch gives several updates per step",
        (
            asked(
                f"{TRAINING}.batch_size_per_gpu",
                f"{TRAINING}.train_batches_per_cycle",
                f"{TRAINING}.step",
                says="set policy.draft.train_global_batch_size: a divisor of the policy's gives several updates",
                live=trains_draft,
            ),
        ),
    ),
    Row(
        "`training.lr`, `lr_warmup_steps`, `lr_scheduler_type`",
        "`policy.draft.optimizer.kwargs.lr`, `warmup_steps`, `scheduler`",
        (
            moved(f"{TRAINING}.lr", "policy.draft.optimizer.kwargs.lr", live=trains_draft),
            moved(f"{TRAINING}.weight_decay", "policy.draft.optimizer.kwargs.weight_decay", live=trains_draft),
            moved(f"{TRAINING}.lr_warmup_steps", "policy.draft.warmup_steps", off=(None,), live=trains_draft),
            Rule((f"{TRAINING}.lr_scheduler_type",), ("policy.draft.scheduler",), _draft_schedule, live=trains_draft),
            nothing_to_set(f"{TRAINING}.lr_decay_steps", f"{TRAINING}.min_lr_ratio", f"{TRAINING}.warmup_style"),
        ),
    ),
    Row(
        "`training.ttt_length`",
        "`policy.draft.ttt_steps`",
        (Rule((f"{TRAINING}.ttt_length",), ("policy.draft.ttt_steps",), _unroll, live=_of_algo("eagle3")),),
    ),
    Row(
        "`training.mode: collect_only`, `feature_store.path`",
        "`rollout_store.mode: collect_only`, `rollout_store.dir`; `rollout_store.features` keeps the policy's states "
        "too",
        (
            Rule((f"{TRAINING}.mode",), ("rollout_store.mode", "draft_run.source"), _mode, live=has_draft),
            Rule((f"{TRAINING}.feature_store.path",), ("rollout_store.dir",), _store, off=(None,), live=has_draft),
            nothing_to_set(f"{TRAINING}.feature_store.*"),
        ),
    ),
    Row(
        "`training.mode: offline`",
        "`examples/run_draft.py` with `draft_run.source: rollouts`",
        (
            moved(f"{TRAINING}.max_steps", "draft_run.max_num_steps", live=is_offline),
            moved(f"{TRAINING}.seed", "policy.draft.seed", live=is_offline),
            nothing_to_set(*(f"{TRAINING}.{name}" for name in OFFLINE_PLUMBING)),
        ),
    ),
    Row(
        "`training.collect_hidden_states_from_*`, `hidden_state_window_*`, `collection_sample_rate`",
        "nothing to set: the states come from the training forward of the policy, all of them",
        (
            left_out(
                f"{TRAINING}.collect_*",
                f"{TRAINING}.hidden_state_*",
                f"{TRAINING}.collection_sample_rate",
                f"{TRAINING}.max_collect_*",
                f"{TRAINING}.old_logprob_hidden_capture_impl",
                f"{TRAINING}.allow_sglang_prenorm_last_layer",
                f"{TRAINING}.max_seq_len",
                f"{TRAINING}.*data_buffer*",
                f"{TRAINING}.current_max_samples",
                f"{TRAINING}.sample_last_n_steps",
                says="nothing to set: the states come from the training forward of the policy, all of them",
                live=has_draft,
            ),
            nothing_to_set(*(f"{TRAINING}.{name}" for name in TRAINING_PLUMBING)),
        ),
    ),
    Row(
        "`training.use_logits`, `logits_topk`, `logits_*`",
        "nothing to set: the teacher is the policy's whole distribution",
        (
            left_out(
                f"{TRAINING}.use_logits",
                f"{TRAINING}.logits_*",
                f"{TRAINING}.target_lm_head_row_restricted_sync",
                says="nothing to set: the teacher is the policy's whole distribution",
                live=has_draft,
            ),
        ),
    ),
    Row(
        "`training.vocab_mapping_path`",
        "`policy.draft.vocab_file`, made by `tools/draft_vocab.py`",
        (
            asked(
                f"{TRAINING}.vocab_mapping_path",
                says="another format: make policy.draft.vocab_file with tools/draft_vocab.py",
                off=(None,),
                live=has_draft,
            ),
        ),
    ),
    Row(
        "`training.dflash_block_size`, `dflash_num_anchors`, `dflash_loss_decay_gamma`, `dflash_mask_token_id`",
        "`policy.draft.block_size`, `num_anchors`, `loss_decay`, `mask_token_id`; the same for `dspark_*` and "
        "`domino_*`",
        tuple(_family(name, ours) for name, ours in BLOCK_NAMES.items()),
    ),
    Row(
        "`training.dflash_num_hidden_layers`, `peagle_num_draft_layers` and so on",
        "`policy.draft.num_layers`",
        (
            _family("num_hidden_layers", "num_layers"),
            *_own(("peagle",), "peagle", {"num_draft_layers": "num_layers"}),
            *_own(("eagle1", "eagle2"), "eagle1", {"num_hidden_layers": "num_layers"}),
        ),
    ),
    Row(
        "`training.dflash_target_layer_ids`",
        "`policy.draft.aux_layer_indices`, counted alike",
        (
            _family("target_layer_ids", "aux_layer_indices"),
            *(
                left_out(
                    f"{TRAINING}.{name}",
                    says="policy.draft.aux_layer_indices lists the layers; the algorithm has a usual choice",
                    off=(None,),
                    live=_of_algo(algo),
                )
                for algo, name in (
                    ("dflash", "dflash_num_target_layers"),
                    ("dspark", "dspark_num_target_layers"),
                    ("domino", "domino_num_target_layers"),
                    ("peagle", "peagle_num_aux_hidden_states"),
                )
            ),
        ),
    ),
    Row(
        "`training.dspark_ce_loss_alpha`, `dspark_l1_loss_alpha`, `dspark_confidence_loss_alpha`",
        "`policy.draft.ce_loss_weight`, `l1_loss_weight`, `confidence_loss_weight`",
        _own(
            ("dspark",),
            "dspark",
            {
                "ce_loss_alpha": "ce_loss_weight",
                "l1_loss_alpha": "l1_loss_weight",
                "confidence_loss_alpha": "confidence_loss_weight",
            },
        ),
    ),
    Row(
        "`training.dspark_markov_rank`, `dspark_markov_head_type`, `dspark_confidence_head_with_markov`",
        "`policy.draft.markov_rank`, `markov_head_type`, `confidence_head_with_markov`",
        (
            *_own(("dspark",), "dspark", _same_names("markov_rank", "markov_head_type", "confidence_head_with_markov")),
            asked(
                f"{TRAINING}.dspark_confidence_head_alpha",
                says="set policy.draft.enable_confidence_head and confidence_loss_weight",
                off=(0, 0.0, None),
                live=_of_algo("dspark"),
            ),
        ),
    ),
    Row(
        "`training.domino_emb_dim`, `domino_gru_hidden_dim`, `domino_pure_draft_prefix_len`, `domino_shift_label`",
        "the same names without `domino_`",
        _own(("domino",), "domino", _same_names("emb_dim", "gru_hidden_dim", "pure_draft_prefix_len", "shift_label")),
    ),
    Row(
        "`training.domino_lambda_base_start`, `domino_lambda_base_decay_steps`",
        "`policy.draft.base_loss_weight`, `base_loss_steps`",
        _own(
            ("domino",),
            "domino",
            {"lambda_base_start": "base_loss_weight", "lambda_base_decay_steps": "base_loss_steps"},
        ),
    ),
    Row(
        "`training.peagle_num_depths`, `peagle_down_sample_ratio`, `peagle_down_sample_ratio_min`, "
        "`peagle_mask_token_id`",
        "the same names without `peagle_`",
        _own(
            ("peagle",),
            "peagle",
            _same_names(
                "num_depths",
                "down_sample_ratio",
                "down_sample_ratio_min",
                "mask_token_id",
                "draft_vocab_size",
                "fc_norm",
            ),
        ),
    ),
    Row(
        "`training.eagle1_hidden_loss_weight`, `eagle1_token_loss_weight`, `eagle1_feature_noise`",
        "the same names without `eagle1_`",
        _own(("eagle1", "eagle2"), "eagle1", _same_names("hidden_loss_weight", "token_loss_weight", "feature_noise")),
    ),
    Row(
        "`training.dflash_max_window`, `dflash_loss_mode`, `dflash_front_position_*`, `dflash_hard_sample_ratio` and "
        "so on",
        "nothing to set: anchors are drawn from whole responses, and the loss is over the whole vocabulary",
        tuple(
            left_out(
                *(f"{TRAINING}.{algo}_{name}" for name in BLOCK_LOSS),
                says="nothing to set: anchors are drawn from whole responses, the loss is over all of the vocabulary",
                off=(None, 0, 0.0, 1.0, "full_vocab", False),
                live=_of_algo(algo),
            )
            for algo in BLOCK
        ),
    ),
    Row(
        "an exported draft",
        "loads as `policy.draft.model_name`; a `d2t` that holds ids instead of offsets is refused, "
        "`tools/draft_convert.py --repair-d2t` mends it",
    ),
)

VERL_SPECO = Project(
    name="verl-speco",
    title="verl-SpeCo",
    rows=VERL_ROWS + SPECO_ROWS,
    expected={
        f"{MODEL}.path": "policy.model_name",
        f"{ROLLOUT}.n": "grpo.num_generations_per_prompt",
        f"{ROLLOUT}.temperature": "policy.generation.temperature",
        f"{ROLLOUT}.tensor_model_parallel_size": f"{VLLM}.tensor_parallel_size",
        "data.train_batch_size": "grpo.num_prompts_per_step",
        f"{ACTOR}.ppo_mini_batch_size": "policy.train_global_batch_size",
        f"{ACTOR}.use_kl_loss": "loss_fn.reference_policy_kl_penalty",
        f"{ACTOR}.clip_ratio_c": "loss_fn.ratio_clip_c",
        f"{ACTOR}.optim.lr": "policy.optimizer.kwargs.lr",
        f"{ACTOR}.optim.lr_scheduler_type": "policy.scheduler",
        "algorithm.adv_estimator": "grpo.use_leave_one_out_baseline",
        "data.max_prompt_length": "data.max_input_seq_length",
        "data.max_response_length": "policy.generation.max_new_tokens",
        "data.train_files": "data.dataset_name",
        "trainer.n_gpus_per_node": "cluster.gpus_per_node",
        "trainer.total_epochs": "grpo.max_num_epochs",
    },
    has_defaults_of_hydra=True,
)
