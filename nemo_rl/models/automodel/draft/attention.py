"""Attention of an unrolled draft: each slot sees a causal trunk and its own chain of earlier depths, in one softmax.

At depth k the query of slot t sees the trunk keys `K_0[i]`, i <= t, of its document and the branch keys
`K_1[t] .. K_k[t]`. The trunk part runs in a fused kernel; the branch part has k keys per query and is merged by
log-sum-exp. In the backward pass the kernel is given the *merged* output and log-sum-exp: with them its formulas
(P = exp(s - lse), dS = P * (dP - rowsum(dO * O))) are those of the joint softmax, so the result is exact and no
[slots, trunk] matrix is kept. Ring attention relies on the same identity.

Shape symbols: N trunk rows, n queries (active slots), A query heads, G key heads, d head width, C segments.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["TrunkLayout", "trunk_branch_attention"]

_LOG = logging.getLogger(__name__)
_QUERY_BLOCK = 256


@dataclass(frozen=True)
class TrunkLayout:
    """Where queries and trunk keys lie, as the kernel of the device wants them.

    A segment is a run of neighbouring query slots of one document; its keys are the document's trunk rows up to the
    segment's last slot. `padded` layouts are rectangles [C, max_queries] and [C, max_keys]; `packed` ones are flat with
    offsets. The layout does not depend on the depth: deeper queries are a subset, the others are filled with zeros.

    Attributes:
        num_segments: C.
        max_queries: longest segment.
        max_keys: most keys of a segment.
        is_packed: which form the index tensors have.
        query_place: int64 [n], place of each query in the laid-out queries.
        key_source: int64 [C * max_keys] or [sum of keys], trunk row of each laid-out key.
        last_key: int64 [C, max_queries], last key that each laid-out query sees; empty when packed.
        query_offsets: int32 [C + 1]; empty when padded.
        key_offsets: int32 [C + 1]; empty when padded.
    """

    num_segments: int
    max_queries: int
    max_keys: int
    is_packed: bool
    query_place: Tensor
    key_source: Tensor
    last_key: Tensor
    query_offsets: Tensor
    key_offsets: Tensor

    @classmethod
    def build(cls, query_rows: Tensor, first_rows: Tensor, *, is_packed: bool) -> TrunkLayout:
        """Lay out queries.

        Worked example, trunk rows 0..4 of one document and 5..8 of another, queries at rows 2, 3, 7::

            query_rows [2, 3, 7], first_rows [0, 0, 5]
            segments   rows 2..3 with keys 0..3, row 7 with keys 5..7

        Args:
            query_rows: int64 [n], trunk row of each query, ascending.
            first_rows: int64 [n], first trunk row of the query's document.
            is_packed: form of the result.
        """
        n = query_rows.numel()
        starts = torch.ones(n, dtype=torch.bool)
        starts[1:] = (query_rows[1:] != query_rows[:-1] + 1) | (first_rows[1:] != first_rows[:-1])
        segment = starts.cumsum(0) - 1
        begin = starts.nonzero().squeeze(1)
        lengths = torch.diff(begin, append=torch.tensor([n]))
        offset = torch.arange(n) - begin[segment]
        first, before = first_rows[begin], query_rows[begin] - first_rows[begin]
        key_lengths = before + lengths
        max_queries, max_keys = int(lengths.max()), int(key_lengths.max())
        empty = torch.zeros(0, dtype=torch.int32)
        common = {"num_segments": begin.numel(), "max_queries": max_queries, "max_keys": max_keys}
        if is_packed:
            key_segment = torch.repeat_interleave(torch.arange(begin.numel()), key_lengths)
            key_begin = key_lengths.cumsum(0) - key_lengths
            zero = torch.zeros(1, dtype=torch.int64)
            return cls(
                **common,
                is_packed=True,
                query_place=torch.arange(n),
                key_source=torch.arange(key_segment.numel()) - key_begin[key_segment] + first[key_segment],
                last_key=empty.long(),
                query_offsets=torch.cat([zero, lengths.cumsum(0)]).int(),
                key_offsets=torch.cat([zero, key_lengths.cumsum(0)]).int(),
            )
        columns = torch.arange(max_keys)
        # A padding query sees what the segment's last query sees: a row that sees nothing would be NaN.
        rows = torch.minimum(torch.arange(max_queries)[None], lengths[:, None] - 1)
        return cls(
            **common,
            is_packed=False,
            query_place=segment * max_queries + offset,
            key_source=(first[:, None] + torch.minimum(columns[None], key_lengths[:, None] - 1)).flatten(),
            last_key=before[:, None] + rows,
            query_offsets=empty,
            key_offsets=empty,
        )

    def select(self, order: Tensor) -> TrunkLayout:
        """The layout of the same queries in another order.

        Args:
            order: int64 [n]; query i of the result is query `order[i]` of this layout.
        """
        return replace(self, query_place=self.query_place[order])

    def to(self, device: torch.device | str) -> TrunkLayout:
        """The layout with its tensors on `device`."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{k: v.to(device, non_blocking=True) for k, v in values.items() if isinstance(v, Tensor)})

    def place_keys(self, rows: Tensor) -> Tensor:
        """Lay out trunk keys or values; once per layer, all depths share the result.

        Args:
            rows: [N, G, d].

        Returns:
            [C, max_keys, G, d], or [sum of keys, G, d] when packed.
        """
        placed = rows.index_select(0, self.key_source)
        return placed if self.is_packed else placed.view(self.num_segments, self.max_keys, *rows.shape[1:])

    def place_queries(self, rows: Tensor) -> Tensor:
        """Lay out the first `rows.shape[0]` queries; the places of the others hold zeros.

        Args:
            rows: [m, ...] with m <= n.
        """
        total = self.query_place.numel() if self.is_packed else self.num_segments * self.max_queries
        out = rows.new_zeros(total, *rows.shape[1:])
        return out.index_copy_(0, self.query_place[: rows.shape[0]], rows)


