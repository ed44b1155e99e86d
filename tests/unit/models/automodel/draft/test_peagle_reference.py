"""P-EAGLE against a naive float64 draft and against nemo_automodel's modules: loss, every gradient, every element."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.unit.models.automodel.draft.helpers import (
    give_features,
    make_documents,
    run_step,
    to_batch,
    to_microbatch,
)
from tests.unit.models.automodel.draft.peagle_reference import (
    MASK,
    NaivePEagle,
    drawn_elements,
    make_arch,
    make_runtime,
)

MASKS = ["001111111111", "00111", "000110111", "11", "0011111111"]
"""Long enough for several depths, short ones, one with a tool token inside, one that is all response."""
PERMUTED_IDS = [17, 3, 9, 21, 0, 12, 5, 8, 20]
CASES = {
    "default": ({}, {}),
    "one_layer": ({"num_hidden_layers": 1}, {}),
    "three_layers_qwen3": ({"num_hidden_layers": 3, "layer_family": "qwen3"}, {}),
    "norm_before_residual": ({"norm_before_residual": True}, {}),
    "norm_before_fc": ({"norm_before_fc": True}, {}),
    "fc_norm": ({"fc_norm": True}, {}),
    "reduced_vocab": ({"draft_vocab_size": 9}, {}),
    "everything_kept": ({}, {"down_sample_ratio": 1.0}),
    "few_kept": ({"num_depths": 8}, {"down_sample_ratio": 0.5, "down_sample_ratio_min": 0.0}),
    "one_depth": ({"num_depths": 1}, {}),
    "segments": ({}, {"num_segments": 3, "loss_chunk_size": 3}),
    "segments_one_layer": ({"num_hidden_layers": 1}, {"num_segments": 4}),
}


def module_logits(runtime, docs, groups=None, **options):
    """Draft logits by (document, anchor, depth), as the product computes them in micro-batches."""
    batch = to_batch(docs)
    runtime.begin_global_batch(batch, step=0, dp_group=None, policy_model=torch.nn.Module())
    found = {}
    states = runtime.module.states

    def spy(inputs):
        out = states(inputs)
        found["states"] = out.detach()
        return out

    tables = []
    metrics = runtime._metrics
    runtime._metrics = lambda table, loss, stats: (tables.append(table), metrics(table, loss, stats))[1]
    runtime.module.states = spy
    out = {}
    try:
        for group in groups or [list(range(len(docs)))]:
            mb = to_microbatch(batch, group, **options)
            runtime.loss(mb, give_features(runtime, mb, docs))
            table = tables[-1]
            logits = found["states"] @ runtime.module.lm_head.weight.detach().T
            places = table.places[table.slot]
            for row, place, k in zip(logits, places.tolist(), table.depth.tolist(), strict=True):
                document = int(mb.sample_index[int(mb.doc_ids.flatten()[place])])
                out[document, int(mb.position_ids.flatten()[place]), k] = row
    finally:
        del runtime._metrics, runtime.module.states
    return out


@pytest.mark.parametrize("case", CASES, ids=list(CASES))
def test_loss_and_gradients_equal_the_naive_draft(case):
    arch_changes, settings = CASES[case]
    arch = make_arch(**arch_changes)
    ids = PERMUTED_IDS if arch.has_vocab_map else None
    runtime = make_runtime(arch, ids=ids, **settings)
    docs = make_documents(MASKS, arch)
    upstream = -1.7

    got = run_step(runtime, docs, [[0, 1, 2], [3, 4]], upstream=upstream)

    naive = NaivePEagle(runtime)
    want = naive.loss(docs, [drawn_elements(runtime, i) for i in range(len(docs))], ids=ids)
    (want * upstream).backward()
    want = float(want.detach())
    assert float(got.loss) == pytest.approx(want, rel=1e-5)
    assert got.metrics["loss"] == (pytest.approx(want, rel=1e-5), pytest.approx(1.0))
    for name, w in naive.w.items():
        torch.testing.assert_close(
            got.grads[name].double(), w.grad, rtol=2e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}"
        )
        if arch.num_depths > 1 or name != "mask_hidden":
            assert w.grad.abs().max() > 0, name


@pytest.mark.parametrize("changes", [{}, {"num_hidden_layers": 1}, {"num_hidden_layers": 4, "num_depths": 6}], ids=str)
def test_every_element_equals_the_causal_layout_of_the_engine(changes):
    arch = make_arch(**changes)
    runtime = make_runtime(arch, num_segments=2)
    docs = make_documents(MASKS, arch)
    got = module_logits(runtime, docs, mode="packed")
    naive = NaivePEagle(runtime)
    wanted = {(d, a, k) for d in range(len(docs)) for a, k in drawn_elements(runtime, d)}
    assert set(got) == wanted
    assert max(k for *_, k in wanted) >= 3
    with torch.no_grad():
        for document, anchor, depth in wanted:
            want = naive.engine(docs[document], anchor, depth + 1)[depth]
            torch.testing.assert_close(got[document, anchor, depth].double(), want, rtol=1e-4, atol=1e-5)


def test_metrics_are_those_of_the_elements():
    """By hand from the naive logits; the prefix families count chains that were drawn that far."""
    arch = make_arch(draft_vocab_size=9)
    runtime = make_runtime(arch, ids=PERMUTED_IDS)
    docs = make_documents(MASKS, arch)
    got = run_step(runtime, docs, [[0, 1, 2, 3, 4]]).metrics
    ids = torch.tensor(PERMUTED_IDS)
    naive = NaivePEagle(runtime)
    want: dict[str, list[float]] = {}

    def add(name, num):
        pair = want.setdefault(name, [0.0, 0.0])
        pair[0] += float(num)
        pair[1] += 1.0

    for d, doc in enumerate(docs):
        elements = drawn_elements(runtime, d)
        run = naive.run(doc, elements) if elements else {}
        product: dict[int, torch.Tensor] = {}
        for a, k in sorted(elements, key=lambda e: e[1]):
            q = run[a, k].detach().softmax(-1)
            z = doc.logits[a + k + 1].double()
            p, restricted = z.softmax(-1), z[ids].softmax(-1)
            best = int(ids[q.argmax()])
            values = (
                float(best == int(z.argmax())),
                p[best],
                torch.minimum(p[ids], q).sum(),
            )
            product[a] = torch.tensor(values) * (product[a] if k else 1.0)
            j = k + 1
            for name, value in zip(("top1", "accept_greedy", "accept_overlap"), values, strict=True):
                add(f"{name}_{j}", value)
            for name, value in zip(("hit", "greedy", "overlap"), product[a], strict=True):
                add(f"prefix_{name}_{j}", value)
            add(f"hit_{j}", best == doc.tokens[a + k + 2])
            add(f"kl_{j}", (restricted * (restricted.log() - q.log())).sum())
            add(f"loss_depth_{k}", -(restricted * q.log()).sum())
            add("coverage", p[ids].sum())
            add("argmax_in_vocab", int(z.argmax()) in PERMUTED_IDS)
    assert want["prefix_hit_4"][1] < want["prefix_hit_1"][1] / 3
    for name, (num, den) in want.items():
        assert got[name] == (pytest.approx(num, rel=1e-4, abs=1e-5), pytest.approx(den)), name
    unread = {n for n in got if n not in want and got[n][1] != 0}
    assert unread == {
        "loss",
        "documents_without_chain",
        "replayed_acceptance_length",
        *(f"replayed_acceptance_{j}" for j in (1, 2, 3)),
    }


def test_the_engine_is_replayed_on_responses_whose_chains_are_all_trained():
    arch = make_arch(num_depths=3)
    docs = make_documents(["0011111", "000111111111"], arch)
    everything = run_step(make_runtime(arch, down_sample_ratio=1.0), docs, [[0, 1]]).metrics
    assert everything["replayed_acceptance_length"][1] > 1
    for groups in ([[0], [1]], [[1, 0]]):
        again = run_step(make_runtime(arch, down_sample_ratio=1.0), docs, groups).metrics
        assert again["replayed_acceptance_length"] == everything["replayed_acceptance_length"]
    few = run_step(make_runtime(arch, down_sample_ratio=0.5), docs, [[0, 1]]).metrics
    assert "replayed_acceptance_length" not in few
    # A document of one chain keeps everything: that one is replayed, the other is left out.
    docs = make_documents(["0011", "000111111111"], arch)
    mixed = run_step(make_runtime(arch, down_sample_ratio=0.5), docs, [[0, 1]]).metrics
    alone = run_step(make_runtime(arch, down_sample_ratio=0.5), docs[:1], [[0]]).metrics
    assert mixed["replayed_acceptance_length"] == alone["replayed_acceptance_length"]
    assert mixed["replayed_acceptance_length"][1] == 1


def test_a_draft_that_equals_the_policy_has_no_loss():
    """Against a teacher made of the draft's own logits: KL 0, everything accepted."""
    arch = make_arch()
    runtime = make_runtime(arch, down_sample_ratio=1.0)
    docs = make_documents(["00111"], arch)
    logits = module_logits(runtime, docs)
    # Elements (1, 0) and (2, 0) have teachers of their own, (1, 1) shares one with (2, 0).
    docs[0].logits[2] = logits[0, 1, 0]
    docs[0].logits[3] = logits[0, 2, 0]
    got = run_step(runtime, docs, [[0]])
    assert got.metrics["kl_1"][0] == pytest.approx(0.0, abs=1e-5)
    assert got.metrics["accept_overlap_1"][0] == pytest.approx(2.0)
    assert float(got.loss) == pytest.approx(got.metrics["kl_2"][0] / 3, abs=1e-6)


