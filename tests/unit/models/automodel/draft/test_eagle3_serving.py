"""Serve parity: what the trainer computes at every depth is what an engine computes when it drafts.

The oracle recomputes the whole prefix for every proposal from the policy's hidden states, in plain tensor operations:
row i holds token x[i+1], feature i and position i; a proposal appends (its embedding, the previous output) at the next
position.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.automodel.draft.capture import FeatureCapture
from nemo_rl.models.automodel.draft.config import Eagle3DraftConfig
from nemo_rl.models.automodel.draft.eagle3 import Eagle3Runtime
from nemo_rl.models.automodel.draft.models.llama_eagle import UnrollInputs
from nemo_rl.models.automodel.draft.registry import build_draft_runtime, resolve_spec
from nemo_rl.models.automodel.draft.runtime import charged_depths
from nemo_rl.models.automodel.draft.unroll import plan_rows
from tests.tiny_models import write_tiny_policy

K = 7


def _rms(x, w):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w


def _rope(x, pos, theta):
    d = x.shape[-1]
    inv = theta ** (-torch.arange(0, d, 2).float() / d)
    angle = pos[:, None].float() * inv
    c, s = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., : d // 2], x[..., d // 2 :]
    return torch.cat([a * c - b * s, b * c + a * s], -1)


def _whole_sequence(w, emb, hidden, arch):
    """Causal forward over all rows; returns normed and un-normed outputs."""
    n = emb.shape[0]
    pos, causal = torch.arange(n), torch.ones(n, n, dtype=torch.bool).tril()
    h = hidden
    for i in range(arch.num_hidden_layers):
        p = f"layers.{i}."
        if i == 0:
            r = _rms(h, w[p + "hidden_norm.weight"])
            x = torch.cat([_rms(emb, w[p + "input_layernorm.weight"]), r], -1)
            residual = r if arch.norm_before_residual else h
        else:
            x, residual = _rms(h, w[p + "input_layernorm.weight"]), h
        q, k, v = (
            F.linear(x, w[f"{p}self_attn.{name}_proj.weight"]).view(n, -1, arch.head_dim) for name in ("q", "k", "v")
        )
        q, k = _rope(q, pos, arch.rope["rope_theta"]), _rope(k, pos, arch.rope["rope_theta"])
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * arch.head_dim**-0.5
        scores = scores.masked_fill(~causal, float("-inf"))
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(n, -1)
        h = residual + F.linear(attended, w[p + "self_attn.o_proj.weight"])
        y = _rms(h, w[p + "post_attention_layernorm.weight"])
        gated = F.silu(F.linear(y, w[p + "mlp.gate_proj.weight"])) * F.linear(y, w[p + "mlp.up_proj.weight"])
        h = h + F.linear(gated, w[p + "mlp.down_proj.weight"])
    return _rms(h, w["norm.weight"]), h


def engine_draft(w, arch, embedding, tokens, sampled_next, features, k):
    """Greedy chain after `tokens` were verified and `sampled_next` was sampled."""
    hidden = F.linear(features, w["fc.weight"])
    emb = embedding[torch.tensor([*tokens[1:], sampled_next])]
    out, logits = [], []
    for _ in range(k):
        normed, pre = _whole_sequence(w, emb, hidden, arch)
        row = F.linear(normed[-1], w["lm_head.weight"])
        out.append(int(row.argmax()))
        logits.append(row)
        emb = torch.cat([emb, embedding[out[-1]][None]])
        hidden = torch.cat([hidden, (normed if arch.norm_output else pre)[-1:]])
    return out, torch.stack(logits)


def trainer_draft(runtime: Eagle3Runtime, embedding, tokens, sampled_next, features, k):
    """The same chain from the training unroll: teacher-forced on the draft's own earlier choices, one slot charged."""
    module, arch = runtime.module, runtime.spec.architecture
    chain, slot = [], len(tokens) - 1
    for depth in range(k):
        # The tokens that a document would need after the slot's own; the last two are never read.
        ids = torch.tensor([[*tokens, sampled_next, *chain, 0, 0]])
        width = ids.shape[1]
        sampled = torch.arange(width)[None] > slot
        docs = torch.zeros_like(ids)
        charged = charged_depths(sampled, docs, depths=depth + 1, mask_rule="contiguous")
        charged = charged & (torch.arange(width) == slot)
        plan = plan_rows(
            input_ids=ids,
            position_ids=torch.arange(width)[None],
            doc_ids=docs,
            charged=charged,
            num_layers=arch.num_hidden_layers,
            chunk_size=1024,
            is_packed=False,
        )
        # Features of positions that the engine has not computed are NaN: they must not be read.
        unknown = torch.full((width - len(features), features.shape[1]), float("nan"))
        inputs = UnrollInputs(
            plan=plan.unroll,
            features=torch.cat([features, unknown])[plan.feature_rows],
            embedding=embedding,
            teacher_logits=torch.zeros(1, 1),
            weights=torch.zeros(0),
            vocab_ids=None,
            drop_out_of_vocab=False,
        )
        with torch.no_grad():
            outputs = module._unroll(inputs)
            rows = torch.stack([module.lm_head(o[0]) for o in outputs])
        chain.append(int(rows[depth].argmax()))
    return chain, rows


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    path = write_tiny_policy(tmp_path_factory.mktemp("policy"), layers=4, heads=4, kv=2)
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa").eval()


