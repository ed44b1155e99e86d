"""The backbone of the block drafts: masked slots behind an anchor, over the policy's features before it.

Written anew rather than on nemo_automodel's `Qwen3DFlashDraftModel`, whose forward runs every slot of every block over
one dense [slots, context] mask. Here the context is computed up to the last anchor of a document, its keys are shared
by the blocks, and the last layer computes the slots that supervised elements read.

Every layer takes keys and values of the context from the same states, `hidden_norm(fc(features))`, which it does not
norm, and keys, values and queries of the block from `input_layernorm(hidden)`.

Shape symbols: N context rows, n blocks, B slots of a block, K predicted tokens of a block, E supervised elements, H
width, F concatenated features, V target ids, D draft ids, M rows of teacher logits.

Worked example, block behind anchor 2, B = 4 (x0 x1 prompt, x2..x5 sampled); context rows 0 and 1:

    slot  token  position  predicts, first slot 1  predicts, first slot 0
    0     x2     2         nothing                 x3, teacher p2
    1     MASK   3         x3, teacher p2          x4, teacher p3
    2     MASK   4         x4, teacher p3          x5, teacher p4
    3     MASK   5         x5, teacher p4          uncharged, stays visible
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nemo_rl.models.automodel.draft.architecture import BlockArchitecture
from nemo_rl.models.automodel.draft.block_attention import BlockLayout, block_attention
from nemo_rl.models.automodel.draft.block_losses import BlockLossOutput
from nemo_rl.models.automodel.draft.losses import LossChunks
from nemo_rl.models.automodel.draft.models.layers import (
    DraftAttention,
    DraftMLP,
    DraftModule,
    RMSNorm,
    RopeFrequencies,
    zero_of,
)

__all__ = ["BlockDraft", "BlockInputs", "BlockPlan"]


@dataclass(frozen=True)
class BlockPlan:
    """What is computed. Element (b, j) is the j-th token that block b predicts, j = 1..K; it lies at depth j - 1.

    The elements of a block are its first ordinals without a gap. They are ordered by teacher row, not by block.

    Attributes:
        num_predicted: K.
        context_positions: int64 [N], RoPE positions.
        slot_tokens: int64 [n * B], slot 0 of a block holds its anchor, the others the placeholder.
        slot_positions: int64 [n * B].
        layout: of the slots.
        element_rows: int64 [E], slot row that predicts each element.
        block: int64 [E].
        depth: int64 [E].
        previous: int64 [E], token before the predicted one, x[a + j - 1].
        labels: int64 [E], token that the element predicts, x[a + j].
        chunks: elements cut for the loss; its teacher rows are those of x[a + j - 1].
    """

    num_predicted: int
    context_positions: Tensor
    slot_tokens: Tensor
    slot_positions: Tensor
    layout: BlockLayout
    element_rows: Tensor
    block: Tensor
    depth: Tensor
    previous: Tensor
    labels: Tensor
    chunks: LossChunks

    @property
    def num_blocks(self) -> int:
        """Blocks n."""
        return self.slot_tokens.numel() // self.layout.block_size

    def by_block(self, values: Tensor) -> Tensor:
        """Values of elements [E, ...] as [n, K, ...], zero where a block has no such element."""
        table = values.new_zeros(self.num_blocks, self.num_predicted, *values.shape[1:])
        return table.index_put((self.block, self.depth), values)

    def of_elements(self, table: Tensor) -> Tensor:
        """Inverse of `by_block`: [n, K, ...] -> [E, ...]."""
        return table[self.block, self.depth]

    def to(self, device: torch.device | str) -> BlockPlan:
        """The plan with its tensors on `device`."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        is_movable = (Tensor, BlockLayout, LossChunks)
        return replace(self, **{k: v.to(device) for k, v in values.items() if isinstance(v, is_movable)})


@dataclass(frozen=True)
class BlockInputs:
    """Everything the module reads in one call; nothing here is differentiated. An algorithm adds what its loss reads.

    Attributes:
        plan: what to compute.
        features: float [N, F], concatenated hidden states of the policy.
        embedding: float [V, H], the policy's live one.
        head: float [D, H], the policy's live rows of the draft's ids.
        teacher_logits: float [M, V], raw logits of the policy.
        weights: fp32 [E], weight of each element over the sum of the weights of the whole update.
        vocab_ids: int64 [D], target id of each draft id; None = draft ids are target ids.
    """

    plan: BlockPlan
    features: Tensor
    embedding: Tensor
    head: Tensor
    teacher_logits: Tensor
    weights: Tensor
    vocab_ids: Tensor | None


