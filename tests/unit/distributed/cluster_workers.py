"""Worker classes of the Ray tests; imported by name in the workers' processes only."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil

from nemo_rl.errors import RefitError


class EchoWorker:
    """Answers with its rank and what it was given."""

    def __init__(self, tag: str, *, fail_on_rank: int | None = None) -> None:
        self.tag = tag
        self.rank = int(os.environ["RANK"])
        if self.rank == fail_on_rank:
            raise ValueError(f"{tag} cannot be built")

    def env(self, names: list[str]) -> dict[str, str | None]:
        return {name: os.environ.get(name) for name in names}

    def echo(self, value: Any = None, *, delay_by_rank: float = 0.0) -> tuple[int, str, Any]:
        time.sleep(delay_by_rank * (int(os.environ["WORLD_SIZE"]) - self.rank))
        return self.rank, self.tag, value

    def fail_on(self, rank: int) -> str:
        if self.rank == rank:
            self._raise_deep_inside()
        return "fine"

    def _raise_deep_inside(self) -> None:
        raise ValueError("no such token: 17")

    def reject_refit(self) -> None:
        raise RefitError("tensor lm_head.weight: missing")

    def fail_while_others_hang(self, rank: int) -> None:
        if self.rank == rank:
            raise ValueError("one rank only")
        time.sleep(600)

    def die(self) -> None:
        os.write(2, b"last words on stderr\n")
        os.kill(os.getpid(), signal.SIGKILL)

    def hang(self) -> None:
        time.sleep(600)


class ClosingWorker(EchoWorker):
    """Leaves a file when it is shut down in an orderly way."""

    def __init__(self, directory: str, *, hang: bool = False) -> None:
        super().__init__("closing")
        self.directory, self.hangs = Path(directory), hang

    def shutdown(self) -> None:
        if self.hangs:
            time.sleep(600)
        (self.directory / f"closed-{self.rank}").touch()


class GlooWorker:
    """A rank of a real process group."""

    def __init__(self) -> None:
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def bind_rendezvous(self) -> tuple[str, int]:
        from nemo_rl.distributed.rendezvous import create_store, rendezvous_host  # torch, in this process only

        host = rendezvous_host()
        return host, create_store(0, self.world_size, host, 0).port

    def init_process_group(self, host: str, port: int) -> None:
        from nemo_rl.distributed.rendezvous import init_process_group

        init_process_group("gloo", self.rank, self.world_size, host, port)

    def reduce(self) -> dict[str, Any]:
        import torch

        from nemo_rl.distributed import collectives

        value = torch.tensor([1.0, 10.0]) * (self.rank + 1)
        return {
            "sum": collectives.all_reduce_sum(value).tolist(),
            "max": collectives.all_reduce_max(value).tolist(),
            "kept": value.tolist(),
        }

    def barrier_unless(self, dying_rank: int) -> None:
        from nemo_rl.distributed import collectives

        if self.rank == dying_rank:
            time.sleep(1.0)  # the others are inside the barrier by now
            os.kill(os.getpid(), signal.SIGKILL)
        collectives.barrier()

    def listening(self) -> list[str]:
        return [c.laddr.ip for c in psutil.Process().net_connections(kind="inet") if c.status == psutil.CONN_LISTEN]

    def shutdown(self) -> None:
        from nemo_rl.distributed.rendezvous import destroy_process_group

        destroy_process_group()
