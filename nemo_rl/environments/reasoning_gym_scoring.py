"""Scores an answer with a reasoning-gym task's own rule; all but the job type is for scoring workers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from nemo_rl.data.sources import create_task
from nemo_rl.environments.scoring_worker import Note

_TASKS: dict[str, Any] = {}
"""Data sets made so far, by task and settings; only their `score_answer` is used."""


class ReasoningGymJob(NamedTuple):
    """An answer and the question's entry, with the task that generated it."""

    answer: str
    task: str
    task_kwargs: dict[str, Any]
    entry: dict[str, Any]


def prepare_reasoning_gym(job: ReasoningGymJob) -> Callable[[Note], None]:
    """Load the job's task, which is slow the first time.

    Args:
        job: what to score.

    Returns:
        The scoring: asks the task, whose scores are from 0 to 1 in most cases.
    """
    key = json.dumps([job.task, job.task_kwargs], sort_keys=True, default=str)
    if key not in _TASKS:
        _TASKS[key] = create_task(job.task, size=1, seed=0, kwargs=job.task_kwargs)
    task = _TASKS[key]

    def score(note: Note) -> None:
        note(task.score_answer(answer=job.answer, entry=job.entry), job.answer)

    return score
