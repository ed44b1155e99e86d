"""Valid tiny draft directories of every algorithm and layout, as somebody else would have written them. No torch."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from nemo_rl.models.automodel.draft.adapters.base import Verifier
from nemo_rl.models.automodel.draft.registry import adapter_of, resolve_spec
from nemo_rl.models.automodel.draft.spec import DraftSpec
from nemo_rl.models.automodel.draft.vocab import VocabMap
from tests.unit.models.automodel.draft.algorithms import ALGORITHMS, MASK_TOKEN, K, config_for

VOCAB = MASK_TOKEN + 1
POLICY: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 6,
    "hidden_size": 8,
    "vocab_size": VOCAB,
    "intermediate_size": 12,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
}
REDUCED = tuple(range(0, VOCAB, 5))
"""Ids of a draft with a reduced vocabulary."""

LAYOUTS = [(algo, layout) for algo in ALGORITHMS for layout in adapter_of(algo).layouts]


@functools.cache
def spec_of(algo: str, *, is_reduced: bool = False) -> DraftSpec:
    """The draft that the directory holds.

    Args:
        algo: name in the registry.
        is_reduced: it proposes the ids of `REDUCED` only.
    """
    changes = {"draft_vocab_size": len(REDUCED)} if is_reduced else {}
    ids = REDUCED if is_reduced else None
    return resolve_spec(
        config_for(algo, **changes), policy_config=POLICY, k=K, max_model_len=64, dtype="float32", vocab_ids=ids
    )


def config_of(spec: DraftSpec, layout: str = "native") -> dict[str, Any]:
    """Its config.json; without our own mark, where the layout allows that.

    Args:
        spec: of the draft.
        layout: one of the adapter's.
    """
    adapter = adapter_of(spec.algo)
    if layout == "speculators":
        verifier = Verifier("policy", ("Qwen3ForCausalLM",))
        config = adapter.write_speculators(spec.architecture, dtype="float32", k=K, verifier=verifier)
    else:
        config = adapter.write_config(spec.architecture, dtype="float32")
    config.pop("nemo_rl_draft", None)
    if spec.algo == "eagle1":
        # The original authors' files know no such key, by which they are told from later ones.
        config.pop("draft_vocab_size")
    return json.loads(json.dumps(config))


def tensors_of(spec: DraftSpec) -> dict[str, np.ndarray]:
    """Name to values; random ones, tables of the vocabulary as they must be.

    Args:
        spec: of the draft.
    """
    draws, arch = np.random.default_rng(0), spec.architecture
    tensors = {
        name: draws.standard_normal(shape).astype(np.float32)
        for name, shape in (arch.published_shapes() | arch.frozen_shapes()).items()
        if name not in ("d2t", "t2d")
    }
    if spec.vocab_ids is not None:
        vocab = VocabMap(spec.vocab_ids, VOCAB)
        tensors["d2t"] = np.array(vocab.d2t, dtype=np.int64)
        tensors["t2d"] = np.array(vocab.t2d, dtype=bool)
    return tensors


def write_draft_directory(
    directory: Path,
    spec: DraftSpec,
    *,
    layout: str = "native",
    config: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    num_shards: int = 1,
) -> Path:
    """Write config.json and weights.

    Args:
        directory: created if absent.
        spec: of the draft.
        layout: of the config.json.
        config: instead of the draft's own.
        tensors: instead of the draft's own.
        num_shards: weight files; from two on with an index.
    """
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config_of(spec, layout) if config is None else config)
    (directory / "config.json").write_text(text, encoding="utf-8")
    tensors = dict(tensors_of(spec) if tensors is None else tensors)
    if num_shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return directory
    weight_map = {}
    for i in range(num_shards):
        name = f"model-{i + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[i::num_shards]}
        save_file(part, directory / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return directory


def loading_config(algo: str, directory: Path, **changes: Any) -> Any:
    """`policy.draft` that loads the directory and leaves to it what it says.

    Args:
        algo: name in the registry.
        directory: of the draft.
        changes: fields that are set.
    """
    cfg = type(config_for(algo))
    return cfg(enabled=True, model_name=str(directory), **changes)


def resolve(algo: str, directory: Path, **changes: Any) -> DraftSpec:
    """Resolve a directory against the policy."""
    cfg = loading_config(algo, directory, **changes)
    return resolve_spec(cfg, policy_config=POLICY, k=K, max_model_len=64, dtype="float32")
