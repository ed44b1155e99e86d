"""Weight files of a checkpoint directory, read as far as their headers. Nothing here needs torch.

A safetensors file is 8 bytes of header length, a JSON header (name -> dtype, shape, byte range) and the bytes.

Which files count, as for the engine: safetensors before `*.bin` before `*.pt`. With an index only the shards that it
names, whatever else lies beside them; without one every file of the kind, with no name in two of them. Whatever a file
says, it is believed only after it agreed with the file's size, so that nothing is allocated on its word.
"""

from __future__ import annotations

import array
import os
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from nemo_rl.errors import CheckpointError
from nemo_rl.utils.safe_files import open_regular, parse_json, read_json_object, shown

__all__ = [
    "StoredTensor",
    "WeightFiles",
    "check_dtypes",
    "find_weight_files",
    "is_zero",
    "member",
    "pickle_refusal",
    "read_integers",
]

_BITS = {
    **{"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U8": 8, "BOOL": 8},
    **{"U64": 64, "U32": 32, "U16": 16, "C64": 64, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8},
    **{"F6_E2M3": 6, "F6_E3M2": 6, "F4": 4},
}
"""Bits of an element of each dtype that the format has."""

_MAX_HEADER = 16 << 20
"""Bytes of a header or an index: a hundred thousand tensors; a draft has some dozens."""

_MAX_AXES = 16
_FLOATS = ("F64", "F32", "F16", "BF16")
_TABLES = {"d2t": ("I64", "I32"), "t2d": ("BOOL", "U8")}
_INTEGER_CODES = {"I64": "q", "I32": "i", "U8": "B", "BOOL": "B"}
_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.[a-z]+")

_PICKLES_OF_TRAINERS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
"""Pickles that trainers leave beside the weights; the engine skips files whose names end so."""

_MASK_EMBEDDING = "mask_embedding.pt"


class StoredTensor(NamedTuple):
    """Where one tensor lies."""

    file: Path
    dtype: str
    """The safetensors name: `F32`, `BF16`, `I64`, `BOOL`, ..."""
    shape: tuple[int, ...]
    begin: int
    """First byte in the file."""


@dataclass(frozen=True)
class WeightFiles:
    """The weights of a directory.

    Attributes:
        tensors: name as stored to its place; empty for pickles, which cannot be listed without running them.
        pickles: pickle files to read, when there are no safetensors.
        index: the file that lists the shards, if there is one.
        ignored: names of further files of weights, which the index does not name or which come after safetensors.
    """

    tensors: Mapping[str, StoredTensor]
    pickles: tuple[Path, ...] = ()
    index: Path | None = None
    ignored: tuple[str, ...] = ()

    @property
    def pickle(self) -> Path | None:
        """The first pickle file; None for safetensors."""
        return self.pickles[0] if self.pickles else None

    @property
    def files(self) -> tuple[Path, ...]:
        """Files that hold the weights, sorted."""
        return self.pickles or tuple(sorted({tensor.file for tensor in self.tensors.values()}))


def member(directory: Path, name: str) -> Path:
    """Path of a file of a checkpoint directory that a file or a convention names.

    A symbolic link may lead to a file of the same directory, or, where the directory is a snapshot in the hub's cache,
    to a blob of the same repository. Any other link is refused: a checkpoint made by others could name a private file,
    whose content an export would pass on.

    Args:
        directory: of the checkpoint; may itself be a link.
        name: of a file directly in it.

    Raises:
        CheckpointError: the name is a path, or the file lies elsewhere.
    """
    if not _is_plain(name):
        raise CheckpointError(f"{directory}: {shown(name)} is named as a file of the directory; must be a plain name.")
    root, real = Path(os.path.realpath(directory)), Path(os.path.realpath(directory / name))
    if real.is_relative_to(root) or any(real.parent == blobs for blobs in _hub_blobs(root)):
        return directory / name
    raise CheckpointError(
        f"{directory / name}: is a symbolic link to {real}, outside the directory. Copy the file there if it belongs "
        "to the checkpoint."
    )


def _is_plain(name: Any) -> bool:
    return (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and len(name) <= 255
        and name.isprintable()
        and not set(name) & set("/\\")
    )


def _hub_blobs(root: Path) -> Iterable[Path]:
    """Where files of a snapshot lie: `models--<name>/blobs` for `models--<name>/snapshots/<revision>`."""
    for parent in root.parents:
        if parent.name == "snapshots" and parent.parent.name.startswith("models--"):
            yield parent.parent / "blobs"


