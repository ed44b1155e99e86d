"""Checks of the files of a run: prompts, output directories, the checkpoint to continue from."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl.errors import CheckpointError, ConfigError
from nemo_rl.utils.checkpoint import CheckpointManager
from nemo_rl.utils.model_files import check_safetensors

if TYPE_CHECKING:
    from nemo_rl.algorithms.config import MasterConfig

DRAFT_META_FILE = "draft_meta.json"
DRAFT_FORMAT_VERSION = 1

_CHECKPOINT_KEY = "checkpointing.checkpoint_dir"


def prompt_problems(cfg: MasterConfig) -> list[str]:
    """Check the prompt templates and the local prompt files.

    Args:
        cfg: The configuration.

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
    needed = int(cfg.grpo.num_prompts_per_step * cfg.grpo.batch_multiplier)
    if data.reasoning_gym is not None and data.dataset_name == "reasoning_gym" and data.reasoning_gym.size < needed:
        found.append(_too_few("data.reasoning_gym.size", str(data.reasoning_gym.size), needed=needed))
    if data.dataset_name != "ResponseDataset":
        return found
    for key, name in (("train_data_path", data.train_data_path), ("val_data_path", data.val_data_path)):
        if name is not None and _is_local_file(name):
            fields = (data.input_key, data.output_key)
            found += _rows_problems(
                name, key=f"data.{key}", fields=fields, needed=needed if key.startswith("train") else 1
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


def check_checkpoint(
    cfg: MasterConfig, *, algorithm: str, draft_algo: str | None, draft_identity: dict[str, Any] | None
) -> None:
    """Check that the latest checkpoint, if there is one, can be continued with this configuration.

    Args:
        cfg: The configuration.
        algorithm: What the checkpoint must say it is.
        draft_algo: Algorithm of the run's draft; None = the run has no draft.
        draft_identity: What the draft in the checkpoint must agree with; None = the run has no draft.

    Raises:
        ConfigError: The checkpoint is of another algorithm, layout or draft, or one of its files is damaged.
    """
    directory = Path(cfg.checkpointing.checkpoint_dir)
    if not cfg.checkpointing.enabled or not any(directory.glob("*step_*")):
        return
    manager = CheckpointManager(cfg.checkpointing)
    path = manager.get_latest_checkpoint_path()
    if path is None:
        return
    try:
        manager.load_training_info(path, algorithm=algorithm)
    except (CheckpointError, KeyError) as err:
        raise ConfigError(
            f"{_CHECKPOINT_KEY}: {path} is not a checkpoint of this program ({err}). {_elsewhere(path)}"
        ) from err
    _check_draft_meta(path, draft_algo=draft_algo, draft_identity=draft_identity)
    for file in sorted(path.rglob("*.safetensors")):
        check_safetensors(file, key=_CHECKPOINT_KEY)


def _check_draft_meta(path: Path, *, draft_algo: str | None, draft_identity: dict[str, Any] | None) -> None:
    file = path / "draft" / DRAFT_META_FILE
    if (draft_identity is None) != (not file.is_file()):
        has, wants = ("no draft", "trains one") if draft_identity is not None else ("a draft", "has none")
        raise ConfigError(
            f"policy.draft.enabled: got {str(draft_identity is not None).lower()}; {path} holds {has}, this run "
            f"{wants}. {_elsewhere(path)}"
        )
    if draft_identity is None:
        return
    try:
        meta = dict(json.loads(file.read_text(encoding="utf-8")))
        version, algo, spec = meta["format_version"], meta["algo"], dict(meta["spec"])
    except (OSError, ValueError, TypeError, KeyError) as err:
        raise ConfigError(f"{_CHECKPOINT_KEY}: {file} cannot be read ({err!r}). {_elsewhere(path)}") from err
    if version != DRAFT_FORMAT_VERSION:
        raise ConfigError(
            f"{_CHECKPOINT_KEY}: {file} has layout {version!r}; must be {DRAFT_FORMAT_VERSION}. {_elsewhere(path)}"
        )
    if algo != draft_algo:
        raise ConfigError(
            f"policy.draft.algo: got {draft_algo!r}; {path} holds a draft of {algo!r}. {_elsewhere(path)}"
        )
    plain = json.loads(json.dumps(draft_identity))
    changed = sorted(name for name in plain.keys() & spec.keys() if plain[name] != spec[name])
    if changed:
        name = changed[0]
        raise ConfigError(
            f"policy.draft: the draft of {path} was built with {name} {spec[name]!r}; this run asks for "
            f"{plain[name]!r} (differs: {', '.join(changed)}). {_elsewhere(path)}"
        )


def _elsewhere(path: Path) -> str:
    return f"Choose another checkpointing.checkpoint_dir, or continue with the settings in {path / 'config.yaml'}."


def _is_local_file(name: str) -> bool:
    return Path(name).exists() or Path(name).suffix in (".jsonl", ".json") or name.startswith(("/", ".", "~"))


def _rows_problems(name: str, *, key: str, fields: tuple[str, str], needed: int) -> list[str]:
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
    return [_too_few(key, f"{name} with {rows} rows", needed=needed)] if rows < needed else []


def _too_few(key: str, got: str, *, needed: int) -> str:
    return (
        f"{key}: got {got}; must give at least the {needed} prompts of one step (grpo.num_prompts_per_step). "
        "Give more prompts, or lower grpo.num_prompts_per_step."
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
