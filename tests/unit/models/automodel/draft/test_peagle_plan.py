"""Alignment of P-EAGLE: the six-token table, which chains are drawn, what is computed, how it is cut into segments."""

from __future__ import annotations

import pytest
import torch

from nemo_rl.models.automodel.draft.peagle import _segment_begins, plan_chains
from nemo_rl.models.automodel.draft.runtime import charged_depths
from nemo_rl.models.automodel.draft.sampling import cod_caps
from nemo_rl.models.automodel.draft.trunk import TrunkRows, predicted_tokens
from tests.unit.models.automodel.draft.helpers import give_features, make_documents, run_step, to_batch, to_microbatch
from tests.unit.models.automodel.draft.peagle_reference import drawn_elements, make_arch, make_runtime
from tests.unit.models.automodel.draft.reference import is_charged


def _plan(mask, *, depths, docs=None, chosen=None, num_layers=2, num_segments=1):
    sampled = torch.tensor([[c == "1" for c in mask]])
    doc_ids = torch.tensor([[int(c) if c != "." else -1 for c in (docs or "0" * len(mask))]])
    positions = torch.zeros_like(doc_ids)
    for i in range(1, doc_ids.shape[1]):
        positions[0, i] = positions[0, i - 1] + 1 if doc_ids[0, i] == doc_ids[0, i - 1] else 0
    charged = charged_depths(sampled, doc_ids, depths=depths, mask_rule="contiguous")
    if chosen is not None:
        kept = torch.zeros_like(charged)
        for k, slots in enumerate(chosen):
            kept[k, 0, slots] = True
        chosen = kept & charged
    return plan_chains(
        input_ids=torch.arange(len(mask))[None] + 100,
        position_ids=positions,
        doc_ids=doc_ids,
        charged=charged,
        chosen=charged if chosen is None else chosen,
        num_layers=num_layers,
        num_segments=num_segments,
        chunk_size=1024,
        is_packed=False,
    )


def _table(rows):
    """(anchor, k, token, position, teacher, predicts) of each element; token None = the mask token."""
    plan, out = rows.plan, []
    order = [
        (segment.begin + int(row), k)
        for segment in plan.segments
        for k, n in enumerate(segment.num_active)
        for row in segment.active_rows[:n]
    ]
    for e in range(rows.table.depth.numel()):
        trunk_row, k = order[int(plan.element_rows[e])]
        assert k == int(rows.table.depth[e])
        assert int(rows.feature_rows[trunk_row]) == int(rows.table.places[rows.table.slot[e]])
        out.append(
            (
                int(rows.feature_rows[trunk_row]),
                k,
                None if k else int(plan.tokens[trunk_row]) - 100,
                int(plan.positions[trunk_row]) + k,
                int(plan.chunks.teacher_rows[plan.chunks.local_row[e]]),
                int(plan.labels[e]) - 100,
            )
        )
    return sorted(out)


@pytest.mark.parametrize("num_segments", [1, 2, 3])
def test_six_token_table(num_segments):
    """Prompt x0 x1, response x2..x5, K = 3, everything kept."""
    rows = _plan("001111", depths=3, num_segments=num_segments)
    assert len(rows.plan.segments) == num_segments
    assert _table(rows) == [
        (1, 0, 2, 1, 2, 3),
        (1, 1, None, 2, 3, 4),
        (1, 2, None, 3, 4, 5),
        (2, 0, 3, 2, 3, 4),
        (2, 1, None, 3, 4, 5),
        (3, 0, 4, 3, 4, 5),
    ]
    # Context: rows 0..3; slot 4 predicts nothing and nothing sees it.
    assert rows.feature_rows.tolist() == [0, 1, 2, 3]
    assert rows.plan.tokens.tolist() == [101, 102, 103, 104]
    assert rows.table.is_complete.all()


