"""EAGLE-3: the plan of an unrolled draft, its inputs, its loss and metrics.

Shape symbols: B samples, R rows, S row length, K depths, N trunk rows, n_k active slots at depth k, E supervised
elements, V target ids. A slot is a position t of a row; at depth k it reads token t+1+k and predicts token t+2+k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from nemo_rl.models.automodel.draft.attention import TrunkLayout, uses_packed_layout
from nemo_rl.models.automodel.draft.builders import build_draft, policy_weights
from nemo_rl.models.automodel.draft.capture import full_tensor
from nemo_rl.models.automodel.draft.config import Eagle3DraftConfig
from nemo_rl.models.automodel.draft.losses import STATS, LossChunks
from nemo_rl.models.automodel.draft.metrics import replay_drafting
from nemo_rl.models.automodel.draft.models.llama_eagle import LlamaEagleDraft, UnrollInputs, UnrollPlan
from nemo_rl.models.automodel.draft.publish import PublishContract
from nemo_rl.models.automodel.draft.runtime import DraftLoss, Metrics, _DraftRuntimeBase, charged_depths
from nemo_rl.models.automodel.draft.spec import DraftSpec

if TYPE_CHECKING:
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl.models.automodel.data import Microbatch

__all__ = ["Eagle3Plan", "Eagle3Runtime", "plan_rows"]


@dataclass(frozen=True)
class Eagle3Plan:
    """What one micro-batch computes.

    Attributes:
        unroll: the module's part.
        feature_rows: int64 [N], entry of the flattened [R * S] rows that each trunk row reads its features from.
        depth: int64 [E], depth of each element.
        slot: int64 [E], slot of each element among the n_0 active ones.
        slots: int64 [n_0], entry of the flattened [R * S] rows of each active slot.
        chains: bool [n_0, K], True = every depth up to this one is supervised at the slot.
        draftable: bool [n_0, K], True = the engine could propose this token and have it accepted.
        counts: supervised elements per depth.
        label_counts: of those, elements whose predicted token exists.
        chain_counts: slots per depth whose chain is supervised that far.
    """

    unroll: UnrollPlan
    feature_rows: Tensor
    depth: Tensor
    slot: Tensor
    slots: Tensor
    chains: Tensor
    draftable: Tensor
    counts: tuple[int, ...]
    label_counts: tuple[int, ...]
    chain_counts: tuple[int, ...]


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
) -> Eagle3Plan | None:
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
    depths, rows, width = charged.shape
    # Slot t is computed at depth k when it is supervised at k or at a deeper depth, which builds on it.
    needed = charged.flip(0).cumsum(0).flip(0) > 0
    columns = torch.arange(width)
    # The nearest slot at or after t that is needed; t is in the trunk when that slot is in its document.
    last = torch.where(needed[0], columns, width).flip(1).cummin(1).values.flip(1)
    after = torch.gather(torch.cat([doc_ids, torch.full((rows, 1), -1)], dim=1), 1, last)
    in_trunk = (doc_ids >= 0) & (after == doc_ids)
    ids, docs = input_ids.flatten(), doc_ids.flatten()
    source = in_trunk.flatten().nonzero().squeeze(1)
    row_of = torch.full((rows * width,), -1)
    row_of[source] = torch.arange(source.numel())
    is_first = torch.ones(source.numel(), dtype=torch.bool)
    is_first[1:] = (docs[source[1:]] != docs[source[:-1]]) | (source[1:] // width != source[:-1] // width)
    first_row = is_first.nonzero().squeeze(1)[is_first.cumsum(0) - 1]
    if int(is_first.sum()) != docs[source].unique().numel():
        raise ValueError("doc_ids: a document must be one run of one row")

    active = needed[0].flatten().nonzero().squeeze(1)
    chain_length = needed.flatten(1)[:, active].sum(0)
    order = chain_length.argsort(descending=True, stable=True)
    slots = active[order]
    num_active = [int((chain_length > k).sum()) for k in range(depths)]
    num_active = num_active[: sum(n > 0 for n in num_active)]
    active_rows = row_of[active]
    layout = TrunkLayout.build(active_rows, first_row[active_rows], is_packed=is_packed).select(order)
    trunk_rows = torch.arange(source.numel())

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
    padded_ids, padded_docs = torch.cat([ids, ids.new_zeros(1)]), torch.cat([docs, docs.new_full((1,), -2)])
    predicted = teacher + 1
    # The row's end is no neighbour of the next row's first token, whose document differs anyway.
    labels = torch.where(padded_docs[predicted] == docs[teacher], padded_ids[predicted], -1)
    chains = charged.flatten(1)[:, slots].long().cumprod(0).bool().T.contiguous()
    return Eagle3Plan(
        unroll=UnrollPlan(
            trunk_tokens=ids[source + 1],
            trunk_positions=position_ids.flatten()[source],
            active_rows=row_of[slots],
            num_active=tuple(num_active),
            depth_tokens=tuple(ids[slots[:n] + 1 + k] for k, n in enumerate(num_active) if k),
            layout=layout,
            trunk_layout=None
            if num_layers == 1
            else TrunkLayout.build(trunk_rows, first_row[trunk_rows], is_packed=is_packed),
            element_rows=row,
            labels=labels,
            chunks=LossChunks.build(teacher, chunk_size=chunk_size),
        ),
        feature_rows=source,
        depth=depth,
        slot=slot,
        slots=slots,
        chains=chains,
        draftable=chains if draftable is None else draftable.flatten(1)[:, slots].T.contiguous(),
        counts=tuple(torch.bincount(depth, minlength=depths).tolist()),
        label_counts=tuple(torch.bincount(depth[labels >= 0], minlength=depths).tolist()),
        chain_counts=tuple(chains.sum(0).tolist()),
    )


class Eagle3Runtime(_DraftRuntimeBase[Eagle3DraftConfig]):
    """Test-time training of an EAGLE-3 draft on the policy's own forward."""

    contract: ClassVar[PublishContract] = PublishContract(trains_lm_head=True, trains_embeddings=False)

    @classmethod
    def build(
        cls,
        cfg: Eagle3DraftConfig,
        spec: DraftSpec,
        *,
        policy_model: nn.Module,
        device: torch.device | str,
        dtype: torch.dtype | str,
        draft_dir: str | None,
        seed: int,
    ) -> Eagle3Runtime:
        """Build the draft beside a policy; see `registry.build_draft_runtime`."""
        built = build_draft(
            spec,
            module_class=LlamaEagleDraft,
            weights=policy_weights(policy_model),
            draft_dir=draft_dir,
            trust_pickle=cfg.trust_pickle,
            seed=seed,
        )
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        return cls(cfg, spec, built, device=torch.device(device), dtype=dtype, seed=seed)

    # -- plan --------------------------------------------------------------------------------------------------------

    def _charged(self, sampled: Tensor, doc_ids: Tensor) -> Tensor:
        return charged_depths(sampled, doc_ids, depths=self.cfg.ttt_steps, mask_rule=self.cfg.mask_rule)

    def _draftable(self, sampled: Tensor, doc_ids: Tensor) -> Tensor:
        return charged_depths(sampled, doc_ids, depths=self.cfg.ttt_steps, mask_rule="contiguous")

    def _plan(self, data: BatchedDataDict, *, step: int) -> Tensor:
        """Count supervised elements per depth; nothing is drawn at random."""
        mask = data["token_mask"].cpu().bool() & data["sample_mask"].cpu().bool()[:, None]
        lengths = data["input_lengths"].cpu()
        is_token = torch.arange(mask.shape[1])[None] < lengths[:, None]
        doc_ids = torch.where(is_token, torch.arange(mask.shape[0])[:, None], -1)
        charged = self._charged(mask & is_token, doc_ids)
        index = data["sample_index"].tolist() if "sample_index" in data else range(mask.shape[0])
        self._planned = dict(zip(index, charged.sum(2).T.tolist(), strict=True))
        return charged.sum((1, 2))

    def _set_denominators(self, counts: Tensor) -> None:
        depths = self.cfg.ttt_steps
        decay = self.cfg.ttt_decay ** torch.arange(depths, dtype=torch.float64, device=counts.device)
        self._element_weights = (decay / decay.sum() / counts.clamp(min=1)).float()
        self._total = counts.sum().clamp(min=1).float()

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

    # -- loss --------------------------------------------------------------------------------------------------------

    def loss(self, mb: Microbatch, policy_logits: Tensor) -> DraftLoss:
        """Draft loss of a micro-batch; see `_DraftRuntimeBase.loss`."""
        states = self._capture.take(mb.input_ids.shape)
        doc_ids = mb.doc_ids.cpu()
        charged = self._charged(mb.sampled_mask.cpu(), doc_ids)
        self._check_planned(charged, doc_ids, mb.sample_index)
        arch = self.spec.architecture
        is_own_rule = self.cfg.mask_rule == "contiguous"
        plan = plan_rows(
            input_ids=mb.input_ids.cpu(),
            position_ids=mb.position_ids.cpu(),
            doc_ids=doc_ids,
            charged=charged,
            num_layers=arch.num_hidden_layers,
            chunk_size=self.cfg.loss_chunk_size,
            is_packed=uses_packed_layout(self._device, self._compute_dtype, arch.head_dim),
            draftable=None if is_own_rule else self._draftable(mb.sampled_mask.cpu(), doc_ids),
        )
        documents = doc_ids[doc_ids >= 0].unique().numel()
        with_chain = doc_ids[charged[0]].unique().numel()
        if plan is None:
            return DraftLoss(self.zero_loss(), self._document_metrics(documents, with_chain))
        rows = plan.feature_rows.to(self._device)
        inputs = UnrollInputs(
            plan=plan.unroll.to(self._device),
            features=torch.cat([s.flatten(0, 1).index_select(0, rows) for s in states], dim=-1),
            embedding=self._embedding,
            # Columns that pad the vocabulary are no tokens.
            teacher_logits=full_tensor(policy_logits).flatten(0, 1)[:, : arch.vocab_size],
            weights=self._element_weights[plan.depth.to(self._device)],
            vocab_ids=self._vocab_ids,
            drop_out_of_vocab=self.cfg.drop_out_of_vocab,
        )
        loss, stats = self.module(inputs)
        metrics = self._metrics(plan, loss.detach(), stats) | self._document_metrics(documents, with_chain)
        return DraftLoss(loss, metrics)

    def zero_loss(self) -> Tensor:
        """A zero that reaches every parameter, through the module's call."""
        return self.module(None).loss

    # -- metrics -----------------------------------------------------------------------------------------------------

    def _document_metrics(self, documents: int, with_chain: int) -> Metrics:
        pair = torch.tensor([documents - with_chain, documents], dtype=torch.float32, device=self._device)
        return {"documents_without_chain": (pair[0], pair[1])}

    def _metrics(self, plan: Eagle3Plan, loss: Tensor, stats: Tensor) -> Metrics:
        """Fold the elements' stats into pairs; see `metrics` for the names.

        Args:
            plan: of the micro-batch.
            loss: scalar.
            stats: fp32 [E, len(STATS)].
        """
        depths = self.cfg.ttt_steps
        depth, slot, chains = (t.to(self._device) for t in (plan.depth, plan.slot, plan.chains))
        columns = {name: stats[:, i] for i, name in enumerate(STATS)}
        kept = columns["argmax_in_vocab"] if self.cfg.drop_out_of_vocab else torch.ones_like(columns["top1"])
        has_label = plan.unroll.labels.to(self._device) >= 0

        def per_depth(values: Tensor) -> Tensor:
            return stats.new_zeros(depths).index_add_(0, depth, values.to(stats.dtype))

        def prefix(values: Tensor) -> Tensor:
            """Sum over chains of the product over depths 0..k."""
            table = stats.new_zeros(chains.shape).index_put_((slot, depth), values)
            return (table.cumprod(1) * chains).sum(0)

        counts = stats.new_tensor(plan.counts)
        chain_counts = stats.new_tensor(plan.chain_counts)
        out: Metrics = {"loss": (loss, counts.sum() / self._total)}
        families = {
            "loss_depth": (per_depth(columns["cross_entropy"] * kept), counts, 0),
            "kl": (per_depth(columns["kl"]), counts, 1),
            "top1": (per_depth(columns["top1"] * kept), per_depth(kept), 1),
            "hit": (per_depth(columns["hit"] * kept), per_depth(kept * has_label), 1),
            "accept_greedy": (per_depth(columns["greedy"]), counts, 1),
            "accept_overlap": (per_depth(columns["overlap"]), counts, 1),
            "prefix_hit": (prefix(columns["top1"]), chain_counts, 1),
            "prefix_greedy": (prefix(columns["greedy"]), chain_counts, 1),
            "prefix_overlap": (prefix(columns["overlap"]), chain_counts, 1),
        }
        for name, (num, den, offset) in families.items():
            out |= {f"{name}_{k + offset}": (num[k], den[k]) for k in range(depths)}
        hits = stats.new_zeros(chains.shape).index_put_((slot, depth), columns["hit"])
        out |= self._replay(plan, hits)
        total = counts.sum()
        return out | {name: (columns[name].sum(), total) for name in ("coverage", "argmax_in_vocab")}

    def _replay(self, plan: Eagle3Plan, hits: Tensor) -> Metrics:
        """Draft along the recorded responses as the engine did; see `metrics.replay_drafting`.

        Args:
            plan: of the micro-batch.
            hits: fp32 [n_0, K], 1 = the draft's choice at this slot and depth is the sampled token.
        """
        k = self.spec.num_speculative_tokens
        draftable = plan.draftable.to(hits.device)
        accepted = (hits * draftable)[:, :k].cumprod(1).sum(1).long()
        rows = torch.stack([plan.slots.to(hits.device), accepted], dim=1)[draftable[:, 0]].tolist()
        counts = replay_drafting(rows)
        pair = hits.new_tensor
        out: Metrics = {
            "replayed_acceptance_length": (pair(counts.num_drafts + counts.num_accepted), pair(counts.num_drafts))
        }
        for j in range(1, k + 1):
            out[f"replayed_acceptance_{j}"] = (pair(counts.at_least(j)), pair(counts.num_drafts))
        return out
