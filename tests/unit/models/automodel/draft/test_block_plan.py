"""Alignment and draws of block drafts: the six-token table, who is supervised, what is computed and what is not."""

from __future__ import annotations

import math

import pytest
import torch

from nemo_rl.models.automodel.draft.architecture import DSparkArchitecture
from nemo_rl.models.automodel.draft.block import charged_anchors, loss_decay, plan_blocks
from tests.unit.models.automodel.draft.block_helpers import make_block_arch, make_block_runtime
from tests.unit.models.automodel.draft.block_reference import candidates, chain
from tests.unit.models.automodel.draft.helpers import (
    StubPolicy,
    give_features,
    make_documents,
    run_step,
    to_batch,
    to_microbatch,
)

PLACEHOLDER = 22


def _plan(mask: str, *, arch=None, docs: str | None = None, anchors: list[int] | None = None):
    """Token ids are 100 + their place in the row; `anchors` restricts what was drawn."""
    arch = arch or make_block_arch()
    sampled = torch.tensor([[c == "1" for c in mask]])
    doc_ids = torch.tensor([[int(c) if c != "." else -1 for c in (docs or "0" * len(mask))]])
    positions = torch.zeros_like(doc_ids)
    for i in range(1, doc_ids.shape[1]):
        positions[0, i] = positions[0, i - 1] + 1 if doc_ids[0, i] == doc_ids[0, i - 1] else 0
    charged = charged_anchors(sampled, doc_ids, num_predicted=arch.num_predicted)
    if anchors is not None:
        drawn = torch.zeros_like(charged[0])
        drawn[0, anchors] = True
        charged = charged & drawn
    return plan_blocks(
        input_ids=torch.arange(len(mask))[None] + 100,
        position_ids=positions,
        doc_ids=doc_ids,
        charged=charged,
        is_complete=torch.ones(3, dtype=torch.bool),
        arch=arch,
        chunk_size=1024,
    )


def _elements(rows, first_slot: int):
    """(anchor, context, slot, token, position, teacher, predicts, previous) of each element."""
    plan, out = rows.plan, []
    size = plan.layout.block_size
    for e in range(plan.block.numel()):
        row = int(plan.element_rows[e])
        block, slot = divmod(row, size)
        assert block == int(plan.block[e])
        assert slot == int(plan.depth[e]) + first_slot
        (tile,) = (t for t in plan.layout.tiles if t.first_query <= row < t.stop_query)
        seen = rows.feature_rows[tile.first_row : int(plan.layout.stop_rows[row])].tolist()
        token = int(plan.slot_tokens[row])
        out.append(
            (
                int(plan.slot_tokens[block * size]) - 100,
                seen,
                slot,
                "mask" if token == PLACEHOLDER else token - 100,
                int(plan.slot_positions[row]),
                int(plan.chunks.teacher_rows[plan.chunks.local_row[e]]),
                int(plan.labels[e]) - 100,
                int(plan.previous[e]) - 100,
            )
        )
    return sorted(out, key=lambda r: (r[0], r[2]))


def test_six_token_table():
    """Prompt x0 x1, response x2..x5, B = 4."""
    rows = _plan("001111")
    assert _elements(rows, 1) == [
        (2, [0, 1], 1, "mask", 3, 2, 3, 2),
        (2, [0, 1], 2, "mask", 4, 3, 4, 3),
        (2, [0, 1], 3, "mask", 5, 4, 5, 4),
        (3, [0, 1, 2], 1, "mask", 4, 3, 4, 3),
        (3, [0, 1, 2], 2, "mask", 5, 4, 5, 4),
        (4, [0, 1, 2, 3], 1, "mask", 5, 4, 5, 4),
    ]
    plan = rows.plan
    # Slot 0 holds the anchor and predicts nothing; blocks that the document cuts off keep all slots.
    assert plan.slot_tokens.view(-1, 4).tolist() == [[100 + a, *[PLACEHOLDER] * 3] for a in (2, 3, 4)]
    assert plan.slot_positions.view(-1, 4).tolist() == [[2, 3, 4, 5], [3, 4, 5, 6], [4, 5, 6, 7]]
    assert rows.table.chains.tolist() == [[True] * 3, [True, True, False], [True, False, False]]
    # The context ends before the last anchor.
    assert rows.feature_rows.tolist() == plan.context_positions.tolist() == [0, 1, 2, 3]


def test_six_token_table_of_the_layout_that_predicts_from_the_anchor():
    arch = make_block_arch(
        DSparkArchitecture,
        block_size=3,
        sample_from_anchor=True,
        markov_rank=2,
        markov_head_type="vanilla",
        enable_confidence_head=False,
        confidence_head_with_markov=False,
    )
    assert _elements(_plan("001111", arch=arch), 0) == [
        (2, [0, 1], 0, 2, 2, 2, 3, 2),
        (2, [0, 1], 1, "mask", 3, 3, 4, 3),
        (2, [0, 1], 2, "mask", 4, 4, 5, 4),
        (3, [0, 1, 2], 0, 3, 3, 3, 4, 3),
        (3, [0, 1, 2], 1, "mask", 4, 4, 5, 4),
        (4, [0, 1, 2, 3], 0, 4, 4, 4, 5, 4),
    ]


