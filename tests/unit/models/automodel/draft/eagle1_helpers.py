"""Small EAGLE-1 drafts and a naive trainer of them; documents and steps are those of `helpers`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_rl.models.automodel.draft.adapters.base import Serving
from nemo_rl.models.automodel.draft.architecture import Eagle1Architecture
from nemo_rl.models.automodel.draft.builders import BuiltDraft
from nemo_rl.models.automodel.draft.config import Eagle1DraftConfig
from nemo_rl.models.automodel.draft.eagle1 import Eagle1Runtime
from nemo_rl.models.automodel.draft.models.eagle1 import Eagle1Draft
from tests.unit.models.automodel.draft.helpers import VOCAB, make_spec
from tests.unit.models.automodel.draft.reference import F64, Document, is_charged, rms, rope

K = 4


def make_eagle1_arch(**changes: Any) -> Eagle1Architecture:
    """A tiny architecture whose head geometry is not hidden / heads, with more query than key heads."""
    base = {
        "layer_family": "llama",
        "hidden_size": 12,
        "target_hidden_size": 12,
        "intermediate_size": 20,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCAB,
        "draft_vocab_size": VOCAB,
        "feature_ids": (),
        "rope": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 64,
    }
    return Eagle1Architecture(**base | changes)


def make_eagle1_runtime(arch: Eagle1Architecture, *, k: int = K, seed: int = 0, **settings: Any) -> Eagle1Runtime:
    """Random matrices, norm weights around one (an identity norm would hide a skipped or doubled one)."""
    module = Eagle1Draft(arch)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(1 + 0.3 * noise if p.ndim == 1 else noise * p.shape[-1] ** -0.5)
    spec = make_spec(arch, algo="eagle1", serving=Serving("eagle"), num_speculative_tokens=k)
    cfg = Eagle1DraftConfig(enabled=True, **settings)
    return Eagle1Runtime(
        cfg, spec, BuiltDraft(module, None, None), device=torch.device("cpu"), dtype=torch.float32, seed=0
    )


class NaiveEagle1:
    """The draft as a dict of float64 leaves: one python loop per slot and depth.

    Written from the definition (depth k of slot t: token x[t+1+k], state g[t] or the previous depth's output, RoPE
    position t+k, keys of the slots up to t at depth 0 and of slot t at depths 1..k), not from the implementation.
    """

    def __init__(self, runtime: Eagle1Runtime, head: Tensor) -> None:
        named = runtime.module.named_parameters()
        self.w = {k: v.detach().to(F64).clone().requires_grad_() for k, v in named}
        self.a = runtime.spec.architecture
        self.head = head.detach().to(F64)

    def layer(self, i: int, hidden: Tensor, pos: int, seen: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Append this element's key and value to `seen` and return the layer's output."""
        a, w, p = self.a, self.w, f"layers.{i}."
        eps, theta = a.rms_norm_eps, a.rope["rope_theta"]
        x = rms(hidden, w[p + "input_layernorm.weight"], eps) if i else hidden
        q, k, v = ((w[f"{p}self_attn.{n}_proj.weight"] @ x).view(-1, a.head_dim) for n in "qkv")
        q, k = rope(q, pos, theta), rope(k, pos, theta)
        seen.append((k, v))
        group = a.num_attention_heads // a.num_key_value_heads
        heads = []
        for h in range(a.num_attention_heads):
            keys, values = (torch.stack([pair[n][h // group] for pair in seen]) for n in (0, 1))
            heads.append((keys @ q[h] * a.head_dim**-0.5).softmax(0) @ values)
        hidden = hidden + w[p + "self_attn.o_proj.weight"] @ torch.cat(heads)
        y = rms(hidden, w[p + "post_attention_layernorm.weight"], eps)
        gate, up = w[p + "mlp.gate_proj.weight"] @ y, w[p + "mlp.up_proj.weight"] @ y
        return hidden + w[p + "mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)

    def states(
        self, doc: Document, embedding: Tensor, depths: int, inputs: Tensor | None = None
    ) -> dict[tuple[int, int], Tensor]:
        """Output of every (depth, slot) whose input token exists; `inputs` [T, H] replaces the document's features."""
        n, size = self.a.num_hidden_layers, len(doc.tokens)
        trunk: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(n)]
        own, out = {}, {}
        given = (doc.features if inputs is None else inputs).to(F64)
        for k in range(depths):
            for t in range(size - 1 - k):
                before = given[t] if k == 0 else out[k - 1, t]
                h = self.w["fc.weight"] @ torch.cat([embedding.to(F64)[doc.tokens[t + 1 + k]], before])
                for i in range(n):
                    if k == 0:
                        h = self.layer(i, h, t, trunk[i])
                        own[t, i] = []
                    else:
                        seen = trunk[i][: t + 1] + own[t, i]
                        h = self.layer(i, h, t + k, seen)
                        own[t, i].append(seen[-1])
                out[k, t] = h
        return out

    def run(self, doc: Document, embedding: Tensor, depths: int) -> dict[tuple[int, int], Tensor]:
        """Draft logits of every (depth, slot), for `reference.naive_eagle3`, whose metrics are those of every draft."""
        return {key: self.head @ h for key, h in self.states(doc, embedding, depths).items()}

    def loss(
        self,
        docs: Sequence[Document],
        embedding: Tensor,
        *,
        hidden_weight: float,
        token_weight: float,
        rule: str = "contiguous",
        inputs: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, int]:
        """Loss of a global batch [scalar], sums of its two terms [2], number of supervised slots."""
        sums, count = torch.zeros(2, dtype=F64), 0
        for d, doc in enumerate(docs):
            out = self.states(doc, embedding, 1, None if inputs is None else inputs[d])
            for t in range(len(doc.tokens)):
                if not is_charged(doc, t, 0, rule):
                    continue
                gap = (out[0, t] - doc.features[t + 1].to(F64)).abs()
                distance = torch.where(gap < 1, gap.square() / 2, gap - 0.5).mean()
                log_q = (self.head @ out[0, t]).log_softmax(-1)
                entropy = -(doc.logits[t + 1].to(F64).softmax(-1) * log_q).sum()
                sums, count = sums + torch.stack([distance, entropy]), count + 1
        return (hidden_weight * sums[0] + token_weight * sums[1]) / max(count, 1), sums, count
