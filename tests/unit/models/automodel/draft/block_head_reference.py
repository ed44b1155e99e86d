"""Naive DSpark and Domino trainers: float64, one block and one token at a time, on the naive backbone.

Written from the definitions: the j-th prediction of a block at anchor a is read at slot j - 1 + first_slot and
corrected by what is known then, x[a] .. x[a + j - 1].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.unit.models.automodel.draft.block_reference import NaiveBlocks, PairSums, chain
from tests.unit.models.automodel.draft.reference import F64, Document


def markov_bias(w: dict[str, Tensor], kind: str, s: Tensor, previous: int, state: Tensor) -> tuple[Tensor, Tensor]:
    """Bias [D] of one token and the next state [r] (unchanged for the forms without one)."""
    e = w["markov_head.markov_w1.weight"][previous]
    w2 = w["markov_head.markov_w2.weight"]
    if kind == "gated":
        z = w["markov_head.gate_proj.weight"] @ torch.cat([s, e]) + w["markov_head.gate_proj.bias"]
        return w2 @ (z.sigmoid() * e), state
    if kind == "rnn":
        z = w["markov_head.joint_proj.weight"] @ torch.cat([state, e, s]) + w["markov_head.joint_proj.bias"]
        g, c, o = z.split(e.numel())
        return w2 @ o.tanh(), g.sigmoid() * state + (1 - g.sigmoid()) * c.tanh()
    return w2 @ e, state


def gru_step(w: dict[str, Tensor], x: Tensor, h: Tensor) -> Tensor:
    """One step of torch's GRU (gates reset, update, new; no bias)."""
    rx, zx, nx = (w["prefix_gru.weight_ih_l0"] @ x).chunk(3)
    rh, zh, nh = (w["prefix_gru.weight_hh_l0"] @ h).chunk(3)
    r, z = (rx + rh).sigmoid(), (zx + zh).sigmoid()
    return (1 - z) * (nx + r * nh).tanh() + z * h


def domino_correction(w: dict[str, Tensor], s: Tensor, h: Tensor) -> Tensor:
    """Correction [D] of a token whose prefix has the state h."""
    y = w["embed_proj.0.weight"] @ torch.cat([s, h])
    return w["embed_proj.2.weight"] @ (y * y.sigmoid())


class _Elements:
    """What both trainers walk over: every supervised element with its state, teacher and label."""

    def __init__(self, draft: NaiveBlocks, docs, embedding: Tensor, head: Tensor, anchors, decay: float, ids) -> None:
        self.draft, self.docs, self.embedding, self.anchors, self.decay = draft, docs, embedding, anchors, decay
        self.ids = list(range(draft.a.vocab_size)) if ids is None else list(ids)
        self.rows = head.to(F64)[self.ids]

    def blocks(self):
        """(document, anchor, [(j, weight, state, teacher logits, label), ...]) of each block."""
        arch = self.draft.a
        for d, doc in enumerate(self.docs):
            for a in self.anchors[d]:
                states = self.draft.states(doc, a, self.embedding)
                yield (
                    doc,
                    a,
                    [
                        (
                            j,
                            math.exp(-(j - 1) / self.decay),
                            states[j - 1 + arch.first_slot],
                            doc.logits[a + j - 1].to(F64),
                            doc.tokens[a + j],
                        )
                        for j in range(1, chain(doc, a, arch.num_predicted) + 1)
                    ],
                )

    def spread(self, q: Tensor) -> Tensor:
        """q of the draft's ids as a distribution over all ids."""
        full = torch.zeros(self.draft.a.vocab_size, dtype=F64)
        return full.index_put((torch.tensor(self.ids),), q)

    def cross_entropy(self, log_q: Tensor, wanted: int) -> Tensor:
        return -log_q[self.ids.index(wanted)] if wanted in self.ids else log_q.sum() * 0.0


