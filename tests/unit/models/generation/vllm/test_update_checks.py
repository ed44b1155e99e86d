"""What is refused before a weight is touched; no engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nemo_rl.errors import ConfigError
from nemo_rl.models.generation.vllm.readback import local_part
from nemo_rl.models.generation.vllm.update_checks import find_problems, is_finite, read_headers
from nemo_rl.weight_sync.checksum import dtype_name, tensor_checksum
from nemo_rl.weight_sync.interfaces import TensorInfo


def _update() -> tuple[dict[str, TensorInfo], dict[str, torch.Tensor], dict[str, str]]:
    tensors = {"a": torch.randn(3, 2), "draft.b": torch.randn(4).to(torch.bfloat16)}
    manifest = {name: TensorInfo(tuple(t.shape), dtype_name(t.dtype)) for name, t in tensors.items()}
    return manifest, tensors, {name: tensor_checksum(t) for name, t in tensors.items()}


def test_a_complete_update_has_no_problem() -> None:
    manifest, tensors, checksums = _update()
    assert find_problems(manifest, tensors, checksums, expected=manifest) == []


def test_optional_names_may_be_absent_but_nothing_else() -> None:
    manifest, tensors, checksums = _update()
    expected = {**manifest, "head": TensorInfo((1,), "float32")}
    assert find_problems(manifest, tensors, checksums, expected=expected, optional={"head"}) == []
    assert find_problems(manifest, tensors, checksums, expected=expected) == ["1 tensor(s) missing: head"]


def _lost_on_the_way(m, t, c):
    del t["a"]


def _unannounced(m, t, c):
    t["x"] = torch.zeros(1)


def _unknown(m, t, c):
    m["x"], t["x"], c["x"] = TensorInfo((1,), "float32"), torch.zeros(1), tensor_checksum(torch.zeros(1))


def _wrong_shape(m, t, c):
    t["a"] = torch.randn(2, 3)


def _announced_shape(m, t, c):
    m["a"] = TensorInfo((2, 3), "float32")


def _wrong_dtype(m, t, c):
    t["draft.b"] = t["draft.b"].float()


def _nan(m, t, c):
    t["a"][1, 1] = float("nan")


def _infinite(m, t, c):
    t["draft.b"][0] = float("-inf")


def _altered(m, t, c):
    t["a"][0, 0] += 1


def _no_checksum(m, t, c):
    del c["draft.b"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_lost_on_the_way, "1 tensor(s) announced but not sent: a"),
        (_unannounced, "1 tensor(s) sent but not announced: x"),
        (_unknown, "1 tensor(s) not known to the engine: x"),
        (_wrong_shape, "1 tensor(s) of the wrong shape: a (got [2, 3], announced [3, 2], needs [3, 2])"),
        (_announced_shape, "1 tensor(s) of the wrong shape: a (got [3, 2], announced [2, 3], needs [3, 2])"),
        (_wrong_dtype, "1 tensor(s) of the wrong dtype: draft.b (got float32, announced bfloat16, needs bfloat16)"),
        (_nan, "1 tensor(s) not finite: a"),
        (_infinite, "1 tensor(s) not finite: draft.b"),
        (_altered, "1 tensor(s) altered on the way (checksum): a"),
        (_no_checksum, "1 tensor(s) without checksum: draft.b"),
    ],
    ids=lambda value: value.__name__.strip("_") if callable(value) else "",
)
def test_each_damage_is_named(damage, message: str) -> None:
    manifest, tensors, checksums = _update()
    expected = dict(manifest)
    damage(manifest, tensors, checksums)
    assert find_problems(manifest, tensors, checksums, expected=expected) == [message]


def test_long_lists_of_names_are_cut() -> None:
    expected = {f"t{i:02d}": TensorInfo((1,), "float32") for i in range(20)}
    (problem,) = find_problems({}, {}, {}, expected=expected)
    assert problem.startswith("20 tensor(s) missing: t00, ")
    assert problem.endswith("t07 and 12 more")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_is_finite(dtype: torch.dtype, value: float) -> None:
    t = torch.full((300,), torch.finfo(dtype).max, dtype=dtype)  # a sum would overflow
    assert is_finite(t)
    t[123] = value
    assert not is_finite(t)
    assert is_finite(torch.empty(0, dtype=dtype))
    assert is_finite(torch.ones(3, dtype=torch.int64))


def test_headers_of_one_file_and_of_shards(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, 3), "d2t": torch.zeros(4, dtype=torch.int64)}, tmp_path / "x.safetensors")
    assert read_headers(tmp_path, key="k") == {"a": TensorInfo((2, 3), "float32"), "d2t": TensorInfo((4,), "I64")}
    save_file({"b": torch.zeros(1, dtype=torch.bfloat16)}, tmp_path / "y.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"b": "y.safetensors"}}))
    assert read_headers(tmp_path, key="k") == {"b": TensorInfo((1,), "bfloat16")}


def test_no_weights_and_broken_weights_name_key_and_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"policy\.model_name: got .*must hold \*\.safetensors"):
        read_headers(tmp_path, key="policy.model_name")
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 5)
    with pytest.raises(ConfigError, match=r"policy\.draft: cannot read .*model\.safetensors"):
        read_headers(tmp_path, key="policy.draft")


@pytest.mark.parametrize(
    ("shape", "tp_size", "rows_of_rank"),
    [
        ((2, 3), 4, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        ((4, 3), 4, [(0, 4), (0, 4), (4, 8), (4, 8)]),  # fewer key/value heads than ranks: copies
        ((8, 3), 4, [(0, 8)] * 4),
    ],
)
def test_local_part_by_rows(shape: tuple[int, int], tp_size: int, rows_of_rank: list[tuple[int, int]]) -> None:
    full = torch.arange(24).view(8, 3)
    for rank, (start, end) in enumerate(rows_of_rank):
        assert torch.equal(local_part(full, shape=shape, tp_rank=rank, tp_size=tp_size), full[start:end])


def test_local_part_by_columns_and_impossible_splits() -> None:
    full = torch.arange(24).view(4, 6)
    assert torch.equal(local_part(full, shape=(4, 3), tp_rank=1, tp_size=2), full[:, 3:])
    assert local_part(full, shape=(2, 3), tp_rank=0, tp_size=2) is None
    assert local_part(full, shape=(4, 4), tp_rank=0, tp_size=2) is None
