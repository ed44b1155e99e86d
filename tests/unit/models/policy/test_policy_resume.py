"""Resuming policy and draft: on another number of ranks, with a draft started anew, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nemo_rl.models.automodel.draft.registry import resolve_spec
from tests.tiny_models import write_tiny_policy
from tests.unit.models.policy import resume_scenarios, scenarios
from tests.unit.models.policy.scenarios import TEMPERATURE, make_batch, make_config

OPTIMIZER = {"kwargs": {"lr": 1e-3, "weight_decay": 0.0, "betas": [0.9, 0.95], "eps": 1e-4}}
UNROLLED = {"enabled": True, "algo": "eagle3", "aux_layer_indices": [0, 1, 2], "ttt_steps": 3, "optimizer": OPTIMIZER}
BLOCK = {
    "enabled": True,
    "algo": "dflash",
    "aux_layer_indices": [0, 2],
    "num_layers": 1,
    "block_size": 4,
    "mask_token_id": 319,
    "optimizer": OPTIMIZER,
    "warmup_steps": 3,
}
STATIC = {k: v for k, v in UNROLLED.items() if k != "optimizer"} | {"static": True, "model_name": "the checkpoint's"}
IDS = [5 * i % 299 for i in range(100)]
"""Not ascending, so that an id and its rank differ."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return str(write_tiny_policy(tmp_path_factory.mktemp("policy"), layers=4, heads=2, kv=2))


@pytest.fixture(scope="module")
def data():
    return make_batch()


def config_of(model_dir: str, draft: dict[str, Any] | None = UNROLLED, **changes: Any) -> Any:
    policy = changes.pop("policy", {})
    if draft is None:
        return make_config(model_dir, **policy)
    generation = {"temperature": TEMPERATURE, "vllm_kwargs": {"speculative_config": {"num_speculative_tokens": 3}}}
    return make_config(model_dir, draft=draft | changes, generation=generation, **policy)


def spec_of(config: Any, *, ids: list[int] | None = None) -> Any:
    raw = json.loads((Path(config.policy.model_name) / "config.json").read_text())
    return resolve_spec(config.policy.draft, policy_config=raw, k=3, max_model_len=32, dtype="float32", vocab_ids=ids)


def run(pool: Any, config: Any, data: Any, *, ids: list[int] | None = None, **kwargs: Any) -> list[dict[str, Any]]:
    spec = spec_of(config, ids=ids) if config.policy.draft_enabled else None
    return pool.run(resume_scenarios.run, config, data, draft_spec=spec, **kwargs)


def assert_same(left: dict[str, Any], right: dict[str, Any], *parts: str) -> None:
    for part in parts:
        assert left[part].keys() == right[part].keys() != set(), part
        for name, tensor in left[part].items():
            assert torch.equal(tensor, right[part][name]), f"{part} {name}"


@pytest.fixture(scope="module")
def saved(pools, model_dir, data, tmp_path_factory):
    """A checkpoint of one rank after two steps, in both layouts."""
    directory = tmp_path_factory.mktemp("checkpoint")
    config = config_of(model_dir, export_layouts=["native", "speculators"])
    return directory, run(pools[1], config, data, steps=range(2), save_to=str(directory))[0]


# -- another number of ranks -----------------------------------------------------------------------------------------


def test_one_two_one_ranks_hand_everything_on(pools, model_dir, data, saved, tmp_path):
    """Weights, moments and step counters of policy and draft, through both changes, bit for bit."""
    directory, first = saved
    config = config_of(model_dir)
    parts = ("policy", "draft", "policy optimizer", "draft optimizer")
    second = run(pools[2], config, data, load_from=str(directory), save_to=str(tmp_path / "two"))
    for rank in second:
        assert_same(rank["start"], first["end"], *parts)
        assert rank["updates"] == 2
    third = run(pools[1], config, data, load_from=str(tmp_path / "two"), steps=range(2, 4))[0]
    assert_same(third["start"], first["end"], *parts)
    assert third["draws"] == first["draws"], "rank 0 draws on where the first run would have"
    for part, tensors in whole_run(pools, config, data)["end"].items():
        for name, tensor in tensors.items():
            assert torch.equal(third["end"][part][name], tensor), f"{part} {name}"


def whole_run(pools, config, data):
    return run(pools[1], config, data, steps=range(4))[0]


