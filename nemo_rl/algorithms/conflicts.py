"""What must agree between sections of the configuration; needs no file and no device.

Each function returns complete messages (key, got, allowed, remedy), so that one run reports all conflicts at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

from nemo_rl.models.generation.vllm.speculative import baseline_problems, option_problems, refused_problems

if TYPE_CHECKING:
    from nemo_rl.algorithms.config import MasterConfig

_DRAFT_BATCH = "policy.draft.train_global_batch_size"

DRAFT_TRAINING_KEYS = (
    "train_global_batch_size",
    "train_every",
    "warmup_steps",
    "freeze",
    "max_grad_norm",
    "optimizer",
    "scheduler",
)
"""Keys of `policy.draft` that only the training of a draft reads."""


def find_conflicts(cfg: MasterConfig) -> list[str]:
    """Compare the sections of a configuration whose fields are valid each on its own.

    Args:
        cfg: The configuration.

    Returns:
        One message per conflict; empty = none.
    """
    return [
        *_grpo_conflicts(cfg),
        *_loss_conflicts(cfg),
        *_checkpointing_conflicts(cfg),
        *_policy_conflicts(cfg),
        *_generation_conflicts(cfg),
        *_draft_conflicts(cfg),
        *_rollout_store_conflicts(cfg),
        *_speculation_conflicts(cfg),
        *_data_conflicts(cfg),
    ]


def draft_run_conflicts(cfg: MasterConfig) -> list[str]:
    """Check what a run that trains the draft alone needs beyond a valid configuration.

    Args:
        cfg: The configuration.

    Returns:
        One message per conflict; empty = none.
    """
    draft, run, store = cfg.policy.draft, cfg.draft_run, cfg.rollout_store
    nothing = "this command trains the draft and nothing else, so there is nothing to train."
    if not draft.enabled:
        return [f"policy.draft.enabled: got false; {nothing} Set it to true."]
    found: list[str] = []
    if draft.static:
        found.append(f"policy.draft.static: got true; {nothing} Set it to false.")
    if draft.loss_weight == 0:
        found.append(f"policy.draft.loss_weight: got 0; {nothing} Set it to 1.")
    if draft.restart:
        found.append(
            "policy.draft.restart: got true; there is nothing but the draft to continue. Choose another "
            "checkpointing.checkpoint_dir to start anew."
        )
    if store.mode != "off":
        found.append(
            f"rollout_store.mode: got {store.mode!r}; this command reads recorded rollouts (draft_run.source: "
            "rollouts) and records none. Set it to off."
        )
    if cfg.draft_run_step_size % cfg.draft_run_batch_size:
        key = "policy.train_global_batch_size" if draft.train_global_batch_size is None else _DRAFT_BATCH
        found.append(
            f"{key}: got {cfg.draft_run_batch_size}; must divide draft_run.num_prompts_per_step x "
            f"draft_run.num_generations_per_prompt ({run.num_prompts_per_step} x {run.num_generations_per_prompt} = "
            f"{cfg.draft_run_step_size}). Set {_DRAFT_BATCH} to a divisor."
        )
    return found


def _grpo_conflicts(cfg: MasterConfig) -> list[str]:
    grpo = cfg.grpo
    found: list[str] = []
    if grpo.num_generations_per_prompt < 2 and grpo.use_leave_one_out_baseline:
        found.append(
            "grpo.num_generations_per_prompt: got 1; must be >= 2 with grpo.use_leave_one_out_baseline: true. "
            "Raise it, or set the baseline to false."
        )
    if grpo.num_generations_per_prompt < 2 and grpo.use_dynamic_sampling:
        found.append(
            "grpo.use_dynamic_sampling: got true with grpo.num_generations_per_prompt: 1; a single response never "
            "differs from its group. Use at least 2 responses per prompt."
        )
    if (grpo.stop_at_validation_metric is None) != (grpo.stop_at_validation_threshold is None):
        found.append(
            f"grpo.stop_at_validation_threshold: got {_show(grpo.stop_at_validation_threshold)} with "
            f"grpo.stop_at_validation_metric: {_show(grpo.stop_at_validation_metric)}; set both or neither."
        )
    low, high = grpo.advantage_clip_low, grpo.advantage_clip_high
    if low is not None and high is not None and low >= high:
        found.append(f"grpo.advantage_clip_low: got {low}; must be below grpo.advantage_clip_high ({high}). Swap them.")
    scaling = grpo.reward_scaling
    if scaling.enabled and scaling.source_min >= scaling.source_max:
        found.append(
            f"grpo.reward_scaling.source_min: got {scaling.source_min}; must be below source_max "
            f"({scaling.source_max}). Set the range of rewards that the environment gives."
        )
    shaping = grpo.reward_shaping
    if shaping.enabled and shaping.overlong_buffer_length > shaping.max_response_length:
        found.append(
            f"grpo.reward_shaping.overlong_buffer_length: got {shaping.overlong_buffer_length}; must be at most "
            f"grpo.reward_shaping.max_response_length ({shaping.max_response_length}). Shorten the buffer."
        )
    return found


def _loss_conflicts(cfg: MasterConfig) -> list[str]:
    loss = cfg.loss_fn
    found: list[str] = []
    if loss.truncated_importance_sampling_ratio is not None and not loss.use_importance_sampling_correction:
        found.append(
            f"loss_fn.truncated_importance_sampling_ratio: got {loss.truncated_importance_sampling_ratio} with "
            "loss_fn.use_importance_sampling_correction: false; it would change nothing. "
            "Switch the correction on, or use null."
        )
    if loss.force_on_policy_ratio and cfg.policy.train_global_batch_size != cfg.rollout_batch_size:
        found.append(
            f"loss_fn.force_on_policy_ratio: got true with policy.train_global_batch_size: "
            f"{cfg.policy.train_global_batch_size}; a ratio of 1 holds only for one optimizer step per rollout batch. "
            f"Set policy.train_global_batch_size to {cfg.rollout_batch_size}."
        )
    return found


def _checkpointing_conflicts(cfg: MasterConfig) -> list[str]:
    ckpt, grpo = cfg.checkpointing, cfg.grpo
    never_validates = grpo.val_period == 0 and not grpo.val_at_start and not grpo.val_at_end
    if ckpt.enabled and ckpt.metric_name is not None and ckpt.metric_name.startswith("val:") and never_validates:
        return [
            f"checkpointing.metric_name: got {ckpt.metric_name!r} but the run never validates; must be a train: metric "
            "or null (keep the latest). Change it, or set grpo.val_period."
        ]
    return []


def _policy_conflicts(cfg: MasterConfig) -> list[str]:
    policy = cfg.policy
    found: list[str] = []
    if policy.dynamic_batching.enabled and policy.sequence_packing.enabled:
        found.append(
            "policy.sequence_packing.enabled: got true with policy.dynamic_batching.enabled: true; at most one may be "
            "on. Switch one off."
        )
    for name, block in (("dynamic_batching", policy.dynamic_batching), ("sequence_packing", policy.sequence_packing)):
        for key in ("train_mb_tokens", "logprob_mb_tokens"):
            tokens = getattr(block, key)
            if block.enabled and tokens < policy.max_total_sequence_length:
                found.append(
                    f"policy.{name}.{key}: got {tokens}; must be >= policy.max_total_sequence_length "
                    f"({policy.max_total_sequence_length}), or the longest sample fits no micro-batch. Raise it."
                )
    if cfg.rollout_batch_size % policy.train_global_batch_size:
        found.append(
            f"policy.train_global_batch_size: got {policy.train_global_batch_size}; must divide "
            f"grpo.num_prompts_per_step x grpo.num_generations_per_prompt ({cfg.rollout_batch_size}). "
            f"Set it to {cfg.rollout_batch_size} for one optimizer step per rollout batch."
        )
    draft_batch = policy.draft.train_global_batch_size
    if policy.draft_enabled and draft_batch is not None and policy.train_global_batch_size % draft_batch:
        found.append(
            f"policy.draft.train_global_batch_size: got {draft_batch}; must divide policy.train_global_batch_size "
            f"({policy.train_global_batch_size}). Use a divisor, or null for one draft update per policy update."
        )
    return found


def _generation_conflicts(cfg: MasterConfig) -> list[str]:
    policy, generation = cfg.policy, cfg.policy.generation
    found: list[str] = []
    if generation.top_p != 1.0 or generation.top_k is not None:
        key, got = ("top_p", generation.top_p) if generation.top_p != 1.0 else ("top_k", generation.top_k)
        found.append(
            f"policy.generation.{key}: got {got}; training takes log-probabilities of the untruncated distribution, so "
            f"samples must come from it too. Use {key}: {'1.0' if key == 'top_p' else 'null'}."
        )
    found += _device_split_conflicts(cfg)
    max_model_len = generation.vllm_cfg.max_model_len
    if max_model_len < policy.max_total_sequence_length:
        found.append(
            f"policy.generation.vllm_cfg.max_model_len: got {max_model_len}; must be >= "
            f"policy.max_total_sequence_length ({policy.max_total_sequence_length}). Raise it, or "
            "shorten the sequences."
        )
    if generation.max_new_tokens > max_model_len:
        found.append(
            f"policy.generation.max_new_tokens: got {generation.max_new_tokens}; must be <= "
            f"policy.generation.vllm_cfg.max_model_len ({max_model_len}). Lower it."
        )
    return found


def _device_split_conflicts(cfg: MasterConfig) -> list[str]:
    colocated, cluster = cfg.policy.generation.colocated, cfg.cluster
    if colocated.enabled:
        return []
    key = "gpus_per_node" if cluster.num_nodes == 1 else "num_nodes"
    got, available = getattr(colocated.resources, key), getattr(cluster, key)
    if got is not None and got < available:
        return []
    return [
        f"policy.generation.colocated.resources.{key}: got {_show(got)} with colocated.enabled: false; must be "
        f"from 1 to {available - 1}, what cluster.{key} ({available}) leaves beside training. Set it, or share the "
        "devices (policy.generation.colocated.enabled: true)."
    ]


def _draft_conflicts(cfg: MasterConfig) -> list[str]:
    draft = cfg.policy.draft
    found: list[str] = []
    if not draft.enabled:
        return found
    if draft.static and draft.model_name is None:
        found.append(
            "policy.draft.static: got true with policy.draft.model_name: null; must have a draft to serve, a new one "
            "would propose nothing of use. Set policy.draft.model_name, or static: false."
        )
    default = type(draft)()
    unread = [key for key in DRAFT_TRAINING_KEYS if getattr(draft, key) != getattr(default, key)]
    if draft.static and unread:
        found.append(
            f"policy.draft.static: got true with policy.draft.{', policy.draft.'.join(unread)}; a static draft is not "
            "trained, so nothing reads them. Remove them, or set static: false."
        )
    if not draft.serve and (draft.static or draft.loss_weight == 0):
        key, got = ("static", "true") if draft.static else ("loss_weight", "0")
        found.append(
            f"policy.draft.serve: got false with policy.draft.{key}: {got}; a draft that is neither served nor trained "
            "does nothing. Set policy.draft.enabled: false, or change one of them."
        )
    return found


def _rollout_store_conflicts(cfg: MasterConfig) -> list[str]:
    store, draft = cfg.rollout_store, cfg.policy.draft
    found: list[str] = []
    if store.features and not draft.enabled:
        found.append(
            "rollout_store.features: got true with policy.draft.enabled: false; the draft says which states of the "
            "policy are stored. Configure policy.draft, or set features: false."
        )
    if store.features and store.mode == "off" and cfg.draft_run.source != "rollouts":
        found.append(
            "rollout_store.features: got true with rollout_store.mode: off; nothing is recorded, so nothing reads it. "
            "Set mode: record or collect_only, or features: false."
        )
    if store.mode != "collect_only" or not draft.enabled or draft.static:
        return found
    default = type(draft)()
    unread = [key for key in DRAFT_TRAINING_KEYS if getattr(draft, key) != getattr(default, key)]
    if unread:
        found.append(
            f"rollout_store.mode: got collect_only with policy.draft.{', policy.draft.'.join(unread)}; the draft is "
            "not trained in this run, so nothing reads them. Remove them, or use mode: record."
        )
    if not draft.serve and not store.features:
        found.append(
            "policy.draft.serve: got false with rollout_store.mode: collect_only; a draft that is neither served nor "
            "trained, and whose features are not stored, does nothing. Set policy.draft.enabled: false, or change one "
            "of them."
        )
    return found


def _speculation_conflicts(cfg: MasterConfig) -> list[str]:
    draft, key = cfg.policy.draft, "policy.generation.vllm_kwargs.speculative_config"
    raw = cfg.policy.generation.vllm_kwargs.get("speculative_config")
    if raw is not None and not isinstance(raw, dict):
        return [f"{key}: got {raw!r}; must be a mapping. Write {{num_speculative_tokens: 3}}."]
    spec = raw or {}
    found = refused_problems(spec)
    if not cfg.policy.draft_served:
        return found if raw is None else found + baseline_problems(spec)
    tokens, largest = spec.get("num_speculative_tokens"), draft.max_num_speculative_tokens
    if not _is_int(tokens) or tokens < 1 or (largest is not None and tokens > largest):
        missing = "nothing" if tokens is None else repr(tokens)
        allowed = ">= 1, the tokens that the draft proposes per step"
        if largest is not None:
            allowed = (
                f"from 1 to {largest}, the most that the draft of policy.draft (algo: {draft.algo}) is trained to "
                "propose"
            )
        found.append(
            f"{key}.num_speculative_tokens: got {missing}; must be an integer {allowed}. Set it, e.g. to "
            f"{3 if largest is None else min(3, largest)}."
        )
    method = spec.get("method")
    if method is not None and method not in draft.serving_methods:
        found.append(
            f"{key}.method: got {method!r}; policy.draft.enabled: true with algo: {draft.algo} is served by "
            f"{_any_of(draft.serving_methods)}. Remove the key: the draft sets it."
        )
    else:
        found += option_problems(spec, method=draft.serving_methods[0])
    model = spec.get("model")
    if model is not None:
        found.append(
            f"{key}.model: got {model!r}; must be absent with policy.draft.enabled: true, which serves the draft of "
            f"policy.draft.model_name ({_show(draft.model_name)}). Remove the key: the path is given once, there."
        )
    return found


def _data_conflicts(cfg: MasterConfig) -> list[str]:
    data, env = cfg.data, cfg.env
    found: list[str] = []
    generated = data.dataset_name == "reasoning_gym"
    if generated and data.reasoning_gym is None:
        found.append(
            "data.reasoning_gym: got null with data.dataset_name: reasoning_gym; must name the task. "
            "Write {task: spell_backward}."
        )
    if generated != (env.name == "reasoning_gym"):
        found.append(
            f"env.name: got {env.name!r} with data.dataset_name: {data.dataset_name!r}; reasoning_gym questions are "
            "scored by the reasoning_gym environment and by no other. Set both to reasoning_gym, or neither."
        )
    if data.dataset_name == "ResponseDataset" and data.train_data_path is None:
        found.append(
            "data.train_data_path: got null with data.dataset_name: ResponseDataset; must be a .jsonl file or a "
            "hub name. Set it."
        )
    if data.max_input_seq_length > cfg.policy.max_total_sequence_length:
        found.append(
            f"data.max_input_seq_length: got {data.max_input_seq_length}; must be <= policy.max_total_sequence_length "
            f"({cfg.policy.max_total_sequence_length}). Lower it."
        )
    return found


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _show(value: object) -> str:
    return "null" if value is None else repr(value)


def _any_of(names: tuple[str, ...]) -> str:
    return " or ".join(repr(name) for name in names)
