"""Two real gloo ranks against one process: sharded policy, sharded draft, real capture, checkpointed activations."""

from __future__ import annotations

import pytest
import torch

from tests.unit.models.automodel.draft.scenarios import count_on_last_rank, draft_step


def _assert_same(got, want, *, policy: bool = True):
    assert got["loss"] == pytest.approx(want["loss"], rel=1e-5)
    # Policy gradients are averaged over ranks here, its loss is a plain sum.
    scale = 1.0
    for name, grad in want["grads"].items():
        torch.testing.assert_close(got["grads"][name], grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    for name, (num, den) in want["metrics"].items():
        assert got["metrics"][name] == [pytest.approx(num, rel=1e-5, abs=1e-5), pytest.approx(den, rel=1e-5)], name
    if policy:
        for name, grad in want["policy_grads"].items():
            torch.testing.assert_close(got["policy_grads"][name] * scale, grad, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def single(draft_pools, draft_policy_dir):
    """One rank, nothing sharded, one micro-batch."""
    return draft_pools[1].run(draft_step, draft_policy_dir, shard=False, micro_batch=8)[0]


def test_one_process_has_supervised_tokens(single):
    assert single["loss"] > 1.0
    assert single["metrics"]["top1_4"][1] > 0
    assert all(g.abs().max() > 0 for g in single["grads"].values())


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (1, {"shard": True, "micro_batch": 3}),
        (1, {"shard": True, "packed": True, "micro_batch": 4}),
        (1, {"shard": False, "checkpointing": "wrapper"}),
        (1, {"shard": True, "checkpointing": "wrapper", "micro_batch": 8}),
        (1, {"shard": True, "checkpointing": "transformers"}),
        (2, {}),
        (2, {"packed": True, "micro_batch": 4}),
        (2, {"checkpointing": "wrapper", "micro_batch": 1}),
    ],
    ids=lambda v: str(v).replace(" ", ""),
)
def test_layout_of_the_step_does_not_matter(draft_pools, draft_policy_dir, single, world, options):
    results = draft_pools[world].run(draft_step, draft_policy_dir, **options)
    for got in results:
        _assert_same(got, single, policy=world == 1)
    if world == 2:
        published = single["published"]
        whole = sum(t.numel() for t in published.values())
        assert all(r["local_numel"] < 0.7 * whole for r in results), "the draft is not sharded"


def test_a_rank_without_supervised_tokens_changes_nothing(draft_pools, draft_policy_dir):
    masked = (4, 5, 6, 7)
    want = draft_pools[1].run(draft_step, draft_policy_dir, shard=False, micro_batch=8, masked=masked)[0]
    for got in draft_pools[2].run(draft_step, draft_policy_dir, masked=masked):
        _assert_same(got, want, policy=False)


def test_no_rank_has_supervised_tokens(draft_pools, draft_policy_dir):
    for got in draft_pools[2].run(draft_step, draft_policy_dir, masked=tuple(range(8))):
        assert got["loss"] == 0.0
        assert all(bool((g == 0).all()) for g in got["grads"].values())


def test_every_rank_publishes_the_same_whole_tensors(draft_pools, draft_policy_dir):
    one = draft_pools[1].run(draft_step, draft_policy_dir, shard=False, micro_batch=8, steps=2)[0]
    two = draft_pools[2].run(draft_step, draft_policy_dir, steps=2)
    assert all(name.startswith("draft.") for name in one["published"])
    for got in two:
        assert got["exported"] == ["config.json", "draft_meta.json", "model.safetensors"]
        assert list(got["published"]) == list(one["published"])
        for name, tensor in one["published"].items():
            torch.testing.assert_close(got["published"][name], tensor, rtol=1e-4, atol=1e-5)
            assert torch.equal(got["published"][name], two[0]["published"][name])


def test_bfloat16_trains_on_fp32_parameters(draft_pools, draft_policy_dir, single):
    got = draft_pools[2].run(draft_step, draft_policy_dir, dtype="bfloat16")[0]
    assert got["loss"] == pytest.approx(single["loss"], rel=2e-2)
    assert {t.dtype for t in got["published"].values()} == {torch.bfloat16}
    assert {g.dtype for g in got["grads"].values()} == {torch.float32}


def test_policy_gradients_are_bit_identical_with_and_without_the_draft(draft_pools, draft_policy_dir):
    from tests.unit.models.automodel.draft.scenarios import policy_gradients

    without = draft_pools[1].run(policy_gradients, draft_policy_dir, with_draft=False)[0]
    beside = draft_pools[1].run(policy_gradients, draft_policy_dir, with_draft=True)[0]
    alone = draft_pools[1].run(policy_gradients, draft_policy_dir, with_draft=True, policy_loss=False)[0]
    for name, grad in without.items():
        assert torch.equal(grad, beside[name]), name
    assert all(g is None for g in alone.values())


@pytest.mark.parametrize("world", [1, 2])
def test_every_rank_gets_the_token_counts_of_all(draft_pools, world):
    ids, mask = torch.tensor([[1, 5, 5], [7, 2, 100]]), torch.tensor([[1, 1, 0], [1, 1, 0]])
    counted = draft_pools[world].run(count_on_last_rank, ids, mask, vocab_size=8)
    assert counted == [[0, 1, 1, 0, 0, 1, 0, 1]] * world


def test_every_rank_hears_of_a_token_that_does_not_exist(draft_pools):
    heard = draft_pools[2].run(count_on_last_rank, torch.tensor([3, 100]), torch.ones(2), vocab_size=8)
    assert heard == ["1 supervised tokens lie outside the vocabulary of 8"] * 2
