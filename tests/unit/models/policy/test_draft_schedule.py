"""When a draft is trained, with which rate, and which part of it: through the real worker."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from nemo_rl.models.policy.results import fold_results
from tests.tiny_models import write_tiny_policy
from tests.unit.models.policy import scenarios
from tests.unit.models.policy.scenarios import TEMPERATURE, DraftRecord, draft_spec_of, make_batch, make_config

LR = 1e-3
KWARGS = {"lr": LR, "weight_decay": 0.0, "betas": [0.9, 0.95], "eps": 1e-4}
DRAFT = {"enabled": True, "aux_layer_indices": [0, 1, 2], "ttt_steps": 3, "optimizer": {"kwargs": KWARGS}}
FREEZE = ["lm_head", "layers.0.mlp"]
NOTHING = {"plan": 0, "capture": 0, "module": 0}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> str:
    return str(write_tiny_policy(tmp_path_factory.mktemp("policy"), layers=4, heads=2, kv=2))


@pytest.fixture(scope="module")
def data():
    return make_batch()


def config_of(model_dir, **draft):
    spec = {"num_speculative_tokens": 3}
    if not draft.get("serve", True):
        spec |= {"method": "ngram"}
    generation = {"temperature": TEMPERATURE, "vllm_kwargs": {"speculative_config": spec}}
    return make_config(model_dir, draft={**DRAFT, **draft}, generation=generation)


def watch(pool, config, data, *, steps=range(2), **kwargs) -> list[DraftRecord]:
    k = 3 if config.policy.draft.serve else None
    return pool.run(scenarios.train_and_watch, config, data, spec=draft_spec_of(config, k=k), steps=steps, **kwargs)


def rates(record: DraftRecord) -> list[float]:
    return [update.lr for step in record.results for batch in step for update in batch.draft]


def weights(state):
    """Without the counter of updates."""
    return {name: tensor for name, tensor in state.items() if name != "num_updates"}


def changed(before, after) -> set[str]:
    assert before.keys() == after.keys()
    return {name for name in weights(before) if not torch.equal(before[name], after[name])}


def assert_equal(left, right):
    assert changed(left, right) == set()


@pytest.fixture(scope="module")
def always(pools, model_dir, data) -> DraftRecord:
    """The draft trained in each of four steps."""
    return watch(pools[1], config_of(model_dir), data, steps=range(4))[0]


# --- train_every


@pytest.mark.parametrize("world", [1, 2])
def test_the_draft_is_trained_in_every_nth_step_of_the_run(pools, model_dir, data, always, world):
    records = watch(pools[world], config_of(model_dir, train_every=2), data, steps=range(4))
    record = records[0]
    folded = [fold_results([r.results[i] for r in records]) for i in range(4)]
    assert [step["draft"] is not None for step in folded] == [True, False, True, False]
    assert [call["plan"] for call in record.calls] == [1, 0, 1, 0]
    # In the others there is neither a capture nor a forward of the draft.
    assert [call for call in record.calls if not call["plan"]] == [NOTHING, NOTHING]
    assert all(call["capture"] == call["module"] > 0 for call in record.calls if call["plan"])
    moved = [bool(changed(*pair)) for pair in zip(record.states, record.states[1:], strict=False)]
    assert moved == [True, False, True, False]
    assert record.sent[0] == record.sent[1] == always.sent[0], "it is published as it is in every step"
    assert int(record.states[-1]["num_updates"]) == 2


def test_steps_without_the_draft_leave_the_policy_as_it_was(pools, model_dir, data, always):
    skipping = watch(pools[1], config_of(model_dir, train_every=3), data, steps=range(4))[0]
    assert_equal(skipping.policy, always.policy)


def test_a_resumed_run_trains_the_draft_in_the_same_steps(pools, model_dir, data, tmp_path):
    """The run is cut between two steps that train the draft: the run's step counts, not the worker's."""
    config = config_of(model_dir, train_every=3, warmup_steps=2)
    whole = watch(pools[1], config, data, steps=range(5))[0]
    first = watch(pools[1], config, data, steps=range(2), save_to=str(tmp_path))[0]
    second = watch(pools[1], config, data, steps=range(2, 5), load_from=str(tmp_path))[0]
    assert [call["plan"] for call in first.calls + second.calls] == [1, 0, 0, 1, 0]
    assert_equal(second.states[-1], whole.states[-1])
    assert_equal(second.policy, whole.policy)
    assert rates(first) + rates(second) == rates(whole) == pytest.approx([LR / 3, 2 * LR / 3])


# --- learning rate, decay, clip


def test_warmup_counts_the_drafts_own_updates(pools, model_dir, data):
    """Two updates per step, three of them warm-up: the first step is not over before the rate has risen twice."""
    config = config_of(model_dir, warmup_steps=3, train_global_batch_size=data.size // 2)
    record = watch(pools[1], config, data, steps=range(3))[0]
    assert rates(record) == pytest.approx([LR / 4, LR / 2, 3 * LR / 4, LR, LR, LR])
    assert [step[0].policy.lr for step in record.results] == [1e-2] * 3, "the policy has its own schedule"


SCHEDULE = [
    {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 1.0, "end_factor": 0.5, "total_iters": 2}},
    {"name": "torch.optim.lr_scheduler.ConstantLR", "kwargs": {"factor": 0.1, "total_iters": 100}},
    {"milestones": [3]},
]
SCHEDULED = [1.0, 0.75, 0.5, 0.1, 0.1]


@pytest.mark.parametrize(
    ("warmup", "expected"), [(0, SCHEDULED), (2, [1 / 3, 2 / 3, *SCHEDULED])], ids=["alone", "behind-warmup"]
)
def test_the_schedule_counts_updates_and_starts_behind_the_warmup(pools, model_dir, data, warmup, expected):
    config = config_of(
        model_dir, warmup_steps=warmup, scheduler=SCHEDULE, train_global_batch_size=data.size // 2, train_every=2
    )
    record = watch(pools[1], config, data, steps=range(7))[0]
    assert rates(record)[: len(expected)] == pytest.approx([LR * factor for factor in expected])


def test_warmup_and_schedule_survive_a_resume(pools, model_dir, data, tmp_path):
    """Cut inside the warm-up, so that both the rate and the hand-over must be restored."""
    config = config_of(model_dir, warmup_steps=3, scheduler=SCHEDULE)
    whole = watch(pools[1], config, data, steps=range(6))[0]
    first = watch(pools[1], config, data, steps=range(2), save_to=str(tmp_path))[0]
    second = watch(pools[1], config, data, steps=range(2, 6), load_from=str(tmp_path))[0]
    assert rates(first) + rates(second) == rates(whole)
    assert rates(whole) == pytest.approx([LR * f for f in (1 / 4, 1 / 2, 3 / 4, 1.0, 0.75, 0.5)])
    assert_equal(second.states[-1], whole.states[-1])


def test_a_checkpoint_without_warmup_does_not_fit_a_run_with_one(pools, model_dir, data, tmp_path):
    watch(pools[1], config_of(model_dir), data, steps=range(1), save_to=str(tmp_path))
    config = config_of(model_dir, warmup_steps=3)
    message = pools[1].run(scenarios.try_load, config, str(tmp_path), draft_spec=draft_spec_of(config))[0]
    assert "optimizer group draft" in message
    assert "scheduler" in message


def test_weight_decay_is_the_drafts_own_and_spares_norms(pools, model_dir, data):
    optimizer = {"kwargs": {**KWARGS, "weight_decay": 0.3}}
    (decayed, decay), (kept, none) = watch(pools[1], config_of(model_dir, optimizer=optimizer), data, steps=range(0))[
        0
    ].optimized
    assert (decay, none) == (0.3, 0.0)
    assert all("norm" in name for name in kept)
    assert not any("norm" in name for name in decayed)


def test_clip_and_rate_bound_the_drafts_movement(pools, model_dir, data):
    """With plain SGD a clipped update moves the parameters by exactly rate x clip."""
    optimizer = {"name": "torch.optim.SGD", "kwargs": {"lr": 2.0, "weight_decay": 0.0}}
    record = watch(pools[1], config_of(model_dir, optimizer=optimizer, max_grad_norm=1e-3), data, steps=range(1))[0]
    (update,) = record.results[0][0].draft
    assert update.grad_norm > 1e-3
    assert update.weight_change_norm == pytest.approx(2.0 * 1e-3, rel=1e-3)


# --- what is trained at all


@pytest.mark.parametrize("world", [1, 2])
def test_frozen_parts_keep_their_values_and_are_not_sent(pools, model_dir, data, always, world, tmp_path):
    config = config_of(model_dir, freeze=FREEZE)
    record = watch(pools[world], config, data, steps=range(2), save_to=str(tmp_path))[0]
    everything = set(weights(record.states[0]))
    frozen = {name for name in everything if name.startswith(("lm_head.", "layers.0.mlp."))}
    assert len(frozen) == 4
    trained = everything - frozen
    assert set(record.trainable) == trained
    assert {name for names, _ in record.optimized for name in names} == trained
    assert set(record.sent[0]) == set(record.sent[1]) == trained
    assert changed(record.states[0], record.states[-1]) == trained
    exported = load_file(tmp_path / "draft" / "model.safetensors")
    assert all(torch.equal(exported[name], record.states[-1][name]) for name in everything)


def test_a_run_with_frozen_parts_resumes(pools, model_dir, data, tmp_path):
    config = config_of(model_dir, freeze=FREEZE)
    whole = watch(pools[1], config, data, steps=range(3))[0]
    watch(pools[1], config, data, steps=range(1), save_to=str(tmp_path))
    second = watch(pools[1], config, data, steps=range(1, 3), load_from=str(tmp_path))[0]
    assert_equal(second.states[-1], whole.states[-1])


@pytest.fixture(scope="module")
def draft_dir(pools, model_dir, data, tmp_path_factory) -> str:
    """A draft as a run exports it."""
    directory = tmp_path_factory.mktemp("checkpoint")
    watch(pools[1], config_of(model_dir), data, steps=range(1), save_to=str(directory))
    return str(directory / "draft")


@pytest.mark.parametrize("world", [1, 2])
def test_a_static_draft_is_left_alone(pools, model_dir, data, always, draft_dir, tmp_path, world):
    """Neither optimizer, nor plan, capture or forward, nothing sent; the checkpoint holds it as it was loaded."""
    config = make_static(model_dir, draft_dir)
    records = watch(pools[world], config, data, steps=range(2), draft_dir=draft_dir, save_to=str(tmp_path))
    record = records[0]
    assert record.calls == [NOTHING, NOTHING]
    assert record.optimized is None
    assert record.sent == ([], [])
    assert fold_results([r.results[0] for r in records])["draft"] is None
    assert_equal(record.states[0], record.states[-1])
    loaded, saved = load_file(f"{draft_dir}/model.safetensors"), load_file(tmp_path / "draft" / "model.safetensors")
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in loaded.items())
    resumed = watch(pools[world], config, data, steps=range(2, 3), draft_dir=draft_dir, load_from=str(tmp_path))[0]
    assert_equal(resumed.states[-1], record.states[0])


def make_static(model_dir, draft_dir):
    generation = {
        "temperature": TEMPERATURE,
        "vllm_kwargs": {"speculative_config": {"num_speculative_tokens": 3}},
    }
    return make_config(
        model_dir,
        draft={"enabled": True, "static": True, "model_name": draft_dir, "ttt_steps": 3},
        generation=generation,
    )


@pytest.mark.parametrize("world", [1, 2])
def test_a_draft_that_is_not_served_is_trained_saved_and_not_sent(pools, model_dir, data, always, tmp_path, world):
    config = config_of(model_dir, serve=False)
    record = watch(pools[world], config, data, steps=range(2), save_to=str(tmp_path))[0]
    assert record.sent == ([], [])
    assert record.optimized is not None
    for name, tensor in weights(record.states[2]).items():  # the same training as that of a served one
        torch.testing.assert_close(tensor, always.states[2][name], rtol=1e-5, atol=5e-6)
    exported = load_file(tmp_path / "draft" / "model.safetensors")
    assert all(torch.equal(exported[name], tensor) for name, tensor in weights(record.states[-1]).items())
    resumed = watch(pools[world], config, data, steps=range(2, 4), load_from=str(tmp_path))[0]
    for name, tensor in weights(resumed.states[-1]).items():
        torch.testing.assert_close(tensor, always.states[4][name], rtol=1e-5, atol=5e-6)


def test_expected_acceptance_is_reported_up_to_what_the_engine_proposes(always):
    """Two of the three trained depths are proposed: the length stops there; the formula written out."""
    results = [always.results[0]]
    folded = fold_results(results, num_draft_tokens=2)["draft"]
    ratios = [folded["metrics"][f"prefix_greedy_{j}"] for j in (1, 2)]
    assert folded["scalars"]["expected_acceptance_length"] == pytest.approx(1 + sum(n / d for n, d in ratios))
    # Of a draft that proposes more than it is trained for, there is no such length.
    assert "expected_acceptance_length" not in fold_results(results, num_draft_tokens=4)["draft"]["scalars"]
    assert "expected_acceptance_length" not in fold_results(results)["draft"]["scalars"]
