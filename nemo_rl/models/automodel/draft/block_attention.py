"""Attention of a block draft: every slot of a block sees the context before its anchor and the slots of its own block.

The blocks of a document share its context keys, which are neither repeated nor laid out anew: a tile is a run of
queries of one document with a view of the context up to its last anchor. The own block has B keys per query and is
merged by log-sum-exp. The backward pass uses the merged output and log-sum-exp, as in `attention`, so that it is that
of the one softmax over both; masks and scores exist for one tile at a time.

Shape symbols: N context rows, n blocks, B slots of a block, A query heads, G key heads, r = A / G, d head width, m
queries and u keys of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["BlockLayout", "Tile", "block_attention"]

_TILE_SCORES = 1 << 21


class Tile(NamedTuple):
    """Queries `[first_query, stop_query)` and the context rows `[first_row, stop_row)` that any of them sees."""

    first_query: int
    stop_query: int
    first_row: int
    stop_row: int


@dataclass(frozen=True)
class BlockLayout:
    """Which context rows the queries see, query `b * B + k` being slot k of block b.

    Attributes:
        block_size: B.
        stop_rows: int64 [n * B], a query sees the rows of its document before this one.
        tiles: in the order of the queries. A query without context is in no tile.
    """

    block_size: int
    stop_rows: Tensor
    tiles: tuple[Tile, ...]

    @classmethod
    def build(cls, first_rows: Tensor, stop_rows: Tensor, *, block_size: int) -> BlockLayout:
        """Cut the queries into tiles.

        Worked example, context rows 0..4 of one document and 5..6 of another, blocks of 3 slots behind rows 2 and 4 of
        the first and row 6 of the second (which they do not see)::

            first_rows [0, 0, 5], stop_rows [2, 4, 6]
            tiles      queries 0..5 with rows 0..3, queries 6..8 with row 5

        Args:
            first_rows: int64 [n], first context row of each block's document; blocks of a document are neighbours.
            stop_rows: int64 [n], first row that the block does not see, ascending within a document.
            block_size: B.
        """
        tiles: list[Tile] = []
        for block, (first, stop) in enumerate(zip(first_rows.tolist(), stop_rows.tolist(), strict=True)):
            if stop == first:
                continue
            begin, end = block * block_size, (block + 1) * block_size
            last = tiles[-1] if tiles else None
            if last is not None and last.first_row == first:
                assert stop >= last.stop_row, "blocks of a document are ordered by their anchors"
                if (end - last.first_query) * (stop - first) <= _TILE_SCORES:
                    tiles[-1] = Tile(last.first_query, end, first, stop)
                    continue
            tiles.append(Tile(begin, end, first, stop))
        return cls(block_size, stop_rows.repeat_interleave(block_size), tuple(tiles))

    def to(self, device: torch.device | str) -> BlockLayout:
        """The layout with its tensors on `device`."""
        return replace(self, stop_rows=self.stop_rows.to(device, non_blocking=True))


def block_attention(
    queries: Tensor,
    context_keys: Tensor,
    context_values: Tensor,
    block_keys: Tensor,
    block_values: Tensor,
    *,
    layout: BlockLayout,
    scale: float,
    is_causal: bool,
) -> Tensor:
    """Attention over the context before the anchor and the own block, in one softmax.

    Args:
        queries: float [n * B, A, d], rotated.
        context_keys: float [N, G, d], rotated.
        context_values: float [N, G, d].
        block_keys: float [n * B, G, d], rotated.
        block_values: float [n * B, G, d].
        layout: of the queries.
        scale: factor of the scores.
        is_causal: a slot sees only the slots of its block up to itself.

    Returns:
        float [n * B, A, d].
    """
    return _BlockAttention.apply(
        queries, context_keys, context_values, block_keys, block_values, layout, scale, is_causal
    )


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k0: Tensor,
        v0: Tensor,
        k: Tensor,
        v: Tensor,
        layout: BlockLayout,
        scale: float,
        is_causal: bool,
    ) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        context_out = torch.zeros_like(q)
        context_lse = torch.full(q.shape[:2], float("-inf"), dtype=wide, device=q.device)
        kernel = _cpu_flash_forward if q.device.type == "cpu" else _plain_forward
        for tile in layout.tiles:
            rows, seen = slice(tile.first_query, tile.stop_query), slice(tile.first_row, tile.stop_row)
            hidden = _hidden_rows(layout, tile)
            out, lse = kernel(_fold(q[rows], k0), k0[seen].transpose(0, 1), v0[seen].transpose(0, 1), hidden, scale)
            context_out[rows] = _unfold(out, rows)
            context_lse[rows] = _unfold(lse[..., None], rows).squeeze(-1)

        groups, size = k.shape[1], layout.block_size
        scores = _own_scores(_by_block(q, groups, size), _by_block(k, groups, size), scale, size, is_causal)
        lse = torch.logaddexp(context_lse, _from_blocks(scores.logsumexp(-1, keepdim=True), size).squeeze(-1))
        probs = (scores - _by_block(lse[..., None], groups, size)).exp().to(q.dtype)
        own = _from_blocks(torch.matmul(probs, _by_block(v, groups, size)), size)
        out = context_out * (context_lse - lse).exp()[..., None].to(q.dtype) + own
        ctx.save_for_backward(q, k0, v0, k, v, out, lse)
        ctx.layout, ctx.scale, ctx.is_causal = layout, scale, is_causal
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        q, k0, v0, k, v, out, lse = ctx.saved_tensors
        layout: BlockLayout = ctx.layout
        grad = grad_outputs[0].contiguous()
        groups, size = k.shape[1], layout.block_size

        q_b, k_b, v_b, grad_b = (_by_block(x, groups, size) for x in (q, k, v, grad))
        scores = _own_scores(q_b, k_b, ctx.scale, size, ctx.is_causal)
        probs = scores.sub_(_by_block(lse[..., None], groups, size)).exp_()
        delta = (grad.to(lse.dtype) * out).sum(-1, keepdim=True)
        d_scores = torch.matmul(grad_b, v_b.mT).to(lse.dtype).sub_(_by_block(delta, groups, size)).mul_(probs)
        d_scores, probs = d_scores.mul_(ctx.scale).to(q.dtype), probs.to(q.dtype)
        dq = _from_blocks(torch.matmul(d_scores, k_b), size)
        dk = _from_blocks(torch.matmul(d_scores.mT, q_b), size)
        dv = _from_blocks(torch.matmul(probs.mT, grad_b), size)

        # Blocks of a document add to the same rows, in fp32 or wider.
        dk0, dv0 = torch.zeros_like(k0, dtype=lse.dtype), torch.zeros_like(v0, dtype=lse.dtype)
        kernel = _cpu_flash_backward if q.device.type == "cpu" else _plain_backward
        for tile in layout.tiles:
            rows, seen = slice(tile.first_query, tile.stop_query), slice(tile.first_row, tile.stop_row)
            d_query, d_key, d_value = kernel(
                _fold(grad[rows], k0),
                _fold(q[rows], k0),
                k0[seen].transpose(0, 1),
                v0[seen].transpose(0, 1),
                _fold(out[rows], k0),
                _fold(lse[rows, :, None], k0).squeeze(-1),
                _hidden_rows(layout, tile),
                ctx.scale,
            )
            dq[rows] += _unfold(d_query, rows)
            dk0[seen] += d_key.transpose(0, 1)
            dv0[seen] += d_value.transpose(0, 1)
        return dq, dk0.to(k0.dtype), dv0.to(v0.dtype), dk, dv, None, None, None


# -- the own block ---------------------------------------------------------------------------------------------------


def _by_block(x: Tensor, groups: int, block_size: int) -> Tensor:
    """[n * B, heads, x] -> [n, G, (heads / G) * B, x]: query heads that share a key head become rows."""
    return x.unflatten(0, (-1, block_size)).unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)


def _from_blocks(x: Tensor, block_size: int) -> Tensor:
    """Inverse of `_by_block`."""
    return x.unflatten(2, (-1, block_size)).permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)


def _own_scores(q: Tensor, k: Tensor, scale: float, block_size: int, is_causal: bool) -> Tensor:
    """fp32 (or wider) [n, G, r * B, B], -inf where a slot must not see another."""
    scores = torch.matmul(q, k.mT).to(torch.promote_types(q.dtype, torch.float32)).mul_(scale)
    if is_causal:
        later = torch.ones(block_size, block_size, dtype=torch.bool, device=q.device).triu_(1)
        scores.unflatten(2, (-1, block_size)).masked_fill_(later, float("-inf"))
    return scores


# -- the context, one tile -------------------------------------------------------------------------------------------


def _fold(rows: Tensor, keys: Tensor) -> Tensor:
    """[m, A, x] -> [G, r * m, x]: query heads that share a key head become rows, keys are not repeated."""
    return rows.unflatten(1, (keys.shape[1], -1)).permute(1, 2, 0, 3).flatten(1, 2)


def _unfold(folded: Tensor, rows: slice) -> Tensor:
    """Inverse of `_fold`."""
    return folded.unflatten(1, (-1, rows.stop - rows.start)).permute(2, 0, 1, 3).flatten(1, 2)


def _hidden_rows(layout: BlockLayout, tile: Tile) -> Tensor:
    """Bool [m, u], True = the query does not see the row."""
    stops = layout.stop_rows[tile.first_query : tile.stop_query]
    return torch.arange(tile.first_row, tile.stop_row, device=stops.device) >= stops[:, None]


def _additive_mask(hidden: Tensor, q: Tensor) -> Tensor:
    """0 or -inf, [1, 1, r * m, u]."""
    bias = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, float("-inf"))
    return bias.repeat(q.shape[1] // hidden.shape[0], 1)[None, None]


def _cpu_flash_forward(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q[None], k[None], v[None], 0.0, False, attn_mask=_additive_mask(hidden, q), scale=scale
    )
    return out[0], lse[0]


def _cpu_flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, hidden: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad[None], q[None], k[None], v[None], out[None], lse[None], 0.0, False, attn_mask=_additive_mask(hidden, q),
        scale=scale,
    )  # fmt: skip
    return grads[0][0], grads[1][0], grads[2][0]


def _plain_scores(q: Tensor, k: Tensor, hidden: Tensor, scale: float) -> Tensor:
    """fp32 (or wider) [G, r * m, u]."""
    scores = torch.matmul(q, k.mT).to(torch.promote_types(q.dtype, torch.float32)).mul_(scale)
    scores.unflatten(1, (-1, hidden.shape[0])).masked_fill_(hidden, float("-inf"))
    return scores


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """In plain tensor operations; any device and dtype."""
    scores = _plain_scores(q, k, hidden, scale)
    lse = scores.logsumexp(-1)
    return torch.matmul(scores.sub_(lse[..., None]).exp_().to(q.dtype), v), lse


def _plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, hidden: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    probs = _plain_scores(q, k, hidden, scale).sub_(lse[..., None]).exp_()
    delta = (grad.to(lse.dtype) * out).sum(-1, keepdim=True)
    d_scores = torch.matmul(grad, v.mT).to(lse.dtype).sub_(delta).mul_(probs).mul_(scale).to(q.dtype)
    return torch.matmul(d_scores, k), torch.matmul(d_scores.mT, q), torch.matmul(probs.to(q.dtype).mT, grad)
