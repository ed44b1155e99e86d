"""Files of a draft directory that somebody else wrote: which count, and what is refused before it is believed."""

from __future__ import annotations

import collections
import json
import os
import socket
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch

from nemo_rl.errors import CheckpointError, ConfigError
from nemo_rl.models.automodel.draft.builders import load_tensors
from nemo_rl.models.automodel.draft.weight_files import (
    check_dtypes,
    find_weight_files,
    is_zero,
    member,
    read_integers,
)
from nemo_rl.utils.model_files import check_weights, read_model_config
from nemo_rl.utils.safe_files import read_json_object
from tests.unit.models.automodel.draft.draft_directories import resolve, spec_of, tensors_of, write_draft_directory
from tests.unit.models.automodel.draft.helpers import VOCAB, make_arch, make_module

ONE = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array([1, 0, 1], dtype=bool)}


def write_raw(path: Path, header: Any, data: bytes = b"") -> Path:
    """A safetensors file of any header, well formed or not."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    as_list = [list(value) if isinstance(value, tuple) else value for value in (shape, offsets)]
    return {"dtype": dtype, "shape": as_list[0], "data_offsets": as_list[1]}


def write_index(directory: Path, weight_map: Any, name: str = "model.safetensors.index.json") -> None:
    (directory / name).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")


# -- which files count -----------------------------------------------------------------------------------------------


def test_an_index_wins_over_whatever_lies_beside_its_shards(tmp_path):
    save_file({"a": ONE["a"]}, tmp_path / "x.safetensors")
    save_file({"b": ONE["b"]}, tmp_path / "y.safetensors")
    save_file(ONE, tmp_path / "model.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"whatever")
    write_index(tmp_path, {"a": "x.safetensors", "b": "y.safetensors"})
    files = find_weight_files(tmp_path)
    assert {name: tensor.file.name for name, tensor in files.tensors.items()} == {
        "a": "x.safetensors",
        "b": "y.safetensors",
    }
    assert files.ignored == ("model.safetensors", "pytorch_model.bin")
    assert [file.name for file in files.files] == ["x.safetensors", "y.safetensors"]


def test_without_an_index_every_safetensors_file_counts_and_nothing_is_in_two(tmp_path):
    save_file({"a": ONE["a"]}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": ONE["b"]}, tmp_path / "model-00002-of-00002.safetensors")
    (tmp_path / "training_state.pt").write_bytes(b"whatever")
    assert set(find_weight_files(tmp_path).tensors) == {"a", "b"}
    save_file({"b": ONE["b"]}, tmp_path / "copy.safetensors")
    with pytest.raises(CheckpointError, match=r"'b' is in two shards, copy.safetensors and model-00002"):
        find_weight_files(tmp_path)
    (tmp_path / "copy.safetensors").unlink()
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has 1 of 2 shards and no model.safetensors.index.json"):
        find_weight_files(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "match"),
    [
        ({}, "has no weight_map"),
        (["x.safetensors"], "has no weight_map"),
        ({"a": 3}, "names the shard 3;"),
        ({"a": ["x.safetensors"]}, r"names the shard \['x.safetensors'\];"),
        ({"a": "/etc/passwd"}, "names the shard '/etc/passwd'"),
        ({"a": "../x.safetensors"}, "names the shard '../x.safetensors'"),
        ({"a": "sub/x.safetensors"}, "names the shard 'sub/x.safetensors'"),
        ({"a": "sub\\x.safetensors"}, "names the shard"),
        ({"a": ".."}, r"names the shard '\.\.'"),
        ({"a": ""}, "names the shard ''"),
        ({"a": "x\0.safetensors"}, "names the shard"),
        ({"a": "\ud800.safetensors"}, "names the shard"),
        ({"a": "x" * 5000}, "names the shard 'xxx"),
        ({"a": "gone.safetensors"}, "names the shard gone.safetensors, which does not exist"),
        ({"a": "x.safetensors", "c": "x.safetensors"}, r"lists 1 tensors in x.safetensors .* \['c'\]"),
        ({"a": "y.safetensors", "b": "y.safetensors"}, r"lists 1 tensors in y.safetensors .* \['a'\]"),
        ({"a": "x.safetensors", "b": "pipe.safetensors"}, "pipe.safetensors: cannot be read .*not a regular file"),
        ({"a": "folder.safetensors"}, "folder.safetensors: cannot be read .*not a regular file"),
    ],
)
def test_an_index_names_files_of_its_directory_that_hold_what_it_says(tmp_path, weight_map, match):
    save_file({"a": ONE["a"]}, tmp_path / "x.safetensors")
    save_file({"b": ONE["b"]}, tmp_path / "y.safetensors")
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    write_index(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match=match) as err:
        find_weight_files(tmp_path)
    assert str(tmp_path) in str(err.value)
    assert len(str(err.value)) < 600


def test_nothing_that_is_no_regular_file_is_opened_or_waited_for(tmp_path):
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    os.mkfifo(weights)
    with pytest.raises(CheckpointError, match=r"model.safetensors: cannot be read \(it is not a regular file\)"):
        find_weight_files(tmp_path)
    weights.unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(weights))
        with pytest.raises(CheckpointError, match=r"model.safetensors: cannot be read"):
            find_weight_files(tmp_path)
    weights.unlink()
    weights.symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match=r"model.safetensors: is a symbolic link to /dev/zero, outside"):
        find_weight_files(tmp_path)
    weights.unlink()
    os.mkfifo(tmp_path / "model.safetensors.index.json")
    with pytest.raises(CheckpointError, match=r"index.json: cannot be read \(it is not a regular file\)"):
        find_weight_files(tmp_path)
    os.mkfifo(config)
    with pytest.raises(CheckpointError, match=r"config.json: cannot be read \(it is not a regular file\)"):
        read_json_object(config)
    with pytest.raises(CheckpointError, match="cannot be listed"):
        find_weight_files(tmp_path / "none")


def test_links_stay_in_the_directory_or_in_the_hubs_cache(tmp_path):
    repo = tmp_path / "models--someone--draft"
    snapshot, blobs = repo / "snapshots" / "0123abcd", repo / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    save_file(ONE, blobs / "f00d")
    (snapshot / "model.safetensors").symlink_to("../../blobs/f00d")
    assert set(find_weight_files(snapshot).tensors) == {"a", "b"}
    (tmp_path / "latest").symlink_to(snapshot)
    assert set(find_weight_files(tmp_path / "latest").tensors) == {"a", "b"}

    other = tmp_path / "draft"
    other.mkdir()
    (other / "config.json").symlink_to(tmp_path / "secret.json")
    (tmp_path / "secret.json").write_text("{}", encoding="utf-8")
    (other / "model.safetensors").symlink_to(blobs / "f00d")
    for name in ("config.json", "model.safetensors"):
        with pytest.raises(CheckpointError, match=rf"{name}: is a symbolic link to .*, outside the directory. Copy"):
            member(other, name)
    (other / "model.safetensors").unlink()
    save_file(ONE, other / "kept")
    (other / "model.safetensors").symlink_to("kept")
    assert set(find_weight_files(other).tensors) == {"a", "b"}
    (other / "model.safetensors").unlink()
    (other / "model.safetensors").symlink_to("model.safetensors")  # to itself
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        find_weight_files(other)
    with pytest.raises(CheckpointError, match="must be a plain name"):
        member(other, "../secret.json")


# -- JSON ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        (b"", "is not valid JSON"),
        (b"[1]", "got a JSON list; must be an object"),
        (b"null", "got a JSON NoneType"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' is in one object twice"),
        (b'{"a": NaN}', "NaN is no JSON number"),
        (b'{"a": -Infinity}', "-Infinity is no JSON number"),
        (b'{"a": 1e999}', "the number '1e999' is too large"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not valid JSON"),
        (b'{"a": "\xff"}', "is not valid JSON"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"a": ' * 100_000, "nested too deeply"),
        (b" " * ((1 << 20) + 1), r"has 1048577 bytes; must have at most 1048576"),
        (b"\xef\xbb\xbf{}", "is not valid JSON"),
    ],
    ids=lambda value: None if isinstance(value, bytes) else value[:20],
)
def test_json_has_one_meaning_and_a_bounded_size(tmp_path, raw, match):
    path = tmp_path / "config.json"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=match) as err:
        read_json_object(path)
    assert str(path) in str(err.value)
    assert len(str(err.value)) < 500


# -- headers ---------------------------------------------------------------------------------------------------------


def test_a_header_is_read_as_the_format_has_it(tmp_path):
    save_file(ONE, tmp_path / "model.safetensors", metadata={"format": "np"})
    found = find_weight_files(tmp_path).tensors
    assert {name: (t.dtype, t.shape) for name, t in found.items()} == {"a": ("F32", (2, 3)), "b": ("BOOL", (3,))}
    assert read_integers(found["b"]) == [1, 0, 1]
    assert not is_zero(found["a"])
    write_raw(tmp_path / "model.safetensors", {"e": entry("F16", (0, 7), (0, 0)), "s": entry("I8", (), (0, 1))}, b"\1")
    assert {name: t.shape for name, t in find_weight_files(tmp_path).tensors.items()} == {"e": (0, 7), "s": ()}


@pytest.mark.parametrize(
    ("header", "data", "match"),
    [
        ({"a": 3}, b"", "tensor 'a' is a JSON int"),
        ([], b"", "it is a JSON list"),
        ({"a": {}}, b"", "unknown dtype None"),
        ({"a": entry(dtype="F33")}, b"12345678", "unknown dtype 'F33'"),
        ({"a": entry(dtype=["F32"])}, b"12345678", r"unknown dtype \['F32'\]"),
        ({"a": entry(shape="2")}, b"12345678", "has shape '2'"),
        ({"a": entry(shape=(2.0,))}, b"12345678", r"has shape \[2.0\]"),
        ({"a": entry(shape=(True, 2))}, b"12345678", r"has shape \[True, 2\]"),
        ({"a": entry(shape=(-1, -2))}, b"12345678", r"has shape \[-1, -2\]"),
        ({"a": entry(shape=(1,) * 1000)}, b"1234", r"has shape \[1, 1"),
        ({"a": entry(shape=(1 << 62, 1 << 62, 1 << 62))}, b"12345678", "has 8 bytes for F32"),
        ({"a": entry(shape=(1 << 64,))}, b"12345678", "has shape"),
        ({"a": entry(shape=(10**4000,))}, b"12345678", "has shape"),
        ({"a": entry(shape=(3,))}, b"12345678", r"has 8 bytes for F32 \[3\]"),
        ({"a": entry(dtype="F64")}, b"12345678", r"has 8 bytes for F64 \[2\]"),
        ({"a": entry("F4", (3,), (0, 1))}, b"1", "has 1 bytes for F4"),
        ({"a": entry(offsets=(8, 0))}, b"12345678", r"has data_offsets \[8, 0\]"),
        ({"a": entry(offsets=(-8, 0))}, b"12345678", r"has data_offsets \[-8, 0\]"),
        ({"a": entry(offsets=(0, 8, 16))}, b"12345678", "has data_offsets"),
        ({"a": entry(offsets=(0.0, 8.0))}, b"12345678", "has data_offsets"),
        ({"a": entry(offsets=None)}, b"12345678", "has data_offsets None"),
        ({"a": entry()}, b"1234", "its header asks for"),
        ({"a": entry()}, b"123456789", "its header asks for"),
        ({"a": entry(offsets=(1 << 60, (1 << 60) + 8))}, b"12345678", "begins 1152921504606846976 bytes behind"),
        ({"a": entry(), "b": entry(offsets=(4, 12))}, b"123456789012", "tensor 'b' overlaps"),
        ({"a": entry(), "b": entry(offsets=(0, 8))}, b"12345678", "overlaps"),
        ({"a": entry(), "b": entry(offsets=(12, 20))}, b"1" * 20, "tensor 'b' begins 4 bytes behind"),
        ({"__metadata__": {"format": 3}}, b"", "__metadata__ is no table of texts"),
        ({"__metadata__": "x"}, b"", "__metadata__ is no table of texts"),
        (b'{"a": 1, "a": 2}', b"", "the key 'a' is in one object twice"),
        (b'{"a": NaN}', b"", "NaN is no JSON number"),
        (b"[" * 200_000, b"", "nested too deeply"),
        (b"\xff\xfe", b"", "damaged safetensors header"),
    ],
)
def test_a_header_that_contradicts_itself_or_the_file_is_refused(tmp_path, header, data, match):
    path = write_raw(tmp_path / "model.safetensors", header, data)
    with pytest.raises(CheckpointError, match=match) as err:
        find_weight_files(tmp_path)
    assert str(path) in str(err.value)
    assert len(str(err.value)) < 500


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        (b"", "is truncated or not a safetensors file"),
        (b"\x01", "is truncated or not a safetensors file"),
        (struct.pack("<Q", 2**63) + b"{}", "is truncated or not a safetensors file"),
        (struct.pack("<Q", 3) + b"{}", "is truncated or not a safetensors file"),
        (struct.pack("<Q", 0), "is truncated or not a safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
    ],
)
def test_a_file_that_is_no_safetensors_file_is_named(tmp_path, raw, match):
    (tmp_path / "model.safetensors").write_bytes(raw)
    with pytest.raises(CheckpointError, match=match):
        find_weight_files(tmp_path)


def test_a_table_of_flags_holds_zeros_and_ones(tmp_path):
    write_raw(tmp_path / "model.safetensors", {"t2d": entry("BOOL", (3,), (0, 3))}, b"\0\1\2")
    with pytest.raises(CheckpointError, match="other bytes than 0 and 1"):
        read_integers(find_weight_files(tmp_path).tensors["t2d"])


@pytest.mark.parametrize(
    ("dtypes", "match"),
    [
        ({"fc.weight": "F8_E4M3"}, r"1 tensors are no plain.*'fc.weight', F8_E4M3.*quantized"),
        ({"fc.weight": "I8", "fc.weight_scale": "F32"}, "quantized"),
        ({"d2t": "F32"}, r"d2t has dtype F32; must be one of \['I64', 'I32'\]"),
        ({"t2d": "I64"}, r"t2d has dtype I64; must be one of \['BOOL', 'U8'\]"),
    ],
)
def test_only_plain_floats_can_be_trained(dtypes, match):
    with pytest.raises(CheckpointError, match=match):
        check_dtypes(dtypes)
    check_dtypes({"a": "F16", "b": "BF16", "c": "F32", "e": "F64", "d2t": "I32", "t2d": "U8"})


# -- tensors ---------------------------------------------------------------------------------------------------------


def _draft(**changes: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in make_module(make_arch(**changes)).named_parameters()}


def _save(directory: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_torch(tensors, directory / "model.safetensors")
    return directory


def _load(directory: Path, *, trust_pickle: bool = False, **changes: Any) -> dict[str, torch.Tensor]:
    return load_tensors(directory, make_arch(**changes), trust_pickle=trust_pickle)


def test_values_that_are_not_finite_are_named(tmp_path):
    tensors = _draft()
    tensors["fc.weight"][0, 0] = float("nan")
    tensors["norm.weight"][1] = float("inf")
    with pytest.raises(CheckpointError, match=r"2 tensors hold NaN or infinity: \['fc.weight', 'norm.weight'\]"):
        _load(_save(tmp_path, tensors))


def test_quantized_tensors_get_a_sentence(tmp_path):
    tensors = _draft()
    tensors["fc.weight"] = tensors["fc.weight"].to(torch.float8_e4m3fn)
    with pytest.raises(CheckpointError, match=r"'fc.weight', F8_E4M3.*quantized"):
        _load(_save(tmp_path, tensors))


def test_the_mask_of_a_reduced_vocabulary_is_rebuilt(tmp_path):
    tensors = _draft(draft_vocab_size=3) | {"d2t": torch.tensor([5, 1, 17])}
    loaded = _load(_save(tmp_path, tensors), draft_vocab_size=3)
    assert loaded["t2d"].dtype == torch.bool
    assert loaded["t2d"].nonzero().flatten().tolist() == [2, 5, 19]
    assert loaded["t2d"].shape == (VOCAB,)
    flags = loaded["t2d"].to(torch.uint8)
    assert torch.equal(_load(_save(tmp_path, tensors | {"t2d": flags}), draft_vocab_size=3)["t2d"], flags)


@pytest.mark.parametrize("shape", [(-1,), (1, -1), (1, 1, -1), (2, -1)])
def test_the_placeholders_feature_may_have_any_shape(tmp_path, shape):
    spec = spec_of("peagle")
    tensors = tensors_of(spec)
    wanted = tensors["mask_hidden"]
    write_draft_directory(tmp_path, spec, tensors=tensors | {"mask_hidden": wanted.reshape(shape)})
    loaded = load_tensors(tmp_path, resolve("peagle", tmp_path).architecture, trust_pickle=False)
    assert np.array_equal(loaded["mask_hidden"].numpy(), wanted)
    write_draft_directory(tmp_path, spec, tensors=tensors | {"mask_hidden": wanted.flatten()[:-1].copy()})
    with pytest.raises(ConfigError, match="mask_hidden has shape"):
        resolve("peagle", tmp_path)


# -- pickles ---------------------------------------------------------------------------------------------------------


class _Command:
    """Unpickled by a careless reader, it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.system, (f"touch {self._path}",)


