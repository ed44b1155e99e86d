from __future__ import annotations

import pytest

from nemo_rl.errors import ConfigError
from nemo_rl.utils.timer import TimeoutChecker, Timer, parse_duration


class FakeClock:
    """A clock that only moves when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def test_nested_phases_are_recorded_under_their_own_names(clock: FakeClock) -> None:
    timer = Timer(clock=clock)
    with timer.time("step"):
        clock.advance(1.0)
        with timer.time("step/generation"):
            clock.advance(2.0)
        clock.advance(4.0)
    assert timer.reduce() == {"step/generation": 2.0, "step": 7.0}


def test_repeated_phases_are_reduced(clock: FakeClock) -> None:
    timer = Timer(clock=clock)
    for seconds in (1.0, 5.0):
        with timer.time("refit"):
            clock.advance(seconds)
    timer.record("worker", 0.25)
    assert timer.count("refit") == 2
    assert timer.total("refit") == 6.0
    assert timer.reduce() == {"refit": 6.0, "worker": 0.25}
    assert timer.reduce("mean") == {"refit": 3.0, "worker": 0.25}
    assert timer.reduce("max")["refit"] == 5.0
    assert timer.reduce("min")["refit"] == 1.0


def test_phase_that_raises_is_recorded_and_can_run_again(clock: FakeClock) -> None:
    timer = Timer(clock=clock)

    def fail() -> None:
        clock.advance(3.0)
        raise RuntimeError("boom")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="boom"), timer.time("generation"):
            fail()
    assert timer.reduce() == {"generation": 6.0}


def test_phase_cannot_be_entered_twice_at_once() -> None:
    timer = Timer()
    with timer.time("a"):
        with pytest.raises(ValueError, match="'a' is already running"), timer.time("a"):
            pass
        with timer.time("b"):
            pass
    assert timer.count("a") == timer.count("b") == 1


def test_reset_forgets_finished_phases_but_not_running_ones(clock: FakeClock) -> None:
    timer = Timer(clock=clock)
    with timer.time("outer"):
        with timer.time("inner"):
            clock.advance(1.0)
        timer.reset()
        clock.advance(1.0)
    assert timer.reduce() == {"outer": 2.0}
    assert timer.count("inner") == 0
    assert timer.total("inner") == 0.0


def test_unknown_reduction_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'std'; known: max, mean, min, sum"):
        Timer().reduce("std")


def test_real_clock_measures_something() -> None:
    timer = Timer()
    with timer.time("sum"):
        sum(range(100_000))
    assert 0.0 < timer.total("sum") < 10.0


def test_duration_is_days_hours_minutes_seconds() -> None:
    assert parse_duration("01:02:03:04", key="k") == 24 * 3600 + 2 * 3600 + 3 * 60 + 4


@pytest.mark.parametrize("text", ["03:45:00", "3h", "", "00:00:-1:00", "1:2:3:4:5"])
def test_other_duration_formats_are_refused_with_the_key(text: str) -> None:
    with pytest.raises(ConfigError, match=r"checkpointing\.checkpoint_must_save_by: got .*DD:HH:MM:SS"):
        TimeoutChecker(text)


def test_deadline_leaves_room_for_one_more_iteration_and_is_reported_once(clock: FakeClock) -> None:
    checker = TimeoutChecker("00:00:01:40", clock=clock)  # 100 s
    checker.start_iterations()
    reported = []
    for seconds in (30.0, 20.0, 19.0, 1.0, 50.0):  # ends at 30, 50, 69, 70, 120; longest 30
        clock.advance(seconds)
        checker.mark_iteration()
        reported.append(checker.check_save())
    assert reported == [False, False, False, True, False]


def test_without_a_deadline_nothing_is_reported(clock: FakeClock) -> None:
    checker = TimeoutChecker(None, clock=clock)
    clock.advance(1e9)
    assert not checker.check_save()