# -- nemo_automodel --------------------------------------------------------------------------------------------------


def _dense_attention(q, k, v, *, block_mask, scale):
    """Its flex attention has no backward pass on the CPU; the mask is still its own."""
    n = q.shape[2]
    rows = torch.arange(n)
    mask = block_mask.mask_mod(0, 0, rows[:, None], rows[None])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


@pytest.mark.parametrize("changes", [{}, {"fc_norm": True}, {"draft_vocab_size": 9, "num_hidden_layers": 3}], ids=str)
def test_loss_and_gradients_equal_automodels_trainer(changes, monkeypatch):
    """Given the same chains. Its own sampler ignores documents, and its mask rule is another (see docs)."""
    from nemo_automodel.components.speculative.eagle import peagle_draft
    from nemo_automodel.components.speculative.eagle.draft_llama import LlamaEagle3DraftModel
    from nemo_automodel.components.speculative.eagle.peagle_trainer import PEagleTrainerModule
    from transformers import LlamaConfig

    monkeypatch.setattr(peagle_draft, "_peagle_flex_attention", _dense_attention)
    arch = make_arch(feature_ids=(1, 2, 4), num_depths=4, **changes)
    ids = PERMUTED_IDS if arch.has_vocab_map else None
    runtime = make_runtime(arch, ids=ids)
    docs = make_documents(MASKS, arch)
    ours = run_step(runtime, docs, [[0, 1], [2, 3, 4]])

    config = LlamaConfig(
        hidden_size=arch.hidden_size,
        intermediate_size=arch.intermediate_size,
        num_hidden_layers=arch.num_hidden_layers,
        num_attention_heads=arch.num_attention_heads,
        num_key_value_heads=arch.num_key_value_heads,
        head_dim=arch.head_dim,
        vocab_size=arch.vocab_size,
        rms_norm_eps=arch.rms_norm_eps,
        max_position_embeddings=arch.max_position_embeddings,
        rope_theta=arch.rope["rope_theta"],
        attention_bias=False,
        mlp_bias=False,
    )
    config.draft_vocab_size = arch.draft_vocab_size
    config.target_hidden_size = arch.target_hidden_size
    config.num_aux_hidden_states = 3
    config.parallel_drafting = True
    config.fc_norm = arch.fc_norm
    draft = LlamaEagle3DraftModel(config).float()
    top = ("lm_head.weight", "mask_hidden")
    weights = {k if k in top else f"model.{k}": v for k, v in runtime.module.state_dict().items()}
    missing, unexpected = draft.load_state_dict(weights, strict=False)
    assert not unexpected
    assert all("rotary" in k or k in ("d2t", "t2d") for k in missing)
    selected = torch.tensor(ids) if ids else torch.arange(arch.vocab_size)
    trainer = PEagleTrainerModule(
        draft,
        selected_token_ids=selected,
        selected_token_mask=torch.isin(torch.arange(arch.vocab_size), selected),
        num_depths=arch.num_depths,
        mask_token_id=MASK,
    )
    num = den = correct = torch.zeros(())
    for i, doc in enumerate(docs):
        size = len(doc.tokens)
        deep = [e for e in drawn_elements(runtime, i) if e[1]]
        anchor, depth = torch.tensor([(a, 0) for a in range(size)] + deep).unbind(1)
        own = set(drawn_elements(runtime, i))
        charged = torch.tensor([e in own for e in zip(anchor.tolist(), depth.tolist(), strict=True)])
        shifted = torch.cat([doc.logits[1:], torch.zeros_like(doc.logits[:1])])
        result = trainer._peagle_position_loss(
            torch.tensor([*doc.tokens[1:], 0]),
            doc.features[None],
            shifted,
            anchor,
            depth,
            anchor + depth,
            charged,
            torch.tensor([size]),
            size,
        )
        num, den, correct = num + result[0], den + result[1], correct + result[2]
    theirs = num / den
    theirs.backward()

    assert float(ours.loss) == pytest.approx(float(theirs.detach()), rel=5e-6)
    named = {k.removeprefix("model."): p for k, p in draft.named_parameters()}
    assert ours.grads.keys() == named.keys()
    for name, grad in ours.grads.items():
        torch.testing.assert_close(grad, named[name].grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    if ids is None:
        hits = sum(ours.metrics[f"top1_{j}"][0] for j in range(1, arch.num_depths + 1))
        assert hits == float(correct)
