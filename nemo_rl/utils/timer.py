"""Wall-clock timing of the phases of a step, and the deadline by which a run must have saved."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nemo_rl.errors import ConfigError

_REDUCTIONS: dict[str, Callable[[list[float]], float]] = {
    "sum": sum,
    "mean": lambda seconds: sum(seconds) / len(seconds),
    "max": max,
    "min": min,
}

_DURATION = re.compile(r"(\d+):(\d+):(\d+):(\d+)")


class Timer:
    """Collects durations by phase name.

    Phases may be nested (``total_step_time`` around ``generation``) and repeated; a phase that raises is recorded all
    the same, so the time of a failed attempt is not lost.

        timer = Timer()
        with timer.time("total_step_time"), timer.time("generation"):
            ...
        logger.log_metrics(timer.reduce(), step, prefix="timing/train")
        timer.reset()
    """

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        """Create an empty timer.

        Args:
            clock: Seconds of a monotonic clock.
        """
        self._clock = clock
        self._seconds: dict[str, list[float]] = {}
        self._running: set[str] = set()

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Record the duration of a block.

        Args:
            name: Phase; the same phase cannot be entered again while it runs, its time would count twice.

        Raises:
            ValueError: The phase is already running.
        """
        if name in self._running:
            raise ValueError(f"timer phase {name!r} is already running")
        self._running.add(name)
        start = self._clock()
        try:
            yield
        finally:
            self._running.discard(name)
            self.record(name, self._clock() - start)

    def record(self, name: str, seconds: float) -> None:
        """Add a duration that was measured elsewhere, for example in a worker."""
        self._seconds.setdefault(name, []).append(float(seconds))

    def count(self, name: str) -> int:
        """Number of recorded durations of a phase; 0 for a phase that never ran."""
        return len(self._seconds.get(name, ()))

    def total(self, name: str) -> float:
        """Seconds recorded for a phase so far; 0.0 for a phase that never ran."""
        return float(sum(self._seconds.get(name, ())))

    def reduce(self, operation: str = "sum") -> dict[str, float]:
        """Fold the durations of each phase.

        Args:
            operation: ``sum``, ``mean``, ``max`` or ``min``.

        Returns:
            Seconds by phase, in the order in which phases were first recorded.

        Raises:
            ValueError: Unknown operation.
        """
        if operation not in _REDUCTIONS:
            raise ValueError(f"unknown reduction {operation!r}; known: {', '.join(sorted(_REDUCTIONS))}")
        return {name: float(_REDUCTIONS[operation](seconds)) for name, seconds in self._seconds.items()}

    def reset(self) -> None:
        """Forget all recorded durations; running phases go on and are recorded when they end."""
        self._seconds = {}


def parse_duration(text: str, *, key: str) -> float:
    """Read ``DD:HH:MM:SS``.

    Args:
        text: The value as the user wrote it.
        key: Configuration key, for the message.

    Returns:
        Seconds.

    Raises:
        ConfigError: Another format.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"{key}: got {text!r}; must be days:hours:minutes:seconds (DD:HH:MM:SS). "
            'For three hours and 45 minutes write "00:03:45:00".'
        )
    days, hours, minutes, seconds = (int(part) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


class TimeoutChecker:
    """Tells once when a run that will be stopped at a known time must save its last checkpoint."""

    def __init__(self, timeout: str | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Start the clock.

        Args:
            timeout: ``DD:HH:MM:SS`` after now; None = no deadline.
            clock: Seconds of a monotonic clock.
        """
        self._clock = clock
        self._limit = None if timeout is None else parse_duration(timeout, key="checkpointing.checkpoint_must_save_by")
        self._start = clock()
        self._last_mark: float | None = None
        self._longest_iteration = 0.0
        self._reported = False

    def start_iterations(self) -> None:
        """Mark the beginning of the first iteration."""
        self._last_mark = self._clock()

    def mark_iteration(self) -> None:
        """Mark the end of an iteration, which is the beginning of the next one."""
        now = self._clock()
        if self._last_mark is not None:
            self._longest_iteration = max(self._longest_iteration, now - self._last_mark)
        self._last_mark = now

    def check_save(self) -> bool:
        """Whether to save now because another iteration may end after the deadline.

        Returns:
            True the first time that ``elapsed + longest iteration so far`` reaches the deadline; False ever after.
        """
        if self._limit is None or self._reported:
            return False
        self._reported = self._clock() - self._start + self._longest_iteration >= self._limit
        return self._reported
