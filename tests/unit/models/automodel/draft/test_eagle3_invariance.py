"""Split invariance, isolation and edge cases on one process."""

from __future__ import annotations

import pytest
import torch

from nemo_rl.models.automodel.draft.config import Eagle3DraftConfig
from tests.unit.models.automodel.draft.helpers import (
    StubPolicy,
    give_features,
    make_arch,
    make_documents,
    make_runtime,
    run_step,
    to_batch,
    to_microbatch,
)

MASKS = ["0011111", "00111", "000110111", "00000", "0111111111"]


def _assert_same(got, want, *, rel=1e-5):
    assert float(got.loss) == pytest.approx(float(want.loss), rel=rel)
    for name, grad in want.grads.items():
        torch.testing.assert_close(got.grads[name], grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    for name, (num, den) in want.metrics.items():
        assert got.metrics[name] == (pytest.approx(num, rel=rel, abs=1e-5), pytest.approx(den, rel=rel)), name


@pytest.fixture(
    scope="module", params=[{}, {"num_hidden_layers": 2, "norm_output": True}], ids=["one_layer", "two_layers"]
)
def canonical(request):
    arch = make_arch(**request.param)
    runtime = make_runtime(arch, Eagle3DraftConfig(enabled=True, ttt_steps=4))
    docs = make_documents(MASKS, arch)
    return runtime, docs, run_step(runtime, docs, [[0, 1, 2, 3, 4]])


@pytest.mark.parametrize(
    ("groups", "options"),
    [
        ([[0], [1], [2], [3], [4]], {}),
        ([[0, 1], [2, 3], [4]], {}),
        ([[3], [4, 0], [1, 2]], {}),
        ([[0, 1, 2, 3, 4]], {"multiple": 32}),
        ([[0, 1, 2, 3, 4]], {"mode": "packed"}),
        ([[4, 2, 0, 3, 1]], {"mode": "packed", "multiple": 16}),
        ([[3, 1, 4], [2, 0]], {"mode": "packed"}),
    ],
    ids=["one_by_one", "pairs", "reordered", "wide_padding", "packed", "packed_reordered", "packed_split"],
)
def test_every_split_gives_the_same_step(canonical, groups, options):
    runtime, docs, want = canonical
    _assert_same(run_step(runtime, docs, groups, **options), want)


@pytest.mark.parametrize("chunk", [1, 7, 10_000])
def test_chunk_size_does_not_matter(canonical, chunk):
    runtime, docs, want = canonical
    other = make_runtime(runtime.spec.architecture, Eagle3DraftConfig(enabled=True, ttt_steps=4, loss_chunk_size=chunk))
    _assert_same(run_step(other, docs, [[0, 1, 2, 3, 4]]), want)


@pytest.mark.parametrize("mode", ["fixed", "packed"])
def test_nan_in_padding_is_harmless(canonical, mode):
    runtime, docs, want = canonical
    got = run_step(runtime, docs, [[0, 1, 2, 3, 4]], mode=mode, multiple=16, padding=float("nan"))
    _assert_same(got, want)


def test_a_document_does_not_see_its_neighbour(canonical):
    runtime, docs, _ = canonical
    changed = [
        make_documents(MASKS, runtime.spec.architecture, seed=99)[i] if i == 0 else d for i, d in enumerate(docs)
    ]

    def stats_of_document_1(documents):
        batch = to_batch(documents)
        runtime.begin_global_batch(batch, step=0, dp_group=None, policy_model=StubPolicy())
        mb = to_microbatch(batch, [0, 1, 2], mode="packed")
        rows = {}
        original = runtime._metrics

        def spy(plan, loss, stats):
            document = mb.doc_ids.flatten()[plan.feature_rows[plan.unroll.active_rows[plan.table.slot]]]
            order = (plan.table.depth * 1000 + plan.table.slot)[document == 1].argsort()
            rows["stats"] = stats[document == 1][order]
            return original(plan, loss, stats)

        runtime._metrics = spy
        try:
            runtime.loss(mb, give_features(runtime, mb, documents))
        finally:
            del runtime._metrics
        return rows["stats"]

    before, after = stats_of_document_1(docs), stats_of_document_1(changed)
    assert before.shape[0] == 3
    assert torch.equal(before, after)


@pytest.mark.parametrize(
    "masks", [["0"], ["1"], ["01"], ["11"], ["000", "00"], ["001"], ["0", "01", "0001"]], ids=lambda m: "_".join(m)
)
@pytest.mark.parametrize("mode", ["fixed", "packed"])
def test_inputs_without_a_chain_give_zero_gradients(masks, mode):
    arch = make_arch()
    runtime = make_runtime(arch, Eagle3DraftConfig(enabled=True, ttt_steps=3))
    got = run_step(runtime, make_documents(masks, arch), [list(range(len(masks)))], mode=mode)
    assert float(got.loss) == 0.0
    assert set(got.grads) == {n for n, _ in runtime.module.named_parameters()}
    assert all(bool((g == 0).all()) for g in got.grads.values())
    assert got.metrics["documents_without_chain"] == (len(masks), len(masks))


def test_a_depth_without_elements_adds_nothing_and_weights_are_not_renormalised():
    arch = make_arch()
    docs = make_documents(["00111"], arch)  # two charged slots at depth 0, one at depth 1, none deeper
    deep = run_step(make_runtime(arch, Eagle3DraftConfig(enabled=True, ttt_steps=6)), docs, [[0]])
    shallow = run_step(make_runtime(arch, Eagle3DraftConfig(enabled=True, ttt_steps=2)), docs, [[0]])
    total = [sum(0.8**k for k in range(n)) for n in (6, 2)]
    assert float(deep.loss) * total[0] == pytest.approx(float(shallow.loss) * total[1], rel=1e-6)
    assert deep.metrics["top1_3"] == (0.0, 0.0)


def test_dropped_samples_are_not_supervised():
    arch = make_arch()
    runtime = make_runtime(arch, Eagle3DraftConfig(enabled=True, ttt_steps=3))
    docs = make_documents(["00111", "001111"], arch)
    want = run_step(runtime, docs[:1], [[0]])
    batch = to_batch(docs)
    batch["sample_mask"] = torch.tensor([1.0, 0.0])
    runtime.module.zero_grad()
    runtime.begin_global_batch(batch, step=0, dp_group=None, policy_model=StubPolicy())
    mb = to_microbatch(batch, [0, 1])
    out = runtime.loss(mb, give_features(runtime, mb, docs))
    assert float(out.loss) == pytest.approx(float(want.loss), rel=1e-6)


def test_the_batch_is_not_modified(canonical):
    runtime, docs, _ = canonical
    batch = to_batch(docs)
    runtime.begin_global_batch(batch, step=0, dp_group=None, policy_model=StubPolicy())
    mb = to_microbatch(batch, [0, 1, 2, 3, 4])
    logits = give_features(runtime, mb, docs)
    copies = [mb.input_ids.clone(), mb.position_ids.clone(), mb.doc_ids.clone(), logits.clone()]
    runtime.loss(mb, logits).loss.backward()
    for now, before in zip((mb.input_ids, mb.position_ids, mb.doc_ids, logits), copies, strict=True):
        assert torch.equal(now, before)
