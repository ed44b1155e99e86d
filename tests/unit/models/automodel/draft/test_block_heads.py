"""The heads of DSpark and Domino: alignment, left to right as the engine goes, terms, curriculum, metrics, sharding."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from nemo_rl.models.automodel.draft.domino import base_share
from nemo_rl.models.automodel.draft.dspark import confidence_metrics
from nemo_rl.models.automodel.draft.metrics import expected_acceptance_length, expected_calibration_error
from nemo_rl.models.automodel.draft.models import domino as domino_module
from nemo_rl.models.automodel.draft.models import dspark as dspark_module
from nemo_rl.models.automodel.draft.models.domino import PrefixGRU
from nemo_rl.models.automodel.draft.models.dspark import MarkovHead
from tests.unit.models.automodel.draft.block_head_reference import domino_correction, gru_step, markov_bias
from tests.unit.models.automodel.draft.block_reference import NaiveBlocks
from tests.unit.models.automodel.draft.helpers import (
    VOCAB,
    StubPolicy,
    give_features,
    make_documents,
    run_step,
    to_batch,
    to_microbatch,
)
from tests.unit.models.automodel.draft.reference import F64, Document
from tests.unit.models.automodel.draft.scenarios import draft_step
from tests.unit.models.automodel.draft.test_block_heads_reference import MASKS, domino_runtime, dspark_runtime

EVERYONE = [[0, 1, 2, 3, 4]]
DSPARK = {
    "vanilla": {"markov_head_type": "vanilla"},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "fill_in": {"sample_from_anchor": False, "markov_head_type": "gated", "block_size": 5},
}
DOMINO = {"domino": {}, "domino_unshifted": {"shift_label": False, "pure_draft_prefix_len": 0}}


def make(kind: str, **settings: Any) -> Any:
    """The runtime of one of these kinds."""
    if kind in DSPARK:
        return dspark_runtime(DSPARK[kind], **settings)
    return domino_runtime(DOMINO[kind], **settings)


@dataclasses.dataclass
class Seen:
    """What the loss of a micro-batch was given."""

    plan: Any = None
    anchors: Tensor | None = None
    logits: Tensor | None = None


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Watch a runtime: `seen(runtime)` is filled by its next step."""
    record = Seen()

    def spy(real: Any) -> Any:
        def wrapper(hidden: Tensor, head: Tensor, teacher: Tensor, *, correction: Any, **kw: Any) -> Any:
            record.logits = (hidden @ head.T + correction.latent @ correction.weight.T).detach()
            return real(hidden, head, teacher, correction=correction, **kw)

        return wrapper

    for module in (dspark_module, domino_module):
        monkeypatch.setattr(module, "block_loss", spy(module.block_loss))

    def watch(runtime: Any) -> Seen:
        inputs, extra = runtime._inputs, runtime._extra_metrics

        def remember(common: Any) -> Any:
            record.plan = common.plan
            return inputs(common)

        def places(plan: Any, table: Any, *args: Any) -> Any:
            record.anchors = table.places[table.slot]
            return extra(plan, table, *args)

        runtime._inputs, runtime._extra_metrics = remember, places
        return record

    return watch


# -- alignment -------------------------------------------------------------------------------------------------------


def test_six_token_table_of_the_recurrent_prefix(monkeypatch: pytest.MonkeyPatch, seen: Any) -> None:
    """Prompt x0 x1, response x2..x5, B = 3, shifted, P = 1: (a, j, tokens in the state, corrected, predicts)."""
    runtime = domino_runtime({"block_size": 3, "pure_draft_prefix_len": 1})
    doc = make_documents(["001111"], runtime.spec.architecture)[0]
    doc.tokens[:] = [0, 1, 2, 3, 4, 5]
    record, tokens, latents = seen(runtime), [], []
    gru = runtime.module.prefix_gru
    embedding = StubPolicy().embed.weight.detach()

    def note(module: Any, args: Any, out: Tensor) -> None:
        tokens.append([[int((embedding == e).all(-1).nonzero()) for e in block] for block in args[0]])

    gru.register_forward_hook(note)
    runtime.module.embed_proj[0].register_forward_hook(lambda m, a, out: latents.append(out))
    run_step(runtime, [doc], [[0]])
    plan, table = record.plan, tokens[0]
    bare = run_and_zero_correction(runtime, doc, record)
    got = []
    for e in range(plan.depth.numel()):
        a, j = int(record.anchors[e]), int(plan.depth[e]) + 1
        got.append((a, j, table[int(plan.block[e])][:j], bool(bare[e] > 1e-6), int(plan.labels[e])))
    assert sorted(got) == [
        (2, 1, [2], False, 3),
        (2, 2, [2, 3], True, 4),
        (2, 3, [2, 3, 4], True, 5),
        (3, 1, [3], False, 4),
        (3, 2, [3, 4], True, 5),
        (4, 1, [4], False, 5),
    ]


