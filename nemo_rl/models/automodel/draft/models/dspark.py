"""The DSpark draft: block backbone, Markov head, confidence head.

Shape symbols: n blocks, K predicted tokens of a block (ordinals j = 1..K), E supervised elements, H width, r rank of
the Markov head, V target ids, D draft ids.

Ordinal j of a block at anchor a predicts x[a+j]. The Markov head adds a bias to its logits that depends on the token
before, `prev_j = x[a+j-1]`; training forces the true one, the engine goes from left to right. `e` is `W1[prev_j]`, `s`
the backbone's normed output at the predicting slot; the bias is `W2` times

    vanilla   e
    gated     sigmoid(G [s; e] + b) * e
    rnn       tanh(o),  [g; c; o] = J [state; e; s] + b,  state' = sigmoid(g) state + (1 - sigmoid(g)) tanh(c)

where the state of a block's first ordinal is 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nemo_rl.models.automodel.draft.architecture import DSparkArchitecture
from nemo_rl.models.automodel.draft.block_losses import (
    BlockLossOutput,
    Correction,
    LossWeights,
    block_loss,
    confidence_loss,
)
from nemo_rl.models.automodel.draft.losses import STATS
from nemo_rl.models.automodel.draft.models.block import BlockDraft, BlockInputs, BlockPlan
from nemo_rl.models.automodel.draft.models.layers import zero_of

__all__ = ["ConfidenceHead", "DSparkDraft", "DSparkInputs", "DSparkTerms", "MarkovHead"]


@dataclass(frozen=True)
class DSparkTerms:
    """What the loss consists of.

    Attributes:
        cross_entropy: factor of the cross-entropy with the sampled token.
        l1: factor of the distance to the policy's distribution; 0 = it is not computed.
        confidence: factor of the confidence head's cross-entropy.
        confidence_column: column of `losses.STATS` that the confidence head learns: `overlap` or `greedy`.
        confidence_detach: the confidence head's gradient ends at the head.
    """

    cross_entropy: float
    l1: float
    confidence: float
    confidence_column: str
    confidence_detach: bool


@dataclass(frozen=True)
class DSparkInputs(BlockInputs):
    """See `BlockInputs`.

    Attributes:
        terms: what the loss consists of.
    """

    terms: DSparkTerms


class DSparkDraft(BlockDraft):
    """The backbone and both heads."""

    def __init__(self, arch: DSparkArchitecture) -> None:
        """Create the modules with uninitialised parameters.

        Args:
            arch: the draft.
        """
        super().__init__(arch)
        self.markov_head = MarkovHead(arch)
        self.confidence_head = ConfidenceHead(arch) if arch.enable_confidence_head else None

    def initial_std(self) -> dict[str, float]:
        """A new draft starts as the plain block draft but for next to nothing, with a confidence of one half.

        Next to nothing, because exact zeros would give the rest of the Markov head no gradient.
        """
        return {"markov_head.markov_w2.weight": 1.0e-3, "confidence_head.proj.weight": 0.0}

    def forward(self, inputs: BlockInputs | None) -> BlockLossOutput:
        """Run the blocks and form the loss; see `BlockDraft.forward`."""
        if inputs is None:
            zero = self._zero()
            return BlockLossOutput(zero, zero.new_zeros(0, 0).detach(), {})
        return super().forward(inputs)

    def _zero(self) -> Tensor:
        """A zero that reaches every parameter; those of the confidence head, which is a shard unit, by its call."""
        if self.confidence_head is None:
            return zero_of(self)
        rest = [p for name, p in self.named_parameters() if not name.startswith("confidence_head.")]
        zero = torch.stack([(p * 0.0).sum().to(torch.float32) for p in rest]).sum()
        states, embeds = (rest[0].new_zeros(1, width) for width in (self.arch.hidden_size, self.markov_head.rank))
        return zero + (self._confidence(states, embeds) * 0.0).sum()

    def _confidence(self, states: Tensor, embeds: Tensor) -> Tensor:
        """The confidence head's logits [E], from inputs that always need a gradient.

        Sharding reduces the head's gradient when that of its inputs is known, else behind everything else: ranks that
        differed in this would reduce in different orders.
        """
        assert self.confidence_head is not None, "called for drafts that have one"
        if torch.is_grad_enabled():
            states, embeds = (x if x.requires_grad else x.detach().requires_grad_() for x in (states, embeds))
        return self.confidence_head(states, embeds).squeeze(-1)

    def element_loss(self, states: Tensor, inputs: BlockInputs) -> BlockLossOutput:
        """The terms, and in `extra` what the confidence head said and should have said of each element."""
        assert isinstance(inputs, DSparkInputs), "the runtime of this draft makes them"
        plan, terms = inputs.plan, inputs.terms
        embeds = self.markov_head.markov_w1(plan.previous)
        output = block_loss(
            states,
            inputs.head,
            inputs.teacher_logits,
            weights=LossWeights(
                cross_entropy=inputs.weights * terms.cross_entropy,
                l1=inputs.weights * terms.l1 if terms.l1 else None,
            ),
            labels=plan.labels,
            chunks=plan.chunks,
            vocab_ids=inputs.vocab_ids,
            correction=Correction(self.markov_head.latents(states, embeds, plan), self.markov_head.markov_w2.weight),
        )
        if self.confidence_head is None:
            return output
        read = (states.detach(), embeds.detach()) if terms.confidence_detach else (states, embeds)
        logits = self._confidence(*read)
        target = output.stats[:, STATS.index(terms.confidence_column)]
        loss, column = confidence_loss(logits, target, weights=inputs.weights * terms.confidence)
        extra = {
            "confidence": logits.detach().sigmoid(),
            "confidence_target": target.clamp(0.0, 1.0),
            "confidence_loss": column,
        }
        return BlockLossOutput(output.loss + loss, output.stats, output.extra | extra)


class MarkovHead(nn.Module):
    """What the token before says about the next one; the last projection is left to the loss, which runs in chunks."""

    def __init__(self, arch: DSparkArchitecture) -> None:
        """Create the projections.

        Args:
            arch: the draft.
        """
        super().__init__()
        rank, hidden = arch.markov_rank, arch.hidden_size
        self.rank = rank
        self.kind = arch.markov_head_type
        self.markov_w1 = nn.Embedding(arch.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, arch.draft_vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        if self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def latents(self, states: Tensor, embeds: Tensor, plan: BlockPlan) -> Tensor:
        """What `markov_w2` projects to biases.

        Args:
            states: float [E, H], normed outputs of the predicting slots.
            embeds: float [E, r], `markov_w1` of the token before each predicted one.
            plan: which elements follow each other.

        Returns:
            float [E, r].
        """
        if self.kind == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat([states, embeds], dim=-1))) * embeds
        if self.kind == "rnn":
            return plan.of_elements(self.unroll(plan.by_block(states), plan.by_block(embeds)))
        return embeds

    def unroll(self, states: Tensor, embeds: Tensor) -> Tensor:
        """The recurrent form over blocks: float [n, K, H] and [n, K, r] to [n, K, r]."""
        wide = torch.promote_types(states.dtype, torch.float32)
        of_state, of_inputs = self.joint_proj.weight.split([self.rank, self.joint_proj.in_features - self.rank], dim=1)
        inputs = F.linear(torch.cat([embeds, states], dim=-1), of_inputs, self.joint_proj.bias).to(wide)
        # Gates and state stay in fp32: errors of the state add up over the block.
        state = torch.zeros(states.shape[0], self.rank, dtype=wide, device=states.device)
        outputs = []
        for step in inputs.unbind(1):
            gate, candidate, out = (step + F.linear(state.to(states.dtype), of_state).to(wide)).chunk(3, dim=-1)
            state = torch.lerp(torch.tanh(candidate), state, torch.sigmoid(gate))
            outputs.append(torch.tanh(out))
        return torch.stack(outputs, dim=1).to(states.dtype)


class ConfidenceHead(nn.Module):
    """How likely each proposed token is to be accepted. Its weights are fp32 everywhere, as in the engine."""

    def __init__(self, arch: DSparkArchitecture) -> None:
        """Create the projection.

        Args:
            arch: the draft.
        """
        super().__init__()
        self.reads_markov = arch.confidence_head_with_markov
        self.proj = nn.Linear(arch.hidden_size + (arch.markov_rank if self.reads_markov else 0), 1)

    def forward(self, states: Tensor, embeds: Tensor) -> Tensor:
        """Logits of the acceptance, fp32 [E, 1].

        Args:
            states: float [E, H], normed outputs of the predicting slots.
            embeds: float [E, r], `markov_w1` of the token before each predicted one.
        """
        features = torch.cat([states, embeds], dim=-1) if self.reads_markov else states
        return self.proj(features.to(self.proj.weight.dtype))
