"""The step loop that trains a draft beside a policy that stays as it is, over interfaces only.

One step: take responses of the policy -> train the draft -> send the draft to the engines, where they sample -> log,
evaluate, save. Responses are sampled for prompts now (`PromptSamples`) or were recorded by an earlier run
(`RecordedSamples`). What sits behind the interfaces is decided in :mod:`nemo_rl.algorithms.draft_run_setup`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from nemo_rl.algorithms.config import DRAFT_ALGORITHM
from nemo_rl.algorithms.grpo import DATALOADER_FILE, GRPOState, NonFiniteGuard, PromptSource, throughput_metrics
from nemo_rl.algorithms.metrics import acceptance_metrics, draft_metrics, refit_metrics
from nemo_rl.errors import CheckpointError, ConfigError
from nemo_rl.experience.rollouts import sample_responses, sample_seed
from nemo_rl.utils.draft_agreement import gap_metrics

if TYPE_CHECKING:
    from pathlib import Path

    from nemo_rl.algorithms.config import DraftRunConfig, MasterConfig
    from nemo_rl.data.datasets import PromptExample, PromptLoader
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl.models.generation.interfaces import GenerationInterface
    from nemo_rl.models.policy.interfaces import PolicyInterface
    from nemo_rl.utils.checkpoint import CheckpointManager
    from nemo_rl.utils.logger import Logger
    from nemo_rl.utils.timer import Timer
    from nemo_rl.weight_sync.synchronizer import WeightSynchronizer

log = logging.getLogger(__name__)


class DraftRunState(GRPOState):
    """Progress of a run; `val_metrics` are those of the latest evaluation."""

    algorithm: ClassVar[str] = DRAFT_ALGORITHM


# -- where responses come from ---------------------------------------------------------------------------------------


class Draw(NamedTuple):
    """The samples of one step."""

    batch: BatchedDataDict
    """`input_ids`, `input_lengths`, `token_mask`, `sample_mask` and whatever else the source knows."""
    metrics: dict[str, float]
    """By their full names."""


class SampleSource(Protocol):
    """Hands out the policy's responses, step by step, in an order that a resumed run continues."""

    phase: str
    """What a draw spends its time on, in the timings."""
    samples_with_draft: bool
    """The engines propose with the draft for these samples, so they must have the newest one for every step."""

    def draw(self, step: int) -> Draw | None:
        """Return the samples of a step; None when the epochs are over."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last draw, as JSON values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position."""


class PromptSamples:
    """Responses sampled from the policy for the prompts of the training data."""

    phase = "generation"

    def __init__(
        self,
        generation: GenerationInterface,
        loader: PromptLoader,
        cfg: DraftRunConfig,
        *,
        seed: int,
        pad_token_id: int,
        is_draft_served: bool,
    ) -> None:
        """Start at the loader's place.

        Args:
            generation: the engines.
            loader: prompts, one at a time.
            cfg: `draft_run`.
            seed: the run's seed.
            pad_token_id: fills the right side.
            is_draft_served: whether the engines propose with the draft.
        """
        self.samples_with_draft = is_draft_served
        self._generation = generation
        self._loader = loader
        self._prompts = PromptSource(loader, max_epochs=cfg.max_num_epochs)
        self._cfg = cfg
        self._seed = seed
        self._pad_token_id = pad_token_id

    def draw(self, step: int) -> Draw | None:
        """See `SampleSource.draw`."""
        num, repeats = self._cfg.num_prompts_per_step, self._cfg.num_generations_per_prompt
        examples = self._prompts.draw(num)
        if examples is None:
            return None
        counters = self._generation.spec_counters()
        self._generation.prepare_for_generation()
        batch, versions = sample_responses(
            self._generation,
            examples,
            num_generations=repeats,
            pad_token_id=self._pad_token_id,
            seeds=[
                sample_seed(seed=self._seed, step=step, draw=0, index=i, purpose="draft") for i in range(num * repeats)
            ],
        )
        self._generation.finish_generation()
        metrics = {
            "train/num_generated_tokens": float(batch["response_lengths"].sum()),
            "train/num_prompts_dropped": float(self._prompts.num_dropped),
            "train/rollout_weight_version": float(min(versions)),
        }
        return Draw(
            batch, metrics | acceptance_metrics(self._generation.spec_counters() - counters, prefix="vllm/spec_")
        )

    def state_dict(self) -> dict[str, Any]:
        """See `SampleSource.state_dict`."""
        return self._loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `SampleSource.load_state_dict`."""
        self._loader.load_state_dict(state)
        self._prompts = PromptSource(self._loader, max_epochs=self._cfg.max_num_epochs)


class RecordedBatches(Protocol):
    """The part of `nemo_rl.data.rollout_store.RolloutReader` that a run needs."""

    @property
    def num_samples(self) -> int:
        """Samples of the store."""

    def num_batches_per_epoch(self, batch_size: int) -> int:
        """Count the whole batches of one pass."""

    def batches(self, *, batch_size: int, seed: int, start: int = 0) -> Iterator[BatchedDataDict]:
        """Yield the batches of all passes, one after the other, without the first `start`."""


class RecordedSamples:
    """Responses that an earlier run recorded."""

    phase = "reading"
    samples_with_draft = False

    def __init__(
        self, reader: RecordedBatches, cfg: DraftRunConfig, *, seed: int, batch_size: int, max_length: int
    ) -> None:
        """Start at the first batch.

        Args:
            reader: the store.
            cfg: `draft_run`.
            seed: of the order.
            batch_size: samples of a step.
            max_length: longest sample that the run takes, in tokens.
        """
        self._reader = reader
        self._seed = seed
        self._batch_size = batch_size
        self._max_length = max_length
        self._num_batches = cfg.max_num_epochs * reader.num_batches_per_epoch(batch_size)
        self._position = 0
        self._iterator = reader.batches(batch_size=batch_size, seed=seed)

    @property
    def num_steps(self) -> int:
        """Steps of all passes together."""
        return self._num_batches

    def draw(self, step: int) -> Draw | None:
        """See `SampleSource.draw`.

        Raises:
            ConfigError: A sample is longer than the run takes.
        """
        if self._position >= self._num_batches:
            return None
        self._position += 1
        batch = next(self._iterator)
        longest = int(batch["input_lengths"].max())
        if longest > self._max_length:
            raise ConfigError(
                f"policy.max_total_sequence_length: got {self._max_length}; must be at least the {longest} tokens of a "
                "recorded sample. Raise it to what the samples were recorded with."
            )
        return Draw(batch, {})

    def state_dict(self) -> dict[str, Any]:
        """See `SampleSource.state_dict`."""
        return {"position": self._position, **self._order()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `SampleSource.load_state_dict`.

        Raises:
            CheckpointError: The position belongs to other samples or another order.
        """
        differing = {
            name: (state.get(name), value) for name, value in self._order().items() if state.get(name) != value
        }
        if differing:
            shown = ", ".join(f"{name} {old!r}, this run {new!r}" for name, (old, new) in differing.items())
            raise CheckpointError(
                f"{DATALOADER_FILE}: its position means other recorded samples ({shown}). Restore rollout_store.dir, "
                "grpo.seed and draft_run, or start with another checkpointing.checkpoint_dir."
            )
        self._position = int(state["position"])
        self._iterator = self._reader.batches(batch_size=self._batch_size, seed=self._seed, start=self._position)

    def _order(self) -> dict[str, int]:
        return {"num_samples": self._reader.num_samples, "batch_size": self._batch_size, "seed": self._seed}


