"""Weight files of a checkpoint directory, read as far as their headers. Nothing here needs torch.

A safetensors file is 8 bytes of header length, a JSON header (name -> dtype, shape, byte range) and the bytes.
"""

from __future__ import annotations

import array
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple

from nemo_rl.errors import CheckpointError

__all__ = ["StoredTensor", "WeightFiles", "find_weight_files", "is_zero", "read_integers", "read_json"]

_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_MAX_HEADER = 100 << 20
_FLOATS = ("F64", "F32", "F16", "BF16")
_INTEGER_CODES = {"I64": "q", "I32": "i", "U8": "B", "BOOL": "B"}


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
        tensors: name as stored to its place; empty for a pickle, which cannot be listed without running it.
        pickle: the `pytorch_model.bin`, when there are no safetensors.
    """

    tensors: Mapping[str, StoredTensor]
    pickle: Path | None = None


def read_json(path: Path) -> dict:
    """Read a JSON object; an unreadable or malformed file raises `CheckpointError` naming it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as err:
        raise CheckpointError(f"{path}: cannot be read ({err.strerror}).") from err
    except (json.JSONDecodeError, UnicodeDecodeError) as err:
        raise CheckpointError(f"{path}: is not valid JSON ({err}). The file is corrupted; restore it.") from err
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: got a JSON {type(value).__name__}; must be an object.")
    return value


def find_weight_files(directory: Path) -> WeightFiles:
    """List every tensor of a checkpoint directory and check that the files are whole.

    Args:
        directory: holds `model.safetensors`, an index with its shards, or `pytorch_model.bin`.
    """
    index = directory / "model.safetensors.index.json"
    single = directory / "model.safetensors"
    if index.is_file():
        return WeightFiles(_indexed(directory, index))
    if single.is_file():
        return WeightFiles(_header(single))
    shards = sorted(directory.glob("model-*-of-*.safetensors"))
    if shards:
        raise CheckpointError(f"{directory}: has {len(shards)} shards but no {index.name}. Restore the index file.")
    pickle = directory / "pytorch_model.bin"
    if pickle.is_file():
        return WeightFiles({}, pickle)
    raise CheckpointError(f"{directory}: holds no weights; expected model.safetensors, {index.name} or {pickle.name}.")


def _indexed(directory: Path, index: Path) -> dict[str, StoredTensor]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: has no weight_map. The file is corrupted; restore it.")
    tensors: dict[str, StoredTensor] = {}
    for name in sorted(set(weight_map.values())):
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
            raise CheckpointError(f"{index}: names the shard {name!r}; a shard is a file of the same directory.")
        if not (directory / name).is_file():
            raise CheckpointError(f"{index}: names the shard {name}, which does not exist. Restore it.")
        for key, tensor in _header(directory / name).items():
            if key in tensors:
                raise CheckpointError(
                    f"{directory}: tensor {key} is in two shards, {tensors[key].file.name} and {name}."
                )
            tensors[key] = tensor
    missing = sorted(set(weight_map) - set(tensors))
    if missing:
        raise CheckpointError(f"{index}: lists {len(missing)} tensors that no shard holds, first {missing[:3]}.")
    return tensors


def _header(path: Path) -> dict[str, StoredTensor]:
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= min(size - 8, _MAX_HEADER):
            raise CheckpointError(f"{path}: is truncated or not a safetensors file ({size} bytes). Restore it.")
        raw = file.read(length)
    try:
        entries = json.loads(raw)
        entries.pop("__metadata__", None)
        tensors = {
            name: (entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"]) for name, entry in entries.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError) as err:
        raise CheckpointError(f"{path}: has a damaged safetensors header. Restore the file.") from err
    end = 8 + length
    for name, (dtype, shape, begin, stop) in tensors.items():
        if dtype in _SIZES and stop - begin != prod(shape) * _SIZES[dtype]:
            raise CheckpointError(f"{path}: tensor {name} has {stop - begin} bytes for {dtype} {list(shape)}.")
        end = max(end, 8 + length + stop)
    if end != size:
        raise CheckpointError(f"{path}: is truncated or damaged: {size} bytes, its header asks for {end}. Restore it.")
    return {n: StoredTensor(path, dtype, shape, 8 + length + begin) for n, (dtype, shape, begin, _) in tensors.items()}


def read_integers(tensor: StoredTensor) -> list[int]:
    """Values of a small integer or bool tensor, in row-major order."""
    if tensor.dtype not in _INTEGER_CODES:
        raise CheckpointError(f"{tensor.file}: a vocabulary table has dtype {tensor.dtype}; must be int64 or bool.")
    values = array.array(_INTEGER_CODES[tensor.dtype])
    with tensor.file.open("rb") as file:
        file.seek(tensor.begin)
        values.frombytes(file.read(prod(tensor.shape) * values.itemsize))
    return values.tolist()


def is_zero(tensor: StoredTensor) -> bool:
    """Whether every value of a small float tensor is zero, of either sign."""
    if tensor.dtype not in _FLOATS:
        raise CheckpointError(f"{tensor.file}: a tensor has dtype {tensor.dtype}; must be one of {list(_FLOATS)}.")
    size = _SIZES[tensor.dtype]
    with tensor.file.open("rb") as file:
        file.seek(tensor.begin)
        data = bytearray(file.read(prod(tensor.shape) * size))
    # The sign is the highest bit of a value's last byte.
    data[size - 1 :: size] = bytes(byte & 0x7F for byte in data[size - 1 :: size])
    return not any(data)
