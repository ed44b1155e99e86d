"""The EAGLE-1 draft against its definition: the six-token table, a naive float64 loop, nemo_automodel's trainer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nemo_rl.models.automodel.draft.sampling import document_generator
from tests.unit.models.automodel.draft.eagle1_helpers import K, NaiveEagle1, make_eagle1_arch, make_eagle1_runtime
from tests.unit.models.automodel.draft.helpers import (
    StubPolicy,
    give_features,
    make_documents,
    run_step,
    to_batch,
    to_microbatch,
)
from tests.unit.models.automodel.draft.reference import Document, is_charged, naive_eagle3

MASKS = ["0011111", "00111", "000110111", "11"]
"""A plain response, a short one, one with a tool token inside, one that is all response."""
EMBEDDING, HEAD = StubPolicy().embed.weight.detach(), StubPolicy().head.weight.detach()


def test_six_token_table():
    """Prompt x0 x1, response x2..x5: what each trained slot reads, is compared with and predicts."""
    runtime = make_eagle1_runtime(make_eagle1_arch(), k=3)
    doc = Document(list(range(10, 16)), [False] * 2 + [True] * 4, torch.randn(6, 12), torch.randn(6, 23))
    doc.features[:, 0] = torch.arange(6)
    batch = to_batch([doc])
    runtime.begin_global_batch(batch, step=0, dp_group=None, policy_model=StubPolicy())
    seen = []
    forward = runtime.module.forward
    runtime.module.forward = lambda inputs: (seen.append(inputs), forward(inputs))[1]
    mb = to_microbatch(batch, [0])
    runtime.loss(mb, give_features(runtime, mb, [doc]))
    (inputs,) = seen
    plan, trained, measured = inputs.plan, inputs.trained, inputs.measured
    assert plan.num_active == (3, 2, 1)

    def element(elements, i):
        """(depth, state read at depth 0, token, position, teacher row, label) of an element."""
        begin = depth = 0
        while elements.rows[i] >= begin + plan.num_active[depth]:
            begin, depth = begin + plan.num_active[depth], depth + 1
        slot = int(elements.rows[i]) - begin
        row = plan.active_rows[slot]
        token = plan.trunk_tokens[row] if depth == 0 else plan.depth_tokens[depth - 1][slot]
        chunks = elements.chunks
        local = chunks.local_row + torch.tensor([b[2] for b in chunks.bounds for _ in range(b[0], b[1])])
        teacher = chunks.teacher_rows[local[i]]
        position = plan.trunk_positions[row] + depth
        return tuple(int(x) for x in (depth, inputs.features[row, 0], token, position, teacher, elements.labels[i]))

    assert [element(trained, i) for i in range(3)] == [
        (0, 1, 12, 1, 2, 13),
        (0, 2, 13, 2, 3, 14),
        (0, 3, 14, 3, 4, 15),
    ]
    assert inputs.targets[:, 0].tolist() == [2, 3, 4]
    # Beyond depth 0 the draft reads its own output along the sampled tokens; nothing of it is trained.
    assert sorted(element(measured, i) for i in range(3)) == [
        (1, 1, 13, 2, 3, 14),
        (1, 2, 14, 3, 4, 15),
        (2, 1, 14, 3, 4, 15),
    ]
    assert plan.trunk_tokens.tolist() == [11, 12, 13, 14], "context rows 0..3; slot 4 predicts nothing"


CASES = {
    "default": ({}, {}),
    "two_layers": ({"num_hidden_layers": 2}, {}),
    "input_rule": ({}, {"mask_rule": "input"}),
    "states_only": ({}, {"token_loss_weight": 0.0}),
    "tokens_only": ({}, {"hidden_loss_weight": 0.0, "token_loss_weight": 2.0}),
    "small_chunks": ({}, {"loss_chunk_size": 3}),
    "trained_depth_only": ({}, {"replay": False}),
}


@pytest.mark.parametrize("case", CASES, ids=list(CASES))
def test_loss_gradients_and_metrics_equal_the_naive_loop(case):
    arch_changes, settings = CASES[case]
    arch = make_eagle1_arch(**arch_changes)
    runtime = make_eagle1_runtime(arch, **settings)
    cfg = runtime.cfg
    docs = make_documents(MASKS, arch)
    for doc in docs:  # both branches of the smooth L1
        doc.features *= torch.tensor([0.3, 3.0]).repeat(6)
    upstream = -1.7
    got = run_step(runtime, docs, [[0, 1, 2, 3]], upstream=upstream)

    naive = NaiveEagle1(runtime, HEAD)
    loss, sums, count = naive.loss(
        docs,
        EMBEDDING,
        hidden_weight=cfg.hidden_loss_weight,
        token_weight=cfg.token_loss_weight,
        rule=cfg.mask_rule,
    )
    (loss * upstream).backward()
    assert float(got.loss) == pytest.approx(float(loss), rel=1e-5)
    for name, w in naive.w.items():
        torch.testing.assert_close(
            got.grads[name].double(), w.grad, rtol=2e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}"
        )
        assert w.grad.abs().max() > 0, name
    assert got.metrics["loss_hidden"] == (pytest.approx(float(sums[0]), rel=1e-5), count)
    assert got.metrics["loss_token"] == (pytest.approx(float(sums[1]), rel=1e-5), count)
    assert got.metrics["loss"] == (pytest.approx(float(loss), rel=1e-5), pytest.approx(1.0))
    # The other metrics are the same function of the draft's logits as those of EAGLE-3.
    depths = K if cfg.replay else 1
    want = naive_eagle3(
        naive, docs, EMBEDDING, depths=depths, rule=cfg.mask_rule, num_proposed=depths if cfg.replay else 0
    ).metrics
    if not cfg.replay:
        want = {n: pair for n, pair in want.items() if not n.startswith("replayed")}
    for name, (num, den) in want.items():
        assert got.metrics[name] == (pytest.approx(num, rel=1e-4, abs=1e-5), pytest.approx(den)), name
    unread = {n for n in got.metrics if n not in want and got.metrics[n][1] != 0}
    assert unread == {"loss", "loss_hidden", "loss_token", "documents_without_chain"}
    assert (f"accept_greedy_{K}" in got.metrics) is cfg.replay


def _noise_of(doc, sample, *, width, step=0, seed=0):
    """Rows up to the last supervised slot, drawn from the document's own generator."""
    rows = 1 + max(t for t in range(len(doc.tokens)) if is_charged(doc, t, 0, "contiguous"))
    generator = document_generator(seed=seed, step=step, sample=sample, purpose="feature_noise")
    drawn = torch.empty(rows, doc.features.shape[1]).uniform_(-width, width, generator=generator)
    return torch.cat([drawn, torch.zeros(len(doc.tokens) - rows, drawn.shape[1])])


