"""Directories of a draft: the export that the engine loads unchanged, with the metadata that a resume checks.

    config.json, model.safetensors     as the engine reads them
    draft_meta.json                    format version, algorithm and everything that decides whether weights fit

Imports no runtime.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from nemo_rl.errors import CheckpointError
from nemo_rl.models.automodel.draft.builders import load_tensors
from nemo_rl.models.automodel.draft.spec import DraftSpec
from nemo_rl.models.automodel.draft.vocab import VocabMap
from nemo_rl.models.automodel.draft.weight_files import read_json

__all__ = ["META_FILE", "check_meta", "load_weights", "read_meta", "save_draft"]

META_FILE = "draft_meta.json"
FORMAT_VERSION = 1


def _meta(spec: DraftSpec, vocab: VocabMap | None) -> dict[str, Any]:
    return {
        "format_version": FORMAT_VERSION,
        "algo": spec.algo,
        "dtype": spec.dtype,
        "spec": spec.architecture.identity() | {"vocab_ids": None if vocab is None else list(vocab.ids)},
    }


def save_draft(
    directory: Path,
    spec: DraftSpec,
    *,
    config: Mapping[str, Any],
    published: Mapping[str, Tensor],
    vocab: VocabMap | None,
    embedding: Tensor | None,
) -> None:
    """Write a draft directory. One process calls it; files are replaced one by one, each complete.

    Args:
        directory: created if absent.
        spec: of the draft.
        config: its config.json.
        published: name to whole tensor of its serving dtype.
        vocab: which ids it proposes; None = all.
        embedding: float [V, H] of a draft that owns one which it does not train.
    """
    tensors = dict(published)
    if vocab is not None:
        tensors["d2t"] = torch.tensor(vocab.d2t, dtype=torch.int64)
        tensors["t2d"] = torch.tensor(vocab.t2d, dtype=torch.bool)
    if embedding is not None:
        tensors["embed_tokens.weight"] = embedding.to(getattr(torch, spec.dtype))
    tensors = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        partial = directory / "model.safetensors.partial"
        save_file(tensors, str(partial), metadata={"format": "pt"})
        partial.replace(directory / "model.safetensors")
        _write_json(directory / "config.json", config)
        _write_json(directory / META_FILE, _meta(spec, vocab))
    except OSError as err:
        raise CheckpointError(f"{directory}: the draft could not be written ({err.strerror}).") from err


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def read_meta(directory: Path) -> dict[str, Any]:
    """Read `draft_meta.json` of a directory that this program wrote."""
    path = directory / META_FILE
    if not path.is_file():
        raise CheckpointError(f"{path}: does not exist; the checkpoint holds no draft of this program.")
    meta = read_json(path)
    version = meta.get("format_version")
    if version != FORMAT_VERSION:
        raise CheckpointError(f"{path}: has format_version {version!r}; this program reads {FORMAT_VERSION}.")
    if not isinstance(meta.get("spec"), dict) or "algo" not in meta:
        raise CheckpointError(f"{path}: lacks algo or spec. The file is corrupted; use an earlier checkpoint.")
    return meta


def check_meta(directory: Path, spec: DraftSpec, vocab: VocabMap | None) -> None:
    """Refuse a checkpoint whose draft is not the one of this run.

    Args:
        directory: as `save_draft` wrote it.
        spec: of this run's draft.
        vocab: of this run's draft.
    """
    stored, wanted = read_meta(directory), _meta(spec, vocab)
    if stored["algo"] != wanted["algo"]:
        raise CheckpointError(
            f"{directory}: holds a draft of algorithm {stored['algo']!r}; this run has policy.draft.algo "
            f"{spec.algo!r}. Resume with the algorithm that it was written with."
        )
    old, new = stored["spec"], json.loads(json.dumps(wanted["spec"]))
    differing = sorted(k for k in old.keys() | new.keys() if old.get(k) != new.get(k))
    if differing:
        shown = "; ".join(f"{k}: {_short(old.get(k))}, this run {_short(new.get(k))}" for k in differing)
        raise CheckpointError(
            f"{directory}: holds another draft ({shown}). Resume with the settings it was written with."
        )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def load_weights(directory: Path, spec: DraftSpec, vocab: VocabMap | None) -> dict[str, Tensor]:
    """Check the metadata of a directory and read its parameters.

    Args:
        directory: as `save_draft` wrote it.
        spec: of this run's draft.
        vocab: of this run's draft.
    """
    check_meta(directory, spec, vocab)
    tensors = load_tensors(directory, spec.architecture, trust_pickle=False)
    return {name: tensors[name] for name in spec.architecture.trained_shapes()}
