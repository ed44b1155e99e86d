"""The process behind `ScoringPool`: it scores answers under a timer.

It is a program of its own, not a thread or a fork: only a process can be killed when symbolic algebra hangs inside one
C call, and only the main thread of a process can interrupt it with a timer. It sends `READY` after its imports. It
answers each `(index, seconds, job)` with `STARTED` when what the job needs is loaded, which the time limit leaves out,
and then with `(index, Scored)`. It ends when its peer closes the connection.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, Literal, NamedTuple

READY = "ready"
STARTED = "started"

REPEAT_SECONDS = 0.25
MAX_ADDRESS_SPACE = 4 << 30
"""Bytes; 10**10**10 ends in a MemoryError of this process, not in the machine's."""


class Scored(NamedTuple):
    """Outcome of one job."""

    score: float
    answer: str | None
    status: Literal["ok", "timeout", "error"]


class DeadlineReached(BaseException):
    """The time of a job is over; no Exception, or the libraries would take it for a failed comparison."""


Note = Callable[[float, str | None], None]
"""Takes the score and the answer as soon as they are known, several times if need be: what was noted last stands."""


def load_scorer(kind: str) -> Callable[[Any], Callable[[Note], None]]:
    """Import what one kind of job needs.

    Args:
        kind: "math" or "reasoning_gym".

    Returns:
        A function that takes a job, loads what it needs, and returns the scoring itself as a function of `Note`.
    """
    if kind == "math":
        from nemo_rl.environments.math_scoring import prepare_math

        return prepare_math
    if kind == "reasoning_gym":
        import reasoning_gym  # noqa: F401 - two seconds: while the rest of a run starts, not with the first answer

        from nemo_rl.environments.reasoning_gym_scoring import prepare_reasoning_gym

        return prepare_reasoning_gym
    raise ValueError(f"scoring worker: got kind {kind!r}; known are math, reasoning_gym")


def score_within(score: Callable[[Note], None], *, seconds: float) -> Scored:
    """Run one scoring under a timer; must be called from the main thread.

    Args:
        score: to run.
        seconds: time allowed.

    Returns:
        What was noted last, 0.0 if nothing was; `status` tells how it ended.
    """
    noted: list[tuple[float, str | None]] = [(0.0, None)]
    status: Literal["ok", "timeout", "error"] = "ok"
    signal.signal(signal.SIGALRM, _on_alarm)
    try:
        # Repeats: a bare `except` in a parser may swallow the first one.
        signal.setitimer(signal.ITIMER_REAL, seconds, REPEAT_SECONDS)
        try:
            score(lambda value, answer: noted.append((float(value), answer)))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
    except DeadlineReached:
        signal.setitimer(signal.ITIMER_REAL, 0.0)  # again: it may have come just before the line above
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
    _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    limit = MAX_ADDRESS_SPACE if hard_limit == resource.RLIM_INFINITY else min(MAX_ADDRESS_SPACE, hard_limit)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard_limit))
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        os.dup2(nowhere.fileno(), 1)  # parsers print what they cannot read
    prepare = load_scorer(kind)
    try:
        connection.send(READY)
        while True:
            index, seconds, job = connection.recv()
            score = prepare(job)
            connection.send(STARTED)
            connection.send((index, score_within(score, seconds=seconds)))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