def test_noise_is_added_to_what_is_read_and_to_nothing_else():
    arch, width = make_eagle1_arch(), 0.5
    docs = make_documents(MASKS[:3], arch)
    clean = run_step(make_eagle1_runtime(arch), docs, [[0, 1, 2]])
    runtime = make_eagle1_runtime(arch, feature_noise=width)
    got = run_step(runtime, docs, [[0, 1, 2]])
    naive = NaiveEagle1(runtime, HEAD)
    noisy = [doc.features + _noise_of(doc, i, width=width) for i, doc in enumerate(docs)]
    loss, sums, count = naive.loss(docs, EMBEDDING, hidden_weight=1.0, token_weight=0.1, inputs=noisy)
    loss.backward()
    assert float(got.loss) == pytest.approx(float(loss), rel=1e-5)
    for name, w in naive.w.items():
        torch.testing.assert_close(got.grads[name].double(), w.grad, rtol=2e-4, atol=2e-6)
    assert got.metrics["loss_token"] == (pytest.approx(float(sums[1]), rel=1e-5), count)
    # What is said about acceptance is about a draft without noise, as the engine runs it.
    trained = {"loss", "loss_hidden", "loss_token"}
    assert got.metrics.keys() == clean.metrics.keys()
    for name in clean.metrics.keys() - trained:
        assert got.metrics[name] == pytest.approx(clean.metrics[name], rel=1e-5), name
    for name in trained:
        assert got.metrics[name][0] != pytest.approx(clean.metrics[name][0], rel=1e-4)


def test_noise_belongs_to_the_document_and_the_step():
    arch = make_eagle1_arch()
    docs = make_documents(MASKS, arch)
    runtime = make_eagle1_runtime(arch, feature_noise=0.5)
    want = run_step(runtime, docs, [[0, 1, 2, 3]])
    for groups, options in (([[3, 1], [0, 2]], {"mode": "packed", "multiple": 16}), ([[0], [1], [2], [3]], {})):
        got = run_step(runtime, docs, groups, **options)
        assert float(got.loss) == pytest.approx(float(want.loss), rel=1e-5)
        for name, grad in want.grads.items():
            torch.testing.assert_close(got.grads[name], grad, rtol=1e-4, atol=1e-6)
    batch = to_batch(docs)
    losses = set()
    for step in (0, 1):
        runtime.begin_global_batch(batch, step=step, dp_group=None, policy_model=StubPolicy())
        mb = to_microbatch(batch, [0, 1, 2, 3])
        losses.add(float(runtime.loss(mb, give_features(runtime, mb, docs)).loss.detach()))
    assert len(losses) == 2