# -- the loop --------------------------------------------------------------------------------------------------------


@dataclass
class Evaluator:
    """Measures acceptance in the live engines, on the same prompts and with the same seeds each time."""

    generation: GenerationInterface
    examples: list[PromptExample]
    seed: int
    pad_token_id: int

    def measure(self) -> dict[str, float]:
        """Sample one response per prompt with the draft that the engines hold.

        Returns:
            Acceptance metrics (nothing when nothing was drafted), ``mean_response_length`` (tokens) and
            ``num_prompts``.
        """
        before = self.generation.spec_counters()
        self.generation.prepare_for_generation()
        batch, _ = sample_responses(
            self.generation,
            self.examples,
            num_generations=1,
            pad_token_id=self.pad_token_id,
            seeds=[
                sample_seed(seed=self.seed, step=0, draw=0, index=i, purpose="evaluation")
                for i in range(len(self.examples))
            ],
        )
        self.generation.finish_generation()
        return acceptance_metrics(self.generation.spec_counters() - before, prefix="") | {
            "mean_response_length": float(batch["response_lengths"].float().mean()),
            "num_prompts": float(batch.size),
        }


@dataclass
class DraftRunComponents:
    """What a run is made of; built by :func:`nemo_rl.algorithms.draft_run_setup.setup`."""

    cfg: MasterConfig
    policy: PolicyInterface
    source: SampleSource
    synchronizer: WeightSynchronizer | None
    """None = there are no engines, or they do not serve the draft."""
    evaluator: Evaluator | None
    """None = the draft is not served, so there is nothing to measure."""
    logger: Logger
    timer: Timer
    checkpointer: CheckpointManager
    state: DraftRunState
    on_step: Callable[[int, dict[str, float]], None]
    """Called with (step, metrics) after each step: the live progress line."""
    on_evaluation: Callable[[int, dict[str, float]], None]


def refit_draft(c: DraftRunComponents) -> dict[str, float]:
    """Send the draft to the engines, unless they hold it already.

    Returns:
        Metrics of the refit; empty when there was none.
    """
    if c.synchronizer is None or c.synchronizer.version >= c.state.step:
        return {}
    with c.timer.time("refit"):
        report = c.synchronizer.sync(c.state.step, draft_only=True)
        c.policy.offload_after_refit()
    return refit_metrics(report)


