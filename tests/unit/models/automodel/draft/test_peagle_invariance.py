"""P-EAGLE: split invariance, segments, isolation, edge cases, memory, on one process."""

from __future__ import annotations

import json

import pytest
import torch

from tests.unit.models.automodel.draft.helpers import (
    give_features,
    make_documents,
    run_step,
    to_batch,
    to_microbatch,
)
from tests.unit.models.automodel.draft.peagle_reference import make_arch, make_runtime
from tests.unit.models.automodel.draft.test_peagle_reference import module_logits

MASKS = ["0011111", "001111111111", "000110111", "00000", "0111111111"]
ALL = [0, 1, 2, 3, 4]


def _assert_same(got, want, *, rel=1e-5, grad_rel=1e-4):
    assert float(got.loss) == pytest.approx(float(want.loss), rel=rel)
    assert got.grads.keys() == want.grads.keys()
    for name, grad in want.grads.items():
        scale = float(grad.abs().max())
        error = float((got.grads[name] - grad).abs().max())
        assert error <= grad_rel * scale, f"{name}: off by {error}, largest entry {scale}"
    for name, (num, den) in want.metrics.items():
        assert got.metrics[name] == (pytest.approx(num, rel=rel, abs=1e-5), pytest.approx(den, rel=rel)), name


@pytest.fixture(scope="module")
def canonical():
    arch = make_arch()
    runtime = make_runtime(arch)
    docs = make_documents(MASKS, arch)
    return runtime, docs, run_step(runtime, docs, [ALL])


@pytest.mark.parametrize(
    ("groups", "options"),
    [
        ([[0], [1], [2], [3], [4]], {}),
        ([[0, 1], [2, 3], [4]], {}),
        ([[3], [4, 0], [1, 2]], {}),
        ([ALL], {"multiple": 32}),
        ([ALL], {"mode": "packed"}),
        ([[4, 2, 0, 3, 1]], {"mode": "packed", "multiple": 16}),
        ([[3, 1, 4], [2, 0]], {"mode": "packed"}),
    ],
    ids=["one_by_one", "pairs", "reordered", "wide_padding", "packed", "packed_reordered", "packed_split"],
)
def test_every_split_gives_the_same_step(canonical, groups, options):
    runtime, docs, want = canonical
    _assert_same(run_step(runtime, docs, groups, **options), want)


@pytest.mark.parametrize("parts", [2, 3, 5])
@pytest.mark.parametrize("options", [{}, {"mode": "packed"}], ids=["rows", "packed"])
def test_segments_change_nothing(canonical, parts, options):
    runtime, docs, _ = canonical
    want = run_step(runtime, docs, [ALL], **options)
    got = run_step(make_runtime(runtime.spec.architecture, num_segments=parts), docs, [ALL], **options)
    _assert_same(got, want, rel=1e-6, grad_rel=1e-6)


@pytest.mark.parametrize("num_layers", [1, 3])
def test_segments_are_exact(num_layers):
    """In fp64 nothing but the order of sums is left, down to segments of one row."""
    arch = make_arch(num_hidden_layers=num_layers)
    docs = make_documents(MASKS, arch)
    results = []
    for parts in (1, 2, 3, 5, 1000):
        runtime = make_runtime(arch, num_segments=parts)
        runtime.module.double()
        results.append(run_step(runtime, docs, [ALL]))
    for got in results[1:]:
        assert got.loss.dtype == torch.float64
        _assert_same(got, results[0], rel=1e-12, grad_rel=1e-12)


@pytest.mark.parametrize("chunk", [1, 7, 10_000])
def test_chunk_size_does_not_matter(canonical, chunk):
    runtime, docs, want = canonical
    other = make_runtime(runtime.spec.architecture, loss_chunk_size=chunk)
    _assert_same(run_step(other, docs, [ALL]), want)


@pytest.mark.parametrize("mode", ["fixed", "packed"])
def test_nan_in_padding_is_harmless(canonical, mode):
    runtime, docs, want = canonical
    _assert_same(run_step(runtime, docs, [ALL], mode=mode, multiple=16, padding=float("nan")), want)


@pytest.mark.parametrize("num_segments", [1, 3])
def test_a_document_does_not_see_its_neighbours(canonical, num_segments):
    runtime = make_runtime(canonical[0].spec.architecture, num_segments=num_segments)
    docs = canonical[1]
    others = make_documents(MASKS, runtime.spec.architecture, seed=99)
    changed = [docs[i] if i == 2 else other for i, other in enumerate(others)]
    before = module_logits(runtime, docs, [[0, 2, 4]], mode="packed")
    after = module_logits(runtime, changed, [[0, 2, 4]], mode="packed")
    assert before.keys() == after.keys()
    own = [e for e in before if e[0] == 2]
    assert own
    assert all(torch.equal(before[e], after[e]) for e in own)
    assert not any(torch.equal(before[e], after[e]) for e in before if e[0] != 2)


