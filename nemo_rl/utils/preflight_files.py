"""Checks of the files of a run: prompts, output directories, the checkpoint to continue from."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from nemo_rl.errors import CheckpointError, ConfigError
from nemo_rl.utils.checkpoint import CONFIG_FILE, DRAFT_DIR, CheckpointManager, is_draft_dir
from nemo_rl.utils.model_files import check_safetensors

if TYPE_CHECKING:
    from nemo_rl.algorithms.config import MasterConfig

_CHECKPOINT_KEY = "checkpointing.checkpoint_dir"


def prompt_problems(
    cfg: MasterConfig, *, needed: int | None = None, needed_by: str = "grpo.num_prompts_per_step"
) -> list[str]:
    """Check the prompt templates and the local prompt files.

    Args:
        cfg: The configuration.
        needed: Training prompts of one step; None = those of GRPO.
        needed_by: The configuration's name for that number.

    Returns:
        One message per problem.
    """
    data = cfg.data
    found: list[str] = []
    for key, name in (("prompt_file", data.prompt_file), ("system_prompt_file", data.system_prompt_file)):
        if name is not None and not Path(name).is_file():
            found.append(
                f"data.{key}: got {name!r}; must be a text file, and there is none. Correct the path, or use null."
            )
    if data.prompt_file is not None and Path(data.prompt_file).is_file():
        text = Path(data.prompt_file).read_text(encoding="utf-8", errors="replace")
        if "{}" not in text:
            found.append(f"data.prompt_file: {data.prompt_file} must hold {{}} where the question goes. Add it.")
    if needed is None:
        needed = int(cfg.grpo.num_prompts_per_step * cfg.grpo.batch_multiplier)
    if data.reasoning_gym is not None and data.dataset_name == "reasoning_gym" and data.reasoning_gym.size < needed:
        got = str(data.reasoning_gym.size)
        found.append(_too_few("data.reasoning_gym.size", got, needed=needed, needed_by=needed_by))
    if data.dataset_name != "ResponseDataset":
        return found
    for key, name in (("train_data_path", data.train_data_path), ("val_data_path", data.val_data_path)):
        if name is not None and _is_local_file(name):
            fields = (data.input_key, data.output_key)
            found += _rows_problems(
                name,
                key=f"data.{key}",
                fields=fields,
                needed=needed if key.startswith("train") else 1,
                needed_by=needed_by,
            )
    return found


def check_writable(directory: Path, *, key: str) -> None:
    """Check that a directory can be made and written, by writing a file into it or its nearest existing parent.

    Args:
        directory: The directory; need not exist, and is not made.
        key: The configuration key that names it.

    Raises:
        ConfigError: It cannot be written.
    """
    nearest = directory.absolute()
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    reason = None
    if not nearest.is_dir():
        reason = f"{nearest} is not a directory"
    else:
        try:
            with tempfile.TemporaryFile(dir=nearest) as probe:
                probe.write(b"0")
        except OSError as err:
            reason = f"{nearest} cannot be written: {err.strerror}"
    if reason is not None:
        raise ConfigError(
            f"{key}: got {str(directory)!r}; must be a directory that can be written, but {reason}. Choose another one."
        )


def check_checkpoint(cfg: MasterConfig, *, algorithm: str, draft: Mapping[str, Any] | None) -> bool:
    """Check that the latest checkpoint, if there is one, can be continued with this configuration.

    With `policy.draft.restart` a draft that does not fit, or is not there, is no obstacle. One that fits is started
    anew as well, but only once: a checkpoint that was written with `restart` set holds the draft that was started anew.

    Args:
        cfg: The configuration.
        algorithm: What the checkpoint must say it is.
        draft: What `metadata.describe` says of the run's draft; None = the run has no draft.

    Returns:
        True when the draft is to be started anew beside the checkpoint's policy.

    Raises:
        ConfigError: The checkpoint is of another algorithm, layout or draft, or one of its files is damaged.
    """
    directory = Path(cfg.checkpointing.checkpoint_dir)
    if not cfg.checkpointing.enabled or not any(directory.glob("*step_*")):
        return False
    manager = CheckpointManager(cfg.checkpointing)
    path = manager.get_latest_checkpoint_path()
    if path is None:
        return False
    try:
        manager.load_training_info(path, algorithm=algorithm)
    except (CheckpointError, KeyError) as err:
        raise ConfigError(
            f"{_CHECKPOINT_KEY}: {path} is not a checkpoint of this program ({err}). {_elsewhere(path)}"
        ) from err
    problem = _draft_problem(path, draft)
    wants_restart = draft is not None and cfg.policy.draft.restart
    if problem is not None and not wants_restart:
        raise ConfigError(problem)
    restarts = wants_restart and (problem is not None or not _was_restarted(path))
    for file in sorted(path.rglob("*.safetensors")):
        if not (restarts and is_draft_dir(file.relative_to(path).parts[0])):
            check_safetensors(file, key=_CHECKPOINT_KEY)
    return restarts


def _draft_problem(path: Path, draft: Mapping[str, Any] | None) -> str | None:
    """What keeps a checkpoint's draft from being continued."""
    # Imported late: a run without a draft and without a checkpoint does not read it.
    from nemo_rl.models.automodel.draft.metadata import META_FILE, RESTART_HINT, differences, read_meta

    directory = path / DRAFT_DIR
    is_there = (directory / META_FILE).is_file()
    if draft is None:
        return (
            None
            if not is_there
            else (f"policy.draft.enabled: got false; {path} holds a draft, this run has none. {_elsewhere(path)}")
        )
    if not is_there:
        return (
            f"policy.draft.enabled: got true; {path} holds no draft, this run trains one. {_elsewhere(path)} Or "
            f"{RESTART_HINT}."
        )
    try:
        stored = read_meta(directory)
    except CheckpointError as err:
        return f"{_CHECKPOINT_KEY}: {err} {_elsewhere(path)} Or {RESTART_HINT}."
    differing = differences(stored, draft)
    if not differing:
        return None
    key = "policy.draft.algo" if stored["algo"] != draft["algo"] else "policy.draft"
    return f"{key}: got another draft than {path} holds ({'; '.join(differing)}). {_elsewhere(path)} Or {RESTART_HINT}."


