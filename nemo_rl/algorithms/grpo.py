"""The GRPO/DAPO step loop, over interfaces only.

One step: draw prompts -> roll out -> advantages -> train policy and draft -> refit both into the engines -> log,
validate, save. Which policy, engine, environment or draft sits behind an interface is decided in
:mod:`nemo_rl.algorithms.grpo_setup`.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from nemo_rl.algorithms.advantages import group_advantages, scale_rewards, shape_overlong_rewards
from nemo_rl.algorithms.config import ALGORITHM
from nemo_rl.algorithms.dynamic_sampling import DynamicSamplingResult, informative_groups, sample_dynamically
from nemo_rl.algorithms.metrics import acceptance_metrics, add_pairs, draft_metrics, fold, refit_metrics
from nemo_rl.algorithms.validation import ValidationResult, validate
from nemo_rl.data.rollout_store import record_step
from nemo_rl.errors import NonFiniteError
from nemo_rl.experience.rollouts import Rollout, run_rollout, sample_seed
from nemo_rl.utils.draft_agreement import gap_metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from nemo_rl.algorithms.config import MasterConfig
    from nemo_rl.algorithms.loss import ClippedPGLossFn
    from nemo_rl.data.datasets import PromptDataset, PromptExample, PromptLoader
    from nemo_rl.data.rollout_store import RolloutWriter
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl.environments.interfaces import EnvironmentInterface
    from nemo_rl.experience.rollouts import Decoder
    from nemo_rl.models.generation.interfaces import GenerationInterface
    from nemo_rl.models.policy.interfaces import PolicyInterface
    from nemo_rl.utils.checkpoint import CheckpointManager
    from nemo_rl.utils.logger import Logger
    from nemo_rl.utils.timer import Timer
    from nemo_rl.weight_sync.synchronizer import WeightSynchronizer

log = logging.getLogger(__name__)

DATALOADER_FILE = "train_dataloader.json"
CONSOLIDATED_DIR = "policy_hf"
"""The policy in Hugging Face layout, with ``checkpointing.save_consolidated``."""


@dataclass
class GRPOState:
    """Progress of a run; everything here is in ``training_info.json``."""

    algorithm: ClassVar[str] = ALGORITHM

    step: int = 0
    """Optimizer rounds finished."""
    consumed_samples: int = 0
    total_valid_tokens: int = 0
    val_metrics: dict[str, float] = field(default_factory=dict)
    validated_step: int = -1
    """Step that ``val_metrics`` belong to."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the checkpoint's ``training_info.json``."""
        return {"algorithm": self.algorithm} | dataclasses.asdict(self)

    def training_info(self, train_metrics: Mapping[str, float]) -> dict[str, Any]:
        """What a checkpoint of this step says, the metrics that rank it included.

        Args:
            train_metrics: of the step.
        """
        info = self.to_dict()
        if self.validated_step != self.step:
            info["val_metrics"] = {}  # an older validation must not rank these weights
        # JSON has no NaN; a metric without a value does not rank.
        info["train_metrics"] = {name: value for name, value in train_metrics.items() if math.isfinite(value)}
        return info

    @classmethod
    def from_dict(cls, info: dict[str, Any]) -> Self:
        """Read back what :meth:`to_dict` wrote."""
        return cls(**{f.name: info[f.name] for f in dataclasses.fields(cls)})


@dataclass
class GRPOComponents:
    """What a run is made of; built by :func:`nemo_rl.algorithms.grpo_setup.setup`."""

    cfg: MasterConfig
    policy: PolicyInterface
    generation: GenerationInterface
    synchronizer: WeightSynchronizer
    environment: EnvironmentInterface
    tokenizer: Decoder
    pad_token_id: int
    loader: PromptLoader
    val_dataset: PromptDataset | None
    loss_fn: ClippedPGLossFn
    logger: Logger
    timer: Timer
    checkpointer: CheckpointManager
    state: GRPOState
    on_step: Callable[[int, dict[str, float]], None]
    """Called with (step, metrics) after each step: the live progress line."""
    on_validation: Callable[[int, ValidationResult], None]
    rollout_writer: RolloutWriter | None = None
    """Receives every step's samples; None = they are not recorded."""


class DataExhausted(Exception):
    """The configured number of epochs is over."""


class PromptSource:
    """Draws prompts that fit the engine, counts those that do not, and knows when the epochs are over."""

    def __init__(self, loader: PromptLoader, *, max_epochs: int) -> None:
        self._loader = loader
        self._max_epochs = max_epochs
        self._iterator = iter(loader)
        self.num_dropped = 0

    def draw(self, num_prompts: int) -> list[PromptExample] | None:
        """Return ``num_prompts`` prompts, or None when ``max_num_epochs`` ends before."""
        examples: list[PromptExample] = []
        while len(examples) < num_prompts:
            batch = next(self._iterator, None)
            if batch is None:
                if self._loader.epoch >= self._max_epochs:
                    return None
                self._iterator = iter(self._loader)
                continue
            for example in batch:
                if example.too_long:
                    self.num_dropped += 1
                else:
                    examples.append(example)
        return examples


