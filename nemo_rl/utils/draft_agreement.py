"""Acceptance as the engine measured it, beside what the trainer finds for the same draft; pure functions of metrics.

The trainer has up to two answers. The replay follows the engine along the step's own responses; with one draft update
per step it is the engine's count to the last digit. The expectation averages over every place of the responses, which
needs no complete response but has another weighting. The replay is taken where there is one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

_MEASURED_LENGTH, _MEASURED_RATE = "vllm/spec_acceptance_length", "vllm/spec_acceptance_rate_pos_{}"
_REPLAYED_LENGTH, _REPLAYED_RATE = "train/draft_replayed_acceptance_length", "train/draft_replayed_acceptance_{}"
_EXPECTED_LENGTH, _EXPECTED_RATE = "train/draft_expected_acceptance_length", "train/draft_prefix_greedy_{}"
_EVALUATED_LENGTH, _EVALUATED_RATE = "eval/acceptance_length", "eval/acceptance_rate_pos_{}"
_GAP = "train/draft_acceptance_gap"

MAX_RATES_SHOWN = 8
"""Positions in one line; of more, the first ones and the last."""


class Acceptance(NamedTuple):
    """Acceptance of one step, from one side.

    Attributes:
        length: Tokens per verification; None = not known.
        rates: Share of drafts accepted up to each position, from the first on; empty = not known.
    """

    length: float | None
    rates: tuple[float, ...]

    @property
    def is_known(self) -> bool:
        """Whether there is anything to show."""
        return self.length is not None or bool(self.rates)

    def describe(self, *, ceiling: int | None = None) -> str:
        """One phrase, e.g. ``2.87/4 (86/62/39%)``.

        Args:
            ceiling: Largest possible length, shown behind it; None = not known.
        """
        parts = []
        if self.length is not None:
            parts.append(f"{self.length:.2f}" + ("" if ceiling is None else f"/{ceiling}"))
        if self.rates:
            shown = [f"{100 * rate:.0f}" for rate in self.rates]
            if len(shown) > MAX_RATES_SHOWN:
                shown = [*shown[: MAX_RATES_SHOWN - 2], "..", shown[-1]]
            parts.append(f"({'/'.join(shown)}%)")
        return " ".join(parts)


def measured(metrics: Mapping[str, float]) -> Acceptance:
    """What the engine's counters say.

    Args:
        metrics: Of one step, by their full names.
    """
    return Acceptance(_finite(metrics, _MEASURED_LENGTH), _rates(metrics, _MEASURED_RATE, first=0))


def evaluated(metrics: Mapping[str, float]) -> Acceptance:
    """What the engine's counters say of a measurement of its own, apart from training rollouts.

    Args:
        metrics: Of one step, by their full names.
    """
    return Acceptance(_finite(metrics, _EVALUATED_LENGTH), _rates(metrics, _EVALUATED_RATE, first=0))


def trained(metrics: Mapping[str, float]) -> Acceptance:
    """What the trainer says: the replay, or else the expectation, as far as the draft is trained.

    Args:
        metrics: Of one step, by their full names.

    Returns:
        Rates of at most as many positions as the engine proposes, where that is known.
    """
    length, rates = _finite(metrics, _REPLAYED_LENGTH), _rates(metrics, _REPLAYED_RATE, first=1)
    if length is None and not rates:
        length, rates = _finite(metrics, _EXPECTED_LENGTH), _rates(metrics, _EXPECTED_RATE, first=1)
    return Acceptance(length, rates[: len(measured(metrics).rates) or None])


def gap_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Measured minus trained, of the length and of each position that both sides know.

    Args:
        metrics: Of one step in which the engine proposed with the draft that was trained.

    Returns:
        ``train/draft_acceptance_gap`` and ``train/draft_acceptance_gap_{j}``, j from 1.
    """
    engine, trainer = measured(metrics), trained(metrics)
    gaps: dict[str, float] = {}
    if engine.length is not None and trainer.length is not None:
        gaps[_GAP] = engine.length - trainer.length
    for j, (own, other) in enumerate(zip(engine.rates, trainer.rates, strict=False), start=1):
        gaps[f"{_GAP}_{j}"] = own - other
    return gaps


def _finite(metrics: Mapping[str, float], name: str) -> float | None:
    value = metrics.get(name, math.nan)
    return value if math.isfinite(value) else None


def _rates(metrics: Mapping[str, float], name: str, *, first: int) -> tuple[float, ...]:
    """Values of a numbered metric until the first number that is missing."""
    found: list[float] = []
    while (value := _finite(metrics, name.format(first + len(found)))) is not None:
        found.append(value)
    return tuple(found)
