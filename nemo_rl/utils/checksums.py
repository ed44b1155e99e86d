"""CRC-32 of files: finds damage by accident, not by intent."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nemo_rl.errors import CheckpointError

__all__ = ["checksum", "checksums"]

_CHUNK_BYTES = 1 << 22


def checksums(directory: Path, names: Iterable[str]) -> dict[str, str]:
    """Checksums of files; large ones several at a time (zlib releases the interpreter lock).

    Args:
        directory: that the names are relative to.
        names: of the files.

    Returns:
        Name to eight hexadecimal digits.

    Raises:
        CheckpointError: a file cannot be read.
    """
    names = list(names)
    num_large = sum((directory / name).stat().st_size >= _CHUNK_BYTES for name in names)
    num_threads = min(8, os.cpu_count() or 1, num_large)
    if num_threads <= 1:
        return {name: _of_file(directory / name) for name in names}
    with ThreadPoolExecutor(max_workers=num_threads) as pool:
        return dict(zip(names, pool.map(lambda name: _of_file(directory / name), names), strict=True))


def checksum(data: bytes) -> str:
    """Checksum of bytes, eight hexadecimal digits.

    Args:
        data: of any length.
    """
    return f"{zlib.crc32(data):08x}"


def _of_file(file: Path) -> str:
    value = 0
    try:
        with open(file, "rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                value = zlib.crc32(chunk, value)
    except OSError as err:
        raise CheckpointError(f"{file} cannot be read ({err}).") from err
    return f"{value:08x}"
