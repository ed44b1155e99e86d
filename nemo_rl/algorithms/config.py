"""Schema of the whole configuration (`MasterConfig`) and of the sections that belong to no one else.

`conflicts.py` checks what must agree between sections, without looking at any file; `nemo_rl.utils.preflight` checks
the rest before anything is started.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    StringConstraints,
    model_validator,
)

from nemo_rl.algorithms.conflicts import find_conflicts
from nemo_rl.data.config import DataConfig
from nemo_rl.environments.config import EnvConfig
from nemo_rl.models.policy.config import PolicyConfig
from nemo_rl.utils.schema import ConfigConflicts, ConfigModel, FreeForm, NonEmptyStr, Probability, interpolated

MetricName = Annotated[str, StringConstraints(pattern=r"^(train|val):.+$")]
"""`train:` or `val:` and the name of a metric."""

Deadline = Annotated[str, StringConstraints(pattern=r"^\d{2}:\d{2}:\d{2}:\d{2}$")]
"""Time since the start as `DD:HH:MM:SS`."""

ALGORITHM = "grpo"
"""What checkpoints of this schema's step loop say they are."""

DRAFT_ALGORITHM = "draft"
"""What checkpoints of a run that trains the draft alone say they are."""

Device = Literal["cuda", "cpu"]
"""A device once `auto` has been decided."""


class RewardShapingConfig(ConfigModel):
    """DAPO's penalty on responses that come close to the length limit."""

    enabled: bool = False
    """Subtract the penalty."""

    overlong_buffer_length: PositiveInt = 128
    """Tokens before the limit over which the penalty grows from 0."""

    overlong_buffer_penalty: NonNegativeFloat = 1.0
    """Penalty of a response at the limit."""

    max_response_length: PositiveInt = interpolated("${policy.max_total_sequence_length}")
    """The limit, in response tokens."""


class RewardScalingConfig(ConfigModel):
    """Linear map of rewards; values outside the source range are clamped."""

    enabled: bool = False
    """Map the rewards."""

    source_min: float = 0.0
    """Reward that becomes `target_min`."""

    source_max: float = 1.0
    """Reward that becomes `target_max`."""

    target_min: float = 0.0
    """Image of `source_min`."""

    target_max: float = 1.0
    """Image of `source_max`."""


class GRPOConfig(ConfigModel):
    """The step loop: rollouts, advantages, validation and stopping."""

    num_prompts_per_step: PositiveInt = 32
    """Prompts per step."""

    num_generations_per_prompt: PositiveInt = 16
    """Responses per prompt; they are each other's baseline."""

    max_rollout_turns: Literal[1] = 1
    """Turns of a conversation; the environments here have one."""

    max_num_epochs: PositiveInt = 1
    """Passes over the training prompts."""

    max_num_steps: PositiveInt = 1000000
    """Steps after which the run ends."""

    normalize_rewards: bool = True
    """Divide advantages by the standard deviation of their group."""

    use_leave_one_out_baseline: bool = True
    """Leave a response's own reward out of its baseline."""

    val_period: NonNegativeInt = 10
    """Steps between validations; 0 = never."""

    val_at_start: bool = False
    """Validate before the first step."""

    val_at_end: bool = False
    """Validate after the last step."""

    overlong_filtering: bool = False
    """Leave responses that were cut at the limit out of the loss."""

    max_val_samples: PositiveInt = 256
    """Prompts per validation."""

    val_batch_size: PositiveInt = 256
    """Prompts generated at once in validation."""

    val_num_generations_per_prompt: PositiveInt = 1
    """Responses per validation prompt."""

    stop_at_validation_metric: NonEmptyStr | None = None
    """Validation metric that ends the run early; null = none."""

    stop_at_validation_threshold: float | None = None
    """Value of `stop_at_validation_metric` at which the run ends."""

    seed: NonNegativeInt = 42
    """Seed of shuffling, sampling and initialisation."""

    use_dynamic_sampling: bool = False
    """DAPO: keep only prompts whose responses differ in reward, and generate until the batch is full."""

    dynamic_sampling_max_gen_batches: PositiveInt = 10
    """Generation rounds per step before dynamic sampling gives up."""

    batch_multiplier: Annotated[float, Field(ge=1.0)] = 1
    """Prompts per generation round as a multiple of `num_prompts_per_step` (dynamic sampling)."""

    advantage_clip_low: float | None = None
    """Lower bound of advantages; null = none."""

    advantage_clip_high: float | None = None
    """Upper bound of advantages; null = none."""

    seq_logprob_error_threshold: PositiveFloat | None = None
    """Leave samples out of the loss whose training and generation log-probabilities differ more than this factor."""

    max_nonfinite_steps: PositiveInt = 3
    """Skipped updates (non-finite loss or gradient) in a row after which the run stops."""

    reward_shaping: RewardShapingConfig = Field(default_factory=RewardShapingConfig)
    """Penalty on overlong responses."""

    reward_scaling: RewardScalingConfig = Field(default_factory=RewardScalingConfig)
    """Linear map of rewards."""


