"""Checkpoint directories: written aside, made durable, renamed into place, verified when read.

    <checkpoint_dir>/step_20/
        training_info.json      format version, algorithm, step, counters, the metrics that rank checkpoints
        config.yaml             the configuration that wrote it
        policy/  draft/  ...    whatever the owners of the state put there
        manifest.json           every other file with its size and CRC-32; written last

The names tell the state, so that a run can be killed at any moment:

    tmp_step_20      being written; removed at the next start
    step_20          complete
    old_step_20      complete, being replaced by another save of the same step; restored or removed at the next start
    tmp_delete_20    being removed; removed at the next start

This module knows directories and files only; what is in them belongs to the policy, the draft and the data loader.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from nemo_rl.errors import CheckpointError, ConfigError
from nemo_rl.utils.checksums import checksums
from nemo_rl.utils.directories import make_output_dir
from nemo_rl.utils.timer import TimeoutChecker

if TYPE_CHECKING:
    from pydantic import BaseModel

    from nemo_rl.algorithms.config import CheckpointingConfig

_log = logging.getLogger(__name__)

FORMAT_VERSION = 1
TRAINING_INFO_FILE = "training_info.json"
MANIFEST_FILE = "manifest.json"
CONFIG_FILE = "config.yaml"
REQUIRED_TRAINING_INFO = ("algorithm", "consumed_samples", "total_valid_tokens")
DRAFT_DIR = "draft"
"""Under the directory of a step, and under the log directory at the end of a run: the draft as the engine loads it."""

_STEP_DIR = re.compile(r"step_(\d+)")
_TMP_DIR = re.compile(r"tmp_step_(\d+)")
_OLD_DIR = re.compile(r"old_step_(\d+)")
_LEFTOVER_DIR = re.compile(r"tmp_(?:step|delete)_\d+")


def draft_dir_name(layout: str) -> str:
    """Name of the directory that holds the draft in a layout of `policy.draft.export_layouts`.

    Args:
        layout: `native` or another one.
    """
    return DRAFT_DIR if layout == "native" else f"{DRAFT_DIR}_{layout}"


def is_draft_dir(name: str) -> bool:
    """Whether a directory of a step holds the draft in one of its layouts.

    Args:
        name: of the directory.
    """
    return name == DRAFT_DIR or name.startswith(f"{DRAFT_DIR}_")


class ResumePoint(NamedTuple):
    """A verified checkpoint to continue from."""

    path: Path
    step: int
    training_info: dict[str, Any]


class CheckpointManager:
    """Writes, finds, verifies and retires the checkpoints of one directory.

    path = manager.init_tmp_checkpoint(step, training_info, run_config)
    policy.save_checkpoint(path / "policy")
    manager.finalize_checkpoint(path)
    """

    def __init__(self, cfg: CheckpointingConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Prepare the directory: create it, check it, and clear what a killed run left half done.

        Args:
            cfg: The ``checkpointing`` section. When it is not enabled, nothing on disk is touched.
            clock: Seconds of a monotonic clock, for ``checkpoint_must_save_by``.

        Raises:
            ConfigError: The directory cannot be written.
        """
        self._cfg = cfg
        self._dir = Path(cfg.checkpoint_dir)
        self._timeout = TimeoutChecker(cfg.checkpoint_must_save_by, clock=clock)
        self._out_of_time = False
        if cfg.enabled:
            make_output_dir(self._dir, key="checkpointing.checkpoint_dir")
            self._recover()

    # ---------------------------------------------------------------- when to save

    def start_iterations(self) -> None:
        """Mark the beginning of the first step, so that its duration counts for ``checkpoint_must_save_by``."""
        self._timeout.start_iterations()

    def should_save(self, step: int, *, is_last: bool = False) -> bool:
        """Whether the step that has just been completed is to be saved. Call once per step.

        Args:
            step: Number of completed steps, from 1.
            is_last: The run ends after this step.
        """
        self._timeout.mark_iteration()
        if self._timeout.check_save():
            self._out_of_time = True
        return self._cfg.enabled and (is_last or self._out_of_time or step % self._cfg.save_period == 0)

    def out_of_time(self) -> bool:
        """Whether another step might end after ``checkpoint_must_save_by``: the run has saved and should stop."""
        return self._out_of_time

    # ---------------------------------------------------------------- save

    def init_tmp_checkpoint(
        self,
        step: int,
        training_info: Mapping[str, Any],
        run_config: Mapping[str, Any] | BaseModel | None = None,
    ) -> Path:
        """Create the directory that the owners of the state then fill.

        Args:
            step: Number of completed steps.
            training_info: JSON-serialisable; must hold `REQUIRED_TRAINING_INFO`. Checkpoints are ranked by its entries
                ``val_metrics`` (``metric_name: val:accuracy`` reads ``accuracy``) and ``train_metrics``
                (``train:reward`` reads ``train/reward``).
            run_config: The resolved configuration, stored as ``config.yaml``.

        Returns:
            Absolute path of ``tmp_step_{step}``.

        Raises:
            ValueError: A required entry is missing.
            CheckpointError: The directory cannot be written.
        """
        missing = [name for name in REQUIRED_TRAINING_INFO if name not in training_info]
        if missing:
            raise ValueError(f"training_info lacks {', '.join(missing)}")
        info = {"format_version": FORMAT_VERSION, **training_info, "step": step}
        tmp = (self._dir / f"tmp_step_{step}").absolute()
        try:
            if tmp.exists():
                shutil.rmtree(tmp)
            tmp.mkdir(parents=True)
            (tmp / TRAINING_INFO_FILE).write_text(json.dumps(info, indent=2), encoding="utf-8")
            if run_config is not None:
                plain = dict(run_config) if isinstance(run_config, Mapping) else run_config.model_dump(mode="json")
                text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
                (tmp / CONFIG_FILE).write_text(text, encoding="utf-8")
        except OSError as err:
            raise _write_error(tmp, err) from err
        return tmp

    @staticmethod
    def save_json(path: str | os.PathLike[str], data: Mapping[str, Any]) -> None:
        """Write a small file into a directory made by `init_tmp_checkpoint`.

        Raises:
            CheckpointError: The file cannot be written.
        """
        try:
            Path(path).write_text(json.dumps(dict(data)), encoding="utf-8")
        except OSError as err:
            raise _write_error(Path(path), err) from err

    def finalize_checkpoint(self, tmp_path: str | os.PathLike[str]) -> Path:
        """Make a filled directory durable, give it its final name, then retire surplus checkpoints.

        The previous checkpoint stays valid until the new one has its final name.

        Args:
            tmp_path: What `init_tmp_checkpoint` returned, with every file written and closed.

        Returns:
            Path of ``step_{N}``.

        Raises:
            CheckpointError: The files cannot be written.
        """
        tmp = Path(tmp_path)
        match = _TMP_DIR.fullmatch(tmp.name)
        if match is None:
            raise ValueError(f"{tmp} is not a directory made by init_tmp_checkpoint")
        step = int(match.group(1))
        final = tmp.with_name(f"step_{step}")
        old = tmp.with_name(f"old_step_{step}")
        try:
            _write_manifest(tmp)
            _sync_tree(tmp)
            if final.exists():
                final.rename(old)
            tmp.rename(final)
            _sync_directory(final.parent)
            if old.exists():
                self._remove(old, step=step)
            self._retire_surplus()
        except OSError as err:
            raise _write_error(tmp, err) from err
        return final

    # ---------------------------------------------------------------- find and read

    def get_latest_checkpoint_path(self) -> Path | None:
        """Path of the complete checkpoint with the highest step, or None."""
        steps = self._complete_steps()
        return steps[max(steps)] if steps else None

    def get_best_checkpoint_path(self) -> Path | None:
        """Path of the best checkpoint by ``checkpointing.metric_name``; the latest when none has the metric."""
        ranked = self._ranked_steps()
        return self._dir / f"step_{ranked[0]}" if ranked else None

    def load_training_info(self, path: str | os.PathLike[str], *, algorithm: str | None = None) -> dict[str, Any]:
        """Read ``training_info.json``.

        Args:
            path: A ``step_N`` directory.
            algorithm: What the run trains; a checkpoint of another one is refused. None = any.

        Raises:
            CheckpointError: The file is missing or damaged.
            ConfigError: The checkpoint has another layout or is of another algorithm.
        """
        info = _read_json(Path(path) / TRAINING_INFO_FILE)
        version = info.get("format_version")
        if version != FORMAT_VERSION:
            raise ConfigError(
                f"checkpointing.checkpoint_dir: {path} has checkpoint layout {version!r}; must be {FORMAT_VERSION}. "
                "Continue it with the version that wrote it, or name another directory."
            )
        if algorithm is not None and info["algorithm"] != algorithm:
            draft = Path(path) / DRAFT_DIR
            start = f" To start from its draft, set policy.draft.model_name={draft}, too." if draft.is_dir() else ""
            raise ConfigError(
                f"checkpointing.checkpoint_dir: {path} is a checkpoint of a {info['algorithm']!r} run; this one is "
                f"{algorithm!r} and cannot continue it. Name another directory.{start}"
            )
        return info

    def verify(self, path: str | os.PathLike[str], *, with_draft: bool = True) -> None:
        """Compare every file of a checkpoint with its manifest.

        Args:
            path: A ``step_N`` directory.
            with_draft: Look at the draft's directories, too; a run that starts its draft anew reads nothing there.

        Raises:
            CheckpointError: A file is missing, shorter or longer than written, or has other content; names the file.
        """
        path = Path(path)
        files = _read_manifest(path / MANIFEST_FILE)
        names = [name for name in files if with_draft or not is_draft_dir(name.split("/")[0])]
        for name in names:
            file, expected = path / name, files[name]
            if not file.is_file():
                raise CheckpointError(f"{file} is missing. {self._remedy(path)}")
            size = file.stat().st_size
            if size != expected["bytes"]:
                raise CheckpointError(
                    f"{file} has {size} bytes; {expected['bytes']} were written (truncated?). {self._remedy(path)}"
                )
        for name, crc in checksums(path, names).items():
            if crc != files[name]["crc32"]:
                raise CheckpointError(
                    f"{path / name} is corrupted: CRC-32 {crc}, written {files[name]['crc32']}. {self._remedy(path)}"
                )

    def find_resume_point(self, *, algorithm: str | None = None, with_draft: bool = True) -> ResumePoint | None:
        """Find the latest checkpoint and check it completely: layout, algorithm, every byte.

        Args:
            algorithm: See `load_training_info`.
            with_draft: See `verify`.

        Returns:
            None when checkpointing is off or the directory holds no complete checkpoint.

        Raises:
            CheckpointError: The latest checkpoint is damaged; an older one is never used silently.
            ConfigError: It has another layout or is of another algorithm.
        """
        path = self.get_latest_checkpoint_path() if self._cfg.enabled else None
        if path is None:
            return None
        self.verify(path, with_draft=with_draft)
        info = self.load_training_info(path, algorithm=algorithm)
        return ResumePoint(path=path, step=int(info["step"]), training_info=info)

    # ---------------------------------------------------------------- inside

    def _recover(self) -> None:
        for path in sorted(self._dir.iterdir()):
            if _LEFTOVER_DIR.fullmatch(path.name):
                _log.info("removing %s, left by an interrupted run", path)
                shutil.rmtree(path)
            elif match := _OLD_DIR.fullmatch(path.name):
                final = self._dir / f"step_{match.group(1)}"
                if final.exists():
                    self._remove(path, step=int(match.group(1)))
                else:
                    path.rename(final)
                    _sync_directory(self._dir)

    def _complete_steps(self) -> dict[int, Path]:
        steps: dict[int, Path] = {}
        if not self._dir.is_dir():
            return steps
        for path in self._dir.iterdir():
            match = _STEP_DIR.fullmatch(path.name)
            if match is None:
                continue
            if (path / TRAINING_INFO_FILE).is_file() and (path / MANIFEST_FILE).is_file():
                steps[int(match.group(1))] = path
            else:
                _log.warning("%s is not a complete checkpoint and is ignored", path)
        return steps

    def _ranked_steps(self) -> list[int]:
        """Steps, best first: by the metric, those without it behind, newer before older where equal."""

        def rank(step: int, path: Path) -> tuple[bool, float, int]:
            value = self._metric(path)
            if value is None:
                return (False, 0.0, step)
            return (True, value if self._cfg.higher_is_better else -value, step)

        steps = self._complete_steps()
        return sorted(steps, key=lambda step: rank(step, steps[step]), reverse=True)

    def _metric(self, path: Path) -> float | None:
        """The value that ranks a checkpoint; None when it was not measured or is not finite."""
        if self._cfg.metric_name is None:
            return None
        info = _read_json(path / TRAINING_INFO_FILE)
        kind, _, name = self._cfg.metric_name.partition(":")
        key = name if kind == "val" or "/" in name else f"{kind}/{name}"
        value = info.get(f"{kind}_metrics", {}).get(key)
        return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None

    def _retire_surplus(self) -> None:
        if self._cfg.keep_top_k is None:
            return
        ranked = self._ranked_steps()
        keep = {*ranked[: self._cfg.keep_top_k], max(ranked)}  # the newest is what a killed run continues from
        for step in ranked:
            if step not in keep:
                self._remove(self._dir / f"step_{step}", step=step)

    def _remove(self, path: Path, *, step: int) -> None:
        doomed = self._dir / f"tmp_delete_{step}"
        if doomed.exists():
            shutil.rmtree(doomed)
        path.rename(doomed)  # a removal that is cut short must not look like a checkpoint
        shutil.rmtree(doomed)

    def _remedy(self, path: Path) -> str:
        others = sorted(step for step, other in self._complete_steps().items() if other != path)
        if others:
            return f"Remove {path} to continue from step {others[-1]}."
        return f"Remove {path} to start from the beginning."


