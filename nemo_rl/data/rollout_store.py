"""Rollouts on disk: written by GRPO step by step, read back as training batches for a draft.

Layout and rules of the files: `rollout_index`. A step's file holds its N samples without padding, as a flat row of L
tokens:

    offsets               int64 [N + 1]   sample i is tokens[offsets[i] : offsets[i + 1]]
    tokens                int32 [L]       prompt and response
    token_mask            bool [L]        True = sampled by the policy
    generation_logprobs   fp32 [L]        of the engine; 0 on prompts
    sample_mask           fp32 [N]        0 = left out of the policy's loss
    rewards               fp32 [N]        raw
    response_lengths      int32 [N]
    truncated             bool [N]        stopped by the length limit
    sample_index          int32 [N]       of the sample in its step
    feature_file          int32 [N]       which of the step's feature files holds its states; absent without features
    feature_crc32         int64 [N]       of the bytes of its states; absent without features

A feature file holds one tensor per sample, named by `sample_index`: [tokens of the sample, states, size], the states in
ascending order of their ids, the final one last.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nemo_rl.data.rollout_index import (
    DATA_FILE,
    KEY,
    TMP_SUFFIX,
    FeatureReport,
    FeatureRows,
    StoredFile,
    StoredStep,
    StoreIdentity,
    StoreIndex,
    read_index,
    replace_file,
    require_index,
    write_index,
    writing_problems,
)
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.errors import CheckpointError, ConfigError, NonFiniteError
from nemo_rl.utils.checksums import checksums
from nemo_rl.utils.directories import make_output_dir

if TYPE_CHECKING:
    from nemo_rl.algorithms.config import RolloutStoreConfig

__all__ = ["RolloutReader", "RolloutWriter", "bytes_crc32", "record_step", "write_tensors"]

log = logging.getLogger(__name__)

GIGABYTE = 10**9
_MAX_OPEN_FILES = 128

_PER_TOKEN = {"tokens": torch.int32, "token_mask": torch.bool, "generation_logprobs": torch.float32}
_PER_SAMPLE = {
    "sample_mask": torch.float32,
    "rewards": torch.float32,
    "response_lengths": torch.int32,
    "truncated": torch.bool,
    "sample_index": torch.int32,
}


class _FeatureSource(Protocol):
    """What of a policy the recording needs."""

    def collect_features(self, data: BatchedDataDict, *, directory: str, stem: str) -> list[FeatureReport]: ...


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> int:
    """Write a safetensors file whose name never stands for half of it.

    Args:
        path: of the file.
        tensors: contiguous, on the CPU.

    Returns:
        The size in bytes.
    """
    return replace_file(path, lambda tmp: save_file(tensors, tmp))


def record_step(
    writer: RolloutWriter, policy: _FeatureSource, batch: BatchedDataDict, *, step: int, versions: frozenset[int]
) -> dict[str, float]:
    """Add a step's samples to the store, with the states of the policy's present weights if the store has features.

    Args:
        writer: of the store.
        policy: runs one more forward for the features; must still have the weights that sampled the batch.
        batch: the step's training batch.
        step: of the run, from 1.
        versions: weight versions that sampled it.

    Returns:
        The recording's metrics.
    """
    reports = None
    if writer.has_features and not writer.is_full:
        reports = policy.collect_features(batch, directory=str(writer.directory), stem=writer.stem(step))
    num_dropped = writer.add(step, batch, versions=versions, features=reports)
    metrics = {"train/rollout_store_gigabytes": writer.gigabytes}
    if writer.has_features:
        metrics["train/rollout_store_samples_dropped"] = float(num_dropped)
    return metrics


# -- writing ---------------------------------------------------------------------------------------------------------


class RolloutWriter:
    """Adds the steps of one run to a store. One run at a time writes a store."""

    def __init__(self, cfg: RolloutStoreConfig, identity: StoreIdentity, *, run: str, resume_step: int | None) -> None:
        """Open or create the store, and take out what this run is going to write again.

        Args:
            cfg: `rollout_store`.
            identity: what all samples have in common.
            run: tells this run from others that wrote the store, and is the same when it is resumed.
            resume_step: the step that a resumed run continues from: later ones are removed. None = a run that starts
                anew: what it wrote before is moved to `previous_NNN/`.

        Raises:
            ConfigError: the directory cannot be written, or holds a damaged store or one of another identity.
        """
        self.directory = Path(cfg.dir)
        self._max_bytes = None if cfg.max_gigabytes is None else int(cfg.max_gigabytes * GIGABYTE)
        self._has_told = False
        make_output_dir(self.directory, key=KEY)
        try:
            index = read_index(self.directory)
        except CheckpointError as err:
            raise ConfigError(f"{KEY}: {err}") from err
        if index is None:
            index = StoreIndex(identity=identity)
        problems = writing_problems(index, identity, directory=cfg.dir)
        if problems:
            raise ConfigError("\n".join(problems))
        if run not in index.runs:
            index = index.model_copy(update={"runs": (*index.runs, run)})
        self._run = index.runs.index(run)
        self._index = self._without_rewritten(index, resume_step)
        self._remove_leftovers()

    def _without_rewritten(self, index: StoreIndex, resume_step: int | None) -> StoreIndex:
        """Commit an index without the steps that this run writes again, and keep those of an earlier attempt aside."""
        again = [s for s in index.steps if s.run == self._run and s.step > (resume_step or 0)]
        if again and resume_step is None:
            self._set_aside(index.model_copy(update={"steps": tuple(again)}))
        index = index.model_copy(update={"steps": tuple(s for s in index.steps if s not in again)})
        write_index(self.directory, index)
        return index

    def _set_aside(self, index: StoreIndex) -> None:
        number = 1
        while (self.directory / f"previous_{number:03d}").exists():
            number += 1
        target = self.directory / f"previous_{number:03d}"
        target.mkdir()
        for file in (file for step in index.steps for file in step.files):
            # Linked, not moved: until the store's own index is replaced, the files belong to it.
            try:
                os.link(self.directory / file.name, target / file.name)
            except OSError:
                shutil.copy2(self.directory / file.name, target / file.name)
        write_index(target, index)
        log.info("%s: moved %d steps of an earlier start to %s", self.directory, len(index.steps), target)

    def _remove_leftovers(self) -> None:
        listed = {file.name for step in self._index.steps for file in step.files}
        for path in self.directory.iterdir():
            name = path.name.removesuffix(TMP_SUFFIX)
            if DATA_FILE.fullmatch(name) and path.name not in listed:
                path.unlink()

    @property
    def has_features(self) -> bool:
        """Whether the policy's states are stored, too."""
        return self._index.identity.features is not None

    @property
    def gigabytes(self) -> float:
        """Size of the store, in units of 10^9 bytes."""
        return self._index.num_bytes / GIGABYTE

    @property
    def is_full(self) -> bool:
        """Whether the store has reached `max_gigabytes`, so that nothing is added."""
        return self._max_bytes is not None and self._index.num_bytes >= self._max_bytes

    def stem(self, step: int) -> str:
        """First part of the names of a step's files.

        Args:
            step: of the run, from 1.
        """
        return f"run_{self._run + 1:02d}_step_{step:06d}"

    def add(
        self,
        step: int,
        batch: BatchedDataDict,
        *,
        versions: frozenset[int],
        features: Sequence[FeatureReport] | None = None,
    ) -> int:
        """Write the samples of a step; past `max_gigabytes` nothing is written.

        Args:
            step: of the run, from 1; later than every step of the run in the store.
            batch: `input_ids` int64 [N, T], `input_lengths` int64 [N], `token_mask` [N, T], `sample_mask` [N],
                `generation_logprobs` [N, T], `rewards` [N], `response_lengths` [N], `truncated` [N], and
                `sample_index` int64 [N], by which `features` names the samples.
            versions: weight versions that sampled them.
            features: what the ranks wrote; None = the store has none, or is full.

        Returns:
            Samples that were left out, because their states were not finite or did not cover their tokens.

        Raises:
            NonFiniteError: no sample has finite states.
            CheckpointError: a file cannot be written.
        """
        if self.is_full:
            if not self._has_told:
                self._has_told = True
                log.warning(
                    "%s holds %.3f GB and has reached rollout_store.max_gigabytes; this run adds nothing more to it",
                    self.directory,
                    self.gigabytes,
                )
            return 0
        if (features is not None) != self.has_features:
            raise RuntimeError("features must be given exactly for a store that has them.")
        if any(held.run == self._run and held.step >= step for held in self._index.steps):
            raise RuntimeError(f"step {step} is in {self.directory} already; a run adds its steps in order.")
        columns = _flatten(batch)
        num_dropped = 0
        if features is not None:
            where = _usable(features, columns["sample_index"].tolist(), _lengths(columns), step=step)
            num_dropped = batch.size - len(where)
            if not where:
                raise NonFiniteError(
                    f"step {step}: no sample has states of the policy that are finite and cover its tokens; nothing "
                    "is left to record. Check the policy's weights, or set rollout_store.features: false."
                )
            kept = [i for i, number in enumerate(columns["sample_index"].tolist()) if number in where]
            columns = _flatten(batch.select_indices(kept))
            places = [where[number] for number in columns["sample_index"].tolist()]
            columns["feature_file"] = torch.tensor([file for file, _ in places], dtype=torch.int32)
            columns["feature_crc32"] = torch.tensor([rows.crc32 for _, rows in places], dtype=torch.int64)
        path = self.directory / f"{self.stem(step)}.safetensors"
        size = write_tensors(path, columns)
        stored = StoredStep(
            run=self._run,
            step=step,
            num_samples=len(columns["sample_index"]),
            num_tokens=len(columns["tokens"]),
            versions=tuple(sorted(versions)),
            file=StoredFile(name=path.name, bytes=size, crc32=_crc32_of(path)),
            features=tuple(report.file for report in features or () if report.file is not None),
        )
        index = self._index.model_copy(update={"steps": (*self._index.steps, stored)})
        write_index(self.directory, index)
        self._index = index
        return num_dropped


