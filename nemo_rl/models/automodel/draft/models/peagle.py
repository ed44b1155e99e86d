"""The P-EAGLE draft: the layers of EAGLE-3, all depths in one forward.

What is not known yet is a learned placeholder: `mask_hidden` stands for the policy's features, the embedding row of the
mask token for the token. So no depth waits for another one; per layer, a slot's depths see the causal trunk of depth 0
and their own chain. nemo_automodel's classes are not used: they flatten all depths under one mask (flex attention,
whose backward pass the CPU lacks), know no `norm_before_residual`, and round RoPE frequencies with `.to(bfloat16)`.

Shape symbols: N trunk rows, T trunk rows of a segment, n_k slots of a segment that reach depth k, b = n_1 + n_2 + ..
placeholders of a segment, E supervised elements, H width, A query heads, G key heads, d head width, F concatenated
features, V target ids, M rows of teacher logits.

Worked example (x0 x1 prompt, x2..x5 sampled), depth k of slot t: RoPE position t + k, teacher p[t+1+k], predicts
x[t+2+k].

    k  slots    tokens    features    positions  predicts
    0  1 2 3    x2 x3 x4  f1 f2 f3    1 2 3      x3 x4 x5
    1  1 2      mask      mask_hidden 2 3        x4 x5
    2  1        mask      mask_hidden 3          x5

Segments. The trunk never sees a placeholder, so the rows can be computed part after part, each with its own slots'
chains: a part needs keys and values of the trunk rows before it, nothing else. With several segments each one is
recomputed in the backward pass, and what stays in memory is keys and values of the trunk and the outputs. Algorithm 1
of the paper has the same purpose and computes the trunk before a part anew for each part; here nothing is computed
more than once per pass. All of it happens inside one call of the module, so sharding sees one forward and one backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nemo_rl.models.automodel.draft.architecture import PEagleArchitecture
from nemo_rl.models.automodel.draft.attention import TrunkLayout, trunk_branch_attention
from nemo_rl.models.automodel.draft.losses import STATS, LossChunks, soft_distillation
from nemo_rl.models.automodel.draft.models.fused_eagle import DraftLayer, FusedEagleDraft
from nemo_rl.models.automodel.draft.models.layers import zero_of

__all__ = ["PEagleDraft", "PEagleInputs", "PEagleOutput", "PEaglePlan", "PEagleSegment"]

KeysValues = tuple[Tensor, Tensor]
"""Rotated keys and values of trunk rows, each [T, G, d]."""


@dataclass(frozen=True)
class PEagleSegment:
    """A run of trunk rows and the chains that start there, longest first, so that depth k uses the first n_k slots.

    Attributes:
        begin: first trunk row.
        stop: row behind the last one.
        first_visible: index of the first segment whose keys this one reads. Layouts count rows from there.
        active_rows: int64 [n_0], row inside the segment of each slot.
        num_active: n_k per depth; depths without slots are left out.
        layout: of the slots; None without slots.
        trunk_layout: of all rows of the segment; None when the draft has one layer, whose other rows nobody reads.
    """

    begin: int
    stop: int
    first_visible: int
    active_rows: Tensor
    num_active: tuple[int, ...]
    layout: TrunkLayout | None
    trunk_layout: TrunkLayout | None


@dataclass(frozen=True)
class PEaglePlan:
    """What one call computes.

    Attributes:
        tokens: int64 [N], token of each trunk row (the one after the row's own position).
        positions: int64 [N], RoPE positions.
        segments: one after the other.
        element_rows: int64 [E], row of each element in the segments' outputs: by segment, depth, slot.
        labels: int64 [E], sampled target id that the element predicts, -1 = none.
        chunks: elements cut for the loss.
    """

    tokens: Tensor
    positions: Tensor
    segments: tuple[PEagleSegment, ...]
    element_rows: Tensor
    labels: Tensor
    chunks: LossChunks

    def to(self, device: torch.device | str) -> PEaglePlan:
        """The plan with its tensors on `device`."""
        return replace(_moved(self, device), segments=tuple(_moved(s, device) for s in self.segments))


PlanT = TypeVar("PlanT", PEaglePlan, PEagleSegment)


def _moved(plan: PlanT, device: torch.device | str) -> PlanT:
    values = {f.name: getattr(plan, f.name) for f in fields(plan)}
    is_movable = (Tensor, TrunkLayout, LossChunks)
    return replace(plan, **{name: v.to(device) for name, v in values.items() if isinstance(v, is_movable)})


@dataclass(frozen=True)
class PEagleInputs:
    """Everything the module reads in one call; nothing here is differentiated.

    Attributes:
        plan: what to compute.
        features: float [N, F], concatenated hidden states of the policy.
        teacher_logits: float [M, V], raw logits of the policy.
        weights: fp32 [E], factor of each element's loss.
        vocab_ids: int64 [D], target id of each draft id; None = draft ids are target ids.
    """

    plan: PEaglePlan
    features: Tensor
    teacher_logits: Tensor
    weights: Tensor
    vocab_ids: Tensor | None


class PEagleOutput(NamedTuple):
    """Result of one call; a tuple, because sharding looks for the tensors that need gradients in it.

    Attributes:
        loss: fp32 scalar.
        stats: fp32 [E, len(losses.STATS)], detached; empty without elements.
    """

    loss: Tensor
    stats: Tensor


class _Rows(NamedTuple):
    """Inputs of the first layer for some rows: hidden state and embedding, each float [m, H]."""

    hidden: Tensor
    embeds: Tensor


class PEagleDraft(FusedEagleDraft):
    """The module. Embedding, head and placeholder are its own parameters, trained like the layers."""

    def __init__(self, arch: PEagleArchitecture) -> None:
        """Create the modules with uninitialised parameters.

        Args:
            arch: the draft.
        """
        super().__init__(arch)
        self.mask_token_id = arch.mask_token_id
        self.embed_tokens = nn.Embedding(arch.vocab_size, arch.hidden_size)
        self.mask_hidden = nn.Parameter(torch.empty(1, 1, arch.feature_size))

    def initial_std(self) -> Mapping[str, float]:
        """The placeholder stands for features, which are no weights: drawn with unit variance, as published ones."""
        return {"mask_hidden": 1.0}

    def forward(self, inputs: PEagleInputs | None) -> PEagleOutput:
        """All depths and the loss: sum over elements of weight * KL(policy || draft).

        Args:
            inputs: None = nothing is supervised: a zero loss that reaches every parameter.
        """
        if inputs is None:
            loss = zero_of(self)
            return PEagleOutput(loss, loss.new_zeros(0, 0))
        loss, stats = soft_distillation(
            self.states(inputs),
            self.lm_head.weight,
            inputs.teacher_logits,
            weights=inputs.weights,
            labels=inputs.plan.labels,
            chunks=inputs.plan.chunks,
            vocab_ids=inputs.vocab_ids,
            drop_out_of_vocab=False,
        )
        # The cross-entropy has the gradient of the divergence; their values differ by the policy's entropy.
        divergence = (inputs.weights * stats[:, STATS.index("kl")]).sum()
        return PEagleOutput(loss - loss.detach() + divergence, stats)

    def states(self, inputs: PEagleInputs) -> Tensor:
        """Normed outputs that the head reads, float [E, H], in the order of the plan's elements."""
        plan, dtype = inputs.plan, self.fc.weight.dtype
        # One look-up and one projection for all placeholders: their gradients are formed once.
        embeds = self.embed_tokens(torch.cat([plan.tokens, plan.tokens.new_tensor([self.mask_token_id])]))
        placeholder = _Rows(self.fuse(self.mask_hidden.view(1, -1)), embeds[-1:])
        outputs: list[Tensor] = []
        history: list[list[KeysValues]] = []
        for segment in plan.segments:
            rows = slice(segment.begin, segment.stop)
            arguments = (
                segment,
                inputs.features[rows].to(dtype),
                embeds[rows],
                placeholder,
                plan.positions[rows],
                history[segment.first_visible :],
            )
            if len(plan.segments) > 1 and torch.is_grad_enabled():
                output, own = checkpoint(self._segment, *arguments, use_reentrant=False, preserve_rng_state=False)
            else:
                output, own = self._segment(*arguments)
            outputs.append(output)
            history.append(own)
        return torch.cat(outputs).index_select(0, plan.element_rows)

    def _segment(
        self,
        segment: PEagleSegment,
        features: Tensor,
        embeds: Tensor,
        placeholder: _Rows,
        positions: Tensor,
        visible: list[list[KeysValues]],
    ) -> tuple[Tensor, list[KeysValues]]:
        """One segment through all layers.

        Args:
            segment: the part of the plan.
            features: float [T, F].
            embeds: float [T, H].
            placeholder: one row.
            positions: int64 [T].
            visible: keys and values per layer of each earlier segment that this one reads.

        Returns:
            Normed outputs [n_0 + b, H] by depth and slot, and this segment's trunk keys and values per layer.
        """
        active, counts = segment.active_rows, segment.num_active
        num_rows, num_masks = features.shape[0], sum(counts[1:])
        hidden = torch.cat([self.fuse(features), placeholder.hidden.expand(num_masks, -1)])
        embeds = torch.cat([embeds, placeholder.embeds.expand(num_masks, -1)])
        starts = positions[active]
        cos, sin = self.rope(torch.cat([positions, *(starts[:n] + k for k, n in enumerate(counts) if k)]), hidden.dtype)
        masks = torch.arange(num_rows, num_rows + num_masks, device=active.device)
        elements = torch.cat([active, masks])
        own: list[KeysValues] = []
        for i, layer in enumerate(self._decoder_layers()):
            x, residual = layer.attention_input(hidden, embeds)
            # Apart from the placeholders' ones: later segments hold on to them.
            trunk = layer.self_attn.keys_values(x[:num_rows], cos[:num_rows], sin[:num_rows])
            branch = layer.self_attn.keys_values(x[num_rows:], cos[num_rows:], sin[num_rows:])
            own.append(trunk)
            is_last = i + 1 == self.arch.num_hidden_layers
            if is_last:
                x, residual, cos, sin = x[elements], residual[elements], cos[elements], sin[elements]
            queries = layer.self_attn.queries(x, cos, sin)
            before = [segments_layers[i] for segments_layers in visible]
            keys, values = (torch.cat([*(kv[part] for kv in before), trunk[part]]) for part in (0, 1))
            attended = _attend(layer, segment, queries, (keys, values), branch, is_last=is_last)
            hidden = layer.finish(attended, residual)
        return self.norm(hidden), own


def _attend(
    layer: DraftLayer,
    segment: PEagleSegment,
    queries: Tensor,
    trunk: KeysValues,
    branch: KeysValues,
    *,
    is_last: bool,
) -> Tensor:
    """Attention of a segment's rows: depth 0 sees the trunk, depth k also the depths 1..k of its own slot.

    Args:
        layer: for the scale.
        segment: the part of the plan.
        queries: float [T + b, A, d]; of the last layer [n_0 + b, A, d], the slots at depth 0 instead of all rows.
        trunk: visible keys and values, those of earlier segments included.
        branch: of the placeholders, [b, G, d].
        is_last: which of the two.

    Returns:
        Like `queries`.
    """
    counts, scale = segment.num_active, layer.self_attn.scale
    first, *deeper = queries.split([queries.shape[0] - sum(counts[1:]), *counts[1:]])
    attended = []
    placed: KeysValues | None = None
    layout = segment.layout if is_last else segment.trunk_layout
    if layout is not None:
        placed = _place(layout, trunk)
        attended.append(trunk_branch_attention(first, *placed, [], [], layout=layout, scale=scale))
    if deeper:
        assert segment.layout is not None, "a chain starts at a slot"
        if placed is None or not is_last:
            placed = _place(segment.layout, trunk)
        keys, values = (part.split(list(counts[1:])) for part in branch)
        for k, depth_queries in enumerate(deeper, start=1):
            own = [[part[: counts[k]] for part in parts[:k]] for parts in (keys, values)]
            attended.append(trunk_branch_attention(depth_queries, *placed, *own, layout=segment.layout, scale=scale))
    return torch.cat(attended) if attended else queries


def _place(layout: TrunkLayout, trunk: KeysValues) -> KeysValues:
    return layout.place_keys(trunk[0]), layout.place_keys(trunk[1])