def test_a_checkpoint_holds_the_layouts_that_are_asked_for(saved, model_dir):
    directory = saved[0]
    native, other = (directory / name for name in ("draft", "draft_speculators"))
    assert (native / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    verifier = json.loads((other / "config.json").read_text())["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": model_dir, "architectures": ["Qwen3ForCausalLM"]}
    meta = json.loads((native / "draft_meta.json").read_text())
    assert meta["optimizer"]["class"] == "torch.optim.AdamW"
    weights = load_file(native / "model.safetensors")
    assert all(torch.equal(weights[name], saved[1]["end"]["draft"][name]) for name in weights)


def test_the_optimizers_layout_is_that_of_the_real_optimizer(pools, model_dir):
    config = config_of(model_dir, BLOCK, freeze=["layers.0.mlp"])
    for world in (1, 2):
        layout, real = pools[world].run(resume_scenarios.optimizer_names, config, draft_spec=spec_of(config))[0]
        assert layout["groups"] == real


# -- started anew ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stored", "world"), [("no draft", 1), ("another algorithm", 2)])
def test_a_draft_is_started_anew_beside_the_policy_that_goes_on(pools, model_dir, data, saved, tmp_path, stored, world):
    directory, first = saved
    if stored == "no draft":
        directory = tmp_path
        first = run(pools[1], config_of(model_dir, None), data, steps=range(2), save_to=str(directory))[0]
    config = config_of(model_dir, BLOCK)
    resumed = run(pools[world], config, data, load_from=str(directory), restart_draft=True, steps=range(2, 4))
    fresh = run(pools[world], config, data)[0]
    for rank in resumed:
        assert_same(rank["start"], first["end"], "policy", "policy optimizer")
        assert rank["start"]["draft optimizer"] == {}
        assert rank["updates"] == 2, "counts from its own start"
        # The final norm of a new draft is the policy's: that of the checkpoint, not of the model that it started from.
        norm = first["end"]["policy"]["model.norm.weight"]
        assert torch.equal(rank["start"]["draft"]["norm.weight"], norm)
        assert not torch.equal(rank["start"]["draft"]["norm.weight"], fresh["start"]["draft"]["norm.weight"])
        assert torch.equal(rank["start"]["draft"]["fc.weight"], fresh["start"]["draft"]["fc.weight"])
    assert resumed[0]["draws"] == first["draws"]
    assert resumed[0]["lr"] == pytest.approx(1e-3 * 3 / 4), "two steps of its own warm-up of three are done"
    # The policy learns as it would have without the new draft.
    plain = run(pools[world], config_of(model_dir), data, load_from=str(saved[0]), steps=range(2, 4))
    assert_same(resumed[0]["end"], plain[0]["end"], "policy", "policy optimizer")


def test_a_loaded_draft_is_started_anew_from_its_directory(pools, model_dir, data, saved, tmp_path):
    directory = saved[0]
    draft_dir = str(shutil.copytree(directory / "draft_speculators", tmp_path / "draft"))
    config = config_of(model_dir, model_name=draft_dir)
    later = tmp_path / "later"
    run(pools[1], config_of(model_dir), data, load_from=str(directory), steps=range(2, 3), save_to=str(later))
    resumed = run(pools[1], config, data, draft_dir=draft_dir, load_from=str(later), restart_draft=True)[0]
    assert_same({"draft": without_counter(resumed)}, {"draft": without_counter(saved[1], "end")}, "draft")
    assert resumed["start"]["draft optimizer"] == {}


def without_counter(record, when="start"):
    return {name: tensor for name, tensor in record[when]["draft"].items() if name != "num_updates"}


# -- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draft", "policy", "words"),
    [
        (BLOCK, {}, ('algo: "eagle3", this run "dflash"', "policy.draft.restart: true")),
        (UNROLLED | {"norm_output": True}, {}, ("norm_output: false, this run true", "restart: true")),
        (
            UNROLLED | {"optimizer": OPTIMIZER | {"name": "torch.optim.SGD", "kwargs": {"lr": 1e-3, "momentum": 0.9}}},
            {},
            ('optimizer.class: "torch.optim.AdamW", this run "torch.optim.SGD"', 'state_options: [], this run ["mom'),
        ),
        (UNROLLED | {"freeze": ["norm"]}, {}, ("optimizer.groups.vectors", '"norm.weight"')),
        (STATIC, {}, ('optimizer: "trained", this run null',)),
        (
            UNROLLED | {"optimizer": OPTIMIZER | {"name": "torch.optim.AdamW"}},
            {"optimizer": {"name": "torch.optim.SGD", "kwargs": {"lr": 1e-3}}},
            ("policy.optimizer.name: got torch.optim.sgd.SGD", "was written by torch.optim.adamw.AdamW"),
        ),
    ],
    ids=["algorithm", "architecture", "optimizer", "frozen", "static", "policy_optimizer"],
)
def test_what_does_not_fit_is_refused_with_every_field(pools, model_dir, saved, draft, policy, words):
    if draft.get("model_name"):
        draft = draft | {"model_name": str(saved[0] / "draft")}
    config = config_of(model_dir, draft, policy=policy)
    message = pools[1].run(
        scenarios.try_load, config, str(saved[0]), draft_spec=spec_of(config), draft_dir=draft.get("model_name")
    )[0]
    for text in words:
        assert text in message


def test_a_checkpoint_without_its_draft_directory_is_refused(pools, model_dir, saved, tmp_path):
    """The policy's directory alone has the draft's weights, but nothing that says what they are."""
    config = config_of(model_dir)
    shutil.copytree(saved[0], tmp_path / "step", ignore=shutil.ignore_patterns("draft"))
    message = pools[1].run(scenarios.try_load, config, str(tmp_path / "step"), draft_spec=spec_of(config))[0]
    assert "draft_meta.json: does not exist" in message


@pytest.mark.parametrize("draft", [UNROLLED, BLOCK], ids=["own_head", "live_head"])
def test_one_vocabulary_is_used_everywhere_after_a_resume(pools, model_dir, data, tmp_path, draft):
    config = config_of(model_dir, draft, draft_vocab_size=100)
    step = str(tmp_path / "step")
    run(pools[1], config, data, ids=IDS, steps=range(1), save_to=step)
    used = pools[1].run(
        resume_scenarios.vocabulary_in_use,
        config,
        load_from=step,
        export_to=str(tmp_path / "again"),
        draft_spec=spec_of(config, ids=IDS),
        check_rows=draft is BLOCK,
    )[0]
    assert used.pop("mask") == sorted(IDS)
    assert len(used) == (4 if draft is BLOCK else 3)
    assert all(ids == IDS for ids in used.values()), used
    # Counted again from data in another order, the same ids are another map.
    message = pools[1].run(scenarios.try_load, config, step, draft_spec=spec_of(config, ids=sorted(IDS)))[0]
    assert "vocab_ids: 100 entries, this run 100 entries" in message
