"""Running a draft on its own output: the trunk of depth 0, then one depth after the other.

Rows that nothing of interest depends on are never computed: the trunk gives keys and values for all positions, queries
exist only for active slots, and in the last layer nothing else does.

Shape symbols: N trunk rows, n_k active slots at depth k, E elements, H width, A query heads, G key heads, d head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol

import torch
from torch import Tensor

from nemo_rl.models.automodel.draft.attention import TrunkLayout, trunk_branch_attention
from nemo_rl.models.automodel.draft.losses import LossChunks
from nemo_rl.models.automodel.draft.models.layers import DraftAttention, RopeFrequencies

__all__ = ["Unroll", "UnrollLayer", "UnrollPlan"]


@dataclass(frozen=True)
class UnrollPlan:
    """Which rows are computed at which depth. Slots are ordered by chain length, so depth k uses the first n_k.

    Attributes:
        trunk_tokens: int64 [N], token of each trunk row at depth 0 (the one after the row's own position).
        trunk_positions: int64 [N], RoPE positions.
        active_rows: int64 [n_0], trunk row of each active slot.
        num_active: n_k per depth; depths without active slots are left out.
        depth_tokens: int64 [n_k] per depth k >= 1.
        layout: of the active slots.
        trunk_layout: of all trunk rows; None when the draft has one layer, whose other rows nobody reads.
        element_rows: int64 [E], row of each supervised element in the concatenation of the depths' outputs.
        labels: int64 [E], sampled target id that the element predicts, -1 = none.
        chunks: elements cut for the loss.
    """

    trunk_tokens: Tensor
    trunk_positions: Tensor
    active_rows: Tensor
    num_active: tuple[int, ...]
    depth_tokens: tuple[Tensor, ...]
    layout: TrunkLayout
    trunk_layout: TrunkLayout | None
    element_rows: Tensor
    labels: Tensor
    chunks: LossChunks

    def to(self, device: torch.device | str) -> UnrollPlan:
        """The plan with its tensors on `device`."""
        moved = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, (Tensor, TrunkLayout, LossChunks)):
                moved[f.name] = value.to(device)
        return replace(self, **moved, depth_tokens=tuple(t.to(device, non_blocking=True) for t in self.depth_tokens))


class UnrollLayer(Protocol):
    """A decoder layer whose attention is called from outside."""

    self_attn: DraftAttention

    def attention_input(self, hidden: Tensor, embeds: Tensor) -> tuple[Tensor, Tensor]:
        """What attention projects, and the residual [m, H], of states and token embeddings, both [m, H]."""
        ...

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        """Output projection, residual, MLP: [m, A, d] and [m, H] to [m, H]."""
        ...


class Unroll:
    """One unrolled forward: `trunk` once, then `branch` depth by depth."""

    def __init__(self, layers: Sequence[UnrollLayer], rope: RopeFrequencies, plan: UnrollPlan) -> None:
        """Start with empty caches.

        Args:
            layers: of the draft.
            rope: of the draft.
            plan: what to compute.
        """
        self._layers = layers
        self._rope = rope
        self._plan = plan
        self._caches = [_LayerCache() for _ in layers]

    def trunk(self, hidden: Tensor, embeds: Tensor) -> Tensor:
        """Depth 0: keys and values of every trunk row [N, H]; the state [n_0, H] of the active slots.

        Args:
            hidden: float [N, H], what the first layer reads.
            embeds: float [N, H], embeddings of the trunk's tokens.
        """
        plan = self._plan
        positions, rows = plan.trunk_positions, plan.active_rows
        for layer, cache in zip(self._layers, self._caches, strict=True):
            is_last = layer is self._layers[-1]
            x, residual = layer.attention_input(hidden, embeds)
            cos, sin = self._rope(positions, x.dtype)
            keys, values = layer.self_attn.keys_values(x, cos, sin)
            cache.keys, cache.values = plan.layout.place_keys(keys), plan.layout.place_keys(values)
            if is_last:
                layout, trunk_keys, trunk_values = plan.layout, cache.keys, cache.values
                x, residual, cos, sin = x[rows], residual[rows], cos[rows], sin[rows]
            else:
                assert plan.trunk_layout is not None, "a draft of several layers reads the other trunk rows, too"
                layout = plan.trunk_layout
                trunk_keys, trunk_values = layout.place_keys(keys), layout.place_keys(values)
            queries = layer.self_attn.queries(x, cos, sin)
            attended = trunk_branch_attention(
                queries, trunk_keys, trunk_values, [], [], layout=layout, scale=layer.self_attn.scale
            )
            hidden = layer.finish(attended, residual)
        return hidden

    def branch(self, hidden: Tensor, embeds: Tensor, depth: int) -> Tensor:
        """One depth >= 1: [n_k, H] in, [n_k, H] out; adds one key and value per slot to each layer's branch.

        Args:
            hidden: float [n_k, H], what the first layer reads.
            embeds: float [n_k, H], embeddings of the depth's tokens.
            depth: k; the depths before it have been run.
        """
        plan, count = self._plan, hidden.shape[0]
        cos, sin = self._rope(plan.trunk_positions[plan.active_rows[:count]] + depth, hidden.dtype)
        for layer, cache in zip(self._layers, self._caches, strict=True):
            x, residual = layer.attention_input(hidden, embeds)
            keys, values = layer.self_attn.keys_values(x, cos, sin)
            cache.branch_keys.append(keys)
            cache.branch_values.append(values)
            attended = trunk_branch_attention(
                layer.self_attn.queries(x, cos, sin),
                cache.keys,
                cache.values,
                [k[:count] for k in cache.branch_keys],
                [v[:count] for v in cache.branch_values],
                layout=plan.layout,
                scale=layer.self_attn.scale,
            )
            hidden = layer.finish(attended, residual)
        return hidden


class _LayerCache:
    """Keys and values of one layer: the trunk's, laid out, and one [n_k, G, d] per depth >= 1."""

    def __init__(self) -> None:
        self.keys: Tensor
        self.values: Tensor
        self.branch_keys: list[Tensor] = []
        self.branch_values: list[Tensor] = []