def _runtime(policy, **settings) -> Eagle3Runtime:
    cfg = Eagle3DraftConfig(enabled=True, ttt_steps=K, **{"aux_layer_indices": [0, 1, 2], **settings})
    spec = resolve_spec(cfg, policy_config=policy.config.to_dict(), k=3, max_model_len=64, dtype="float32")
    runtime = build_draft_runtime(cfg, spec, policy_model=policy, device="cpu", dtype="float32", draft_dir=None, seed=3)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in runtime.module.parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(1 + 0.3 * noise if p.ndim == 1 else noise * 2 * p.shape[-1] ** -0.5)
    return runtime


@pytest.mark.parametrize(
    "settings",
    [{}, {"num_layers": 2, "norm_before_residual": True}, {"norm_output": True}],
    ids=["default", "two_layers_norm_before_residual", "norm_output"],
)
def test_trainer_and_engine_draft_the_same_chain(policy, settings):
    runtime = _runtime(policy, **settings)
    arch = runtime.spec.architecture
    weights = {n: p.detach() for n, p in runtime.module.named_parameters()}
    embedding = policy.get_input_embeddings().weight.detach()
    generator = torch.Generator().manual_seed(11)
    distinct = set()
    for length in (1, 2, 9, 17):
        tokens = torch.randint(policy.config.vocab_size, (length,), generator=generator).tolist()
        capture = FeatureCapture(arch.feature_ids, num_layers=4)
        with torch.no_grad(), capture(policy):
            logits = policy(torch.tensor([tokens])).logits[0]
        features = torch.cat(capture.take((1, length)), -1)[0]
        after = int(logits[-1].argmax())
        want, want_logits = engine_draft(weights, arch, embedding, tokens, after, features, K)
        got, got_logits = trainer_draft(runtime, embedding, tokens, after, features, K)
        assert got == want
        torch.testing.assert_close(got_logits, want_logits, rtol=1e-3, atol=1e-3)
        distinct |= set(want)
    assert len(distinct) > 3, "a constant chain would hide an error"


@pytest.mark.parametrize("fault", ["layer_ids", "position", "token"])
def test_parity_fails_when_the_alignment_is_off_by_one(policy, fault, monkeypatch):
    runtime = _runtime(policy)
    arch = runtime.spec.architecture
    weights = {n: p.detach() for n, p in runtime.module.named_parameters()}
    embedding = policy.get_input_embeddings().weight.detach()
    tokens = [5, 60, 7, 200, 31, 8, 90]
    ids = (1, 2, 3)

    def features(of):
        capture = FeatureCapture(of, num_layers=4)
        with torch.no_grad(), capture(policy):
            policy(torch.tensor([tokens]))
        return torch.cat(capture.take((1, len(tokens))), -1)[0]

    _, want = engine_draft(weights, arch, embedding, tokens, 12, features(ids), 3)
    given = features((0, 1, 2) if fault == "layer_ids" else ids)
    if fault == "position":
        rope = runtime.module.rope
        runtime.module.rope = lambda p, dtype: rope(p + (p > len(tokens) - 1).long(), dtype)
    shown = [tokens[0], *tokens] if fault == "token" else tokens
    given = torch.cat([given[:1], given]) if fault == "token" else given
    _, got = trainer_draft(runtime, embedding, shown[: len(tokens)], 12, given[: len(tokens)], 3)
    assert (got - want).abs().max() > 0.1


def test_training_on_one_batch_lowers_the_loss_and_raises_acceptance(policy):
    """Real policy forward, real capture; a pairing that is off by one learns visibly less."""
    from nemo_rl.models.automodel.draft import expected_acceptance_length
    from tests.unit.models.automodel.draft.helpers import to_microbatch

    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(policy.config.vocab_size, (4, 4), generator=generator)
    with torch.no_grad():
        for _ in range(12):
            ids = torch.cat([ids, policy(ids).logits[:, -1:].argmax(-1)], 1)
    mask = (torch.arange(16) >= 4).float().expand(4, -1)
    batch = BatchedDataDict(
        {
            "input_ids": ids,
            "input_lengths": torch.full((4,), 16),
            "token_mask": mask.clone(),
            "sample_mask": torch.ones(4),
            "sample_index": torch.arange(4),
        }
    )

    def train(shift: int):
        cfg = Eagle3DraftConfig(enabled=True, ttt_steps=3, aux_layer_indices=[0, 1, 2])
        spec = resolve_spec(cfg, policy_config=policy.config.to_dict(), k=3, max_model_len=64, dtype="float32")
        runtime = build_draft_runtime(
            cfg, spec, policy_model=policy, device="cpu", dtype="float32", draft_dir=None, seed=0
        )
        optimizer = torch.optim.AdamW(runtime.param_group()["params"], lr=3e-3)
        history = []
        for step in range(60):
            runtime.begin_global_batch(batch, step=step, dp_group=None, policy_model=policy)
            mb = to_microbatch(batch, [0, 1, 2, 3])
            with torch.no_grad(), runtime.capture(policy):
                logits = 3.0 * policy(mb.input_ids).logits  # a policy that is sure of its choice
            out = runtime.loss(mb, logits.roll(shift, 1))
            out.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            history.append((float(out.loss), out.metrics))
        hits = float(history[-1][1]["hit_1"][0] / history[-1][1]["hit_1"][1])
        return history, hits

    history, hits = train(0)
    assert history[-1][0] < 0.5 * history[0][0]
    assert hits > 0.9, hits
    assert (
        expected_acceptance_length(history[-1][1], "hit") > 3.0 > 2.0 > expected_acceptance_length(history[0][1], "hit")
    )
    _, shifted_hits = train(1)
    assert shifted_hits < 0.6, shifted_hits
