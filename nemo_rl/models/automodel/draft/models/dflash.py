"""The DFlash draft: the block backbone, whose states the policy's own head reads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from nemo_rl.models.automodel.draft.block_losses import BlockLossOutput, Label, LossWeights, block_loss
from nemo_rl.models.automodel.draft.models.block import BlockDraft, BlockInputs

__all__ = ["DFlashDraft", "DFlashInputs"]


@dataclass(frozen=True)
class DFlashInputs(BlockInputs):
    """See `BlockInputs`.

    Attributes:
        label: what the cross-entropy compares with.
    """

    label: Label


class DFlashDraft(BlockDraft):
    """No tensors beyond the backbone's."""

    def element_loss(self, states: Tensor, inputs: BlockInputs) -> BlockLossOutput:
        """Cross-entropy of each predicted token."""
        assert isinstance(inputs, DFlashInputs), "the runtime of this draft makes them"
        return block_loss(
            states,
            inputs.head,
            inputs.teacher_logits,
            weights=LossWeights(cross_entropy=inputs.weights),
            labels=inputs.plan.labels,
            chunks=inputs.plan.chunks,
            vocab_ids=inputs.vocab_ids,
            label=inputs.label,
        )