def _flatten(batch: BatchedDataDict) -> dict[str, Tensor]:
    """The columns of a step's file, without those of features."""
    lengths = batch["input_lengths"].to(torch.int64)
    is_token = torch.arange(batch["input_ids"].shape[1])[None] < lengths[:, None]
    source = {"tokens": "input_ids"}
    columns = {name: batch[source.get(name, name)][is_token].to(dtype) for name, dtype in _PER_TOKEN.items()}
    columns |= {name: batch[name].to(dtype).contiguous() for name, dtype in _PER_SAMPLE.items()}
    columns["offsets"] = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return columns


def _lengths(columns: dict[str, Tensor]) -> list[int]:
    return columns["offsets"].diff().tolist()


def _usable(
    reports: Sequence[FeatureReport], indices: list[int], lengths: list[int], *, step: int
) -> dict[int, tuple[int, FeatureRows]]:
    """Samples with usable states: index in the step to (number of the file, rows)."""
    files = [report for report in reports if report.file is not None]
    rows = {index: (number, held) for number, report in enumerate(files) for index, held in report.samples.items()}
    not_finite = sorted(index for report in reports for index in report.not_finite)
    counts = {i: (rows[i][1].rows if i in rows else 0, n) for i, n in zip(indices, lengths, strict=True)}
    short = {i: pair for i, pair in counts.items() if i not in not_finite and pair[0] != pair[1]}
    if not_finite:
        log.warning("step %d: samples %s are not recorded, their states are not finite", step, not_finite)
    if short:
        shown = ", ".join(f"{i} ({got} of {want})" for i, (got, want) in short.items())
        log.warning("step %d: samples are not recorded, their states do not cover their tokens: %s", step, shown)
    return {i: rows[i] for i in indices if i in rows and i not in short}


