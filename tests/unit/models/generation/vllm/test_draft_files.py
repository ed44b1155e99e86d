"""Which files of a draft directory count: the engine's loader and ours agree."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from nemo_rl.models.automodel.draft.weight_files import find_weight_files


def test_the_choice_of_files_is_the_engines(tmp_path: Path) -> None:
    def engine() -> set[str]:
        _, files, _, _ = DefaultModelLoader(LoadConfig())._prepare_weights(str(tmp_path), None, None, True, None)
        return {os.path.basename(file) for file in files}

    def ours() -> set[str]:
        return {file.name for file in find_weight_files(tmp_path).files}

    save_file({"a": np.zeros(2)}, tmp_path / "x.safetensors")
    for name in ("pytorch_model.bin", "training_args.bin", "extra.pt"):
        (tmp_path / name).write_bytes(b"whatever")
    assert ours() == engine() == {"x.safetensors"}
    save_file({"b": np.zeros(2)}, tmp_path / "y.safetensors")
    assert ours() == engine() == {"x.safetensors", "y.safetensors"}
    index = {"weight_map": {"a": "x.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    assert ours() == engine() == {"x.safetensors"}
    for file in tmp_path.glob("*.safetensors*"):
        file.unlink()
    assert ours() == engine() == {"pytorch_model.bin"}
    (tmp_path / "pytorch_model.bin").unlink()
    (tmp_path / "training_args.bin").unlink()
    assert ours() == engine() == {"extra.pt"}
