"""Command-line overrides of a configuration tree: ``key=value``, ``++key=value``, ``~key``."""

from __future__ import annotations

from typing import Any

import yaml

from nemo_rl.algorithms.config import MasterConfig
from nemo_rl.errors import ConfigError
from nemo_rl.utils.config_messages import unknown_key
from nemo_rl.utils.config_schema import child_type, default_below, has_key, is_free_form
from nemo_rl.utils.yaml_reader import parse_yaml


def apply_override(tree: dict[str, Any], text: str) -> None:
    """Apply one command-line override in place.

    Args:
        tree: The tree of the file, without defaults of the schema.
        text: ``key=value``, ``++key=value``, ``+key=value`` or ``~key``.

    Raises:
        ConfigError: The text is not an override, or its key cannot be set, added or deleted.
    """
    if text.startswith("~"):
        _delete(tree, text[1:].split("=", 1)[0])
        return
    key, equals, value = text.partition("=")
    adds = key.startswith("+")
    key = key.lstrip("+")
    if not equals or not key or key.startswith("-"):
        raise ConfigError(
            f"command line: got {text!r}; must be key=value, ++key=value or ~key. "
            "Write for example grpo.max_num_steps=10."
        )
    *parents, last = key.split(".")
    node: Any = tree
    schema: Any = MasterConfig
    for depth, part in enumerate([*parents, last]):
        inner = child_type(schema, part, node)
        if inner is None and adds and is_free_form(schema):
            inner = Any
        if not has_key(node, part) and inner is None:
            raise ConfigError(_unknown_override(key, depth=depth, schema=schema, node=node))
        if depth == len(parents):
            break
        node = _descend(node, part, default=default_below(schema, part, node))
        schema = inner
    if isinstance(node, list):
        node[int(last)] = _parse_value(key, value)
    elif isinstance(node, dict):
        node[last] = _parse_value(key, value)
    else:
        raise ConfigError(
            f"{key}: got a key below {'.'.join(parents)}, which holds {node!r}, not a mapping. Set that key."
        )


def _delete(tree: dict[str, Any], key: str) -> None:
    *parents, last = key.split(".")
    node: Any = tree
    schema: Any = MasterConfig
    for part in parents:
        schema, default = child_type(schema, part, node), default_below(schema, part, node)
        node = _descend(node, part, default=default) if has_key(node, part) or default is not None else None
    if node is None or not has_key(node, last):
        raise ConfigError(
            f"~{key}: got a key that is not set; nothing to delete. Check the spelling, or remove ~{key}."
        )
    if isinstance(node, list):
        node.pop(int(last))
    else:
        node.pop(last)


def _parse_value(key: str, text: str) -> Any:
    try:
        return parse_yaml(text)
    except yaml.YAMLError as err:
        raise ConfigError(f"{key}: got {text!r}; is not valid YAML. Quote the value: '{key}=\"...\"'.") from err


def _descend(node: Any, part: str, *, default: Any) -> Any:
    if isinstance(node, list):
        return node[int(part)]
    if not isinstance(node, dict):
        return node
    if node.get(part) is None:
        node[part] = {} if default is None else default
    return node[part]


def _unknown_override(key: str, *, depth: int, schema: Any, node: Any) -> str:
    parts = key.split(".")
    where = ".".join(parts[: depth + 1])
    if is_free_form(schema):
        return (
            f"{key}: got a new key in a free-form block; key=value only changes what is there. "
            f"Write ++{key}=... to add it."
        )
    problem = unknown_key(parts[depth], schema, node, prefix=".".join(parts[:depth]), where=" on the command line")
    return f"{where}: got {problem}"
