"""Alignment: the six-token table, the charged rules, what is computed and what is left out."""

from __future__ import annotations

import pytest
import torch

from nemo_rl.models.automodel.draft.config import Eagle3DraftConfig
from nemo_rl.models.automodel.draft.runtime import charged_depths
from nemo_rl.models.automodel.draft.unroll import plan_rows
from tests.unit.models.automodel.draft.helpers import make_arch, make_documents, make_runtime, run_step


def _plan(mask: str, *, depths: int, rule: str = "contiguous", docs: str | None = None, num_layers: int = 1):
    sampled = torch.tensor([[c == "1" for c in mask]])
    doc_ids = torch.tensor([[int(c) if c != "." else -1 for c in (docs or "0" * len(mask))]])
    positions = torch.zeros_like(doc_ids)
    for i in range(1, doc_ids.shape[1]):
        positions[0, i] = positions[0, i - 1] + 1 if doc_ids[0, i] == doc_ids[0, i - 1] else 0
    charged = charged_depths(sampled, doc_ids, depths=depths, mask_rule=rule)
    plan = plan_rows(
        input_ids=torch.arange(len(mask))[None] + 100,
        position_ids=positions,
        doc_ids=doc_ids,
        charged=charged,
        num_layers=num_layers,
        chunk_size=1024,
        is_packed=False,
    )
    return plan, charged


def test_six_token_table():
    """Prompt x0 x1, response x2..x5, K = 3: (k, slot, token, position, teacher, predicts) of each charged element."""
    plan, charged = _plan("001111", depths=3)
    u = plan.unroll
    starts = torch.tensor([0, *u.num_active]).cumsum(0)
    rows = []
    for e in range(plan.table.depth.numel()):
        k, i = int(plan.table.depth[e]), int(plan.table.slot[e])
        assert int(u.element_rows[e]) == int(starts[k]) + i
        row = int(u.active_rows[i])
        token = u.trunk_tokens[row] if k == 0 else u.depth_tokens[k - 1][i]
        teacher = int(u.chunks.teacher_rows[u.chunks.local_row[e]])
        position = int(u.trunk_positions[row]) + k
        rows.append((k, int(plan.feature_rows[row]), int(token) - 100, position, teacher, int(u.labels[e]) - 100))
    assert sorted(rows) == [
        (0, 1, 2, 1, 2, 3),
        (0, 2, 3, 2, 3, 4),
        (0, 3, 4, 3, 4, 5),
        (1, 1, 3, 2, 3, 4),
        (1, 2, 4, 3, 4, 5),
        (2, 1, 4, 3, 4, 5),
    ]
    assert plan.table.chains.sum(0).tolist() == [3, 2, 1]
    # Context: trunk rows 0..3; slot 4 predicts nothing and nothing sees it.
    assert plan.feature_rows.tolist() == [0, 1, 2, 3]
    assert charged.sum((1, 2)).tolist() == [3, 2, 1]


@pytest.mark.parametrize(
    ("mask", "rule", "expected"),
    [
        ("001111", "contiguous", [[1, 2, 3], [1, 2], [1]]),
        ("001111", "input", [[1, 2, 3, 4], [0, 1, 2, 3], [0, 1, 2]]),
        ("00110011", "contiguous", [[1, 5], [], []]),
        ("0011011", "contiguous", [[1, 4], [], []]),
        ("1", "contiguous", [[], [], []]),
        ("11", "contiguous", [[], [], []]),
        ("01", "contiguous", [[], [], []]),
        ("01", "input", [[0], [], []]),
        ("111", "contiguous", [[0], [], []]),
        ("0000", "contiguous", [[], [], []]),
    ],
)
def test_charged_slots(mask, rule, expected):
    sampled = torch.tensor([[c == "1" for c in mask]])
    charged = charged_depths(sampled, torch.zeros_like(sampled, dtype=torch.long), depths=3, mask_rule=rule)
    assert [row.nonzero()[:, 1].tolist() for row in charged] == expected


def test_chains_do_not_cross_documents_or_padding():
    plan, charged = _plan("0111" + "0111" + "..".replace(".", "0"), depths=3, docs="0000" + "1111" + "..")
    assert [row.nonzero()[:, 1].tolist() for row in charged] == [[0, 1, 4, 5], [0, 4], []]
    assert plan.table.chains.sum(0).tolist() == [4, 2, 0]
    assert plan.unroll.num_active == (4, 2)
    # Each document's queries see the keys of that document only.
    layout = plan.unroll.layout
    sources = layout.key_source.view(layout.num_segments, layout.max_keys)
    seen = [plan.feature_rows[sources[s, : int(layout.last_key[s].max()) + 1]].tolist() for s in range(2)]
    assert seen == [[0, 1], [4, 5]]


def test_a_document_in_two_runs_is_refused():
    with pytest.raises(ValueError, match="one run"):
        _plan("111111111", depths=2, docs="000111000")


def test_prompt_positions_get_no_query():
    plan, _ = _plan("0" * 40 + "1111", depths=2)
    assert plan.unroll.trunk_tokens.numel() == 42
    assert plan.unroll.num_active == (3, 2)
    assert plan.unroll.layout.max_queries == 3


def test_rows_changed_after_planning_are_refused():
    runtime = make_runtime(make_arch(), Eagle3DraftConfig(enabled=True, ttt_steps=2))
    docs = make_documents(["00111", "0111"], make_arch())
    run_step(runtime, docs, [[0, 1]])
    docs[1].sampled[3] = False
    from tests.unit.models.automodel.draft.helpers import give_features, to_batch, to_microbatch

    mb = to_microbatch(to_batch(docs), [0, 1])
    with pytest.raises(RuntimeError, match=r"sample 1: the micro-batch supervises \[1, 0\].*planned with \[2, 1\]"):
        runtime.loss(mb, give_features(runtime, mb, docs))


def test_loss_without_a_captured_forward_is_refused():
    runtime = make_runtime(make_arch(), Eagle3DraftConfig(enabled=True, ttt_steps=2))
    docs = make_documents(["00111"], make_arch())
    from tests.unit.models.automodel.draft.helpers import StubPolicy, to_batch, to_microbatch

    batch = to_batch(docs)
    runtime.begin_global_batch(batch, step=0, dp_group=None, policy_model=StubPolicy())
    with pytest.raises(RuntimeError, match="no hidden state was captured"):
        runtime.loss(to_microbatch(batch, [0]), torch.zeros(1, 5, 23))
