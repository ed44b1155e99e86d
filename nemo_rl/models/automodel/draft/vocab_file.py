"""The file that says which ids a new draft of a reduced vocabulary proposes; tools/draft_vocab.py writes it.

    format, version         what the file is
    vocab_size, tokenizer   what its ids are ids of: number of target ids, fingerprint of the tokenizer
    draft_vocab_size, ids   the vocabulary, ascending
    always                  ids that were kept whatever their count
    counted_tokens, coverage, coverage_by_size, source
                            where the choice comes from, for a person

It is read on the driver, so nothing here needs torch. A file made for another policy or size is refused, never adapted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_rl.data.tokenizer_identity import tokenizer_fingerprint
from nemo_rl.errors import CheckpointError, ConfigError
from nemo_rl.models.automodel.draft.config import DraftConfigBase
from nemo_rl.models.automodel.draft.vocab import VocabMap, VocabMapError
from nemo_rl.utils.safe_files import read_json_object

__all__ = [
    "FORMAT",
    "MAX_BYTES",
    "VocabFile",
    "check_owner",
    "chosen_vocab",
    "read_vocab_file",
    "stop_ids",
    "write_vocab_file",
]

FORMAT = "nemo_rl_draft_vocab"
VERSION = 1
KEY = "policy.draft.vocab_file"
MAX_BYTES = 64 << 20
"""Largest vocabulary file: far more than a list of all ids needs."""
REMEDY = "Make the file again with tools/draft_vocab.py build."


@dataclass(frozen=True)
class VocabFile:
    """Content of a vocabulary file.

    Attributes:
        vocab: the ids.
        tokenizer: fingerprint of the tokenizer that the counts were made with.
        always: ids that were kept whatever their count.
        counted_tokens: tokens that the choice rests on.
        coverage: share of them that the ids hold.
        coverage_by_size: the same for other sizes.
        source: what was counted.
    """

    vocab: VocabMap
    tokenizer: str
    always: tuple[int, ...] = ()
    counted_tokens: int = 0
    coverage: float = 0.0
    coverage_by_size: Mapping[int, float] = field(default_factory=dict)
    source: str = ""


def write_vocab_file(path: Path, content: VocabFile) -> None:
    """Write a vocabulary file; it appears complete or not at all.

    Args:
        path: of the file; its directory is created.
        content: what to write.

    Raises:
        ConfigError: the file cannot be written.
    """
    value = {
        "format": FORMAT,
        "version": VERSION,
        "vocab_size": content.vocab.vocab_size,
        "tokenizer": content.tokenizer,
        "draft_vocab_size": len(content.vocab.ids),
        "ids": list(content.vocab.ids),
        "always": list(content.always),
        "counted_tokens": content.counted_tokens,
        "coverage": content.coverage,
        "coverage_by_size": {str(size): share for size, share in content.coverage_by_size.items()},
        "source": content.source,
    }
    # One entry per line, so that a list of thousands of ids is one line.
    text = ",\n".join(f"  {json.dumps(key)}: {json.dumps(entry)}" for key, entry in value.items())
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("w", encoding="utf-8") as file:
            file.write(f"{{\n{text}\n}}\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as err:
        raise ConfigError(f"{path}: the vocabulary could not be written ({err.strerror}). Name another file.") from err


def read_vocab_file(path: Path, *, key: str = KEY) -> VocabFile:
    """Read and check a vocabulary file.

    Args:
        path: of the file.
        key: what names it, for messages.

    Raises:
        ConfigError: it is missing, damaged, of another format, or describes no vocabulary.
    """
    if not path.is_file():
        raise ConfigError(f"{key}: got {path}; there is no such file. Make it with tools/draft_vocab.py build.")
    try:
        raw = read_json_object(path, max_bytes=MAX_BYTES)
    except CheckpointError as err:
        raise ConfigError(f"{key}: {err}") from err
    if raw.get("format") != FORMAT:
        raise ConfigError(f"{key}: {path} has format {raw.get('format')!r}; must be {FORMAT!r}. {REMEDY}")
    if raw.get("version") != VERSION:
        raise ConfigError(f"{key}: {path} has version {raw.get('version')!r}; this program reads {VERSION}. {REMEDY}")
    vocab_size, size, counted = (
        _integer(raw, name, path, key) for name in ("vocab_size", "draft_vocab_size", "counted_tokens")
    )
    ids, always = (_integers(raw, name, path, key) for name in ("ids", "always"))
    if len(ids) != size:
        raise ConfigError(f"{key}: {path} has draft_vocab_size {size} and {len(ids)} ids. {REMEDY}")
    try:
        vocab = VocabMap(ids, vocab_size)
    except VocabMapError as err:
        raise ConfigError(f"{key}: {path}: {err}. {REMEDY}") from err
    if not vocab.is_ascending:
        raise ConfigError(f"{key}: {path} has ids that are not ascending. {REMEDY}")
    missing = sorted(set(always) - set(ids))
    if missing:
        raise ConfigError(f"{key}: {path} says that ids {missing[:5]} are always kept, and lacks them. {REMEDY}")
    tokenizer = raw.get("tokenizer")
    if not isinstance(tokenizer, str):
        raise ConfigError(f"{key}: {path} has tokenizer {tokenizer!r}; must be a fingerprint. {REMEDY}")
    shares = raw.get("coverage_by_size")
    if not isinstance(shares, dict) or not all(size.isdecimal() for size in shares):
        raise ConfigError(f"{key}: {path} has no coverage_by_size of integers. {REMEDY}")
    return VocabFile(
        vocab=vocab,
        tokenizer=tokenizer,
        always=always,
        counted_tokens=counted,
        coverage=_share(raw.get("coverage"), path, key),
        coverage_by_size={int(size): _share(share, path, key) for size, share in shares.items()},
        source=str(raw.get("source", "")),
    )


def chosen_vocab(cfg: DraftConfigBase, *, vocab_size: int, tokenizer_dir: Path | None) -> VocabMap:
    """The ids that `policy.draft.vocab_file` chooses for a new draft of this policy.

    Args:
        cfg: `policy.draft`, which names such a file.
        vocab_size: of the policy.
        tokenizer_dir: of the policy's tokenizer; None = it is not compared.

    Raises:
        ConfigError: the file cannot be used, or was made for another policy, tokenizer or size.
    """
    assert cfg.vocab_file is not None, "called for a configuration that names a file"
    if cfg.model_name is not None:
        raise ConfigError(
            f"{KEY}: got {cfg.vocab_file!r} beside policy.draft.model_name {cfg.model_name!r}; a loaded draft has its "
            "own vocabulary. Remove the key; tools/draft_convert.py --vocab reduces the draft of a directory."
        )
    file = read_vocab_file(Path(cfg.vocab_file).expanduser())
    check_owner(file, vocab_size=vocab_size, tokenizer_dir=tokenizer_dir, key=KEY)
    size = len(file.vocab.ids)
    if cfg.draft_vocab_size not in (None, size):
        raise ConfigError(
            f"policy.draft.draft_vocab_size: got {cfg.draft_vocab_size}; policy.draft.vocab_file has {size} ids. Set "
            f"it to null, or make the file again with that size."
        )
    return file.vocab


def check_owner(file: VocabFile, *, vocab_size: int, tokenizer_dir: Path | None, key: str) -> None:
    """Refuse a file that speaks of other ids.

    Args:
        file: its content.
        vocab_size: of the policy.
        tokenizer_dir: of the policy's tokenizer; None = it is not compared.
        key: what names the file, for messages.

    Raises:
        ConfigError: another size of vocabulary, or another tokenizer; with both values.
    """
    if file.vocab.vocab_size != vocab_size:
        raise ConfigError(
            f"{key}: was made for {file.vocab.vocab_size} target ids; the policy has {vocab_size}. {REMEDY}"
        )
    if tokenizer_dir is None:
        return
    fingerprint = tokenizer_fingerprint(tokenizer_dir)
    if fingerprint != file.tokenizer:
        raise ConfigError(
            f"{key}: was made with tokenizer {file.tokenizer}; that of {tokenizer_dir} is {fingerprint}, so the ids "
            f"are other tokens. {REMEDY}"
        )


# -- the policy's tokenizer ------------------------------------------------------------------------------------------


def stop_ids(directory: Path) -> set[int]:
    """End-of-sequence ids that config.json and generation_config.json of a policy name.

    Args:
        directory: of the policy.
    """
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        if not (directory / name).is_file():
            continue
        raw = read_json_object(directory / name, is_strict=False)
        inner = raw.get("text_config")
        for source in (raw, inner if isinstance(inner, dict) else {}):
            ids = source.get("eos_token_id")
            found.update(i for i in (ids if isinstance(ids, list) else [ids]) if isinstance(i, int))
    return found


# -- reading ---------------------------------------------------------------------------------------------------------


def _integer(raw: Mapping[str, Any], name: str, path: Path, key: str) -> int:
    value = raw.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{key}: {path} has {name} {value!r}; must be an integer from 0 on. {REMEDY}")
    return value


def _integers(raw: Mapping[str, Any], name: str, path: Path, key: str) -> tuple[int, ...]:
    value = raw.get(name)
    if not isinstance(value, Sequence) or any(isinstance(i, bool) or not isinstance(i, int) for i in value):
        raise ConfigError(f"{key}: {path} has no list of integers under {name}. {REMEDY}")
    return tuple(value)


def _share(value: Any, path: Path, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value <= 1.0:
        raise ConfigError(f"{key}: {path} has a coverage of {value!r}; must be from 0 to 1. {REMEDY}")
    return float(value)