class _Rebuilt:
    """A tensor that asks for more than its storage holds."""

    def __init__(self, size: tuple[int, ...], stride: tuple[int, ...]) -> None:
        self._storage, self._size, self._stride = torch.ones(3).untyped_storage(), size, stride

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        storage = torch.storage.TypedStorage(wrap_storage=self._storage, dtype=torch.float32, _internal=True)
        arguments = (storage, 0, self._size, self._stride, False, collections.OrderedDict())
        return torch._utils._rebuild_tensor_v2, arguments


def test_a_pickle_needs_a_flag_and_the_message_says_how_to_convert(tmp_path):
    torch.save(_draft(), tmp_path / "pytorch_model.bin")
    with pytest.raises(
        CheckpointError, match=r"policy.draft.trust_pickle: got false.*tools/draft_convert.py .* --trust-pickle"
    ):
        _load(tmp_path)
    assert _load(tmp_path, trust_pickle=True).keys() == _draft().keys()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "draft.pt"])
def test_a_pickle_that_runs_a_command_is_refused_without_running_it(tmp_path, name):
    mark = tmp_path / "was_run"
    torch.save(_draft() | {"x": _Command(mark)}, tmp_path / name)
    with pytest.raises(CheckpointError, match=rf"{name}: .*without running what it holds .*system"):
        _load(tmp_path, trust_pickle=True)
    assert not mark.exists()
    torch.load(tmp_path / name, weights_only=False)  # the file does what the test says it does
    assert mark.exists()


