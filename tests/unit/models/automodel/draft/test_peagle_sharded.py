"""P-EAGLE on two real gloo ranks: segments under sharding, ranks that hold no deeper element."""

from __future__ import annotations

import pytest
import torch

from tests.unit.models.automodel.draft.scenarios import draft_step

SETTINGS = {"num_depths": 5, "down_sample_ratio": 0.8}


def _assert_same(got, want):
    assert got["loss"] == pytest.approx(want["loss"], rel=1e-5)
    for name, grad in want["grads"].items():
        torch.testing.assert_close(got["grads"][name], grad, rtol=2e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")
    for name, pair in want["metrics"].items():
        assert got["metrics"][name] == pytest.approx(pair, rel=1e-4, abs=1e-4), name


def _run(pools, world, policy_dir, **options):
    settings = SETTINGS | options.pop("settings", {})
    return pools[world].run(draft_step, policy_dir, algo="peagle", settings=settings, **options)


@pytest.mark.parametrize("options", [{}, {"packed": True, "micro_batch": 4}], ids=["rows", "packed"])
def test_segments_of_a_sharded_draft(draft_pools, draft_policy_dir, options):
    want = _run(draft_pools, 1, draft_policy_dir, shard=False, micro_batch=8, steps=2)[0]
    assert want["metrics"]["top1_5"][1] > 0
    for got in _run(draft_pools, 2, draft_policy_dir, settings={"num_segments": 3}, steps=2, **options):
        _assert_same(got, want)


def test_one_rank_may_lack_deeper_elements(draft_pools, draft_policy_dir):
    """Of the second rank's samples only the shortest one is kept: a chain of one, and rows without any."""
    masked = (4, 6, 7)
    want = _run(draft_pools, 1, draft_policy_dir, shard=False, micro_batch=8, masked=masked)[0]
    for got in _run(draft_pools, 2, draft_policy_dir, masked=masked, micro_batch=1):
        _assert_same(got, want)


def test_bfloat16_trains_on_fp32_parameters(draft_pools, draft_policy_dir):
    want = _run(draft_pools, 1, draft_policy_dir, shard=False, micro_batch=8)[0]
    got = _run(draft_pools, 2, draft_policy_dir, settings={"num_segments": 2}, dtype="bfloat16")[0]
    assert got["loss"] == pytest.approx(want["loss"], rel=2e-2)
    assert {t.dtype for t in got["published"].values()} == {torch.bfloat16}
    assert {g.dtype for g in got["grads"].values()} == {torch.float32}
