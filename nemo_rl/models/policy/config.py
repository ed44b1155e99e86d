"""Schema of `policy`: the model, its parallel layout, batches and optimizer."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from nemo_rl.models.automodel.draft.config import DefaultDraftConfig, DraftConfig
from nemo_rl.models.generation.config import GenerationConfig, Precision
from nemo_rl.models.optim_config import OptimizerConfig, SchedulerConfig, SchedulerEntry, default_policy_scheduler
from nemo_rl.utils.schema import ConfigModel, FreeForm, NonEmptyStr, interpolated

__all__ = [
    "DTensorConfig",
    "DynamicBatchingConfig",
    "MegatronConfig",
    "OptimizerConfig",
    "PolicyConfig",
    "Precision",
    "SchedulerConfig",
    "SchedulerEntry",
    "SequencePackingConfig",
    "TokenizerConfig",
]


class TokenizerConfig(ConfigModel):
    """The tokenizer and its chat template."""

    name: NonEmptyStr = interpolated("${policy.model_name}")
    """Directory or hub name of the tokenizer."""

    chat_template: NonEmptyStr | None = None
    """Jinja chat template, or a path to one; null = the tokenizer's own."""

    chat_template_kwargs: FreeForm | None = None
    """Arguments of the chat template, e.g. `enable_thinking`."""


class DTensorConfig(ConfigModel):
    """Parallel layout of the policy's training workers (FSDP2 over device meshes)."""

    v2: Literal[True] = Field(default=True, alias="_v2")
    """Present for NeMo-RL recipes; only the nemo_automodel worker exists here."""

    enabled: Literal[True] = True
    """Present for NeMo-RL recipes; this is the only training backend here."""

    cpu_offload: bool = False
    """Keep parameters and optimizer state in host memory (CUDA only)."""

    sequence_parallel: bool = False
    """Shard activations along the sequence inside the tensor-parallel group."""

    activation_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them."""

    tensor_parallel_size: PositiveInt = 1
    """Workers that share each layer."""

    context_parallel_size: PositiveInt = 1
    """Workers that share each sequence; must be 1, context parallelism is not implemented."""

    expert_parallel_size: PositiveInt = 1
    """Workers over which the experts of a mixture-of-experts policy are spread (CUDA only)."""

    custom_parallel_plan: NonEmptyStr | None = None
    """Dotted path of a tensor-parallel plan; null = nemo_automodel's plan for the model."""

    automodel_kwargs: FreeForm = Field(default_factory=dict)
    """Further arguments of nemo_automodel's model builder."""

    num_workers: PositiveInt | None = None
    """Training workers; null = one per GPU on CUDA, 1 on CPU."""


class MegatronConfig(ConfigModel):
    """Present so that NeMo-RL recipes that switch Megatron off still load."""

    enabled: bool = False
    """Must be false: the training backend here is `policy.dtensor_cfg`."""

    @field_validator("enabled")
    @classmethod
    def _is_off(cls, value: bool) -> bool:
        if value:
            raise ValueError(
                "must be false: there is no Megatron backend here, policy.dtensor_cfg is the one that runs"
            )
        return value


class DynamicBatchingConfig(ConfigModel):
    """Micro-batches of equal token count instead of equal sample count."""

    enabled: bool = False
    """Form micro-batches by tokens. Excludes `policy.sequence_packing`."""

    train_mb_tokens: PositiveInt = interpolated(
        "${mul:${policy.max_total_sequence_length},${policy.train_micro_batch_size}}"
    )
    """Tokens (padding included) of a training micro-batch."""

    logprob_mb_tokens: PositiveInt = interpolated(
        "${mul:${policy.max_total_sequence_length},${policy.logprob_batch_size}}"
    )
    """Tokens (padding included) of a log-probability micro-batch."""

    sequence_length_round: PositiveInt = 64
    """Sequence lengths are rounded up to a multiple of this."""


class SequencePackingConfig(ConfigModel):
    """Several samples in one row, without seeing each other."""

    enabled: bool = False
    """Pack samples. Excludes `policy.dynamic_batching`."""

    train_mb_tokens: PositiveInt = interpolated(
        "${mul:${policy.max_total_sequence_length},${policy.train_micro_batch_size}}"
    )
    """Longest packed row in training, in tokens."""

    logprob_mb_tokens: PositiveInt = interpolated(
        "${mul:${policy.max_total_sequence_length},${policy.logprob_batch_size}}"
    )
    """Longest packed row when log-probabilities are computed, in tokens."""

    algorithm: Literal[
        "concatenative", "first_fit_decreasing", "first_fit_shuffle", "modified_first_fit_decreasing"
    ] = "modified_first_fit_decreasing"
    """How samples are assigned to rows."""

    sequence_length_round: PositiveInt = 64
    """Row lengths are rounded up to a multiple of this."""


class PolicyConfig(ConfigModel):
    """The policy: what is trained, how, and what it generates with."""

    model_name: NonEmptyStr
    """Directory or hub name of the policy's checkpoint."""

    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig)
    """The tokenizer and its chat template."""

    train_global_batch_size: PositiveInt = 512
    """Samples per optimizer step, over all workers."""

    train_micro_batch_size: PositiveInt = 4
    """Samples per worker in one forward and backward pass."""

    generation_batch_size: PositiveInt = 32
    """Present for NeMo-RL recipes; vLLM batches by itself."""

    logprob_batch_size: PositiveInt = 4
    """Samples per worker in one log-probability pass."""

    max_total_sequence_length: PositiveInt = 512
    """Longest prompt plus response, in tokens."""

    precision: Precision = "bfloat16"
    """Number format of forward and backward; master weights stay float32."""

    logprob_chunk_size: PositiveInt | None = None
    """Positions whose log-probabilities are computed at once; null = all."""

    dtensor_cfg: DTensorConfig = Field(default_factory=DTensorConfig)
    """Parallel layout of the training workers."""

    megatron_cfg: MegatronConfig = Field(default_factory=MegatronConfig)
    """Not available here; must stay off."""

    draft: DraftConfig = Field(default_factory=DefaultDraftConfig)
    """The draft trained beside the policy; `algo` decides which keys exist."""

    dynamic_batching: DynamicBatchingConfig = Field(default_factory=DynamicBatchingConfig)
    """Micro-batches of equal token count."""

    sequence_packing: SequencePackingConfig = Field(default_factory=SequencePackingConfig)
    """Several samples in one row."""

    make_sequence_length_divisible_by: PositiveInt = interpolated("${policy.dtensor_cfg.tensor_parallel_size}")
    """Padded sequence lengths are a multiple of this."""

    max_grad_norm: PositiveFloat | None = 1.0
    """The policy's gradient is scaled down to this norm; null = never."""

    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    """The policy's optimizer group."""

    scheduler: SchedulerConfig | None = Field(default_factory=default_policy_scheduler)
    """Learning-rate schedules of the policy; null = constant."""

    generation: GenerationConfig = Field(default_factory=GenerationConfig)
    """Sampling and its engines."""

    @property
    def draft_enabled(self) -> bool:
        """Whether a draft is trained or served beside the policy."""
        return self.draft.enabled

    @property
    def draft_served(self) -> bool:
        """Whether the engine proposes tokens with the draft of `draft`."""
        return self.draft.enabled and self.draft.serve

    @property
    def smallest_train_batch_size(self) -> int:
        """Samples of the smallest batch that an optimizer steps on: the draft's, where it has its own."""
        own = self.draft.train_global_batch_size if self.draft_enabled else None
        return self.train_global_batch_size if own is None else own