class BlockDraft(DraftModule):
    """The backbone. A subclass adds its heads and forms the loss from the elements' states, `element_loss`.

    Its one call runs backbone, heads and loss, so that sharding hooks fire once around everything. The compute dtype is
    that of the parameters inside the call.
    """

    def __init__(self, arch: BlockArchitecture) -> None:
        """Create the modules with uninitialised parameters.

        Args:
            arch: the draft.
        """
        super().__init__()
        self.arch = arch
        self.fc = nn.Linear(arch.feature_size, arch.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(arch.hidden_size, arch.rms_norm_eps)
        self.layers = nn.ModuleList(BlockLayer(arch) for _ in range(arch.num_hidden_layers))
        self.norm = RMSNorm(arch.hidden_size, arch.rms_norm_eps)
        self.rope = RopeFrequencies(arch)

    def forward(self, inputs: BlockInputs | None) -> BlockLossOutput:
        """Run the blocks and form the loss.

        Args:
            inputs: what to compute; None = nothing here is supervised: a zero loss that reaches every parameter.
        """
        if inputs is None:
            zero = zero_of(self)
            return BlockLossOutput(zero, zero.new_zeros(0, 0).detach(), {})
        return self.element_loss(self.element_states(inputs), inputs)

    def element_loss(self, states: Tensor, inputs: BlockInputs) -> BlockLossOutput:
        """Heads and loss; every parameter of the heads must get a gradient.

        Args:
            states: float [E, H], what the head reads at the slot that predicts each element, in the plan's order.
            inputs: of this call.
        """
        raise NotImplementedError(f"{type(self).__name__} must form its loss")

    def element_states(self, inputs: BlockInputs) -> Tensor:
        """Normed output [E, H] of the slot that predicts each element."""
        plan, dtype = inputs.plan, self.fc.weight.dtype
        context = self.hidden_norm(self.fc(inputs.features.to(dtype)))
        context_rope = self.rope(plan.context_positions, dtype)
        cos, sin = self.rope(plan.slot_positions, dtype)
        hidden = F.embedding(plan.slot_tokens, inputs.embedding).to(dtype)
        rows = plan.element_rows
        for layer in self._layers():
            attention = layer.self_attn
            is_last = layer is self.layers[-1]
            x = layer.input_layernorm(hidden)
            keys, values = attention.keys_values(x, cos, sin)
            if is_last:
                # Slots that nobody reads get zeros as queries, for the attention alone.
                queries = attention.queries(x[rows], cos[rows], sin[rows])
                queries = queries.new_zeros(keys.shape[0], *queries.shape[1:]).index_copy(0, rows, queries)
            else:
                queries = attention.queries(x, cos, sin)
            attended = block_attention(
                queries,
                *attention.keys_values(context, *context_rope),
                keys,
                values,
                layout=plan.layout,
                scale=attention.scale,
                is_causal=self.arch.causal,
            )
            hidden = layer.finish(attended[rows], hidden[rows]) if is_last else layer.finish(attended, hidden)
        return self.norm(hidden)

    def _layers(self) -> Iterator[BlockLayer]:
        return cast("Iterator[BlockLayer]", iter(self.layers))


class BlockLayer(nn.Module):
    """An ordinary decoder layer, whose attention the backbone calls."""

    def __init__(self, arch: BlockArchitecture) -> None:
        """Create the modules.

        Args:
            arch: the draft.
        """
        super().__init__()
        self.input_layernorm = RMSNorm(arch.hidden_size, arch.rms_norm_eps)
        self.self_attn = DraftAttention(arch, arch.hidden_size)
        self.post_attention_layernorm = RMSNorm(arch.hidden_size, arch.rms_norm_eps)
        self.mlp = DraftMLP(arch.hidden_size, arch.intermediate_size)

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        """Output projection, residual, MLP: [m, A, d] and [m, H] to [m, H]."""
        hidden = residual + self.self_attn.o_proj(attended.flatten(1))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))