def test_shards_of_a_pickle_are_read_by_their_index(tmp_path):
    tensors = _draft()
    names = sorted(tensors)
    torch.save({n: tensors[n] for n in names[:4]}, tmp_path / "pytorch_model-00001-of-00002.bin")
    torch.save({n: tensors[n] for n in names[4:]}, tmp_path / "pytorch_model-00002-of-00002.bin")
    weight_map = {n: f"pytorch_model-0000{1 + (i >= 4)}-of-00002.bin" for i, n in enumerate(names)}
    write_index(tmp_path, weight_map, "pytorch_model.bin.index.json")
    loaded = _load(tmp_path, trust_pickle=True)
    assert all(torch.equal(loaded[name], tensors[name]) for name in names)
    torch.save({names[0]: tensors[names[0]]}, tmp_path / "pytorch_model-00002-of-00002.bin")
    with pytest.raises(CheckpointError, match="which an earlier shard holds too"):
        _load(tmp_path, trust_pickle=True)
    write_index(tmp_path, {"a": "../elsewhere.bin"}, "pytorch_model.bin.index.json")
    with pytest.raises(CheckpointError, match="names the shard"):
        _load(tmp_path, trust_pickle=True)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ({"state_dict": {"a": torch.ones(1)}, "step": 3}, r"2 entries are no plain tensors, first \['state_dict', 's"),
        ([torch.ones(1)], "holds a list; must hold a table of tensors"),
        ({3: torch.ones(1)}, r"1 entries are no plain tensors, first \[3\]"),
        ({"a": torch.eye(2).to_sparse()}, "no plain tensors"),
        ({"a": torch.ones(2, device="meta")}, "no plain tensors"),
        ({"a": torch.ones(1).expand(1 << 40)}, "no plain tensors"),
        ({"a": _Rebuilt((1 << 40,), (1,))}, "cannot be read as a table of tensors"),
        ({"a": _Rebuilt((1 << 20, 1 << 20), (0, 0))}, "no plain tensors"),
        (dict.fromkeys((f"t{i}" for i in range(9)), torch.ones(4096)), "they overlap"),
    ],
    ids=["nested", "list", "number", "sparse", "meta", "expanded", "beyond", "strides", "shared"],
)
def test_a_pickle_holds_plain_tensors_no_larger_than_itself(tmp_path, content, match):
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=match):
        _load(tmp_path, trust_pickle=True)


