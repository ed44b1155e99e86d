"""Boils the metrics of a run down to the few figures that show what it achieved; pure functions of plain numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

from nemo_rl.utils.draft_agreement import Acceptance, evaluated, measured, trained
from nemo_rl.utils.logger import MetricTable

LAST_STEPS = 3
"""The final value of a noisy metric is its mean over this many last steps."""

_TRAINING_PHASES = ("policy_training", "logprobs", "draft_training")


class TimeSplit(NamedTuple):
    """Seconds of one step by what they were spent on."""

    generation: float
    training: float
    """Log-probabilities of the old and the reference policy, and the update of policy and draft."""
    refit: float
    other: float

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return self.generation + self.training + self.refit + self.other


def time_split(metrics: Mapping[str, float]) -> TimeSplit | None:
    """Read the split of one step from its ``timing/train/...`` metrics.

    Args:
        metrics: The step's metrics by their full names.

    Returns:
        None when the step's total was not measured.
    """

    def seconds(phase: str) -> float:
        value = metrics.get(f"timing/train/{phase}", 0.0)
        return value if math.isfinite(value) else 0.0

    total = seconds("total_step_time")
    if total <= 0.0:
        return None
    generation, refit = seconds("generation"), seconds("refit")
    training = sum(seconds(phase) for phase in _TRAINING_PHASES)
    return TimeSplit(generation, training, refit, max(0.0, total - generation - training - refit))


class FirstLast(NamedTuple):
    """A metric at the first step, and its mean over the last `LAST_STEPS` steps."""

    first: float
    last: float


@dataclass(frozen=True)
class RunSummary:
    """Figures of one run; None = not measured."""

    num_steps: int
    reward: FirstLast | None
    validation_accuracy: FirstLast | None
    acceptance_length: FirstLast | None
    num_speculative_tokens: int | None
    engine_acceptance: Acceptance | None
    """What the engines measured, over the last steps that have the trainer's side too, if any have."""
    trainer_acceptance: Acceptance | None
    """What the training forward found in the same steps."""
    evaluated_acceptance: tuple[Acceptance, Acceptance] | None
    """Measured apart from training rollouts, the first time and the last time."""
    draft_loss: FirstLast | None
    refits_verified: int | None
    refits: int | None
    rollout_tokens_per_sec: FirstLast | None
    plain_tokens_per_sec: float | None
    """The probe: the same policy, decoding without speculation."""
    speculative_tokens_per_sec: float | None
    """The probe with speculation, at the same batch."""
    speedup: float | None
    wall_seconds: float | None

    def lines(self, *, arrow: str) -> Iterator[tuple[str, str]]:
        """Describe the run, one ``(name, text)`` per figure that was measured.

        Args:
            arrow: Stands between first and last, e.g. an arrow.
        """

        def change(pair: FirstLast, form: str) -> str:
            return f"{pair.first:{form}} {arrow} {pair.last:{form}}"

        yield "steps", f"{self.num_steps} (last = mean of the last {min(LAST_STEPS, self.num_steps)})"
        if self.reward is not None:
            yield "reward", change(self.reward, ".3f")
        if self.validation_accuracy is not None:
            yield "validation accuracy", change(self.validation_accuracy, ".3f")
        if self.acceptance_length is not None:
            ceiling = "" if self.num_speculative_tokens is None else f" of {self.num_speculative_tokens + 1}"
            yield "acceptance length", change(self.acceptance_length, ".2f") + ceiling
        sides = (("engine", self.engine_acceptance), ("trainer", self.trainer_acceptance))
        if any(side is not None and side.rates for _, side in sides):
            yield "acceptance at the end", ", ".join(f"{name} {side.describe()}" for name, side in sides if side)
        if self.evaluated_acceptance is not None:
            first, last = self.evaluated_acceptance
            yield "evaluated acceptance", f"{first.describe()} {arrow} {last.describe()}"
        if self.draft_loss is not None:
            yield "draft loss", change(self.draft_loss, ".3f")
        if self.refits is not None:
            yield "refits verified", f"{self.refits_verified}/{self.refits}"
        if self.rollout_tokens_per_sec is not None:
            yield "rollout tokens/s", change(self.rollout_tokens_per_sec, ",.0f")
        if self.plain_tokens_per_sec is not None:
            yield "decoding probe", self._probe_text(arrow=arrow)
        if self.wall_seconds is not None:
            yield "wall time", str(timedelta(seconds=round(self.wall_seconds)))

    def _probe_text(self, *, arrow: str) -> str:
        text = f"plain {self.plain_tokens_per_sec:,.0f} tokens/s"
        if self.speculative_tokens_per_sec is not None:
            text += f" {arrow} speculative {self.speculative_tokens_per_sec:,.0f} tokens/s"
        if self.speedup is not None:
            text += f" = {self.speedup:.2f}x"
        return text


