"""Chunked losses of drafts that use the policy's head: cross-entropy, L1, confidence. Pure functions of tensors.

Shape symbols: E supervised elements (a predicting slot of a block), H width, r width of a correction, D draft ids, V
target ids, M rows of teacher logits, c elements of a chunk.

Per element, with p the policy's distribution over V, p~ the same renormalised over the draft's ids, q the draft's
(0 outside its ids), b the draft's without its correction:

    CE   = -log q(label), or -sum p~ log q           gradient on the logits  q - onehot(label), or q - p~
    base = -log b(label)                                                     b - onehot(label)
    L1   = sum_V |q - p|                                                     q (s - sum q s),  s = sign(q - p)
    o    = 1 - L1 / 2 = sum_V min(p, q)              the share of sampled proposals that the policy accepts
    BCE  = of the confidence against o, or against p(argmax q)

A label that is no draft id has no cross-entropy: it adds 0 to the loss, and stays in the denominators, which are
agreed on before. In L1 the policy's mass outside the draft's ids is a constant.

Logits and their gradients exist for one chunk at a time: gradients are formed in the forward pass, as in `losses`.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_rl.models.automodel.draft.losses import (
    STATS,
    LossChunks,
    TeacherRows,
    draft_id_mask,
    read_elements,
    read_teacher,
)

__all__ = ["BlockLossOutput", "Correction", "Label", "LossWeights", "block_loss", "confidence_loss"]

Label = Literal["data", "teacher_argmax", "soft"]
"""What the cross-entropy compares with: the sampled token, the policy's most likely one, its distribution p~."""


class LossWeights(NamedTuple):
    """Factor of each element in each term: weights of terms and places, over the global denominators.

    Attributes:
        cross_entropy: fp32 [E].
        l1: fp32 [E]; None = the distance is not part of the loss and not computed.
        base: fp32 [E]; None = the uncorrected logits are not part of the loss and nothing of them is computed.
    """

    cross_entropy: Tensor
    l1: Tensor | None = None
    base: Tensor | None = None

    def select(self, part: slice, dtype: torch.dtype) -> LossWeights:
        """The factors of some elements, in another dtype."""
        l1, base = (None if w is None else w[part].to(dtype) for w in (self.l1, self.base))
        return LossWeights(self.cross_entropy[part].to(dtype), l1, base)


class Correction(NamedTuple):
    """What is added to the logits of each element: `latent @ weight.T`.

    Attributes:
        latent: float [E, r]; a row of zeros leaves the element's logits as they are.
        weight: float [D, r].
    """

    latent: Tensor
    weight: Tensor


class BlockLossOutput(NamedTuple):
    """Result of `block_loss`.

    Attributes:
        loss: fp32 scalar, sum over elements of weight * term over all terms.
        stats: fp32 [E, len(STATS)] as in `losses`, detached, not weighted; `cross_entropy` is that of the label.
        extra: further columns, fp32 [E], detached, not weighted: `l1` with that term; `base_cross_entropy` and
            `base_top1` with that one.
    """

    loss: Tensor
    stats: Tensor
    extra: dict[str, Tensor]


def block_loss(
    hidden: Tensor,
    head: Tensor,
    teacher_logits: Tensor,
    *,
    weights: LossWeights,
    labels: Tensor,
    chunks: LossChunks,
    vocab_ids: Tensor | None,
    label: Label = "data",
    correction: Correction | None = None,
) -> BlockLossOutput:
    """Weighted sum of the terms, and what the metrics need of each element.

    Args:
        hidden: float [E, H], normed states that the head reads; ordered like `chunks`.
        head: float [D, H], the policy's rows of the draft's ids; read in the dtype of `hidden`, not differentiated.
        teacher_logits: float [M, V], raw (temperature 1, unfiltered); not differentiated. Rows that no element uses may
            hold anything.
        weights: of each element in each term.
        labels: int64 [E], sampled target id that the element predicts, -1 = none.
        chunks: how to cut; its teacher rows index `teacher_logits`.
        vocab_ids: int64 [D], target id of each draft id; None = draft ids are target ids.
        label: kind of the cross-entropies; those of the uncorrected logits are of the same kind.
        correction: added to the logits; None = there is none.
    """
    if weights.base is not None and label == "soft":
        raise ValueError("the uncorrected logits have no loss against soft labels")
    latent, weight = (None, None) if correction is None else correction
    differentiated = [x for x in (hidden, latent, weight) if x is not None]
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in differentiated)
    options = _Options(chunks, vocab_ids, label, needs_grad)
    loss, stats, *columns = _BlockLoss.apply(
        hidden, latent, weight, head.detach().to(hidden.dtype), teacher_logits.detach(), weights, labels, options
    )
    return BlockLossOutput(loss, stats, dict(zip(_extra_names(weights), columns, strict=True)))