@pytest.mark.parametrize(
    "mask", ["001111", "00110011", "0011011", "1111", "1", "11", "01", "011", "0000", "0111111111", "0001"]
)
def test_charged_anchors_are_those_of_the_definition(mask):
    doc = make_documents([mask], make_block_arch())[0]
    sampled = torch.tensor([doc.sampled])
    charged = charged_anchors(sampled, torch.zeros_like(sampled, dtype=torch.long), num_predicted=4)[:, 0]
    assert charged[0].nonzero().squeeze(1).tolist() == candidates(doc)
    lengths = charged.long().cumprod(0).sum(0)
    assert torch.equal(charged.sum(0), lengths), "ordinals without a gap"
    assert lengths.tolist() == [chain(doc, a, 4) if a in candidates(doc) else 0 for a in range(len(mask))]


def test_blocks_neither_cross_nor_see_other_documents():
    rows = _plan("0111" + "1111" + "0000", docs="0000" + "1111" + "..22")
    got = _elements(rows, 1)
    # The first token of document 1 is sampled and is no anchor: there is no feature before it.
    assert [r[0] for r in got] == [1, 1, 2, 5, 5, 6]
    assert {r[0]: (r[1], r[4] - r[2]) for r in got} == {1: ([0], 1), 2: ([0, 1], 2), 5: ([4], 1), 6: ([4, 5], 2)}
    assert [r[6] for r in got] == [2, 3, 3, 6, 7, 7]
    assert rows.feature_rows.tolist() == [0, 1, 4, 5]


def test_only_the_context_of_drawn_anchors_is_computed():
    rows = _plan("0" * 10 + "1" * 30, anchors=[14, 20])
    assert rows.feature_rows.tolist() == list(range(20))
    assert rows.plan.num_blocks == 2
    assert rows.plan.element_rows.numel() == 6
    assert _plan("0" * 10 + "1" * 30, anchors=[]) is None


def test_a_document_in_two_runs_is_refused():
    with pytest.raises(ValueError, match="one run"):
        _plan("111111111", docs="000111000")


def test_element_tables_go_to_blocks_and_back():
    plan = _plan("001111").plan
    values = torch.arange(12.0).view(6, 2).requires_grad_()
    table = plan.by_block(values)
    assert table.shape == (3, 3, 2)
    assert torch.equal(plan.of_elements(table), values)
    assert plan.by_block(plan.labels).tolist() == [[103, 104, 105], [104, 105, 0], [105, 0, 0]]
    table.sum().backward()
    assert torch.equal(values.grad, torch.ones(6, 2))


@pytest.mark.parametrize(("size", "decay"), [(2, 4.0), (9, 4.0), (10, 5.0), (15, 5.0), (16, 7.0), (32, 7.0)])
def test_usual_decay(size, decay):
    weights = loss_decay(size - 1, block_size=size, decay=None)
    assert weights.tolist() == pytest.approx([math.exp(-(k - 1) / decay) for k in range(1, size)])
    assert torch.equal(loss_decay(size - 1, block_size=size, decay=decay), weights)


# -- draws -----------------------------------------------------------------------------------------------------------

MASKS = ["00" + "1" * 12, "0" + "1" * 5, "000", "00001111011111", "00" + "1" * 12]


def _draws(order=(0, 1, 2, 3, 4), *, step=0, seed=0, num_anchors=3):
    runtime = make_block_runtime(make_block_arch(), num_anchors=num_anchors)
    runtime._seed = seed
    batch = to_batch(make_documents(MASKS, runtime.spec.architecture)).select_indices(list(order))
    runtime.begin_global_batch(batch, step=step, dp_group=None, policy_model=StubPolicy())
    return {n: d.anchors.tolist() for n, d in sorted(runtime._draws.items())}


def test_anchors_depend_on_seed_step_and_sample_alone():
    want = _draws()
    assert [len(a) for a in want.values()] == [3, 3, 0, 3, 3]
    assert want[0] != want[4], "documents alike draw apart"
    assert _draws((3, 1, 4, 0, 2)) == want
    # Another rank that holds other samples.
    assert _draws((2, 3, 4)) | _draws((0, 1)) == want
    assert _draws(step=1) != want
    assert _draws(seed=1) != want
    assert _draws(num_anchors=99) == {i: candidates(d) for i, d in enumerate(make_documents(MASKS, make_block_arch()))}


def test_rows_changed_after_planning_are_refused():
    runtime = make_block_runtime(make_block_arch())
    docs = make_documents(["00111", "0111"], runtime.spec.architecture)
    run_step(runtime, docs, [[0, 1]])
    docs[1].sampled[3] = False
    mb = to_microbatch(to_batch(docs), [0, 1])
    with pytest.raises(
        RuntimeError, match=r"sample 1: the micro-batch supervises \[1, 0, 0\].*planned with \[2, 1, 0\]"
    ):
        runtime.loss(mb, give_features(runtime, mb, docs))


def test_replay_follows_only_responses_whose_candidates_were_all_drawn():
    """Walking along a response needs what the draft proposes at every place."""
    arch = make_block_arch()
    docs = make_documents(MASKS, arch)
    assert "replayed_acceptance_length" not in run_step(make_block_runtime(arch, num_anchors=1), docs, [[0]]).metrics
    # Document 1 has four candidates, the others more.
    some = run_step(make_block_runtime(arch, num_anchors=4), docs, [[0, 1, 2, 3]]).metrics
    alone = run_step(make_block_runtime(arch, num_anchors=99), docs[1:2], [[0]]).metrics
    assert some["replayed_acceptance_length"] == alone["replayed_acceptance_length"]
    assert some["replayed_acceptance_length"][1] > 0
