"""Mutated draft directories: they load, or end in our own error, quickly and in little memory.

What cannot be found: a changed byte that makes one finite weight another one, in a checkpoint that is not ours. Our own
exports carry checksums, which find it.
"""

from __future__ import annotations

import copy
import json
import shutil
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from nemo_rl.errors import CheckpointError, ConfigError
from nemo_rl.models.automodel.draft.builders import load_tensors
from nemo_rl.models.automodel.draft.metadata import META_FILE, describe, sealed, verify_files
from nemo_rl.models.automodel.draft.spec import DraftSpec
from nemo_rl.utils.checksums import checksum
from tests.unit.models.automodel.draft.draft_directories import LAYOUTS, resolve, spec_of, write_draft_directory

T = TypeVar("T")
SECONDS, BYTES, TIMES_FILE = 1.0, 4 << 20, 40
"""Bounds of one call: processor time; memory, as a constant and as a multiple of the files' size."""


def fuzz(examples: int) -> settings:
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    # A failing example is small as it is; searching for a smaller one would take minutes.
    phases = (Phase.explicit, Phase.generate)
    return settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=checks,
        phases=phases,
    )


# -- mutations -------------------------------------------------------------------------------------------------------

WEIRD = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 1, 2, 3, 7, 63, 1 << 31, 1 << 53, 1 << 63, -(1 << 63), 1 << 64, 10**300, 10**4000]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(
        ["", "a", "F32", "BF16", "F8_E4M3", "U8", "..", "/etc/passwd", "model.safetensors", "\ud800", "\0"]
    ),
    st.sampled_from([[], {}, [[]], [0], [-1, 5], [1] * 300, {"a": {}}, [None], ["x"], {"rope_type": "yarn"}]),
    st.integers(-3, 400),
).map(copy.deepcopy)


def nodes(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from nodes(inner, (*path, key))


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def mutated(data: st.DataObject, value: Any) -> Any:
    """A JSON value with one to three changes: replaced, removed, renamed, copied from elsewhere, added."""
    value = copy.deepcopy(value)
    for _ in range(data.draw(st.integers(1, 3))):
        paths = list(nodes(value))
        if not paths:
            break
        path = data.draw(st.sampled_from(paths))
        parent, key = at(value, path[:-1]), path[-1]
        kind = data.draw(st.sampled_from(["replace", "remove", "copy", "add"]))
        if kind == "replace":
            parent[key] = data.draw(WEIRD)
        elif kind == "remove":
            del parent[key]
        elif kind == "copy":
            parent[key] = copy.deepcopy(at(value, data.draw(st.sampled_from(paths))))
        elif isinstance(parent, dict):
            parent[
                data.draw(st.sampled_from(["x", "__metadata__", "mask_hidden", "head_dim", "d2t", "rope_scaling"]))
            ] = data.draw(WEIRD)
        else:
            parent.append(data.draw(WEIRD))
    return value


def damaged(data: st.DataObject, raw: bytes, *, head: int) -> bytes:
    """Bytes of a file, some of them changed, cut off or added; half of the changes in the first `head` bytes."""
    out = bytearray(raw)
    for _ in range(data.draw(st.integers(1, 3))):
        limit = data.draw(st.sampled_from([min(head, len(out)), len(out)])) - 1
        offset = data.draw(st.integers(0, max(0, limit)))
        kind = data.draw(st.sampled_from(["flip", "flip", "flip", "cut", "insert", "append"]))
        if kind == "flip" and out:
            out[offset] ^= data.draw(st.integers(1, 255))
        elif kind == "cut":
            del out[offset:]
        elif kind == "insert":
            out[offset:offset] = data.draw(st.binary(min_size=1, max_size=9))
        else:
            out += data.draw(st.binary(min_size=1, max_size=9))
    return bytes(out)


def split(raw: bytes) -> tuple[dict[str, Any], bytes, int]:
    """Header, data and number of bytes before the data of a safetensors file."""
    length = struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8 : 8 + length]), raw[8 + length :], 8 + length