def run_and_zero_correction(runtime: Any, doc: Document, record: Seen) -> Tensor:
    """How much the correction moves each element's logits, [E]."""
    with_it = record.logits
    with torch.no_grad():
        runtime.module.embed_proj[2].weight.zero_()
    run_step(runtime, [doc], [[0]])
    return (with_it - record.logits).abs().max(-1).values


def left_to_right(runtime: Any, doc: Document, anchor: int) -> tuple[list[int], Tensor]:
    """Greedy proposals behind an anchor as the engine makes them: each token is fed to the head before the next."""
    arch, policy = runtime.spec.architecture, StubPolicy()
    draft = NaiveBlocks(dict(runtime.module.named_parameters()), arch)
    w = {name: t.detach() for name, t in draft.w.items()}
    states = draft.states(doc, anchor, policy.embed.weight.detach())
    head = policy.head.weight.detach().to(F64)
    chosen, rows, previous = [], [], doc.tokens[anchor]
    is_domino = hasattr(arch, "gru_hidden_dim")
    memory = torch.zeros(arch.gru_hidden_dim if is_domino else arch.markov_rank, dtype=F64)
    for j in range(1, arch.num_predicted + 1):
        s = states[j - 1 + arch.first_slot].detach()
        logits = head @ s
        if is_domino:
            memory = gru_step(w, policy.embed.weight.detach()[previous].to(F64), memory)
            logits = logits + (domino_correction(w, s, memory) if j > arch.pure_draft_prefix_len else 0.0)
        else:
            bias, memory = markov_bias(w, arch.markov_head_type, s, previous, memory)
            logits = logits + bias
        previous = int(logits.argmax())
        chosen.append(previous)
        rows.append(logits)
    return chosen, torch.stack(rows)


@pytest.mark.parametrize("kind", [*DSPARK, *DOMINO])
def test_the_block_forward_on_its_own_choices_is_the_left_to_right_run(kind: str, seen: Any) -> None:
    runtime = make(kind)
    arch, record = runtime.spec.architecture, seen(runtime)
    name = "embed_proj.2.weight" if "domino" in kind else "markov_head.markov_w2.weight"
    with torch.no_grad():  # so that a choice matters for the next ones
        runtime.module.get_parameter(name).mul_(4)
    chains = set()
    for seed in range(6):
        anchor = 3 + seed
        doc = make_documents(["0" * anchor + "1" * (arch.num_predicted + 1)], arch, seed=seed)[0]
        chosen, want = left_to_right(runtime, doc, anchor)
        doc.tokens[anchor + 1 :] = chosen
        run_step(runtime, [doc], [[0]])
        own = record.anchors == anchor
        order = record.plan.depth[own].argsort()
        got = record.logits[own][order]
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)
        assert got.argmax(-1).tolist() == chosen
        chains.add(tuple(chosen))
    assert len(chains) > 2, "a constant chain would hide an error"


@pytest.mark.parametrize("kind", [*DSPARK, *DOMINO])
def test_a_token_reaches_only_the_predictions_behind_it(kind: str, seen: Any) -> None:
    """The vanilla and gated heads read the token before, the recurrent ones all before; the fill-in slots see none."""
    runtime = make(kind)
    arch, record, anchor = runtime.spec.architecture, seen(runtime), 4
    doc = make_documents(["0" * anchor + "1" * (arch.num_predicted + 1)], arch)[0]

    def logits() -> Tensor:
        run_step(runtime, [doc], [[0]])
        own = record.anchors == anchor
        return record.logits[own][record.plan.depth[own].argsort()]

    before = logits()
    doc.tokens[anchor + 1] = (doc.tokens[anchor + 1] + 1) % VOCAB
    moved = ((logits() - before).abs().max(-1).values > 1e-6).tolist()
    is_recurrent = kind not in ("vanilla", "gated", "fill_in")
    assert moved == [False, True, *[is_recurrent] * (arch.num_predicted - 2)]


