from __future__ import annotations

import numpy as np
import pytest
import torch

from nemo_rl.weight_sync.checksum import dtype_name, from_numpy, tensor_checksum, to_numpy

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]


def _oracle(t: torch.Tensor) -> str:
    """The documented sum, word by word in Python integers."""
    raw = t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b""
    words = np.frombuffer(raw + b"\0" * (-len(raw) % 4), dtype="<i4").tolist()
    golden, block, total = -7046029254386353131, 1 << 16, 0
    for i, word in enumerate(words):
        weight = ((i % block + 1) * golden) | 1
        total += word * weight * (2 * (i // block) + 1)
    return f"{dtype_name(t.dtype)}{list(t.shape)}:{total % (1 << 64):016x}"


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (7, 11), (3, 1, 5)], ids=str)
def test_checksum_is_the_documented_sum(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    t = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 9).to(dtype)
    assert tensor_checksum(t) == _oracle(t)


def test_checksum_spans_blocks() -> None:
    t = torch.randn(200_003, generator=torch.Generator().manual_seed(0))
    assert tensor_checksum(t) == _oracle(t)


def test_layout_does_not_matter() -> None:
    t = torch.randn(40, 6, dtype=torch.float32)
    transposed = t.t().contiguous().t()
    assert not transposed.is_contiguous()
    assert tensor_checksum(transposed) == tensor_checksum(t)
    odd_offset = torch.randn(9).to(torch.bfloat16)[1:]
    assert tensor_checksum(odd_offset) == tensor_checksum(odd_offset.clone())


@pytest.mark.parametrize("index", [0, 1, 65_535, 65_536, 99_999])
def test_one_flipped_bit_is_seen(index: int) -> None:
    t = torch.randn(100_000, generator=torch.Generator().manual_seed(1))
    changed = t.clone()
    changed.view(torch.int32)[index] ^= 1
    assert tensor_checksum(changed) != tensor_checksum(t)


def test_exchanged_values_shape_and_dtype_are_seen() -> None:
    t = torch.arange(140_000, dtype=torch.int32)
    swapped = t.clone()
    swapped[3], swapped[70_000] = t[70_000], t[3]
    blocks = torch.cat([t[65_536:131_072], t[:65_536], t[131_072:]])
    sums = {tensor_checksum(x) for x in (t, swapped, blocks, t.view(2, -1), t.view(torch.float32))}
    assert len(sums) == 5


def test_sign_of_zero_is_seen_and_nan_equals_itself() -> None:
    assert tensor_checksum(torch.tensor([0.0])) != tensor_checksum(torch.tensor([-0.0]))
    assert tensor_checksum(torch.tensor([float("nan")])) == tensor_checksum(torch.tensor([float("nan")]))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_numpy_round_trip_of_a_read_only_array(dtype: torch.dtype) -> None:
    t = (torch.randn(4, 3) * 5).to(dtype)
    array = to_numpy(t)
    array.setflags(write=False)
    back = from_numpy(array, dtype_name(dtype))
    assert back.dtype == dtype
    assert tensor_checksum(back) == tensor_checksum(t)


def test_a_dtype_of_another_width_is_left_for_the_manifest_check() -> None:
    assert from_numpy(np.zeros(3, dtype=np.float64), "bfloat16").dtype == torch.float64


@pytest.mark.gpu
def test_checksum_is_equal_on_the_gpu() -> None:
    t = torch.randn(200_003).to(torch.bfloat16)
    assert tensor_checksum(t.cuda()) == tensor_checksum(t)