def _was_restarted(path: Path) -> bool:
    """Whether the run that wrote a checkpoint had `policy.draft.restart` set."""
    try:
        stored = yaml.safe_load((path / CONFIG_FILE).read_text(encoding="utf-8"))
        return stored["policy"]["draft"]["restart"] is True
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError):
        return False


def _elsewhere(path: Path) -> str:
    return f"Choose another checkpointing.checkpoint_dir, or continue with the settings in {path / 'config.yaml'}."


def _is_local_file(name: str) -> bool:
    return Path(name).exists() or Path(name).suffix in (".jsonl", ".json") or name.startswith(("/", ".", "~"))


def _rows_problems(name: str, *, key: str, fields: tuple[str, str], needed: int, needed_by: str) -> list[str]:
    path = Path(name)
    rows, first = 0, None
    try:
        with open(path, encoding="utf-8") as stream:
            for line in stream:
                if line.strip():
                    first = line if first is None else first
                    rows += 1
    except FileNotFoundError:
        return [
            f"{key}: got {name!r}; must be a .jsonl file or a hub name, and there is no such file. Correct the path."
        ]
    except (OSError, UnicodeDecodeError) as err:
        return [f"{key}: {name} cannot be read ({err}). Give a .jsonl file in UTF-8."]
    if first is None:
        return [f"{key}: {name} is empty; must hold one JSON object per line. Give a file with rows."]
    row = None
    with contextlib.suppress(ValueError):
        row = json.loads(first)
    if not isinstance(row, dict):
        return [f"{key}: the first row of {name} is not a JSON object. Write one object per line."]
    missing = [field for field in fields if field not in row]
    if missing:
        return [
            f"{key}: the first row of {name} has no field {missing[0]!r} (it has {', '.join(sorted(row))}). Set "
            "data.input_key and data.output_key."
        ]
    if rows >= needed:
        return []
    return [_too_few(key, f"{name} with {rows} rows", needed=needed, needed_by=needed_by)]


def _too_few(key: str, got: str, *, needed: int, needed_by: str) -> str:
    return (
        f"{key}: got {got}; must give at least the {needed} prompts of one step ({needed_by}). Give more prompts, or "
        f"lower {needed_by}."
    )


def output_dirs(cfg: MasterConfig) -> dict[str, Path]:
    """List the directories that the run writes.

    Args:
        cfg: The configuration.

    Returns:
        Configuration key -> directory.
    """
    dirs = {"logger.log_dir": Path(cfg.logger.log_dir)}
    if cfg.checkpointing.enabled:
        dirs[_CHECKPOINT_KEY] = Path(cfg.checkpointing.checkpoint_dir)
    return dirs


def is_offline_run(cfg: MasterConfig) -> bool:
    """Tell whether every model and prompt of the run is local, so that nothing need be looked up on the hub.

    Args:
        cfg: The configuration.

    Returns:
        True when policy, tokenizer, draft and prompts are directories, files or generated.
    """
    models = [cfg.policy.model_name, cfg.policy.tokenizer.name]
    if cfg.policy.draft_enabled and cfg.policy.draft.model_name is not None:
        models.append(cfg.policy.draft.model_name)
    data = cfg.data
    paths = [path for path in (data.train_data_path, data.val_data_path) if path is not None]
    is_local_data = data.dataset_name == "reasoning_gym" or (
        data.dataset_name == "ResponseDataset" and all(_is_local_file(path) for path in paths)
    )
    return is_local_data and all(os.path.isdir(model) for model in models)