def confidence_loss(logits: Tensor, target: Tensor, *, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Binary cross-entropy of predicted acceptance.

    Args:
        logits: float [E], of the predicted acceptance.
        target: float [E], the acceptance; not differentiated. Rounding may have put it just outside [0, 1].
        weights: fp32 [E], factor of each element.

    Returns:
        The weighted sum, fp32 scalar, and the terms, fp32 [E], detached and not weighted.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    terms = F.binary_cross_entropy_with_logits(wide, target.detach().to(wide.dtype).clamp(0.0, 1.0), reduction="none")
    return (terms * weights.to(terms.dtype)).sum(), terms.detach()


class _Options(NamedTuple):
    chunks: LossChunks
    vocab_ids: Tensor | None
    label: Label
    needs_grad: bool


def _extra_names(weights: LossWeights) -> tuple[str, ...]:
    l1 = () if weights.l1 is None else ("l1",)
    return l1 if weights.base is None else (*l1, "base_cross_entropy", "base_top1")


class _BlockLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        latent: Tensor | None,
        weight: Tensor | None,
        head: Tensor,
        teacher: Tensor,
        term_weights: LossWeights,
        labels: Tensor,
        options: _Options,
    ) -> tuple[Tensor, ...]:
        dtype, device = torch.promote_types(hidden.dtype, torch.float32), hidden.device
        stats = torch.empty(hidden.shape[0], len(STATS), dtype=dtype, device=device)
        extra = [torch.empty(hidden.shape[0], dtype=dtype, device=device) for _ in _extra_names(term_weights)]
        loss = torch.zeros((), dtype=dtype, device=device)
        grads = _Gradients.zeros(hidden, latent, weight) if options.needs_grad else None
        is_draft_id = draft_id_mask(options.vocab_ids, teacher)
        draft_ids = _draft_id_table(options.vocab_ids, teacher)
        for begin, stop, first, last in options.chunks.bounds:
            part = slice(begin, stop)
            rows = read_teacher(
                teacher[options.chunks.teacher_rows[first:last]].to(dtype), options.vocab_ids, is_draft_id
            )
            h, phi = hidden[part], None if latent is None else latent[part]
            chunk = _Chunk(
                rows=rows,
                local=options.chunks.local_row[part],
                labels=labels[part],
                weights=term_weights.select(part, dtype),
                vocab_ids=options.vocab_ids,
            )
            target = _targets(chunk, options.label, draft_ids)
            base = torch.matmul(h, head.mT).to(dtype)
            d_base = None
            if chunk.weights.base is not None:
                # A copy: the terms overwrite their logits, and the corrected ones start from these.
                value, d_base, columns = _base_terms(base.clone(), chunk, target)
                loss += value
                for column, values in zip(extra[-2:], columns, strict=True):
                    column[part] = values
            logits = base
            if phi is not None and weight is not None:
                logits = base.add_(torch.matmul(phi, weight.mT).to(dtype))
            value, d_logits, terms, l1 = _terms(logits, chunk, target)
            loss += value
            stats[part] = terms
            if l1 is not None:
                extra[0][part] = l1
            if grads is not None:
                grads.add(part, d_logits, d_base, h, phi, head=head, weight=weight)
        if grads is not None:
            ctx.save_for_backward(grads.hidden, grads.latent, grads.weight)
        ctx.weight_dtype = None if weight is None else weight.dtype
        ctx.mark_non_differentiable(stats, *extra)
        return loss, stats, *extra

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad = grad_outputs[0]
        d_hidden, d_latent, d_weight = ctx.saved_tensors
        return (
            d_hidden * grad.to(d_hidden.dtype),
            None if d_latent is None else d_latent * grad.to(d_latent.dtype),
            None if d_weight is None else (d_weight * grad).to(ctx.weight_dtype),
            *[None] * 5,
        )


