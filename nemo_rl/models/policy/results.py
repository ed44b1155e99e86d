"""What training returns: per rank and optimizer step, then folded into one plain dict. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nemo_rl.models.automodel.draft.metrics import expected_acceptance_length, expected_calibration_error

MetricPairs = dict[str, tuple[float, float]]
"""Metric name to (numerator, denominator)."""


@dataclass(frozen=True)
class GroupResult:
    """What one optimizer group did in one global batch, as one rank saw it.

    Attributes:
        loss: this rank's share; the sum over data-parallel ranks is the loss.
        grad_norm: global norm before clipping, equal on all ranks.
        lr: learning rate of the step.
        is_skipped: the update was left out on all ranks because loss or gradient was not finite.
        metrics: this rank's sums.
        weight_change_norm: global norm of the parameter update; None where it is not measured.
    """

    loss: float
    grad_norm: float
    lr: float
    is_skipped: bool
    metrics: MetricPairs
    weight_change_norm: float | None


@dataclass(frozen=True)
class BatchResult:
    """One optimizer step on one rank.

    Attributes:
        policy: the policy group; None = the policy was not trained.
        draft: the draft group, one result per update of it; empty when no draft was trained.
        global_valid_toks: supervised tokens of the global batch.
        global_valid_seqs: kept samples of the global batch.
        num_microbatches: forward and backward passes, zero-weight ones included.
        timing: phase to seconds.
    """

    policy: GroupResult | None
    draft: tuple[GroupResult, ...]
    global_valid_toks: float
    global_valid_seqs: float
    num_microbatches: int
    timing: dict[str, float]


def fold_results(ranks: Sequence[Sequence[BatchResult]], *, num_draft_tokens: int | None = None) -> dict[str, Any]:
    """Fold the results of data-parallel ranks into what `PolicyInterface.train` returns.

    Args:
        ranks: per data-parallel rank, one result per optimizer step.
        num_draft_tokens: K, the tokens that the draft proposes per step; None = there is no draft.
    """
    out = _fold_group([[step.policy for step in rank if step.policy is not None] for rank in ranks])
    scalars = out.pop("scalars")
    return {
        **out,
        "draft": _fold_draft(ranks, num_draft_tokens=num_draft_tokens) if ranks[0][0].draft else None,
        "num_skipped_updates": int(scalars["num_skipped_updates"]),
        "num_optimizer_steps": len(ranks[0]),
        **_totals(ranks),
    }


def fold_draft_results(ranks: Sequence[Sequence[BatchResult]], *, num_draft_tokens: int | None) -> dict[str, Any]:
    """Fold the results of data-parallel ranks into what `PolicyInterface.train_draft` returns.

    Args:
        ranks: per data-parallel rank, the results of one call.
        num_draft_tokens: K, the tokens that the draft proposes per step; None = not known.
    """
    return _fold_draft(ranks, num_draft_tokens=num_draft_tokens) | _totals(ranks)


def _fold_draft(ranks: Sequence[Sequence[BatchResult]], *, num_draft_tokens: int | None) -> dict[str, Any]:
    draft = _fold_group([[update for step in rank for update in step.draft] for rank in ranks])
    draft["scalars"] |= _draft_scalars(draft["metrics"], num_tokens=num_draft_tokens)
    return draft


def _totals(ranks: Sequence[Sequence[BatchResult]]) -> dict[str, Any]:
    first = ranks[0]
    return {
        "global_valid_toks": sum(step.global_valid_toks for step in first),
        "global_valid_seqs": sum(step.global_valid_seqs for step in first),
        "num_microbatches": sum(step.num_microbatches for step in first),
        "timing": _slowest([_sum_timing(rank) for rank in ranks]),
    }


def _fold_group(ranks: Sequence[Sequence[GroupResult]]) -> dict[str, Any]:
    steps = list(zip(*ranks, strict=True))
    losses = [math.fsum(r.loss for r in step) if all(map(_finite, step)) else math.nan for step in steps]
    taken = [i for i, step in enumerate(steps) if not step[0].is_skipped] or list(range(len(steps)))
    metrics: dict[str, list[float]] = {}
    for rank in ranks:
        for result in rank:
            for name, (num, den) in result.metrics.items():
                pair = metrics.setdefault(name, [0.0, 0.0])
                pair[0] += num
                pair[1] += den
    scalars = {"num_skipped_updates": float(sum(step[0].is_skipped for step in steps))}
    changes = [step[0].weight_change_norm for step in steps]
    if None not in changes:
        scalars["weight_change_norm"] = math.fsum(changes) / len(changes)
    return {
        "loss": _mean([losses[i] for i in taken]),
        "grad_norm": _mean([steps[i][0].grad_norm for i in taken]),
        "lr": steps[-1][0].lr,
        "metrics": {name: (num, den) for name, (num, den) in metrics.items()},
        "scalars": scalars,
    }


def _draft_scalars(metrics: MetricPairs, *, num_tokens: int | None) -> dict[str, float]:
    """Figures of the draft that are no single ratio, from the pairs of all ranks and updates."""
    out: dict[str, float] = {}
    # Of a draft that is not trained as deep as it proposes, the length would lack positions.
    if f"prefix_greedy_{num_tokens}" in metrics:
        out["expected_acceptance_length"] = expected_acceptance_length(metrics, max_tokens=num_tokens)
    calibration = expected_calibration_error(metrics)
    return out if calibration is None else out | {"confidence_calibration_error": calibration}


def _finite(result: GroupResult) -> bool:
    return math.isfinite(result.loss)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _sum_timing(steps: Sequence[BatchResult]) -> dict[str, float]:
    total: dict[str, float] = {}
    for step in steps:
        for name, seconds in step.timing.items():
            total[name] = total.get(name, 0.0) + seconds
    return total


def _slowest(timings: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: max(t[name] for t in timings) for name in timings[0]}
