"""Small P-EAGLE drafts, and a naive float64 one: dense masks, no compaction, no segments, no chunks.

Written from the definition: element (a, k) reads token x[a+1] and feature f[a] at k = 0, mask token and `mask_hidden`
deeper; position a + k; sees (b, 0) with b <= a and (a, 1) .. (a, k); its teacher is p[a+k+1].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from nemo_rl.models.automodel.draft.adapters.base import Serving
from nemo_rl.models.automodel.draft.architecture import PEagleArchitecture
from nemo_rl.models.automodel.draft.builders import BuiltDraft
from nemo_rl.models.automodel.draft.config import PEagleDraftConfig
from nemo_rl.models.automodel.draft.models.peagle import PEagleDraft
from nemo_rl.models.automodel.draft.peagle import PEagleRuntime
from nemo_rl.models.automodel.draft.vocab import VocabMap
from tests.unit.models.automodel.draft import helpers
from tests.unit.models.automodel.draft.reference import F64, Document, is_charged, rms

MASK = helpers.VOCAB - 1

Element = tuple[int, int]
"""(anchor, depth)."""


def make_arch(**changes) -> PEagleArchitecture:
    """A tiny architecture of two layers."""
    base = dataclasses.asdict(helpers.make_arch(num_hidden_layers=2))
    base.pop("norm_output")
    return PEagleArchitecture(**base | {"mask_token_id": MASK, "num_depths": 4} | changes)


def make_runtime(
    arch: PEagleArchitecture, *, ids: Sequence[int] | None = None, seed: int = 0, num_proposed: int = 3, **settings
) -> PEagleRuntime:
    """A runtime with random weights, norm weights around one."""
    module = PEagleDraft(arch)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(1 + 0.3 * noise if p.ndim == 1 else noise * p.shape[-1] ** -0.5)
        module.mask_hidden.copy_(torch.randn(module.mask_hidden.shape, generator=generator))
    cfg = PEagleDraftConfig(enabled=True, **settings)
    spec = helpers.make_spec(
        arch,
        ids=ids,
        algo="peagle",
        serving=Serving("eagle3", {"parallel_drafting": True}),
        num_speculative_tokens=min(num_proposed, arch.num_depths),
    )
    vocab = None if ids is None else VocabMap(tuple(ids), arch.vocab_size)
    built = BuiltDraft(module, vocab, None)
    return PEagleRuntime(cfg, spec, built, device=torch.device("cpu"), dtype=torch.float32, seed=0)


def drawn_elements(runtime: PEagleRuntime, number: int) -> list[Element]:
    """What the runtime drew for a document of the global batch."""
    return [(int(a), k) for k, slots in enumerate(runtime._draws[number]) for a in slots]


class NaivePEagle:
    """The draft as a dict of float64 leaves."""

    def __init__(self, runtime: PEagleRuntime) -> None:
        self.w = {n: p.detach().to(F64).clone().requires_grad_() for n, p in runtime.module.named_parameters()}
        self.a = runtime.spec.architecture

    def fuse(self, f: Tensor) -> Tensor:
        """[n, F] -> [n, H]."""
        a, w = self.a, self.w
        if a.norm_before_fc:
            f = rms(f, w["input_norm.weight"], a.rms_norm_eps)
        if a.fc_norm:
            parts = f.split(a.target_hidden_size, -1)
            f = torch.cat([rms(p, w[f"fc_norm.{i}.weight"], a.rms_norm_eps) for i, p in enumerate(parts)], -1)
        return f @ w["fc.weight"].T

    def inputs(self, doc: Document, elements: Sequence[Element]) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden state [n, H], embedding [n, H] and position [n] of elements."""
        real = self.fuse(doc.features.to(F64))
        placeholder = self.fuse(self.w["mask_hidden"].view(1, -1))[0]
        hidden = torch.stack([placeholder if k else real[a] for a, k in elements])
        tokens = torch.tensor([self.a.mask_token_id if k else doc.tokens[a + 1] for a, k in elements])
        return hidden, self.w["embed_tokens.weight"][tokens], torch.tensor([a + k for a, k in elements])

    def logits(self, hidden: Tensor, embeds: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        """[n, D] of n elements under a dense mask, bool [n, n], True = the row's query sees the column's key."""
        a, w, eps = self.a, self.w, self.a.rms_norm_eps
        d = a.head_dim
        # Angles in fp32, as every engine computes them.
        angles = positions[:, None].float() / (a.rope["rope_theta"] ** (torch.arange(0, d, 2).float() / d))
        cos, sin = angles.to(F64).cos()[:, None], angles.to(F64).sin()[:, None]

        def rotated(x: Tensor) -> Tensor:
            lo, hi = x[..., : d // 2], x[..., d // 2 :]
            return torch.cat([lo * cos - hi * sin, hi * cos + lo * sin], -1)

        group = a.num_attention_heads // a.num_key_value_heads
        for i in range(a.num_hidden_layers):
            p = f"layers.{i}."
            if i == 0:
                normed = rms(hidden, w[p + "hidden_norm.weight"], eps)
                x = torch.cat([rms(embeds, w[p + "input_layernorm.weight"], eps), normed], -1)
                residual = normed if a.norm_before_residual else hidden
            else:
                x, residual = rms(hidden, w[p + "input_layernorm.weight"], eps), hidden
            q, k, v = ((x @ w[f"{p}self_attn.{n}_proj.weight"].T).unflatten(-1, (-1, d)) for n in "qkv")
            if a.layer_family == "qwen3":
                q = rms(q, w[p + "self_attn.q_norm.weight"], eps)
                k = rms(k, w[p + "self_attn.k_norm.weight"], eps)
            q, k = rotated(q), rotated(k)
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            scores = torch.einsum("qhd,khd->hqk", q, k) * d**-0.5
            probs = scores.masked_fill(~visible, float("-inf")).softmax(-1)
            attended = torch.einsum("hqk,khd->qhd", probs, v).flatten(1)
            hidden = residual + attended @ w[p + "self_attn.o_proj.weight"].T
            y = rms(hidden, w[p + "post_attention_layernorm.weight"], eps)
            gate, up = (y @ w[f"{p}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
            hidden = hidden + (gate * gate.sigmoid() * up) @ w[p + "mlp.down_proj.weight"].T
        return rms(hidden, w["norm.weight"], eps) @ w["lm_head.weight"].T

    def run(self, doc: Document, chosen: Sequence[Element]) -> dict[Element, Tensor]:
        """Logits of the chosen elements, all in one forward with every position as context."""
        elements = [(a, 0) for a in range(len(doc.tokens) - 1)]
        elements += [e for e in chosen if e[1]]
        visible = torch.tensor(
            [[(ka == 0 and b <= a) or (b == a and ka <= k) for b, ka in elements] for a, k in elements]
        )
        return dict(zip(elements, self.logits(*self.inputs(doc, elements), visible), strict=True))

    def engine(self, doc: Document, anchor: int, num_proposed: int) -> Tensor:
        """[K, D] as the engine computes them: real slots 0..a, K - 1 placeholders behind them, plain causal."""
        n = anchor + num_proposed
        hidden, embeds, _ = self.inputs(doc, [(p, 0) for p in range(anchor + 1)])
        filler = self.inputs(doc, [(anchor, k) for k in range(1, num_proposed)]) if num_proposed > 1 else None
        if filler is not None:
            hidden, embeds = torch.cat([hidden, filler[0]]), torch.cat([embeds, filler[1]])
        causal = torch.ones(n, n, dtype=torch.bool).tril()
        return self.logits(hidden, embeds, torch.arange(n), causal)[anchor:]

    def loss(
        self, docs: Sequence[Document], chosen: Sequence[Sequence[Element]], *, ids: Sequence[int] | None = None
    ) -> Tensor:
        """KL(policy || draft) over the draft's ids, one pool over documents and depths."""
        columns = torch.tensor(ids) if ids is not None else torch.arange(self.a.vocab_size)
        total = sum(p.sum() * 0.0 for p in self.w.values())
        for doc, elements in zip(docs, chosen, strict=True):
            if not elements:
                continue
            run = self.run(doc, elements)
            for a, k in elements:
                assert is_charged(doc, a, k, "contiguous")
                teacher = doc.logits[a + k + 1].to(F64)[columns].log_softmax(-1)
                total = total + (teacher.exp() * (teacher - run[a, k].log_softmax(-1))).sum()
        return total / max(1, sum(len(e) for e in chosen))
