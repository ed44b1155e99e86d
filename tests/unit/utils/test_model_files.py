"""Which files of a hub model are fetched, and what is found without asking the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import huggingface_hub.constants
import pytest

from nemo_rl.errors import ConfigError
from nemo_rl.utils.model_files import find_local_model_dir, find_model_dir, has_weights
from tests.model_stubs import make_hub_cache


@pytest.mark.parametrize("allows_pickle", [False, True])
def test_pickled_weights_are_fetched_only_when_they_may_be_read(
    allows_pickle: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: dict[str, Any] = {}

    def download(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert find_model_dir("org/draft", key="policy.draft.model_name", allows_pickle=allows_pickle) == tmp_path
    assert asked["name"] == "org/draft"
    assert ("*.bin" in asked["allow_patterns"]) == allows_pickle
    assert "*.safetensors" in asked["allow_patterns"]


def test_local_search_asks_no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make_hub_cache(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    found = find_local_model_dir("Qwen/Qwen3-8B", key="policy.model_name")
    assert found is not None
    assert (found / "config.json").is_file()
    assert find_local_model_dir("Qwen/no-such", key="policy.model_name") is None
    assert find_local_model_dir(str(tmp_path), key="policy.model_name") == tmp_path


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/no/such", "must be an existing directory or a hub name"),
        ("org/bad..name--", "policy.model_name: got 'org/bad"),
    ],
)
def test_local_search_refuses_what_a_start_refuses(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_local_model_dir(name, key="policy.model_name")


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("model.safetensors", True),
        ("model.safetensors.index.json", True),
        ("pytorch_model.bin", True),
        ("a.json", False),
    ],
)
def test_has_weights(file: str, expected: bool, tmp_path: Path) -> None:
    (tmp_path / file).write_bytes(b"")
    assert has_weights(tmp_path) == expected
