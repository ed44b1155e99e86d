"""What a tokenizer's ids mean, as one digest: ties recorded and counted tokens to their tokenizer. No torch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from nemo_rl.errors import CheckpointError, ConfigError
from nemo_rl.utils.safe_files import read_json_object

__all__ = ["tokenizer_fingerprint"]

_MAX_BYTES = 256 << 20


def tokenizer_fingerprint(directory: Path) -> str | None:
    """A digest of which id stands for which text. Another merge order or file layout does not change it.

    Args:
        directory: of the tokenizer.

    Returns:
        None when there is no file that can be read here.

    Raises:
        ConfigError: a file is damaged.
    """
    pairs = _token_texts(directory)
    if pairs is not None:
        content = json.dumps(sorted(set(pairs)), ensure_ascii=True).encode()
        return hashlib.sha256(content).hexdigest()[:32]
    for path in (directory / "tokenizer.model", *sorted(directory.glob("*.tiktoken"))):
        if path.is_file():
            return hashlib.sha256(path.read_bytes()).hexdigest()[:32]
    return None


def _token_texts(directory: Path) -> list[tuple[int, str]] | None:
    """(id, text) of every token, added ones included; None without a JSON file of them."""
    try:
        if (directory / "tokenizer.json").is_file():
            raw = _read_tokenizer(directory / "tokenizer.json")
            table: Any = (raw.get("model") or {}).get("vocab")
            added = [(entry["id"], entry["content"]) for entry in raw.get("added_tokens") or []]
        elif (directory / "vocab.json").is_file():
            table, extra = _read_tokenizer(directory / "vocab.json"), directory / "added_tokens.json"
            added = [(number, text) for text, number in (_read_tokenizer(extra) if extra.is_file() else {}).items()]
        else:
            return None
        if isinstance(table, list):
            # A unigram model: [text, score] in the order of the ids.
            own = [(number, entry[0]) for number, entry in enumerate(table)]
        else:
            own = [(number, text) for text, number in (table or {}).items()]
        return [(int(number), str(text)) for number, text in own + added]
    except (CheckpointError, AttributeError, KeyError, IndexError, TypeError, ValueError) as err:
        raise ConfigError(
            f"policy.tokenizer.name: {directory} has a damaged tokenizer ({err}). Copy the tokenizer again."
        ) from err


def _read_tokenizer(path: Path) -> dict[str, Any]:
    return read_json_object(path, max_bytes=_MAX_BYTES, is_strict=False)
