"""The index of a rollout store: what the store holds and which files it is made of. No torch.

    <rollout_store.dir>/
        store.json                                      this index; replaced whole after every step
        run_01_step_000001.safetensors                  the samples of a step
        run_01_step_000001_features_00.safetensors      the policy's states for them, one file per data-parallel rank
        previous_001/                                   steps that a run, started anew, has written again; a store, too

A step is in the store once the index lists it, so a run can be killed at any moment; files that the index does not list
are what it left half done.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, StringConstraints, ValidationError

from nemo_rl.errors import CheckpointError, ConfigError

__all__ = [
    "DATA_FILE",
    "KEY",
    "TMP_SUFFIX",
    "FeatureLayout",
    "FeatureReport",
    "FeatureRows",
    "StoreIdentity",
    "StoreIndex",
    "StoredFile",
    "StoredStep",
    "policy_fingerprint",
    "read_index",
    "reading_problems",
    "replace_file",
    "require_index",
    "write_index",
    "writing_problems",
]

INDEX_FILE = "store.json"
FORMAT = "nemo_rl.rollouts"
FORMAT_VERSION = 1
KEY = "rollout_store.dir"
"""The configuration key that names a store, for messages."""
DATA_FILE = re.compile(r"run_\d+_step_\d+(_features_\d+)?\.safetensors")
TMP_SUFFIX = ".tmp"

_NUM_BLOCKS, _BLOCK_BYTES = 16, 1 << 16

FileName = Annotated[str, StringConstraints(pattern=rf"^{DATA_FILE.pattern}$")]


class _Stored(BaseModel):
    """Read from a file: nothing unknown, nothing converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class FeatureLayout(_Stored):
    """Which states of the policy are stored, besides the final one, which always is.

    Attributes:
        ids: canonical ids (see `draft/capture.py`), ascending.
        size: width of a state.
        dtype: name of the torch dtype.
    """

    ids: tuple[NonNegativeInt, ...]
    size: PositiveInt
    dtype: Literal["float32", "bfloat16", "float16"]


class StoreIdentity(_Stored):
    """What all samples of a store have in common.

    Attributes:
        vocab_size: ids are below this.
        tokenizer: fingerprint of the tokenizer that gave the ids their meaning.
        policy: fingerprint of the checkpoint that the sampling policy started from.
        policy_name: where it was, for messages.
        features: None = tokens only.
    """

    vocab_size: PositiveInt
    tokenizer: str
    policy: str
    policy_name: str
    features: FeatureLayout | None


class StoredFile(_Stored):
    """A file of the store as it was written.

    Attributes:
        name: in the store's directory.
        bytes: its size.
        crc32: of all of it, in hexadecimal; None for features, whose samples have a checksum each.
    """

    name: FileName
    bytes: NonNegativeInt
    crc32: str | None = None


class StoredStep(_Stored):
    """The samples of one step.

    Attributes:
        run: position of its run in `StoreIndex.runs`.
        step: of the run, from 1.
        num_samples: samples that are stored.
        num_tokens: their tokens, prompts included.
        versions: weight versions of the policy that sampled them; the features, if any, are of the same ones.
        file: the samples.
        features: the states, by data-parallel rank.
    """

    run: NonNegativeInt
    step: PositiveInt
    num_samples: PositiveInt
    num_tokens: PositiveInt
    versions: tuple[NonNegativeInt, ...]
    file: StoredFile
    features: tuple[StoredFile, ...] = ()

    @property
    def files(self) -> tuple[StoredFile, ...]:
        """Every file of the step."""
        return (self.file, *self.features)