def test_a_dropped_chain_has_no_rows():
    rows = _plan("001111", depths=3, chosen=[[1, 2, 3], [2], []])
    (segment,) = rows.plan.segments
    assert segment.num_active == (3, 1)
    assert rows.table.places.tolist() == [2, 1, 3], "longest chain first"
    assert rows.table.chains.tolist() == [[True, True, False], [True, False, False], [True, False, False]]
    assert rows.table.draftable.sum(0).tolist() == [3, 2, 1]
    assert not rows.table.is_complete.any()
    assert [e[:2] for e in _table(rows)] == [(1, 0), (2, 0), (2, 1), (3, 0)]


def test_chains_and_keys_stay_inside_their_document():
    rows = _plan("0111" + "0111" + "00", depths=3, docs="0000" + "1111" + "..")
    assert [e[:2] for e in _table(rows)] == [(0, 0), (0, 1), (1, 0), (4, 0), (4, 1), (5, 0)]
    (segment,) = rows.plan.segments
    for layout in (segment.layout, segment.trunk_layout):
        sources = layout.key_source.view(layout.num_segments, layout.max_keys)
        seen = [rows.feature_rows[sources[s, : int(layout.last_key[s].max()) + 1]].tolist() for s in range(2)]
        assert seen == [[0, 1], [4, 5]]
    # Only the first document kept everything.
    rows = _plan("0111" + "0111", depths=3, docs="0000" + "1111", chosen=[[0, 1, 4, 5], [0]])
    complete = dict(zip(rows.table.places.tolist(), rows.table.is_complete.tolist(), strict=True))
    assert complete == {0: True, 1: True, 4: False, 5: False}


def test_prompt_positions_get_keys_and_no_slot():
    rows = _plan("0" * 40 + "1111", depths=2)
    (segment,) = rows.plan.segments
    assert rows.plan.tokens.numel() == 42
    assert segment.num_active == (3, 2)
    assert segment.layout.max_queries == 3
    assert _plan("0" * 40 + "1111", depths=2, num_layers=1).plan.segments[0].trunk_layout is None


def test_nothing_to_train_makes_no_plan():
    assert _plan("0000", depths=2) is None
    assert _plan("0011", depths=2, chosen=[[], []]) is None


# -- segments --------------------------------------------------------------------------------------------------------


def test_segments_have_about_the_same_work():
    assert _segment_begins(torch.tensor([0, 0, 2, 1, 3, 1]), 3) == [0, 3, 5]
    g = torch.Generator().manual_seed(0)
    for n, parts in ((100, 3), (1000, 7), (5, 9), (1, 4)):
        length = torch.randint(0, 9, (n,), generator=g)
        begins = _segment_begins(length, parts)
        assert begins[0] == 0
        assert begins == sorted(set(begins))
        work = torch.tensor([int(part.clamp(min=1).sum()) for part in length.tensor_split(begins[1:])])
        assert int(work.sum()) == int(length.clamp(min=1).sum())
        assert len(begins) <= parts
        assert int(work.max()) <= int(work.sum()) / parts + 8, "at most one row more than its share"


def test_a_segment_sees_its_document_only():
    """Two documents of 30: the second segment reads keys of the first, those of the second document start anew."""
    rows = _plan("01" + "1" * 28 + "01" + "1" * 28, depths=1, docs="0" * 30 + "1" * 30, num_segments=4)
    assert [s.begin for s in rows.plan.segments] == [0, 14, 28, 42]
    assert [s.first_visible for s in rows.plan.segments] == [0, 0, 2, 2]
    crossing = _plan("0" + "1" * 29 + "0" * 20 + "1" * 10, depths=2, docs="0" * 30 + "1" * 30, num_segments=3)
    for segment in crossing.plan.segments:
        first_row = crossing.plan.segments[segment.first_visible].begin
        source = crossing.feature_rows[segment.trunk_layout.key_source + first_row]
        rows_of = crossing.feature_rows[segment.begin : segment.stop]
        assert set((source // 30).tolist()) == set((rows_of // 30).tolist())


# -- trunk -----------------------------------------------------------------------------------------------------------


def test_trunk_rows_end_at_the_last_needed_slot():
    doc_ids = torch.tensor([[0, 0, 0, 0, 1, 1, 1, -1]])
    needed = torch.tensor([[False, True, True, False, False, True, False, False]])
    trunk = TrunkRows.build(doc_ids, needed)
    assert trunk.source.tolist() == [0, 1, 2, 4, 5]
    assert trunk.first.tolist() == [0, 0, 0, 3, 3]
    assert trunk.row_of.tolist() == [0, 1, 2, -1, 3, 4, -1, -1]
    with pytest.raises(ValueError, match="one run"):
        TrunkRows.build(torch.tensor([[0, 0, 1, 1, 0, 0]]), torch.ones(1, 6, dtype=torch.bool))
    ids = torch.arange(16).view(2, 8)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [2, 2, 2, 2, -1, -1, -1, -1]])
    assert predicted_tokens(ids, documents, torch.tensor([0, 2, 7, 10, 11])).tolist() == [1, -1, -1, 11, -1]