def collect(c: GRPOComponents, source: PromptSource) -> tuple[DynamicSamplingResult, list[Rollout]] | None:
    """Roll out one step's samples; several generation batches with dynamic sampling.

    Returns:
        The samples with their raw ``rewards``, and the rollouts behind them; None when the data is used up.
    """
    grpo, rollouts = c.cfg.grpo, []

    def generate(draw: int) -> BatchedDataDict:
        num_prompts = grpo.num_prompts_per_step
        if grpo.use_dynamic_sampling:
            num_prompts = math.ceil(num_prompts * grpo.batch_multiplier)
        examples = source.draw(num_prompts)
        if examples is None:
            raise DataExhausted
        n = grpo.num_generations_per_prompt
        rollout = run_rollout(
            c.generation,
            c.environment,
            c.tokenizer,
            examples,
            num_generations=n,
            pad_token_id=c.pad_token_id,
            seeds=[sample_seed(seed=grpo.seed, step=c.state.step, draw=draw, index=i) for i in range(num_prompts * n)],
        )
        rollouts.append(rollout)
        return rollout.batch

    try:
        if not grpo.use_dynamic_sampling:
            batch = generate(0)
            groups = batch.size // grpo.num_generations_per_prompt
            return DynamicSamplingResult(batch, 1, groups, 0), rollouts
        result = sample_dynamically(
            generate,
            num_prompts=grpo.num_prompts_per_step,
            num_generations=grpo.num_generations_per_prompt,
            max_gen_batches=grpo.dynamic_sampling_max_gen_batches,
        )
    except DataExhausted:
        return None
    return result, rollouts


def prepare_training_batch(cfg: MasterConfig, batch: BatchedDataDict) -> dict[str, float]:
    """Add ``sample_index``, ``advantages`` and the final ``sample_mask`` to a step's samples, in place.

    Args:
        cfg: the run's configuration.
        batch: scored samples, prompt by prompt.

    Returns:
        Reward metrics.
    """
    grpo, raw = cfg.grpo, batch["rewards"]
    if grpo.overlong_filtering:
        batch["sample_mask"] = batch["sample_mask"] * (~batch["truncated"]).float()
    rewards = scale_rewards(raw, grpo.reward_scaling)
    rewards = shape_overlong_rewards(rewards, batch["response_lengths"], grpo.reward_shaping)
    advantages, stats = group_advantages(
        rewards,
        batch["sample_mask"].bool(),
        num_generations=grpo.num_generations_per_prompt,
        use_leave_one_out_baseline=grpo.use_leave_one_out_baseline,
        normalize_rewards=grpo.normalize_rewards,
        clip_low=grpo.advantage_clip_low,
        clip_high=grpo.advantage_clip_high,
    )
    batch["advantages"] = advantages[:, None] * batch["token_mask"].float()
    batch["sample_index"] = torch.arange(batch.size, dtype=torch.int64)
    return {
        "reward": float(raw.mean()),
        "reward_shaped": float(rewards.mean()),
        "reward_std_in_group": float(stats.std.mean()),
        "advantages_mean": float(advantages.mean()),
        "advantages_max": float(advantages.max()),
        "advantages_min": float(advantages.min()),
        "mean_gen_tokens_per_sample": float(batch["response_lengths"].float().mean()),
        "max_gen_tokens_per_sample": float(batch["response_lengths"].max()),
        "truncated_fraction": float(batch["truncated"].float().mean()),
        "informative_group_fraction": float(
            informative_groups(raw, num_generations=grpo.num_generations_per_prompt).float().mean()
        ),
    }


def add_old_logprobs(c: GRPOComponents, batch: BatchedDataDict) -> dict[str, float]:
    """Add ``prev_logprobs`` and ``reference_policy_logprobs`` where the loss reads them, in place.

    With ``loss_fn.force_on_policy_ratio`` the previous log-probabilities are the current ones, so their extra forward
    is skipped unless ``grpo.seq_logprob_error_threshold`` needs it.

    Returns:
        Metrics of the sequence filter.
    """
    cfg, metrics = c.cfg, {}
    if not cfg.loss_fn.force_on_policy_ratio or cfg.grpo.seq_logprob_error_threshold is not None:
        batch["prev_logprobs"] = c.policy.get_logprobs(batch)["logprobs"]
    if cfg.loss_fn.reference_policy_kl_penalty != 0:
        batch["reference_policy_logprobs"] = c.policy.get_reference_policy_logprobs(batch)["reference_logprobs"]
    if cfg.grpo.seq_logprob_error_threshold is not None:
        # A sequence that engine and trainer disagree on carries a wrong gradient: leave it out of the loss.
        mask = batch["token_mask"].float()
        gap = (batch["prev_logprobs"] - batch["generation_logprobs"]).abs().exp()
        error = (gap * mask).sum(-1) / mask.sum(-1).clamp(min=1)
        keep = error <= cfg.grpo.seq_logprob_error_threshold
        batch["sample_mask"] = batch["sample_mask"] * keep.float()
        metrics["num_sequences_over_logprob_error_threshold"] = float((~keep).sum())
    return metrics


