"""Rules for the keys that verl-SpeCo takes over from verl 0.8: policy, data, loss, engine, trainer."""

from __future__ import annotations

from typing import Any

from tools.migration.rules import (
    NOTHING,
    Ask,
    Entry,
    Outcome,
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

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
VLLM = "policy.generation.vllm_cfg"

KL_TYPES = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
OVERLONG = (
    "reward.reward_kwargs.overlong_buffer_cfg",
    "reward_model.reward_kwargs.overlong_buffer_cfg",
    "reward_model.overlong_buffer",
)
OVERLONG_NAMES = {
    "enable": "enabled",
    "len": "overlong_buffer_length",
    "penalty_factor": "overlong_buffer_penalty",
}
LOGGERS = ("wandb", "tensorboard", "mlflow")

# Keys of these sections that choose how verl does its work, not what it computes.
ACTOR_PLUMBING = (
    "fsdp_config.*",
    "qat.*",
    "rollout_n",
    "use_torch_compile",
    "use_fused_kernels",
    "use_prefix_grouper",
    "use_remove_padding",
    "freeze_vision_tower",
    "shuffle",
    "data_loader_seed",
    "checkpoint.*",
    "profiler.*",
    "router_replay.*",
    "pad_to_length*",
)
MODEL_PLUMBING = (
    "hf_config_path",
    "use_shm",
    "trust_remote_code",
    "external_lib",
    "enable_activation_offload",
    "use_*",
    "lora*",
    "target_modules",
    "exclude_modules",
    "fused_kernel_options.*",
    "tiled_mlp.*",
    "mtp.*",
)
DATA_PLUMBING = (
    "prompt_key",
    "use_shm",
    "reward_fn_key",
    "tool_config_path",
    "function_tool_path",
    "return_*",
    "dataloader_num_workers",
    "validation_shuffle",
    "filter_overlong_prompts_workers",
    "image_*",
    "video_key",
    "audio_key",
    "trust_remote_code",
    "custom_cls.name",
    "mm_processor_kwargs",
)
ROLLOUT_PLUMBING = (
    "mode",
    "nnodes",
    "n_gpus_per_node",
    "full_determinism",
    "seed",
    "ignore_eos",
    "cudagraph_capture_sizes",
    "free_cache_engine",
    "data_parallel_size",
    "logprobs_mode",
    "scheduling_policy",
    "load_format",
    "layered_summon",
    "disable_log_stats",
    "do_sample",
    "over_sample_rate",
    "multi_stage_wake_up",
    "engine_kwargs*",
    "multi_turn.*",
    "calculate_log_probs",
    "agent.*",
    "checkpoint_engine.*",
    "trace.*",
    "skip_tokenizer_init",
    "enable_rollout_routing_replay",
    "moe_load_balance_metrics_interval",
    "profiler.*",
    "prometheus.*",
    "quantization_config_file",
    "mtp*",
    "qat*",
    "disaggregation.*",
)
TRAINER_PLUMBING = (
    "balance_batch",
    "critic_warmup",
    "default_hdfs_dir",
    "del_local_ckpt_after_load",
    "max_critic_ckpt_to_keep",
    "ray_wait_register_center_timeout",
    "device",
    "esi_redundant_time",
    "resume_from_path",
    "use_v1",
    "v1.*",
)

has_kl_loss = is_on(f"{ACTOR}.use_kl_loss")
has_filter = is_on("algorithm.filter_groups.enable")


def has_dynamic_batches(source: Source) -> bool:
    """Tell whether micro-batches are formed by tokens."""
    return bool(source.get(f"{ACTOR}.use_dynamic_bsz"))


def _samples(entry: Entry) -> Any:
    n = entry.source.get(f"{ROLLOUT}.n")
    return entry.value * n if isinstance(n, int) else Ask(f"counted in prompts: needs {ROLLOUT}.n")


def _clip_ratio(entry: Entry) -> Outcome:
    ours = {"low": "loss_fn.ratio_clip_min", "high": "loss_fn.ratio_clip_max"}
    open_ends = {key: entry.value for end, key in ours.items() if entry.source.get(f"{ACTOR}.clip_ratio_{end}") is None}
    return Put(open_ends) if open_ends else NOTHING


def _kl_loss(entry: Entry) -> Any:
    if not entry.value:
        return 0.0
    factor = entry.source.get(f"{ACTOR}.kl_loss_coef")
    return Ask(f"the KL term's factor: needs {ACTOR}.kl_loss_coef") if factor is None else factor


def _kl_coef(entry: Entry) -> Outcome:
    if entry.source.get(f"{ACTOR}.use_kl_loss") is not None:
        return NOTHING
    return Ask(f"counts only with {ACTOR}.use_kl_loss: set loss_fn.reference_policy_kl_penalty, 0 without KL term")


def _kl_type(entry: Entry) -> Any:
    return KL_TYPES.get(entry.value) or Ask("set loss_fn.reference_policy_kl_type: k1, k2 or k3")


def _estimator(entry: Entry) -> Outcome:
    if entry.value == "grpo":
        return Put({"grpo.use_leave_one_out_baseline": False})
    if entry.value == "rloo":
        return Put({"grpo.use_leave_one_out_baseline": True, "grpo.normalize_rewards": False})
    return Ask("only GRPO's advantages exist here: decide whether they will do")


def _normalize(entry: Entry) -> Any:
    return NOTHING if entry.source.get("algorithm.adv_estimator") == "rloo" else entry.value


def _loss_mean(entry: Entry) -> Any:
    modes = {"token-mean": True, "seq-mean-token-mean": False}
    return modes.get(entry.value, Ask("set loss_fn.token_level_loss: over all tokens, or over each response first"))


def _loss_mode(entry: Entry) -> Any:
    return True if entry.value == "gspo" else Ask("only the clipped loss and GSPO's ratios exist here")


def _importance(entry: Entry) -> Outcome:
    if entry.value != "token":
        return Ask("weights per token only: loss_fn.use_importance_sampling_correction")
    cut = entry.source.get("algorithm.rollout_correction.rollout_is_threshold")
    key = "loss_fn.truncated_importance_sampling_ratio"
    return Put({"loss_fn.use_importance_sampling_correction": True} | ({} if cut is None else {key: cut}))


def _generation_rounds(entry: Entry) -> Any:
    return entry.value if entry.value > 0 else Ask("without limit there: set grpo.dynamic_sampling_max_gen_batches")


def _multiplier(entry: Entry) -> Any:
    prompts = entry.source.get("data.train_batch_size")
    if not isinstance(prompts, int):
        return Ask("a multiple of data.train_batch_size: set grpo.batch_multiplier")
    whole, rest = divmod(entry.value, prompts)
    return entry.value / prompts if rest else whole


def _total_length(entry: Entry) -> Outcome:
    prompt, response = (entry.source.get(f"data.max_{part}_length") for part in ("prompt", "response"))
    values = {"policy.generation.max_new_tokens": entry.value}
    if entry.name == "max_prompt_length":
        values = {"data.max_input_seq_length": entry.value}
    if isinstance(prompt, int) and isinstance(response, int):
        values["policy.max_total_sequence_length"] = prompt + response
    return Put(values)


def _length_of_data(entry: Entry) -> Outcome:
    part = entry.name.split("_")[0]
    if entry.value == entry.source.get(f"data.max_{part}_length"):
        return NOTHING
    return Ask(f"differs from data.max_{part}_length, which counts here")


def _overlong(entry: Entry) -> Outcome:
    buffer = entry.key.rsplit(".", 1)[0]
    if entry.name != "enable" and not entry.source.get(f"{buffer}.enable"):
        return NOTHING
    return Put({f"grpo.reward_shaping.{OVERLONG_NAMES[entry.name]}": entry.value})


def _overlong_limit(entry: Entry) -> Any:
    return entry.value if any(entry.source.get(f"{buffer}.enable") for buffer in OVERLONG) else NOTHING


def _optimizer_name(entry: Entry) -> Any:
    return f"{entry.source.get(f'{ACTOR}.optim.optimizer_impl', 'torch.optim')}.{entry.value}"


def _schedule(entry: Entry) -> Any:
    optim = f"{ACTOR}.optim"
    has_warmup = any(
        (entry.source.get(f"{optim}.{name}") or 0) > 0 for name in ("lr_warmup_steps", "lr_warmup_steps_ratio")
    )
    if entry.value == "constant" and not has_warmup:
        return None
    return Ask("set policy.scheduler: a list of torch.optim.lr_scheduler classes with their arguments")


def _grad_clip(entry: Entry) -> Any:
    values = {entry.source.get(f"{ACTOR}.{name}", entry.value) for name in ("grad_clip", "optim.clip_grad")}
    return entry.value if len(values) == 1 else Ask("given twice, with different values: set policy.max_grad_norm")


def _one_file(entry: Entry) -> Any:
    files = entry.value if isinstance(entry.value, list) else [entry.value]
    if len(files) != 1:
        return Ask("one file of each kind here: join them, or choose one")
    if entry.name == "val_files":
        return files[0]
    prompt = entry.source.get("data.prompt_key", "prompt")
    values = {
        "data.dataset_name": "ResponseDataset",
        "data.train_data_path": files[0],
        "data.input_key": f"{prompt}.0.content",
        "data.output_key": "reward_model.ground_truth",
    }
    note = "first message = question, reward_model.ground_truth = answer, scored by env.name (math)"
    return Put(values, note)


def _loggers(entry: Entry) -> Outcome:
    names = entry.value if isinstance(entry.value, list) else [entry.value]
    values = {f"logger.{name}_enabled": name in names for name in LOGGERS}
    others = [name for name in names if name not in (*LOGGERS, "console")]
    return Put(values, f"there is no logger {', '.join(map(str, others))}" if others else "")


def _project(entry: Entry) -> Outcome:
    is_project = entry.name == "project_name"
    values = {f"logger.wandb.{'project' if is_project else 'name'}": entry.value}
    if "mlflow" in (entry.source.get("trainer.logger") or ()):
        values[f"logger.mlflow.{'experiment_name' if is_project else 'run_name'}"] = entry.value
    return Put(values)


def _validation_period(entry: Entry) -> Any:
    return max(entry.value, 0)


def _save_period(entry: Entry) -> Outcome:
    return Put({"checkpointing.save_period": entry.value} if entry.value > 0 else {"checkpointing.enabled": False})


def _kept(entry: Entry) -> Outcome:
    return Put({"checkpointing.keep_top_k": entry.value, "checkpointing.metric_name": None})


def _engine_arguments(entry: Entry) -> Outcome:
    return Put({entry.key.replace(f"{ROLLOUT}.engine_kwargs.vllm", "policy.generation.vllm_kwargs"): entry.value})


VERL_ROWS = (
    Row(
        "`actor_rollout_ref.model.path`",
        "`policy.model_name`",
        (
            nothing_to_set("*._target_", "_target_", "hydra.*"),
            moved(f"{MODEL}.path", "policy.model_name"),
            moved(f"{MODEL}.tokenizer_path", "policy.tokenizer.name", off=(None,)),
            moved("data.tokenizer", "policy.tokenizer.name", off=(None,)),
            moved(f"{MODEL}.custom_chat_template", "policy.tokenizer.chat_template", off=(None,)),
            moved("data.apply_chat_template_kwargs", "policy.tokenizer.chat_template_kwargs", off=(None, {})),
            moved(f"{MODEL}.enable_gradient_checkpointing", "policy.dtensor_cfg.activation_checkpointing"),
        ),
    ),
    Row(
        "`actor_rollout_ref.rollout.n`",
        "`grpo.num_generations_per_prompt`",
        (moved(f"{ROLLOUT}.n", "grpo.num_generations_per_prompt"),),
    ),
    Row(
        "`data.train_batch_size`",
        "`grpo.num_prompts_per_step`",
        (moved("data.train_batch_size", "grpo.num_prompts_per_step"),),
    ),
    Row(
        "`actor_rollout_ref.actor.ppo_mini_batch_size`",
        "`policy.train_global_batch_size`, counted in samples instead of prompts",
        (Rule((f"{ACTOR}.ppo_mini_batch_size",), ("policy.train_global_batch_size",), _samples),),
    ),
    Row(
        "`actor_rollout_ref.actor.clip_ratio_low`, `clip_ratio_high`",
        "`loss_fn.ratio_clip_min`, `ratio_clip_max`",
        (
            moved(f"{ACTOR}.clip_ratio_low", "loss_fn.ratio_clip_min", off=(None,)),
            moved(f"{ACTOR}.clip_ratio_high", "loss_fn.ratio_clip_max", off=(None,)),
            Rule((f"{ACTOR}.clip_ratio",), ("loss_fn.ratio_clip_min", "loss_fn.ratio_clip_max"), _clip_ratio),
            moved(f"{ACTOR}.clip_ratio_c", "loss_fn.ratio_clip_c"),
        ),
    ),
    Row(
        "`actor_rollout_ref.actor.use_kl_loss`, `kl_loss_coef`, `kl_loss_type`",
        "`loss_fn.reference_policy_kl_penalty` (0 without), `reference_policy_kl_type` (`low_var_kl` is `k3`)",
        (
            Rule((f"{ACTOR}.use_kl_loss",), ("loss_fn.reference_policy_kl_penalty",), _kl_loss),
            Rule((f"{ACTOR}.kl_loss_coef",), (), _kl_coef),
            Rule((f"{ACTOR}.kl_loss_type",), ("loss_fn.reference_policy_kl_type",), _kl_type, live=has_kl_loss),
            asked(
                "algorithm.use_kl_in_reward",
                says="the KL term is part of the loss here: set loss_fn.reference_policy_kl_penalty",
                off=(False, None),
            ),
            left_out(
                "algorithm.kl_ctrl.*",
                "algorithm.kl_penalty",
                says="the KL term is part of the loss here",
                live=is_on("algorithm.use_kl_in_reward"),
            ),
        ),
    ),
    Row(
        "`actor_rollout_ref.actor.loss_agg_mode`, `policy_loss.loss_mode`, other terms of the loss",
        "`loss_fn.token_level_loss`, `sequence_level_importance_ratios` (`gspo`); no entropy term, one pass over a "
        "batch",
        (
            Rule((f"{ACTOR}.loss_agg_mode",), ("loss_fn.token_level_loss",), _loss_mean),
            Rule(
                (f"{ACTOR}.policy_loss.loss_mode",),
                ("loss_fn.sequence_level_importance_ratios",),
                _loss_mode,
                off=("vanilla", None),
            ),
            asked(f"{ACTOR}.entropy_coeff", says="there is no entropy term", off=(0, 0.0, None)),
            asked(f"{ACTOR}.ppo_epochs", says="each batch is trained on once", off=(1, None)),
            nothing_to_set(
                f"{ACTOR}.policy_loss.*",
                f"{ACTOR}.tau_*",
                f"{ACTOR}.loss_scale_factor",
                f"{ACTOR}.calculate_*",
                f"{ACTOR}.entropy_*",
            ),
            Rule(
                ("algorithm.rollout_correction.rollout_is",),
                ("loss_fn.use_importance_sampling_correction", "loss_fn.truncated_importance_sampling_ratio"),
                _importance,
                off=(None,),
            ),
            asked("algorithm.rollout_correction.rollout_rs", says="no samples are rejected here", off=(None,)),
            asked("algorithm.rollout_correction.bypass_mode", says="no counterpart", off=(False, None)),
            nothing_to_set("algorithm.rollout_correction.*"),
        ),
    ),
    Row(
        "`algorithm.adv_estimator: grpo`, `norm_adv_by_std_in_grpo`",
        "`grpo.use_leave_one_out_baseline: false`, `grpo.normalize_rewards`",
        (
            Rule(
                ("algorithm.adv_estimator",),
                ("grpo.use_leave_one_out_baseline", "grpo.normalize_rewards"),
                _estimator,
            ),
            Rule(("algorithm.norm_adv_by_std_in_grpo",), ("grpo.normalize_rewards",), _normalize),
            nothing_to_set("algorithm.gamma", "algorithm.lam", "algorithm.pf_ppo.*"),
            asked("algorithm.use_pf_ppo", says="no counterpart", off=(False, None)),
        ),
    ),
    Row(
        "`algorithm.filter_groups.enable`, `max_num_gen_batches`, `data.gen_batch_size`",
        "`grpo.use_dynamic_sampling`, `dynamic_sampling_max_gen_batches`, `batch_multiplier` (times the prompts of a "
        "step)",
        (
            moved("algorithm.filter_groups.enable", "grpo.use_dynamic_sampling"),
            Rule(
                ("algorithm.filter_groups.max_num_gen_batches",),
                ("grpo.dynamic_sampling_max_gen_batches",),
                _generation_rounds,
                live=has_filter,
            ),
            Rule(("data.gen_batch_size",), ("grpo.batch_multiplier",), _multiplier, off=(None,), live=has_filter),
            left_out(
                "algorithm.filter_groups.metric",
                says="groups are compared by reward",
                off=("seq_reward", "seq_final_reward", None),
                live=has_filter,
            ),
            nothing_to_set("algorithm.filter_groups.*"),
        ),
    ),
    Row(
        "`reward.reward_kwargs.overlong_buffer_cfg.enable`, `len`, `penalty_factor`, `reward_kwargs.max_resp_len`; the "
        "same of `reward_model`",
        "`grpo.reward_shaping.enabled`, `overlong_buffer_length`, `overlong_buffer_penalty`, `max_response_length`",
        (
            Rule(
                tuple(f"{buffer}.{name}" for buffer in OVERLONG for name in OVERLONG_NAMES),
                tuple(f"grpo.reward_shaping.{ours}" for ours in OVERLONG_NAMES.values()),
                _overlong,
            ),
            Rule(
                ("reward.reward_kwargs.max_resp_len", "reward_model.reward_kwargs.max_resp_len"),
                ("grpo.reward_shaping.max_response_length",),
                _overlong_limit,
                off=(None,),
            ),
            nothing_to_set(*(f"{buffer}.log" for buffer in OVERLONG)),
        ),
    ),
    Row(
        "`actor_rollout_ref.actor.optim.lr`, `weight_decay`, `betas`, `optimizer`, `clip_grad`",
        "`policy.optimizer.kwargs.*`, `policy.optimizer.name`, `policy.max_grad_norm`; a constant rate is "
        "`policy.scheduler: null`",
        (
            moved(f"{ACTOR}.optim.lr", "policy.optimizer.kwargs.lr"),
            moved(f"{ACTOR}.optim.weight_decay", "policy.optimizer.kwargs.weight_decay"),
            moved(f"{ACTOR}.optim.betas", "policy.optimizer.kwargs.betas"),
            Rule((f"{ACTOR}.optim.optimizer",), ("policy.optimizer.name",), _optimizer_name),
            Rule((f"{ACTOR}.optim.lr_scheduler_type",), ("policy.scheduler",), _schedule),
            Rule((f"{ACTOR}.optim.clip_grad", f"{ACTOR}.grad_clip"), ("policy.max_grad_norm",), _grad_clip),
            asked(
                f"{ACTOR}.optim.lr_warmup_steps",
                f"{ACTOR}.optim.lr_warmup_steps_ratio",
                says="set policy.scheduler: LinearLR first",
                off=(-1, 0, 0.0, None),
            ),
            asked(f"{ACTOR}.optim.override_optimizer_config", says="set policy.optimizer.kwargs", off=(None, {})),
            nothing_to_set(
                *(
                    f"{ACTOR}.optim.{name}"
                    for name in (
                        "optimizer_impl",
                        "total_training_steps",
                        "min_lr_ratio",
                        "num_cycles",
                        "zero_indexed_step",
                        "warmup_style",
                    )
                )
            ),
        ),
    ),
    Row(
        "`actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu`, `use_dynamic_bsz`, `ppo_max_token_len_per_gpu`; the "
        "same of `rollout.log_prob_*`",
        "`policy.train_micro_batch_size`, `logprob_batch_size`, `policy.dynamic_batching.enabled`, `train_mb_tokens`, "
        "`logprob_mb_tokens`",
        (
            moved(f"{ACTOR}.ppo_micro_batch_size_per_gpu", "policy.train_micro_batch_size", off=(None,)),
            moved(f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", "policy.logprob_batch_size", off=(None,)),
            moved(f"{ACTOR}.use_dynamic_bsz", "policy.dynamic_batching.enabled"),
            moved(
                f"{ACTOR}.ppo_max_token_len_per_gpu",
                "policy.dynamic_batching.train_mb_tokens",
                live=has_dynamic_batches,
            ),
            moved(
                f"{ROLLOUT}.log_prob_max_token_len_per_gpu",
                "policy.dynamic_batching.logprob_mb_tokens",
                live=has_dynamic_batches,
            ),
            asked(
                f"{ACTOR}.ppo_micro_batch_size",
                f"{ROLLOUT}.log_prob_micro_batch_size",
                says="counted over all GPUs there: set policy.train_micro_batch_size, logprob_batch_size",
                off=(None,),
            ),
            nothing_to_set(f"{ROLLOUT}.log_prob_use_dynamic_bsz"),
        ),
    ),
    Row(
        "`actor_rollout_ref.actor.strategy`, `fsdp_config`, `ulysses_sequence_parallel_size`, LoRA",
        "`policy.dtensor_cfg` (FSDP2); `policy.precision` for `fsdp_config.dtype`; sequences are not split, all "
        "weights are trained",
        (
            asked(
                f"{ACTOR}.strategy",
                says="policy.dtensor_cfg (FSDP2) is the one backend: set its tensor_parallel_size and so on",
                off=("fsdp", "fsdp2", None),
            ),
            moved(f"{ACTOR}.fsdp_config.dtype", "policy.precision"),
            asked(
                f"{ACTOR}.fsdp_config.param_offload",
                f"{ACTOR}.fsdp_config.optimizer_offload",
                f"{ACTOR}.fsdp_config.offload_policy",
                says="if memory is short, set policy.dtensor_cfg.cpu_offload",
                off=(False, None),
            ),
            asked(
                f"{ACTOR}.*ulysses_sequence_parallel_size",
                says="sequences are not split: give them room by tensor_parallel_size or activation_checkpointing",
                off=(1, None),
            ),
            asked(f"{MODEL}.lora_rank", f"{MODEL}.lora.rank", says="there is no LoRA", off=(0, None)),
            asked(f"{MODEL}.mtp.enable", says="multi-token prediction is not trained", off=(False, None)),
            asked(f"{MODEL}.override_config*", says="change a copy of the policy's config.json", off=({}, None)),
            asked(f"{ACTOR}.*qat.enable", says="there is no quantised training", off=(False, None)),
            left_out(f"{ACTOR}.megatron*", f"{ACTOR}.veomni*", says="policy.dtensor_cfg is the one backend"),
            nothing_to_set(
                *(f"{ACTOR}.{name}" for name in ACTOR_PLUMBING),
                *(f"{MODEL}.{name}" for name in MODEL_PLUMBING),
                "actor_rollout_ref.ref.*",
                "actor_rollout_ref.hybrid_engine",
                "actor_rollout_ref.nccl_timeout",
                "model_engine",
            ),
        ),
    ),
    Row(
        "`data.max_prompt_length`, `max_response_length`",
        "`data.max_input_seq_length`, `policy.generation.max_new_tokens`; their sum is "
        "`policy.max_total_sequence_length`",
        (
            Rule(
                ("data.max_prompt_length", "data.max_response_length"),
                ("data.max_input_seq_length", "policy.generation.max_new_tokens", "policy.max_total_sequence_length"),
                _total_length,
            ),
            Rule((f"{ROLLOUT}.prompt_length", f"{ROLLOUT}.response_length"), (), _length_of_data, off=(None,)),
        ),
    ),
    Row(
        "`data.train_files`, `val_files`, other keys of `data`",
        "`data.dataset_name: ResponseDataset`, `data.train_data_path`, `val_data_path`, `input_key: prompt.0.content`, "
        "`output_key: reward_model.ground_truth`; one file of each kind",
        (
            Rule(
                ("data.train_files", "data.val_files"),
                (
                    "data.val_data_path",
                    "data.dataset_name",
                    "data.train_data_path",
                    "data.input_key",
                    "data.output_key",
                ),
                _one_file,
            ),
            moved("data.shuffle", "data.shuffle"),
            moved("data.seed", "grpo.seed", off=(None,)),
            moved("data.val_max_samples", "grpo.max_val_samples", off=(None, -1)),
            moved("data.val_batch_size", "grpo.val_batch_size", off=(None,)),
            left_out(
                "data.filter_overlong_prompts",
                says="prompts longer than data.max_input_seq_length are always dropped",
                off=(True, None),
            ),
            asked("data.train_max_samples", says="all prompts are used: cut the file", off=(None, -1)),
            asked("data.custom_cls.path", says="there are no custom data sets: convert to .jsonl", off=(None,)),
            left_out("data.truncation", says="long prompts are dropped, never cut", off=("error", None)),
            nothing_to_set(*(f"data.{name}" for name in DATA_PLUMBING)),
        ),
    ),
    Row(
        "`reward`, `reward_model`, `custom_reward_function`",
        "`env.name` chooses between `math` and `reasoning_gym`; there are no reward models and no functions by path",
        (
            asked(
                "custom_reward_function.path",
                "reward.custom_reward_function.path",
                says="no functions by path: choose env.name, or add an environment",
                off=(None,),
            ),
            asked(
                "reward_model.enable",
                "reward.reward_model.enable",
                says="there are no reward models",
                off=(False, None),
            ),
            asked(
                "reward.reward_manager.name",
                "reward_model.reward_manager",
                says="rewards are those of env.name, with grpo.reward_shaping",
                off=("naive", "dapo", None),
            ),
            asked("*reward_kwargs.*", says="no counterpart: rewards are those of env.name"),
            nothing_to_set("custom_reward_function.*", "reward.*", "reward_model*", "sandbox_fusion.*"),
        ),
    ),
    Row(
        "`actor_rollout_ref.rollout.temperature`, `top_p`, `top_k: -1`",
        "`policy.generation.temperature`, `top_p`, `top_k: null`; validation samples alike",
        (
            moved(f"{ROLLOUT}.temperature", "policy.generation.temperature"),
            moved(f"{ROLLOUT}.top_p", "policy.generation.top_p"),
            Rule(
                (f"{ROLLOUT}.top_k",),
                ("policy.generation.top_k",),
                lambda entry: None if entry.value == -1 else entry.value,
            ),
            moved(f"{ROLLOUT}.val_kwargs.n", "grpo.val_num_generations_per_prompt"),
            left_out(f"{ROLLOUT}.val_kwargs.*", says="validation samples as training does", off=(-1, None)),
        ),
    ),
    Row(
        "`actor_rollout_ref.rollout.name`, `tensor_model_parallel_size`, `gpu_memory_utilization`, `max_model_len` and "
        "so on",
        "`policy.generation.backend`, `policy.generation.vllm_cfg.*`; vLLM's own names in "
        "`policy.generation.vllm_kwargs`",
        (
            moved(f"{ROLLOUT}.name", "policy.generation.backend"),
            moved(f"{ROLLOUT}.dtype", f"{VLLM}.precision"),
            moved(f"{ROLLOUT}.tensor_model_parallel_size", f"{VLLM}.tensor_parallel_size"),
            moved(f"{ROLLOUT}.pipeline_model_parallel_size", f"{VLLM}.pipeline_parallel_size"),
            moved(f"{ROLLOUT}.expert_parallel_size", f"{VLLM}.expert_parallel_size"),
            moved(f"{ROLLOUT}.gpu_memory_utilization", f"{VLLM}.gpu_memory_utilization"),
            moved(f"{ROLLOUT}.max_model_len", f"{VLLM}.max_model_len", off=(None,)),
            moved(f"{ROLLOUT}.max_num_seqs", f"{VLLM}.max_num_seqs"),
            moved(f"{ROLLOUT}.enforce_eager", f"{VLLM}.enforce_eager"),
            *(
                moved(f"{ROLLOUT}.{name}", f"policy.generation.vllm_kwargs.{name}")
                for name in ("max_num_batched_tokens", "enable_chunked_prefill", "enable_prefix_caching")
            ),
            Rule(
                (f"{ROLLOUT}.engine_kwargs.vllm.*",),
                ("policy.generation.vllm_kwargs",),
                _engine_arguments,
                off=(None,),
            ),
            asked(f"{ROLLOUT}.multi_turn.enable", says="responses have one turn", off=(False, None)),
            asked(f"{ROLLOUT}.quantization", says="the engine serves policy.precision", off=(None,)),
            nothing_to_set(*(f"{ROLLOUT}.{name}" for name in ROLLOUT_PLUMBING)),
        ),
    ),
    Row(
        "`trainer.nnodes`, `n_gpus_per_node`, `total_epochs`, `total_training_steps`, `test_freq`, `val_before_train`",
        "`cluster.num_nodes`, `gpus_per_node`, `grpo.max_num_epochs`, `max_num_steps`, `val_period` (0 = never), "
        "`val_at_start`",
        (
            moved("trainer.nnodes", "cluster.num_nodes"),
            moved("trainer.n_gpus_per_node", "cluster.gpus_per_node"),
            moved("trainer.total_epochs", "grpo.max_num_epochs"),
            moved("trainer.total_training_steps", "grpo.max_num_steps", off=(None,)),
            Rule(("trainer.test_freq",), ("grpo.val_period",), _validation_period),
            moved("trainer.val_before_train", "grpo.val_at_start"),
            asked("trainer.val_only", says="use examples/run_eval.py", off=(False, None)),
        ),
    ),
    Row(
        "`trainer.default_local_dir`, `save_freq`, `max_actor_ckpt_to_keep`, `project_name`, `experiment_name`, "
        "`logger`",
        "`checkpointing.checkpoint_dir`, `save_period`, `keep_top_k` with `metric_name: null`; `logger.wandb`, "
        "`logger.mlflow`, `logger.wandb_enabled` and so on",
        (
            moved("trainer.default_local_dir", "checkpointing.checkpoint_dir"),
            Rule(("trainer.save_freq",), ("checkpointing.save_period", "checkpointing.enabled"), _save_period),
            Rule(
                ("trainer.max_actor_ckpt_to_keep",),
                ("checkpointing.keep_top_k", "checkpointing.metric_name"),
                _kept,
            ),
            Rule(
                ("trainer.project_name", "trainer.experiment_name"),
                (
                    "logger.wandb.project",
                    "logger.wandb.name",
                    "logger.mlflow.experiment_name",
                    "logger.mlflow.run_name",
                ),
                _project,
            ),
            Rule(("trainer.logger",), tuple(f"logger.{name}_enabled" for name in LOGGERS), _loggers),
            asked(
                "trainer.resume_mode",
                says="a run continues what is in checkpointing.checkpoint_dir: choose an empty one to start anew",
                off=("auto", None),
            ),
            left_out(
                "trainer.rollout_data_dir",
                "trainer.validation_data_dir",
                says="rollout_store records rollouts in a form of its own",
                off=(None,),
            ),
            left_out(
                "trainer.log_val_generations",
                says="logger.num_val_samples_to_print shows some on the terminal",
                off=(0, None),
            ),
            nothing_to_set(*(f"trainer.{name}" for name in TRAINER_PLUMBING)),
        ),
    ),
    Row(
        "`critic`, `distillation`, `ray_kwargs`, `transfer_queue`, `global_profiler`, `speco`",
        "nothing to set: there is no critic and no teacher, and Ray is started by `tools/launch`",
        (
            asked("distillation.enabled", says="there is no teacher", off=(False, None)),
            nothing_to_set(
                "critic.*",
                "distillation.*",
                "ray_kwargs.*",
                "transfer_queue.*",
                "global_profiler.*",
                "skip.*",
                "speco.*",
            ),
        ),
    ),
)