def trunk_branch_attention(
    queries: Tensor,
    trunk_keys: Tensor,
    trunk_values: Tensor,
    branch_keys: list[Tensor],
    branch_values: list[Tensor],
    *,
    layout: TrunkLayout,
    scale: float,
) -> Tensor:
    """Attention over the trunk and each query's own branch.

    Args:
        queries: float [m, A, d], rotated; the first m queries of the layout.
        trunk_keys: float, as `layout.place_keys` made it, rotated.
        trunk_values: likewise.
        branch_keys: k tensors float [m, G, d], rotated; key i of query t is visible to query t alone.
        branch_values: likewise.
        layout: of the queries.
        scale: factor of the scores.

    Returns:
        float [m, A, d].
    """
    return _TrunkBranch.apply(
        queries, trunk_keys, trunk_values, layout, scale, len(branch_keys), *branch_keys, *branch_values
    )


class _TrunkBranch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k0: Tensor, v0: Tensor, layout: TrunkLayout, scale: float, depth: int, *branch: Tensor
    ) -> Tensor:
        trunk = _forward_trunk(q, k0, v0, layout, scale)
        out, lse = trunk.out, trunk.lse
        if depth:
            scores = _branch_scores(q, branch[:depth], scale)
            lse = torch.logaddexp(trunk.lse, scores.logsumexp(-1))
            values = torch.stack(branch[depth:], dim=2)
            picked = torch.matmul(_by_key_head((scores - lse[..., None]).exp(), values).to(q.dtype), values)
            out = out * (trunk.lse - lse).exp()[..., None].to(q.dtype) + picked.reshape(q.shape)
        ctx.save_for_backward(q, k0, v0, out, lse, *trunk.kernel_state, *branch)
        ctx.layout, ctx.scale, ctx.depth, ctx.num_state = layout, scale, depth, len(trunk.kernel_state)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        q, k0, v0, out, lse, *rest = ctx.saved_tensors
        state, branch = rest[: ctx.num_state], rest[ctx.num_state :]
        grad = grad_outputs[0].contiguous()
        dq, dk0, dv0 = _backward_trunk(grad, q, k0, v0, out, lse, state, ctx.layout, ctx.scale)
        if not ctx.depth:
            return dq, dk0, dv0, None, None, None
        keys, values = (torch.stack(b, dim=2) for b in (branch[: ctx.depth], branch[ctx.depth :]))
        scores = _branch_scores(q, branch[: ctx.depth], ctx.scale)
        probs = _by_key_head((scores - lse[..., None]).exp(), keys)
        grad_h, q_h = _by_key_head(grad, keys), _by_key_head(q, keys)
        delta = _by_key_head((grad.to(lse.dtype) * out).sum(-1, keepdim=True), keys)
        dscores = probs * (torch.matmul(grad_h, values.mT).to(lse.dtype) - delta) * ctx.scale
        probs, dscores = probs.to(q.dtype), dscores.to(q.dtype)
        dq = dq + torch.matmul(dscores, keys).reshape(q.shape)
        dkeys, dvalues = torch.matmul(dscores.mT, q_h), torch.matmul(probs.mT, grad_h)
        return dq, dk0, dv0, None, None, None, *dkeys.unbind(2), *dvalues.unbind(2)


def _by_key_head(x: Tensor, keys: Tensor) -> Tensor:
    """[m, A, x] -> [m, G, A / G, x]: query heads grouped by the key head they share."""
    return x.reshape(x.shape[0], keys.shape[1], -1, x.shape[-1])


