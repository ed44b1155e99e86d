"""The index file of torch.distributed.checkpoint, read without trusting it.

The index (`.metadata`) is a pickle, and an ordinary unpickler calls whatever a pickle names. The one here knows the
classes that the index consists of; all of them hold values only. The manifest of a checkpoint cannot stand in for this:
its checksums find accidents, not intent.
"""

from __future__ import annotations

import pickle
import struct
from collections import OrderedDict
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint import filesystem as dcp_filesystem
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.serialization import _get_layout

from nemo_rl.errors import CheckpointError

__all__ = ["IndexedReader"]

_VALUE_CLASSES = {
    (cls.__module__, cls.__qualname__): cls
    for cls in (
        BytesStorageMetadata,
        dcp_metadata.ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        dcp_metadata.TensorProperties,
        TensorStorageMetadata,
        dcp_metadata._MEM_FORMAT_ENCODING,
        dcp_filesystem._StorageInfo,
        torch.Size,
        OrderedDict,
    )
}
_KNOWN: dict[tuple[str, str], Any] = _VALUE_CLASSES | {
    ("torch.serialization", "_get_layout"): _get_layout,  # looks a name up among torch's layouts
}
_PATH_CLASSES = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if module in ("pathlib", "pathlib._local") and name in _PATH_CLASSES:
            return PurePath  # where the checkpoint was written; read by nobody
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of an index")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to objects outside of it")


class IndexedReader(FileSystemReader):
    """Reads a checkpoint of torch.distributed.checkpoint; see the module docstring."""

    def __init__(self, path: Path) -> None:
        """Read nothing yet.

        Args:
            path: directory with `.metadata` and the `.distcp` files.
        """
        super().__init__(str(path))

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the index.

        Raises:
            CheckpointError: it cannot be read, holds anything but values, or names files outside the directory.
        """
        path = Path(self._get_metadata_path(kwargs.get("rank")))
        try:
            with path.open("rb") as file:
                index = _Unpickler(file).load()
        except (
            OSError,
            EOFError,
            pickle.UnpicklingError,
            struct.error,
            ArithmeticError,
            AttributeError,
            LookupError,
            MemoryError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as err:
            raise CheckpointError(f"{path}: cannot be read ({err}); use an earlier checkpoint.") from err
        problem = _problem(index)
        if problem is not None:
            raise CheckpointError(f"{path}: cannot be read ({problem}); use an earlier checkpoint.")
        index.storage_meta = StorageMeta(load_id=self.load_id)
        return index


def _problem(index: Any) -> str | None:
    """What makes a value something else than the index of tensors in files of one directory."""
    entries, places = getattr(index, "state_dict_metadata", None), getattr(index, "storage_data", None)
    if not isinstance(index, Metadata) or not isinstance(entries, dict) or not isinstance(places, dict):
        return "it is no index"
    for name, entry in entries.items():
        if not isinstance(name, str) or not (isinstance(entry, BytesStorageMetadata) or _is_tensor(entry)):
            return f"its entry {str(name)[:80]!r} is damaged"
    for key, place in places.items():
        if not isinstance(key, MetadataIndex) or not isinstance(place, dcp_filesystem._StorageInfo):
            return "it does not say where the tensors are"
        name = getattr(place, "relative_path", None)
        if not isinstance(name, str) or PurePath(name).name != name or name in ("", ".", ".."):
            return f"it names {str(name)[:80]!r}, which is no file of the directory"
    return None


def _is_tensor(entry: Any) -> bool:
    chunks, properties = getattr(entry, "chunks", None), getattr(entry, "properties", None)
    return (
        isinstance(entry, TensorStorageMetadata)
        and _is_size(getattr(entry, "size", None))
        and isinstance(getattr(properties, "dtype", None), torch.dtype)
        and isinstance(chunks, list)
        and all(_is_size(getattr(c, "offsets", None)) and _is_size(getattr(c, "sizes", None)) for c in chunks)
    )


def _is_size(value: Any) -> bool:
    return isinstance(value, torch.Size) and all(length >= 0 for length in value)