# -- draws -----------------------------------------------------------------------------------------------------------


def test_draws_are_nested_capped_and_inside_their_document():
    arch = make_arch(num_depths=8)
    runtime = make_runtime(arch)
    docs = make_documents(["00" + "1" * 30, "0110111111111", "1111111111", "00", "0011"], arch)
    run_step(runtime, docs, [[0, 1, 2, 3, 4]])
    for number, doc in enumerate(docs):
        elements = drawn_elements(runtime, number)
        by_depth = [[a for a, k in elements if k == depth] for depth in range(8)]
        charged = [[t for t in range(len(doc.tokens)) if is_charged(doc, t, k, "contiguous")] for k in range(8)]
        assert by_depth[0] == charged[0]
        caps = cod_caps(len(charged[0]), depths=8, ratio=0.7, ratio_min=0.2)
        for k in range(1, 8):
            assert set(by_depth[k]) <= set(by_depth[k - 1]) & set(charged[k])
            assert len(by_depth[k]) <= caps[k]
            assert all(a >= 0 for a in by_depth[k])
    assert [len([1 for _, k in drawn_elements(runtime, 0) if k == d]) for d in range(3)] == [29, 19, 13]


def test_draws_depend_on_step_and_sample_alone():
    arch = make_arch(num_depths=6)
    docs = make_documents(["00" + "1" * 20] * 3, arch)

    def draws(step, first_index, order, seed=0):
        runtime = make_runtime(arch)
        runtime._seed = seed
        batch = to_batch([docs[i] for i in order])
        batch["sample_index"] = torch.tensor([first_index + i for i in order])
        runtime.begin_global_batch(batch, step=step, dp_group=None, policy_model=torch.nn.Module())
        return {n: drawn_elements(runtime, n) for n in runtime._draws}

    base = draws(4, 10, [0, 1, 2])
    assert draws(4, 10, [2, 0, 1]) == base
    assert draws(4, 10, [1])[11] == base[11]
    assert base[10] != base[11], "equal documents are drawn apart"
    assert draws(5, 10, [0, 1, 2]) != base
    assert draws(4, 10, [0, 1, 2], seed=1) != base


def test_rows_changed_after_planning_are_refused():
    arch = make_arch()
    runtime = make_runtime(arch)
    docs = make_documents(["0011111", "01111"], arch)
    run_step(runtime, docs, [[0, 1]])
    docs[1].sampled[4] = False
    mb = to_microbatch(to_batch(docs), [0, 1])
    with pytest.raises(RuntimeError, match=r"sample 1: the micro-batch supervises 2 slots.*planned with 3"):
        runtime.loss(mb, give_features(runtime, mb, docs))
    # As many slots as were planned, but one further to the left.
    docs[0].sampled[:] = [c == "1" for c in "0111110"]
    mb = to_microbatch(to_batch(docs), [0])
    with pytest.raises(RuntimeError, match=r"sample 0: .*supervises 4 slots.*planned with 4, or with others"):
        runtime.loss(mb, give_features(runtime, mb, docs))
