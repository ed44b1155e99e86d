"""The Domino draft: block backbone and a causal correction from a recurrent summary of the tokens before.

Shape symbols: n blocks, K predicted tokens of a block (ordinals j = 1..K), H width, S width of the recurrent state, r
inner width of the correction, D draft ids.

Ordinal j of a block at anchor a predicts x[a+j]. Its state summarises x[a] .. x[a+j-1], i.e. everything known then, in
both layouts of a block. The first P ordinals stay uncorrected. Worked example, P = 1, a = 2:

    j  state of     logits                              predicts
    1  x2           base                                x3
    2  x2 x3        base + E2 silu(E0 [s; state])       x4
    3  x2 x3 x4     base + E2 silu(E0 [s; state])       x5
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nemo_rl.models.automodel.draft.architecture import DominoArchitecture
from nemo_rl.models.automodel.draft.block_losses import BlockLossOutput, Correction, LossWeights, block_loss
from nemo_rl.models.automodel.draft.models.block import BlockDraft, BlockInputs

__all__ = ["DominoDraft", "DominoInputs", "PrefixGRU"]


@dataclass(frozen=True)
class DominoInputs(BlockInputs):
    """See `BlockInputs`.

    Attributes:
        base_share: share of the loss on the uncorrected logits, in [0, 1]; the rest is on the corrected ones.
    """

    base_share: float


class DominoDraft(BlockDraft):
    """The backbone, the recurrent head and the correction."""

    def __init__(self, arch: DominoArchitecture) -> None:
        """Create the modules with uninitialised parameters.

        Args:
            arch: the draft.
        """
        super().__init__(arch)
        self.num_uncorrected = arch.pure_draft_prefix_len
        self.prefix_gru = PrefixGRU(arch.hidden_size, arch.gru_hidden_dim)
        self.embed_proj = nn.Sequential(
            nn.Linear(arch.hidden_size + arch.gru_hidden_dim, arch.emb_dim, bias=False),
            nn.SiLU(),
            nn.Linear(arch.emb_dim, arch.draft_vocab_size, bias=False),
        )

    def initial_std(self) -> dict[str, float]:
        """A new draft starts with next to no correction; exact zeros would give the rest of the head no gradient."""
        return {"embed_proj.2.weight": 1.0e-3}

    def element_loss(self, states: Tensor, inputs: BlockInputs) -> BlockLossOutput:
        """Cross-entropy of corrected and uncorrected logits; one pass over chunks forms both."""
        assert isinstance(inputs, DominoInputs), "the runtime of this draft makes them"
        plan = inputs.plan
        tokens = F.embedding(plan.by_block(plan.previous), inputs.embedding).to(states.dtype)
        prefix = plan.of_elements(self.prefix_gru(tokens))
        inner, activation, outer = self.embed_proj
        latent = activation(inner(torch.cat([states, prefix], dim=-1)))
        is_corrected = plan.depth >= self.num_uncorrected
        return block_loss(
            states,
            inputs.head,
            inputs.teacher_logits,
            weights=LossWeights(
                cross_entropy=inputs.weights * (1.0 - inputs.base_share), base=inputs.weights * inputs.base_share
            ),
            labels=plan.labels,
            chunks=plan.chunks,
            vocab_ids=inputs.vocab_ids,
            correction=Correction(latent * is_corrected[:, None], cast("nn.Linear", outer).weight),
        )


class PrefixGRU(nn.Module):
    """One layer of a GRU without bias; names and gate order (reset, update, new) are those of `torch.nn.GRU`.

    Written out: torch's own keeps references to its weights, which sharding replaces. Gates and state are fp32.
    """

    def __init__(self, input_size: int, state_size: int) -> None:
        """Create the weights, uninitialised.

        Args:
            input_size: H.
            state_size: S.
        """
        super().__init__()
        self.weight_ih_l0 = nn.Parameter(torch.empty(3 * state_size, input_size))
        self.weight_hh_l0 = nn.Parameter(torch.empty(3 * state_size, state_size))

    def forward(self, inputs: Tensor) -> Tensor:
        """States after each input: float [n, K, H] -> [n, K, S], from a state of zeros."""
        dtype = inputs.dtype
        wide = torch.promote_types(dtype, torch.float32)
        projected = F.linear(inputs, self.weight_ih_l0).to(wide)
        state = projected.new_zeros(inputs.shape[0], self.weight_hh_l0.shape[1])
        states = []
        for step in projected.unbind(1):
            reset_x, update_x, new_x = step.chunk(3, dim=-1)
            reset_h, update_h, new_h = F.linear(state.to(dtype), self.weight_hh_l0).to(wide).chunk(3, dim=-1)
            new = torch.tanh(new_x + torch.sigmoid(reset_x + reset_h) * new_h)
            state = torch.lerp(new, state, torch.sigmoid(update_x + update_h))
            states.append(state)
        return torch.stack(states, dim=1).to(dtype)
