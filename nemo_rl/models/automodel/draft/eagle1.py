"""EAGLE-1 (and EAGLE-2, which is trained the same way): what is trained and what is measured, loss and metrics.

Trained is the first draft token alone. The engine proposes more, the draft reading its own output; so that training
says what to expect of them, the draft is run on along the sampled tokens without gradients, and measured.

Shape symbols: N trunk rows, E elements, e trained elements (those of depth 0), H width, V target ids.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from nemo_rl.models.automodel.draft.acceptance import ElementTable, Metrics, element_metrics, replay_metrics
from nemo_rl.models.automodel.draft.adapters.base import DraftAdapter
from nemo_rl.models.automodel.draft.adapters.eagle1 import Eagle1Adapter
from nemo_rl.models.automodel.draft.capture import full_tensor
from nemo_rl.models.automodel.draft.config import Eagle1DraftConfig
from nemo_rl.models.automodel.draft.losses import STATS, LossChunks
from nemo_rl.models.automodel.draft.models.eagle1 import Eagle1Draft, Eagle1Elements, Eagle1Inputs, Eagle1Output
from nemo_rl.models.automodel.draft.models.layers import DraftModule
from nemo_rl.models.automodel.draft.publish import PublishContract
from nemo_rl.models.automodel.draft.runtime import DraftLoss
from nemo_rl.models.automodel.draft.sampling import document_generator
from nemo_rl.models.automodel.draft.unroll import UnrolledPlan, _UnrolledRuntime

if TYPE_CHECKING:
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl.models.automodel.data import Microbatch

__all__ = ["Eagle1Runtime"]

_NOISE = "feature_noise"
"""Purpose of the draws."""


class Eagle1Runtime(_UnrolledRuntime[Eagle1DraftConfig]):
    """Training of an EAGLE-1 draft on the policy's own forward."""

    adapter: ClassVar[DraftAdapter[Any, Any]] = Eagle1Adapter()
    module_class: ClassVar[Callable[[Any], DraftModule]] = Eagle1Draft
    contract: ClassVar[PublishContract] = PublishContract(trains_lm_head=False, trains_embeddings=False)

    # -- plan --------------------------------------------------------------------------------------------------------

    @property
    def _num_depths(self) -> int:
        """Depths that are run: the one that is trained, and those that are measured."""
        return self.spec.num_speculative_tokens if self.cfg.replay else 1

    def _plan(self, data: BatchedDataDict, *, step: int) -> Tensor:
        self._step = step
        return super()._plan(data, step=step)

    def _set_denominators(self, counts: Tensor) -> None:
        self._total = counts[0].clamp(min=1).float()

    def _noise(self, mb: Microbatch, plan: UnrolledPlan) -> Tensor | None:
        """Uniform noise of the trunk rows, fp32 [N, H] on the CPU, drawn per document."""
        width = self.cfg.feature_noise
        if not width:
            return None
        documents = mb.doc_ids.cpu().flatten()[plan.feature_rows]
        noise = torch.empty(documents.numel(), self.spec.architecture.feature_size)
        for document in documents.unique().tolist():
            generator = document_generator(
                seed=self._seed, step=self._step, sample=int(mb.sample_index[document]), purpose=_NOISE
            )
            rows = (documents == document).nonzero().squeeze(1)
            noise[rows] = torch.empty(rows.numel(), noise.shape[1]).uniform_(-width, width, generator=generator)
        return noise

    # -- loss --------------------------------------------------------------------------------------------------------

    def loss(self, mb: Microbatch, policy_logits: Tensor) -> DraftLoss:
        """Draft loss of a micro-batch; see `_DraftRuntimeBase.loss`."""
        (states,) = self._capture.take(mb.input_ids.shape)
        plan, documents = self._plan_rows(mb)
        if plan is None:
            return DraftLoss(self.zero_loss(), documents)
        table, rows, labels = _trained_first(plan)
        num_trained = int((table.depth == 0).sum())
        teacher = table.places[table.slot] + 1 + table.depth
        noise = self._noise(mb, plan)

        def elements(part: slice) -> Eagle1Elements:
            chunks = LossChunks.build(teacher[part], chunk_size=self.cfg.loss_chunk_size)
            return Eagle1Elements(rows[part], labels[part], chunks).to(self._device)

        # With noise the trained elements are measured, too: the engine adds none.
        first_measured = num_trained if noise is None else 0
        is_measuring = self.cfg.replay and first_measured < table.depth.numel()
        flat = states.flatten(0, 1)
        inputs = Eagle1Inputs(
            plan=plan.unroll.to(self._device),
            trained=elements(slice(num_trained)),
            measured=elements(slice(first_measured, None)) if is_measuring else None,
            features=flat.index_select(0, plan.feature_rows.to(self._device)),
            noise=None if noise is None else noise.to(self._device),
            targets=flat.index_select(0, teacher[:num_trained].to(self._device)),
            hidden_weight=self.cfg.hidden_loss_weight / self._total,
            token_weight=self.cfg.token_loss_weight / self._total,
            embedding=self._embedding,
            head=self._head,
            # Columns that pad the vocabulary are no tokens.
            teacher_logits=full_tensor(policy_logits).flatten(0, 1)[:, : self.spec.architecture.vocab_size],
        )
        out = self.module(inputs)
        stats = out.trained_stats[:first_measured] if is_measuring else out.trained_stats
        stats = torch.cat([stats, out.measured_stats])
        return DraftLoss(out.loss, self._metrics(table.to(self._device), out, stats) | documents)

    # -- metrics -----------------------------------------------------------------------------------------------------

    def _metrics(self, table: ElementTable, out: Eagle1Output, stats: Tensor) -> Metrics:
        """Fold the elements' stats into pairs; see `metrics` for the names.

        Args:
            table: of the micro-batch, in the order of `stats`.
            out: of the module.
            stats: fp32 [E, len(STATS)].
        """
        columns = {name: stats[:, i] for i, name in enumerate(STATS)}
        count = torch.tensor(float(out.trained_stats.shape[0]), device=self._device)
        return {
            "loss": (out.loss.detach(), count / self._total),
            "loss_hidden": (out.hidden_loss, count),
            "loss_token": (out.trained_stats[:, STATS.index("cross_entropy")].sum(), count),
            **element_metrics(table, columns),
            **replay_metrics(table, columns["hit"], k=self.spec.num_speculative_tokens),
        }


def _trained_first(plan: UnrolledPlan) -> tuple[ElementTable, Tensor, Tensor]:
    """Elements of depth 0 before those of deeper ones: their table, rows of the outputs and labels, int64 [E]."""
    table, unroll = plan.table, plan.unroll
    order = (table.depth > 0).long().argsort(stable=True)
    table = replace(table, slot=table.slot[order], depth=table.depth[order], has_label=table.has_label[order])
    return table, unroll.element_rows[order], unroll.labels[order]