def find_weight_files(directory: Path) -> WeightFiles:
    """List every tensor of a checkpoint directory and check that the files are whole.

    Args:
        directory: holds safetensors, or pickles; see the module docstring for which count.

    Raises:
        CheckpointError: there are none, or one is missing or damaged; names the file.
    """
    try:
        names = sorted(entry.name for entry in os.scandir(directory))
    except OSError as err:
        raise CheckpointError(f"{directory}: cannot be listed ({err.strerror}).") from err
    skipped = (*_PICKLES_OF_TRAINERS, _MASK_EMBEDDING)
    kinds = {
        suffix: [n for n in names if n.endswith(suffix) and not n.startswith(".") and not n.endswith(skipped)]
        for suffix in (".safetensors", ".bin", ".pt")
    }
    index_name = "model.safetensors.index.json"
    if index_name in names:
        index = member(directory, index_name)
        shards = _shards_of(index)
        others = [name for kind in kinds.values() for name in kind if name not in shards]
        return WeightFiles(_read_shards(directory, shards, index), index=index, ignored=tuple(others))
    if kinds[".safetensors"]:
        _check_numbering(directory, kinds[".safetensors"], index_name)
        shards = {name: [] for name in kinds[".safetensors"]}
        return WeightFiles(_read_shards(directory, shards, None), ignored=(*kinds[".bin"], *kinds[".pt"]))
    index_name = "pytorch_model.bin.index.json"
    if index_name in names:
        index = member(directory, index_name)
        pickles = tuple(_present(directory, name, index) for name in sorted(_shards_of(index)))
        others = [name for suffix in (".bin", ".pt") for name in kinds[suffix] if directory / name not in pickles]
        return WeightFiles({}, pickles, index, tuple(others))
    for suffix in (".bin", ".pt"):
        if kinds[suffix]:
            _check_numbering(directory, kinds[suffix], index_name)
            pickles = tuple(_present(directory, name, None) for name in kinds[suffix])
            return WeightFiles({}, pickles, ignored=tuple(kinds[".pt"]) if suffix == ".bin" else ())
    raise CheckpointError(
        f"{directory}: holds no weights; expected model.safetensors, or shards with model.safetensors.index.json."
    )


def _shards_of(index: Path) -> dict[str, list[str]]:
    """Shard name to the tensors that an index says are in it."""
    weight_map = read_json_object(index, max_bytes=_MAX_HEADER).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: has no weight_map. The file is corrupted; restore it.")
    shards: dict[str, list[str]] = {}
    for tensor, name in weight_map.items():
        if not _is_plain(name):
            raise CheckpointError(f"{index}: names the shard {shown(name)}; a shard is a file of the same directory.")
        shards.setdefault(name, []).append(tensor)
    return shards


def _check_numbering(directory: Path, names: list[str], index_name: str) -> None:
    """Shards without an index must say themselves that none is missing."""
    for stem, total in {(m["stem"], m["total"]) for m in map(_NUMBERED.fullmatch, names) if m}:
        found = {
            int(m["number"]) for m in map(_NUMBERED.fullmatch, names) if m and (m["stem"], m["total"]) == (stem, total)
        }
        if len(found) != int(total) or found - set(range(1, int(total) + 1)):
            raise CheckpointError(
                f"{directory}: has {len(found)} of {int(total)} shards and no {index_name}. Restore the missing files."
            )


def _present(directory: Path, name: str, index: Path | None) -> Path:
    path = member(directory, name)
    if index is not None and not path.exists():
        raise CheckpointError(f"{index}: names the shard {name}, which does not exist. Restore it.")
    try:
        open_regular(path).close()
    except OSError as err:
        raise CheckpointError(f"{path}: cannot be read ({err.strerror}).") from err
    return path


def _read_shards(directory: Path, shards: Mapping[str, list[str]], index: Path | None) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for name in sorted(shards):
        found = _header(_present(directory, name, index))
        twice = next((key for key in found if key in tensors), None)
        if twice is not None:
            raise CheckpointError(
                f"{directory}: tensor {shown(twice)} is in two shards, {tensors[twice].file.name} and {name}. Remove "
                "the file that does not belong there."
            )
        missing = [key for key in shards[name] if key not in found]
        if missing:
            raise CheckpointError(
                f"{index}: lists {len(missing)} tensors in {name} that it does not hold, first {shown(missing[:3])}. "
                "Restore index and shards from one source."
            )
        tensors |= found
    return tensors


# -- headers ---------------------------------------------------------------------------------------------------------


def _header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file; their bytes fill the rest of the file without holes or overlaps."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
            raw = file.read(length) if 2 <= length <= min(size - 8, _MAX_HEADER) else b""
    except OSError as err:
        raise CheckpointError(f"{path}: cannot be read ({err.strerror}).") from err
    if head == b"version ":
        raise CheckpointError(f"{path}: is a Git LFS pointer, not the file itself. Fetch the file.")
    if not raw or len(raw) != length:
        raise CheckpointError(f"{path}: is truncated or not a safetensors file ({size} bytes). Restore it.")
    try:
        entries = parse_json(raw)
        if not isinstance(entries, dict):
            raise ValueError(f"it is a JSON {type(entries).__name__}")
        metadata = entries.pop("__metadata__", None) or {}
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("__metadata__ is no table of texts")
        data = size - 8 - length
        ranges = {name: _checked_entry(name, entry, data) for name, entry in entries.items()}
    except ValueError as err:
        raise CheckpointError(f"{path}: has a damaged safetensors header: {err}. Restore the file.") from err
    end = 0
    for name, (_, _, begin, stop) in sorted(ranges.items(), key=lambda item: item[1][2:]):
        if begin != end:
            what = "overlaps another one" if begin < end else f"begins {begin - end} bytes behind the one before it"
            raise CheckpointError(f"{path}: is damaged: tensor {shown(name)} {what}. Restore the file.")
        end = stop
    if end != data:
        raise CheckpointError(
            f"{path}: is truncated or damaged: {size} bytes, its header asks for {8 + length + end}. Restore it."
        )
    return {n: StoredTensor(path, dtype, shape, 8 + length + begin) for n, (dtype, shape, begin, _) in ranges.items()}