def _crc32_of(path: Path) -> str:
    return checksums(path.parent, [path.name])[path.name]


def bytes_crc32(tensor: Tensor) -> int:
    """CRC-32 of a tensor's bytes.

    Args:
        tensor: contiguous, on the CPU.
    """
    # numpy has no bfloat16; the view shares the memory.
    return zlib.crc32(tensor.view(torch.uint8).numpy().data)


# -- reading ---------------------------------------------------------------------------------------------------------


class _OpenStep(NamedTuple):
    """One step's file, mapped into memory."""

    handle: Any
    offsets: list[int]
    per_sample: dict[str, Tensor]


class RolloutReader:
    """Training batches of the samples of a store."""

    def __init__(self, directory: Path) -> None:
        """Read the index and check the files' sizes; contents are checked when they are first read.

        Args:
            directory: `rollout_store.dir`.

        Raises:
            ConfigError: there is no store, or it is damaged; names the file.
        """
        self._directory = directory
        self._index = require_index(str(directory))
        self._starts = list(itertools.accumulate((s.num_samples for s in self._index.steps), initial=0))
        self._verified: set[int] = set()
        self._open = functools.lru_cache(maxsize=_MAX_OPEN_FILES)(self._open_step)
        self._open_features = functools.lru_cache(maxsize=_MAX_OPEN_FILES)(self._open_file)

    @property
    def num_samples(self) -> int:
        """Samples of the store."""
        return self._starts[-1]

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self._index.identity.vocab_size

    @property
    def has_features(self) -> bool:
        """Whether the policy's states are stored."""
        return self._index.identity.features is not None

    @property
    def feature_ids(self) -> tuple[int, ...]:
        """Canonical ids of the stored states, without the final one, which is stored behind them."""
        layout = self._index.identity.features
        return () if layout is None else layout.ids

    @property
    def versions(self) -> tuple[int, ...]:
        """Weight versions of the policy that the samples come from, ascending."""
        return tuple(sorted({version for step in self._index.steps for version in step.versions}))

    def num_batches_per_epoch(self, batch_size: int) -> int:
        """Whole batches of one pass over the store.

        Args:
            batch_size: samples.
        """
        return self.num_samples // batch_size

    def batches(self, *, batch_size: int, seed: int, start: int = 0) -> Iterator[BatchedDataDict]:
        """Yield batches without end, each epoch in an order of its own that (seed, epoch) fixes.

        Args:
            batch_size: samples; what is left of an epoch is dropped.
            seed: of the orders.
            start: batches that an earlier run has used.

        Yields:
            `input_ids` int64 [N, T] padded right with 0, `input_lengths` int64 [N], `token_mask` bool [N, T],
            `sample_mask` fp32 [N], `generation_logprobs` fp32 [N, T], `rewards` fp32 [N], `response_lengths` int64 [N],
            `truncated` bool [N], `sample_index` int64 [N]: the number of the sample in the store.
        """
        per_epoch = self.num_batches_per_epoch(batch_size)
        if per_epoch == 0:
            raise ConfigError(
                f"{KEY}: {self._directory} holds {self.num_samples} samples; a batch takes {batch_size}. Record more, "
                "or lower the batch size."
            )
        epoch, order = -1, np.empty(0, dtype=np.int64)
        for number in itertools.count(start):
            if number // per_epoch != epoch:
                epoch = number // per_epoch
                order = np.random.default_rng([seed, epoch]).permutation(self.num_samples)
            first = number % per_epoch * batch_size
            yield self.samples(order[first : first + batch_size].tolist())

    def samples(self, numbers: Sequence[int]) -> BatchedDataDict:
        """The samples of given numbers as one batch; keys as of `batches`.

        Args:
            numbers: from 0 to `num_samples` - 1.
        """
        rows = [self._row(number) for number in numbers]
        out: dict[str, Tensor] = {
            "input_ids": _pad(row["tokens"].long() for row in rows),
            "input_lengths": torch.tensor([len(row["tokens"]) for row in rows]),
            "token_mask": _pad(row["token_mask"] for row in rows),
            "generation_logprobs": _pad(row["generation_logprobs"] for row in rows),
        }
        for name in ("sample_mask", "rewards", "response_lengths", "truncated"):
            out[name] = torch.stack([row[name] for row in rows])
        out["response_lengths"] = out["response_lengths"].long()
        out["sample_index"] = torch.tensor(list(numbers), dtype=torch.int64)
        return BatchedDataDict(out)

    def features(self, number: int) -> Tensor:
        """The policy's states for a sample.

        Args:
            number: of the sample in the store.

        Returns:
            [tokens, states, size] in the dtype of the policy's computation; the states are those of `feature_ids` and
            the final one.

        Raises:
            CheckpointError: the file is damaged, or the states do not cover the tokens.
        """
        place, local = self._place(number)
        opened, step = self._open(place), self._index.steps[place]
        index = int(opened.per_sample["sample_index"][local])
        file = step.features[int(opened.per_sample["feature_file"][local])]
        path = self._directory / file.name
        states = _tensor(self._open_features(file.name), str(index), path=path)
        length = opened.offsets[local + 1] - opened.offsets[local]
        if len(states) != length:
            raise CheckpointError(
                f"{path}: sample {index} of step {step.step} has states for {len(states)} tokens; it has {length}. "
                f"Record the step again, or use rollout_store.features: false."
            )
        if bytes_crc32(states) != int(opened.per_sample["feature_crc32"][local]):
            raise CheckpointError(f"{path}: the states of sample {index} are not what was written. Restore the file.")
        return states

    def token_counts(self) -> dict[int, int]:
        """How often each id was sampled by the policy, in samples that are not masked out."""
        counts = torch.zeros(self.vocab_size, dtype=torch.int64)
        for place in range(len(self._index.steps)):
            opened = self._open(place)
            path = self._directory / self._index.steps[place].file.name
            lengths = torch.tensor(opened.offsets).diff()
            is_kept = (opened.per_sample["sample_mask"] != 0).repeat_interleave(lengths)
            is_counted = is_kept & _tensor(opened.handle, "token_mask", path=path)
            tokens = _tensor(opened.handle, "tokens", path=path)[is_counted]
            counts += torch.bincount(tokens.long(), minlength=self.vocab_size)
        return {i: int(counts[i]) for i in counts.nonzero().flatten().tolist()}

    def _place(self, number: int) -> tuple[int, int]:
        """The step of a sample, and its position in it."""
        if not 0 <= number < self.num_samples:
            raise IndexError(f"sample {number}: the store has samples 0 to {self.num_samples - 1}.")
        place = int(np.searchsorted(self._starts, number, side="right")) - 1
        return place, number - self._starts[place]

    def _row(self, number: int) -> dict[str, Tensor]:
        place, local = self._place(number)
        opened = self._open(place)
        begin, end = opened.offsets[local], opened.offsets[local + 1]
        row = {name: opened.handle.get_slice(name)[begin:end] for name in _PER_TOKEN}
        return row | {name: column[local] for name, column in opened.per_sample.items()}

    def _open_step(self, place: int) -> _OpenStep:
        step = self._index.steps[place]
        path = self._directory / step.file.name
        if place not in self._verified:
            found = _crc32_of(path)
            if found != step.file.crc32:
                raise CheckpointError(
                    f"{path}: is corrupted (CRC-32 {found}, written {step.file.crc32}). Restore it, or record the "
                    "rollouts again."
                )
        handle = self._open_file(step.file.name)
        names = [*_PER_SAMPLE, *(("feature_file", "feature_crc32") if step.features else ())]
        opened = _OpenStep(
            handle,
            _tensor(handle, "offsets", path=path).tolist(),
            {name: _tensor(handle, name, path=path) for name in names},
        )
        if place not in self._verified:
            tokens = _tensor(handle, "tokens", path=path)
            if len(opened.offsets) != step.num_samples + 1 or opened.offsets[-1] != len(tokens):
                raise CheckpointError(f"{path}: does not hold the {step.num_samples} samples that the index lists.")
            if int(tokens.min()) < 0 or int(tokens.max()) >= self.vocab_size:
                raise CheckpointError(
                    f"{path}: holds the token id {int(tokens.max())}; the store's vocabulary has {self.vocab_size} ids."
                )
            self._verified.add(place)
        return opened

    def _open_file(self, name: str) -> Any:
        path = self._directory / name
        try:
            return safe_open(path, framework="pt")
        except (SafetensorError, OSError) as err:
            raise CheckpointError(f"{path}: is not a complete safetensors file ({err}). Restore it.") from err


def _tensor(handle: Any, name: str, *, path: Path) -> Tensor:
    try:
        return handle.get_tensor(name)
    except SafetensorError as err:
        raise CheckpointError(f"{path}: lacks the tensor {name} ({err}). Restore it.") from err


def _pad(rows: Iterable[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
