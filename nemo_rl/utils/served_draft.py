"""A draft directory that no trainer has exported, as the engine must see it: the same files, with enough positions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["directory_with_positions"]

_KEY = "max_position_embeddings"
_LAYERS = "transformer_layer_config"
"""Where the speculators layout keeps the sizes of the draft's layers."""


def directory_with_positions(source: Path, positions: int, *, target: Path) -> Path:
    """Find, or make of links, a draft directory whose RoPE table covers some number of positions.

    A published draft may name fewer positions than it has: the length it was trained at. An engine clamps to that, or
    reads behind the table. Weights are not copied.

    Args:
        source: The draft.
        positions: What its table must cover; the caller knows that its kind of table can be as long.
        target: Where to make the directory of links.

    Returns:
        `source` itself when that covers them.
    """
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    raised = _raised(config, positions)
    if raised == config:
        return source
    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        link = target / path.name
        link.unlink(missing_ok=True)
        if path.name != "config.json":
            link.symlink_to(path.resolve())
    (target / "config.json").write_text(json.dumps(raised, indent=2) + "\n", encoding="utf-8")
    return target


def _raised(config: dict[str, Any], positions: int) -> dict[str, Any]:
    raised = dict(config)
    if isinstance(config.get(_LAYERS), dict):
        raised[_LAYERS] = _raised(config[_LAYERS], positions)
    if isinstance(config.get(_KEY), int) and config[_KEY] < positions:
        raised[_KEY] = positions
    return raised
