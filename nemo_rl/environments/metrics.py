"""Metrics that every environment reports."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_rl.environments.scoring_worker import Scored


def score_metrics(
    responses: Sequence[str], answers: Sequence[str | None], scored: Sequence[Scored]
) -> dict[str, tuple[float, float]]:
    """Count over a list of responses.

    Args:
        responses: texts.
        answers: found in them; None where there is none.
        scored: their scores.

    Returns:
        name to (numerator, responses): `accuracy` (full score), `answered`, `response_chars`, `scoring_timeouts`,
        `scoring_errors`.
    """
    total = float(len(responses))
    numerators = {
        "accuracy": sum(item.score >= 1.0 for item in scored),
        "answered": sum(answer is not None for answer in answers),
        "response_chars": sum(map(len, responses)),
        "scoring_timeouts": sum(item.status == "timeout" for item in scored),
        "scoring_errors": sum(item.status == "error" for item in scored),
    }
    return {name: (float(value), total) for name, value in numerators.items()}
