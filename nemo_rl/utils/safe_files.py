"""Files that somebody else wrote: regular ones only, no more of them than a bound, JSON that has one meaning.

Nothing here waits on a pipe, reads a device, or allocates more than a small multiple of the file's own size. No torch.
"""

from __future__ import annotations

import json
import math
import os
import reprlib
import stat
from pathlib import Path
from typing import Any, BinaryIO

from nemo_rl.errors import CheckpointError

__all__ = ["MAX_JSON_BYTES", "open_regular", "parse_json", "read_json_object", "shown"]

MAX_JSON_BYTES = 1 << 20
"""Largest config.json and the like; the published ones have a few thousand bytes."""


def open_regular(path: str | Path) -> BinaryIO:
    """Open a file for reading without waiting for anybody.

    Args:
        path: of the file; symbolic links are followed.

    Raises:
        OSError: it cannot be opened, or is a directory, pipe, socket or device.
    """
    try:
        # Without O_NONBLOCK opening a pipe waits for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as err:  # a zero byte in the name
        raise OSError(None, str(err)) from err
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(None, "it is not a regular file")
    return os.fdopen(descriptor, "rb")


def parse_json(raw: bytes, *, is_strict: bool = True) -> Any:
    """Parse JSON.

    Args:
        raw: UTF-8 text.
        is_strict: refuse what readers differ about: a key twice in one object, NaN, infinity.

    Raises:
        ValueError: it is no JSON, is nested too deeply, or holds what `is_strict` refuses.
    """
    try:
        text = raw.decode("utf-8")
        if not is_strict:
            return json.loads(text)
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {shown(twice)} is in one object twice")
    return value


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {shown(text)} is too large")
    return value


def read_json_object(path: Path, *, max_bytes: int = MAX_JSON_BYTES, is_strict: bool = True) -> dict[str, Any]:
    """Read a JSON object.

    Args:
        path: of the file.
        max_bytes: a larger file is not read.
        is_strict: see `parse_json`.

    Raises:
        CheckpointError: it cannot be read, is too large, malformed or no object; names the file.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            raw = file.read(size) if size <= max_bytes else b""
    except OSError as err:
        raise CheckpointError(f"{path}: cannot be read ({err.strerror}).") from err
    if size > max_bytes:
        raise CheckpointError(f"{path}: has {size} bytes; must have at most {max_bytes}. Restore the file.")
    try:
        value = parse_json(raw, is_strict=is_strict)
    except ValueError as err:
        raise CheckpointError(f"{path}: is not valid JSON ({err}). The file is corrupted; restore it.") from err
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: got a JSON {type(value).__name__}; must be an object. Restore the file.")
    return value


class _Repr(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother, self.maxlist, self.maxdict = 2, 60, 60, 8, 4

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to write out the digits of very long ones.
        return f"an integer of {x.bit_length()} bits" if x.bit_length() > 128 else repr(x)


def shown(value: object) -> str:
    """A value out of a file as a message shows it: in one short, printable line, whatever its size and depth.

    Args:
        value: of any type.
    """
    text = _Repr().repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= 120 else f"{text[:117]}..."
