"""Scores an answer with a reasoning-gym task's own rule; runs inside a scoring worker."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from nemo_rl.data.sources import create_task

_TASKS: dict[str, Any] = {}
"""Data sets made so far, by task and settings; only their `score_answer` is used."""


class ReasoningGymJob(NamedTuple):
    """An answer and the question's entry, with the task that generated it."""

    answer: str
    task: str
    task_kwargs: dict[str, Any]
    entry: dict[str, Any]


def score_reasoning_gym(job: ReasoningGymJob, note: Callable[[float, str | None], None]) -> None:
    """Ask the task for the score.

    Args:
        job: what to score.
        note: receives the score, from 0 to 1 in most tasks.
    """
    key = json.dumps([job.task, job.task_kwargs], sort_keys=True, default=str)
    if key not in _TASKS:
        _TASKS[key] = create_task(job.task, size=1, seed=0, kwargs=job.task_kwargs)
    note(_TASKS[key].score_answer(answer=job.answer, entry=job.entry), job.answer)