def training_metrics(result: dict[str, Any]) -> dict[str, float]:
    """Flatten what ``policy.train`` returned into ``train/...`` scalars."""
    out = {"loss": result["loss"], "grad_norm": result["grad_norm"], "lr": result["lr"]}
    out["num_skipped_updates"] = float(result["num_skipped_updates"])
    out["global_valid_toks"] = float(result["global_valid_toks"])
    out |= fold(result["metrics"])
    if result["draft"] is not None:
        out |= draft_metrics(result["draft"])
    return {f"train/{name}": float(value) for name, value in out.items()}


class NonFiniteGuard:
    """Stops a run whose updates keep being skipped for non-finite losses or gradients."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._consecutive = 0

    def update(self, num_skipped: int, *, step: int) -> None:
        """Count a step; raise :class:`NonFiniteError` at the limit."""
        self._consecutive = self._consecutive + 1 if num_skipped else 0
        if self._consecutive >= self._limit:
            raise NonFiniteError(
                f"step {step}: the update was skipped for a non-finite loss or gradient in {self._consecutive} "
                f"consecutive steps (grpo.max_nonfinite_steps={self._limit}). Lower the learning rate, or resume from "
                "an earlier checkpoint."
            )


def run_validation(c: GRPOComponents, dataset: PromptDataset) -> ValidationResult:
    """Validate the weights that the engines hold, log the result and remember it for checkpoint ranking.

    Args:
        c: the run.
        dataset: held-out prompts; the first `grpo.max_val_samples` that fit the engine are used.
    """
    grpo, state = c.cfg.grpo, c.state
    examples = list(itertools.islice((e for e in dataset if not e.too_long), grpo.max_val_samples))
    with c.timer.time("validation"):
        result = validate(
            c.generation,
            c.environment,
            c.tokenizer,
            examples,
            step=state.step,
            seed=grpo.seed,
            batch_size=grpo.val_batch_size,
            num_generations=grpo.val_num_generations_per_prompt,
            pad_token_id=c.pad_token_id,
            num_samples_to_keep=c.cfg.logger.num_val_samples_to_print,
        )
    state.val_metrics, state.validated_step = result.metrics, state.step
    c.logger.log_metrics(result.metrics, state.step, prefix="validation")
    c.on_validation(state.step, result)
    return result


def save_checkpoint(c: GRPOComponents, train_metrics: dict[str, float]) -> Path:
    """Write everything that a resumed run needs; the directory appears under its final name only when complete."""
    path = c.checkpointer.init_tmp_checkpoint(c.state.step, c.state.training_info(train_metrics), c.cfg)
    c.policy.save_checkpoint(str(path))
    if c.cfg.checkpointing.save_consolidated:
        c.policy.export_hf(str(path / CONSOLIDATED_DIR))
    c.checkpointer.save_json(path / DATALOADER_FILE, c.loader.state_dict())
    return c.checkpointer.finalize_checkpoint(path)


def grpo_step(c: GRPOComponents, source: PromptSource) -> dict[str, float] | None:
    """One step up to and including the refit.

    Returns:
        The step's metrics, or None when the data is used up.
    """
    cfg, timer, state = c.cfg, c.timer, c.state
    counters = c.generation.spec_counters()
    with timer.time("generation"):
        c.generation.prepare_for_generation()
        collected = collect(c, source)
        c.generation.finish_generation()
    if collected is None:
        return None
    sampling, rollouts = collected
    batch = sampling.batch
    metrics = {f"train/{k}": v for k, v in prepare_training_batch(cfg, batch).items()}
    metrics |= fold(add_pairs(r.env_metrics for r in rollouts), prefix="train/env_")
    metrics["train/num_prompts_dropped"] = float(source.num_dropped)
    if cfg.grpo.use_dynamic_sampling:
        metrics["train/dynamic_sampling_num_gen_batches"] = float(sampling.num_generation_batches)
        metrics["train/dynamic_sampling_dropped_fraction"] = sampling.num_groups_dropped / sampling.num_groups_generated
    versions = frozenset().union(*(r.weight_versions for r in rollouts))
    metrics["train/rollout_weight_version"] = float(min(versions))
    metrics |= acceptance_metrics(c.generation.spec_counters() - counters, prefix="vllm/spec_")
    generated_tokens = float(sum(int(r.batch["response_lengths"].sum()) for r in rollouts))

    c.policy.prepare_for_training()
    with timer.time("logprobs"):
        metrics |= {f"train/{k}": v for k, v in add_old_logprobs(c, batch).items()}
    if c.rollout_writer is not None:
        # Before the update: stored features are those of the weights that sampled.
        with timer.time("recording"):
            metrics |= record_step(c.rollout_writer, c.policy, batch, step=state.step + 1, versions=versions)
    with timer.time("policy_training"):
        result = c.policy.train(batch, c.loss_fn, step=state.step)
    metrics |= training_metrics(result)
    if cfg.policy.draft_served:
        metrics |= gap_metrics(metrics)
    state.step += 1
    state.consumed_samples += cfg.grpo.num_prompts_per_step
    state.total_valid_tokens += int(result["global_valid_toks"])

    with timer.time("refit"):
        report = c.synchronizer.sync(state.step)
        c.policy.offload_after_refit()
    metrics |= refit_metrics(report) | {"train/num_generated_tokens": generated_tokens}
    metrics |= {f"timing/train/{name}": value for name, value in result["timing"].items()}
    return metrics


def grpo_train(c: GRPOComponents) -> GRPOState:
    """Run steps until ``max_num_steps``, ``max_num_epochs``, an early stop, or the time limit.

    The engines must hold the policy's weights already (version ``state.step``).

    Raises:
        NonFiniteError: updates were skipped too many times in a row.
        RefitError: an update did not reach the engines whole; nothing is generated after it.
        WorkerError: a worker raised or died; the last checkpoint is intact.
    """
    cfg, state, timer = c.cfg, c.state, c.timer
    source = PromptSource(c.loader, max_epochs=cfg.grpo.max_num_epochs)
    guard = NonFiniteGuard(cfg.grpo.max_nonfinite_steps)
    if cfg.grpo.val_at_start and state.step == 0 and c.val_dataset is not None:
        run_validation(c, c.val_dataset)

    metrics: dict[str, float] = {}
    saved_step = state.step
    while state.step < cfg.grpo.max_num_steps:
        timer.reset()
        with timer.time("total_step_time"):
            step_metrics = grpo_step(c, source)
        if step_metrics is None:
            log.info("data ended after %d epochs at step %d", cfg.grpo.max_num_epochs, state.step)
            break
        metrics = step_metrics
        guard.update(int(metrics["train/num_skipped_updates"]), step=state.step)
        should_stop = False
        is_last = state.step >= cfg.grpo.max_num_steps
        if c.val_dataset is not None and (
            (cfg.grpo.val_period > 0 and state.step % cfg.grpo.val_period == 0) or (is_last and cfg.grpo.val_at_end)
        ):
            run_validation(c, c.val_dataset)
            should_stop = reached_target(cfg, state.val_metrics)
        metrics |= throughput_metrics(timer, metrics["train/num_generated_tokens"])
        metrics |= {f"timing/train/{k}": v for k, v in timer.reduce().items()}
        # The row is written before the checkpoint: a run killed in between truncates it on resume and writes it again;
        # the other order would lose it.
        c.logger.log_metrics(metrics, state.step)
        if c.checkpointer.should_save(state.step, is_last=is_last or should_stop):
            with timer.time("checkpointing"):
                save_checkpoint(c, metrics)
            c.logger.log_metrics({"timing/train/checkpointing": timer.total("checkpointing")}, state.step)
            saved_step = state.step
        c.on_step(state.step, metrics)
        if should_stop or c.checkpointer.out_of_time():
            log.info("stopping at step %d", state.step)
            break

    if cfg.grpo.val_at_end and c.val_dataset is not None and state.validated_step != state.step:
        run_validation(c, c.val_dataset)
    if cfg.checkpointing.enabled and saved_step != state.step:
        save_checkpoint(c, metrics)  # the data ended where no one could know that it was the last step
    return state


def reached_target(cfg: MasterConfig, val_metrics: dict[str, float]) -> bool:
    """Whether the early-stop metric has reached its threshold."""
    name, threshold = cfg.grpo.stop_at_validation_metric, cfg.grpo.stop_at_validation_threshold
    return name is not None and threshold is not None and val_metrics[name] >= threshold


def throughput_metrics(timer: Timer, generated_tokens: float) -> dict[str, float]:
    """Tokens per second of the step and of its rollouts (all engines together)."""
    seconds = timer.reduce()
    return {
        "performance/rollout_tokens_per_sec": generated_tokens / max(seconds["generation"], 1e-9),
        "performance/tokens_per_sec": generated_tokens / max(seconds["total_step_time"], 1e-9),
    }
