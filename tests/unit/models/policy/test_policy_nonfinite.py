"""A loss or gradient that is not finite skips the update on every rank, is counted, and leaves no trace."""

from __future__ import annotations

import math

import pytest
import torch

from nemo_rl.models.policy.results import fold_results
from tests.unit.models.policy import scenarios
from tests.unit.models.policy.scenarios import make_batch, make_config


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("value", [math.nan, math.inf], ids=["nan", "inf"])
def test_bad_update_is_skipped_on_all_ranks(pools, model_dir, world, value):
    records = pools[world].run(
        scenarios.train_poisoned, make_config(model_dir), make_batch(), sample_index=3, value=value
    )
    bad = fold_results([r["bad"] for r in records])
    assert bad["num_skipped_updates"] == 1
    assert not math.isfinite(bad["loss"])
    good = fold_results([r["good"] for r in records])
    assert good["num_skipped_updates"] == 0
    assert math.isfinite(good["loss"])
    for record in records:
        for name, tensor in record["before"].items():
            assert torch.equal(record["after_bad"][name], tensor), name
        moved = [not torch.equal(record["after_good"][n], t) for n, t in record["before"].items()]
        assert all(moved)
        assert all(torch.isfinite(t).all() for t in record["after_good"].values())


def test_step_after_a_skipped_one_equals_a_first_step(pools, model_dir):
    """The skipped step has not touched the optimizer's moments."""
    config, data = make_config(model_dir), make_batch()
    fresh = pools[1].run(scenarios.train_steps, config, data, num_steps=1)[0]
    after_skip = pools[1].run(scenarios.train_poisoned, config, data, sample_index=0, value=math.nan)[0]
    for name, tensor in fresh.state.items():
        assert torch.equal(after_skip["after_good"][name], tensor), name