def evaluate(c: DraftRunComponents, evaluator: Evaluator) -> dict[str, float]:
    """Measure the acceptance of the present draft, log it and remember it for the ranking of checkpoints.

    Returns:
        Metrics of the refit that the measurement needed, if any.
    """
    refitted = refit_draft(c)
    with c.timer.time("evaluation"):
        metrics = evaluator.measure()
    c.state.val_metrics, c.state.validated_step = metrics, c.state.step
    c.logger.log_metrics(metrics, c.state.step, prefix="eval")
    c.on_evaluation(c.state.step, metrics)
    return refitted


def sample_metrics(batch: BatchedDataDict) -> dict[str, float]:
    """Lengths of a step's responses; what the source does not know is left out."""
    out: dict[str, float] = {}
    if "response_lengths" in batch:
        out["train/mean_gen_tokens_per_sample"] = float(batch["response_lengths"].float().mean())
        out["train/max_gen_tokens_per_sample"] = float(batch["response_lengths"].max())
    if "truncated" in batch:
        out["train/truncated_fraction"] = float(batch["truncated"].float().mean())
    return out


def draft_step(c: DraftRunComponents) -> dict[str, float] | None:
    """One step up to and including the refit.

    Returns:
        The step's metrics, or None when the samples are used up.
    """
    with c.timer.time(c.source.phase):
        drawn = c.source.draw(c.state.step)
    if drawn is None:
        return None
    c.policy.prepare_for_training()
    with c.timer.time("draft_training"):
        result = c.policy.train_draft(drawn.batch, step=c.state.step)
    metrics = drawn.metrics | sample_metrics(drawn.batch)
    metrics |= {f"train/{name}": value for name, value in draft_metrics(result).items()}
    metrics["train/global_valid_toks"] = float(result["global_valid_toks"])
    if c.source.samples_with_draft:
        metrics |= gap_metrics(metrics)
    c.state.step += 1
    c.state.consumed_samples += drawn.batch.size
    c.state.total_valid_tokens += int(result["global_valid_toks"])
    if c.source.samples_with_draft:
        metrics |= refit_draft(c)
    return metrics | {f"timing/train/{name}": value for name, value in result["timing"].items()}


def draft_train(c: DraftRunComponents) -> DraftRunState:
    """Run steps until ``draft_run.max_num_steps``, the end of its epochs, or the time limit.

    The engines, if there are any, must hold the policy and the draft of ``state.step``. Acceptance is measured before
    the first step and after the last one.

    Raises:
        NonFiniteError: updates were skipped too many times in a row.
        RefitError: an update did not reach the engines whole; nothing is generated after it.
        WorkerError: a worker raised or died; the last checkpoint is intact.
    """
    cfg, state, timer = c.cfg.draft_run, c.state, c.timer
    guard = NonFiniteGuard(c.cfg.grpo.max_nonfinite_steps)
    if c.evaluator is not None and state.step == 0:
        evaluate(c, c.evaluator)

    metrics: dict[str, float] = {}
    saved_step = state.step
    while state.step < cfg.max_num_steps:
        timer.reset()
        with timer.time("total_step_time"):
            step_metrics = draft_step(c)
        if step_metrics is None:
            log.info("samples ended after %d epochs at step %d", cfg.max_num_epochs, state.step)
            break
        metrics = step_metrics
        guard.update(int(metrics["train/draft_num_skipped_updates"]), step=state.step)
        is_last = state.step >= cfg.max_num_steps
        if "train/num_generated_tokens" in metrics:
            metrics |= throughput_metrics(timer, metrics["train/num_generated_tokens"])
        metrics |= {f"timing/train/{k}": v for k, v in timer.reduce().items()}
        if c.evaluator is not None and (is_last or (cfg.eval_period > 0 and state.step % cfg.eval_period == 0)):
            metrics |= evaluate(c, c.evaluator)
        # The row is written before the checkpoint, as in GRPO: a run killed in between writes it again on resume.
        c.logger.log_metrics(metrics, state.step)
        if c.checkpointer.should_save(state.step, is_last=is_last):
            with timer.time("checkpointing"):
                save_checkpoint(c, metrics)
            c.logger.log_metrics({"timing/train/checkpointing": timer.total("checkpointing")}, state.step)
            saved_step = state.step
        c.on_step(state.step, metrics)
        if c.checkpointer.out_of_time():
            log.info("stopping at step %d", state.step)
            break

    if c.evaluator is not None and state.validated_step != state.step:
        evaluate(c, c.evaluator)
    if c.cfg.checkpointing.enabled and saved_step != state.step:
        save_checkpoint(c, metrics)  # the samples ended where no one could know that it was the last step
    return state


def save_checkpoint(c: DraftRunComponents, train_metrics: Mapping[str, float]) -> Path:
    """Write everything that a resumed run needs: the draft, its optimizer and the place in the samples."""
    path = c.checkpointer.init_tmp_checkpoint(c.state.step, c.state.training_info(train_metrics), c.cfg)
    c.policy.save_checkpoint(str(path))
    c.checkpointer.save_json(path / DATALOADER_FILE, c.source.state_dict())
    return c.checkpointer.finalize_checkpoint(path)
