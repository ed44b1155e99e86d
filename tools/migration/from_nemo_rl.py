"""Rules for configurations of NeMo-RL (NVIDIA-NeMo/RL, examples/run_grpo.py)."""

from __future__ import annotations

from typing import Any

from nemo_rl.data.sources import HOLD_OUT_FRACTION, HUB_DATASETS
from tools.migration.rules import (
    NOTHING,
    Ask,
    Drop,
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
    same,
)

SPEC = "policy.generation.vllm_kwargs.speculative_config"
PACKING_NAMES = {"modified_ffd": "modified_first_fit_decreasing"}
PER_DATA_SET = ("input_key", "output_key", "prompt_file", "system_prompt_file")

has_draft = is_on("policy.draft.enabled")
has_lora = is_on("policy.dtensor_cfg.lora_cfg.enabled")
has_megatron = is_on("policy.megatron_cfg.enabled")


def _true_only(says: str) -> Any:
    def read(entry: Entry) -> Outcome:
        return NOTHING if entry.value is True else Drop(says)

    return read


def _dtensor_enabled(entry: Entry) -> Outcome:
    # With Megatron on, the line about Megatron says it.
    return NOTHING if entry.value or has_megatron(entry.source) else Drop("policy.dtensor_cfg is the one backend here")


def _context_parallel(entry: Entry) -> Any:
    if entry.value == 1:
        return entry.value
    return Ask("must be 1 here: give the sequences room by tensor_parallel_size or activation_checkpointing")


def _no_optimizer(entry: Entry) -> Outcome:
    return Ask("Megatron's own optimizer is not here: set name and kwargs of policy.optimizer, the learning rate first")


def _spec_model(entry: Entry) -> Any:
    return Drop("follows from the draft: policy.draft.model_name is the one path") if _drafts(entry) else entry.value


def _drafts(entry: Entry) -> bool:
    return has_draft(entry.source)


def _packing_algorithm(entry: Entry) -> Any:
    return PACKING_NAMES.get(entry.value, entry.value)


def _of_train(source: Source, name: str) -> Any:
    """A setting of the training data: their own, or the default of all data sets."""
    value = source.get(f"data.train.{name}")
    return source.get(f"data.default.{name}") if value is None else value


def _train_setting(entry: Entry) -> Outcome:
    if entry.value is None:
        # Null stands for "none" only where the default says it; in a data set's own block the default counts.
        return Put({f"data.{entry.name}": None}) if _clears(entry) else NOTHING
    is_overridden = entry.key.startswith("data.default.") and entry.source.get(f"data.train.{entry.name}") is not None
    return NOTHING if is_overridden else Put({f"data.{entry.name}": entry.value})


def _clears(entry: Entry) -> bool:
    is_file = entry.name in ("prompt_file", "system_prompt_file")
    return is_file and entry.key.startswith("data.default.") and _of_train(entry.source, entry.name) is None


def _validation_setting(entry: Entry) -> Outcome:
    if entry.value is None or entry.value == _of_train(entry.source, entry.name):
        return NOTHING
    return Ask(f"validation prompts are read as those of training here: data.{entry.name} is one key for both")


def _train_dataset(entry: Entry) -> Any:
    if entry.value in HUB_DATASETS or entry.value in ("ResponseDataset", "reasoning_gym"):
        return entry.value
    return Ask(
        f"not a data set that is known by name here ({', '.join(HUB_DATASETS)}): set data.dataset_name: "
        "ResponseDataset, train_data_path, input_key and output_key"
    )


def _default_dataset(entry: Entry) -> Any:
    return NOTHING if entry.source.get("data.train.dataset_name") is not None else _train_dataset(entry)


def _validation_dataset(entry: Entry) -> Outcome:
    train = _of_train(entry.source, "dataset_name")
    if entry.value is None or entry.value == train:
        return NOTHING
    mine, theirs = HUB_DATASETS.get(entry.value), HUB_DATASETS.get(train)
    if entry.value == "ResponseDataset" and theirs is None:
        return NOTHING
    if mine is None or theirs is None or _fields(mine) != _fields(theirs) or mine.subset is not None:
        return Ask("validation prompts of another kind than those of training: set data.val_data_path, or write a copy")
    return Put({"data.val_data_path": mine.path, "data.val_split": mine.val_split or mine.train_split})


