"""Typed collectives. Without a process group (one rank, unit tests) each returns what one rank would see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
Pair = tuple[float, float]


def is_initialized() -> bool:
    """Whether this process belongs to a process group."""
    return dist.is_available() and dist.is_initialized()


def get_rank(group: dist.ProcessGroup | None = None) -> int:
    """Rank in the group; 0 without one."""
    return dist.get_rank(group) if is_initialized() else 0


def get_world_size(group: dist.ProcessGroup | None = None) -> int:
    """Ranks of the group; 1 without one."""
    return dist.get_world_size(group) if is_initialized() else 1


def barrier(group: dist.ProcessGroup | None = None) -> None:
    """Wait for every rank of the group."""
    if is_initialized():
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


def any_rank(claim: bool, group: dist.ProcessGroup | None = None, *, device: str | torch.device = "cpu") -> bool:
    """Whether the claim holds on any rank, so that every rank reaches the same verdict.

    Args:
        claim: this rank's answer.
        group: ranks to ask.
        device: device of the exchanged flag; NCCL groups need the rank's GPU.
    """
    flag = torch.tensor([int(claim)], dtype=torch.int32, device=device)
    return bool(all_reduce_max(flag, group).item())


def all_gather_object(obj: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Collect one picklable object per rank, in rank order, on every rank."""
    if not is_initialized():
        return [obj]
    gathered: list[T | None] = [None] * get_world_size(group)
    dist.all_gather_object(gathered, obj, group=group)
    return gathered  # type: ignore[return-value]  # every slot was filled


def broadcast_object(obj: T, group: dist.ProcessGroup | None = None, *, group_src: int = 0) -> T:
    """Give every rank the object of one rank of the group."""
    if not is_initialized():
        return obj
    box = [obj]
    dist.broadcast_object_list(box, group=group, group_src=group_src)
    return box[0]


def sum_metric_pairs(pairs: Mapping[str, Pair], group: dist.ProcessGroup | None = None) -> dict[str, Pair]:
    """Sum (numerator, denominator) metrics over the ranks.

    Args:
        pairs: metric name to Python floats; a rank may lack names that others have.
        group: ranks to sum over.

    Returns:
        Every name that some rank has, in sorted order, summed in rank order: equal on all ranks.
    """
    total: dict[str, Pair] = {}
    for rank_pairs in all_gather_object(dict(pairs), group):
        for name, (num, den) in rank_pairs.items():
            old_num, old_den = total.get(name, (0.0, 0.0))
            total[name] = (old_num + num, old_den + den)
    return dict(sorted(total.items()))


def _all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> Tensor:
    reduced = tensor.detach().clone()
    if is_initialized():
        dist.all_reduce(reduced, op=op, group=group)
    return reduced
