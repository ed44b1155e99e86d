"""What the block drafts share at training time: anchors, the plan of a micro-batch, denominators, metrics.

A block starts at an anchor `a`, a token that the engine could draft from: it and the next one were sampled. Element
(a, j) predicts x[a + j]; it is supervised when all of x[a] .. x[a + j] were sampled, so that the engine could have
proposed it and been right so far. Its teacher is the policy's row of x[a + j - 1].

Shape symbols: B samples, T their padded length, R rows, S row length, K predicted tokens of a block, n blocks, E
supervised elements, V target ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from nemo_rl.models.automodel.draft.acceptance import ElementTable, Metrics, element_metrics, replay_metrics
from nemo_rl.models.automodel.draft.architecture import BlockArchitecture
from nemo_rl.models.automodel.draft.block_attention import BlockLayout
from nemo_rl.models.automodel.draft.block_losses import BlockLossOutput
from nemo_rl.models.automodel.draft.capture import full_tensor
from nemo_rl.models.automodel.draft.config import BlockDraftConfigBase
from nemo_rl.models.automodel.draft.losses import STATS, LossChunks
from nemo_rl.models.automodel.draft.models.block import BlockInputs, BlockPlan
from nemo_rl.models.automodel.draft.publish import PublishContract
from nemo_rl.models.automodel.draft.runtime import DraftLoss, _DraftRuntimeBase, charged_depths, sampled_tokens
from nemo_rl.models.automodel.draft.sampling import document_generator, draw_anchors

if TYPE_CHECKING:
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl.models.automodel.data import Microbatch

__all__ = ["BlockRows", "BlockRuntime", "charged_anchors", "loss_decay", "plan_blocks"]

BlockConfigT = TypeVar("BlockConfigT", bound=BlockDraftConfigBase)


def charged_anchors(sampled: Tensor, doc_ids: Tensor, *, num_predicted: int) -> Tensor:
    """Which predictions of which anchors are supervised.

    The j-th prediction of anchor a is that of slot a - 1 at depth j - 1 in `charged_depths`: both say that all of
    x[a] .. x[a + j] were sampled. The first token of a document is no anchor: there is no feature before it.

    Worked example, mask 0 0 1 1 1 1 (x0..x5)::

        j = 1: anchors 2 3 4    j = 2: anchors 2 3    j = 3: anchor 2

    Args:
        sampled: bool [R, S], True = the policy sampled the token and its sample is kept.
        doc_ids: int64 [R, S], document of each token, -1 on padding.
        num_predicted: K.

    Returns:
        bool [K, R, S]; `[0]` are the candidates.
    """
    charged = charged_depths(sampled, doc_ids, depths=num_predicted, mask_rule="contiguous")
    return torch.cat([torch.zeros_like(charged[..., :1]), charged[..., :-1]], dim=-1)


def loss_decay(num_predicted: int, *, block_size: int, decay: float | None) -> Tensor:
    """Weight of the j-th predicted token, exp(-(j - 1) / decay): fp64 [K].

    Args:
        num_predicted: K.
        block_size: of the draft; chooses the usual decay.
        decay: null = 7 from 16 slots on, 5 from 10, else 4.
    """
    if decay is None:
        decay = 7.0 if block_size >= 16 else 5.0 if block_size >= 10 else 4.0
    return torch.exp(-torch.arange(num_predicted, dtype=torch.float64) / decay)


@dataclass(frozen=True)
class BlockRows:
    """What one micro-batch computes.

    Attributes:
        plan: the module's part.
        feature_rows: int64 [N], entry of the flattened [R * S] rows that each context row reads its features from.
        table: where each element stands; a slot of the table is a block.
    """

    plan: BlockPlan
    feature_rows: Tensor
    table: ElementTable


def plan_blocks(
    *,
    input_ids: Tensor,
    position_ids: Tensor,
    doc_ids: Tensor,
    charged: Tensor,
    is_complete: Tensor,
    arch: BlockArchitecture,
    chunk_size: int,
) -> BlockRows | None:
    """Reduce a micro-batch to the blocks of the drawn anchors and the context before them. All tensors on the CPU.

    Args:
        input_ids: int64 [R, S].
        position_ids: int64 [R, S], restart at 0 in every document.
        doc_ids: int64 [R, S], -1 on padding.
        charged: bool [K, R, S] of `charged_anchors`, False at anchors that were not drawn.
        is_complete: bool [B], True = every candidate of the document was drawn.
        arch: the draft.
        chunk_size: elements per chunk of the loss.

    Returns:
        None when nothing is supervised.
    """
    charged = charged.flatten(1)
    anchors = charged[0].nonzero().squeeze(1)
    if not anchors.numel():
        return None
    ids, docs, positions = input_ids.flatten(), doc_ids.flatten(), position_ids.flatten()
    total, size = docs.numel(), arch.block_size

    # The context of a document ends before its last anchor: row i is read when an anchor of its document follows.
    following = torch.full((total + 1,), total)
    following[anchors] = anchors
    following = following.flip(0).cummin(0).values.flip(0)[1:]
    in_context = (docs >= 0) & (torch.cat([docs, docs.new_full((1,), -1)])[following] == docs)
    source = in_context.nonzero().squeeze(1)
    row_of = torch.full((total,), -1)
    row_of[source] = torch.arange(source.numel())
    # A document is one run of one row, and its positions count from 0.
    starts = anchors - positions[anchors]
    first_rows, lengths = row_of[starts], anchors - starts
    is_run = (docs[starts] == docs[anchors]) & (row_of[anchors - 1] - first_rows == lengths - 1)
    if not bool(is_run.all()) or starts.unique().numel() != docs[anchors].unique().numel():
        raise ValueError("doc_ids: a document must be one run of one row, with positions that count from 0")

    depth, block = charged[:, anchors].nonzero().unbind(1)
    teacher = anchors[block] + depth
    by_teacher = teacher.argsort(stable=True)
    depth, block, teacher = depth[by_teacher], block[by_teacher], teacher[by_teacher]
    tokens = torch.full((anchors.numel(), size), arch.mask_token_id)
    tokens[:, 0] = ids[anchors]
    chains = charged[:, anchors].T.contiguous()
    return BlockRows(
        plan=BlockPlan(
            num_predicted=arch.num_predicted,
            context_positions=positions[source],
            slot_tokens=tokens.flatten(),
            slot_positions=(positions[anchors][:, None] + torch.arange(size)).flatten(),
            layout=BlockLayout.build(first_rows, first_rows + lengths, block_size=size),
            element_rows=block * size + arch.first_slot + depth,
            block=block,
            depth=depth,
            previous=ids[teacher],
            labels=ids[teacher + 1],
            chunks=LossChunks.build(teacher, chunk_size=chunk_size),
        ),
        feature_rows=source,
        table=ElementTable(
            slot=block,
            depth=depth,
            has_label=torch.ones_like(block, dtype=torch.bool),
            chains=chains,
            draftable=chains,
            places=anchors,
            is_complete=is_complete[docs[anchors]],
        ),
    )


class _Draw(NamedTuple):
    """The anchors of one document.

    Attributes:
        anchors: int64 [n], positions in the document.
        counts: supervised elements per ordinal.
        is_complete: every candidate was drawn.
    """

    anchors: Tensor
    counts: list[int]
    is_complete: bool


class BlockRuntime(_DraftRuntimeBase[BlockConfigT]):
    """Training of a block draft on the policy's own forward. A subclass names its module and adapter."""

    contract: ClassVar[PublishContract] = PublishContract(trains_lm_head=False, trains_embeddings=False)

    @property
    def _arch(self) -> BlockArchitecture:
        arch = self.spec.architecture
        assert isinstance(arch, BlockArchitecture), "the adapter of a block draft makes no other"
        return arch

    # -- plan --------------------------------------------------------------------------------------------------------

    def _charged(self, sampled: Tensor, doc_ids: Tensor) -> Tensor:
        return charged_anchors(sampled, doc_ids, num_predicted=self._arch.num_predicted)

    def _plan(self, data: BatchedDataDict, *, step: int) -> Tensor:
        """Draw the anchors of each document; return the supervised elements per ordinal."""
        charged = self._charged(*sampled_tokens(data))
        self._draws: dict[int, _Draw] = {}
        total = torch.zeros(charged.shape[0], dtype=torch.int64)
        for number, document in zip(data["sample_index"].tolist(), charged.unbind(1), strict=True):
            candidates = document[0].nonzero().squeeze(1)
            generator = document_generator(seed=self._seed, step=step, sample=number, purpose="anchors")
            anchors = draw_anchors(candidates, self.cfg.num_anchors, generator=generator)
            counts = document[:, anchors].sum(1)
            self._draws[number] = _Draw(anchors, counts.tolist(), anchors.numel() == candidates.numel())
            total += counts
        return total

    def _set_denominators(self, counts: Tensor) -> None:
        arch = self._arch
        decay = loss_decay(arch.num_predicted, block_size=arch.block_size, decay=self.cfg.loss_decay).to(self._device)
        # Without an element anywhere nothing is divided by it.
        self._denominator = float((decay * counts).sum()) or 1.0
        self._decay = decay.float()

    def _drawn(self, charged: Tensor, doc_ids: Tensor, sample_index: Tensor) -> tuple[Tensor, Tensor]:
        """Restrict what is supervised to the anchors drawn for the global batch.

        Args:
            charged: bool [K, R, S] of `charged_anchors`.
            doc_ids: int64 [R, S].
            sample_index: int64 [B].

        Returns:
            bool [K, R, S], and bool [B]: every candidate of the document was drawn.
        """
        docs, flat = doc_ids.flatten(), charged.flatten(1)
        kept = torch.zeros_like(flat[0])
        is_complete = torch.zeros(sample_index.numel(), dtype=torch.bool)
        for document, number in enumerate(sample_index.tolist()):
            places = (docs == document).nonzero().squeeze(1)
            inside = flat[:, places]
            if not bool(inside[0].any()):
                continue
            draw = self._draws.get(number)
            chosen = None if draw is None else draw.anchors[draw.anchors < places.numel()]
            counts = None if chosen is None else inside[:, chosen].sum(1).tolist()
            if draw is None or chosen is None or counts != draw.counts:
                raise RuntimeError(
                    f"sample {number}: the micro-batch supervises {counts} elements per predicted token, the global "
                    f"batch was planned with {None if draw is None else draw.counts}; the rows were changed after "
                    "begin_global_batch."
                )
            kept[places[chosen]] = True
            is_complete[document] = draw.is_complete
        return charged & kept.view_as(charged[0]), is_complete

    # -- loss --------------------------------------------------------------------------------------------------------

    def loss(self, mb: Microbatch, policy_logits: Tensor) -> DraftLoss:
        """Draft loss of a micro-batch; see `_DraftRuntimeBase.loss`."""
        states = self._capture.take(mb.input_ids.shape)
        doc_ids = mb.doc_ids.cpu()
        charged, is_complete = self._drawn(self._charged(mb.sampled_mask.cpu(), doc_ids), doc_ids, mb.sample_index)
        rows = plan_blocks(
            input_ids=mb.input_ids.cpu(),
            position_ids=mb.position_ids.cpu(),
            doc_ids=doc_ids,
            charged=charged,
            is_complete=is_complete,
            arch=self._arch,
            chunk_size=self.cfg.loss_chunk_size,
        )
        documents = doc_ids[doc_ids >= 0].unique().numel()
        metrics = self._document_metrics(documents, doc_ids[charged[0]].unique().numel())
        num_blocks = torch.tensor(float(charged[0].sum()), device=self._device)
        metrics["anchors_used"] = (num_blocks, torch.tensor(float(documents), device=self._device))
        if rows is None:
            return DraftLoss(self.zero_loss(), metrics)
        source, plan, table = rows.feature_rows.to(self._device), rows.plan.to(self._device), rows.table
        table = table.to(self._device)
        weights = self._decay[plan.depth]
        inputs = BlockInputs(
            plan=plan,
            features=torch.cat([s.flatten(0, 1).index_select(0, source) for s in states], dim=-1),
            embedding=self._embedding,
            head=self._head,
            # Columns that pad the vocabulary are no tokens.
            teacher_logits=full_tensor(policy_logits).flatten(0, 1)[:, : self._arch.vocab_size],
            weights=weights / self._denominator,
            vocab_ids=self._vocab_ids,
        )
        output: BlockLossOutput = self.module(self._inputs(inputs))
        columns = {name: output.stats[:, i] for i, name in enumerate(STATS)}
        metrics["loss"] = (output.loss.detach(), weights.sum() / self._denominator)
        metrics |= element_metrics(table, columns)
        metrics |= replay_metrics(table, columns["hit"], k=self.spec.num_speculative_tokens)
        if self._vocab_ids is not None:
            in_vocab = torch.isin(plan.labels, self._vocab_ids)
            metrics["label_in_vocab"] = (in_vocab.sum().float(), torch.ones_like(in_vocab).sum().float())
        return DraftLoss(output.loss, metrics | self._extra_metrics(plan, table, weights, output))

    def _inputs(self, common: BlockInputs) -> BlockInputs:
        """Add what the algorithm's loss reads.

        Args:
            common: fields of every block draft.
        """
        return common

    def _extra_metrics(self, plan: BlockPlan, table: ElementTable, weights: Tensor, output: BlockLossOutput) -> Metrics:
        """Pairs beyond those of every draft.

        Args:
            plan: of the micro-batch.
            table: where its elements stand.
            weights: fp32 [E], weight of each element, not divided.
            output: of the module.
        """
        return {}