def _fields(known: Any) -> tuple[Any, ...]:
    return known.input_key, known.output_key, known.answer_of


def _several_data_sets(entry: Entry) -> Outcome:
    if not entry.value:
        return NOTHING
    return Ask("one data set of each kind here: join them into one file, or choose one")


def _held_out(entry: Entry) -> Outcome:
    if not entry.value or entry.source.get("data.validation.dataset_name") is not None:
        return NOTHING
    train = _of_train(entry.source, "dataset_name")
    known = HUB_DATASETS.get(train)
    if known is not None and known.val_split is None and entry.value == HOLD_OUT_FRACTION:
        return NOTHING
    if known is not None and known.val_split is None:
        return Drop(f"{HOLD_OUT_FRACTION:.0%} of {train} are held out here")
    return Ask("nothing is held out of this data set here: set data.val_data_path or val_split")


def _val_period(entry: Entry) -> Any:
    return 0 if entry.value == -1 else entry.value


def _estimator_setting(entry: Entry) -> Outcome:
    if entry.source.get("grpo.adv_estimator.name") != "grpo":
        return NOTHING
    return Put({f"grpo.{entry.name}": entry.value})


def _unless_the_estimator_says(entry: Entry) -> Outcome:
    own = entry.source.get(f"grpo.adv_estimator.{entry.name}")
    is_overridden = own is not None and entry.source.get("grpo.adv_estimator.name") == "grpo"
    return NOTHING if is_overridden else Put({entry.key: entry.value})


def _validation_sampling(entry: Entry) -> Outcome:
    training = entry.source.get(entry.key.replace(".val_", "."))
    return NOTHING if entry.value == training else Drop("validation samples as training does")


def _verifier(entry: Entry) -> Any:
    if entry.value == "hf_math_verify":
        return entry.value
    return Ask("answers are compared by math-verify here (hf_math_verify); rewards can differ")


_MEGATRON_CHOICES = (
    ("tensor_model_parallel_size", "policy.dtensor_cfg.tensor_parallel_size", 1),
    ("expert_model_parallel_size", "policy.dtensor_cfg.expert_parallel_size", 1),
    ("sequence_parallel", "policy.dtensor_cfg.sequence_parallel", False),
    ("activation_checkpointing", "policy.dtensor_cfg.activation_checkpointing", False),
    ("optimizer.lr", "policy.optimizer.kwargs.lr", None),
    ("optimizer.weight_decay", "policy.optimizer.kwargs.weight_decay", None),
    ("scheduler.lr_warmup_iters", "policy.scheduler", None),
)