class StoreIndex(_Stored):
    """Content of `store.json`.

    Attributes:
        format: says that it is one.
        version: of the layout.
        identity: what the samples have in common.
        runs: names of the runs that wrote it, as their configuration names their checkpoints.
        steps: in the order in which samples are numbered.
    """

    format: Literal["nemo_rl.rollouts"] = FORMAT
    version: Literal[1] = FORMAT_VERSION
    identity: StoreIdentity
    runs: tuple[str, ...] = ()
    steps: tuple[StoredStep, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Size of all data files."""
        return sum(file.bytes for step in self.steps for file in step.files)


@dataclass(frozen=True)
class FeatureRows:
    """The stored states of one sample.

    Attributes:
        rows: tokens that they cover.
        crc32: of their bytes.
    """

    rows: int
    crc32: int


@dataclass(frozen=True)
class FeatureReport:
    """What one rank has written of a step.

    Attributes:
        file: None when it had no sample to write.
        samples: by index in the step's batch.
        not_finite: indices of samples with a state that is not finite; they are not written.
    """

    file: StoredFile | None
    samples: dict[int, FeatureRows]
    not_finite: tuple[int, ...]


def read_index(directory: Path) -> StoreIndex | None:
    """Read the index of a store and compare the files' sizes with it.

    Args:
        directory: of the store.

    Returns:
        None when there is no store.

    Raises:
        CheckpointError: the index is damaged or of another layout, or a file is missing, truncated or too long.
    """
    path = directory / INDEX_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as err:
        raise CheckpointError(f"{path}: cannot be read ({err}). Restore it, or use another {KEY}.") from err
    try:
        index = StoreIndex.model_validate_json(text)
    except ValidationError as err:
        first = err.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise CheckpointError(
            f"{path}: is not the index of a rollout store of layout {FORMAT_VERSION} ({where}: {first['msg']}). "
            f"Restore it, or use another {KEY}."
        ) from err
    for step in index.steps:
        for file in step.files:
            _check_size(directory / file.name, file.bytes)
    return index


def _check_size(path: Path, expected: int) -> None:
    try:
        size = path.stat().st_size
    except OSError as err:
        raise CheckpointError(f"{path}: is missing ({err.strerror}). Restore it, or use another {KEY}.") from err
    if size != expected:
        raise CheckpointError(
            f"{path}: has {size} bytes; {expected} were written (truncated?). Restore it, or use another {KEY}."
        )


def write_index(directory: Path, index: StoreIndex) -> None:
    """Replace the index of a store: from here on, the store is what it says.

    Args:
        directory: of the store.
        index: its new content; the files that it lists are complete.
    """
    text = index.model_dump_json()
    replace_file(directory / INDEX_FILE, lambda tmp: tmp.write_text(text, encoding="utf-8"))


def replace_file(path: Path, write: Callable[[Path], object]) -> int:
    """Write a file so that its name never stands for half of it.

    Args:
        path: of the file.
        write: writes the whole content to the path it is given.

    Returns:
        The size in bytes.

    Raises:
        CheckpointError: it cannot be written.
    """
    tmp = path.with_name(path.name + TMP_SUFFIX)
    try:
        write(tmp)
        # Some writers make files that only their owner reads; who may read the directory may read the store.
        tmp.chmod(path.parent.stat().st_mode & 0o666)
        descriptor = os.open(tmp, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            size = os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
        os.replace(tmp, path)
    except OSError as err:
        raise CheckpointError(
            f"{path}: could not be written ({err}). Free space, or lower rollout_store.max_gigabytes; the steps "
            "recorded before are safe."
        ) from err
    return size


# -- what a store belongs to -----------------------------------------------------------------------------------------


def policy_fingerprint(directory: Path) -> str:
    """Fingerprint of a model's weights: of the sizes of its weight files and of blocks spread over their bytes.

    A few megabytes are read of each file, so it costs no time with a large model; training changes nearly every block.

    Args:
        directory: holds `*.safetensors`.
    """
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}:".encode())
        with open(path, "rb") as file:
            for start in _block_starts(size):
                file.seek(start)
                digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()[:32]


def _block_starts(size: int) -> list[int]:
    if size <= _NUM_BLOCKS * _BLOCK_BYTES:
        return list(range(0, size, _BLOCK_BYTES))
    return [i * (size - _BLOCK_BYTES) // (_NUM_BLOCKS - 1) for i in range(_NUM_BLOCKS)]


def writing_problems(index: StoreIndex, identity: StoreIdentity, *, directory: str) -> list[str]:
    """Why a run cannot add to a store.

    Args:
        index: of the store.
        identity: of what the run would write.
        directory: `rollout_store.dir`.

    Returns:
        One message per problem.
    """
    held = index.identity
    found = _common_problems(held, identity, directory=directory)
    if held.policy != identity.policy:
        found.append(
            f"{KEY}: {directory} holds rollouts of the policy {held.policy_name!r}; policy.model_name "
            f"({identity.policy_name!r}) has other weights. Use a directory per policy."
        )
    if held.features != identity.features:
        found.append(
            f"rollout_store.features: {directory} holds {_show(held.features)}, this run records "
            f"{_show(identity.features)}; all steps of a store must be alike. Use another {KEY}, or the settings of "
            "the first run."
        )
    return found


def reading_problems(
    index: StoreIndex, identity: StoreIdentity, *, directory: str, with_features: bool, num_samples: int
) -> list[str]:
    """Why a run cannot train a draft from a store.

    Args:
        index: of the store.
        identity: what the run would write itself: its policy, its tokenizer, what its draft reads.
        directory: `rollout_store.dir`.
        with_features: take the policy's states from the store, too.
        num_samples: of a step.

    Returns:
        One message per problem.
    """
    held, wanted = index.identity, identity.features
    found = _common_problems(held, identity, directory=directory)
    total = sum(step.num_samples for step in index.steps)
    if total < num_samples:
        found.append(
            f"{KEY}: {directory} holds {total} samples; a step takes {num_samples}. Record more, or lower "
            "draft_run.num_prompts_per_step or num_generations_per_prompt."
        )
    if not with_features or wanted is None:
        return found
    remedy = "Use rollout_store.features: false, which runs the policy again, or record with these settings."
    if held.features is None:
        return [*found, f"rollout_store.features: got true; {directory} holds tokens only. {remedy}"]
    if not set(wanted.ids) <= set(held.features.ids) or (wanted.size, wanted.dtype) != (
        held.features.size,
        held.features.dtype,
    ):
        found.append(
            f"rollout_store.features: {directory} holds {_show(held.features)}; the draft needs {_show(wanted)}. "
            f"{remedy}"
        )
    if held.policy != identity.policy:
        found.append(
            f"rollout_store.features: {directory} holds states of the policy {held.policy_name!r}; policy.model_name "
            f"({identity.policy_name!r}) has other weights. {remedy}"
        )
    return found


def _common_problems(held: StoreIdentity, own: StoreIdentity, *, directory: str) -> list[str]:
    if held.vocab_size != own.vocab_size:
        return [
            f"{KEY}: {directory} holds ids of a vocabulary of {held.vocab_size}; the policy's has {own.vocab_size}. "
            "Use another directory, or the policy that the store was recorded with."
        ]
    if held.tokenizer != own.tokenizer:
        return [
            f"{KEY}: {directory} holds ids of another tokenizer than policy.tokenizer.name. Use another directory, or "
            "the tokenizer that the store was recorded with."
        ]
    return []


def _show(layout: FeatureLayout | None) -> str:
    if layout is None:
        return "tokens only"
    layers = ", ".join(str(i - 1) for i in layout.ids)
    return f"{layout.dtype} states of size {layout.size} after layers [{layers}]"


def require_index(directory: str) -> StoreIndex:
    """The index of a store that must exist.

    Args:
        directory: `rollout_store.dir`.

    Raises:
        ConfigError: there is no store, it holds nothing, or it is damaged.
    """
    try:
        index = read_index(Path(directory))
    except CheckpointError as err:
        raise ConfigError(f"{KEY}: {err}") from err
    if index is None or not index.steps:
        raise ConfigError(
            f"{KEY}: got {directory!r}; must hold recorded rollouts, and holds none. Record some with "
            "rollout_store.mode: record or collect_only, or correct the path."
        )
    return index
