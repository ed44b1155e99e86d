"""EAGLE-3: the inputs of an unrolled draft, its loss and metrics.

Shape symbols: K depths, E supervised elements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from nemo_rl.models.automodel.draft.acceptance import Metrics, element_metrics, replay_metrics
from nemo_rl.models.automodel.draft.adapters.base import DraftAdapter
from nemo_rl.models.automodel.draft.adapters.eagle3 import Eagle3Adapter
from nemo_rl.models.automodel.draft.capture import full_tensor
from nemo_rl.models.automodel.draft.config import Eagle3DraftConfig
from nemo_rl.models.automodel.draft.losses import STATS
from nemo_rl.models.automodel.draft.models.layers import DraftModule
from nemo_rl.models.automodel.draft.models.llama_eagle import LlamaEagleDraft, UnrollInputs
from nemo_rl.models.automodel.draft.publish import PublishContract
from nemo_rl.models.automodel.draft.runtime import DraftLoss
from nemo_rl.models.automodel.draft.unroll import UnrolledPlan, _UnrolledRuntime

if TYPE_CHECKING:
    from nemo_rl.models.automodel.data import Microbatch

__all__ = ["Eagle3Runtime"]


class Eagle3Runtime(_UnrolledRuntime[Eagle3DraftConfig]):
    """Test-time training of an EAGLE-3 draft on the policy's own forward."""

    adapter: ClassVar[DraftAdapter[Any, Any]] = Eagle3Adapter()
    module_class: ClassVar[Callable[[Any], DraftModule]] = LlamaEagleDraft
    contract: ClassVar[PublishContract] = PublishContract(trains_lm_head=True, trains_embeddings=False)

    # -- plan --------------------------------------------------------------------------------------------------------

    @property
    def _num_depths(self) -> int:
        """Depths that are trained."""
        return self.cfg.ttt_steps

    def _set_denominators(self, counts: Tensor) -> None:
        depths = self.cfg.ttt_steps
        decay = self.cfg.ttt_decay ** torch.arange(depths, dtype=torch.float64, device=counts.device)
        self._element_weights = (decay / decay.sum() / counts.clamp(min=1)).float()
        self._total = counts.sum().clamp(min=1).float()

    # -- loss --------------------------------------------------------------------------------------------------------

    def loss(self, mb: Microbatch, policy_logits: Tensor) -> DraftLoss:
        """Draft loss of a micro-batch; see `_DraftRuntimeBase.loss`."""
        states = self._capture.take(mb.input_ids.shape)
        plan, documents = self._plan_rows(mb)
        if plan is None:
            return DraftLoss(self.zero_loss(), documents)
        rows = plan.feature_rows.to(self._device)
        inputs = UnrollInputs(
            plan=plan.unroll.to(self._device),
            features=torch.cat([s.flatten(0, 1).index_select(0, rows) for s in states], dim=-1),
            embedding=self._embedding,
            # Columns that pad the vocabulary are no tokens.
            teacher_logits=full_tensor(policy_logits).flatten(0, 1)[:, : self.spec.architecture.vocab_size],
            weights=self._element_weights[plan.table.depth.to(self._device)],
            vocab_ids=self._vocab_ids,
            drop_out_of_vocab=self.cfg.drop_out_of_vocab,
        )
        loss, stats = self.module(inputs)
        return DraftLoss(loss, self._metrics(plan, loss.detach(), stats) | documents)

    # -- metrics -----------------------------------------------------------------------------------------------------

    def _metrics(self, plan: UnrolledPlan, loss: Tensor, stats: Tensor) -> Metrics:
        """Fold the elements' stats into pairs; see `metrics` for the names.

        Args:
            plan: of the micro-batch.
            loss: scalar.
            stats: fp32 [E, len(STATS)].
        """
        table = plan.table.to(self._device)
        columns = {name: stats[:, i] for i, name in enumerate(STATS)}
        kept = columns["argmax_in_vocab"] if self.cfg.drop_out_of_vocab else None
        count = torch.tensor(float(plan.table.depth.numel()), device=self._device)
        return {
            "loss": (loss, count / self._total),
            **element_metrics(table, columns, kept=kept),
            **replay_metrics(table, columns["hit"], k=self.spec.num_speculative_tokens),
        }