ROWS = (
    Row(
        "`policy.dtensor_cfg.*` (`_v2: true`)",
        "the same but `lora_cfg`; the nemo_automodel worker is the only training backend, `context_parallel_size` "
        "must be 1",
        (
            left_out("policy.dtensor_cfg.lora_cfg*", says="there is no LoRA: all weights are trained", live=has_lora),
            Rule(
                ("policy.dtensor_cfg._v2",),
                ("policy.dtensor_cfg._v2",),
                _true_only("the nemo_automodel worker is the only training backend"),
            ),
            Rule(("policy.dtensor_cfg.enabled",), ("policy.dtensor_cfg.enabled",), _dtensor_enabled),
            Rule(
                ("policy.dtensor_cfg.context_parallel_size",),
                ("policy.dtensor_cfg.context_parallel_size",),
                _context_parallel,
            ),
            same("policy.dtensor_cfg.*"),
            left_out(
                "policy.dtensor_cfg.env_vars*",
                "policy.dtensor_cfg.clear_cache_every_n_steps",
                "policy.dtensor_cfg.moe_parallelizer*",
                says="no counterpart: set environment variables where Ray is started",
                off=(None,),
            ),
        ),
    ),
    Row(
        "`policy.megatron_cfg.*`",
        "`enabled: false` only; use `policy.dtensor_cfg` (FSDP2, tensor and expert parallel)",
        (
            *(
                asked(
                    f"policy.megatron_cfg.{name}",
                    says=f"Megatron's; if wanted, set {ours}",
                    off=(off,),
                    live=has_megatron,
                )
                for name, ours, off in _MEGATRON_CHOICES
            ),
            asked(
                "policy.megatron_cfg.pipeline_model_parallel_size",
                "policy.megatron_cfg.context_parallel_size",
                says="no counterpart: the policy and its sequences have to fit without",
                off=(1,),
                live=has_megatron,
            ),
            left_out(
                "policy.megatron_cfg*",
                says="there is no Megatron: policy.dtensor_cfg is the training backend",
                live=has_megatron,
            ),
            Rule(("policy.optimizer",), (), _no_optimizer),
        ),
    ),
    Row(
        "`policy.draft.enabled`, `model_name`, `loss_weight`",
        "the same, `loss_weight` 1.0 instead of 0.1 by default; `policy.draft.algo` chooses the algorithm (`eagle3` "
        "when absent)",
        (
            same("policy.draft.enabled"),
            same("policy.draft.model_name", "policy.draft.loss_weight", live=has_draft),
        ),
    ),
    Row(
        "`policy.draft.num_layers`, `aux_layer_indices`",
        "the same; indices count layer outputs from 0, must increase, and come from the draft's `config.json` where "
        "it says them",
        (
            same("policy.draft.num_layers", "policy.draft.aux_layer_indices", live=has_draft),
            same("policy.draft.*", live=has_draft),
        ),
    ),
    Row(
        "`policy.generation.vllm_kwargs.speculative_config.num_speculative_tokens`",
        "the same: K",
        (same(f"{SPEC}.num_speculative_tokens"),),
    ),
    Row(
        "`...speculative_config.model`",
        "remove: with a draft it is refused, `policy.draft.model_name` is the one path",
        (Rule((f"{SPEC}.model",), (f"{SPEC}.model",), _spec_model),),
    ),
    Row(
        "`...speculative_config.method`, `.draft_tensor_parallel_size`",
        "may stay: a method that contradicts the draft is refused, the size is vLLM's",
        (same(f"{SPEC}.method", f"{SPEC}.draft_tensor_parallel_size"),),
    ),
    Row(
        "`speculative_config` with `method` and `model`, `policy.draft.enabled: false`",
        "the same: another draft, as it is",
        (same(f"{SPEC}.*"),),
    ),
    Row(
        "a patched copy of a published draft with more positions",
        "not needed: a plain RoPE table is extended to `max_model_len` for training and serving alike",
    ),
    Row(
        "`policy.sequence_packing` on by default, `algorithm: modified_ffd`",
        "`policy.sequence_packing.enabled: true`, `modified_first_fit_decreasing`",
        (
            Rule(("policy.sequence_packing.algorithm",), ("policy.sequence_packing.algorithm",), _packing_algorithm),
            same("policy.sequence_packing.*"),
            left_out(
                "policy.sequence_packing.microbatch_order",
                says="micro-batches keep the order of the packer",
                off=("packer", None),
            ),
            nothing_to_set("policy.sequence_packing.fuse_loss"),
        ),
    ),
    Row(
        "`policy.logprob_batch_size`, by default that of training",
        "4 by default",
        (same("policy.logprob_batch_size"),),
    ),
    Row(
        "`data.train`, `data.validation`, `data.default`",
        "flat: `data.dataset_name`, `train_data_path`, `val_data_path`, `input_key`, `output_key`, `prompt_file` (none "
        "by default); one data set of each kind",
        (
            Rule(("data.train", "data.validation"), (), _several_data_sets),
            nothing_to_set("data.default"),
            Rule(("data.train.dataset_name",), ("data.dataset_name",), _train_dataset),
            Rule(("data.default.dataset_name",), ("data.dataset_name",), _default_dataset),
            Rule(("data.validation.dataset_name",), ("data.val_data_path", "data.val_split"), _validation_dataset),
            moved("data.train.data_path", "data.train_data_path"),
            moved("data.validation.data_path", "data.val_data_path"),
            moved("data.train.split", "data.train_split"),
            moved("data.validation.split", "data.val_split", off=(None,)),
            Rule(
                tuple(f"data.{part}.{name}" for part in ("train", "default") for name in PER_DATA_SET),
                tuple(f"data.{name}" for name in PER_DATA_SET),
                _train_setting,
            ),
            Rule(tuple(f"data.validation.{name}" for name in PER_DATA_SET), (), _validation_setting),
            Rule(("data.train.split_validation_size",), (), _held_out),
            nothing_to_set("data.train.seed", "data.validation.seed", "data.*.split_validation_size"),
            left_out(
                "data.*.processor",
                says="every prompt is one question, written with prompt_file and the chat template",
                off=("math_hf_data_processor", None),
            ),
            left_out(
                "data.validation.repeat", says="grpo.val_num_generations_per_prompt samples a prompt several times"
            ),
            asked("data.custom_dataloader", "data.add_system_prompt", says="no counterpart", off=(None, False)),
            left_out(
                "data.use_multiple_dataloader",
                "data.num_prompts_per_dataloader",
                says="there is one data set for training",
                off=(None, False),
            ),
        ),
    ),
    Row(
        "`data.default.env_name`",
        "`env.name`",
        (
            Rule(
                ("data.default.env_name",),
                ("env.name",),
                lambda entry: NOTHING if entry.source.get("data.train.env_name") is not None else entry.value,
            ),
            moved("data.train.env_name", "env.name", off=(None,)),
            nothing_to_set("data.validation.env_name"),
            Rule(("env.math.math_verify_impl",), ("env.math.math_verify_impl",), _verifier),
            asked("data.train.*", "data.validation.*", "data.default.*", says="no counterpart in data", off=(None,)),
        ),
    ),
    Row(
        "`grpo.adv_estimator`",
        "`grpo.normalize_rewards`, `use_leave_one_out_baseline`; the estimator is that of GRPO",
        (
            Rule(
                ("grpo.adv_estimator.normalize_rewards", "grpo.adv_estimator.use_leave_one_out_baseline"),
                ("grpo.normalize_rewards", "grpo.use_leave_one_out_baseline"),
                _estimator_setting,
            ),
            Rule(
                ("grpo.normalize_rewards", "grpo.use_leave_one_out_baseline"),
                ("grpo.normalize_rewards", "grpo.use_leave_one_out_baseline"),
                _unless_the_estimator_says,
            ),
            asked("grpo.adv_estimator.name", says="only GRPO's advantages exist here", off=("grpo", None)),
            nothing_to_set("grpo.adv_estimator*"),
        ),
    ),
    Row(
        "`grpo.async_grpo`, `async_rl`, `data_plane`",
        "no counterpart: the rollouts of a step end before its training begins",
        (
            left_out(
                "grpo.async_grpo*",
                says="the rollouts of a step end before its training begins",
                live=is_on("grpo.async_grpo.enabled"),
            ),
            left_out("async_rl*", says="the rollouts of a step end before its training begins", off=(None, False)),
            left_out("data_plane*", says="batches travel through Ray's object store", live=is_on("data_plane.enabled")),
            left_out(
                "policy.generation.vllm_cfg.async_engine",
                says="only the synchronous in-process engine exists here",
                off=(False, None),
            ),
        ),
    ),
    Row(
        "`grpo.invalid_tool_call_advantage`, `malformed_thinking_advantage`, `val_start_at`, `reward_penalties`, "
        "`on_policy_distillation`",
        "no counterpart: one turn, rewards of the environment, no teacher",
        (
            left_out(
                "grpo.invalid_tool_call_advantage",
                "grpo.malformed_thinking_advantage",
                says="responses have one turn and no tools",
                off=(None,),
            ),
            left_out("grpo.val_start_at", says="validation starts with the first grpo.val_period", off=(-1, None)),
            left_out(
                "grpo.reward_shaping.stop_properly_penalty_coef",
                says="the only penalty is that on overlong responses",
                off=(None,),
            ),
            nothing_to_set("grpo.skip_reference_policy_logprobs_calculation"),
            left_out("reward_penalties.*", says="rewards are those of the environment", off=(False, None)),
            left_out("on_policy_distillation*", says="there is no teacher besides the policy", off=(None,)),
        ),
    ),
    Row(
        "`loss_fn.use_cispo`, `disable_ppo_ratio`, `use_kl_in_reward`, `positive_example_nll_weight`, "
        "`truncated_importance_sampling_type`",
        "no counterpart: the clipped loss, with importance weights cut at "
        "`loss_fn.truncated_importance_sampling_ratio` (`tis`)",
        (
            asked(
                "loss_fn.use_cispo",
                "loss_fn.disable_ppo_ratio",
                "loss_fn.use_kl_in_reward",
                "loss_fn.positive_example_nll_weight",
                says="another loss than the one here: decide whether the clipped loss will do",
                off=(False, None, 0.0),
            ),
            asked(
                "loss_fn.truncated_importance_sampling_type",
                says="importance weights are cut at truncated_importance_sampling_ratio here (tis)",
                off=("tis", None),
            ),
            left_out(
                "loss_fn.truncated_importance_sampling_ratio_min",
                says="importance weights have no lower bound here",
                off=(None, 0.0),
            ),
        ),
    ),
    Row(
        "`policy.generation.val_temperature`, `val_top_p`, `val_top_k`",
        "no counterpart: validation samples as training does",
        (
            Rule(
                tuple(f"policy.generation.val_{name}" for name in ("temperature", "top_p", "top_k")),
                (),
                _validation_sampling,
            ),
        ),
    ),
    Row(
        "`policy.generation.vllm_cfg.enable_prefix_caching`, `kv_cache_dtype`",
        "`policy.generation.vllm_kwargs`, by the same names",
        (
            moved(
                "policy.generation.vllm_cfg.enable_prefix_caching",
                "policy.generation.vllm_kwargs.enable_prefix_caching",
                off=(None,),
            ),
            moved(
                "policy.generation.vllm_cfg.kv_cache_dtype",
                "policy.generation.vllm_kwargs.kv_cache_dtype",
                off=("auto", None),
            ),
        ),
    ),
    Row(
        "`policy.generation.vllm_kwargs.max_num_seqs`, `kv_cache_memory_bytes`",
        "`policy.generation.vllm_cfg`, by the same names",
        (
            moved("policy.generation.vllm_kwargs.max_num_seqs", "policy.generation.vllm_cfg.max_num_seqs"),
            moved(
                "policy.generation.vllm_kwargs.kv_cache_memory_bytes",
                "policy.generation.vllm_cfg.kv_cache_memory_bytes",
            ),
        ),
    ),
    Row(
        "`policy.generation.refit_cfg`, ports, buffers, progress bars, other engines' settings",
        "nothing to set",
        (
            nothing_to_set(
                "cluster.master_port_range_*",
                "policy.generation.port_range_*",
                "policy.generation.mcore_generation_config*",
                "policy.generation.sglang_cfg*",
                "policy.generation.trtllm_*",
                "policy.generation.dynamo_cfg*",
                "policy.generation.real_quant_export_cpu_offload",
                "policy.generation.use_async_rollouts",
                "policy.generation.vllm_cfg.logprobs_mode",
                "policy.generation.vllm_cfg.skip_tokenizer_init",
                "policy.generation.vllm_cfg.use_tqdm",
                "policy.generation.vllm_cfg.*metrics_logger*",
                "policy.generation.vllm_cfg.*_refit_*",
                "policy.generation.vllm_cfg.reset_encoder_cache_after_weight_update",
                "policy.generation.vllm_cfg.enable_expert_parallel",
                "policy.refit_buffer_size_gb",
                "policy.activation_checkpointing_enabled",
                "policy.disable_modelopt_layer_spec",
                "policy.tokenizer.use_fastokens",
                "checkpointing.model_save_format",
                "logger.wandb.log_nemo_gym_full_result_tables",
            ),
            left_out(
                "policy.generation.refit_cfg*",
                "policy.generation.refit_transport",
                says="policy and draft travel as one verified update",
                live=is_on("policy.generation.refit_transport"),
            ),
            left_out(
                "policy.offload_optimizer_for_logprob",
                says="no counterpart; policy.dtensor_cfg.cpu_offload keeps the optimizer in host memory",
                off=(False, None),
            ),
            left_out("cluster.segment_size", says="Slurm's topology is not looked at", off=(None,)),
            left_out("logger.swanlab*", says="there is no SwanLab logger", live=is_on("logger.swanlab_enabled")),
            left_out("checkpointing.save_optimizer", says="checkpoints hold the optimizer", off=(True, None)),
        ),
    ),
    Row(
        "`policy.hf_config_overrides`, `router_replay`, quantisation",
        "no counterpart: the policy's `config.json` counts, and weights are in `policy.precision`",
        (
            asked(
                "policy.hf_config_overrides*",
                says="no counterpart: change a copy of the policy's config.json instead",
                off=({}, None),
            ),
            left_out(
                "policy.router_replay*", says="experts are routed anew", live=is_on("policy.router_replay.enabled")
            ),
            asked(
                "policy.quant_*",
                "policy.generation.quant_cfg",
                "policy.generation.real_quant*",
                "policy.generation.vllm_cfg.quantization_ignored_layer_kws",
                "policy.generation.vllm_cfg.is_mx",
                "policy.generation.vllm_cfg.use_deep_gemm",
                "policy.generation.vllm_cfg.num_*_layers_in_bf16",
                says="no quantised training or serving here: weights are in policy.precision",
                off=(None, False, 0, []),
            ),
            left_out(
                "policy.generation.vllm_cfg.env_vars*",
                "policy.generation.vllm_cfg.expose_http_server",
                says="no counterpart: the engine runs in its worker's process, with that environment",
                off=(None, False),
            ),
        ),
    ),
    Row(
        "`grpo.*`, `loss_fn.*`, `env.*`, `checkpointing.*`, `logger.*`, `cluster.*`",
        "the same keys where they exist; other defaults: `logger.tensorboard_enabled: true`, `logger.monitor_gpus: "
        "false`",
        (
            Rule(("grpo.val_period",), ("grpo.val_period",), _val_period),
            same("grpo.*", "loss_fn.*", "env.*", "checkpointing.*", "logger.*", "cluster.*"),
            left_out("env.*", says="the environments here are math and reasoning_gym; env.name chooses"),
        ),
    ),
    Row(
        "other keys of `policy.*` and `data.*`",
        "the same keys where they exist",
        (same("policy.*", "data.*"), same("rollout_store.*", "draft_run.*")),
    ),
    Row(
        "`ray.sub` with `COMMAND`, `CONTAINER`, `MOUNTS`, `GPUS_PER_NODE`, `SETUP_COMMAND`",
        "`tools/launch/ray.sub` with the same, `SETUP_COMMAND` is `SETUP`; it runs without a container, too",
    ),
    Row(
        "converting a checkpoint to Hugging Face",
        "`checkpointing.save_consolidated: true` writes `policy_hf` into each",
    ),
    Row(
        "a checkpoint directory",
        "not read: start from the Hugging Face export of the policy and the draft's directory",
    ),
)

NEMO_RL = Project(
    name="nemo-rl",
    title="NeMo-RL",
    rows=ROWS,
    expected={
        "policy.model_name": "policy.model_name",
        "grpo.num_prompts_per_step": "grpo.num_prompts_per_step",
        "grpo.num_generations_per_prompt": "grpo.num_generations_per_prompt",
        "policy.train_global_batch_size": "policy.train_global_batch_size",
        "policy.max_total_sequence_length": "policy.max_total_sequence_length",
    },
    has_defaults_of_hydra=False,
)