def test_pickles_that_are_no_archive_or_a_compressed_one_are_refused(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.ones(1)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"older than torch 1.6"):
        _load(tmp_path, trust_pickle=True)
    torch.save({"a": torch.zeros(1 << 20)}, tmp_path / "plain")
    with zipfile.ZipFile(tmp_path / "plain") as plain, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for part in plain.infolist():
            packed.writestr(part.filename, plain.read(part))
    with pytest.raises(CheckpointError, match=r"is compressed"):
        _load(tmp_path, trust_pickle=True)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match="not a regular file"):
        _load(tmp_path, trust_pickle=True)


# -- the policy's directory ------------------------------------------------------------------------------------------


def test_the_policys_directory_is_read_with_the_same_care(tmp_path):
    save_file(ONE, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"time_step_limit": [0.0, Infinity]}', encoding="utf-8")
    check_weights(tmp_path, key="policy.model_name")
    assert read_model_config(tmp_path, key="policy.model_name")["time_step_limit"][0] == 0.0
    for weight_map in ({"a": "../model.safetensors"}, {"a": 3}, {"a": ["x"]}, [], None):
        write_index(tmp_path, weight_map)
        with pytest.raises(ConfigError, match=r"policy.model_name: .*index.json"):
            check_weights(tmp_path, key="policy.model_name")
    (tmp_path / "model.safetensors.index.json").unlink()
    os.mkfifo(tmp_path / "more.safetensors")
    with pytest.raises(ConfigError, match=r"more.safetensors is not a complete safetensors file: it is not a regular"):
        check_weights(tmp_path, key="policy.model_name")
    (tmp_path / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ConfigError, match=r"policy.model_name: .*config.json: cannot be read"):
        read_model_config(tmp_path, key="policy.model_name")
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_bytes(b'{"a":' * 100_000)
    with pytest.raises(ConfigError, match=r"nested too deeply"):
        read_model_config(tmp_path, key="policy.model_name")


