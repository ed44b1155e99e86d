"""The checksum both ends of a refit compute, and the conversion between torch tensors and what travels."""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import numpy as np

_BLOCK = 1 << 16
_BLOCKS_AT_ONCE = 64
_GOLDEN = -7046029254386353131  # 2**64 / golden ratio as a signed 64-bit integer; odd
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NUMPY_DTYPES = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    }
)


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """View (CPU, contiguous) or copy of the tensor as numpy; dtypes numpy lacks become an integer view of their bytes.

    Args:
        tensor: Any shape, dtype and device.

    Returns:
        Array of the tensor's shape that shares its memory when the tensor is contiguous and on the CPU.
    """
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype in _NUMPY_DTYPES:
        return tensor.numpy()
    return tensor.view(_BITS[tensor.element_size()]).numpy()


def from_numpy(array: np.ndarray, dtype: str) -> torch.Tensor:
    """Inverse of `to_numpy`: a CPU tensor that shares the array's memory, which may be read-only.

    Args:
        array: As `to_numpy` made it.
        dtype: Name of the true dtype, as in the manifest.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensor = torch.from_numpy(array)
    wanted = getattr(torch, dtype)
    if tensor.dtype == wanted or tensor.element_size() != wanted.itemsize:
        return tensor  # a dtype that does not fit is reported by whoever validates the manifest
    return tensor.view(wanted) if wanted not in _NUMPY_DTYPES else tensor


@lru_cache(maxsize=4)
def _weights(device: torch.device) -> torch.Tensor:
    """int64 [_BLOCK] odd multipliers that differ from each other."""
    index = torch.arange(1, _BLOCK + 1, dtype=torch.int64, device=device)
    return (index * _GOLDEN) | 1


def _words(t: torch.Tensor) -> torch.Tensor:
    """int32 [ceil(bytes / 4)]: the tensor's bytes in memory order, zero padded."""
    raw = t.contiguous().reshape(-1).view(torch.uint8)
    if raw.numel() % 4 == 0 and raw.data_ptr() % 4 == 0:
        return raw.view(torch.int32)
    padded = raw.new_zeros(-(-raw.numel() // 4) * 4)
    padded[: raw.numel()] = raw
    return padded.view(torch.int32)


def tensor_checksum(t: torch.Tensor) -> str:
    """Checksum of dtype, shape and bytes, equal on every device.

    The bytes are read as 32-bit words x_i and reduced to sum(x_i * w_i) modulo 2**64 with fixed odd weights w_i. A
    modular sum does not depend on the order of addition, so CPU and GPU agree bit for bit and nothing has to leave the
    device. A change of a single word always changes the checksum (an odd weight is invertible); it guards against
    lost, mixed up or stale weights, not against an adversary. 0.0 and -0.0 differ; a NaN equals itself.

    Args:
        t: Any shape, dtype and device. Strides and storage offset do not matter.

    Returns:
        dtype, shape and the sum in hexadecimal.
    """
    t = t.detach()
    words = _words(t) if t.numel() else torch.zeros(0, dtype=torch.int32, device=t.device)
    weights = _weights(words.device)
    total = 0
    for chunk_index, chunk in enumerate(words.split(_BLOCK * _BLOCKS_AT_ONCE)):
        values = chunk.to(torch.int64)
        full, rest = divmod(values.numel(), _BLOCK)
        values[: full * _BLOCK].view(full, _BLOCK).mul_(weights)
        values[full * _BLOCK :].mul_(weights[:rest])
        sums = [*values[: full * _BLOCK].view(full, _BLOCK).sum(1).tolist(), int(values[full * _BLOCK :].sum())]
        first = chunk_index * _BLOCKS_AT_ONCE
        total += sum((2 * (first + offset) + 1) * block_sum for offset, block_sum in enumerate(sums))
    return f"{dtype_name(t.dtype)}{list(t.shape)}:{total & ((1 << 64) - 1):016x}"
