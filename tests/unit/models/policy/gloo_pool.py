"""Real gloo ranks that live for a whole test session, so that the imports of torch and nemo_automodel are paid once."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch.multiprocessing as mp

HOST = "127.0.0.1"
TIMEOUT_S = 240.0


class GlooPool:
    """A process group whose ranks call functions on request."""

    def __init__(self, world_size: int) -> None:
        ctx = mp.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = ctx.Pipe()
            process = ctx.Process(target=_serve, args=(rank, world_size, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        self._is_connected = False

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call a module-level function on every rank; return the results in rank order."""
        self._connect()
        for pipe in self._pipes:
            pipe.send((fn, args, kwargs))
        return [self._receive(rank) for rank in range(len(self._pipes))]

    def _connect(self) -> None:
        if self._is_connected:
            return
        port = self._receive(0)
        for pipe in self._pipes:
            pipe.send(port)
        self._is_connected = True

    def _receive(self, rank: int) -> Any:
        pipe = self._pipes[rank]
        if not pipe.poll(TIMEOUT_S):
            raise TimeoutError(f"rank {rank} did not answer within {TIMEOUT_S} s")
        is_ok, value = pipe.recv()
        if not is_ok:
            raise RuntimeError(f"rank {rank} raised:\n{value}")
        return value

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _serve(rank: int, world_size: int, pipe: Connection) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        MASTER_ADDR=HOST,
        GLOO_SOCKET_IFNAME="lo",
        HF_HUB_OFFLINE="1",
    )
    import torch

    from nemo_rl.distributed.rendezvous import create_store, init_process_group

    torch.set_num_threads(1)
    if rank == 0:
        pipe.send((True, create_store(0, world_size, HOST, 0).port))
    init_process_group("gloo", rank, world_size, HOST, pipe.recv())
    while True:
        fn, args, kwargs = pipe.recv()
        try:
            pipe.send((True, fn(*args, **kwargs)))
        except Exception:  # noqa: BLE001 - the boundary of the process: whatever it is goes to the test
            pipe.send((False, traceback.format_exc()))