def summarize(
    metrics: MetricTable, *, num_speculative_tokens: int | None = None, wall_seconds: float | None = None
) -> RunSummary:
    """Compute the figures from logged metrics.

    Args:
        metrics: What `nemo_rl.utils.logger.read_metrics` returns.
        num_speculative_tokens: K; None = no speculation.
        wall_seconds: Duration of the run.

    Returns:
        The figures; one whose metrics were never logged is None.
    """
    verified = finite(metrics, "refit/verified")
    plain = _final(metrics, "performance/plain_tokens_per_sec")
    speculative = _final(metrics, "performance/spec_tokens_per_sec")
    speedup = _final(metrics, "performance/spec_speedup")
    if speedup is None and plain and speculative:
        speedup = speculative / plain
    engine, trainer = _last_acceptance(metrics)
    return RunSummary(
        num_steps=max(len(metrics.get(f"train/{name}", {})) for name in ("reward", "loss", "draft_loss")),
        reward=_first_last(metrics, "train/reward"),
        validation_accuracy=_first_last(metrics, "validation/accuracy", last_steps=1),
        acceptance_length=_first_last(metrics, "vllm/spec_acceptance_length"),
        num_speculative_tokens=num_speculative_tokens,
        engine_acceptance=engine,
        trainer_acceptance=trainer,
        evaluated_acceptance=_evaluated(metrics),
        draft_loss=_first_last(metrics, "train/draft_loss"),
        refits_verified=sum(value == 1.0 for value in verified.values()) if verified else None,
        refits=len(metrics["refit/verified"]) if verified else None,
        rollout_tokens_per_sec=_first_last(metrics, "performance/rollout_tokens_per_sec"),
        plain_tokens_per_sec=plain,
        speculative_tokens_per_sec=speculative,
        speedup=speedup,
        wall_seconds=wall_seconds,
    )


def step_rows(metrics: MetricTable) -> dict[int, dict[str, float]]:
    """The metrics of each step by their full names, steps in order."""
    rows: dict[int, dict[str, float]] = {}
    for name, values in metrics.items():
        for step, value in values.items():
            rows.setdefault(step, {})[name] = value
    return dict(sorted(rows.items()))


def _last_acceptance(metrics: MetricTable) -> tuple[Acceptance | None, Acceptance | None]:
    """Engine's and trainer's acceptance, each the mean over the last steps that both know, or that one of them does."""
    sides = [(measured(row), trained(row)) for row in step_rows(metrics).values()]
    known = [pair for pair in sides if all(side.is_known for side in pair)]
    known = known or [pair for pair in sides if any(side.is_known for side in pair)]
    last = known[-LAST_STEPS:]
    engine, trainer = (_mean_acceptance([pair[i] for pair in last if pair[i].is_known]) for i in (0, 1))
    return engine, trainer


def _evaluated(metrics: MetricTable) -> tuple[Acceptance, Acceptance] | None:
    """Acceptance of the first and of the last measurement."""
    found = [acceptance for row in step_rows(metrics).values() if (acceptance := evaluated(row)).is_known]
    return (found[0], found[-1]) if found else None


def _mean_acceptance(steps: list[Acceptance]) -> Acceptance | None:
    if not steps:
        return None
    lengths = [step.length for step in steps if step.length is not None]
    rates = zip(*(step.rates for step in steps), strict=False)
    return Acceptance(
        sum(lengths) / len(lengths) if lengths else None, tuple(sum(values) / len(values) for values in rates)
    )


def finite(metrics: MetricTable, name: str) -> dict[int, float]:
    """Values of a metric by step, without those that are not finite; empty when it was never logged."""
    return {step: value for step, value in metrics.get(name, {}).items() if math.isfinite(value)}


def _final(metrics: MetricTable, name: str) -> float | None:
    values = list(finite(metrics, name).values())
    return values[-1] if values else None


def _first_last(metrics: MetricTable, name: str, *, last_steps: int = LAST_STEPS) -> FirstLast | None:
    values = list(finite(metrics, name).values())
    if not values:
        return None
    last = values[-last_steps:]
    return FirstLast(values[0], sum(last) / len(last))
