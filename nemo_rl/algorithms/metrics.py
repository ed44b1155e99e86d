"""Folds (numerator, denominator) pairs into the scalars that are logged.

A ratio stays a pair until the last moment: sums over micro-batches, ranks and engines are exact, averages of averages
are not. A pair with a zero denominator was not measured and is left out instead of being reported as 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_rl.models.generation.interfaces import SpecCounters
    from nemo_rl.weight_sync.interfaces import RefitReport

Pair = tuple[float, float]


def add_pairs(parts: Iterable[Mapping[str, Pair]]) -> dict[str, Pair]:
    """Add pairs of the same name over parts (micro-batches, ranks, rollouts)."""
    total: dict[str, Pair] = {}
    for part in parts:
        for name, (num, den) in part.items():
            old = total.get(name, (0.0, 0.0))
            total[name] = (old[0] + float(num), old[1] + float(den))
    return total


def fold(pairs: Mapping[str, Pair], *, prefix: str = "") -> dict[str, float]:
    """Divide each pair; names with a zero denominator are left out."""
    return {f"{prefix}{name}": float(num) / float(den) for name, (num, den) in pairs.items() if float(den) != 0.0}


def draft_metrics(draft: Mapping[str, Any]) -> dict[str, float]:
    """Flatten what a policy returned about its draft.

    Args:
        draft: `loss`, `grad_norm`, `lr`, `scalars` and `metrics` (pairs), see `PolicyInterface.train`.

    Returns:
        Plain floats, names with ``draft_`` in front.
    """
    out = {f"draft_{name}": float(draft[name]) for name in ("loss", "grad_norm", "lr")}
    out |= {f"draft_{name}": float(value) for name, value in draft["scalars"].items()}
    return out | fold(draft["metrics"], prefix="draft_")


def refit_metrics(report: RefitReport) -> dict[str, float]:
    """Metrics of one refit, names with ``refit/`` in front."""
    return {
        "refit/version": float(report.version),
        "refit/verified": float(report.verified),
        "refit/num_tensors": float(report.num_tensors),
        "refit/gather_seconds": report.seconds_gather,
        "refit/apply_seconds": report.seconds_apply,
    }


def acceptance_metrics(counters: SpecCounters, *, prefix: str) -> dict[str, float]:
    """Metrics of the engine's speculative decoding over one rollout.

    ``acceptance_length`` is the mean number of tokens that one verification emits, 1 + accepted / drafts, in [1, K +
    1]; ``tokens_per_forward`` also counts verifications without a proposal; ``acceptance_rate_pos_{i}`` is the share of
    drafts whose i-th token (0-based) was accepted.

    Args:
        counters: *differences* of the engine's cumulative counters.
        prefix: e.g. ``vllm/spec_``.

    Returns:
        Plain floats; empty when nothing was drafted.
    """
    if counters.num_drafts == 0:
        return {}
    out = {
        "num_drafts": float(counters.num_drafts),
        "num_draft_tokens": float(counters.num_draft_tokens),
        "num_accepted_tokens": float(counters.num_accepted_tokens),
        "acceptance_length": 1.0 + counters.num_accepted_tokens / counters.num_drafts,
        "tokens_per_forward": counters.tokens_per_forward,
    }
    for position, accepted in enumerate(counters.accepted_per_pos):
        out[f"acceptance_rate_pos_{position}"] = accepted / counters.num_drafts
    return {f"{prefix}{name}": value for name, value in out.items()}
