"""A local hub cache and tiny model directories made of `config.json` files alone, for tests that need no weights.

The cache has the layout that huggingface_hub writes, so the program finds the stubs the way it finds real models.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STUBS = ROOT / "tests" / "fixtures" / "configs"
REVISION = "0" * 40

TINY_POLICIES = {"results/models/tiny-qwen3-64x4-spell": 4, "results/models/tiny-qwen3-64x16-spell": 16}
"""Policies that tools/make_tiny_policy.py makes where the tiny recipes look for them -> layers."""


def tiny_config(num_layers: int) -> dict[str, Any]:
    """The config.json of such a policy."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "vocab_size": 320,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }


def make_hub_cache(hub: Path) -> None:
    """Put every stub into a hub cache.

    Args:
        hub: The `hub` directory of an `HF_HOME`.
    """
    for stub in sorted(path for path in STUBS.iterdir() if path.is_dir()):
        repository = hub / f"models--{stub.name}"
        snapshot = repository / "snapshots" / REVISION
        snapshot.mkdir(parents=True)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(REVISION, encoding="utf-8")
        shutil.copy(stub / "config.json", snapshot / "config.json")


def make_working_directory(directory: Path) -> None:
    """Make what recipes name by relative paths: the tiny policies, and the prompt files.

    Args:
        directory: Becomes the working directory.
    """
    for name, num_layers in TINY_POLICIES.items():
        (directory / name).mkdir(parents=True)
        (directory / name / "config.json").write_text(json.dumps(tiny_config(num_layers)), encoding="utf-8")
    (directory / "examples").symlink_to(ROOT / "examples")
