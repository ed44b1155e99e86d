"""Domino: blocks whose logits are corrected by a recurrent summary of the tokens before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor

from nemo_rl.models.automodel.draft.acceptance import ElementTable, Metrics, element_metrics
from nemo_rl.models.automodel.draft.adapters.base import DraftAdapter
from nemo_rl.models.automodel.draft.adapters.domino import DominoAdapter
from nemo_rl.models.automodel.draft.block import BlockRuntime
from nemo_rl.models.automodel.draft.block_losses import BlockLossOutput
from nemo_rl.models.automodel.draft.config import DominoDraftConfig
from nemo_rl.models.automodel.draft.losses import STATS
from nemo_rl.models.automodel.draft.models.block import BlockInputs, BlockPlan
from nemo_rl.models.automodel.draft.models.domino import DominoDraft, DominoInputs
from nemo_rl.models.automodel.draft.models.layers import DraftModule

__all__ = ["DominoRuntime", "base_share"]


def base_share(num_updates: int, *, start: float, steps: int) -> float:
    """Share of the loss on the uncorrected logits: falls linearly from `start` to 0.

    Worked example, start 1.0, 4 steps: 1, 0.75, 0.5, 0.25, 0, 0, ...

    Args:
        num_updates: updates done before this one.
        start: share in the first update.
        steps: updates until it is 0.
    """
    return start * max(0.0, 1.0 - num_updates / steps)


class DominoRuntime(BlockRuntime[DominoDraftConfig]):
    """See `BlockRuntime`."""

    adapter: ClassVar[DraftAdapter[Any, Any]] = DominoAdapter()
    module_class: ClassVar[Callable[[Any], DraftModule]] = DominoDraft

    @property
    def base_share(self) -> float:
        """Share of the loss on the uncorrected logits in the update that was begun last."""
        start = self.cfg.base_loss_weight
        if start is None:
            # The correction of a loaded draft is trained already.
            start = 1.0 if self.spec.source == "scratch" else 0.0
        return base_share(max(self.num_updates - 1, 0), start=start, steps=self.cfg.base_loss_steps)

    def _inputs(self, common: BlockInputs) -> BlockInputs:
        return DominoInputs(**vars(common), base_share=self.base_share)

    def _extra_metrics(self, plan: BlockPlan, table: ElementTable, weights: Tensor, output: BlockLossOutput) -> Metrics:
        total = weights.sum()
        of_base = element_metrics(table, {"top1": output.extra["base_top1"]})
        terms = {"final": output.stats[:, STATS.index("cross_entropy")], "base": output.extra["base_cross_entropy"]}
        count = weights.new_tensor(float(weights.numel()))
        return {
            **{f"base_{name}": pair for name, pair in of_base.items()},
            **{f"loss_{name}": ((weights * column).sum(), total) for name, column in terms.items()},
            "lambda_base": (count * self.base_share, count),
        }
