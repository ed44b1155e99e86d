"""A naive EAGLE-3 trainer: float64, one python loop per slot and depth, no batching, no compaction, no chunks.

Written from the definition (depth k of slot t: token x[t+1+k], hidden fc(f[t]) or the previous depth's output, RoPE
position t+k, keys {K_0[i], i <= t} and K_1[t]..K_k[t], teacher p[t+1+k]), not from the implementation.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

F64 = torch.float64


@dataclass
class Document:
    """One prompt and response: tokens, sampled mask, features [T, A*H], raw policy logits [T, V]."""

    tokens: list[int]
    sampled: list[bool]
    features: Tensor
    logits: Tensor


@dataclass
class NaiveResult:
    """Loss, per-depth charged slots, and metric sums keyed like the product's."""

    loss: Tensor
    charged: list[list[tuple[int, int]]]
    metrics: dict[str, list[float]] = field(default_factory=dict)


def rms(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * w


def rope(x: Tensor, pos: int, theta: float) -> Tensor:
    """x [heads, d], neox pairs; angles in fp32 as every engine computes them."""
    d = x.shape[-1]
    inv = 1.0 / (theta ** (torch.arange(0, d, 2).float() / d))
    angle = (torch.tensor(float(pos)) * inv).to(F64)
    c, s = angle.cos(), angle.sin()
    a, b = x[..., : d // 2], x[..., d // 2 :]
    return torch.cat([a * c - b * s, b * c + a * s], -1)


class NaiveEagle3:
    """The draft as a dict of float64 leaves."""

    def __init__(self, weights: dict[str, Tensor], arch) -> None:
        self.w = {k: v.detach().to(F64).clone().requires_grad_() for k, v in weights.items()}
        self.a = arch

    def fuse(self, f: Tensor) -> Tensor:
        a, w = self.a, self.w
        if a.norm_before_fc:
            f = rms(f, w["input_norm.weight"], a.rms_norm_eps)
        if a.fc_norm:
            parts = f.split(a.target_hidden_size, -1)
            f = torch.cat([rms(p, w[f"fc_norm.{i}.weight"], a.rms_norm_eps) for i, p in enumerate(parts)], -1)
        return w["fc.weight"] @ f

    def layer(self, i: int, hidden: Tensor, embed: Tensor, pos: int, seen: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Append this element's key and value to `seen` and return the layer's output."""
        a, w, p = self.a, self.w, f"layers.{i}."
        eps = a.rms_norm_eps
        if i == 0:
            r = rms(hidden, w[p + "hidden_norm.weight"], eps)
            x = torch.cat([rms(embed, w[p + "input_layernorm.weight"], eps), r])
            residual = r if a.norm_before_residual else hidden
        else:
            x, residual = rms(hidden, w[p + "input_layernorm.weight"], eps), hidden
        q = (w[p + "self_attn.q_proj.weight"] @ x).view(-1, a.head_dim)
        k = (w[p + "self_attn.k_proj.weight"] @ x).view(-1, a.head_dim)
        v = (w[p + "self_attn.v_proj.weight"] @ x).view(-1, a.head_dim)
        if a.layer_family == "qwen3":
            q = rms(q, w[p + "self_attn.q_norm.weight"], eps)
            k = rms(k, w[p + "self_attn.k_norm.weight"], eps)
        theta = a.rope["rope_theta"]
        q, k = rope(q, pos, theta), rope(k, pos, theta)
        seen.append((k, v))
        group = a.num_attention_heads // a.num_key_value_heads
        heads = []
        for h in range(a.num_attention_heads):
            keys = torch.stack([kk[h // group] for kk, _ in seen])
            values = torch.stack([vv[h // group] for _, vv in seen])
            heads.append((keys @ q[h] * a.head_dim**-0.5).softmax(0) @ values)
        hidden = residual + w[p + "self_attn.o_proj.weight"] @ torch.cat(heads)
        y = rms(hidden, w[p + "post_attention_layernorm.weight"], eps)
        gate = w[p + "mlp.gate_proj.weight"] @ y
        up = w[p + "mlp.up_proj.weight"] @ y
        return hidden + w[p + "mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)

    def run(self, doc: Document, embedding: Tensor, depths: int) -> dict[tuple[int, int], Tensor]:
        """Draft logits of every (depth, slot) whose input token exists."""
        a, T = self.a, len(doc.tokens)
        emb = embedding.to(F64)
        n = a.num_hidden_layers
        trunk: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(n)]
        state, own, out = {}, {}, {}
        for k in range(depths):
            for t in range(T - 1 - k):
                e = emb[doc.tokens[t + 1 + k]]
                h = self.fuse(doc.features[t].to(F64)) if k == 0 else state[t]
                for i in range(n):
                    if k == 0:
                        h = self.layer(i, h, e, t, trunk[i])
                        own[t, i] = []
                    else:
                        seen = trunk[i][: t + 1] + own[t, i]
                        h = self.layer(i, h, e, t + k, seen)
                        own[t, i].append(seen[-1])
                normed = rms(h, self.w["norm.weight"], a.rms_norm_eps)
                state[t] = normed if a.norm_output else h
                out[k, t] = self.w["lm_head.weight"] @ normed
        return out


def is_charged(doc: Document, t: int, k: int, rule: str) -> bool:
    T, m = len(doc.tokens), doc.sampled
    if rule == "input":
        return t + 1 + k <= T - 1 and m[t + 1 + k]
    return t + 2 + k <= T - 1 and all(m[t + 1 : t + 3 + k])


def naive_eagle3(
    draft: NaiveEagle3,
    docs: list[Document],
    embedding: Tensor,
    *,
    depths: int,
    decay: float = 0.8,
    rule: str = "contiguous",
    ids: list[int] | None = None,
    drop: bool = False,
    num_proposed: int = 1,
) -> NaiveResult:
    """The loss of a whole global batch and its metric sums."""
    charged = [
        [(d, t) for d, doc in enumerate(docs) for t in range(len(doc.tokens)) if is_charged(doc, t, k, rule)]
        for k in range(depths)
    ]
    runs = [draft.run(doc, embedding, depths) for doc in docs]
    total = sum(decay**k for k in range(depths))
    ids_t = torch.tensor(ids) if ids is not None else torch.arange(docs[0].logits.shape[-1])
    loss = sum(p.sum() * 0.0 for p in draft.w.values())
    m: dict[str, list[float]] = {}

    def add(name: str, num: float, den: float = 1.0) -> None:
        pair = m.setdefault(name, [0.0, 0.0])
        pair[0] += num
        pair[1] += den

    quality: dict[tuple[int, int, int], tuple[float, float, float]] = {}
    choice: dict[tuple[int, int, int], int] = {}
    for k in range(depths):
        for d, t in charged[k]:
            doc = docs[d]
            z = doc.logits[t + 1 + k].to(F64)
            p = z.softmax(-1)
            restricted = z[ids_t].softmax(-1)
            log_q = runs[d][k, t].log_softmax(-1)
            inside = int(z.argmax()) in ids_t.tolist()
            ce = -(restricted * log_q).sum()
            if inside or not drop:
                loss = loss + decay**k / total / len(charged[k]) * ce
            q = log_q.detach().exp()
            best = choice[d, t, k] = int(ids_t[int(q.argmax())])
            top1 = float(best == int(z.argmax()))
            overlap = float(torch.minimum(p[ids_t], q).sum())
            quality[d, t, k] = (top1, float(p[best]), overlap)
            j = k + 1
            add(f"loss_depth_{k}", float(ce) if inside or not drop else 0.0)
            add(f"kl_{j}", float((torch.xlogy(restricted, restricted) - restricted * log_q.detach()).sum()))
            if inside or not drop:
                add(f"top1_{j}", top1)
                if t + 2 + k < len(doc.tokens):
                    add(f"hit_{j}", float(best == doc.tokens[t + 2 + k]))
            add(f"accept_greedy_{j}", float(p[best]))
            add(f"accept_overlap_{j}", overlap)
            add("coverage", float(p[ids_t].sum()))
            add("argmax_in_vocab", float(inside))
    for d, doc in enumerate(docs):
        for t in range(len(doc.tokens)):
            product = [1.0, 1.0, 1.0]
            for k in range(depths):
                if (d, t, k) not in quality:
                    break
                product = [a * b for a, b in zip(product, quality[d, t, k], strict=True)]
                for name, value in zip(("hit", "greedy", "overlap"), product, strict=True):
                    add(f"prefix_{name}_{k + 1}", value)
    for d, doc in enumerate(docs):
        for accepted in engine_steps(doc, d, choice, num_proposed):
            add("replayed_acceptance_length", accepted + 1.0)
            for j in range(1, num_proposed + 1):
                add(f"replayed_acceptance_{j}", float(accepted >= j))
    return NaiveResult(loss, charged, m)


def engine_steps(doc: Document, d: int, choice: dict[tuple[int, int, int], int], num_proposed: int) -> list[int]:
    """Accepted tokens of each step of an engine that emits exactly the document's sampled tokens."""
    steps, last, size = [], 0, len(doc.tokens)
    while last < size:
        # Prompt or tool tokens: the next sampled token comes from a prefill. Before position 1 there is no feature.
        if not doc.sampled[last] or last == 0:
            last += 1
            continue
        if last + 1 == size or not doc.sampled[last + 1]:  # a span ends here, nothing is drafted
            last += 1
            continue
        accepted = 0
        while accepted < num_proposed:
            at = last + 1 + accepted
            is_response = at < size and all(doc.sampled[last : at + 1])
            if not is_response or choice[d, last - 1, accepted] != doc.tokens[at]:
                break
            accepted += 1
        steps.append(accepted)
        last += accepted + 1
    return steps
