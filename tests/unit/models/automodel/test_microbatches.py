"""Grouping samples into micro-batches and rows, and back."""

from __future__ import annotations

import pytest
import torch

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.automodel.data import (
    MicrobatchSpec,
    make_microbatch,
    make_microbatches,
    pack_bins,
    plan_microbatches,
    rows_to_samples,
    zero_weight_sample,
)
from nemo_rl.models.policy.sharding import deal_by_length

ALGORITHMS = ("concatenative", "first_fit_shuffle", "first_fit_decreasing", "modified_first_fit_decreasing")
CPU = torch.device("cpu")


def spec(mode="fixed", *, num_samples=2, max_tokens=16, length_multiple=4):
    return MicrobatchSpec(mode, num_samples, max_tokens, length_multiple, "modified_first_fit_decreasing")


def batch(*lengths, width=None):
    width = width or max(lengths)
    length = torch.tensor(lengths)
    is_token = torch.arange(width)[None] < length[:, None]
    ids = (10 * (torch.arange(len(lengths))[:, None] + 1) + torch.arange(width)[None]) * is_token
    return BatchedDataDict(
        {
            "input_ids": ids,
            "input_lengths": length,
            "token_mask": is_token.float(),
            "sample_mask": torch.ones(len(lengths)),
            "sample_index": torch.arange(len(lengths)) + 100,
            "advantages": ids.float(),
            "names": [f"sample {i}" for i in range(len(lengths))],
        }
    )


