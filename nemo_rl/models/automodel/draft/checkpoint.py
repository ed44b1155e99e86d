"""Directories of a draft: the export that the engine loads unchanged, with the metadata that a resume checks.

    config.json                        as the engine reads it, in one of two layouts
    model.safetensors                  all tensors; or, when they are large,
    model-0000i-of-0000n.safetensors   shards, and
    model.safetensors.index.json       which tensor is in which
    draft_meta.json                    format version, algorithm and everything that decides whether weights fit

Both layouts hold the same tensors: the embedding and the head only when the draft owns them (readers of either layout
take the policy's otherwise), `d2t` and `t2d` only for a reduced vocabulary. Equal drafts give equal bytes.

Imports no runtime.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from nemo_rl.errors import CheckpointError
from nemo_rl.models.automodel.draft.builders import load_tensors
from nemo_rl.models.automodel.draft.metadata import (
    META_FILE,
    RESTART_HINT,
    describe,
    differences,
    incomplete,
    is_weight_file,
    read_meta,
    sealed,
    verify_files,
)
from nemo_rl.models.automodel.draft.spec import DraftSpec
from nemo_rl.models.automodel.draft.vocab import VocabMap

__all__ = [
    "MAX_SHARD_BYTES",
    "META_FILE",
    "check_meta",
    "load_weights",
    "read_meta",
    "save_draft",
    "verify_files",
    "write_draft",
]

MAX_SHARD_BYTES = 4 << 30
"""Weights beyond this many bytes are cut into files."""

_PARTIAL = ".partial"
_INDEX = "model.safetensors.index.json"


def write_draft(
    directory: Path,
    tensors: Mapping[str, Tensor],
    *,
    config: Mapping[str, Any],
    max_shard_bytes: int = MAX_SHARD_BYTES,
    meta: Mapping[str, Any] | None = None,
) -> None:
    """Write config.json and weights. One process calls it.

    Everything is written beside what is there before the first file is replaced. From the first replacement to the last
    the directory is marked as incomplete, so that a process killed in between leaves the old draft, the new one, or one
    that is refused. Other files of the directory stay, weights of an earlier sharding do not.

    Args:
        directory: created if absent.
        tensors: name as in the file to whole tensor; names may come in any order.
        config: of config.json.
        max_shard_bytes: weights beyond it are sharded; a larger tensor has a shard of its own.
        meta: of draft_meta.json, without the files; None = the directory has none afterwards.

    Raises:
        CheckpointError: a file cannot be written.
    """
    plain = {name: tensors[name].detach().cpu().contiguous() for name in sorted(tensors)}
    plan = _plan_shards(plain, max_shard_bytes)
    is_single = len(plan) == 1
    shards = {
        "model.safetensors" if is_single else f"model-{i:05d}-of-{len(plan):05d}.safetensors": names
        for i, names in enumerate(plan, start=1)
    }
    files: dict[str, Callable[[Path], None]] = {"config.json": lambda path: _dump(path, config)}
    for file, names in shards.items():
        part = {name: plain[name] for name in names}
        files[file] = lambda path, part=part: save_file(part, str(path), metadata={"format": "pt"})
    if not is_single:
        weight_map = {name: file for file, names in shards.items() for name in names}
        index = {"metadata": {"total_size": sum(map(_size, plain.values()))}, "weight_map": weight_map}
        files[_INDEX] = lambda path: _dump(path, index)
    try:
        _replace(directory, files, meta)
    except OSError as err:
        raise CheckpointError(f"{directory}: the draft could not be written ({err.strerror or err}).") from err


def _plan_shards(tensors: Mapping[str, Tensor], max_bytes: int) -> list[list[str]]:
    """Names of each file, in order; one empty file for no tensors."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, tensor in tensors.items():
        size = _size(tensor)
        if shards[-1] and used + size > max_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _replace(directory: Path, files: Mapping[str, Callable[[Path], None]], meta: Mapping[str, Any] | None) -> None:
    """Write every file aside, then put them in place; draft_meta.json goes first as a mark and last as itself."""
    directory.mkdir(parents=True, exist_ok=True)
    for leftover in directory.glob(f"*{_PARTIAL}"):
        leftover.unlink()
    for name, write in files.items():
        write(directory / f"{name}{_PARTIAL}")
        _sync(directory / f"{name}{_PARTIAL}")
    stale = [p for p in directory.iterdir() if is_weight_file(p.name) and p.name not in files]
    meta_path = directory / META_FILE
    if stale or meta_path.exists() or any((directory / name).exists() for name in files):
        _put(meta_path, incomplete())
    for path in stale:
        path.unlink()
    for name in files:
        (directory / f"{name}{_PARTIAL}").replace(directory / name)
    if meta is not None:
        _put(meta_path, sealed(meta, directory, list(files)))
    else:
        meta_path.unlink(missing_ok=True)


