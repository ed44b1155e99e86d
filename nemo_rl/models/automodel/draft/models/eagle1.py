"""The EAGLE-1 draft: from a token and the policy's final state before it, predict the next final state.

`fc` projects [embedding; state] to the draft's width; the first layer's attention reads that un-normed, later layers
norm their input; the last layer's output goes to the policy's head as it is, and is the state that the next depth
reads. Depth 0 alone is trained; the deeper ones are run, without gradients, for what is reported of them.

Written anew rather than on nemo_automodel's `LlamaEagleDraftModel`, which norms the first layer's input and the output
(the engine has neither norm and refuses such a checkpoint), rounds RoPE frequencies with `.to(bfloat16)`, computes
every position over a dense mask, and takes means over micro-batches.

Shape symbols: N trunk rows, n_k active slots at depth k, e elements of one kind, H width, A query heads, d head width,
V target ids, M rows of teacher logits.

Worked example (x0 x1 prompt, x2..x5 sampled; g[t] = the policy's final state), slot t reads g[t] and x[t+1] at RoPE
position t, is compared with g[t+1] and p[t+1], and so predicts x[t+2]:

    slot  state  token  position  compared with  predicts
    0     g0     x1     0         -              -         x1 is no sampled token: nothing is drafted behind it
    1     g1     x2     1         g2 p2          x3
    2     g2     x3     2         g3 p3          x4
    3     g3     x4     3         g4 p4          x5
    4     g4     x5     4         -              -         nothing follows x5
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nemo_rl.models.automodel.draft.architecture import Eagle1Architecture
from nemo_rl.models.automodel.draft.losses import DistillationOutput, LossChunks, soft_distillation
from nemo_rl.models.automodel.draft.models.layers import (
    DraftAttention,
    DraftMLP,
    DraftModule,
    RMSNorm,
    RopeFrequencies,
    zero_of,
)
from nemo_rl.models.automodel.draft.models.unroll import Unroll, UnrollPlan

__all__ = ["Eagle1Draft", "Eagle1Elements", "Eagle1Inputs", "Eagle1Output"]


@dataclass(frozen=True)
class Eagle1Elements:
    """Predictions that are looked at.

    Attributes:
        rows: int64 [e], row of each in the concatenation of the depths' outputs.
        labels: int64 [e], sampled target id that the element predicts, -1 = none.
        chunks: elements cut for the loss.
    """

    rows: Tensor
    labels: Tensor
    chunks: LossChunks

    def to(self, device: torch.device | str) -> Eagle1Elements:
        """The elements with their tensors on `device`."""
        return replace(
            self,
            rows=self.rows.to(device, non_blocking=True),
            labels=self.labels.to(device, non_blocking=True),
            chunks=self.chunks.to(device),
        )


@dataclass(frozen=True)
class Eagle1Inputs:
    """Everything the module reads in one call; nothing here is differentiated.

    Attributes:
        plan: what to compute; its elements are not read.
        trained: elements of depth 0.
        measured: elements that are only reported; None = nothing beyond the trained ones.
        features: float [N, H], the policy's final states at the trunk rows.
        noise: fp32 [N, H], added to the features in training, not in measuring; None = none.
        targets: float [e, H], final state that each trained element predicts.
        hidden_weight: fp32 scalar, factor of an element's distance between states (weight over the global count).
        token_weight: likewise, of its cross-entropy.
        embedding: float [V, H], the policy's live one.
        head: float [V, H], the policy's live one, in the compute dtype.
        teacher_logits: float [M, V], raw logits of the policy.
    """

    plan: UnrollPlan
    trained: Eagle1Elements
    measured: Eagle1Elements | None
    features: Tensor
    noise: Tensor | None
    targets: Tensor
    hidden_weight: Tensor
    token_weight: Tensor
    embedding: Tensor
    head: Tensor
    teacher_logits: Tensor


class Eagle1Output(NamedTuple):
    """Result of one call; a tuple, because sharding looks for the tensors that need gradients in it.

    Attributes:
        loss: fp32 scalar.
        hidden_loss: fp32 scalar, sum over trained elements, not weighted; detached.
        trained_stats: fp32 [e, len(losses.STATS)] of the trained elements, detached.
        measured_stats: likewise of the measured ones.
    """

    loss: Tensor
    hidden_loss: Tensor
    trained_stats: Tensor
    measured_stats: Tensor


class Eagle1Draft(DraftModule):
    """Draft module. Its one call runs all depths and the loss, so that sharding hooks fire once around everything.

    The compute dtype is that of the parameters inside the call: fp32, or what mixed-precision sharding casts them to.
    """

    def __init__(self, arch: Eagle1Architecture) -> None:
        """Create the modules with uninitialised parameters.

        Args:
            arch: the draft.
        """
        super().__init__()
        self.arch = arch
        self.fc = nn.Linear(arch.hidden_size + arch.feature_size, arch.hidden_size, bias=False)
        self.layers = nn.ModuleList(Eagle1Layer(arch, i) for i in range(arch.num_hidden_layers))
        self.rope = RopeFrequencies(arch)

    def forward(self, inputs: Eagle1Inputs | None) -> Eagle1Output:
        """Run the draft and form the loss.

        Args:
            inputs: what to compute; None = nothing here is supervised: a zero loss that reaches every parameter.
        """
        if inputs is None:
            loss = zero_of(self)
            empty = loss.detach().new_zeros(0, 0)
            return Eagle1Output(loss, loss.detach(), empty, empty)
        features = inputs.features
        if inputs.noise is not None:
            features = features.to(inputs.noise.dtype) + inputs.noise
        head = inputs.head
        unroll, hidden = self._start(features, inputs)
        states = hidden.index_select(0, inputs.trained.rows)
        hidden_losses = _state_distance(states, inputs.targets)
        tokens = _distil(states, head, inputs.trained, inputs, weight=inputs.token_weight)
        loss = tokens.loss + inputs.hidden_weight * hidden_losses.sum()
        measured = tokens.stats[:0]
        if inputs.measured is not None:
            with torch.no_grad():
                if inputs.noise is not None:
                    unroll, hidden = self._start(inputs.features, inputs)
                states = torch.cat(self._unroll(unroll, hidden, inputs)).index_select(0, inputs.measured.rows)
                measured = _distil(states, head, inputs.measured, inputs, weight=torch.zeros_like(loss)).stats
        return Eagle1Output(loss, hidden_losses.detach().sum(), tokens.stats, measured)

    def _embed(self, tokens: Tensor, inputs: Eagle1Inputs) -> Tensor:
        return F.embedding(tokens, inputs.embedding).to(self.fc.weight.dtype)

    def _start(self, features: Tensor, inputs: Eagle1Inputs) -> tuple[Unroll, Tensor]:
        """Depth 0 on features [N, H]: what deeper depths go on from, and the output [n_0, H] of the active slots."""
        unroll = Unroll(cast("Sequence[Eagle1Layer]", list(self.layers)), self.rope, inputs.plan)
        embeds = self._embed(inputs.plan.trunk_tokens, inputs)
        return unroll, unroll.trunk(self._fuse(embeds, features.to(embeds.dtype)), embeds)

    def _unroll(self, unroll: Unroll, hidden: Tensor, inputs: Eagle1Inputs) -> list[Tensor]:
        """Output [n_k, H] of every depth, the draft reading its own output from depth 1 on.

        Args:
            unroll: after depth 0.
            hidden: its output, [n_0, H].
            inputs: of this call.
        """
        plan, outputs = inputs.plan, [hidden]
        for depth, count in enumerate(plan.num_active[1:], start=1):
            embeds = self._embed(plan.depth_tokens[depth - 1], inputs)
            outputs.append(unroll.branch(self._fuse(embeds, outputs[-1][:count]), embeds, depth))
        return outputs

    def _fuse(self, embeds: Tensor, states: Tensor) -> Tensor:
        """Project token embeddings and states, both [m, H], to what the first layer reads, [m, H]."""
        return self.fc(torch.cat([embeds, states], dim=-1))


class Eagle1Layer(nn.Module):
    """A decoder layer; the first one does not norm its input."""

    def __init__(self, arch: Eagle1Architecture, index: int) -> None:
        """Create the modules.

        Args:
            arch: the draft.
            index: of the layer.
        """
        super().__init__()
        self.is_first = index == 0
        if not self.is_first:
            self.input_layernorm = RMSNorm(arch.hidden_size, arch.rms_norm_eps)
        self.self_attn = DraftAttention(arch, arch.hidden_size)
        self.post_attention_layernorm = RMSNorm(arch.hidden_size, arch.rms_norm_eps)
        self.mlp = DraftMLP(arch.hidden_size, arch.intermediate_size)

    def attention_input(self, hidden: Tensor, embeds: Tensor) -> tuple[Tensor, Tensor]:
        """What attention projects and the residual, both [m, H].

        Args:
            hidden: float [m, H].
            embeds: float [m, H], not read: the projection before the first layer has taken them in.
        """
        return hidden if self.is_first else self.input_layernorm(hidden), hidden

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        """Output projection, residual, MLP: [m, A, d] and [m, H] to [m, H]."""
        hidden = residual + self.self_attn.o_proj(attended.flatten(1))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


def _state_distance(states: Tensor, targets: Tensor) -> Tensor:
    """Smooth L1 (beta 1) between states, mean over their channels; in fp32 or wider, for their channels can be large.

    Args:
        states: float [e, H].
        targets: float [e, H].

    Returns:
        [e].
    """
    dtype = torch.promote_types(states.dtype, torch.float32)
    return F.smooth_l1_loss(states.to(dtype), targets.to(dtype), reduction="none").mean(-1)


def _distil(
    states: Tensor, head: Tensor, elements: Eagle1Elements, inputs: Eagle1Inputs, *, weight: Tensor
) -> DistillationOutput:
    """Cross-entropy with the policy through its own, frozen head.

    Args:
        states: float [e, H].
        head: float [V, H].
        elements: of the states.
        inputs: of this call.
        weight: fp32 scalar, factor of every element.
    """
    return soft_distillation(
        states,
        head,
        inputs.teacher_logits,
        weights=weight.expand(states.shape[0]),
        labels=elements.labels,
        chunks=elements.chunks,
        vocab_ids=None,
        drop_out_of_vocab=False,
    )
