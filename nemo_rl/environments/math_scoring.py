"""Compares a mathematical answer with the expected one; runs inside a scoring worker."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

from math_verify import parse, verify
from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig

from nemo_rl.environments.math_job import MathJob
from nemo_rl.environments.scoring_worker import Note

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns about every response without an answer

GOLD_TARGETS = (LatexExtractionConfig(),)
RESPONSE_TARGETS = (ExprExtractionConfig(), LatexExtractionConfig())
PRECISION = 6
"""Decimal places that numbers must agree in."""
NO_TIMEOUT = 0
"""Switches off the library's own timeouts."""


def score_math(job: MathJob, note: Note) -> None:
    """Score 1.0 if an answer in the response equals the expected one, else 0.0.

    Args:
        job: what to compare. The worker's timeout covers the whole of it.
        note: receives the score, then the answer's text, whose conversion can be slow.

    Raises:
        ValueError: the expected answer cannot be parsed.
    """
    gold = parse("\\boxed{" + job.ground_truth + "}", GOLD_TARGETS, parsing_timeout=NO_TIMEOUT)
    if not gold:
        raise ValueError(f"the expected answer {job.ground_truth!r} is no mathematical expression")
    found = parse(job.response, RESPONSE_TARGETS, parsing_timeout=NO_TIMEOUT)
    is_equal = bool(found) and verify(gold, found, PRECISION, timeout_seconds=NO_TIMEOUT)
    note(float(is_equal), None)
    if found:
        note(float(is_equal), str(found[-1]))


@functools.cache
def _warm_up() -> None:
    """Compare once: that builds the grammar's tables and sympy's caches, which takes as long as many answers."""
    score_math(MathJob("\\boxed{\\frac{1}{2}} x^2", "0.5"), lambda _score, _answer: None)


def prepare_math(job: MathJob) -> Callable[[Note], None]:
    """Return the scoring of a job."""
    _warm_up()
    return functools.partial(score_math, job)