def _put(path: Path, value: Mapping[str, Any]) -> None:
    partial = path.with_name(path.name + _PARTIAL)
    _dump(partial, value)
    _sync(partial)
    partial.replace(path)


def _dump(path: Path, value: Mapping[str, Any]) -> None:
    # Sorted, so that equal drafts give equal bytes whatever they were read from.
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def save_draft(
    directory: Path,
    spec: DraftSpec,
    *,
    config: Mapping[str, Any],
    published: Mapping[str, Tensor],
    vocab: VocabMap | None,
    embedding: Tensor | None,
    layout: str = "native",
    optimizer: Mapping[str, Any] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a draft directory with its metadata. One process calls it.

    Args:
        directory: created if absent; see `write_draft`.
        spec: of the draft.
        config: its config.json.
        published: name to whole tensor of its serving dtype.
        vocab: which ids it proposes; None = all.
        embedding: float [V, H] of a draft that owns one which it does not train.
        layout: of `config`.
        optimizer: what `metadata.optimizer_layout` returned.
        max_shard_bytes: weights beyond it are sharded.
    """
    tensors = dict(published)
    if vocab is not None:
        tensors["d2t"] = torch.tensor(vocab.d2t, dtype=torch.int64)
        tensors["t2d"] = torch.tensor(vocab.t2d, dtype=torch.bool)
    if embedding is not None:
        tensors["embed_tokens.weight"] = embedding.to(getattr(torch, spec.dtype))
    ids = None if vocab is None else vocab.ids
    meta = describe(spec, vocab_ids=ids, optimizer=optimizer, layout=layout)
    write_draft(directory, tensors, config=config, max_shard_bytes=max_shard_bytes, meta=meta)


def check_meta(
    directory: Path,
    spec: DraftSpec,
    vocab: VocabMap | None,
    *,
    optimizer: Mapping[str, Any] | None = None,
    with_optimizer: bool = False,
) -> None:
    """Refuse a checkpoint whose draft is not the one of this run.

    Args:
        directory: as `save_draft` wrote it.
        spec: of this run's draft.
        vocab: of this run's draft.
        optimizer: what `metadata.optimizer_layout` returns for this run.
        with_optimizer: whether the optimizer must fit, too.

    Raises:
        CheckpointError: naming every field that differs.
    """
    stored = read_meta(directory)
    wanted = describe(spec, vocab_ids=None if vocab is None else vocab.ids, optimizer=optimizer)
    if not with_optimizer:
        wanted.pop("optimizer")
    differing = differences(stored, wanted)
    if differing:
        raise CheckpointError(
            f"{directory}: holds another draft ({'; '.join(differing)}). Resume with the settings that it was written "
            f"with, or {RESTART_HINT}."
        )


def load_weights(directory: Path, spec: DraftSpec, vocab: VocabMap | None) -> dict[str, Tensor]:
    """Check metadata and files of a directory and read its parameters.

    Args:
        directory: as `save_draft` wrote it.
        spec: of this run's draft.
        vocab: of this run's draft.
    """
    check_meta(directory, spec, vocab)
    verify_files(directory)
    tensors = load_tensors(directory, spec.architecture, trust_pickle=False)
    return {name: tensors[name] for name in spec.architecture.trained_shapes()}