def joined(header: Any, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


# -- what must hold --------------------------------------------------------------------------------------------------


@contextmanager
def bounded(directory: Path) -> Iterator[None]:
    """Time of this thread and memory of Python stay within their bounds."""
    size = sum(file.stat().st_size for file in directory.iterdir())
    tracemalloc.start(1)
    start = time.thread_time()
    try:
        yield
    finally:
        spent, peak = time.thread_time() - start, tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert spent < SECONDS, f"{spent:.2f} s"
        assert peak < BYTES + TIMES_FILE * size, f"{peak} bytes for files of {size}"


def outcome(call: Callable[[], T], allowed: type[Exception], directory: Path) -> T | None:
    """Result, None after an error of ours that names something."""
    with bounded(directory):
        try:
            return call()
        except allowed as err:
            text = str(err)
            assert "policy." in text or str(directory) in text, text
            assert len(text) < 8000, len(text)
            return None


def check(algo: str, directory: Path) -> DraftSpec | None:
    """The driver refuses or accepts; the worker loads what the driver accepted, but for values it alone reads."""
    spec = outcome(lambda: resolve(algo, directory), ConfigError, directory)
    wanted = spec_of(algo) if spec is None else spec
    tensors = outcome(
        lambda: load_tensors(directory, wanted.architecture, trust_pickle=False), CheckpointError, directory
    )
    if tensors is not None:
        arch = wanted.architecture
        shapes = arch.ignored_shapes() | arch.published_shapes() | arch.frozen_shapes()
        assert {name: tuple(t.shape) for name, t in tensors.items()}.items() <= shapes.items() | {
            ("d2t", (arch.draft_vocab_size,)),
            ("t2d", (arch.vocab_size,)),
        }
        assert all(bool(t.isfinite().all()) for t in tensors.values() if t.is_floating_point())
    return None if tensors is None else spec


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A fresh copy of a valid directory; the same place for each."""
    root = tmp_path_factory.mktemp("valid")

    def copy_of(algo: str, layout: str = "native", *, is_reduced: bool = False, num_shards: int = 1) -> Path:
        source = root / f"{algo}-{layout}-{is_reduced}-{num_shards}"
        if not source.exists():
            spec = spec_of(algo, is_reduced=is_reduced)
            write_draft_directory(source, spec, layout=layout, num_shards=num_shards)
        target = root / "work"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target)
        return target

    return copy_of


@pytest.mark.parametrize(("algo", "layout"), LAYOUTS)
def test_every_directory_loads_before_it_is_mutated(valid, algo, layout):
    directory = valid(algo, layout)
    assert check(algo, directory) is not None


@fuzz(100)
@given(data=st.data())
def test_mutated_headers(valid, data):
    directory = valid("eagle3", is_reduced=True)
    file = directory / "model.safetensors"
    header, content, _ = split(file.read_bytes())
    file.write_bytes(joined(mutated(data, header), content))
    check("eagle3", directory)


@fuzz(100)
@given(data=st.data())
def test_damaged_weight_files(valid, data):
    directory = valid("peagle", is_reduced=True)
    file = directory / "model.safetensors"
    raw = file.read_bytes()
    file.write_bytes(damaged(data, raw, head=split(raw)[2]))
    check("peagle", directory)


@fuzz(60)
@given(data=st.data())
def test_mutated_indexes(valid, data):
    directory = valid("eagle1", num_shards=3)
    index = directory / "model.safetensors.index.json"
    if data.draw(st.booleans()):
        index.write_text(json.dumps(mutated(data, json.loads(index.read_bytes()))), encoding="utf-8")
    else:
        index.write_bytes(damaged(data, index.read_bytes(), head=80))
    check("eagle1", directory)


@pytest.mark.parametrize(("algo", "layout"), LAYOUTS)
def test_mutated_configs(valid, algo, layout):
    @fuzz(16)
    @given(data=st.data())
    def run(data: st.DataObject) -> None:
        directory = valid(algo, layout)
        path = directory / "config.json"
        if data.draw(st.integers(0, 3)):
            path.write_text(json.dumps(mutated(data, json.loads(path.read_bytes()))), encoding="utf-8")
        else:
            path.write_bytes(damaged(data, path.read_bytes(), head=200))
        check(algo, directory)

    run()


@fuzz(25)
@given(data=st.data())
def test_a_changed_byte_of_a_weight_is_found_when_it_makes_it_infinite(valid, data):
    directory = valid("eagle3")
    file = directory / "model.safetensors"
    header, content, begin = split(file.read_bytes())
    name = data.draw(st.sampled_from(sorted(name for name in header if name != "__metadata__")))
    element = header[name]["data_offsets"][0] + 4 * data.draw(
        st.integers(0, (header[name]["data_offsets"][1] - header[name]["data_offsets"][0]) // 4 - 1)
    )
    changed = bytearray(content)
    changed[element + 3] |= 0x7F
    changed[element + 2] |= 0x80
    file.write_bytes(file.read_bytes()[:begin] + bytes(changed))
    with pytest.raises(CheckpointError, match=rf"1 tensors hold NaN or infinity: \['{name}'\]"):
        load_tensors(directory, spec_of("eagle3").architecture, trust_pickle=False)


@fuzz(60)
@given(data=st.data())
def test_mutated_metadata(valid, data):
    """Checksums in our own file are no proof of who wrote it."""
    directory = valid("dflash")
    names = ["config.json", "model.safetensors"]
    meta = sealed(describe(spec_of("dflash"), vocab_ids=None, optimizer=None), directory, names)
    (directory / META_FILE).write_text(json.dumps(meta), encoding="utf-8")
    verify_files(directory)
    meta = mutated(data, meta)
    if data.draw(st.booleans()):
        plain = {name: value for name, value in meta.items() if name != "checksum"}
        meta["checksum"] = checksum(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode())
    (directory / META_FILE).write_text(json.dumps(meta), encoding="utf-8")
    check("dflash", directory)


@fuzz(40)
@given(data=st.data())
def test_a_changed_byte_of_our_own_export_is_found(valid, data):
    directory = valid("dflash")
    names = ["config.json", "model.safetensors"]
    meta = sealed(describe(spec_of("dflash"), vocab_ids=None, optimizer=None), directory, names)
    (directory / META_FILE).write_text(json.dumps(meta), encoding="utf-8")
    file = directory / data.draw(st.sampled_from([*names, META_FILE]))
    raw = bytearray(file.read_bytes())
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    file.write_bytes(raw)
    if file.name != META_FILE:
        with pytest.raises(ConfigError, match=r"policy\.draft\."):
            resolve("dflash", directory)


@fuzz(25)
@given(data=st.data())
def test_a_damaged_pickle_is_an_error_of_ours(valid, data, tmp_path):
    directory = valid("eagle1")
    arch = spec_of("eagle1").architecture
    tensors = load_tensors(directory, arch, trust_pickle=False)
    (directory / "model.safetensors").unlink()
    file = directory / "pytorch_model.bin"
    torch.save(tensors, file)
    loaded = load_tensors(directory, arch, trust_pickle=True)
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    raw = file.read_bytes()
    file.write_bytes(damaged(data, raw, head=2000))
    outcome(lambda: load_tensors(directory, arch, trust_pickle=True), CheckpointError, directory)
