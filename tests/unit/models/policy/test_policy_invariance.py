"""One training run, many layouts: loss, gradient norm, metrics and weights must not depend on how the work is split."""

from __future__ import annotations

import pytest

from tests.unit.models.policy import scenarios
from tests.unit.models.policy.scenarios import fold, make_batch, make_config, train_steps

MASKED = (2,)
DYNAMIC = {"enabled": True, "train_mb_tokens": 40, "logprob_mb_tokens": 40, "sequence_length_round": 8}
# Wide enough that several documents share a row: a row holds up to 56 of the 23-token samples' tokens.
PACKED = {"enabled": True, "train_mb_tokens": 56, "logprob_mb_tokens": 56, "sequence_length_round": 8}
TP = {"dtensor_cfg": {"tensor_parallel_size": 2}}
CHECKPOINTED = {"dtensor_cfg": {"activation_checkpointing": True}}

# id: (ranks, tensor parallel, policy overrides)
VARIANTS = {
    "micro-batch-1": (1, 1, {"train_micro_batch_size": 1}),
    "micro-batch-3-uneven": (1, 1, {"train_micro_batch_size": 3}),
    "micro-batch-8": (1, 1, {"train_micro_batch_size": 8}),
    "logprob-chunks": (1, 1, {"logprob_chunk_size": 7}),
    "padded-to-16": (1, 1, {"make_sequence_length_divisible_by": 16}),
    "checkpointing": (1, 1, CHECKPOINTED),
    "dynamic": (1, 1, {"dynamic_batching": DYNAMIC}),
    "packed": (1, 1, {"sequence_packing": PACKED, "train_micro_batch_size": 2}),
    "dp2": (2, 1, {}),
    "dp2-checkpointing": (2, 1, CHECKPOINTED),
    "dp2-dynamic": (2, 1, {"dynamic_batching": DYNAMIC}),
    "dp2-packed": (2, 1, {"sequence_packing": PACKED}),
    "tp2": (2, 2, {**TP, "logprob_chunk_size": 7}),
}


@pytest.fixture(scope="module")
def data():
    return make_batch(masked=MASKED)


@pytest.fixture(scope="module")
def canonical(pools, model_dir, data):
    return pools[1].run(train_steps, make_config(model_dir), data)


def assert_same_run(records, canonical, *, tp: int = 1) -> None:
    """Values within 1e-5 of the canonical run's, summed over ranks."""
    expected = fold(canonical)
    for step, want in zip(fold(records, tp=tp), expected, strict=True):
        for key in ("loss", "grad_norm", "global_valid_toks", "global_valid_seqs"):
            assert step[key] == pytest.approx(want[key], rel=1e-5, abs=1e-6), key
        assert step["metrics"].keys() == want["metrics"].keys()
        for name, (num, den) in want["metrics"].items():
            assert step["metrics"][name] == pytest.approx((num, den), rel=2e-5, abs=2e-5), name
        assert step["num_skipped_updates"] == 0
    for record in records:
        for name, tensor in canonical[0].state.items():
            difference = (record.state[name] - tensor).abs().max()
            assert difference <= 2e-6 + 1e-5 * tensor.abs().max(), name


def test_canonical_run_learns(canonical):
    first, second = fold(canonical)
    assert second["loss"] < first["loss"]
    assert first["grad_norm"] > 0.1


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_update_does_not_depend_on_the_split(pools, model_dir, data, canonical, variant):
    world, tp, overrides = VARIANTS[variant]
    records = pools[world].run(train_steps, make_config(model_dir, **overrides), data)
    assert_same_run(records, canonical, tp=tp)


def test_a_rank_without_supervised_tokens_runs_along(pools, model_dir):
    data = make_batch(masked=(4, 5, 6, 7))
    config = make_config(model_dir)
    single = pools[1].run(train_steps, config, data)
    records = pools[2].run(train_steps, config, data, is_dealt=False)  # rank 1 holds samples 4..7
    assert records[1].results[0][0].policy.loss == 0.0
    assert_same_run(records, single)


def test_ranks_agree_on_the_number_of_microbatches(pools, model_dir):
    # On their own, rank 0 (24, 23, 24, 2 tokens) would run 4 micro-batches of 40 tokens and rank 1 (2, 2, 2, 2) one.
    data = make_batch(lengths=(24, 23, 24, 2, 2, 2, 2, 2))
    config = make_config(model_dir, dynamic_batching=DYNAMIC)
    single = pools[1].run(train_steps, make_config(model_dir), data)
    records = pools[2].run(train_steps, config, data, is_dealt=False)
    assert [r.results[0][0].num_microbatches for r in records] == [4, 4]
    assert_same_run(records, single)


def test_several_global_batches_take_several_steps(pools, model_dir, data):
    config = make_config(model_dir, train_global_batch_size=4)
    single = pools[1].run(train_steps, config, data, num_steps=1)
    double = pools[2].run(train_steps, config, data, num_steps=1)
    assert fold(single)[0]["num_optimizer_steps"] == 2
    assert_same_run(double, single)


def test_two_ranks_hold_shards_not_copies(pools, model_dir):
    layout = pools[2].run(scenarios.layout_of, make_config(model_dir))[0]
    assert set(layout.values()) == {"(Shard(dim=0),)"}
    tp_layout = pools[2].run(scenarios.layout_of, make_config(model_dir, **TP))[0]
    assert "Shard(dim=0)" in tp_layout["lm_head.weight"]
