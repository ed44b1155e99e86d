"""The job of a math scoring worker, without the libraries that do it."""

from __future__ import annotations

from typing import NamedTuple


class MathJob(NamedTuple):
    r"""A response and the answer expected of it (LaTeX or a plain expression, without `\boxed`)."""

    response: str
    ground_truth: str
