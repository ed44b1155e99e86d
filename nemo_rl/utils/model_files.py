"""Model directories on disk: found, their config.json read, their weight files checked. Torch-free."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from nemo_rl.errors import CheckpointError, ConfigError
from nemo_rl.utils.safe_files import open_regular, read_json_object, shown

MODEL_FILE_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
"""Files of a hub repository that a run needs."""

PICKLE_PATTERNS = ["*.bin"]
"""Further ones, for a draft whose weights may be a pickle."""

_INDEX_FILE = "model.safetensors.index.json"
_MAX_JSON_BYTES = 64 << 20


def find_model_dir(name: str, *, key: str, allows_pickle: bool = False) -> Path:
    """Find the directory of a model; a hub name is looked up in the local cache, or downloaded when the hub is allowed.

    Args:
        name: Directory or hub name (``organisation/model``).
        key: The configuration key that holds the name, for the message.
        allows_pickle: Also download weights that are a pickle.

    Returns:
        The directory.

    Raises:
        ConfigError: There is no such directory and the hub does not have it or cannot be reached.
    """
    directory = _named_directory(name, key=key)
    return _hub_snapshot(name, key=key, allows_pickle=allows_pickle) if directory is None else directory


def find_local_model_dir(name: str, *, key: str) -> Path | None:
    """Find the directory of a model without asking the hub.

    Args:
        name: Directory or hub name (``organisation/model``).
        key: The configuration key that holds the name, for the message.

    Returns:
        The directory; None for a hub name that is not in the local cache.

    Raises:
        ConfigError: The name is neither a directory nor a hub name.
    """
    directory = _named_directory(name, key=key)
    if directory is not None:
        return directory
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    except HFValidationError:
        return _hub_snapshot(name, key=key, allows_pickle=False)  # says what is wrong with the name


def _named_directory(name: str, *, key: str) -> Path | None:
    """The directory that a name is; None for a hub name."""
    path = Path(name)
    if path.is_dir():
        return path
    if path.exists():
        raise ConfigError(f"{key}: got {name!r}; must be a directory, it is a file. Give the directory that holds it.")
    if not _is_hub_name(name):
        raise ConfigError(
            f"{key}: got {name!r}; must be an existing directory or a hub name (organisation/model), and there is no "
            "such directory. Correct the path, or make the model first (the CPU recipes: tools/make_tiny_policy.py)."
        )
    return None


def has_weights(directory: Path) -> bool:
    """Whether a model directory holds weight files, complete or not.

    Args:
        directory: The model directory.
    """
    return (directory / _INDEX_FILE).is_file() or any(directory.glob("*.safetensors")) or bool(_pickles_in(directory))


def read_model_config(directory: Path, *, key: str) -> dict[str, Any]:
    """Read a model's config.json.

    Args:
        directory: The model directory.
        key: The configuration key that names the directory.

    Returns:
        The content.

    Raises:
        ConfigError: The file is missing or is not a JSON object.
    """
    path = directory / "config.json"
    if not os.path.lexists(path):
        raise ConfigError(
            f"{key}: got {str(directory)!r}; must hold a config.json, and it holds none. Name a model directory."
        )
    try:
        # Not strict: some policies have infinities in theirs.
        return read_json_object(path, max_bytes=_MAX_JSON_BYTES, is_strict=False)
    except CheckpointError as err:
        raise ConfigError(f"{key}: {err} Copy the model again, or name another directory.") from err


def check_weights(directory: Path, *, key: str) -> None:
    """Check that a model directory holds complete weight files, without reading the weights.

    Args:
        directory: The model directory.
        key: The configuration key that names the directory.

    Raises:
        ConfigError: There are no weights, a shard is missing, or a file is truncated or corrupted; names the file.
    """
    files = sorted(directory.glob("*.safetensors"))
    index = directory / _INDEX_FILE
    if index.is_file():
        present = {file.name for file in files}
        missing = sorted(_shards_of(index, key=key) - present)
        if missing:
            raise ConfigError(
                f"{key}: {index} names {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} missing. "
                "Copy the model again, completely."
            )
    elif not files:
        pickles = _pickles_in(directory)
        found = f"only {pickles[0].name}" if pickles else "none"
        raise ConfigError(
            f"{key}: got {str(directory)!r}; must hold *.safetensors weights, found {found}. Name another "
            "directory, or convert the weights."
        )
    for file in files:
        check_safetensors(file, key=key)


def check_safetensors(file: Path, *, key: str) -> None:
    """Check the header of a safetensors file against its size.

    Args:
        file: The file.
        key: The configuration key that leads to it.

    Raises:
        ConfigError: The file is truncated, too long, or not a safetensors file.
    """
    from safetensors import SafetensorError, safe_open  # brings numpy; a run with bad settings need not wait for it

    try:
        open_regular(file).close()  # a pipe would keep the next line waiting
        with safe_open(file, framework="numpy"):
            pass
    except (SafetensorError, OSError) as err:
        size = file.stat().st_size if file.is_file() else 0
        hint = " (a Git LFS pointer, not the file itself)" if _is_lfs_pointer(file) else ""
        reason = err.strerror if isinstance(err, OSError) and err.strerror else err
        raise ConfigError(
            f"{key}: {file} is not a complete safetensors file: {reason}; it has {size} bytes{hint}. Copy it again."
        ) from err


def max_positions(config: dict[str, Any]) -> int | None:
    """Return the longest sequence that a model's config.json allows.

    Args:
        config: Content of config.json.

    Returns:
        Tokens, stretched by the RoPE scaling where the scaling stretches them; None when the model states no limit.
    """
    text = config.get("text_config", config)
    limit = text.get("max_position_embeddings")
    if limit is None:
        return None
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    kind, factor = rope.get("rope_type", rope.get("type", "default")), rope.get("factor")
    if factor is None or kind not in ("linear", "dynamic", "yarn"):
        return int(limit)
    if kind == "yarn":
        limit = rope.get("original_max_position_embeddings", limit)
    return int(limit * factor)


def _is_hub_name(name: str) -> bool:
    parts = name.split("/")
    return len(parts) == 2 and all(parts) and parts[0] not in (".", "..", "~") and not name.startswith(("/", "~"))


def _hub_snapshot(name: str, *, key: str, allows_pickle: bool) -> Path:
    from huggingface_hub import snapshot_download  # half a second that a local model does not pay
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    try:
        patterns = MODEL_FILE_PATTERNS + (PICKLE_PATTERNS if allows_pickle else [])
        return Path(snapshot_download(name, allow_patterns=patterns, local_files_only=offline))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as err:
        cause = str(err).splitlines()[0] if str(err) else type(err).__name__
        reason = "and the hub is switched off (HF_HUB_OFFLINE)" if offline else f"and the hub did not give it ({cause})"
        raise ConfigError(
            f"{key}: got {name!r}; is no directory here, is not in the local hub cache, {reason}. Give the path of a "
            "model directory, or download the model where the hub can be reached."
        ) from err


def _shards_of(index: Path, *, key: str) -> set[str]:
    try:
        table = read_json_object(index, max_bytes=_MAX_JSON_BYTES, is_strict=False).get("weight_map")
    except CheckpointError as err:
        raise ConfigError(f"{key}: {err} Copy the model again.") from err
    if not isinstance(table, dict) or not all(isinstance(shard, str) for shard in table.values()):
        raise ConfigError(
            f"{key}: {index} is not a weight index; must have a weight_map of tensor to file. Copy the model again."
        )
    shards = set(table.values())
    outside = sorted(shard for shard in shards if Path(shard).name != shard)
    if outside:
        raise ConfigError(
            f"{key}: {index} names {shown(outside[0])}; must be a file name without a path. Copy the model again."
        )
    return shards


def _pickles_in(directory: Path) -> list[Path]:
    return sorted([*directory.glob("*.bin"), *directory.glob("*.pt")])


def _is_lfs_pointer(file: Path) -> bool:
    try:
        with open_regular(file) as stream:
            return stream.read(24) == b"version https://git-lfs."
    except OSError:
        return False