# -- memory ----------------------------------------------------------------------------------------------------------

_BOUNDED = """
import resource, sys, time
from pathlib import Path
from nemo_rl.errors import NemoRLError
from nemo_rl.models.automodel.draft.weight_files import find_weight_files
from nemo_rl.utils.safe_files import read_json_object
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (48 << 20),) * 2)
for directory in map(Path, sys.argv[1:]):
    start = time.monotonic()
    try:
        read_json_object(directory / "config.json")
        find_weight_files(directory)
    except NemoRLError as err:
        print(type(err).__name__, round(time.monotonic() - start))
"""


def test_headers_that_promise_much_allocate_little(tmp_path):
    """In a process that may not grow by 48 MiB."""
    cases = {
        "length": struct.pack("<Q", 1 << 40) + b"{}",
        "within": None,
        "shape": {"a": entry(shape=(1 << 40,), offsets=(0, 1 << 42))},
        "axes": {"a": entry(shape=[1 << 62] * 16, offsets=(0, 1 << 62))},
        "many": {str(i): entry(shape=(1 << 62,), offsets=(i << 40, (i + 1) << 40)) for i in range(1000)},
    }
    for name, case in cases.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}", encoding="utf-8")
        path = tmp_path / name / "model.safetensors"
        if isinstance(case, dict):
            write_raw(path, case)
        elif case is not None:
            path.write_bytes(case)
        else:
            # A sparse file as long as its header claims to be.
            path.write_bytes(struct.pack("<Q", 1 << 32))
            os.truncate(path, 1 << 33)
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "config.json").write_bytes(b"")
    os.truncate(tmp_path / "json" / "config.json", 1 << 40)
    directories = [str(tmp_path / name) for name in (*cases, "json")]
    done = subprocess.run(
        [sys.executable, "-c", _BOUNDED, *directories], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["CheckpointError 0"] * len(directories)


def test_an_architecture_that_asks_for_much_is_refused_from_the_headers(tmp_path):
    huge = make_arch(hidden_size=1 << 17, target_hidden_size=1 << 17, intermediate_size=1 << 20)
    with pytest.raises(CheckpointError, match=r"fc.weight has shape \[12, 24\], \[131072, 262144\] needed"):
        load_tensors(_save(tmp_path, _draft()), huge, trust_pickle=False)
