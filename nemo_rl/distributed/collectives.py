"""Typed collectives. Without a process group (one rank, unit tests) each returns what one rank would see."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


def _has_group() -> bool:
    """Whether this process belongs to a process group."""
    return dist.is_available() and dist.is_initialized()


def barrier(group: dist.ProcessGroup | None = None) -> None:
    """Wait for every rank of the group."""
    if _has_group():
        dist.barrier(group=group)


def all_reduce_sum(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Sum a tensor over the ranks.

    Args:
        tensor: any shape, equal on all ranks; detached, left as it is.
        group: ranks to sum over; None is all.

    Returns:
        A new tensor, equal on all ranks.
    """
    return _all_reduce(tensor, dist.ReduceOp.SUM, group)


def all_reduce_max(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Element-wise maximum over the ranks; a new tensor. See :func:`all_reduce_sum`."""
    return _all_reduce(tensor, dist.ReduceOp.MAX, group)


def _all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> Tensor:
    reduced = tensor.detach().clone()
    if _has_group():
        dist.all_reduce(reduced, op=op, group=group)
    return reduced
