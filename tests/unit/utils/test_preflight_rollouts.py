"""What is refused of a rollout store before anything starts, and what `collect_only` makes of the draft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from nemo_rl.algorithms.config import MasterConfig
from nemo_rl.data.rollout_index import StoreIndex, read_index, write_index
from nemo_rl.errors import ConfigError
from nemo_rl.utils.config import build_master_config
from nemo_rl.utils.preflight import preflight
from nemo_rl.utils.preflight_rollouts import store_identity

DRAFT = {"enabled": True, "aux_layer_indices": [0, 1, 2], "num_attention_heads": 2, "num_key_value_heads": 1}


POLICY = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}


@pytest.fixture
def policy_dir(tmp_path: Path) -> str:
    directory = tmp_path / "policy"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(POLICY))
    (directory / "tokenizer.json").write_text("{}")
    save_file({"weight": np.zeros(4, dtype=np.float32)}, directory / "model.safetensors")
    return str(directory)


def config(policy_dir: str, directory: Path, store: dict[str, Any], **policy: Any) -> MasterConfig:
    spec = {"num_speculative_tokens": 2}
    draft = policy.pop("draft", DRAFT)
    if draft is None or not draft.get("serve", True):
        spec["method"] = "ngram"
    tree = {
        "policy": {
            "model_name": policy_dir,
            "tokenizer": {"name": policy_dir},
            "train_global_batch_size": 512,
            "max_total_sequence_length": 64,
            "generation": {"vllm_cfg": {"max_model_len": 64}, "vllm_kwargs": {"speculative_config": spec}},
            **({} if draft is None else {"draft": draft}),
            **policy,
        },
        "data": {
            "max_input_seq_length": 32,
            "dataset_name": "reasoning_gym",
            "reasoning_gym": {"task": "spell_backward"},
        },
        "env": {"name": "reasoning_gym"},
        "cluster": {"device": "cpu"},
        "checkpointing": {"checkpoint_dir": str(directory / "checkpoints")},
        "logger": {"log_dir": str(directory / "logs")},
        "rollout_store": {"dir": str(directory / "rollouts"), **store},
    }
    return build_master_config(tree)


@pytest.mark.parametrize(
    ("store", "draft", "message"),
    [
        (
            {"mode": "record", "features": True},
            None,
            "rollout_store.features: got true with policy.draft.enabled: false",
        ),
        ({"features": True}, DRAFT, "rollout_store.features: got true with rollout_store.mode: off"),
        (
            {"mode": "collect_only"},
            DRAFT | {"train_every": 2, "freeze": ["fc"]},
            "rollout_store.mode: got collect_only with policy.draft.train_every, policy.draft.freeze",
        ),
        ({"mode": "collect_only"}, DRAFT | {"serve": False}, "policy.draft.serve: got false with rollout_store.mode"),
    ],
    ids=["no-draft", "nothing-recorded", "keys-of-training", "neither-served-nor-trained"],
)
def test_settings_that_contradict_each_other(
    tmp_path: Path, store: dict[str, Any], draft: dict[str, Any] | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config("unused", tmp_path, store, draft=draft)


@pytest.mark.parametrize(
    ("store", "draft"),
    [
        ({"mode": "record"}, None),
        ({"mode": "collect_only"}, None),
        ({"mode": "collect_only", "features": True}, DRAFT | {"serve": False}),
        ({"mode": "record", "features": True}, DRAFT | {"train_every": 2}),
    ],
)
def test_settings_that_go_together(tmp_path: Path, store: dict[str, Any], draft: dict[str, Any] | None) -> None:
    config("unused", tmp_path, store, draft=draft)


def test_collect_only_serves_a_new_draft_as_it_is(policy_dir: str, tmp_path: Path) -> None:
    trained = preflight(config(policy_dir, tmp_path, {"mode": "record"})).draft_spec
    served = preflight(config(policy_dir, tmp_path, {"mode": "collect_only"})).draft_spec
    assert trained is not None
    assert served is not None
    assert (trained.is_static, served.is_static) == (False, True)
    assert served.published_names == ()
    assert served.serving == trained.serving


def test_a_store_of_another_kind_is_refused_before_anything_starts(policy_dir: str, tmp_path: Path) -> None:
    cfg = config(policy_dir, tmp_path, {"mode": "record", "features": True})
    checked = preflight(cfg)
    identity = store_identity(
        cfg, model_dir=checked.model_dir, policy_config=checked.policy_config, draft_spec=checked.draft_spec
    )
    assert identity.features is not None
    assert (identity.features.ids, identity.features.size) == ((1, 2, 3), 64)
    assert identity.features.dtype == "bfloat16"
    directory = tmp_path / "rollouts"
    directory.mkdir()
    write_index(directory, StoreIndex(identity=identity))
    preflight(cfg)
    write_index(directory, StoreIndex(identity=identity.model_copy(update={"vocab_size": 7, "features": None})))
    with pytest.raises(ConfigError) as caught:
        preflight(cfg)
    assert "rollout_store.dir: " in str(caught.value)
    assert "vocabulary of 7; the policy's has 320" in str(caught.value)
    assert "rollout_store.features: " in str(caught.value)
    (directory / "store.json").write_text("{")
    with pytest.raises(ConfigError, match=r"rollout_store.dir: .*store.json: is not the index"):
        preflight(cfg)
    assert read_index(tmp_path / "absent") is None
