"""Recorded rollouts: what is read is what was written, whatever happened in between."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from nemo_rl.algorithms.config import RolloutStoreConfig
from nemo_rl.data import rollout_index
from nemo_rl.data.rollout_index import (
    FeatureLayout,
    StoreIdentity,
    policy_fingerprint,
    read_index,
    reading_problems,
    writing_problems,
)
from nemo_rl.data.rollout_store import RolloutReader, RolloutWriter
from nemo_rl.data.tokenizer_identity import tokenizer_fingerprint
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.errors import CheckpointError, ConfigError
from nemo_rl.utils.checksums import checksums

VOCAB = 50
IDENTITY = StoreIdentity(vocab_size=VOCAB, tokenizer="t", policy="p", policy_name="models/tiny", features=None)
COLUMNS = (
    "input_ids",
    "input_lengths",
    "token_mask",
    "sample_mask",
    "generation_logprobs",
    "rewards",
    "response_lengths",
    "truncated",
)


def make_batch(lengths: list[int], *, seed: int = 0, width: int | None = None) -> BatchedDataDict:
    """Padding holds values that must not come back."""
    g = torch.Generator().manual_seed(seed)
    n, width = len(lengths), width or max(lengths) + 2
    length = torch.tensor(lengths)
    return BatchedDataDict(
        {
            "input_ids": torch.randint(VOCAB, (n, width), generator=g),
            "input_lengths": length,
            "token_mask": torch.rand(n, width, generator=g) < 0.6,
            "sample_mask": (torch.rand(n, generator=g) < 0.8).float(),
            "generation_logprobs": torch.randn(n, width, generator=g),
            "rewards": torch.randn(n, generator=g),
            "response_lengths": torch.randint(0, 9, (n,), generator=g),
            "truncated": torch.rand(n, generator=g) < 0.3,
            "sample_index": torch.arange(n),
            "advantages": torch.randn(n, width, generator=g),
        }
    )


def writer_of(directory: Path, *, run: str = "results/a", resume_step: int | None = None, **cfg: Any) -> RolloutWriter:
    store = RolloutStoreConfig(mode="record", dir=str(directory), **cfg)
    return RolloutWriter(store, IDENTITY, run=run, resume_step=resume_step)


def record(directory: Path, steps: list[int], **writer: Any) -> RolloutWriter:
    out = writer_of(directory, **writer)
    for step in steps:
        out.add(step, make_batch([5, 3, 7, 2], seed=step), versions=frozenset({step - 1}))
    return out


def assert_holds(got: BatchedDataDict, row: int, batch: BatchedDataDict, sample: int) -> None:
    """A row of a batch that was read is a sample of one that was written; its padding is zero."""
    n = int(batch["input_lengths"][sample])
    for name in COLUMNS:
        have, want = got[name][row], batch[name][sample]
        if batch[name].ndim == 2:
            assert not have[n:].any(), name
            have, want = have[:n], want[:n]
        assert have.dtype == want.dtype, name
        assert torch.equal(have, want), name


def recorded_steps(directory: Path) -> list[tuple[int, int]]:
    index = read_index(directory)
    return [] if index is None else [(step.run, step.step) for step in index.steps]


# -- round trip ------------------------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=5), min_size=1, max_size=4),
    batch_size=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_every_epoch_returns_what_was_recorded(
    tmp_path_factory: pytest.TempPathFactory, steps: list[list[int]], batch_size: int, seed: int
) -> None:
    directory = tmp_path_factory.mktemp("store")
    writer, written = writer_of(directory), []
    for number, lengths in enumerate(steps, start=1):
        batch = make_batch(lengths, seed=seed + number)
        assert writer.add(number, batch, versions=frozenset({number - 1})) == 0
        written += [(batch, i) for i in range(batch.size)]
    reader = RolloutReader(directory)
    assert reader.num_samples == len(written)
    per_epoch = reader.num_batches_per_epoch(batch_size)
    if per_epoch == 0:
        with pytest.raises(ConfigError, match=rf"holds {len(written)} samples; a batch takes {batch_size}"):
            next(reader.batches(batch_size=batch_size, seed=seed))
        return
    read = list(itertools.islice(reader.batches(batch_size=batch_size, seed=seed), 2 * per_epoch))
    for epoch in (read[:per_epoch], read[per_epoch:]):
        numbers = [int(i) for batch in epoch for i in batch["sample_index"]]
        assert len(set(numbers)) == len(numbers) == per_epoch * batch_size
        for batch in epoch:
            for row, number in enumerate(batch["sample_index"].tolist()):
                assert_holds(batch, row, *written[number])
    # A run that is resumed, with a reader of its own, goes on where the first one stood.
    for start in range(2 * per_epoch):
        resumed = next(RolloutReader(directory).batches(batch_size=batch_size, seed=seed, start=start))
        assert all(torch.equal(resumed[name], column) for name, column in read[start].items())
    counts = torch.zeros(VOCAB, dtype=torch.int64)
    for batch, i in written:
        for t in range(int(batch["input_lengths"][i])):
            counts[batch["input_ids"][i, t]] += int(batch["token_mask"][i, t] and batch["sample_mask"][i] != 0)
    assert reader.token_counts() == {i: int(n) for i, n in enumerate(counts.tolist()) if n}


def test_the_order_changes_with_seed_and_epoch(tmp_path: Path) -> None:
    record(tmp_path, [1, 2, 3, 4])

    def order(seed: int, start: int) -> list[int]:
        return next(RolloutReader(tmp_path).batches(batch_size=16, seed=seed, start=start))["sample_index"].tolist()

    assert order(0, 0) == order(0, 0) != list(range(16))
    assert len({tuple(order(seed, start)) for seed, start in ((0, 0), (0, 1), (1, 0))}) == 3


def test_versions_and_sizes_are_kept(tmp_path: Path) -> None:
    writer = record(tmp_path, [1, 2])
    size = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert writer.gigabytes == size / 1e9
    reader = RolloutReader(tmp_path)
    assert (reader.versions, reader.vocab_size, reader.has_features) == ((0, 1), VOCAB, False)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {tmp_path.stat().st_mode & 0o666}
    # Not one padded token is stored.
    assert len(load_file(tmp_path / "run_01_step_000001.safetensors")["tokens"]) == 5 + 3 + 7 + 2


# -- several runs ----------------------------------------------------------------------------------------------------


def test_a_resumed_run_replaces_what_it_writes_again(tmp_path: Path) -> None:
    record(tmp_path, [1, 2, 3])
    again = writer_of(tmp_path, resume_step=1)
    assert recorded_steps(tmp_path) == [(0, 1)]
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == ["run_01_step_000001.safetensors"]
    again.add(2, make_batch([4], seed=99), versions=frozenset({1}))
    assert_holds(RolloutReader(tmp_path).samples([4]), 0, make_batch([4], seed=99), 0)
    with pytest.raises(RuntimeError, match="step 2 is in"):
        again.add(2, make_batch([4]), versions=frozenset({1}))


def test_a_run_started_anew_keeps_the_earlier_attempt_aside(tmp_path: Path) -> None:
    """Without a checkpoint the same steps are written again; none may be there twice, and none is lost."""
    record(tmp_path, [1, 2])
    record(tmp_path, [1])
    assert recorded_steps(tmp_path) == [(0, 1)]
    aside = tmp_path / "previous_001"
    assert recorded_steps(aside) == [(0, 1), (0, 2)]
    assert RolloutReader(aside).num_samples == 8


def test_another_run_adds_to_the_store(tmp_path: Path) -> None:
    record(tmp_path, [1, 2])
    record(tmp_path, [1], run="results/b")
    writer_of(tmp_path, resume_step=1)
    assert recorded_steps(tmp_path) == [(0, 1), (1, 1)]
    assert RolloutReader(tmp_path).num_samples == 8


def test_a_store_stops_growing_at_its_limit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = record(tmp_path / "a", [1]).gigabytes
    writer = record(tmp_path / "b", [1, 2, 3, 4], max_gigabytes=1.5 * first)
    # The step that crosses the limit is the last one.
    assert writer.is_full
    assert recorded_steps(tmp_path / "b") == [(0, 1), (0, 2)]
    assert caplog.text.count("adds nothing more") == 1
    assert writer_of(tmp_path / "b", resume_step=2, max_gigabytes=1.5 * first).is_full


# -- damage ----------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    pass


def add_all(writer: RolloutWriter) -> None:
    for step in (1, 2, 3):
        writer.add(step, make_batch([5, 3], seed=step), versions=frozenset({0}))


@pytest.mark.parametrize("survived", range(5))
def test_a_run_killed_between_files_leaves_a_readable_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survived: int
) -> None:
    """Killed before the n-th file of three steps gets its name: what the index lists is whole, and the run goes on."""
    replace, calls = os.replace, itertools.count()

    def replace_or_die(source: Any, target: Any) -> None:
        if next(calls) == survived:
            raise Killed
        replace(source, target)

    writer = writer_of(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(rollout_index.os, "replace", replace_or_die)
        with pytest.raises(Killed):
            add_all(writer)
    done = survived // 2  # a step is two files, the index being the second
    assert recorded_steps(tmp_path) == [(0, step) for step in range(1, done + 1)]
    if done:
        assert RolloutReader(tmp_path).samples(range(2 * done)).size == 2 * done
    writer_of(tmp_path, resume_step=done)
    listed = [f"run_01_step_{step:06d}.safetensors" for step in range(1, done + 1)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [*listed, "store.json"]


def test_a_flipped_byte_is_found_and_named(tmp_path: Path) -> None:
    record(tmp_path, [1, 2])
    path = tmp_path / "run_01_step_000002.safetensors"
    whole = path.read_bytes()
    for position in (0, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])
        reader = RolloutReader(tmp_path)
        reader.samples(range(4))  # of the first step
        with pytest.raises(CheckpointError, match=f"{path.name}: is corrupted"):
            reader.samples([4])
        with pytest.raises(CheckpointError, match=f"{path.name}: is corrupted"):
            reader.token_counts()


@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_a_truncated_or_missing_file_is_named_at_once(tmp_path: Path, damage: str) -> None:
    record(tmp_path, [1, 2])
    path = tmp_path / "run_01_step_000001.safetensors"
    data = path.read_bytes()
    path.unlink()
    if damage == "truncated":
        path.write_bytes(data[:-3])
    with pytest.raises(ConfigError, match=rf"rollout_store.dir: .*{path.name}: (has \d+ bytes|is missing)"):
        RolloutReader(tmp_path)
    with pytest.raises(ConfigError, match=path.name):
        writer_of(tmp_path, resume_step=2)


@pytest.mark.parametrize(
    "change",
    [
        lambda index: "{",
        lambda index: json.dumps(index)[:-5],
        lambda index: json.dumps(index | {"version": 9}),
        lambda index: json.dumps(index | {"format": "something else"}),
        lambda index: json.dumps({key: value for key, value in index.items() if key != "identity"}),
        lambda index: json.dumps(index).replace("run_01_step_000001", "../../etc/run_01_step_000001"),
        lambda index: json.dumps(index).replace('"num_samples": 4', '"num_samples": -4'),
    ],
    ids=["not-json", "truncated", "later-version", "foreign", "incomplete", "path", "negative"],
)
def test_a_damaged_index_is_named(tmp_path: Path, change: Any) -> None:
    record(tmp_path, [1])
    path = tmp_path / "store.json"
    path.write_text(change(json.loads(path.read_text())))
    with pytest.raises(ConfigError, match=r"rollout_store.dir: .*store.json: is not the index of a rollout store"):
        RolloutReader(tmp_path)


def test_ids_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    """A file that agrees with its checksum, and not with what the store says of itself."""
    record(tmp_path, [1])
    path, index = tmp_path / "run_01_step_000001.safetensors", tmp_path / "store.json"
    columns = load_file(path)
    columns["tokens"][3] = VOCAB
    save_file(columns, path)
    content = json.loads(index.read_text())
    content["steps"][0]["file"]["crc32"] = checksums(tmp_path, [path.name])[path.name]
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=rf"{path.name}: holds the token id {VOCAB}"):
        RolloutReader(tmp_path).samples([0])


def test_nothing_to_read_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    for directory in (tmp_path / "absent", tmp_path):
        with pytest.raises(ConfigError, match=r"rollout_store.dir: got .*; must hold recorded rollouts"):
            RolloutReader(directory)


# -- what a store belongs to -----------------------------------------------------------------------------------------

LAYOUT = FeatureLayout(ids=(1, 2, 3), size=8, dtype="bfloat16")


def identity(**changes: Any) -> StoreIdentity:
    return IDENTITY.model_copy(update=changes)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"vocab_size": 51}, "rollout_store.dir: .* vocabulary of 50; the policy's has 51"),
        ({"tokenizer": "u"}, "rollout_store.dir: .* another tokenizer"),
        ({"policy": "q"}, "rollout_store.dir: .* rollouts of the policy 'models/tiny'"),
        ({"features": LAYOUT}, "rollout_store.features: .* holds tokens only"),
    ],
    ids=["vocabulary", "tokenizer", "policy", "features"],
)
def test_rollouts_of_another_kind_are_not_added(tmp_path: Path, changes: dict[str, Any], key: str) -> None:
    record(tmp_path, [1])
    with pytest.raises(ConfigError, match=key):
        RolloutWriter(RolloutStoreConfig(dir=str(tmp_path)), identity(**changes), run="b", resume_step=None)
    index = read_index(tmp_path)
    assert index is not None
    assert len(writing_problems(index, identity(**changes), directory="d")) == 1


@pytest.mark.parametrize(
    ("held", "wanted", "problem"),
    [
        ({}, {"policy": "q"}, None),  # the teacher is the policy of this run, which is run again
        ({"features": LAYOUT}, {"features": LAYOUT}, None),
        ({"features": LAYOUT}, {"features": LAYOUT.model_copy(update={"ids": (2,)})}, None),
        ({"features": LAYOUT}, {"features": LAYOUT.model_copy(update={"ids": (2, 4)})}, "after layers"),
        ({"features": LAYOUT}, {"features": LAYOUT.model_copy(update={"size": 16})}, "of size 16"),
        ({"features": LAYOUT}, {"features": LAYOUT.model_copy(update={"dtype": "float32"})}, "needs float32"),
        ({"features": LAYOUT}, {"features": LAYOUT, "policy": "q"}, "holds states of the policy 'models/tiny'"),
        ({}, {"features": LAYOUT}, "holds tokens only"),
        ({}, {"vocab_size": 51}, "vocabulary"),
        ({}, {"tokenizer": "u"}, "another tokenizer"),
    ],
)
def test_what_a_draft_may_be_trained_from(
    tmp_path: Path, held: dict[str, Any], wanted: dict[str, Any], problem: str | None
) -> None:
    record(tmp_path, [1])
    index = read_index(tmp_path)
    assert index is not None
    index = index.model_copy(update={"identity": identity(**held)})
    own = identity(**wanted)
    with_features = own.features is not None
    found = reading_problems(index, own, directory="d", with_features=with_features, num_samples=4)
    assert len(found) == (problem is not None)
    assert problem is None or problem in found[0]
    [few] = reading_problems(index, index.identity, directory="d", with_features=False, num_samples=5)
    assert "holds 4 samples; a step takes 5" in few


def test_fingerprints_follow_weights_and_vocabulary_alone(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    weights = {"w": torch.arange(2**19, dtype=torch.float32)}  # more than one block
    for directory in (first, second):
        directory.mkdir()
        save_file(weights, directory / "model.safetensors")
        (directory / "tokenizer.json").write_text("{}")
    (second / "generation_config.json").write_text("{}")
    (second / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    assert policy_fingerprint(first) == policy_fingerprint(second)
    assert tokenizer_fingerprint(first) == tokenizer_fingerprint(second)
    save_file({"w": weights["w"] + 1}, second / "model.safetensors")
    assert policy_fingerprint(first) != policy_fingerprint(second)
    (second / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    assert tokenizer_fingerprint(first) != tokenizer_fingerprint(second)