class ClippedPGLossConfig(ConfigModel):
    """Clipped policy-gradient loss with an optional KL term."""

    reference_policy_kl_penalty: NonNegativeFloat = 0.01
    """Factor of the KL term; 0 = no reference policy is kept."""

    reference_policy_kl_type: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL divergence."""

    kl_input_clamp_value: PositiveFloat | None = 20.0
    """Bound on the log-ratio inside the estimator; null = none."""

    kl_output_clamp_value: PositiveFloat | None = 10.0
    """Bound on the estimate per token; null = none."""

    ratio_clip_min: Probability = 0.2
    """The probability ratio is clipped below at 1 minus this."""

    ratio_clip_max: NonNegativeFloat = 0.2
    """The probability ratio is clipped above at 1 plus this (DAPO's clip-higher when larger than `ratio_clip_min`)."""

    ratio_clip_c: Annotated[float, Field(gt=1.0)] | None = None
    """Dual clip: bound on the loss of negative advantages, as a multiple of the advantage; null = none."""

    use_on_policy_kl_approximation: bool = False
    """Weigh the KL term by the probability ratio, so that its gradient is right off-policy too."""

    use_importance_sampling_correction: bool = False
    """Weigh tokens by training over generation probability."""

    truncated_importance_sampling_ratio: PositiveFloat | None = None
    """Upper bound of those weights; null = none."""

    sequence_level_importance_ratios: bool = False
    """One probability ratio per response (GSPO) instead of one per token."""

    token_level_loss: bool = True
    """Average over all tokens of the batch; False = over each response first."""

    force_on_policy_ratio: bool = False
    """Take the ratio as 1 and skip the log-probability pass; needs one optimizer step per rollout batch."""


class CheckpointingConfig(ConfigModel):
    """When and where the state of the run is saved."""

    enabled: bool = True
    """Save checkpoints, and continue from the latest one."""

    checkpoint_dir: NonEmptyStr = "results/grpo"
    """Directory of the `step_N` directories."""

    metric_name: MetricName | None = "val:accuracy"
    """Metric by which the best checkpoints are kept; null = keep the latest."""

    higher_is_better: bool = True
    """Whether a larger `metric_name` is better."""

    keep_top_k: PositiveInt | None = 3
    """Checkpoints kept; null = all."""

    save_period: PositiveInt = 10
    """Steps between checkpoints."""

    checkpoint_must_save_by: Deadline | None = None
    """Save once more before this time since the start, `DD:HH:MM:SS`; null = never."""

    save_consolidated: bool = False
    """Also write the policy in Hugging Face layout into each checkpoint."""


class RolloutStoreConfig(ConfigModel):
    """Recorded rollouts, from which a draft can be trained later without generating again."""

    mode: Literal["off", "record", "collect_only"] = "off"
    """`record` writes every step's rollouts; `collect_only` also leaves the draft untrained in this run."""

    dir: NonEmptyStr = "results/rollouts"
    """Directory of the store."""

    features: bool = False
    """Also store what the draft reads of the policy (states of its layers, in `policy.precision`), so that training
    from the store needs no forward of the policy."""

    max_gigabytes: PositiveFloat | None = None
    """Size at which a run stops adding to the store; null = never."""


class DraftRunConfig(ConfigModel):
    """Training of the draft beside a policy that stays as it is (examples/run_draft.py)."""

    source: Literal["prompts", "rollouts"] = "prompts"
    """Where responses come from: sampled from the policy for the prompts of `data`, or read from
    `rollout_store.dir`."""

    max_num_steps: PositiveInt = 100
    """Steps after which the run ends."""

    max_num_epochs: PositiveInt = 1
    """Passes over the prompts or the store."""

    num_prompts_per_step: PositiveInt = interpolated("${grpo.num_prompts_per_step}")
    """Prompts per step; with recorded rollouts, this many times `num_generations_per_prompt` samples."""

    num_generations_per_prompt: PositiveInt = 1
    """Responses per prompt."""

    eval_period: NonNegativeInt = 0
    """Steps between measurements of the acceptance in the live engine; 0 = only before the first step and after the
    last."""

    num_eval_prompts: PositiveInt = 64
    """Prompts of such a measurement, from the validation data where there is some."""


class WandbConfig(ConfigModel):
    """Weights & Biases."""

    project: NonEmptyStr = "grpo-dev"
    """Project."""

    name: NonEmptyStr = "grpo-dev-logger"
    """Name of the run."""


class MlflowConfig(ConfigModel):
    """MLflow."""

    experiment_name: NonEmptyStr = "grpo-dev"
    """Experiment."""

    run_name: NonEmptyStr = "grpo-dev-logger"
    """Name of the run."""

    tracking_uri: NonEmptyStr | None = None
    """Server or directory; null = MLflow's own default."""


class GpuMonitoringConfig(ConfigModel):
    """GPU utilisation and memory."""

    collection_interval: PositiveFloat = 10
    """Seconds between measurements."""

    flush_interval: PositiveFloat = 10
    """Seconds between writes."""


class LoggerConfig(ConfigModel):
    """Where metrics go."""

    log_dir: NonEmptyStr = "logs"
    """Directory of metrics.jsonl, the TensorBoard files and the report."""

    num_val_samples_to_print: NonNegativeInt = 0
    """Validation responses shown on the terminal."""

    wandb_enabled: bool = False
    """Log to Weights & Biases (extra `wandb`)."""

    tensorboard_enabled: bool = True
    """Log to TensorBoard."""

    mlflow_enabled: bool = False
    """Log to MLflow (extra `mlflow`)."""

    monitor_gpus: bool = False
    """Log GPU utilisation and memory (CUDA only)."""

    report: bool = True
    """Write report.html at the end."""

    wandb: WandbConfig = Field(default_factory=WandbConfig)
    """Weights & Biases settings."""

    tensorboard: FreeForm = Field(default_factory=dict)
    """Further arguments of TensorBoard's SummaryWriter."""

    mlflow: MlflowConfig = Field(default_factory=MlflowConfig)
    """MLflow settings."""

    gpu_monitoring: GpuMonitoringConfig = Field(default_factory=GpuMonitoringConfig)
    """GPU monitoring settings."""


class ClusterConfig(ConfigModel):
    """The machines and their devices."""

    gpus_per_node: PositiveInt = 1
    """GPUs of each node (CUDA only)."""

    num_nodes: PositiveInt = 1
    """Nodes."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    """`cuda`, `cpu`, or `auto` = cuda where a GPU is visible."""

    object_store_memory: PositiveInt | None = None
    """Bytes of Ray's shared-memory object store; null = chosen from the memory of the machine."""


class MasterConfig(ConfigModel):
    """The whole configuration of a run."""

    grpo: GRPOConfig = Field(default_factory=GRPOConfig)
    """The step loop."""

    loss_fn: ClippedPGLossConfig = Field(default_factory=ClippedPGLossConfig)
    """The policy's loss."""

    checkpointing: CheckpointingConfig = Field(default_factory=CheckpointingConfig)
    """When and where the state is saved."""

    policy: PolicyConfig
    """The model, its draft, its training and its generation."""

    data: DataConfig = Field(default_factory=DataConfig)
    """The prompts."""

    env: EnvConfig = Field(default_factory=EnvConfig)
    """What scores responses."""

    rollout_store: RolloutStoreConfig = Field(default_factory=RolloutStoreConfig)
    """Recorded rollouts."""

    draft_run: DraftRunConfig = Field(default_factory=DraftRunConfig)
    """Training of the draft beside a policy that stays as it is; read by examples/run_draft.py only."""

    logger: LoggerConfig = Field(default_factory=LoggerConfig)
    """Where metrics go."""

    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    """The machines and their devices."""

    @property
    def rollout_batch_size(self) -> int:
        """Samples that one step trains on."""
        return self.grpo.num_prompts_per_step * self.grpo.num_generations_per_prompt

    @property
    def draft_run_step_size(self) -> int:
        """Samples of one step of a run that trains the draft alone."""
        return self.draft_run.num_prompts_per_step * self.draft_run.num_generations_per_prompt

    @property
    def draft_run_batch_size(self) -> int:
        """Samples per update of the draft in such a run: as in GRPO, but never more than a step has."""
        own = self.policy.draft.train_global_batch_size
        return min(self.policy.train_global_batch_size if own is None else own, self.draft_run_step_size)

    @property
    def draft_seed(self) -> int:
        """Seed of the draft's initialisation and draws."""
        return self.grpo.seed if self.policy.draft.seed is None else self.policy.draft.seed

    def num_policy_workers(self, device: Device) -> int:
        """Count the training workers.

        Args:
            device: The device that the run uses.

        Returns:
            Number of ranks of the policy's process group.
        """
        if self.policy.dtensor_cfg.num_workers is not None:
            return self.policy.dtensor_cfg.num_workers
        return self._num_gpus_split()[0] if device == "cuda" else 1

    def policy_data_parallel_size(self, device: Device) -> int:
        """Count the training workers that hold different samples.

        Args:
            device: The device that the run uses.

        Returns:
            Workers divided by tensor-parallel and context-parallel size, rounded down.
        """
        dtensor = self.policy.dtensor_cfg
        return self.num_policy_workers(device) // (dtensor.tensor_parallel_size * dtensor.context_parallel_size)

    def num_generation_engines(self, device: Device) -> int:
        """Count the generation engines.

        Args:
            device: The device that the run uses.

        Returns:
            Number of data-parallel vLLM engines.
        """
        generation = self.policy.generation
        if generation.num_engines is not None:
            return generation.num_engines
        if device == "cpu":
            return 1
        return self._num_gpus_split()[1] // (
            generation.vllm_cfg.tensor_parallel_size * generation.vllm_cfg.pipeline_parallel_size
        )

    def _num_gpus_split(self) -> tuple[int, int]:
        """Return the GPUs of training and those of generation; all of them twice when they are shared."""
        per_node, nodes = self.cluster.gpus_per_node, self.cluster.num_nodes
        colocated = self.policy.generation.colocated
        if colocated.enabled:
            return per_node * nodes, per_node * nodes
        if nodes == 1:
            own = colocated.resources.gpus_per_node or 0
            return per_node - own, own
        own_nodes = colocated.resources.num_nodes or 0
        return per_node * (nodes - own_nodes), per_node * own_nodes

    @model_validator(mode="after")
    def _sections_agree(self) -> MasterConfig:
        conflicts = find_conflicts(self)
        if conflicts:
            raise ConfigConflicts(conflicts)
        return self
