"""Chunked distillation of the policy's distribution into the draft's. Pure functions of tensors.

Shape symbols: E supervised elements (a slot at a depth), H width, D draft ids, V target ids, M rows of teacher logits,
c elements of a chunk, u teacher rows of a chunk.

Per element, with p the policy's distribution over V, p~ the same renormalised over the draft's ids, q the draft's:

    l = -sum_D p~ log q          loss, gradient (q - p~) on the logits
    KL = l - entropy(p~)         metric; same gradient

Logits exist for one chunk at a time. The gradients of head and hidden state are formed in the forward pass, while the
chunk's logits are at hand, so the backward pass neither keeps nor recomputes them. A frozen head gets no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "STATS",
    "DistillationOutput",
    "Elements",
    "LossChunks",
    "TeacherRows",
    "draft_id_mask",
    "read_elements",
    "read_teacher",
    "soft_distillation",
]

STATS = ("cross_entropy", "kl", "top1", "hit", "greedy", "overlap", "coverage", "argmax_in_vocab")
"""Columns of `DistillationOutput.stats`."""


class DistillationOutput(NamedTuple):
    """Result of `soft_distillation`.

    Attributes:
        loss: fp32 scalar, sum over elements of weight * l.
        stats: fp32 [E, len(STATS)], detached, not weighted.
    """

    loss: Tensor
    stats: Tensor


@dataclass(frozen=True)
class LossChunks:
    """Elements, ordered by teacher row, cut into chunks; a row that several elements share is read once per chunk.

    Attributes:
        bounds: (first element, stop, first entry of `teacher_rows`, stop) per chunk.
        teacher_rows: int64 [sum of u], row of the teacher logits.
        local_row: int64 [E], index of the element's row among those of its chunk.
    """

    bounds: tuple[tuple[int, int, int, int], ...]
    teacher_rows: Tensor
    local_row: Tensor

    @classmethod
    def build(cls, teacher_row: Tensor, *, chunk_size: int) -> LossChunks:
        """Cut elements into chunks.

        Worked example, chunk size 3, rows `[4, 4, 5, 5, 7]`: chunks `[0, 3)` with rows 4 5 and `[3, 5)` with rows 5 7.

        Args:
            teacher_row: int64 [E], ascending.
            chunk_size: elements per chunk.
        """
        n = teacher_row.numel()
        is_new = torch.ones(n, dtype=torch.bool)
        is_new[1:] = teacher_row[1:] != teacher_row[:-1]
        is_new[::chunk_size] = True
        entry = is_new.cumsum(0) - 1
        starts = list(range(0, n, chunk_size))
        firsts = entry[starts].tolist() if n else []
        stops = [*firsts[1:], int(entry[-1]) + 1] if n else []
        bounds = tuple(
            (begin, min(begin + chunk_size, n), first, stop)
            for begin, first, stop in zip(starts, firsts, stops, strict=True)
        )
        chunk = torch.arange(n) // chunk_size
        local = entry - torch.tensor(firsts, dtype=torch.int64)[chunk] if n else entry
        return cls(bounds, teacher_row[is_new], local)

    def to(self, device: torch.device | str) -> LossChunks:
        """The chunks with their tensors on `device`."""
        return LossChunks(
            self.bounds, self.teacher_rows.to(device, non_blocking=True), self.local_row.to(device, non_blocking=True)
        )


def soft_distillation(
    hidden: Tensor,
    head: Tensor,
    teacher_logits: Tensor,
    *,
    weights: Tensor,
    labels: Tensor,
    chunks: LossChunks,
    vocab_ids: Tensor | None,
    drop_out_of_vocab: bool,
) -> DistillationOutput:
    """Weighted sum of soft cross-entropies, and what the metrics need of each element.

    Args:
        hidden: float [E, H], normed states that the head reads; ordered like `chunks`.
        head: float [D, H]; frozen when it needs no gradient.
        teacher_logits: float [M, V], raw (temperature 1, unfiltered); not differentiated. Rows that no element uses may
            hold anything.
        weights: fp32 [E], factor of each element (depth weight over the global count).
        labels: int64 [E], sampled target id that the element predicts, -1 = none.
        chunks: how to cut; its teacher rows index `teacher_logits`.
        vocab_ids: int64 [D], target id of each draft id; None = draft ids are target ids.
        drop_out_of_vocab: no loss where the policy's most likely token is no draft id.
    """
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or head.requires_grad)
    options = _Options(chunks, vocab_ids, drop_out_of_vocab, needs_grad, needs_grad and head.requires_grad)
    return DistillationOutput(*_SoftDistillation.apply(hidden, head, teacher_logits.detach(), weights, labels, options))


class _Options(NamedTuple):
    chunks: LossChunks
    vocab_ids: Tensor | None
    drop_out_of_vocab: bool
    needs_grad: bool
    needs_head_grad: bool


class _SoftDistillation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, teacher: Tensor, weights: Tensor, labels: Tensor, options: _Options
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        stats = torch.empty(hidden.shape[0], len(STATS), dtype=dtype, device=hidden.device)
        loss = torch.zeros((), dtype=dtype, device=hidden.device)
        grads = None
        if options.needs_grad:
            # Of a frozen head not even the buffer exists: it would be the largest tensor here.
            size = head.shape if options.needs_head_grad else (0,)
            grads = (torch.empty_like(hidden), torch.zeros(size, dtype=dtype, device=head.device))
        is_draft_id = draft_id_mask(options.vocab_ids, teacher)
        for begin, stop, first, last in options.chunks.bounds:
            rows = read_teacher(
                teacher[options.chunks.teacher_rows[first:last]].to(dtype), options.vocab_ids, is_draft_id
            )
            h = hidden[begin:stop]
            logits = torch.matmul(h, head.mT).to(dtype)
            local, weight = options.chunks.local_row[begin:stop], weights[begin:stop].to(dtype)
            probs, _, terms = read_elements(logits, rows, local, labels[begin:stop], options.vocab_ids)
            if options.drop_out_of_vocab:
                weight = weight * terms[:, STATS.index("argmax_in_vocab")]
            loss += (weight * terms[:, 0]).sum()
            stats[begin:stop] = terms
            if grads is not None:
                d_hidden, d_head = grads
                d_logits = probs.sub_(rows.probs[local]).mul_(weight[:, None]).to(hidden.dtype)
                d_hidden[begin:stop] = torch.matmul(d_logits, head)
                if options.needs_head_grad:
                    d_head += torch.matmul(d_logits.mT, h)
        if grads is not None:
            ctx.save_for_backward(*grads)
        ctx.head_dtype = head.dtype
        ctx.needs_head_grad = options.needs_head_grad
        ctx.mark_non_differentiable(stats)
        return loss, stats

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad, _ = grad_outputs
        d_hidden, d_head = ctx.saved_tensors
        head_grad = (d_head * grad).to(ctx.head_dtype) if ctx.needs_head_grad else None
        return d_hidden * grad.to(d_hidden.dtype), head_grad, None, None, None, None


class TeacherRows(NamedTuple):
    """What the losses read of teacher rows.

    Attributes:
        probs: [u, D], p~.
        entropy: [u], of p~.
        coverage: [u], the policy's mass on the draft's ids.
        top: int64 [u], most likely target id.
        is_in_vocab: [u], 1 = that one is a draft id.
    """

    probs: Tensor
    entropy: Tensor
    coverage: Tensor
    top: Tensor
    is_in_vocab: Tensor


class Elements(NamedTuple):
    """What the losses read of a chunk of elements.

    Attributes:
        probs: [c, D], q; a buffer that the caller may overwrite.
        log_total: [c], log of the sum of the exponentiated logits.
        stats: [c, len(STATS)].
    """

    probs: Tensor
    log_total: Tensor
    stats: Tensor


def draft_id_mask(vocab_ids: Tensor | None, teacher: Tensor) -> Tensor | None:
    """Which target ids the draft can propose, bool [V]; None when it can propose all.

    Args:
        vocab_ids: int64 [D], target id of each draft id; None = draft ids are target ids.
        teacher: [M, V], for its width and device.
    """
    if vocab_ids is None:
        return None
    is_draft_id = torch.zeros(teacher.shape[1], dtype=torch.bool, device=teacher.device)
    is_draft_id[vocab_ids] = True
    return is_draft_id


def read_teacher(z: Tensor, vocab_ids: Tensor | None, is_draft_id: Tensor | None) -> TeacherRows:
    """Read teacher rows; columns are picked by id: a mask would reorder a map that is not ascending.

    Args:
        z: [u, V], raw logits in fp32 or wider.
        vocab_ids: int64 [D] or None.
        is_draft_id: of `draft_id_mask`.
    """
    top = z.argmax(-1)
    log_total = z.logsumexp(-1)
    if vocab_ids is None:
        probs = (z - log_total[:, None]).exp_()
        coverage = torch.ones_like(log_total)
    else:
        z = z[:, vocab_ids]
        log_kept = z.logsumexp(-1)
        probs = (z - log_kept[:, None]).exp_()
        coverage = (log_kept - log_total).exp()
    in_vocab = torch.ones_like(coverage) if is_draft_id is None else is_draft_id[top].to(coverage.dtype)
    return TeacherRows(probs, -torch.xlogy(probs, probs).sum(-1), coverage, top, in_vocab)


def read_elements(
    logits: Tensor, rows: TeacherRows, local: Tensor, labels: Tensor, vocab_ids: Tensor | None
) -> Elements:
    """Draft probabilities and stats of a chunk.

    Args:
        logits: [c, D] of the draft, fp32 or wider; overwritten.
        rows: teacher rows of the chunk.
        local: int64 [c], row of each element.
        labels: int64 [c], sampled target id, -1 = none.
        vocab_ids: int64 [D] or None.
    """
    teacher = rows.probs[local]
    choice = logits.argmax(-1)
    log_total = logits.logsumexp(-1)
    cross_entropy = log_total - (teacher * logits).sum(-1)
    probs = logits.sub_(log_total[:, None]).exp_()
    coverage = rows.coverage[local]
    greedy = teacher.gather(-1, choice[:, None]).squeeze(-1) * coverage
    if vocab_ids is not None:
        teacher = teacher.mul_(coverage[:, None])
    overlap = torch.minimum(teacher, probs).sum(-1)
    chosen = choice if vocab_ids is None else vocab_ids[choice]
    terms = (
        cross_entropy,
        cross_entropy - rows.entropy[local],
        (chosen == rows.top[local]).to(logits.dtype),
        (chosen == labels).to(logits.dtype),
        greedy,
        overlap,
        coverage,
        rows.is_in_vocab[local],
    )
    return Elements(probs, log_total, torch.stack(terms, dim=-1))
