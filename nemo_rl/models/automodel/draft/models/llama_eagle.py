"""The EAGLE-3 draft: fused policy features, a decoder layer over [embedding; hidden], unrolled over depths.

Written anew rather than on nemo_automodel's `LlamaEagle3DraftModel`, which differs from what the engine serves: it
has no `norm_before_residual`, no second layer, names tensors under `model.`, rounds RoPE frequencies with
`.to(bfloat16)`, and computes attention, MLP and head for every position at every depth. Here positions that nothing
supervised depends on are never computed: the trunk of depth 0 gives keys and values for all positions, queries exist
only for active slots.

Shape symbols: N trunk rows, n_k active slots at depth k, E supervised elements, H width, F concatenated features, V
target ids, D draft ids, M rows of teacher logits.

Worked example (x0 x1 prompt, x2..x5 sampled), depth k of slot t: token x[t+1+k], hidden fc(f[t]) for k = 0 else the
output of depth k - 1 at the same slot, RoPE position t + k, teacher p[t+1+k], predicts x[t+2+k].

    k  slots    tokens    positions  predicts
    0  1 2 3    x2 x3 x4  1 2 3      x3 x4 x5
    1  1 2      x3 x4     2 3        x4 x5
    2  1        x4        3          x5
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_rl.models.automodel.draft.architecture import Eagle3Architecture
from nemo_rl.models.automodel.draft.losses import soft_distillation
from nemo_rl.models.automodel.draft.models.fused_eagle import FusedEagleDraft
from nemo_rl.models.automodel.draft.models.layers import zero_of
from nemo_rl.models.automodel.draft.models.unroll import Unroll, UnrollPlan

__all__ = ["LlamaEagleDraft", "UnrollInputs", "UnrollOutput"]


@dataclass(frozen=True)
class UnrollInputs:
    """Everything the module reads in one call; nothing here is differentiated.

    Attributes:
        plan: what to compute.
        features: float [N, F], concatenated hidden states of the policy.
        embedding: float [V, H], the embedding in use (the policy's live one, unless the draft owns one).
        teacher_logits: float [M, V], raw logits of the policy.
        weights: fp32 [E], factor of each element's loss.
        vocab_ids: int64 [D], target id of each draft id; None = draft ids are target ids.
        drop_out_of_vocab: no loss where the policy's most likely token is no draft id.
    """

    plan: UnrollPlan
    features: Tensor
    embedding: Tensor
    teacher_logits: Tensor
    weights: Tensor
    vocab_ids: Tensor | None
    drop_out_of_vocab: bool


class UnrollOutput(NamedTuple):
    """Result of one call; a tuple, because sharding looks for the tensors that need gradients in it.

    Attributes:
        loss: fp32 scalar.
        stats: fp32 [E, len(losses.STATS)], detached; empty without elements.
    """

    loss: Tensor
    stats: Tensor


class LlamaEagleDraft(FusedEagleDraft):
    """Draft module. Its one call runs all depths and the loss, so that sharding hooks fire once around everything.

    The compute dtype is that of the parameters inside the call: fp32, or what mixed-precision sharding casts them to.
    """

    def __init__(self, arch: Eagle3Architecture) -> None:
        """Create the modules with uninitialised parameters.

        Args:
            arch: the draft.
        """
        super().__init__(arch)
        self.norms_feedback = arch.norm_output

    def forward(self, inputs: UnrollInputs | None) -> UnrollOutput:
        """Unroll the draft and distil.

        Args:
            inputs: what to compute; None = nothing here is supervised: a zero loss that reaches every parameter.
        """
        if inputs is None:
            loss = zero_of(self)
            return UnrollOutput(loss, loss.new_zeros(0, 0))
        plan = inputs.plan
        # A concatenation over depths, then one pass of the head: its gradient is accumulated once.
        states = torch.cat(self._unroll(inputs))
        loss, stats = soft_distillation(
            states.index_select(0, plan.element_rows),
            self.lm_head.weight,
            inputs.teacher_logits,
            weights=inputs.weights,
            labels=plan.labels,
            chunks=plan.chunks,
            vocab_ids=inputs.vocab_ids,
            drop_out_of_vocab=inputs.drop_out_of_vocab,
        )
        return UnrollOutput(loss, stats)

    def _unroll(self, inputs: UnrollInputs) -> list[Tensor]:
        """Normed output [n_k, H] of each depth."""
        plan, dtype = inputs.plan, self.fc.weight.dtype

        def embed(tokens: Tensor) -> Tensor:
            return F.embedding(tokens, inputs.embedding).to(dtype)

        unroll = Unroll(list(self._decoder_layers()), self.rope, plan)
        hidden = unroll.trunk(self.fuse(inputs.features.to(dtype)), embed(plan.trunk_tokens))
        outputs = [self.norm(hidden)]
        for depth, count in enumerate(plan.num_active[1:], start=1):
            fed_back = outputs[-1] if self.norms_feedback else hidden
            hidden = unroll.branch(fed_back[:count], embed(plan.depth_tokens[depth - 1]), depth)
            outputs.append(self.norm(hidden))
        return outputs
