from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_rl.environments import scoring_pool
from nemo_rl.environments.math_job import MathJob
from nemo_rl.environments.scoring_pool import ScoringPool
from nemo_rl.environments.scoring_worker import MAX_ADDRESS_SPACE, Scored, score_within
from nemo_rl.errors import WorkerError

RIGHT, WRONG = MathJob("\\boxed{3}", "3"), MathJob("\\boxed{4}", "3")
HANGS = MathJob("$9999^{9999^{9999}}$", "5")


@pytest.fixture(scope="module")
def pool() -> Iterator[ScoringPool]:
    pool = ScoringPool("math", num_workers=2, seconds_per_job=1.5)
    yield pool
    pool.shutdown()


def children(pid: int) -> set[int]:
    """Running scoring workers started by a process."""
    found = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            status = (entry / "stat").read_text().rpartition(")")[2].split()
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue  # it ended meanwhile
        if status[0] != "Z" and int(status[1]) == pid and b"scoring_worker" in command:
            found.add(int(entry.name))
    return found


def running(pool: ScoringPool) -> list[int]:
    """Processes of a pool, in the order in which they get jobs."""
    pool.score([RIGHT])
    return pool.process_ids


def wait_for(condition, *, seconds: float = 15.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def test_outcomes_keep_the_order_of_the_jobs(pool: ScoringPool) -> None:
    scored = pool.score([RIGHT, WRONG] * 20)
    assert [item.score for item in scored] == [1.0, 0.0] * 20
    assert {item.status for item in scored} == {"ok"}
    assert pool.score([]) == []


def test_hanging_expression_scores_zero_and_spares_the_others_off_the_main_thread(pool: ScoringPool) -> None:
    results: list[list[Scored]] = []
    thread = threading.Thread(target=lambda: results.append(pool.score([RIGHT, HANGS, WRONG, RIGHT])))
    thread.start()
    thread.join(timeout=30)
    assert not thread.is_alive()
    assert [(item.score, item.status) for item in results[0]] == [
        (1.0, "ok"),
        (0.0, "timeout"),
        (0.0, "ok"),
        (1.0, "ok"),
    ]


def test_process_that_ignores_its_timer_is_killed_and_replaced(
    pool: ScoringPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring_pool, "GRACE_SECONDS", 0.2)
    monkeypatch.setattr(scoring_pool, "START_SECONDS", 0.2)
    stuck = running(pool)[0]
    os.kill(stuck, signal.SIGSTOP)  # as deaf as a process inside one long C call
    assert pool.score([RIGHT]) == [Scored(0.0, None, "timeout")]
    assert stuck not in children(os.getpid())
    monkeypatch.undo()
    assert pool.score([RIGHT])[0].score == 1.0


def test_process_that_dies_is_replaced(pool: ScoringPool) -> None:
    os.kill(running(pool)[0], signal.SIGKILL)
    assert pool.score([RIGHT]) == [Scored(0.0, None, "error")]
    assert pool.score([RIGHT])[0].score == 1.0


def test_no_more_processes_than_jobs_or_workers_and_none_after_shutdown() -> None:
    before = children(os.getpid())
    pool = ScoringPool("math", num_workers=2, seconds_per_job=1.5)
    pool.score([RIGHT])
    assert len(children(os.getpid()) - before) == 1
    pool.score([RIGHT] * 5)
    assert len(children(os.getpid()) - before) == 2
    pool.shutdown()
    assert children(os.getpid()) == before
    pool.shutdown()
    with pytest.raises(WorkerError, match="was shut down"):
        pool.score([RIGHT])


def test_worker_memory_is_limited(pool: ScoringPool) -> None:
    worker = running(pool)[0]
    limits = Path(f"/proc/{worker}/limits").read_text().splitlines()
    assert next(line for line in limits if line.startswith("Max address space")).split()[3] == str(MAX_ADDRESS_SPACE)


def test_worker_that_cannot_start_is_an_error_not_a_zero() -> None:
    pool = ScoringPool("astrology", num_workers=1, seconds_per_job=1.0)
    with pytest.raises(WorkerError, match="astrology scoring worker: the process ended"):
        pool.score([RIGHT])
    pool.shutdown()


def test_workers_end_when_the_driver_is_killed() -> None:
    program = """
        import time
        from nemo_rl.environments.math_job import MathJob
        from nemo_rl.environments.scoring_pool import ScoringPool
        pool = ScoringPool("math", num_workers=1, seconds_per_job=5.0)
        pool.score([MathJob("3", "3")])
        print("scored", flush=True)
        time.sleep(60)
    """
    driver = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    assert driver.stdout.readline() == "scored\n"
    (worker,) = children(driver.pid)
    driver.kill()
    driver.wait()
    driver.stdout.close()
    assert wait_for(lambda: not Path(f"/proc/{worker}").exists())


def endless_with_bare_except(note) -> None:
    note(0.5, "half")
    while True:
        try:
            time.sleep(10)
        except BaseException as err:
            if len(SWALLOWED) == 2:
                raise
            SWALLOWED.append(err)


SWALLOWED: list[BaseException] = []


def test_deadline_comes_again_when_a_parser_swallows_it() -> None:
    started = time.monotonic()
    scored = score_within(endless_with_bare_except, seconds=0.2)
    assert scored == Scored(0.5, "half", "timeout")
    assert len(SWALLOWED) == 2
    assert time.monotonic() - started < 5
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0.0


def test_failing_scorer_is_an_error_with_score_zero() -> None:
    def fail(_note) -> None:
        raise RecursionError

    assert score_within(fail, seconds=1.0) == Scored(0.0, None, "error")
