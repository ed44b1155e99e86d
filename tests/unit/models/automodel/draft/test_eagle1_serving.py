"""Serve parity of EAGLE-1: what is trained and measured is what an engine computes when it drafts.

The oracle recomputes the whole prefix for every proposal from the policy's final states, in plain tensor operations:
row i holds token x[i+1], state i and position i; a proposal appends (its embedding, the previous output) at the next
position.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.automodel.draft import expected_acceptance_length
from nemo_rl.models.automodel.draft.capture import FeatureCapture
from nemo_rl.models.automodel.draft.config import Eagle1DraftConfig
from nemo_rl.models.automodel.draft.eagle1 import Eagle1Runtime
from nemo_rl.models.automodel.draft.models.eagle1 import Eagle1Draft
from nemo_rl.models.automodel.draft.registry import build_draft_runtime, resolve_spec
from tests.unit.models.automodel.draft.helpers import to_microbatch

K = 5
LENGTHS = (1, 2, 9, 17)


@pytest.fixture(scope="module")
def policy(draft_policy_dir: str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(draft_policy_dir, attn_implementation="sdpa").eval()


def make_runtime(policy: torch.nn.Module, *, k: int = K, draft_seed: int | None = 5, **settings: Any) -> Eagle1Runtime:
    cfg = Eagle1DraftConfig(enabled=True, **settings)
    spec = resolve_spec(cfg, policy_config=policy.config.to_dict(), k=k, max_model_len=64, dtype="float32")
    runtime = build_draft_runtime(cfg, spec, policy_model=policy, device="cpu", dtype="float32", draft_dir=None, seed=3)
    if draft_seed is not None:
        generator = torch.Generator().manual_seed(draft_seed)
        with torch.no_grad():
            for p in runtime.module.parameters():
                noise = torch.randn(p.shape, generator=generator)
                p.copy_(1 + 0.3 * noise if p.ndim == 1 else noise * p.shape[-1] ** -0.5)
    return runtime


def _rms(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w


def _rope(x: Tensor, pos: Tensor, theta: float) -> Tensor:
    d = x.shape[-1]
    angle = pos[:, None].float() * theta ** (-torch.arange(0, d, 2).float() / d)
    c, s = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., : d // 2], x[..., d // 2 :]
    return torch.cat([a * c - b * s, b * c + a * s], -1)


def _whole_sequence(w: dict[str, Tensor], emb: Tensor, states: Tensor, arch: Any) -> Tensor:
    """Causal forward over all rows."""
    n = emb.shape[0]
    pos, causal = torch.arange(n), torch.ones(n, n, dtype=torch.bool).tril()
    h = F.linear(torch.cat([emb, states], -1), w["fc.weight"])
    for i in range(arch.num_hidden_layers):
        p = f"layers.{i}."
        x = _rms(h, w[p + "input_layernorm.weight"]) if i else h
        q, k, v = (F.linear(x, w[f"{p}self_attn.{m}_proj.weight"]).view(n, -1, arch.head_dim) for m in "qkv")
        q, k = _rope(q, pos, arch.rope["rope_theta"]), _rope(k, pos, arch.rope["rope_theta"])
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * arch.head_dim**-0.5
        probs = scores.masked_fill(~causal, float("-inf")).softmax(-1)
        h = h + F.linear(torch.einsum("hqk,khd->qhd", probs, v).reshape(n, -1), w[p + "self_attn.o_proj.weight"])
        y = _rms(h, w[p + "post_attention_layernorm.weight"])
        gated = F.silu(F.linear(y, w[p + "mlp.gate_proj.weight"])) * F.linear(y, w[p + "mlp.up_proj.weight"])
        h = h + F.linear(gated, w[p + "mlp.down_proj.weight"])
    return h


def engine_draft(
    runtime: Eagle1Runtime, policy: torch.nn.Module, tokens: list[int], after: int
) -> tuple[list[int], Tensor]:
    """Greedy chain and the states behind it, after `tokens` were verified and `after` was sampled."""
    weights = {n: p.detach() for n, p in runtime.module.named_parameters()}
    embedding, head = policy.get_input_embeddings().weight.detach(), policy.get_output_embeddings().weight.detach()
    with torch.no_grad():
        states = policy(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0]
    emb, chain, out = embedding[torch.tensor([*tokens[1:], after])], [], []
    for _ in range(K):
        out.append(_whole_sequence(weights, emb, states, runtime.spec.architecture)[-1])
        chain.append(int((head @ out[-1]).argmax()))
        emb, states = torch.cat([emb, embedding[chain[-1]][None]]), torch.cat([states, out[-1][None]])
    return chain, torch.stack(out)


def trainer_draft(
    runtime: Eagle1Runtime, policy: torch.nn.Module, tokens: list[int], after: int, chain: list[int]
) -> tuple[dict[str, tuple[Tensor, Tensor]], Tensor]:
    """Metrics and outputs of the training step on a document that goes on with the engine's proposals.

    Returns:
        The metrics, and [K, H], the state of the slot that the engine drafted from at each depth.
    """
    ids = torch.tensor([[*tokens, after, *chain]])
    width = ids.shape[1]
    batch = BatchedDataDict(
        {
            "input_ids": ids,
            "input_lengths": torch.tensor([width]),
            "token_mask": (torch.arange(width)[None] >= len(tokens)).float(),
            "sample_mask": torch.ones(1),
            "sample_index": torch.zeros(1, dtype=torch.int64),
        }
    )
    runtime.begin_global_batch(batch, step=0, dp_group=None, policy_model=policy)
    mb = to_microbatch(batch, [0])
    with torch.no_grad(), runtime.capture(policy):
        logits = policy(mb.input_ids).logits
    # The engine has no state of the sampled token and those behind it: the first slot must not read one.
    seen = []
    unroll = runtime.module._unroll

    def spy(*args: Any) -> list[Tensor]:
        seen.append((args[-1].plan, unroll(*args)))
        return seen[-1][1]

    runtime.module._unroll = spy
    try:
        metrics = runtime.loss(mb, logits).metrics
    finally:
        del runtime.module._unroll
    ((plan, outputs),) = seen
    assert plan.num_active == tuple(range(K, 0, -1))
    slot = int((plan.active_rows == len(tokens) - 1).nonzero())
    return metrics, torch.stack([out[slot] for out in outputs])


SETTINGS = {"one_layer": {}, "two_layers": {"num_layers": 2}, "noise": {"feature_noise": 0.7}}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=list(SETTINGS))
def test_trainer_and_engine_draft_the_same_chain(policy: torch.nn.Module, settings: dict[str, Any]) -> None:
    runtime = make_runtime(policy, **settings)
    generator = torch.Generator().manual_seed(11)
    distinct: set[int] = set()
    for length in LENGTHS:
        tokens = torch.randint(policy.config.vocab_size, (length,), generator=generator).tolist()
        with torch.no_grad():
            after = int(policy(torch.tensor([tokens])).logits[0, -1].argmax())
        chain, want = engine_draft(runtime, policy, tokens, after)
        metrics, got = trainer_draft(runtime, policy, tokens, after, chain)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        # The document is what the engine proposed, so a replay of it accepts every token of the first draft.
        assert float(metrics["replayed_acceptance_length"][0]) == K + 1
        assert [float(x) for x in metrics[f"replayed_acceptance_{K}"]] == [1.0, 1.0]
        distinct |= set(chain)
    assert len(distinct) > 3, "a constant chain would hide an error"


@pytest.mark.parametrize("fault", ["pairing", "position", "state_before_the_norm", "feedback"])
def test_parity_fails_when_the_alignment_is_wrong(
    policy: torch.nn.Module, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = make_runtime(policy)
    tokens = [5, 60, 7, 200, 31, 8, 90]
    chain, want = engine_draft(runtime, policy, tokens, 12)
    _, got = trainer_draft(runtime, policy, tokens, 12, chain)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    if fault == "position":
        rope = runtime.module.rope
        monkeypatch.setattr(runtime.module, "rope", lambda p, dtype: rope(p + (p >= len(tokens)).long(), dtype))
    elif fault == "feedback":
        unroll, ones = Eagle1Draft._unroll, torch.ones(64)
        monkeypatch.setattr(Eagle1Draft, "_unroll", lambda self, run, h, i: unroll(self, run, _rms(h, ones), i))
    else:
        take = FeatureCapture.take

        def faulty(self: FeatureCapture, shape: Any) -> list[Tensor]:
            if fault == "pairing":
                return [state.roll(1, 1) for state in take(self, shape)]
            return [state / policy.model.norm.weight.detach() for state in take(self, shape)]

        monkeypatch.setattr(FeatureCapture, "take", faulty)
    _, got = trainer_draft(runtime, policy, tokens, 12, chain)
    assert (got - want).abs().max() > 0.1


def test_the_captured_state_is_what_the_policys_head_reads(policy: torch.nn.Module) -> None:
    runtime = make_runtime(policy)
    ids = torch.tensor([[5, 9, 200, 31, 8], [7, 7, 1, 90, 12]])
    with torch.no_grad(), runtime.capture(policy):
        out = policy(ids, output_hidden_states=True)
    (state,) = runtime._capture.take(ids.shape)
    assert torch.equal(state, out.hidden_states[-1])
    assert torch.equal(policy.get_output_embeddings()(state), out.logits)
    assert not state.requires_grad


def test_the_live_embedding_and_head_are_read(policy: torch.nn.Module) -> None:
    """They move with every update of the policy; the draft holds no copy."""
    runtime = make_runtime(policy)
    assert not {"embed_tokens.weight", "lm_head.weight"} & {n for n, _ in runtime.module.named_parameters()}
    tokens = [5, 60, 7, 200, 31]
    old = {n: p.detach().clone() for n, p in policy.named_parameters()}
    chain, before = engine_draft(runtime, policy, tokens, 12)
    trainer_draft(runtime, policy, tokens, 12, chain)
    try:
        with torch.no_grad():
            policy.get_input_embeddings().weight.mul_(-1.3)
            policy.get_output_embeddings().weight.mul_(-1.0)
        moved, want = engine_draft(runtime, policy, tokens, 12)
        metrics, got = trainer_draft(runtime, policy, tokens, 12, moved)
    finally:
        policy.load_state_dict(old, strict=False)
    assert moved != chain
    assert (want - before).abs().max() > 0.1
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert float(metrics["replayed_acceptance_length"][0]) == K + 1


def test_training_on_one_batch_raises_acceptance_at_every_depth(policy: torch.nn.Module) -> None:
    """Real policy forward, real capture; a pairing that is off by one learns visibly less."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(policy.config.vocab_size, (4, 4), generator=generator)
    with torch.no_grad():
        for _ in range(12):
            ids = torch.cat([ids, policy(ids).logits[:, -1:].argmax(-1)], 1)
    batch = BatchedDataDict(
        {
            "input_ids": ids,
            "input_lengths": torch.full((4,), 16),
            "token_mask": (torch.arange(16) >= 4).float().expand(4, -1).clone(),
            "sample_mask": torch.ones(4),
            "sample_index": torch.arange(4),
        }
    )

    def train(shift: int, steps: int) -> list[dict[str, tuple[Tensor, Tensor]]]:
        runtime = make_runtime(policy, k=3, draft_seed=None)
        optimizer = torch.optim.AdamW(runtime.param_group()["params"], lr=3e-3)
        history = []
        for step in range(steps):
            runtime.begin_global_batch(batch, step=step, dp_group=None, policy_model=policy)
            mb = to_microbatch(batch, [0, 1, 2, 3])
            with torch.no_grad(), runtime.capture(policy):
                logits = policy(mb.input_ids).logits
            out = runtime.loss(mb, logits.roll(shift, 1))
            out.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            history.append(out.metrics)
        return history

    history = train(0, 48)
    lengths = [expected_acceptance_length(metrics, "hit") for metrics in history]
    assert lengths[0] < 1.5
    assert lengths[-1] > 3.0
    for term in ("loss_hidden", "kl_1"):
        assert history[-1][term][0] < 0.1 * history[0][term][0]

    def hits(metrics: dict[str, tuple[Tensor, Tensor]]) -> float:
        return float(metrics["hit_1"][0] / metrics["hit_1"][1])

    assert hits(history[-1]) > 0.9
    assert hits(train(1, 30)[-1]) < 0.7
