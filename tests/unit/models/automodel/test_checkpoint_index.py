"""The index of a checkpoint is a pickle: whatever it holds, reading it makes values or fails, and calls nothing."""

from __future__ import annotations

import datetime
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

from nemo_rl.errors import CheckpointError
from nemo_rl.models.automodel import checkpoint
from nemo_rl.models.automodel.checkpoint_index import IndexedReader

TENSORS = {
    "model.a": torch.randn(3, 4),
    "model.b": torch.arange(6, dtype=torch.int64),
    "draft.c": torch.randn(2).to(torch.bfloat16),
    "rng.0.torch": torch.get_rng_state(),
    "optim.policy.a.step": torch.tensor(3.0),
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    dcp.save(TENSORS, checkpoint_id=str(tmp_path), no_dist=True)
    return tmp_path


def rewrite(directory: Path, change: Any) -> None:
    index = FileSystemReader(str(directory)).read_metadata()
    change(index)
    (directory / ".metadata").write_bytes(pickle.dumps(index))


def test_the_index_reads_as_torch_reads_it(saved: Path) -> None:
    own, theirs = IndexedReader(saved).read_metadata(), FileSystemReader(str(saved)).read_metadata()
    assert own.state_dict_metadata == theirs.state_dict_metadata
    assert own.storage_data == theirs.storage_data
    assert own.planner_data == theirs.planner_data
    loaded = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    dcp.load(loaded, storage_reader=IndexedReader(saved), no_dist=True)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())


class Call:
    """Pickles as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> Any:
        return self._call


@pytest.mark.parametrize("place", ["top", "planner_data", "storage_data", "key", "value"])
def test_a_pickle_that_calls_something_is_refused_and_calls_nothing(saved: Path, tmp_path: Path, place: str) -> None:
    mark = tmp_path / "called"
    bomb = Call(os.system, f"touch {mark}")
    if place == "top":
        (saved / ".metadata").write_bytes(pickle.dumps(bomb))
    elif place == "key":
        rewrite(saved, lambda index: index.state_dict_metadata.update({(1, bomb): None}))
    elif place == "value":
        rewrite(saved, lambda index: index.state_dict_metadata.update(x=bomb))
    else:
        rewrite(saved, lambda index: setattr(index, place, bomb))
    with pytest.raises(CheckpointError, match=r"\.metadata: cannot be read .it names posix\.system, which is no part"):
        checkpoint._stored_tensors(saved)
    assert not mark.exists()
    # The same file does what it wants with an ordinary unpickler: the test would see it.
    pickle.loads((saved / ".metadata").read_bytes())
    assert mark.exists()


@pytest.mark.parametrize(
    "thing",
    [
        Call(eval, "1"),
        Call(getattr, "", "join"),
        Call(torch.load, "x"),
        Call(Path.unlink, Path("x")),
        Call(torch.nn.Linear, 1, 1),
        Call(dcp.FileSystemWriter, "x"),
        datetime.datetime(2020, 1, 1),
        torch.zeros(2),
    ],
    ids=["eval", "getattr", "load", "unlink", "module", "writer", "datetime", "tensor"],
)
def test_only_the_classes_of_an_index_are_known(saved: Path, thing: Any) -> None:
    rewrite(saved, lambda index: setattr(index, "planner_data", thing))
    with pytest.raises(CheckpointError, match="is no part of an index"):
        checkpoint._stored_tensors(saved)


@pytest.mark.parametrize(
    "content", [b"", b"x", b"\x80\x04.", b"garbage" * 20, pickle.dumps({"a": 1}), pickle.dumps(None)]
)
def test_what_is_no_index_is_refused(saved: Path, content: bytes) -> None:
    (saved / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"\.metadata: cannot be read"):
        checkpoint._stored_tensors(saved)


def test_a_missing_index_is_refused(saved: Path) -> None:
    (saved / ".metadata").unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint._stored_tensors(saved)


def test_a_damaged_index_reads_or_is_refused(saved: Path) -> None:
    """No byte of it can be changed so that anything but our error leaves the reader."""
    whole = (saved / ".metadata").read_bytes()
    refused = 0
    for at in range(0, len(whole), 3):
        for bit in (0x01, 0x80):
            (saved / ".metadata").write_bytes(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
            try:
                checkpoint._stored_tensors(saved)
            except CheckpointError:
                refused += 1
        (saved / ".metadata").write_bytes(whole[:at])
        with pytest.raises(CheckpointError):
            checkpoint._stored_tensors(saved)
    assert refused > 50


@pytest.mark.parametrize("name", ["../x.distcp", "/etc/passwd", "a/b", ".."])
def test_a_file_outside_the_directory_is_refused(saved: Path, name: str) -> None:
    def lead_out(index: Metadata) -> None:
        for place in index.storage_data.values():
            place.relative_path = name

    rewrite(saved, lead_out)
    with pytest.raises(CheckpointError, match="which is no file of the directory"):
        checkpoint._stored_tensors(saved)


def test_entries_that_are_no_tensors_are_not_seen(saved: Path) -> None:
    """torch unpickles such an entry freely when it is loaded."""
    rewrite(saved, lambda index: index.state_dict_metadata.update({"model.a": BytesStorageMetadata()}))
    stored = checkpoint._stored_tensors(saved)
    assert "model.a" not in stored
    assert all(isinstance(entry, TensorStorageMetadata) for entry in stored.values())
