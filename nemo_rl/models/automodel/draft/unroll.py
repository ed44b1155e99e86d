"""What the runtimes of drafts that feed on their own output share: the plan of an unrolled micro-batch.

Shape symbols: B samples, R rows, S row length, K depths, N trunk rows, n_k active slots at depth k, E supervised
elements. A slot is a position t of a row; at depth k it reads token t+1+k and predicts token t+2+k.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from nemo_rl.models.automodel.draft.acceptance import ElementTable, Metrics
from nemo_rl.models.automodel.draft.attention import TrunkLayout, uses_packed_layout
from nemo_rl.models.automodel.draft.config import Eagle1DraftConfig, Eagle3DraftConfig
from nemo_rl.models.automodel.draft.losses import LossChunks
from nemo_rl.models.automodel.draft.models.unroll import UnrollPlan
from nemo_rl.models.automodel.draft.runtime import _DraftRuntimeBase, charged_depths, sampled_tokens
from nemo_rl.models.automodel.draft.trunk import TrunkRows, predicted_tokens

if TYPE_CHECKING:
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl.models.automodel.data import Microbatch

__all__ = ["UnrolledPlan", "_UnrolledRuntime", "plan_rows"]

ConfigT = TypeVar("ConfigT", bound=Eagle3DraftConfig | Eagle1DraftConfig)


@dataclass(frozen=True)
class UnrolledPlan:
    """What one micro-batch computes.

    Attributes:
        unroll: the module's part.
        feature_rows: int64 [N], entry of the flattened [R * S] rows that each trunk row reads its features from.
        table: where each element stands.
    """

    unroll: UnrollPlan
    feature_rows: Tensor
    table: ElementTable


def plan_rows(
    *,
    input_ids: Tensor,
    position_ids: Tensor,
    doc_ids: Tensor,
    charged: Tensor,
    num_layers: int,
    chunk_size: int,
    is_packed: bool,
    draftable: Tensor | None = None,
) -> UnrolledPlan | None:
    """Reduce a micro-batch to the rows that a supervised element depends on. All tensors on the CPU.

    Args:
        input_ids: int64 [R, S].
        position_ids: int64 [R, S], restart at 0 in every document.
        doc_ids: int64 [R, S], -1 on padding.
        charged: bool [K, R, S] of `charged_depths`.
        num_layers: of the draft.
        chunk_size: elements per chunk of the loss.
        is_packed: form of the attention layout.
        draftable: bool [K, R, S], what an engine could propose and accept; None = what is supervised.

    Returns:
        None when nothing is supervised.
    """
    if not bool(charged.any()):
        return None
    depths = charged.shape[0]
    # Slot t is computed at depth k when it is supervised at k or at a deeper depth, which builds on it.
    needed = charged.flip(0).cumsum(0).flip(0) > 0
    trunk = TrunkRows.build(doc_ids, needed[0])
    active = needed[0].flatten().nonzero().squeeze(1)
    chain_length = needed.flatten(1)[:, active].sum(0)
    order = chain_length.argsort(descending=True, stable=True)
    slots = active[order]
    num_active = [int((chain_length > k).sum()) for k in range(depths)]
    num_active = num_active[: sum(n > 0 for n in num_active)]
    active_rows = trunk.row_of[active]
    layout = TrunkLayout.build(active_rows, trunk.first[active_rows], is_packed=is_packed).select(order)
    trunk_rows = torch.arange(trunk.source.numel())

    # Elements: depth k of the first n_k slots, where supervised.
    row, depth, slot = [], [], []
    begin = 0
    for k, count in enumerate(num_active):
        chosen = charged[k].flatten()[slots[:count]].nonzero().squeeze(1)
        row.append(begin + chosen)
        slot.append(chosen)
        depth.append(torch.full_like(chosen, k))
        begin += count
    row, depth, slot = torch.cat(row), torch.cat(depth), torch.cat(slot)
    teacher = slots[slot] + 1 + depth
    by_teacher = teacher.argsort(stable=True)
    row, depth, slot, teacher = row[by_teacher], depth[by_teacher], slot[by_teacher], teacher[by_teacher]
    labels = predicted_tokens(input_ids, doc_ids, teacher)
    ids = input_ids.flatten()
    chains = charged.flatten(1)[:, slots].long().cumprod(0).bool().T.contiguous()
    return UnrolledPlan(
        unroll=UnrollPlan(
            trunk_tokens=ids[trunk.source + 1],
            trunk_positions=position_ids.flatten()[trunk.source],
            active_rows=trunk.row_of[slots],
            num_active=tuple(num_active),
            depth_tokens=tuple(ids[slots[:n] + 1 + k] for k, n in enumerate(num_active) if k),
            layout=layout,
            trunk_layout=None if num_layers == 1 else TrunkLayout.build(trunk_rows, trunk.first, is_packed=is_packed),
            element_rows=row,
            labels=labels,
            chunks=LossChunks.build(teacher, chunk_size=chunk_size),
        ),
        feature_rows=trunk.source,
        table=ElementTable(
            slot=slot,
            depth=depth,
            has_label=labels >= 0,
            chains=chains,
            draftable=chains if draftable is None else draftable.flatten(1)[:, slots].T.contiguous(),
            places=slots,
            is_complete=torch.ones(slots.numel(), dtype=torch.bool),
        ),
    )


class _UnrolledRuntime(_DraftRuntimeBase[ConfigT]):
    """A runtime that plans from masks and lengths alone: depth k of a slot builds on its depth k - 1."""

    @property
    @abstractmethod
    def _num_depths(self) -> int:
        """Depths K that are computed."""

    def _charged(self, sampled: Tensor, doc_ids: Tensor) -> Tensor:
        return charged_depths(sampled, doc_ids, depths=self._num_depths, mask_rule=self.cfg.mask_rule)

    def _plan(self, data: BatchedDataDict, *, step: int) -> Tensor:
        """Count supervised elements per depth; nothing is drawn at random."""
        charged = self._charged(*sampled_tokens(data))
        index = data["sample_index"].tolist() if "sample_index" in data else range(charged.shape[1])
        self._planned = dict(zip(index, charged.sum(2).T.tolist(), strict=True))
        return charged.sum((1, 2))

    def _check_planned(self, charged: Tensor, doc_ids: Tensor, sample_index: Tensor) -> None:
        """A row that lost tokens or masks on its way would train on other denominators than were agreed on."""
        in_doc = doc_ids >= 0
        index = sample_index.tolist()
        found = torch.zeros(len(index), charged.shape[0], dtype=torch.int64)
        found.index_add_(0, doc_ids[in_doc], charged[:, in_doc].T.long())
        for number, counts in zip(index, found.tolist(), strict=True):
            if any(counts) and self._planned.get(number) != counts:
                raise RuntimeError(
                    f"sample {number}: the micro-batch supervises {counts} elements per depth, the global batch was "
                    f"planned with {self._planned.get(number)}; the rows were changed after begin_global_batch."
                )

    def _plan_rows(self, mb: Microbatch) -> tuple[UnrolledPlan | None, Metrics]:
        """The plan of a micro-batch on the CPU, None when nothing is supervised; and the metrics of its documents."""
        doc_ids, sampled = mb.doc_ids.cpu(), mb.sampled_mask.cpu()
        charged = self._charged(sampled, doc_ids)
        self._check_planned(charged, doc_ids, mb.sample_index)
        arch = self.spec.architecture
        draftable = None
        if self.cfg.mask_rule != "contiguous":
            draftable = charged_depths(sampled, doc_ids, depths=self._num_depths, mask_rule="contiguous")
        plan = plan_rows(
            input_ids=mb.input_ids.cpu(),
            position_ids=mb.position_ids.cpu(),
            doc_ids=doc_ids,
            charged=charged,
            num_layers=arch.num_hidden_layers,
            chunk_size=self.cfg.loss_chunk_size,
            is_packed=uses_packed_layout(self._device, self._compute_dtype, arch.head_dim),
            draftable=draftable,
        )
        documents = doc_ids[doc_ids >= 0].unique().numel()
        with_chain = doc_ids[charged[0]].unique().numel()
        return plan, self._document_metrics(documents, with_chain)