def _write_error(tmp: Path, err: OSError) -> CheckpointError:
    hint = "Free space" if err.errno in (errno.ENOSPC, errno.EDQUOT) else "Check the file system"
    return CheckpointError(
        f"{tmp}: the checkpoint could not be written ({err}). {hint} and start the same command again; it continues "
        "from the last complete checkpoint."
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as err:
        raise CheckpointError(f"{path} cannot be read ({err}). Remove {path.parent} to do without it.") from err


def _read_manifest(path: Path) -> dict[str, dict[str, Any]]:
    files = _read_json(path).get("files")
    if not isinstance(files, dict) or not all(
        isinstance(entry, dict) and entry.keys() == {"bytes", "crc32"} for entry in files.values()
    ):
        raise CheckpointError(f"{path} is damaged. Remove {path.parent} to do without it.")
    return files


def _write_manifest(directory: Path) -> None:
    names = sorted(
        file.relative_to(directory).as_posix()
        for file in directory.rglob("*")
        if file.is_file() and file != directory / MANIFEST_FILE
    )
    crcs = checksums(directory, names)
    files = {name: {"bytes": (directory / name).stat().st_size, "crc32": crcs[name]} for name in names}
    text = json.dumps({"format_version": FORMAT_VERSION, "files": files}, indent=1)
    (directory / MANIFEST_FILE).write_text(text, encoding="utf-8")


def _sync_tree(directory: Path) -> None:
    """Flush every file, then every directory from the leaves up, to the disk."""
    for parent, _, files in os.walk(directory, topdown=False):
        for name in files:
            _sync(Path(parent) / name, os.O_RDONLY)
        _sync_directory(Path(parent))


def _sync_directory(directory: Path) -> None:
    _sync(directory, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
