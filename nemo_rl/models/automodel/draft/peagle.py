"""P-EAGLE: which chains are trained, their inputs, loss and metrics.

Every supervised slot is trained at depth 0; deeper depths train fewer and fewer of them, drawn per document
(conditional drop, see `sampling.draw_cod`). Chains stay inside their document, because supervision does.

Shape symbols: B samples, R rows, S row length, K depths, N trunk rows, n_k slots of a segment at depth k, E elements, V
target ids. A slot is a position t of a row; at depth k it predicts token t+2+k.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from nemo_rl.models.automodel.draft.acceptance import ElementTable, Metrics, element_metrics, replay_metrics
from nemo_rl.models.automodel.draft.adapters.base import DraftAdapter
from nemo_rl.models.automodel.draft.adapters.peagle import PEagleAdapter
from nemo_rl.models.automodel.draft.architecture import PEagleArchitecture
from nemo_rl.models.automodel.draft.attention import TrunkLayout, uses_packed_layout
from nemo_rl.models.automodel.draft.capture import full_tensor
from nemo_rl.models.automodel.draft.config import PEagleDraftConfig
from nemo_rl.models.automodel.draft.losses import STATS, LossChunks
from nemo_rl.models.automodel.draft.models.layers import DraftModule
from nemo_rl.models.automodel.draft.models.peagle import PEagleDraft, PEagleInputs, PEaglePlan, PEagleSegment
from nemo_rl.models.automodel.draft.publish import PublishContract
from nemo_rl.models.automodel.draft.runtime import DraftLoss, _DraftRuntimeBase, charged_depths, sampled_tokens
from nemo_rl.models.automodel.draft.sampling import document_generator, draw_cod
from nemo_rl.models.automodel.draft.trunk import TrunkRows, predicted_tokens

if TYPE_CHECKING:
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl.models.automodel.data import Microbatch

__all__ = ["PEagleRows", "PEagleRuntime", "plan_chains"]


@dataclass(frozen=True)
class PEagleRows:
    """What one micro-batch computes.

    Attributes:
        plan: the module's part.
        feature_rows: int64 [N], entry of the flattened [R * S] rows that each trunk row reads its features from.
        table: where each element stands.
    """

    plan: PEaglePlan
    feature_rows: Tensor
    table: ElementTable


def plan_chains(
    *,
    input_ids: Tensor,
    position_ids: Tensor,
    doc_ids: Tensor,
    charged: Tensor,
    chosen: Tensor,
    num_layers: int,
    num_segments: int,
    chunk_size: int,
    is_packed: bool,
) -> PEagleRows | None:
    """Reduce a micro-batch to the chosen chains and the trunk rows that they see. All tensors on the CPU.

    Args:
        input_ids: int64 [R, S].
        position_ids: int64 [R, S], restart at 0 in every document.
        doc_ids: int64 [R, S], -1 on padding.
        charged: bool [K, R, S] of `charged_depths`: what an engine could propose and accept.
        chosen: bool [K, R, S], the elements that are trained; depth k is a subset of depth k - 1.
        num_layers: of the draft.
        num_segments: parts to compute one after the other, cut so that each has about the same number of rows.
        chunk_size: elements per chunk of the loss.
        is_packed: form of the attention layout.

    Returns:
        None when nothing is trained.
    """
    if not bool(chosen.any()):
        return None
    trunk = TrunkRows.build(doc_ids, chosen[0])
    flat = chosen.flatten(1)
    chain_length = flat[:, trunk.source].sum(0)
    segments, slots = [], []
    begins = _segment_begins(chain_length, num_segments)
    for begin, stop in zip(begins, [*begins[1:], trunk.source.numel()], strict=True):
        # Keys of the first row's document may lie in earlier segments.
        first_visible = max(i for i, b in enumerate(begins) if b <= int(trunk.first[begin]))
        segments.append(
            _plan_segment(
                trunk,
                chain_length,
                rows=(begin, stop),
                visible=(first_visible, begins[first_visible]),
                num_layers=num_layers,
                is_packed=is_packed,
            )
        )
        slots.append(trunk.source[begin + segments[-1].active_rows])

    # Elements as the module's outputs are ordered: by segment, depth, slot.
    depth = torch.cat([torch.full((n,), k) for s in segments for k, n in enumerate(s.num_active)])
    offsets = torch.tensor([0, *(len(part) for part in slots)]).cumsum(0)[:-1].tolist()
    slot = torch.cat([o + torch.arange(n) for o, s in zip(offsets, segments, strict=True) for n in s.num_active])
    places = torch.cat(slots)
    teacher = places[slot] + 1 + depth
    row = teacher.argsort(stable=True)
    depth, slot, teacher = depth[row], slot[row], teacher[row]
    labels = predicted_tokens(input_ids, doc_ids, teacher)
    dropped = (charged & ~chosen).any(0)
    incomplete = doc_ids[dropped].unique()
    return PEagleRows(
        plan=PEaglePlan(
            tokens=input_ids.flatten()[trunk.source + 1],
            positions=position_ids.flatten()[trunk.source],
            segments=tuple(segments),
            element_rows=row,
            labels=labels,
            chunks=LossChunks.build(teacher, chunk_size=chunk_size),
        ),
        feature_rows=trunk.source,
        table=ElementTable(
            slot=slot,
            depth=depth,
            has_label=labels >= 0,
            chains=flat[:, places].T.contiguous(),
            draftable=charged.flatten(1)[:, places].T.contiguous(),
            places=places,
            is_complete=~torch.isin(doc_ids.flatten()[places], incomplete),
        ),
    )


def _segment_begins(chain_length: Tensor, num_segments: int) -> list[int]:
    """First trunk row of each segment. A row weighs what is computed for it: itself and its placeholders.

    Worked example, three segments, chains of 0 0 2 1 3 1: rows weigh 1 1 2 1 3 1, so segments begin at 0, 3 and 5.

    Args:
        chain_length: int64 [N], depths that start from each row, 0 = none.
        num_segments: at most so many.
    """
    work = chain_length.clamp(min=1)
    before = work.cumsum(0) - work
    segment = before * num_segments // int(work.sum())
    starts = torch.ones(segment.numel(), dtype=torch.bool)
    starts[1:] = segment[1:] != segment[:-1]
    return starts.nonzero().squeeze(1).tolist()


def _plan_segment(
    trunk: TrunkRows,
    chain_length: Tensor,
    *,
    rows: tuple[int, int],
    visible: tuple[int, int],
    num_layers: int,
    is_packed: bool,
) -> PEagleSegment:
    """One segment.

    Args:
        trunk: all rows.
        chain_length: int64 [N].
        rows: first trunk row and the one behind the last.
        visible: index of the first segment whose keys are read, and its first row.
        num_layers: of the draft.
        is_packed: form of the attention layout.
    """
    begin, stop = rows
    length = chain_length[begin:stop]
    active = length.nonzero().squeeze(1)
    order = length[active].argsort(descending=True, stable=True)
    inside, first = torch.arange(begin, stop) - visible[1], trunk.first[begin:stop] - visible[1]
    longest = int(length.max())
    return PEagleSegment(
        begin=begin,
        stop=stop,
        first_visible=visible[0],
        active_rows=active[order],
        num_active=tuple(int((length > k).sum()) for k in range(longest)),
        layout=TrunkLayout.build(inside[active], first[active], is_packed=is_packed).select(order) if longest else None,
        trunk_layout=None if num_layers == 1 else TrunkLayout.build(inside, first, is_packed=is_packed),
    )


class PEagleRuntime(_DraftRuntimeBase[PEagleDraftConfig]):
    """Parallel training of all depths on the policy's own forward."""

    adapter: ClassVar[DraftAdapter[Any, Any]] = PEagleAdapter()
    module_class: ClassVar[Callable[[Any], DraftModule]] = PEagleDraft
    contract: ClassVar[PublishContract] = PublishContract(trains_lm_head=True, trains_embeddings=True)

    @property
    def _num_depths(self) -> int:
        arch = self.spec.architecture
        assert isinstance(arch, PEagleArchitecture), "the adapter makes no other"
        return arch.num_depths

    def _charged(self, sampled: Tensor, doc_ids: Tensor) -> Tensor:
        return charged_depths(sampled, doc_ids, depths=self._num_depths, mask_rule="contiguous")

    # -- plan --------------------------------------------------------------------------------------------------------

    def _plan(self, data: BatchedDataDict, *, step: int) -> Tensor:
        """Draw the chains of each document; return how many elements they have."""
        charged = self._charged(*sampled_tokens(data))
        self._draws: dict[int, list[Tensor]] = {}
        for number, document in zip(data["sample_index"].tolist(), charged.unbind(1), strict=True):
            self._draws[number] = draw_cod(
                document,
                ratio=self.cfg.down_sample_ratio,
                ratio_min=self.cfg.down_sample_ratio_min,
                generator=document_generator(seed=self._seed, step=step, sample=number, purpose="cod"),
            )
        return torch.tensor([sum(slots.numel() for draw in self._draws.values() for slots in draw)])

    def _set_denominators(self, counts: Tensor) -> None:
        # Without an element anywhere nothing is divided by it.
        self._denominator = counts[0].clamp(min=1).float()

    def _chosen(self, charged: Tensor, doc_ids: Tensor, sample_index: Tensor) -> Tensor:
        """The chains drawn for the global batch, in the rows of a micro-batch.

        Args:
            charged: bool [K, R, S].
            doc_ids: int64 [R, S].
            sample_index: int64 [B].

        Returns:
            bool [K, R, S].
        """
        docs, flat = doc_ids.flatten(), charged.flatten(1)
        chosen = torch.zeros_like(flat)
        for document, number in enumerate(sample_index.tolist()):
            places = (docs == document).nonzero().squeeze(1)
            found = int(flat[0, places].sum())
            if not found:
                continue
            draw = self._draws.get(number, [])
            planned = draw[0].numel() if draw else 0
            is_same = found == planned and int(draw[0][-1]) < places.numel()
            for k, slots in enumerate(draw if is_same else []):
                is_same = is_same and bool(flat[k, places[slots]].all())
                chosen[k, places[slots]] = True
            if not is_same:
                raise RuntimeError(
                    f"sample {number}: the micro-batch supervises {found} slots, the global batch was planned with "
                    f"{planned}, or with others; the rows were changed after begin_global_batch."
                )
        return chosen.view_as(charged)

    # -- loss --------------------------------------------------------------------------------------------------------

    def loss(self, mb: Microbatch, policy_logits: Tensor) -> DraftLoss:
        """Draft loss of a micro-batch; see `_DraftRuntimeBase.loss`."""
        states = self._capture.take(mb.input_ids.shape)
        doc_ids = mb.doc_ids.cpu()
        charged = self._charged(mb.sampled_mask.cpu(), doc_ids)
        arch = self.spec.architecture
        rows = plan_chains(
            input_ids=mb.input_ids.cpu(),
            position_ids=mb.position_ids.cpu(),
            doc_ids=doc_ids,
            charged=charged,
            chosen=self._chosen(charged, doc_ids, mb.sample_index),
            num_layers=arch.num_hidden_layers,
            num_segments=self.cfg.num_segments,
            chunk_size=self.cfg.loss_chunk_size,
            is_packed=uses_packed_layout(self._device, self._compute_dtype, arch.head_dim),
        )
        documents = doc_ids[doc_ids >= 0].unique().numel()
        metrics = self._document_metrics(documents, doc_ids[charged[0]].unique().numel())
        if rows is None:
            return DraftLoss(self.zero_loss(), metrics)
        source, count = rows.feature_rows.to(self._device), rows.table.depth.numel()
        inputs = PEagleInputs(
            plan=rows.plan.to(self._device),
            features=torch.cat([s.flatten(0, 1).index_select(0, source) for s in states], dim=-1),
            # Columns that pad the vocabulary are no tokens.
            teacher_logits=full_tensor(policy_logits).flatten(0, 1)[:, : arch.vocab_size],
            weights=(1.0 / self._denominator).expand(count),
            vocab_ids=self._vocab_ids,
        )
        loss, stats = self.module(inputs)
        return DraftLoss(loss, metrics | self._metrics(rows.table, loss.detach(), stats))

    # -- metrics -----------------------------------------------------------------------------------------------------

    def _metrics(self, table: ElementTable, loss: Tensor, stats: Tensor) -> Metrics:
        """Fold the elements' stats into pairs; see `metrics` for the names.

        Args:
            table: of the micro-batch.
            loss: scalar.
            stats: fp32 [E, len(STATS)].
        """
        table = table.to(self._device)
        columns = {name: stats[:, i] for i, name in enumerate(STATS)}
        return {
            "loss": (loss, stats.shape[0] / self._denominator),
            **element_metrics(table, columns),
            **replay_metrics(table, columns["hit"], k=self.spec.num_speculative_tokens),
        }