def _checked_entry(name: str, entry: Any, data: int) -> tuple[str, tuple[int, ...], int, int]:
    """Dtype, shape and byte range of one tensor, which agree with each other; the range may lie behind `data` bytes."""
    if not isinstance(entry, dict):
        raise ValueError(f"tensor {shown(name)} is a JSON {type(entry).__name__}")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise ValueError(f"tensor {shown(name)} has the unknown dtype {shown(dtype)}")
    sizes, span = _sizes(shape), _sizes(offsets)
    if sizes is None or len(sizes) > _MAX_AXES:
        raise ValueError(f"tensor {shown(name)} has shape {shown(shape)}")
    if span is None or len(span) != 2 or span[0] > span[1]:
        raise ValueError(f"tensor {shown(name)} has data_offsets {shown(offsets)}")
    if _BITS[dtype] * prod(sizes) != 8 * (span[1] - span[0]):
        raise ValueError(
            f"tensor {shown(name)} has {span[1] - span[0]} bytes for {dtype} {shown(shape)}; the file has {data}"
        )
    return dtype, sizes, span[0], span[1]


def _sizes(value: Any) -> tuple[int, ...] | None:
    """A list of integers that fit into 63 bits; None for anything else."""
    if isinstance(value, list) and all(type(size) is int and 0 <= size < 1 << 63 for size in value):
        return tuple(value)
    return None


# -- tensors ---------------------------------------------------------------------------------------------------------


def check_dtypes(dtypes: Mapping[str, str]) -> None:
    """Refuse tensors of a kind that cannot be trained, or cannot be a vocabulary table.

    Args:
        dtypes: canonical name to safetensors dtype, of another kind of file to whatever it is called there.
    """
    quantized = {name: dtype for name, dtype in dtypes.items() if name not in _TABLES and dtype not in _FLOATS}
    if quantized:
        name, dtype = next(iter(quantized.items()))
        raise CheckpointError(
            f"{len(quantized)} tensors are no plain floating-point ones (first {shown(name)}, {dtype}): the draft is "
            f"quantized, or no draft. Use its full-precision form ({', '.join(_FLOATS)})."
        )
    for name, allowed in _TABLES.items():
        if dtypes.get(name, allowed[0]) not in allowed:
            raise CheckpointError(f"{name} has dtype {dtypes[name]}; must be one of {list(allowed)}. Convert it.")


def pickle_refusal(path: Path) -> str:
    """What to say of a pickle that nobody allowed.

    Args:
        path: of the file.
    """
    return (
        f"policy.draft.trust_pickle: got false, and {path} is a pickle file; set policy.draft.trust_pickle: true to "
        f"read its tensors and nothing else, or convert it once: python tools/draft_convert.py {path.parent} "
        "--trust-pickle --out NEW_DIRECTORY."
    )


def read_integers(tensor: StoredTensor) -> list[int]:
    """Values of a small integer or bool tensor, in row-major order."""
    if tensor.dtype not in _INTEGER_CODES:
        raise CheckpointError(f"{tensor.file}: a vocabulary table has dtype {tensor.dtype}; must be int64 or bool.")
    values = array.array(_INTEGER_CODES[tensor.dtype])
    values.frombytes(_read(tensor))
    if tensor.dtype == "BOOL" and any(value > 1 for value in values):
        raise CheckpointError(f"{tensor.file}: a table of flags holds other bytes than 0 and 1. Restore the file.")
    return values.tolist()


def is_zero(tensor: StoredTensor) -> bool:
    """Whether every value of a small float tensor is zero, of either sign."""
    if tensor.dtype not in _FLOATS:
        raise CheckpointError(f"{tensor.file}: a tensor has dtype {tensor.dtype}; must be one of {list(_FLOATS)}.")
    size = _BITS[tensor.dtype] // 8
    data = bytearray(_read(tensor))
    # The sign is the highest bit of a value's last byte.
    data[size - 1 :: size] = bytes(byte & 0x7F for byte in data[size - 1 :: size])
    return not any(data)


def _read(tensor: StoredTensor) -> bytes:
    num_bytes = prod(tensor.shape) * _BITS[tensor.dtype] // 8
    try:
        with open_regular(tensor.file) as file:
            file.seek(tensor.begin)
            data = file.read(num_bytes)
    except OSError as err:
        raise CheckpointError(f"{tensor.file}: cannot be read ({err.strerror}).") from err
    if len(data) != num_bytes:
        raise CheckpointError(f"{tensor.file}: became shorter while it was read. Restore it.")
    return data