def naive_dspark(
    draft: NaiveBlocks,
    docs: Sequence[Document],
    embedding: Tensor,
    head: Tensor,
    *,
    anchors: Sequence[Sequence[int]],
    cfg: Any,
    decay: float,
    ids: Sequence[int] | None = None,
) -> tuple[Tensor, PairSums]:
    """Loss of a whole global batch and the sums of the metrics that only DSpark has."""
    arch, w = draft.a, draft.w
    elements = _Elements(draft, docs, embedding, head, anchors, decay, ids)
    m = PairSums()
    loss, total = torch.zeros((), dtype=F64), 0.0
    for doc, a, block in elements.blocks():
        state = torch.zeros(arch.markov_rank, dtype=F64)
        product = [1.0, 1.0]
        for j, weight, s, z, label in block:
            previous = doc.tokens[a + j - 1]
            bias, state = markov_bias(w, arch.markov_head_type, s, previous, state)
            log_q = (elements.rows @ s + bias).log_softmax(-1)
            p, q = z.softmax(-1), elements.spread(log_q.exp())
            ce, l1 = elements.cross_entropy(log_q, label), (q - p).abs().sum()
            total += weight
            loss = loss + weight * (cfg.ce_loss_weight * ce + cfg.l1_loss_weight * l1)
            m.add("loss_ce", weight * float(ce.detach()), weight)
            if cfg.l1_loss_weight:
                m.add("loss_l1", weight * float(l1.detach()), weight)
            if not arch.enable_confidence_head:
                continue
            accepted = float(torch.minimum(p, q).sum().detach())
            if cfg.confidence_target == "greedy":
                accepted = float(p[int(q.argmax())])
            read = [s, w["markov_head.markov_w1.weight"][previous]][: 2 if arch.confidence_head_with_markov else 1]
            features = torch.cat([x.detach() if cfg.confidence_detach else x for x in read])
            c = (w["confidence_head.proj.weight"][0] @ features + w["confidence_head.proj.bias"][0]).sigmoid()
            bce = -(accepted * c.log() + (1 - accepted) * (1 - c).log())
            loss = loss + weight * cfg.confidence_loss_weight * bce
            m.add("loss_confidence", weight * float(bce.detach()), weight)
            c = float(c.detach())
            product = [product[0] * c, product[1] * accepted]
            m.add(f"conf_abs_err_{j}", abs(c - accepted))
            m.add(f"conf_bias_{j}", c - accepted)
            m.add(f"conf_brier_{j}", (c - accepted) ** 2)
            m.add(f"conf_prefix_bias_{j}", product[0] - product[1])
            m.add(f"conf_bin_{min(int(c * 10), 9)}", c)
            m.add(f"conf_bin_target_{min(int(c * 10), 9)}", accepted)
    return loss / (total or 1.0), m


def naive_domino(
    draft: NaiveBlocks,
    docs: Sequence[Document],
    embedding: Tensor,
    head: Tensor,
    *,
    anchors: Sequence[Sequence[int]],
    base_share: float,
    decay: float,
    ids: Sequence[int] | None = None,
) -> tuple[Tensor, PairSums]:
    """Loss of a whole global batch and the sums of the metrics that only Domino has."""
    arch, w = draft.a, draft.w
    elements = _Elements(draft, docs, embedding, head, anchors, decay, ids)
    m = PairSums()
    loss, total = torch.zeros((), dtype=F64), 0.0
    for doc, a, block in elements.blocks():
        h = torch.zeros(arch.gru_hidden_dim, dtype=F64)
        product = 1.0
        for j, weight, s, z, label in block:
            h = gru_step(w, embedding[doc.tokens[a + j - 1]].to(F64), h)
            base = elements.rows @ s
            final = base + domino_correction(w, s, h) if j > arch.pure_draft_prefix_len else base
            base_ce, final_ce = (elements.cross_entropy(x.log_softmax(-1), label) for x in (base, final))
            total += weight
            loss = loss + weight * (base_share * base_ce + (1 - base_share) * final_ce)
            top1 = float(elements.ids[int(base.argmax())] == int(z.argmax()))
            product *= top1
            m.add("loss_base", weight * float(base_ce.detach()), weight)
            m.add("loss_final", weight * float(final_ce.detach()), weight)
            m.add(f"base_top1_{j}", top1)
            m.add(f"base_prefix_hit_{j}", product)
            m.add("lambda_base", base_share)
    return loss / (total or 1.0), m