@pytest.mark.parametrize(
    "masks", [["0"], ["1"], ["01"], ["11"], ["000", "00"], ["001"], ["0", "01", "0001"]], ids=lambda m: "_".join(m)
)
@pytest.mark.parametrize("mode", ["fixed", "packed"])
def test_inputs_without_a_chain_give_zero_gradients(masks, mode):
    arch = make_arch()
    runtime = make_runtime(arch, num_segments=2)
    got = run_step(runtime, make_documents(masks, arch), [list(range(len(masks)))], mode=mode)
    assert float(got.loss) == 0.0
    assert set(got.grads) == {n for n, _ in runtime.module.named_parameters()}
    assert all(bool((g == 0).all()) for g in got.grads.values())
    assert got.metrics["documents_without_chain"] == (len(masks), len(masks))


@pytest.mark.parametrize("masks", [["011"], ["0011"], ["0011", "00"], ["0110110"]], ids=lambda m: "_".join(m))
@pytest.mark.parametrize("num_segments", [1, 2])
def test_every_parameter_has_a_gradient_without_a_deeper_element(masks, num_segments):
    """Sharded ranks reduce the same set of gradients, whatever their samples are."""
    arch = make_arch()
    runtime = make_runtime(arch, num_segments=num_segments)
    docs = make_documents(masks, arch)
    got = run_step(runtime, docs, [list(range(len(docs)))])
    assert got.metrics["top1_1"][1] > 0
    assert got.metrics["top1_2"][1] == 0
    assert set(got.grads) == {n for n, _ in runtime.module.named_parameters()}
    assert bool((got.grads["mask_hidden"] == 0).all())
    assert bool((got.grads["embed_tokens.weight"][arch.mask_token_id] == 0).all())
    assert float(got.grads["fc.weight"].abs().max()) > 0


def test_the_placeholder_is_trained(canonical):
    runtime, docs, want = canonical
    mask = runtime.spec.architecture.mask_token_id
    assert float(want.grads["mask_hidden"].abs().min()) > 0
    assert float(want.grads["embed_tokens.weight"][mask].abs().max()) > 0
    read = {t for d in docs for t in d.tokens} | {mask}
    for token in range(runtime.spec.architecture.vocab_size):
        if token not in read:
            assert bool((want.grads["embed_tokens.weight"][token] == 0).all())


def test_dropped_samples_are_not_supervised(canonical):
    runtime, docs, _ = canonical
    want = run_step(runtime, docs[:1], [[0]])
    batch = to_batch(docs[:2])
    batch["sample_mask"] = torch.tensor([1.0, 0.0])
    runtime.begin_global_batch(batch, step=0, dp_group=None, policy_model=torch.nn.Module())
    mb = to_microbatch(batch, [0, 1])
    out = runtime.loss(mb, give_features(runtime, mb, docs))
    assert float(out.loss.detach()) == pytest.approx(float(want.loss), rel=1e-6)


def test_the_policy_gets_no_gradient(canonical):
    runtime, docs, _ = canonical
    batch = to_batch(docs)
    runtime.begin_global_batch(batch, step=0, dp_group=None, policy_model=torch.nn.Module())
    mb = to_microbatch(batch, ALL)
    logits = give_features(runtime, mb, docs).requires_grad_()
    copies = [t.clone() for t in (mb.input_ids, mb.position_ids, mb.doc_ids, logits.detach())]
    runtime.loss(mb, logits).loss.backward()
    assert logits.grad is None
    for now, before in zip((mb.input_ids, mb.position_ids, mb.doc_ids, logits.detach()), copies, strict=True):
        assert torch.equal(now, before)


def test_positions_do_not_change_with_the_dtype_of_the_module():
    """RoPE tables stay fp32 when everything else is bfloat16, and are no part of the state."""
    arch = make_arch(head_dim=64, rope={"rope_type": "default", "rope_theta": 1e6})
    module = make_runtime(arch).module
    fresh = 1.0 / (1e6 ** (torch.arange(0, 64, 2).float() / 64))
    module.to(torch.bfloat16)
    assert module.rope.inv_freq.dtype == torch.float32
    assert torch.equal(module.rope.inv_freq, fresh)
    assert not any("inv_freq" in name for name in module.state_dict())


def test_segments_bound_the_memory(tmp_path):
    """Bytes live at once during forward and backward, counted by the allocator."""
    arch = make_arch(hidden_size=64, target_hidden_size=64, intermediate_size=256, num_depths=6)
    docs = make_documents(["0" + "1" * 150], arch)

    def peak(parts):
        runtime = make_runtime(arch, num_segments=parts, down_sample_ratio=1.0)
        run_step(runtime, docs, [[0]])
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as trace:
            run_step(runtime, docs, [[0]])
        path = tmp_path / f"{parts}.json"
        trace.export_chrome_trace(str(path))
        changes = [e for e in json.loads(path.read_text())["traceEvents"] if e["name"] == "[memory]"]
        changes.sort(key=lambda e: e["ts"])
        live = torch.tensor([e["args"]["Bytes"] for e in changes]).cumsum(0)
        return int(live.max())

    whole, parts = peak(1), peak(4)
    assert parts < whole / 2.5, (whole, parts)