def test_gru_equals_torchs() -> None:
    torch.manual_seed(0)
    theirs = torch.nn.GRU(6, 5, bias=False, batch_first=True)
    ours = PrefixGRU(6, 5)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 4, 6)
    upstream = torch.randn(3, 4, 5)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    (ours(a) * upstream).sum().backward()
    (theirs(b)[0] * upstream).sum().backward()
    torch.testing.assert_close(ours(x), theirs(x)[0])
    torch.testing.assert_close(a.grad, b.grad)
    for name, p in theirs.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name).grad, p.grad)


def test_recurrent_states_are_fp32_in_a_bf16_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    gru, lerp, dtypes = PrefixGRU(8, 32), torch.lerp, []
    markov = MarkovHead(dspark_runtime({"markov_head_type": "rnn"}).spec.architecture)
    monkeypatch.setattr(torch, "lerp", lambda *args: dtypes.append(args[0].dtype) or lerp(*args))
    x = torch.randn(64, 16, 8).bfloat16()
    with torch.no_grad():
        for p in gru.parameters():
            p.copy_((torch.randn(p.shape) * p.shape[-1] ** -0.5).bfloat16())
        want, got = gru(x.float()), gru.bfloat16()(x)
        latents = markov.bfloat16().unroll(torch.randn(2, 16, 12).bfloat16(), torch.randn(2, 16, 5).bfloat16())
    assert got.dtype == latents.dtype == torch.bfloat16
    assert dtypes == [torch.float32] * 48
    # 16 steps; 1.1e-3 with states in bf16.
    assert float((got.float() - want).abs().mean()) < 8e-4


# -- terms -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["vanilla", "rnn"])
def test_without_weight_the_confidence_head_changes_no_other_gradient(kind: str) -> None:
    def step(has_head: bool, **settings: Any) -> Any:
        runtime = dspark_runtime({"markov_head_type": kind, "enable_confidence_head": has_head}, **settings)
        return run_step(runtime, make_documents(MASKS, runtime.spec.architecture), EVERYONE)

    bare = step(False)
    assert not any(name.startswith("conf") for name in bare.metrics)
    unweighted, detached, full = step(True, confidence_loss_weight=0.0), step(True, confidence_detach=True), step(True)
    for name, grad in bare.grads.items():
        assert torch.equal(unweighted.grads[name], grad), name
        assert torch.equal(detached.grads[name], grad), name
    assert float(unweighted.loss) == float(bare.loss)
    for name in ("confidence_head.proj.weight", "confidence_head.proj.bias"):
        assert not unweighted.grads[name].any()
        torch.testing.assert_close(detached.grads[name], full.grads[name])
    for name in ("fc.weight", "markov_head.markov_w1.weight"):
        assert not torch.allclose(full.grads[name], bare.grads[name], rtol=1e-2), name
    # Nothing is computed that is not logged, and what has no weight is still measured.
    assert unweighted.metrics["conf_bias_1"] == full.metrics["conf_bias_1"]


def test_terms_that_are_off_are_not_computed() -> None:
    runtime = dspark_runtime(l1_loss_weight=0.0)
    got = run_step(runtime, make_documents(MASKS, runtime.spec.architecture), EVERYONE)
    assert "loss_l1" not in got.metrics
    assert {"loss_ce", "loss_confidence"} < got.metrics.keys()


