"""The draft beside the policy: isolation in both directions, its own group, split invariance, checkpoint, refit."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from nemo_rl.models.policy.results import fold_results
from nemo_rl.weight_sync.checksum import from_numpy
from tests.tiny_models import write_tiny_policy
from tests.unit.models.policy import scenarios
from tests.unit.models.policy.scenarios import TEMPERATURE, draft_spec_of, fold, make_batch, make_config, train_steps

DRAFT = {
    "enabled": True,
    "aux_layer_indices": [0, 1, 2],
    "ttt_steps": 3,
    "optimizer": {"kwargs": {"lr": 1e-3, "weight_decay": 0.0, "betas": [0.9, 0.95], "eps": 1e-4}},
}
PACKED = {"enabled": True, "train_mb_tokens": 56, "logprob_mb_tokens": 56, "sequence_length_round": 8}
DYNAMIC = {"enabled": True, "train_mb_tokens": 40, "logprob_mb_tokens": 40, "sequence_length_round": 8}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> str:
    return str(write_tiny_policy(tmp_path_factory.mktemp("policy"), layers=4, heads=2, kv=2))


@pytest.fixture(scope="module")
def data():
    return make_batch(masked=(2,))


def config_of(model_dir, **overrides):
    draft = {**DRAFT, **overrides.pop("draft", {})}
    generation = {"temperature": TEMPERATURE, "vllm_kwargs": {"speculative_config": {"num_speculative_tokens": 3}}}
    return make_config(model_dir, draft=draft, generation=generation, **overrides)


def run(pool, config, data, **kwargs):
    return pool.run(train_steps, config, data, worker_kwargs={"draft_spec": draft_spec_of(config)}, **kwargs)


def split(state):
    """Tensors of policy and draft."""
    draft = {k: v for k, v in state.items() if k.startswith("draft.")}
    return {k: v for k, v in state.items() if k not in draft}, draft


@pytest.fixture(scope="module")
def canonical(pools, model_dir, data):
    return run(pools[1], config_of(model_dir), data)


def assert_equal_tensors(left, right):
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


# -- isolation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2])
def test_policy_is_bit_identical_with_and_without_a_draft(pools, model_dir, data, world):
    without = pools[world].run(train_steps, make_config(model_dir), data)
    with_draft = run(pools[world], config_of(model_dir), data)
    heavier = run(pools[world], config_of(model_dir, draft={"loss_weight": 7.0}), data)
    static = run(pools[world], config_of(model_dir, draft={"loss_weight": 0.0}), data)
    for records in (with_draft, heavier, static):
        assert_equal_tensors(split(records[0].state)[0], without[0].state)
        for step, want in zip(fold(records), fold(without), strict=True):
            assert step["loss"] == want["loss"]
            assert step["grad_norm"] == want["grad_norm"]
    assert fold(static)[0]["draft"] is None
    assert split(static[0].state)[1] == {}, "what is not trained is not sent"
    assert not all(torch.equal(t, split(heavier[0].state)[1][n]) for n, t in split(with_draft[0].state)[1].items())


def test_groups_clip_and_step_apart(pools, model_dir, data, canonical):
    """Clipping the draft to almost nothing and stopping its learning rate leaves the policy as it was."""
    kwargs = {**DRAFT["optimizer"]["kwargs"], "lr": 0.0}
    records = run(pools[1], config_of(model_dir, draft={"max_grad_norm": 1e-6, "optimizer": {"kwargs": kwargs}}), data)
    assert_equal_tensors(split(records[0].state)[0], split(canonical[0].state)[0])
    step, want = fold(records)[0], fold(canonical)[0]
    assert step["draft"]["lr"] == 0.0
    assert step["lr"] == want["lr"] == 1e-2
    assert want["draft"]["lr"] == 1e-3
    assert step["draft"]["grad_norm"] == want["draft"]["grad_norm"]  # before clipping
    assert step["draft"]["scalars"]["weight_change_norm"] == 0.0


def test_learning_rate_of_a_new_draft_has_a_default(pools, model_dir, data):
    kwargs = {**DRAFT["optimizer"]["kwargs"], "lr": None}
    records = run(pools[1], config_of(model_dir, draft={"optimizer": {"kwargs": kwargs}}), data, num_steps=1)
    assert fold(records)[0]["draft"]["lr"] == 1e-4


@pytest.mark.parametrize("world", [1, 2])
def test_a_bad_draft_step_does_not_hurt_the_policy(pools, model_dir, data, world):
    config = config_of(model_dir)
    without = pools[world].run(train_steps, make_config(model_dir), data, num_steps=3)
    records = pools[world].run(scenarios.train_with_broken_draft, config, data, spec=draft_spec_of(config))
    steps = [fold_results([r["results"][i] for r in records]) for i in range(3)]
    assert [s["draft"]["scalars"]["num_skipped_updates"] for s in steps] == [0.0, 1.0, 0.0]
    assert [s["num_skipped_updates"] for s in steps] == [0, 0, 0]
    assert not math.isfinite(steps[1]["draft"]["loss"])
    assert [s["loss"] for s in steps] == [s["loss"] for s in fold(without)]
    assert_equal_tensors(split(records[0]["final"])[0], without[0].state)
    assert_equal_tensors(split(records[0]["before"])[1], split(records[0]["after"])[1])
    assert all(torch.isfinite(t).all() for t in records[0]["final"].values())


def test_a_bad_policy_step_does_not_hurt_the_draft(pools, model_dir, data):
    config = config_of(model_dir)
    spec = draft_spec_of(config)
    good = run(pools[2], config, data, num_steps=1)
    bad = pools[2].run(scenarios.train_with_poisoned_policy, config, data, spec=spec)
    assert fold(bad)[0]["num_skipped_updates"] == 1
    assert fold(bad)[0]["draft"]["scalars"]["num_skipped_updates"] == 0.0
    assert_equal_tensors(split(bad[0].state)[1], split(good[0].state)[1])
    assert fold(bad)[0]["draft"]["metrics"] == fold(good)[0]["draft"]["metrics"]


# -- split invariance ------------------------------------------------------------------------------------------------

VARIANTS = {
    "micro-batch-1": (1, 1, {"train_micro_batch_size": 1}),
    "dp2-checkpointing": (2, 1, {"dtensor_cfg": {"activation_checkpointing": True}}),
    "dp2-dynamic": (2, 1, {"dynamic_batching": DYNAMIC}),
    "dp2-packed": (2, 1, {"sequence_packing": PACKED}),
    "tp2": (2, 2, {"dtensor_cfg": {"tensor_parallel_size": 2}}),
}


def assert_same_draft(records, canonical, *, tp=1):
    for step, want in zip(fold(records, tp=tp), fold(canonical), strict=True):
        got, expected = step["draft"], want["draft"]
        for key in ("loss", "grad_norm"):
            assert got[key] == pytest.approx(expected[key], rel=1e-5), key
        assert got["scalars"]["weight_change_norm"] == pytest.approx(
            expected["scalars"]["weight_change_norm"], rel=1e-4
        )
        for name, (num, den) in expected["metrics"].items():
            if den:
                assert got["metrics"][name] == pytest.approx((num, den), rel=2e-5, abs=2e-5), name
    for record in records:
        for name, tensor in split(canonical[0].state)[1].items():
            difference = (record.state[name] - tensor).abs().max()
            assert difference <= 5e-6 + 1e-5 * tensor.abs().max(), name


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_draft_update_does_not_depend_on_the_split(pools, model_dir, data, canonical, variant):
    world, tp, overrides = VARIANTS[variant]
    overrides = dict(overrides)
    records = run(pools[world], config_of(model_dir, **overrides), data)
    assert_same_draft(records, canonical, tp=tp)
    if tp == 2:  # replicas of the draft stay bit-equal
        assert_equal_tensors(split(records[0].state)[1], split(records[1].state)[1])


def test_a_draft_with_its_own_batch_size_takes_several_updates_on_one_forward(pools, model_dir, data, canonical):
    """Two draft updates per policy update, the same on one rank and on two; the policy does not notice."""
    config = config_of(model_dir, draft={"train_global_batch_size": data.size // 2})
    single, double = run(pools[1], config, data), run(pools[2], config, data)
    assert len(single[0].results[0][0].draft) == 2
    assert_same_draft(double, single)
    for step, want in zip(fold(single), fold(canonical), strict=True):
        assert step["loss"] == pytest.approx(want["loss"], rel=1e-5)
        assert step["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-5)
        # The same elements are supervised; the second half by a draft that has already moved.
        assert step["draft"]["metrics"]["top1_1"][1] == want["draft"]["metrics"]["top1_1"][1]
        assert step["draft"]["loss"] != pytest.approx(want["draft"]["loss"], rel=1e-4)


def test_a_rank_without_supervised_tokens_runs_along(pools, model_dir):
    data = make_batch(masked=(4, 5, 6, 7))
    config = config_of(model_dir)
    single = run(pools[1], config, data)
    records = run(pools[2], config, data, is_dealt=False)
    assert records[1].results[0][0].draft[0].loss == 0.0
    assert_same_draft(records, single)


# -- what is reported, saved and sent --------------------------------------------------------------------------------


def test_results_are_plain_numbers_that_show_learning(canonical):
    first, second = fold(canonical)
    json.dumps([first, second], allow_nan=False)
    assert second["draft"]["loss"] < first["draft"]["loss"]
    assert first["draft"]["scalars"]["weight_change_norm"] > 0
    assert set(first["timing"]) == {"policy_fwd_bwd_s", "draft_s", "optimizer_s"}
    assert any(name.startswith("accept_greedy") for name in first["draft"]["metrics"])


@pytest.mark.parametrize("resumed_world", [1, 2])
def test_checkpoint_holds_both_groups(pools, model_dir, data, tmp_path, resumed_world):
    config = config_of(model_dir)
    spec = draft_spec_of(config)
    before = pools[2].run(scenarios.save_then_continue, config, data, str(tmp_path), num_before=2, draft_spec=spec)
    after = pools[resumed_world].run(
        scenarios.load_then_continue, config, data, str(tmp_path), num_before=2, draft_spec=spec
    )
    assert_equal_tensors(after[0]["saved"], before[0]["saved"])
    exported = load_file(tmp_path / "draft" / "model.safetensors")
    saved_draft = split(before[0]["saved"])[1]
    assert all(torch.equal(exported[name.removeprefix("draft.")], t) for name, t in saved_draft.items())
    if resumed_world == 2:
        assert_equal_tensors(after[0]["final"], before[0]["final"])
    for name, tensor in before[0]["final"].items():
        assert (after[0]["final"][name] - tensor).abs().max() <= 5e-6 + 1e-5 * tensor.abs().max(), name


def test_checkpoint_without_draft_does_not_fit_a_run_with_one(pools, model_dir, data, tmp_path):
    pools[1].run(scenarios.save_then_continue, make_config(model_dir), data, str(tmp_path), num_before=1)
    config = config_of(model_dir)
    message = pools[1].run(scenarios.try_load, config, str(tmp_path), draft_spec=draft_spec_of(config))[0]
    assert "draft" in message


@pytest.mark.parametrize("world", [1, 2])
def test_refit_sends_policy_then_draft(pools, model_dir, world):
    config = config_of(model_dir)
    spec = draft_spec_of(config)
    payload = pools[world].run(scenarios.gather, config, draft_spec=spec)[0]
    assert set(payload.manifest.draft) == set(spec.trained_names)
    assert list(payload.tensors) == list(payload.manifest.wire_entries())
    assert payload.checksums.keys() == payload.tensors.keys()
    for name, info in payload.manifest.wire_entries().items():
        assert from_numpy(payload.tensors[name], info.dtype).shape == info.shape
