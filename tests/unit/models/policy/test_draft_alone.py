"""The draft trained beside a policy that stays as it is: the same updates as beside one that is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nemo_rl.algorithms.config import RolloutStoreConfig
from nemo_rl.data.rollout_index import FeatureLayout, StoreIdentity
from nemo_rl.data.rollout_store import RolloutReader, RolloutWriter
from nemo_rl.models.policy.results import fold_draft_results, fold_results
from tests.tiny_models import write_tiny_policy
from tests.unit.models.policy import scenarios
from tests.unit.models.policy.scenarios import TEMPERATURE, draft_spec_of, make_batch, make_config

DRAFT = {
    "enabled": True,
    "aux_layer_indices": [0, 1, 2],
    "ttt_steps": 3,
    "optimizer": {"kwargs": {"lr": 1e-3, "weight_decay": 0.0, "betas": [0.9, 0.95], "eps": 1e-4}},
}
PACKED = {"enabled": True, "train_mb_tokens": 56, "logprob_mb_tokens": 56, "sequence_length_round": 8}
HALF = {"train_global_batch_size": 4}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_policy(tmp_path_factory.mktemp("policy"), layers=4, heads=2, kv=2))


@pytest.fixture(scope="module")
def data():
    return make_batch(masked=(2,))


def config_of(model_dir: str, *, draft: dict[str, Any] | None = None, **overrides: Any) -> Any:
    return make_config(
        model_dir,
        draft={**DRAFT, **(draft or {})},
        generation={"temperature": TEMPERATURE, "vllm_kwargs": {"speculative_config": {"num_speculative_tokens": 3}}},
        **{"draft_run": {"num_prompts_per_step": 8}, **overrides},
    )


def alone(pool: Any, config: Any, data: Any, steps: int = 1, **kwargs: Any) -> list[scenarios.AloneRecord]:
    return pool.run(scenarios.train_draft_alone, config, data, spec=draft_spec_of(config), steps=range(steps), **kwargs)


def assert_equal_tensors(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


def draft_of(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in state.items() if name.startswith("draft.")}


@pytest.mark.parametrize(
    ("world", "settings"),
    [(1, {}), (1, {"draft": HALF}), (2, {"draft": HALF, "sequence_packing": PACKED})],
    ids=["plain", "two-updates", "two-ranks-packed"],
)
def test_updates_are_bit_identical_to_those_beside_a_policy_in_training(
    pools: Any, model_dir: str, data: Any, world: int, settings: dict[str, Any]
) -> None:
    """In the first step both policies are the same one."""
    config = config_of(model_dir, **settings)
    spec = draft_spec_of(config)
    beside = pools[world].run(scenarios.train_steps, config, data, num_steps=1, worker_kwargs={"draft_spec": spec})
    records = alone(pools[world], config, data)
    for record, other in zip(records, beside, strict=True):
        assert_equal_tensors(draft_of(record.state), draft_of(other.state))
        assert record.results[0][0].draft == other.results[0][0].draft
    folded = fold_draft_results([r.results[0] for r in records], num_draft_tokens=3)
    joint = fold_results([r.results[0] for r in beside], num_draft_tokens=3)
    assert {name: folded[name] for name in joint["draft"]} == joint["draft"]
    assert folded["global_valid_toks"] == joint["global_valid_toks"]


def test_the_policy_stays_as_it_is(pools: Any, model_dir: str, data: Any) -> None:
    (record,) = alone(pools[1], config_of(model_dir), data, steps=4)
    losses = [step[0].draft[0].loss for step in record.results]
    assert losses[-1] < losses[0]
    assert record.groups == ["draft"]
    assert record.grads == []
    initial = load_file(Path(model_dir) / "model.safetensors")
    assert_equal_tensors({name: record.state[name] for name in initial}, initial)


def test_a_resumed_run_continues_bit_identically(pools: Any, model_dir: str, data: Any, tmp_path: Path) -> None:
    config = config_of(model_dir, draft={"warmup_steps": 3})
    (whole,) = alone(pools[1], config, data, steps=4)
    alone(pools[1], config, data, steps=2, save_to=str(tmp_path))
    spec = draft_spec_of(config)
    (resumed,) = pools[1].run(
        scenarios.train_draft_alone, config, data, spec=spec, steps=range(2, 4), load_from=str(tmp_path)
    )
    assert_equal_tensors(resumed.state, whole.state)
    assert [step[0].draft for step in resumed.results] == [step[0].draft for step in whole.results[2:]]
    assert (tmp_path / "draft" / "model.safetensors").is_file()
    stored = torch.distributed.checkpoint.FileSystemReader(tmp_path / "policy" / "weights").read_metadata()
    assert not [name for name in stored.state_dict_metadata if name.startswith(("model.", "optim.policy."))]


def test_a_policy_in_training_does_not_continue_it(pools: Any, model_dir: str, data: Any, tmp_path: Path) -> None:
    config = config_of(model_dir)
    alone(pools[1], config, data, save_to=str(tmp_path))
    message = pools[1].run(scenarios.try_load, config, str(tmp_path), draft_spec=draft_spec_of(config))[0]
    assert "model." in message


# -- recorded states in place of the forward -------------------------------------------------------------------------


def record(pool: Any, config: Any, data: Any, directory: Path) -> None:
    """What GRPO leaves: the samples, and the states of the policy for them."""
    spec = draft_spec_of(config)
    arch = spec.architecture
    identity = StoreIdentity(
        vocab_size=arch.vocab_size,
        tokenizer="t",
        policy="p",
        policy_name="tiny",
        features=FeatureLayout(ids=arch.feature_ids, size=arch.target_hidden_size, dtype="float32"),
    )
    store = RolloutStoreConfig(mode="record", dir=str(directory), features=True)
    writer = RolloutWriter(store, identity, run="run", resume_step=None)
    reports = pool.run(scenarios.record_features, config, data, str(directory), spec=spec)
    batch = data.slice(0, data.size)
    lengths = batch["input_lengths"]
    batch["rewards"], batch["truncated"] = torch.zeros(data.size), torch.zeros(data.size, dtype=torch.bool)
    batch["response_lengths"] = lengths - (lengths + 2) // 3
    assert writer.add(1, batch, versions=frozenset([0]), features=reports) == 0


@pytest.mark.parametrize(
    ("world", "settings"), [(1, {}), (2, {"sequence_packing": PACKED})], ids=["plain", "two-ranks-packed"]
)
def test_recorded_states_give_the_same_loss_as_the_forward(
    pools: Any, model_dir: str, data: Any, tmp_path: Path, world: int, settings: dict[str, Any]
) -> None:
    config = config_of(model_dir, **settings)
    record(pools[1], config, data, tmp_path)
    batch = RolloutReader(tmp_path).samples(range(data.size))
    offline = {
        **settings,
        "draft_run": {"num_prompts_per_step": 8, "source": "rollouts"},
        "rollout_store": {"dir": str(tmp_path), "features": True},
    }
    stored = alone(pools[world], config_of(model_dir, **offline), batch, steps=2)
    run = alone(pools[world], config, batch, steps=2)
    assert [r.num_forwards for r in stored] == [0] * world
    assert all(r.num_forwards > 0 for r in run)
    for step in range(2):
        got, want = (
            fold_draft_results([r.results[step] for r in records], num_draft_tokens=3) for records in (stored, run)
        )
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-6)
        assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-5)
        assert set(got["metrics"]) == set(want["metrics"])
    for name, tensor in draft_of(run[0].state).items():
        assert (stored[0].state[name] - tensor).abs().max() <= 1e-6, name


def test_a_policy_that_stays_as_it_is_is_not_trained(pools: Any, model_dir: str, data: Any) -> None:
    config = config_of(model_dir)
    with pytest.raises(RuntimeError, match="it has no optimizer"):
        pools[1].run(
            scenarios.train_steps,
            config,
            data,
            num_steps=1,
            worker_kwargs={"draft_spec": draft_spec_of(config), "train_policy": False},
        )
