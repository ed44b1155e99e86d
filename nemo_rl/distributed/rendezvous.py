"""How the ranks of a group find each other: a TCPStore on a port that the system chose, and the process group on it.

Rank 0 binds port 0 and the driver passes on what was bound, so two jobs never want the same port:

    store = create_store(0, world_size, host=rendezvous_host(), port=0)      # rank 0; store.port was bound
    init_process_group("gloo", rank=rank, world_size=world_size, host=host, port=port)      # every rank

Rank 0 may pass the store, or the host and port that it bound: the server is remembered by its port.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

DEFAULT_TIMEOUT = timedelta(minutes=30)
"""For collectives: ranks may wait for one that saves a large checkpoint. The driver notices a dead rank at once."""
STORE_TIMEOUT = timedelta(minutes=5)

_served: dict[int, dist.TCPStore] = {}
"""Stores whose server runs in this process, by port."""


def rendezvous_host() -> str:
    """Address that rank 0 binds and the others connect to, as the worker group set it (``MASTER_ADDR``)."""
    return os.environ["MASTER_ADDR"]


def create_store(
    rank: int, world_size: int, host: str, port: int, *, timeout: timedelta = STORE_TIMEOUT
) -> dist.TCPStore:
    """Serve (rank 0) or join (other ranks) the key-value store of a group.

    Args:
        rank: this process; rank 0 runs the server.
        world_size: number of ranks.
        host: address to bind or to connect to; nothing but this address is bound.
        port: 0 on rank 0 lets the system choose, ``store.port`` tells what it chose. Other ranks need the bound port.
        timeout: for connecting and for waiting on a key.

    Returns:
        The store; on rank 0, asked again for a port that this process serves, the same one.
    """
    if rank == 0 and port in _served:
        return _served[port]
    if rank != 0:
        if port == 0:
            raise ValueError(f"port: got 0 on rank {rank}; only rank 0 binds. Pass the port that rank 0 bound.")
        return dist.TCPStore(host, port, world_size, False, timeout, wait_for_workers=False)
    # torch's own server socket listens on every interface; ours is bound to one address.
    listener = socket.create_server((host, port), family=_family(host), backlog=2048)
    bound = listener.getsockname()[1]
    store = dist.TCPStore(
        host, bound, world_size, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    _served[bound] = store
    return store


def init_process_group(
    backend: str,
    rank: int,
    world_size: int,
    host: str | None = None,
    port: int | None = None,
    *,
    store: dist.Store | None = None,
    device_id: torch.device | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
) -> None:
    """Create torch's default process group over a store of ours.

    Args:
        backend: "gloo", "nccl" or a device map such as "cpu:gloo,cuda:nccl".
        rank: this process.
        world_size: number of ranks.
        host: address of the store; not needed with ``store``.
        port: bound port of the store; not needed with ``store``.
        store: what :func:`create_store` returned here.
        device_id: this rank's GPU; NCCL then builds its communicator at once instead of at the first collective.
        timeout: for collectives.
    """
    if store is None:
        if host is None or port is None:
            raise ValueError("init_process_group: needs the store, or the host and port that rank 0 bound.")
        store = create_store(rank, world_size, host, port)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=device_id
    )


def destroy_process_group() -> None:
    """End the default process group, if there is one, and close the store that this process serves."""
    if dist.is_initialized():
        dist.destroy_process_group()
    _served.clear()


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
