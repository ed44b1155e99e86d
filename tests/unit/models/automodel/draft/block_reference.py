"""A naive trainer of block drafts: float64, one block and one slot at a time, no batching, no shared context.

Written from the definition, not from the implementation: the block at anchor a holds [x[a], MASK, ...] at positions a,
a + 1, ...; its slots see hidden_norm(fc(f[i])) of every i < a and the slots of their own block; the j-th prediction is
read at slot j (or j - 1 when the anchor's own slot predicts), has label x[a + j] and teacher p[a + j - 1], and counts
when all of x[a] .. x[a + j] were sampled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tests.unit.models.automodel.draft.reference import F64, Document, engine_steps, rms, rope


class NaiveBlocks:
    """The backbone as a dict of float64 leaves."""

    def __init__(self, weights: dict[str, Tensor], arch) -> None:
        self.w = {k: v.detach().to(F64).clone().requires_grad_() for k, v in weights.items()}
        self.a = arch

    def _heads(self, name: str, x: Tensor, norm: str | None, pos: int | None) -> Tensor:
        out = (self.w[f"{name}_proj.weight"] @ x).view(-1, self.a.head_dim)
        if norm is not None:
            out = rms(out, self.w[norm], self.a.rms_norm_eps)
        return out if pos is None else rope(out, pos, self.a.rope["rope_theta"])

    def states(self, doc: Document, anchor: int, embedding: Tensor) -> list[Tensor]:
        """Normed output [H] of every slot of the block at an anchor."""
        a, w, eps = self.a, self.w, self.a.rms_norm_eps
        emb = embedding.to(F64)
        context = [rms(w["fc.weight"] @ doc.features[i].to(F64), w["hidden_norm.weight"], eps) for i in range(anchor)]
        hidden = [emb[doc.tokens[anchor] if k == 0 else a.mask_token_id] for k in range(a.block_size)]
        group = a.num_attention_heads // a.num_key_value_heads
        for i in range(a.num_hidden_layers):
            p, q_norm, k_norm = (
                f"layers.{i}.",
                f"layers.{i}.self_attn.q_norm.weight",
                f"layers.{i}.self_attn.k_norm.weight",
            )
            attn = p + "self_attn."
            normed = [rms(h, w[p + "input_layernorm.weight"], eps) for h in hidden]
            keys = [self._heads(attn + "k", u, k_norm, i) for i, u in enumerate(context)]
            keys += [self._heads(attn + "k", y, k_norm, anchor + k) for k, y in enumerate(normed)]
            values = [self._heads(attn + "v", u, None, None) for u in [*context, *normed]]
            out = []
            for k, y in enumerate(normed):
                q = self._heads(attn + "q", y, q_norm, anchor + k)
                count = anchor + (k + 1 if a.causal else a.block_size)
                heads = []
                for h in range(a.num_attention_heads):
                    ks = torch.stack([x[h // group] for x in keys[:count]])
                    vs = torch.stack([x[h // group] for x in values[:count]])
                    heads.append((ks @ q[h] * a.head_dim**-0.5).softmax(0) @ vs)
                s = hidden[k] + w[attn + "o_proj.weight"] @ torch.cat(heads)
                y = rms(s, w[p + "post_attention_layernorm.weight"], eps)
                gate, up = w[p + "mlp.gate_proj.weight"] @ y, w[p + "mlp.up_proj.weight"] @ y
                out.append(s + w[p + "mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up))
            hidden = out
        return [rms(h, w["norm.weight"], eps) for h in hidden]


def candidates(doc: Document) -> list[int]:
    """Anchors that an engine could draft from."""
    return [a for a in range(1, len(doc.tokens) - 1) if doc.sampled[a] and doc.sampled[a + 1]]


def chain(doc: Document, anchor: int, num_predicted: int) -> int:
    """Supervised predictions of an anchor."""
    j = 0
    while j < num_predicted and anchor + j + 1 < len(doc.tokens) and all(doc.sampled[anchor : anchor + j + 2]):
        j += 1
    return j


class PairSums(dict):
    """Metric name to [numerator, denominator]."""

    def add(self, name: str, num: float, den: float = 1.0) -> None:
        pair = self.setdefault(name, [0.0, 0.0])
        pair[0] += num
        pair[1] += den


def naive_dflash(
    draft: NaiveBlocks,
    docs: Sequence[Document],
    embedding: Tensor,
    head: Tensor,
    *,
    anchors: Sequence[Sequence[int]],
    decay: float,
    label: str = "data",
    ids: Sequence[int] | None = None,
) -> tuple[Tensor, PairSums]:
    """Loss of a whole global batch and its metric sums.

    Args:
        draft: the backbone.
        docs: all documents.
        embedding: [V, H].
        head: [V, H] of the policy.
        anchors: of each document.
        decay: of the weights.
        label: kind of the cross-entropy.
        ids: target id of each draft id.
    """
    arch = draft.a
    num_predicted = arch.block_size - 1
    ids = list(range(arch.vocab_size)) if ids is None else list(ids)
    rows = head.to(F64)[ids]
    metrics = PairSums()
    loss, total = torch.zeros((), dtype=F64), 0.0
    choice = {}
    for d, doc in enumerate(docs):
        for a in anchors[d]:
            states = draft.states(doc, a, embedding)
            products = [1.0, 1.0, 1.0]
            for j in range(1, chain(doc, a, num_predicted) + 1):
                weight = math.exp(-(j - 1) / decay)
                total += weight
                z = doc.logits[a + j - 1].to(F64)
                p, restricted = z.softmax(-1), z[ids].softmax(-1)
                log_q = (rows @ states[j]).log_softmax(-1)
                wanted = doc.tokens[a + j] if label == "data" else int(z.argmax())
                if label == "soft":
                    ce = -(restricted * log_q).sum()
                else:
                    ce = -log_q[ids.index(wanted)] if wanted in ids else log_q.sum() * 0.0
                loss = loss + weight * ce
                q = log_q.detach().exp()
                best = choice[d, a - 1, j - 1] = ids[int(q.argmax())]
                quality = (float(best == int(z.argmax())), float(p[best]), float(torch.minimum(p[ids], q).sum()))
                products = [x * y for x, y in zip(products, quality, strict=True)]
                metrics.add(f"loss_depth_{j - 1}", float(ce.detach()))
                metrics.add(f"kl_{j}", float((torch.xlogy(restricted, restricted) - restricted * log_q.detach()).sum()))
                metrics.add(f"hit_{j}", float(best == doc.tokens[a + j]))
                metrics.add("coverage", float(p[ids].sum()))
                metrics.add("argmax_in_vocab", float(int(z.argmax()) in ids))
                if len(ids) < arch.vocab_size:
                    metrics.add("label_in_vocab", float(doc.tokens[a + j] in ids))
                for name, value, product in zip(("hit", "greedy", "overlap"), quality, products, strict=True):
                    metrics.add(f"top1_{j}" if name == "hit" else f"accept_{name}_{j}", value)
                    metrics.add(f"prefix_{name}_{j}", product)
        metrics.add("anchors_used", len(anchors[d]))
        metrics.add("documents_without_chain", float(not anchors[d]))
        if list(anchors[d]) == candidates(doc):
            for accepted in engine_steps(doc, d, choice, num_predicted):
                metrics.add("replayed_acceptance_length", accepted + 1.0)
                for j in range(1, num_predicted + 1):
                    metrics.add(f"replayed_acceptance_{j}", float(accepted >= j))
    return loss / (total or 1.0), metrics
