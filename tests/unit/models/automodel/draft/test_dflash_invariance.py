"""What a block may depend on; how a step is cut into micro-batches when only some anchors are drawn."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from nemo_rl.models.automodel.data import zero_weight_sample
from nemo_rl.models.automodel.draft.block import charged_anchors, plan_blocks
from nemo_rl.models.automodel.draft.dflash import DFlashRuntime
from nemo_rl.models.automodel.draft.models.dflash import DFlashInputs
from tests.unit.models.automodel.draft.block_helpers import (
    MASK,
    PERMUTED_IDS,
    make_block_arch,
    make_block_module,
    make_block_runtime,
)
from tests.unit.models.automodel.draft.helpers import (
    StubPolicy,
    give_features,
    make_documents,
    run_step,
    to_batch,
    to_microbatch,
)

MASKS = ["00111111111", "00111", "000110111111", "00000", "0111111111"]
GROUPS = [[0, 1, 2, 3, 4]]


def _assert_same(got, want, *, rel=1e-5):
    assert float(got.loss) == pytest.approx(float(want.loss), rel=rel)
    for name, grad in want.grads.items():
        torch.testing.assert_close(got.grads[name], grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    assert got.metrics.keys() == want.metrics.keys()
    for name, (num, den) in want.metrics.items():
        assert got.metrics[name] == (pytest.approx(num, rel=rel, abs=1e-5), pytest.approx(den, rel=rel)), name


@pytest.fixture(scope="module", params=["full_vocabulary", "reduced_vocabulary"])
def canonical(request):
    reduced = request.param == "reduced_vocabulary"
    arch = make_block_arch(**({"draft_vocab_size": 9} if reduced else {}))
    runtime = make_block_runtime(arch, ids=PERMUTED_IDS if reduced else None, num_anchors=3)
    docs = make_documents(MASKS, arch)
    want = run_step(runtime, docs, GROUPS)
    # Some documents have more candidates than anchors, one has fewer.
    assert [(d.is_complete, d.anchors.numel()) for d in runtime._draws.values()] == [
        (False, 3), (True, 2), (False, 3), (True, 0), (False, 3)
    ]  # fmt: skip
    return runtime, docs, want


@pytest.mark.parametrize(
    ("groups", "options"),
    [
        ([[0], [1], [2], [3], [4]], {}),
        ([[3], [4, 0], [1, 2]], {"multiple": 32}),
        ([[4, 2, 0, 3, 1]], {"mode": "packed", "multiple": 16}),
        ([[3, 1, 4], [2, 0]], {"mode": "packed"}),
        (GROUPS, {"mode": "packed", "padding": float("nan")}),
        (GROUPS, {"multiple": 16, "padding": float("nan")}),
    ],
    ids=["one_by_one", "reordered", "packed_reordered", "packed_split", "nan_packed", "nan"],
)
def test_every_split_draws_the_same_anchors_and_gives_the_same_step(canonical, groups, options):
    runtime, docs, want = canonical
    _assert_same(run_step(runtime, docs, groups, **options), want)


def test_the_order_of_the_batch_does_not_matter(canonical):
    runtime, docs, want = canonical
    order = [3, 0, 4, 2, 1]
    runtime.module.zero_grad(set_to_none=True)
    batch = to_batch(docs).select_indices(order)
    runtime.begin_global_batch(batch, step=0, dp_group=None, policy_model=StubPolicy())
    mb = to_microbatch(batch, GROUPS[0])
    out = runtime.loss(mb, give_features(runtime, mb, docs))
    out.loss.backward()
    assert float(out.loss.detach()) == pytest.approx(float(want.loss), rel=1e-5)
    for name, p in runtime.module.named_parameters():
        torch.testing.assert_close(p.grad, want.grads[name], rtol=1e-4, atol=1e-6)


def test_another_step_draws_other_anchors(canonical):
    runtime, docs, want = canonical
    runtime.begin_global_batch(to_batch(docs), step=1, dp_group=None, policy_model=StubPolicy())
    mb = to_microbatch(to_batch(docs), GROUPS[0])
    got = runtime.loss(mb, give_features(runtime, mb, docs)).loss.detach()
    assert float(got) != pytest.approx(float(want.loss), rel=1e-4)


def test_a_zero_weight_microbatch_adds_nothing(canonical):
    runtime, docs, _ = canonical
    runtime.module.zero_grad(set_to_none=True)
    batch = to_batch(docs)
    runtime.begin_global_batch(batch, step=0, dp_group=None, policy_model=StubPolicy())
    mb = to_microbatch(zero_weight_sample(batch), [0])
    out = runtime.loss(mb, give_features(runtime, mb, docs))
    out.loss.backward()
    assert float(out.loss.detach()) == 0.0
    assert all(p.grad is not None and not p.grad.any() for p in runtime.module.parameters())


def test_dropped_samples_are_not_supervised(canonical):
    runtime, docs, _ = canonical
    batch = to_batch(docs)
    batch["sample_mask"] = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0])
    runtime.begin_global_batch(batch, step=0, dp_group=None, policy_model=StubPolicy())
    mb = to_microbatch(batch, GROUPS[0])
    got = runtime.loss(mb, give_features(runtime, mb, docs))
    want = run_step(runtime, docs[:1], [[0]])
    assert float(got.loss.detach()) == pytest.approx(float(want.loss), rel=1e-6)
    assert float(got.metrics["anchors_used"][0]) == 3.0


# -- what a block sees -----------------------------------------------------------------------------------------------


class Row:
    """One packed row, the states of whose elements are computed directly."""

    def __init__(self, masks: list[str], *, drawn: list[int] | None = None, **changes) -> None:
        self.arch = make_block_arch(**changes)
        self.module = make_block_module(DFlashRuntime, self.arch)
        self.docs = make_documents(masks, self.arch)
        self.ids = torch.tensor([[t for d in self.docs for t in d.tokens]])
        self.features = torch.cat([d.features for d in self.docs])
        doc_ids = torch.tensor([[i for i, d in enumerate(self.docs) for _ in d.tokens]])
        self.charged = charged_anchors(
            torch.tensor([[s for d in self.docs for s in d.sampled]]), doc_ids, num_predicted=self.arch.num_predicted
        )
        if drawn is not None:
            kept = torch.zeros_like(self.charged[0])
            kept[0, drawn] = True
            self.charged = self.charged & kept
        self.layout = {"doc_ids": doc_ids, "position_ids": torch.cat([torch.arange(len(m)) for m in masks])[None]}

    def states(self) -> dict[tuple[int, int], torch.Tensor]:
        """(anchor, ordinal) to the state that the head reads."""
        rows = plan_blocks(
            input_ids=self.ids,
            charged=self.charged,
            is_complete=torch.ones(len(self.docs), dtype=torch.bool),
            arch=self.arch,
            chunk_size=1024,
            **self.layout,
        )
        inputs = DFlashInputs(
            plan=rows.plan,
            features=self.features[rows.feature_rows],
            embedding=StubPolicy().embed.weight.detach(),
            head=torch.zeros(0),
            teacher_logits=torch.zeros(0),
            weights=torch.zeros(0),
            vocab_ids=None,
            label="data",
        )
        with torch.no_grad():
            states = self.module.element_states(inputs)
        anchors = rows.table.places[rows.plan.block].tolist()
        return dict(zip(zip(anchors, (rows.plan.depth + 1).tolist(), strict=True), states, strict=True))


def test_a_block_sees_the_context_before_its_anchor_and_nothing_else():
    row = Row(["0011111111"])
    before = row.states()
    row.features[5:] += 1.0
    row.ids[0, 6:] = 1
    after = row.states()
    assert {key for key in before if torch.equal(before[key], after[key])} == {key for key in before if key[0] <= 5}


def test_documents_of_a_row_are_apart():
    row = Row(["00111111", "0111111"])
    before = row.states()
    row.features[8:] = float("nan")
    row.ids[0, 8:] = 3
    after = row.states()
    for key, state in before.items():
        assert torch.equal(state, after[key]) == (key[0] < 8)
    alone = Row(["00111111"]).states()
    for key, state in alone.items():
        torch.testing.assert_close(before[key], state, rtol=1e-5, atol=1e-6)


def test_blocks_do_not_depend_on_which_others_are_drawn():
    every = Row(["00" + "1" * 14]).states()
    some = Row(["00" + "1" * 14], drawn=[4, 9]).states()
    assert {a for a, _ in some} == {4, 9}
    for key, state in some.items():
        torch.testing.assert_close(state, every[key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_the_number_of_slots_is_part_of_the_task_unless_causal(causal):
    """Why the number of proposed tokens is tied to the block size."""
    short, long = (Row(["00" + "1" * 14], block_size=size, causal=causal).states() for size in (4, 8))
    change = max(float((short[key] - long[key]).abs().max()) for key in short)
    assert (change < 1e-5) if causal else (change > 0.05), change


def test_a_block_cut_by_the_document_keeps_all_its_slots():
    """The engine's block has them, whatever the document holds."""
    cut, whole = Row(["001111"]).states(), Row(["00111111"], drawn=[4])
    whole.ids[0, :6], whole.features[:6] = Row(["001111"]).ids[0], Row(["001111"]).features
    torch.testing.assert_close(cut[4, 1], whole.states()[4, 1], rtol=1e-5, atol=1e-6)
    assert (4, 2) not in cut


