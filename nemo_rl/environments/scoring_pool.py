"""Processes that score answers, with a time limit per answer that always holds.

An environment is called from whichever thread runs the loop, where `signal.alarm` (math-verify's own timeout) does not
work, and an expression can hang inside one C call, where no timer helps. So every answer has two limits: the worker's
timer, and a kill from here when even that is not obeyed. A killed worker is replaced; its answer scores 0.

The workers are local processes, not Ray actors: scoring needs no placement, and it then also works without a cluster.
"""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from typing import Any, Literal

from nemo_rl.environments.scoring_worker import READY, STARTED, Scored
from nemo_rl.errors import WorkerError

GRACE_SECONDS = 2.0
"""Between the worker's own timer and the kill."""
START_SECONDS = 120.0
"""For a worker's imports, and for loading what a job needs, on a busy machine."""
WORKER_PROGRAM = "import sys; from nemo_rl.environments.scoring_worker import main; main(sys.argv[1:])"
"""Not `-m`: what a module defines while it is `__main__` cannot be unpickled here."""


class _Worker:
    """One process at a time, and the connection to it."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._start()

    def score(self, index: int, job: Any, *, seconds: float) -> Scored:
        """Score one job; a process that hangs or dies over it is replaced."""
        self._wait_until_ready()
        try:
            self._connection.send((index, seconds, job))
            if not self._receives(STARTED, within=START_SECONDS):
                return self._replace("timeout")
            if not self._connection.poll(seconds + GRACE_SECONDS):
                return self._replace("timeout")
            answered, scored = self._connection.recv()
        except (EOFError, OSError):
            return self._replace("error")
        if answered != index:
            raise WorkerError(f"{self._kind} scoring worker: answered job {answered} when asked for {index}")
        return scored

    @property
    def pid(self) -> int:
        """Of the present process."""
        return self._process.pid

    def kill(self) -> None:
        """End the process at once."""
        self._connection.close()
        self._process.kill()
        self._process.wait()

    def _start(self) -> None:
        self._connection, theirs = Pipe()
        descriptor = theirs.fileno()
        self._process = subprocess.Popen(
            [sys.executable, "-c", WORKER_PROGRAM, self._kind, str(descriptor)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            pass_fds=(descriptor,),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        self._is_ready = False

    def _replace(self, status: Literal["timeout", "error"]) -> Scored:
        self.kill()
        self._start()
        return Scored(0.0, None, status)

    def _receives(self, message: str, *, within: float) -> bool:
        return self._connection.poll(within) and self._connection.recv() == message

    def _wait_until_ready(self) -> None:
        if self._is_ready:
            return
        with contextlib.suppress(EOFError, OSError):
            self._is_ready = self._receives(READY, within=START_SECONDS)
        if not self._is_ready:
            self.kill()
            raise WorkerError(
                f"{self._kind} scoring worker: the process ended (status {self._process.returncode}) or said nothing "
                f"for {START_SECONDS:.0f} s before its first answer; its error is on the standard error stream."
            )


class ScoringPool:
    """A fixed number of scoring processes, started when first needed."""

    def __init__(self, kind: str, *, num_workers: int, seconds_per_job: float) -> None:
        """Remember what to start.

        Args:
            kind: of scorer, see `scoring_worker.load_scorer`.
            num_workers: most processes at a time.
            seconds_per_job: time limit of one answer.
        """
        self._kind = kind
        self._num_workers = num_workers
        self._seconds = seconds_per_job
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()
        self._is_closed = False

    def start(self, num_workers: int = 1) -> None:
        """Start processes without waiting for their imports.

        Args:
            num_workers: how many shall run, at most the pool's number.
        """
        with self._lock:
            self._start(num_workers)

    @property
    def process_ids(self) -> list[int]:
        """Processes running now, in the order in which they get jobs."""
        return [worker.pid for worker in self._workers]

    def score(self, jobs: Sequence[Any]) -> list[Scored]:
        """Score jobs, as many at a time as there are workers.

        Args:
            jobs: picklable inputs of the scorer.

        Returns:
            One outcome per job, in order. A job that hung or killed its process scores 0, with status "timeout" or
            "error".

        Raises:
            WorkerError: a worker cannot start.
        """
        if not jobs:
            return []
        with self._lock:
            self._start(len(jobs))
            results: list[Scored | None] = [None] * len(jobs)
            waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
            for index in range(len(jobs)):
                waiting.put(index)

            def serve(worker: _Worker) -> None:
                with contextlib.suppress(queue.Empty):
                    while True:
                        index = waiting.get_nowait()
                        results[index] = worker.score(index, jobs[index], seconds=self._seconds)

            workers = self._workers[: len(jobs)]
            with ThreadPoolExecutor(len(workers), thread_name_prefix=f"{self._kind}-scoring") as threads:
                try:
                    for future in [threads.submit(serve, worker) for worker in workers]:
                        future.result()
                finally:  # after an error or Ctrl-C: leave the rest undone
                    with contextlib.suppress(queue.Empty):
                        while True:
                            waiting.get_nowait()
        return [scored for scored in results if scored is not None]

    def shutdown(self) -> None:
        """Kill the processes; calling it again does nothing."""
        with self._lock:
            self._is_closed = True
            while self._workers:
                self._workers.pop().kill()

    def _start(self, num_workers: int) -> None:
        if self._is_closed:
            raise WorkerError(f"{self._kind} scoring pool: was shut down and cannot score any more")
        while len(self._workers) < min(num_workers, self._num_workers):
            self._workers.append(_Worker(self._kind))