def _saved_sizes(**settings):
    """Elements of every tensor that one loss keeps for its backward pass, which is run."""
    runtime = make_eagle1_runtime(make_eagle1_arch(), **settings)
    policy = StubPolicy()
    docs = make_documents(MASKS[:1], runtime.spec.architecture)
    batch = to_batch(docs)
    runtime.begin_global_batch(batch, step=0, dp_group=None, policy_model=policy)
    mb = to_microbatch(batch, [0])
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t.numel()), t)[1], lambda t: t):
        loss = runtime.loss(mb, give_features(runtime, mb, docs)).loss
    loss.backward()
    assert all(p.grad is None for p in policy.parameters())
    assert all(p.grad.abs().max() > 0 for p in runtime.module.parameters())
    return saved


def test_the_head_gets_no_gradient_and_measuring_keeps_nothing():
    """Gradients reach the draft through the head; of the head itself not even a buffer is formed."""
    saved = _saved_sizes(hidden_loss_weight=0.0, token_loss_weight=1.0)
    assert HEAD.numel() == 276
    assert 276 not in saved
    assert saved == _saved_sizes(hidden_loss_weight=0.0, token_loss_weight=1.0, replay=False)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_loss_and_gradients_equal_automodels_trainer_without_its_two_norms(num_layers):
    from nemo_automodel.components.speculative.eagle.core_v12 import EagleTrainerModule
    from nemo_automodel.components.speculative.eagle.draft_llama_v12 import LlamaEagleDraftModel
    from transformers import LlamaConfig

    # Automodel's mask rule is `input`.
    arch = make_eagle1_arch(num_hidden_layers=num_layers)
    runtime = make_eagle1_runtime(arch, mask_rule="input", hidden_loss_weight=0.7, token_loss_weight=0.3)
    docs = make_documents(["0001111111", "011111", "00110111", "1111"], arch)
    ours = run_step(runtime, docs, [[0, 1], [2, 3]])

    config = LlamaConfig(
        hidden_size=arch.hidden_size,
        intermediate_size=arch.intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=arch.num_attention_heads,
        num_key_value_heads=arch.num_key_value_heads,
        head_dim=arch.head_dim,
        vocab_size=arch.vocab_size,
        rms_norm_eps=arch.rms_norm_eps,
        max_position_embeddings=arch.max_position_embeddings,
        rope_theta=arch.rope["rope_theta"],
    )
    draft = LlamaEagleDraftModel(config).float()
    draft.norm, draft.layers[0].input_layernorm = nn.Identity(), nn.Identity()
    weights = runtime.module.state_dict() | {"embed_tokens.weight": EMBEDDING}
    missing, unexpected = draft.load_state_dict(weights, strict=False)
    assert not unexpected
    assert all("rotary" in k for k in missing)
    head = nn.Linear(arch.hidden_size, arch.vocab_size, bias=False)
    head.weight.data.copy_(HEAD)
    trainer = EagleTrainerModule(draft, target_lm_head=head, hidden_loss_weight=0.7, token_loss_weight=0.3)
    batch = to_batch(docs)
    ids = batch["input_ids"]

    def shift(x):
        return torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], dim=1)

    features = torch.zeros(*ids.shape, arch.feature_size)
    logits = torch.zeros(*ids.shape, arch.vocab_size)
    for i, doc in enumerate(docs):
        features[i, : len(doc.tokens)], logits[i, : len(doc.tokens)] = doc.features, doc.logits
    theirs = trainer(
        input_ids=shift(ids),
        attention_mask=(torch.arange(ids.shape[1])[None] < batch["input_lengths"][:, None]).long(),
        loss_mask=shift(batch["token_mask"]),
        input_hidden_states=features,
        target_hidden_states=shift(features),
        target_logits=shift(logits),
    )
    theirs.loss.backward()
    assert float(ours.loss) == pytest.approx(float(theirs.loss), rel=2e-6)
    count = int(theirs.valid_tokens)
    assert ours.metrics["loss_hidden"] == (pytest.approx(float(theirs.hidden_loss) * count, rel=1e-5), count)
    assert ours.metrics["loss_token"] == (pytest.approx(float(theirs.token_loss) * count, rel=1e-5), count)
    assert ours.metrics["top1_1"][0] == pytest.approx(float(theirs.accuracy) * count)
    named = dict(draft.named_parameters())
    for name, grad in ours.grads.items():
        torch.testing.assert_close(grad, named[name].grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
