"""Checkpoints: exact on the same layout, equal on another one, refused when they do not fit."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from nemo_rl.models.policy.results import fold_results
from tests.unit.models.policy import scenarios
from tests.unit.models.policy.scenarios import make_batch, make_config

SCHEDULE = [
    {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.1, "end_factor": 1.0, "total_iters": 3}},
    {"name": "torch.optim.lr_scheduler.CosineAnnealingLR", "kwargs": {"T_max": 10, "eta_min": 1e-4}},
    {"milestones": [3]},
]


@pytest.fixture(scope="module")
def data():
    return make_batch()


@pytest.fixture(scope="module")
def config(model_dir):
    return make_config(model_dir, scheduler=SCHEDULE)


@pytest.fixture(scope="module")
def saved(pools, config, data, tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint")
    return directory, pools[2].run(scenarios.save_then_continue, config, data, str(directory), num_before=2)


def results(records):
    folded = fold_results([[step for call in r["results"] for step in call] for r in records])
    return {k: folded[k] for k in ("loss", "grad_norm", "lr", "metrics")}


def test_resume_on_the_same_layout_is_exact(pools, config, data, saved):
    directory, before = saved
    after = pools[2].run(scenarios.load_then_continue, config, data, str(directory), num_before=2)
    for old, new in zip(before, after, strict=True):
        assert new["draws"] == old["draws"]
        assert new["adam_steps"] == old["adam_steps"] == [2.0]
        for key in ("saved", "final"):
            assert all(torch.equal(new[key][name], tensor) for name, tensor in old[key].items()), key
    assert results(after) == results(before)


def test_one_rank_resumes_what_two_ranks_wrote(pools, config, data, saved):
    directory, before = saved
    after = pools[1].run(scenarios.load_then_continue, config, data, str(directory), num_before=2)
    assert all(torch.equal(after[0]["saved"][name], tensor) for name, tensor in before[0]["saved"].items())
    assert after[0]["draws"] == before[0]["draws"]  # rank 0 has its random state back
    old, new = results(before), results(after)
    assert new["loss"] == pytest.approx(old["loss"], rel=1e-5, abs=1e-6)
    assert new["grad_norm"] == pytest.approx(old["grad_norm"], rel=1e-5)
    assert new["lr"] == old["lr"]
    for name, tensor in before[0]["final"].items():
        torch.testing.assert_close(after[0]["final"][name], tensor, rtol=1e-5, atol=2e-6)


def test_one_rank_loads_what_tensor_parallel_ranks_wrote(pools, config, model_dir, data, tmp_path):
    sharded = make_config(model_dir, scheduler=SCHEDULE, dtensor_cfg={"tensor_parallel_size": 2})
    before = pools[2].run(scenarios.save_then_continue, sharded, data, str(tmp_path), num_before=1)
    after = pools[1].run(scenarios.load_then_continue, config, data, str(tmp_path), num_before=1)
    assert all(torch.equal(after[0]["saved"][name], tensor) for name, tensor in before[0]["saved"].items())
    for name, tensor in before[0]["final"].items():  # two more steps: the moments were restored as well
        torch.testing.assert_close(after[0]["final"][name], tensor, rtol=1e-5, atol=5e-6)


def test_checkpoint_before_the_first_step_is_exact(pools, config, data, tmp_path):
    before = pools[1].run(scenarios.save_then_continue, config, data, str(tmp_path), num_before=0)
    after = pools[1].run(scenarios.load_then_continue, config, data, str(tmp_path), num_before=0)
    assert after[0]["adam_steps"] == []
    assert all(torch.equal(after[0]["final"][n], t) for n, t in before[0]["final"].items())


def test_export_is_what_transformers_loads(model_dir, saved):
    from transformers import AutoModelForCausalLM

    directory, before = saved
    model, info = AutoModelForCausalLM.from_pretrained(directory / "hf", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in before[0]["saved"].items())


def test_checkpoint_of_another_model_is_refused(pools, tied_model_dir, saved):
    message = pools[1].run(scenarios.try_load, make_config(tied_model_dir), str(saved[0]))[0]
    assert "another model or draft" in message
    assert "lm_head" in message or "layers.1" in message


def test_damaged_checkpoints_are_refused(pools, config, saved, tmp_path):
    no_state = shutil.copytree(saved[0], tmp_path / "a")
    (no_state / "policy" / "state.json").unlink()
    assert "incomplete" in pools[1].run(scenarios.try_load, config, str(no_state))[0]

    foreign = shutil.copytree(saved[0], tmp_path / "b")
    state = json.loads((foreign / "policy" / "state.json").read_text())
    (foreign / "policy" / "state.json").write_text(json.dumps({**state, "version": 99}))
    assert "version 99" in pools[1].run(scenarios.try_load, config, str(foreign))[0]

    cut = shutil.copytree(saved[0], tmp_path / "c")
    for path in (cut / "policy" / "weights").glob("*.distcp"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert "could not be read" in pools[1].run(scenarios.try_load, config, str(cut))[0]


def test_other_schedule_is_refused(pools, model_dir, saved):
    message = pools[1].run(scenarios.try_load, make_config(model_dir, scheduler=None), str(saved[0]))[0]
    assert "scheduler" in message
