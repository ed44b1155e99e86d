"""A process that scores answers: `python -m nemo_rl.environments.scoring_worker KIND FILE_DESCRIPTOR`.

It is a program of its own, not a thread or a fork: only a process can be killed when symbolic algebra hangs inside one
C call, and only the main thread of a process can interrupt it with a timer. It answers each `(index, seconds, job)`
with `(index, Scored)` and ends when its peer closes the connection.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, Literal, NamedTuple

READY = "ready"
"""First message, sent when the imports are done."""


class Scored(NamedTuple):
    """Outcome of one job."""

    score: float
    answer: str | None
    status: Literal["ok", "timeout", "error"]


class DeadlineReached(BaseException):
    """The time of a job is over; no Exception, or the libraries would take it for a failed comparison."""


def load_scorer(kind: str) -> Callable[[Any, Callable[[float, str | None], None]], None]:
    """Import what one kind of job needs.

    Args:
        kind: "math" or "reasoning_gym".

    Returns:
        A function of (job, note). It calls `note(score, answer)` as soon as the score is known, and again if it finds
        more to say about the answer: what was noted last stands even if the time runs out afterwards.
    """
    if kind == "math":
        from nemo_rl.environments.math_scoring import score_math

        return score_math
    if kind == "reasoning_gym":
        from nemo_rl.environments.reasoning_gym_scoring import score_reasoning_gym

        return score_reasoning_gym
    raise ValueError(f"scoring worker: got kind {kind!r}; known are math, reasoning_gym")


def score_within(score: Callable[..., None], job: Any, *, seconds: float) -> Scored:
    """Run one job under a timer; must be called from the main thread.

    Args:
        score: from `load_scorer`.
        job: its input.
        seconds: time allowed.

    Returns:
        What was noted last, 0.0 if nothing was; `status` tells how it ended.
    """
    noted: list[tuple[float, str | None]] = [(0.0, None)]
    status: Literal["ok", "timeout", "error"] = "ok"
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            score(job, lambda value, answer: noted.append((float(value), answer)))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
    except DeadlineReached:
        status = "timeout"
    except Exception:  # noqa: BLE001 - process boundary: answers are arbitrary text and reach eval-like parsers
        status = "error"
    return Scored(*noted[-1], status)


def _on_alarm(_signal: int, _frame: FrameType | None) -> None:
    raise DeadlineReached


def main(arguments: list[str]) -> None:
    """Serve jobs until the connection closes.

    Args:
        arguments: kind of scorer, number of the inherited file descriptor.
    """
    kind, descriptor = arguments[0], int(arguments[1])
    connection = Connection(descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver, which then closes the connection
    signal.signal(signal.SIGALRM, _on_alarm)
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        os.dup2(nowhere.fileno(), 1)  # parsers print what they cannot read
    score = load_scorer(kind)
    try:
        connection.send(READY)
        while True:
            index, seconds, job = connection.recv()
            connection.send((index, score_within(score, job, seconds=seconds)))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


if __name__ == "__main__":
    main(sys.argv[1:])