class _Gradients(NamedTuple):
    """Sums so far: [E, H] and [E, r] in the inputs' dtypes, [D, r] in fp32 or wider."""

    hidden: Tensor
    latent: Tensor | None
    weight: Tensor | None

    @classmethod
    def zeros(cls, hidden: Tensor, latent: Tensor | None, weight: Tensor | None) -> _Gradients:
        if latent is None or weight is None:
            return cls(torch.empty_like(hidden), None, None)
        wide = torch.promote_types(weight.dtype, torch.float32)
        return cls(torch.empty_like(hidden), torch.empty_like(latent), torch.zeros_like(weight, dtype=wide))

    def add(
        self,
        part: slice,
        d_logits: Tensor,
        d_base: Tensor | None,
        hidden: Tensor,
        latent: Tensor | None,
        *,
        head: Tensor,
        weight: Tensor | None,
    ) -> None:
        """Add a chunk, whose gradients on its logits are [c, D] in the accumulation dtype."""
        if self.latent is not None and self.weight is not None and latent is not None and weight is not None:
            narrow = d_logits.to(weight.dtype)
            self.latent[part] = torch.matmul(narrow, weight).to(self.latent.dtype)
            self.weight.add_(torch.matmul(narrow.mT, latent))
        total = d_logits if d_base is None else d_logits.add_(d_base)
        self.hidden[part] = torch.matmul(total.to(hidden.dtype), head)


class _Chunk(NamedTuple):
    rows: TeacherRows
    local: Tensor
    labels: Tensor
    weights: LossWeights
    vocab_ids: Tensor | None


def _draft_id_table(vocab_ids: Tensor | None, teacher: Tensor) -> Tensor | None:
    """Draft id of each target id, -1 = none, int64 [V]; None when both are the same."""
    if vocab_ids is None:
        return None
    table = torch.full((teacher.shape[1],), -1, dtype=torch.int64, device=teacher.device)
    table[vocab_ids] = torch.arange(vocab_ids.numel(), device=teacher.device)
    return table


def _targets(chunk: _Chunk, label: Label, draft_ids: Tensor | None) -> Tensor | None:
    """Draft id of each element's label, -1 = it has none, int64 [c]; None for soft labels."""
    if label == "soft":
        return None
    wanted = chunk.rows.top[chunk.local] if label == "teacher_argmax" else chunk.labels
    return wanted if draft_ids is None else torch.where(wanted >= 0, draft_ids[wanted.clamp(min=0)], -1)


def _at(logits: Tensor, target: Tensor) -> Tensor:
    """The logit of each label: [c, D], [c] -> [c]."""
    return logits.gather(-1, target.clamp(min=0)[:, None]).squeeze(-1)


def _minus_label(weighted_probs: Tensor, weights: Tensor, target: Tensor) -> Tensor:
    """Gradient of a cross-entropy, from `weights * q` [c, D] in place."""
    return weighted_probs.scatter_add_(-1, target.clamp(min=0)[:, None], -weights[:, None])


def _base_terms(logits: Tensor, chunk: _Chunk, target: Tensor | None) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Loss of the uncorrected logits [c, D] (overwritten), the gradient on them, cross-entropy and top1 [c]."""
    assert target is not None, "block_loss refuses soft labels for the uncorrected logits"
    assert chunk.weights.base is not None, "called for elements that have this term"
    choice = logits.argmax(-1)
    chosen = choice if chunk.vocab_ids is None else chunk.vocab_ids[choice]
    log_total = logits.logsumexp(-1)
    terms = torch.where(target >= 0, log_total - _at(logits, target), 0.0)
    weights = chunk.weights.base * (target >= 0)
    d_logits = logits.sub_(log_total[:, None]).exp_().mul_(weights[:, None])
    top1 = (chosen == chunk.rows.top[chunk.local]).to(terms.dtype)
    return (weights * terms).sum(), _minus_label(d_logits, weights, target), (terms, top1)


def _terms(logits: Tensor, chunk: _Chunk, target: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Loss of the logits [c, D] (overwritten), the gradient on them, the stats [c, len(STATS)], L1 [c]."""
    at_label = None if target is None else _at(logits, target)
    probs, log_total, stats = read_elements(logits, chunk.rows, chunk.local, chunk.labels, chunk.vocab_ids)
    weights = chunk.weights.cross_entropy
    if target is not None and at_label is not None:
        stats[:, 0] = torch.where(target >= 0, log_total - at_label, 0.0)
        weights = weights * (target >= 0)
    loss = (weights * stats[:, 0]).sum()
    factor, l1 = weights[:, None], None
    if chunk.weights.l1 is not None:
        coverage = chunk.rows.coverage[chunk.local]
        difference = probs - chunk.rows.probs[chunk.local].mul_(coverage[:, None])
        l1 = difference.abs().sum(-1) + (1.0 - coverage)
        loss = loss + (chunk.weights.l1 * l1).sum()
        sign = difference.sign_()
        mean = (probs * sign).sum(-1, keepdim=True)
        factor = sign.sub_(mean).mul_(chunk.weights.l1[:, None]).add_(factor)
    d_logits = probs.mul_(factor)
    if target is None:
        return loss, d_logits.sub_(chunk.rows.probs[chunk.local].mul_(weights[:, None])), stats, l1
    return loss, _minus_label(d_logits, weights, target), stats, l1
