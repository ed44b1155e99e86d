"""What an exported policy has beside its weights, from directories and from the hub cache."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from transformers import Qwen3Config

from nemo_rl.models.automodel.checkpoint import copy_config
from tests.model_stubs import REVISION, make_hub_cache


class Policy:
    """Only its configuration is looked at."""

    config = Qwen3Config(hidden_size=48)


def export(directory: Path, *, model: str, tokenizer: str) -> dict[str, object]:
    directory.mkdir()
    copy_config(directory, model=Policy(), model_name=model, tokenizer_name=tokenizer, dtype=torch.bfloat16)
    return json.loads((directory / "config.json").read_text())


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a public model in a hub cache."""
    make_hub_cache(tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    directory = tmp_path / "hub" / "models--Qwen--Qwen3-1.7B" / "snapshots" / REVISION
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_text(f'"{name}"')
    return directory


def test_model_of_the_hub(snapshot: Path, tmp_path: Path) -> None:
    config = export(tmp_path / "out", model="Qwen/Qwen3-1.7B", tokenizer="Qwen/Qwen3-1.7B")
    assert config["hidden_size"] == 2048
    assert config["dtype"] == "bfloat16"
    copied = {path.name for path in (tmp_path / "out").iterdir()}
    assert copied == {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}


def test_tokenizer_of_another_place(snapshot: Path, tmp_path: Path) -> None:
    own = tmp_path / "tokenizer"
    own.mkdir()
    (own / "tokenizer.json").write_text('"own"')
    (own / "generation_config.json").write_text('"not the policy\'s"')
    export(tmp_path / "out", model="Qwen/Qwen3-1.7B", tokenizer=str(own))
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '"own"'
    assert (tmp_path / "out" / "generation_config.json").read_text() == '"generation_config.json"'
    assert not (tmp_path / "out" / "tokenizer_config.json").exists()


def test_model_that_is_not_cached(snapshot: Path, tmp_path: Path) -> None:
    config = export(tmp_path / "out", model="nobody/nothing", tokenizer="nobody/nothing")
    assert config["hidden_size"] == 48
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["config.json"]