def _branch_scores(q: Tensor, branch_keys: tuple[Tensor, ...] | list[Tensor], scale: float) -> Tensor:
    """fp32 (or wider) [m, A, k] scores of each query with its own chain."""
    keys = torch.stack(tuple(branch_keys), dim=2)
    scores = torch.matmul(_by_key_head(q, keys), keys.mT).reshape(q.shape[0], q.shape[1], -1)
    return scores.to(_accumulator(q)) * scale


def _accumulator(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


# -- kernels of the trunk --------------------------------------------------------------------------------------------


class _Trunk(NamedTuple):
    """Result of the trunk alone: out [m, A, d], lse fp32 [m, A], tensors that the kernel's backward asks for."""

    out: Tensor
    lse: Tensor
    kernel_state: tuple[Tensor, ...]


def uses_packed_layout(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the flash kernel with sequence offsets serves these tensors on this device."""
    is_candidate = device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)
    return is_candidate and head_dim % 8 == 0 and head_dim <= 256 and _flash_is_right(device, dtype, head_dim)


def _forward_trunk(q: Tensor, k0: Tensor, v0: Tensor, layout: TrunkLayout, scale: float) -> _Trunk:
    placed = layout.place_queries(q)
    place = layout.query_place[: q.shape[0]]
    if layout.is_packed:
        out, lse, *state = _flash_forward(placed, k0, v0, layout, scale)
        return _Trunk(out[place], lse.mT[place], tuple(state))
    kernel = _cpu_flash_forward if q.device.type == "cpu" else _plain_forward
    out, lse = kernel(_fold(placed, k0, layout), k0.transpose(1, 2), v0.transpose(1, 2), layout, scale)
    return _Trunk(_unfold(out, q, layout)[place], _unfold(lse[..., None], q, layout)[place].squeeze(-1), ())


def _backward_trunk(
    grad: Tensor,
    q: Tensor,
    k0: Tensor,
    v0: Tensor,
    out: Tensor,
    lse: Tensor,
    state: list[Tensor],
    layout: TrunkLayout,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    placed_grad, placed_q, placed_out = (layout.place_queries(x) for x in (grad, q, out))
    placed_lse = layout.place_queries(lse[..., None])
    place = layout.query_place[: q.shape[0]]
    if layout.is_packed:
        flat_lse = placed_lse.squeeze(-1).mT.contiguous()
        dq, dk, dv = _flash_backward(placed_grad, placed_q, placed_out, k0, v0, flat_lse, state, layout, scale)
        return dq[place], dk, dv
    kernel = _cpu_flash_backward if q.device.type == "cpu" else _plain_backward
    grad_f, q_f, out_f = (_fold(x, k0, layout) for x in (placed_grad, placed_q, placed_out))
    lse_f = _fold(placed_lse, k0, layout).squeeze(-1)
    dq, dk, dv = kernel(grad_f, q_f, k0.transpose(1, 2), v0.transpose(1, 2), out_f, lse_f, layout, scale)
    return _unfold(dq, q, layout)[place], dk.transpose(1, 2), dv.transpose(1, 2)


def _fold(placed: Tensor, k0: Tensor, layout: TrunkLayout) -> Tensor:
    """[C * max_queries, A, x] -> [C, G, (A / G) * max_queries, x]: grouped heads become rows, keys are not repeated."""
    groups = k0.shape[2]
    x = placed.view(layout.num_segments, layout.max_queries, groups, -1, placed.shape[-1])
    return x.permute(0, 2, 3, 1, 4).reshape(layout.num_segments, groups, -1, placed.shape[-1])


def _unfold(folded: Tensor, q: Tensor, layout: TrunkLayout) -> Tensor:
    """Inverse of `_fold`."""
    c, groups = folded.shape[:2]
    x = folded.view(c, groups, -1, layout.max_queries, folded.shape[-1]).permute(0, 3, 1, 2, 4)
    return x.reshape(c * layout.max_queries, q.shape[1], folded.shape[-1])


def _additive_mask(folded_q: Tensor, layout: TrunkLayout) -> Tensor:
    """0 or -inf, [C, 1, (A / G) * max_queries, max_keys]."""
    hidden = torch.arange(layout.max_keys, device=folded_q.device) > layout.last_key[:, :, None]
    bias = folded_q.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
    return bias.repeat(1, folded_q.shape[2] // layout.max_queries, 1)[:, None]


def _cpu_flash_forward(q: Tensor, k: Tensor, v: Tensor, layout: TrunkLayout, scale: float) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, False, attn_mask=_additive_mask(q, layout), scale=scale
    )


def _cpu_flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, layout: TrunkLayout, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, False, attn_mask=_additive_mask(q, layout), scale=scale
    )


def _plain_scores(q: Tensor, k: Tensor, layout: TrunkLayout, rows: slice, scale: float) -> Tensor:
    """Masked scores of one block of query rows, fp32 (or wider): [C, G, A / G, block, max_keys]."""
    scores = torch.matmul(q[:, :, :, rows], k[:, :, None].mT).to(_accumulator(q)) * scale
    hidden = torch.arange(layout.max_keys, device=q.device) > layout.last_key[:, rows, None]
    return scores.masked_fill_(hidden[:, None, None], float("-inf"))


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, layout: TrunkLayout, scale: float) -> tuple[Tensor, Tensor]:
    """The trunk in plain tensor operations, by blocks of query rows; any device and dtype."""
    grouped = q.unflatten(2, (-1, layout.max_queries))
    out = torch.empty_like(grouped)
    lse = torch.empty(grouped.shape[:-1], dtype=_accumulator(q), device=q.device)
    for begin in range(0, layout.max_queries, _QUERY_BLOCK):
        rows = slice(begin, begin + _QUERY_BLOCK)
        scores = _plain_scores(grouped, k, layout, rows, scale)
        lse[:, :, :, rows] = scores.logsumexp(-1)
        probs = scores.sub_(lse[:, :, :, rows, None]).exp_().to(q.dtype)
        out[:, :, :, rows] = torch.matmul(probs, v[:, :, None])
    return out.flatten(2, 3), lse.flatten(2, 3)


def _plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, layout: TrunkLayout, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    grad, q, out = (x.unflatten(2, (-1, layout.max_queries)) for x in (grad, q, out))
    lse = lse.unflatten(2, (-1, layout.max_queries))
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for begin in range(0, layout.max_queries, _QUERY_BLOCK):
        rows = slice(begin, begin + _QUERY_BLOCK)
        scores = _plain_scores(q, k, layout, rows, scale)
        probs = scores.sub_(lse[:, :, :, rows, None]).exp_()
        g = grad[:, :, :, rows]
        delta = (g.to(lse.dtype) * out[:, :, :, rows]).sum(-1, keepdim=True)
        dscores = (torch.matmul(g, v[:, :, None].mT).to(lse.dtype) - delta).mul_(probs).mul_(scale).to(q.dtype)
        dq[:, :, :, rows] = torch.matmul(dscores, k[:, :, None])
        dk += torch.matmul(dscores.mT, q[:, :, :, rows]).sum(2)
        dv += torch.matmul(probs.to(q.dtype).mT, g).sum(2)
    return dq.flatten(2, 3), dk, dv


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, layout: TrunkLayout, scale: float) -> tuple[Tensor, ...]:
    """Flash attention over packed segments; causal from the bottom right: a segment's last query sees all its keys."""
    out, lse, *state, _ = torch.ops.aten._flash_attention_forward(
        q, k, v, layout.query_offsets, layout.key_offsets, layout.max_queries, layout.max_keys, 0.0, True, False,
        scale=scale,
    )  # fmt: skip
    return out, lse, *state


def _flash_backward(
    grad: Tensor, q: Tensor, out: Tensor, k: Tensor, v: Tensor, lse: Tensor, state: list[Tensor], layout: TrunkLayout,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse, layout.query_offsets, layout.key_offsets, layout.max_queries, layout.max_keys, 0.0,
        True, *state, scale=scale,
    )  # fmt: skip


@lru_cache(maxsize=8)
def _flash_is_right(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Compare the private flash operators with the plain path once; a build that differs gets the plain path."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    query_rows, first_rows = torch.tensor([1, 2, 3, 6, 7]), torch.tensor([0, 0, 0, 4, 4])
    q, k, v, grad = draw(5, 4, head_dim), draw(8, 2, head_dim), draw(8, 2, head_dim), draw(5, 4, head_dim)
    branch = [draw(5, 2, head_dim), draw(5, 2, head_dim)]
    results = []
    for is_packed in (True, False):
        layout = TrunkLayout.build(query_rows, first_rows, is_packed=is_packed).to(device)
        leaves = [x.clone().requires_grad_() for x in (q, k, v, *branch)]
        try:
            keys, values = layout.place_keys(leaves[1]), layout.place_keys(leaves[2])
            out = trunk_branch_attention(
                leaves[0], keys, values, [leaves[3]], [leaves[4]], layout=layout, scale=head_dim**-0.5
            )
            results.append((out, *torch.autograd.grad(out, leaves, grad)))
        except RuntimeError as err:
            _LOG.warning("flash attention is not usable here (%s); the draft uses plain attention", err)
            return False
    is_right = all(torch.allclose(a, b, rtol=0.05, atol=0.05) for a, b in zip(*results, strict=True))
    if not is_right:
        _LOG.warning("flash attention disagrees with plain attention here; the draft uses plain attention")
    return is_right