@pytest.mark.parametrize("kind", [*DSPARK, *DOMINO])
@pytest.mark.parametrize("options", [{"mode": "packed", "multiple": 16}, {"padding": float("nan"), "multiple": 32}])
def test_splits_packing_and_padding_do_not_matter(kind: str, options: dict[str, Any]) -> None:
    settings = {} if kind in DSPARK else {"base_loss_steps": 10**9}
    runtime = make(kind, num_anchors=3, **settings)
    docs = make_documents(MASKS, runtime.spec.architecture)
    want = run_step(runtime, docs, EVERYONE)
    got = run_step(runtime, docs, [[4, 2], [0, 3, 1]], **options)
    assert float(got.loss) == pytest.approx(float(want.loss), rel=1e-5)
    for name, grad in want.grads.items():
        torch.testing.assert_close(got.grads[name], grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    assert got.metrics.keys() == want.metrics.keys()
    for name, pair in want.metrics.items():
        assert got.metrics[name] == pytest.approx(pair, rel=1e-5, abs=1e-5), name


@pytest.mark.parametrize("kind", [*DSPARK, *DOMINO])
def test_nothing_to_learn_is_a_zero_for_every_parameter(kind: str) -> None:
    runtime = make(kind)
    for masks in (["00000"], ["1"], ["0001", "01"]):
        got = run_step(runtime, make_documents(masks, runtime.spec.architecture), [list(range(len(masks)))])
        assert float(got.loss) == 0.0
        assert got.grads.keys() == {n for n, _ in runtime.module.named_parameters()}
        assert not any(g.any() for g in got.grads.values())


# -- curriculum ------------------------------------------------------------------------------------------------------


def test_the_share_of_the_uncorrected_logits_falls_linearly() -> None:
    assert [base_share(n, start=1.0, steps=4) for n in range(6)] == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    assert base_share(1, start=0.5, steps=4) == 0.375


def test_the_curriculum_counts_updates_and_survives_a_resume() -> None:
    def runtime() -> Any:
        return domino_runtime(base_loss_weight=1.0, base_loss_steps=4)

    first = runtime()
    docs = make_documents(MASKS, first.spec.architecture)

    def share(of: Any, groups: Any) -> float:
        num, den = run_step(of, docs, groups).metrics["lambda_base"]
        assert num / den == pytest.approx(of.base_share)
        return num / den

    # Micro-batches of one update, also those without anything to learn, share one value.
    assert share(first, [[0], [1], [2], [3, 4]]) == 1.0
    assert share(first, EVERYONE) == 0.75
    resumed = runtime()
    resumed.load_state_dict(first.state_dict())
    assert [share(resumed, EVERYONE) for _ in range(3)] == [0.5, 0.25, 0.0]
    assert share(runtime(), EVERYONE) == 1.0


def test_a_loaded_draft_starts_on_the_corrected_logits() -> None:
    for source, share in (("scratch", 1.0), ("directory", 0.0)):
        runtime = domino_runtime(base_loss_weight=None)
        runtime.spec = dataclasses.replace(runtime.spec, source=source)
        assert runtime.base_share == share


# -- metrics ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["vanilla", "fill_in", "domino", "domino_unshifted"])
def test_a_perfect_draft_has_every_token_accepted_and_a_wrong_one_none(kind: str, seen: Any) -> None:
    runtime = make(kind, num_anchors=1)
    arch, record = runtime.spec.architecture, seen(runtime)
    k = arch.num_predicted
    doc = make_documents(["0" * 4 + "1" * (k + 1)], arch)[0]
    runtime._seed = next(s for s in range(99) if _anchor(runtime, doc, seed=s) == 4)
    run_step(runtime, [doc], [[0]])
    assert record.plan.depth.tolist() == list(range(k))
    for e in range(k):
        doc.logits[4 + e] = record.logits[e]
    perfect = run_step(runtime, [doc], [[0]]).metrics
    assert expected_acceptance_length(perfect, "overlap") == pytest.approx(1 + k, rel=1e-5)
    assert expected_acceptance_length(perfect, "hit") == 1 + k
    for e in range(k):
        doc.logits[4 + e, int(record.logits[e].argmax())] = -1e4
    wrong = run_step(runtime, [doc], [[0]]).metrics
    for variant in ("greedy", "hit"):
        assert expected_acceptance_length(wrong, variant) == pytest.approx(1.0)


def _anchor(runtime: Any, doc: Document, *, seed: int) -> int:
    runtime._seed = seed
    run_step(runtime, [doc], [[0]])
    return int(runtime._draws[0].anchors)


def test_calibrated_confidence_has_no_bias_and_a_boastful_one_has() -> None:
    runtime = dspark_runtime()
    tables = []
    extra = runtime._extra_metrics
    runtime._extra_metrics = lambda plan, table, *args: tables.append(table) or extra(plan, table, *args)
    got = run_step(runtime, make_documents(MASKS, runtime.spec.architecture), EVERYONE)
    table = tables[0]
    target = torch.rand(table.slot.shape, generator=torch.Generator().manual_seed(0))
    good = confidence_metrics(table, target, target)
    names = [n for n in good if n.startswith("conf") and "bin" not in n]
    assert {n.rsplit("_", 1)[0] for n in names} == {"conf_abs_err", "conf_bias", "conf_brier", "conf_prefix_bias"}
    assert all(float(good[n][0]) == 0.0 for n in names)
    assert expected_calibration_error(good) == pytest.approx(0.0, abs=1e-6)
    boastful = confidence_metrics(table, torch.ones_like(target), target)
    gap = float(1.0 - target.mean())
    assert expected_calibration_error(boastful) == pytest.approx(gap, rel=1e-5)
    assert float(boastful["conf_bin_9"][1]) == target.numel()
    total = sum(float(boastful[f"conf_bias_{j}"][0]) for j in range(1, 5))
    assert total == pytest.approx(gap * target.numel(), rel=1e-5)
    assert expected_calibration_error(got.metrics) > 0.05
    assert expected_calibration_error({}) is None


def test_calibration_error_of_the_worked_example() -> None:
    metrics = {f"conf_bin_{i}": (0.0, 0.0) for i in range(10)} | {f"conf_bin_target_{i}": (0.0, 0.0) for i in range(10)}
    metrics |= {"conf_bin_2": (0.7, 3.0), "conf_bin_target_2": (1.0, 3.0)}
    metrics |= {"conf_bin_9": (0.9, 1.0), "conf_bin_target_9": (0.9, 1.0)}
    assert expected_calibration_error(metrics) == pytest.approx(0.075)


# -- sharding --------------------------------------------------------------------------------------------------------


def _dtypes_in_the_forward() -> dict[str, torch.dtype]:
    """Weights that a bf16 draft computes with, on a mesh of one rank."""
    runtime = dspark_runtime()
    runtime._dtype = torch.bfloat16
    runtime.parallelize(init_device_mesh("cpu", (1,)))
    found: dict[str, torch.dtype] = {}
    module = runtime.module
    for name, part in (("confidence", module.confidence_head.proj), ("fc", module.fc)):
        part.register_forward_pre_hook(lambda m, args, name=name: found.__setitem__(name, m.weight.dtype))
    docs = make_documents(MASKS, runtime.spec.architecture)
    run_step(runtime, docs, EVERYONE)
    # Saved between a forward and its backward.
    mb = to_microbatch(to_batch(docs), EVERYONE[0])
    runtime.loss(mb, give_features(runtime, mb, docs))
    state = runtime.state_dict()
    assert all(isinstance(state[name], DTensor) for name, _ in module.named_parameters())
    return found


def test_the_confidence_head_computes_in_fp32(draft_pools: Any) -> None:
    found = draft_pools[1].run(_dtypes_in_the_forward)[0]
    assert found == {"confidence": torch.float32, "fc": torch.bfloat16}


def test_bf16_runs_publish_the_confidence_head_in_fp32(draft_pools: Any, draft_policy_dir: str) -> None:
    want = draft_pools[1].run(draft_step, draft_policy_dir, algo="dspark", shard=False)[0]
    for got in draft_pools[2].run(draft_step, draft_policy_dir, algo="dspark", dtype="bfloat16"):
        assert got["loss"] == pytest.approx(want["loss"], rel=2e-2)
        wide = {n for n, t in got["published"].items() if t.dtype == torch.float32}
        assert wide == {"draft.confidence_head.proj.weight", "draft.confidence_head.proj.bias"}
        assert {t.dtype for t in got["published"].values()} == {torch.float32, torch.bfloat16}


@pytest.mark.parametrize("detach", [False, True])
def test_ranks_without_supervision_reduce_in_the_same_order(
    draft_pools: Any, draft_policy_dir: str, detach: bool
) -> None:
    """The confidence head is sharded on its own, so both ranks must agree on when its gradient is reduced."""
    options = {"algo": "dspark", "masked": (4, 5, 6, 7), "settings": {"confidence_detach": detach}}
    want = draft_pools[1].run(draft_step, draft_policy_dir, shard=False, **options)[0]
    for got in draft_pools[2].run(draft_step, draft_policy_dir, **options):
        for name, grad in want["grads"].items():
            torch.testing.assert_close(got["grads"][name], grad, rtol=2e-4, atol=2e-6, msg=lambda m, n=name: n + m)