def test_the_last_layer_computes_the_predicting_slots_alone():
    row = Row(["00111111111111"])
    rows = {}
    for i, layer in enumerate(row.module.layers):
        layer.mlp.register_forward_hook(lambda m, args, out, i=i: rows.__setitem__(i, out.shape[0]))
    states = row.states()
    blocks = len({a for a, _ in states})
    assert rows == {0: blocks * row.arch.block_size, 1: len(states)}
    assert len(states) < blocks * (row.arch.block_size - 1), "blocks at the end predict less"


# -- the policy's head -----------------------------------------------------------------------------------------------


def test_a_reduced_vocabulary_follows_the_policys_head():
    """The loss uses the live rows, and every refit sends them; they are no parameter of the draft."""
    arch = make_block_arch(draft_vocab_size=9)
    runtime = make_block_runtime(arch, ids=PERMUTED_IDS)
    docs = make_documents(MASKS, arch)
    policy = StubPolicy()
    assert "lm_head.weight" not in dict(runtime.module.named_parameters())
    assert runtime.manifest()["lm_head.weight"].shape == (9, 12)

    def step():
        batch = to_batch(docs)
        runtime.begin_global_batch(batch, step=0, dp_group=None, policy_model=policy)
        mb = to_microbatch(batch, GROUPS[0])
        return float(runtime.loss(mb, give_features(runtime, mb, docs)).loss.detach())

    before = step()
    with torch.no_grad():
        policy.head.weight[PERMUTED_IDS] += 0.5 * torch.randn(9, 12, generator=torch.Generator().manual_seed(1))
    assert step() != pytest.approx(before, rel=1e-3)
    sent = dict(runtime.stream(policy))
    assert torch.equal(sent["draft.lm_head.weight"], policy.head.weight[PERMUTED_IDS])
    assert sent.keys() == {f"draft.{n}" for n, _ in runtime.module.named_parameters()} | {"draft.lm_head.weight"}
    assert policy.head.weight.grad is None
    assert policy.embed.weight.grad is None


