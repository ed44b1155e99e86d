"""A published draft with too few positions, as the engine gets it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.utils.served_draft import directory_with_positions


def make(directory: Path, config: dict[str, Any]) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


def test_enough_positions_need_no_other_directory(tmp_path: Path) -> None:
    source = make(tmp_path / "draft", {"max_position_embeddings": 4096})
    assert directory_with_positions(source, 4096, target=tmp_path / "served") == source
    assert not (tmp_path / "served").exists()


@pytest.mark.parametrize("key", [None, "transformer_layer_config"], ids=["native", "speculators"])
def test_positions_are_raised_beside_links_to_the_weights(tmp_path: Path, key: str | None) -> None:
    sizes = {"max_position_embeddings": 2048, "hidden_size": 8}
    published = sizes if key is None else {key: sizes, "draft_vocab_size": 4}
    source = make(tmp_path / "draft", published)
    served = directory_with_positions(source, 8196, target=tmp_path / "served")
    config = json.loads((served / "config.json").read_text())
    assert (config if key is None else config[key]) == {"max_position_embeddings": 8196, "hidden_size": 8}
    assert (served / "model.safetensors").resolve() == (source / "model.safetensors").resolve()
    assert json.loads((source / "config.json").read_text()) == published


def test_a_second_run_replaces_the_first_ones_links(tmp_path: Path) -> None:
    old, new = (make(tmp_path / name, {"max_position_embeddings": 10}) for name in ("old", "new"))
    for source in (old, new):
        served = directory_with_positions(source, 20, target=tmp_path / "served")
    assert (served / "model.safetensors").resolve() == (new / "model.safetensors").resolve()
