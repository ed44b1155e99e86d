"""From logits to log-probabilities of the tokens that were taken.

Shape symbols: R rows, S row length, N = R * S positions, V vocabulary (local: this tensor-parallel rank's part).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


class VocabShard:
    """A slice of the vocabulary on one tensor-parallel rank."""

    def __init__(self, start: int, group: dist.ProcessGroup) -> None:
        """Store the slice.

        Args:
            start: first vocabulary id of the slice.
            group: ranks that hold the other slices.
        """
        self.start = start
        self.group = group


class _SelectedLogprobs(torch.autograd.Function):
    """`log_softmax(logits / temperature)[target]` in fp32, a chunk of positions at a time, in both directions."""

    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, targets_N: Tensor, temperature: float, chunk: int, shard: VocabShard | None
    ) -> Tensor:
        out = torch.empty(targets_N.shape, dtype=torch.float32, device=logits_NV.device)
        log_norm = torch.empty_like(out)
        for a in range(0, len(targets_N), chunk):
            part = slice(a, a + chunk)
            scaled = logits_NV[part].float() / temperature
            taken, is_local = _take(scaled, targets_N[part], shard)
            if shard is None:
                log_norm[part] = torch.logsumexp(scaled, dim=-1)
            else:
                peak = scaled.amax(-1)
                dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=shard.group)
                sums = torch.stack([(scaled - peak[:, None]).exp().sum(-1), taken * is_local])
                dist.all_reduce(sums, group=shard.group)
                log_norm[part], taken = peak + sums[0].log(), sums[1]
            out[part] = taken - log_norm[part]
        ctx.save_for_backward(logits_NV, targets_N, log_norm)
        ctx.temperature, ctx.chunk, ctx.shard = temperature, chunk, shard
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_N,) = grad_outputs
        logits_NV, targets_N, log_norm = ctx.saved_tensors
        grad_logits = torch.empty_like(logits_NV)
        for a in range(0, len(targets_N), ctx.chunk):
            part = slice(a, a + ctx.chunk)
            grad = grad_N[part, None]
            probs = (logits_NV[part].float() / ctx.temperature - log_norm[part, None]).exp()
            ids, is_local = _local_ids(targets_N[part], probs.shape[-1], ctx.shard)
            chunk_grad = probs.mul_(-grad).scatter_add_(1, ids[:, None], grad * is_local[:, None])
            grad_logits[part] = (chunk_grad / ctx.temperature).to(grad_logits.dtype)
        return grad_logits, None, None, None, None


def _local_ids(targets_N: Tensor, vocab: int, shard: VocabShard | None) -> tuple[Tensor, Tensor]:
    ids = targets_N - (0 if shard is None else shard.start)
    is_local = (ids >= 0) & (ids < vocab)
    return ids.clamp(0, vocab - 1), is_local


def _take(scaled_NV: Tensor, targets_N: Tensor, shard: VocabShard | None) -> tuple[Tensor, Tensor]:
    ids, is_local = _local_ids(targets_N, scaled_NV.shape[-1], shard)
    return scaled_NV.gather(1, ids[:, None])[:, 0], is_local


def split_vocab(logits: Tensor) -> tuple[Tensor, VocabShard | None]:
    """Return the logits that this rank holds, and which part of the vocabulary they are.

    Args:
        logits: float [R, S, V]; a plain tensor, or a DTensor that is whole or sharded over the vocabulary.

    Returns:
        A plain tensor [R, S, V_local] with graph, and its slice; None when it is the whole vocabulary.
    """
    if not isinstance(logits, DTensor):
        return logits, None
    placement = logits.placements[-1]
    if isinstance(placement, Shard) and placement.dim in (-1, logits.ndim - 1) and len(logits.placements) == 1:
        mesh = logits.device_mesh
        size, rank, vocab = mesh.size(), mesh.get_local_rank(), logits.shape[-1]
        return logits.to_local(), VocabShard(min(rank * -(-vocab // size), vocab), mesh.get_group())
    return logits.full_tensor(), None


def full_logits(logits: Tensor) -> Tensor:
    """Detached logits [R, S, V] of the whole vocabulary; collective when they are a sharded DTensor."""
    logits = logits.detach()
    return logits.full_tensor() if isinstance(logits, DTensor) else logits


def token_logprobs(logits: Tensor, input_ids: Tensor, *, temperature: float, chunk_size: int | None) -> Tensor:
    """Log-probability of each token of each row, given the tokens before it.

    Alignment, one row of four tokens: ``out = [0, lp(x1 | z0), lp(x2 | z1), lp(x3 | z2)]`` with ``z_i`` the logits of
    position i. Where a packed document begins the entry is meaningless; `rows_to_samples` drops it.

    Args:
        logits: float [R, S, V], any dtype, plain or DTensor; not modified.
        input_ids: int64 [R, S].
        temperature: logits are divided by this.
        chunk_size: positions whose fp32 logits exist at once; None = all.

    Returns:
        fp32 [R, S] with graph.
    """
    local, shard = split_vocab(logits)
    rows, width = input_ids.shape
    targets = torch.cat([input_ids[:, 1:], input_ids.new_zeros(rows, 1)], dim=1).reshape(-1)
    picked = _SelectedLogprobs.apply(
        local.reshape(rows * width, -1), targets, temperature, chunk_size or rows * width, shard
    ).view(rows, width)
    return torch.cat([picked.new_zeros(rows, 1), picked[:, :-1]], dim=1)