def random_lengths(n, *, seed, low=1, high=100):
    return torch.randint(low, high + 1, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("seed", range(5))
def test_every_document_is_in_one_bin_that_holds_it(algorithm, seed):
    lengths = random_lengths(60, seed=seed)
    bins = pack_bins(lengths, capacity=128, algorithm=algorithm)
    assert sorted(i for b in bins for i in b) == list(range(60))
    assert all(sum(lengths[i] for i in b) <= 128 for b in bins)


def test_modified_first_fit_decreasing_beats_first_fit_decreasing():
    # Each row of 51 + 27 + 22 tokens is full.
    lengths = [51, 51, 51, 27, 27, 27, 22, 22, 22]
    assert len(pack_bins(lengths, capacity=100, algorithm="modified_first_fit_decreasing")) == 3
    hard = [60, 60, 34, 34, 40, 40, 17, 17]
    mffd = pack_bins(hard, capacity=100, algorithm="modified_first_fit_decreasing")
    assert len(mffd) <= len(pack_bins(hard, capacity=100, algorithm="first_fit_decreasing"))


def test_modified_first_fit_decreasing_stays_near_the_lower_bound():
    for seed in range(20):
        lengths = random_lengths(200, seed=seed)
        bins = pack_bins(lengths, capacity=128, algorithm="modified_first_fit_decreasing")
        bound = max(-(-sum(lengths) // 128), sum(n > 64 for n in lengths))
        assert len(bins) <= 71 / 60 * bound + 1


def test_a_document_longer_than_a_row_has_its_own():
    bins = pack_bins([200, 10, 20], capacity=64, algorithm="modified_first_fit_decreasing")
    assert [0] in bins
    assert plan_microbatches([200, 10, 20], spec("dynamic", max_tokens=64))[0] == [0]


def test_fixed_plan_keeps_the_order_and_the_rest():
    assert plan_microbatches([1, 2, 3, 4, 5], spec(num_samples=2)) == [[0, 1], [2, 3], [4]]


def test_dynamic_plan_respects_the_padded_token_count():
    lengths = random_lengths(50, seed=3, high=60)
    groups = plan_microbatches(lengths, spec("dynamic", max_tokens=256, length_multiple=8))
    assert sorted(i for g in groups for i in g) == list(range(50))
    for group in groups:
        width = -(-max(lengths[i] for i in group) // 8) * 8
        assert width * len(group) <= 256
    assert len(groups) < 50 / 3


def test_packed_row_restarts_positions_and_marks_padding():
    mb = make_microbatch(batch(3, 2, 5), [0, 1], spec("packed"), device=CPU)
    assert mb.input_ids.tolist() == [[10, 11, 12, 20, 21, 0, 0, 0]]
    assert mb.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]]
    assert mb.doc_ids.tolist() == [[0, 0, 0, 1, 1, -1, -1, -1]]
    assert mb.sampled_mask.tolist() == [[True] * 5 + [False] * 3]
    assert mb.sample_index.tolist() == [100, 101]
    assert mb.data["input_ids"].tolist() == [[10, 11, 12], [20, 21, 0]]
    assert mb.data["names"] == ["sample 0", "sample 1"]


def test_unpacked_rows_are_trimmed_to_their_longest_sample():
    mb = make_microbatch(batch(3, 2, 12), [1, 0], spec(), device=CPU)
    assert mb.input_ids.tolist() == [[20, 21, 0, 0], [10, 11, 12, 0]]
    assert mb.position_ids.tolist() == [[0, 1, 2, 3]] * 2
    assert mb.doc_ids.tolist() == [[0, 0, -1, -1], [1, 1, 1, -1]]
    assert mb.data["advantages"].shape == (2, 4)
    assert mb.data["token_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 0]]


def test_rows_grow_beyond_the_batch_to_their_multiple():
    mb = make_microbatch(batch(3, 2), [0, 1], spec(length_multiple=8), device=CPU)
    assert mb.input_ids.shape == mb.data["input_ids"].shape == mb.data["advantages"].shape == (2, 8)
    assert not mb.sampled_mask[:, 3:].any()


def test_dropped_samples_and_padding_are_not_sampled():
    data = batch(3, 4)
    data["sample_mask"][1] = 0
    data["token_mask"][:] = 1.0  # also beyond the end of sample 0
    mb = make_microbatch(data, [0, 1], spec(), device=CPU)
    assert mb.sampled_mask.tolist() == [[True, True, True, False], [False] * 4]


@pytest.mark.parametrize("mode", ["fixed", "packed"])
def test_row_values_return_to_their_samples_with_gradient(mode):
    data = batch(3, 2, 5)
    mb = make_microbatch(data, [0, 1, 2], spec(mode), device=CPU)
    values = mb.input_ids.float().requires_grad_()
    out = rows_to_samples(values, mb)
    want = mb.data["input_ids"].float().clone()
    want[:, 0] = 0
    assert torch.equal(out, want)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
    (out * weights).sum().backward()
    again = rows_to_samples(values.grad, mb)
    inside = want != 0
    assert torch.equal(again[inside], weights[inside])
    assert (values.grad[mb.doc_ids < 0] == 0).all()


def test_missing_steps_are_filled_with_zero_weight_ones():
    data = batch(3, 2, 5)
    steps = list(make_microbatches(data, [[0, 1, 2]], spec(num_samples=3), num_steps=3, device=CPU))
    assert len(steps) == 3
    assert all(not mb.sampled_mask.any() for mb in steps[1:])
    assert all(mb.data["sample_mask"].sum() == 0 and mb.data["token_mask"].sum() == 0 for mb in steps[1:])
    assert data["sample_mask"].tolist() == [1, 1, 1]


def test_zero_weight_sample_of_a_one_token_batch():
    sample = zero_weight_sample(batch(1))
    assert sample["input_ids"].shape == (1, 2)
    assert sample["input_lengths"].tolist() == [1]


def test_samples_are_dealt_equally_and_about_evenly():
    assert deal_by_length(torch.tensor([9, 7, 5, 1]), num_ranks=2, batch_size=4) == [[0, 3], [1, 2]]
    lengths = torch.tensor(random_lengths(64, seed=1, high=1000))
    ranks = deal_by_length(lengths, num_ranks=4, batch_size=16)
    assert sorted(i for r in ranks for i in r) == list(range(64))
    for start in range(0, 64, 16):
        hands = [[i for i in r if start <= i < start + 16] for r in ranks]
        assert all(len(h) == 4 for h in hands)
        sums = [int(lengths[h].sum()) for h in hands]
        assert max(sums) - min(sums) <= int(lengths[start : start + 16].max())
    assert all(r == sorted(r) for r in ranks)