def test_the_placeholder_is_the_policys_live_embedding_row():
    arch = make_block_arch()
    runtime, docs, policy = make_block_runtime(arch), make_documents(MASKS, arch), StubPolicy()
    for doc in docs:
        doc.tokens[:] = [t % MASK for t in doc.tokens]  # it occurs nowhere in the text

    def step():
        batch = to_batch(docs)
        runtime.begin_global_batch(batch, step=0, dp_group=None, policy_model=policy)
        mb = to_microbatch(batch, GROUPS[0])
        return float(runtime.loss(mb, give_features(runtime, mb, docs)).loss.detach())

    before = step()
    with torch.no_grad():
        policy.embed.weight[MASK] += 1.0
    assert step() != pytest.approx(before, rel=1e-3)


def test_plans_move_between_devices_whole():
    row = Row(["001111"])
    rows = plan_blocks(
        input_ids=row.ids, charged=row.charged, is_complete=torch.ones(1, dtype=torch.bool), arch=row.arch,
        chunk_size=2, **row.layout,
    )  # fmt: skip
    moved = rows.plan.to("meta")
    tensors = [v for v in vars(moved).values() if isinstance(v, torch.Tensor)]
    tensors += [moved.layout.stop_rows, moved.chunks.teacher_rows, moved.chunks.local_row]
    assert len(tensors) == len(dataclasses.fields(moved)) - 3 + 3
    assert all(t.device.type == "meta" for t in tensors)
