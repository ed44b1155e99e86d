"""Turns pydantic's validation errors into our messages: key, got, allowed, remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from nemo_rl.algorithms.config import MasterConfig
from nemo_rl.utils.config_schema import (
    DISCRIMINATOR,
    child_type,
    complete,
    discriminator_values,
    field_at,
    key_names,
    section_at,
    sibling_classes,
)
from nemo_rl.utils.schema import ConfigConflicts, ConfigModel

_STRUCTURAL_ERRORS = {"extra_forbidden", "missing", "model_type", "model_attributes_type"}


def join_problems(problems: list[str]) -> str:
    """Write one message for one or several problems."""
    if len(problems) == 1:
        return problems[0]
    return "\n".join([f"{len(problems)} problems in the configuration:", *(f"  - {problem}" for problem in problems)])


def structural_problems(tree: Mapping[str, Any]) -> list[str]:
    """Find unknown, missing and misplaced keys of a tree whose interpolations cannot be resolved.

    Args:
        tree: Nested dict.

    Returns:
        One message per problem; empty = the interpolations themselves are at fault.
    """
    unresolved = complete(MasterConfig, tree)
    try:
        MasterConfig.model_validate(unresolved)
    except ValidationError as err:
        details = err.errors(include_url=False)
        return explain([item for item in details if item["type"] in _STRUCTURAL_ERRORS], unresolved)
    return []


def explain(details: Iterable[ErrorDetails], tree: Mapping[str, Any]) -> list[str]:
    """Write one message per validation error.

    Args:
        details: pydantic's errors.
        tree: The tree that was validated.

    Returns:
        Messages without repetition, in pydantic's order.
    """
    problems: list[str] = []
    for detail in details:
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, ConfigConflicts):
            problems.extend(cause.conflicts)
        else:
            problems.append(_explain_one(detail, tree))
    return list(dict.fromkeys(problems))


def _explain_one(detail: ErrorDetails, tree: Mapping[str, Any]) -> str:
    path = _yaml_path(detail["loc"], tree)
    key = ".".join(path) or "configuration"
    got, kind = detail["input"], detail["type"]
    if kind == "extra_forbidden":
        schema, node = _schema_at(path[:-1], tree)
        return f"{key}: got {unknown_key(path[-1], schema, node, prefix='.'.join(path[:-1]))}"
    if kind == "missing":
        return f"{key}: got nothing; is required. Set it in the file or on the command line: {key}=..."
    if kind == "union_tag_invalid":
        path = [*path, DISCRIMINATOR]
        key, got = ".".join(path), got[DISCRIMINATOR]
    allowed = _allowed(detail)
    return f"{key}: got {_shorten(got)}; {allowed}. {_remedy(detail, path)}"


def _yaml_path(loc: tuple[int | str, ...], tree: Any) -> list[str]:
    """Drop the parts of pydantic's location that name a member of a union instead of a key."""
    path: list[str] = []
    node = tree
    for position, part in enumerate(loc):
        is_last = position == len(loc) - 1
        if isinstance(node, Mapping) and (part in node or is_last):
            node = node.get(part)
        elif isinstance(node, list) and isinstance(part, int):
            node = node[part] if part < len(node) else None
        else:
            continue
        path.append(str(part))
    return path


def _schema_at(path: list[str], tree: Any) -> tuple[Any, Any]:
    """Return the annotation and the value at a path."""
    schema: Any = MasterConfig
    node = tree
    for part in path:
        schema = child_type(schema, part, node)
        node = node[int(part)] if isinstance(node, list) else node[part]
    return schema, node


def unknown_key(name: str, schema: Any, node: Any, *, prefix: str, where: str = "") -> str:
    """Say what is wrong with a key that its section does not have, and what to do.

    Args:
        name: The last part of the key.
        schema: Annotation of the section.
        node: The section's value.
        prefix: The key above; empty at the top.
        where: Said behind "unknown key", e.g. `" on the command line"`.

    Returns:
        The message from "got" on, without that word.
    """
    section = section_at(schema, node)
    is_section = isinstance(section, type) and issubclass(section, ConfigModel)
    reason = section.reason_to_refuse(name) if is_section else None
    if reason is not None:
        return f"an option that does not exist here; must be absent: {reason} Remove the key."
    owners = [cls for cls in sibling_classes(schema) if name in key_names(cls)]
    if owners:
        chosen = node.get(DISCRIMINATOR, discriminator_values(sibling_classes(schema)[0])[0])
        names = " or ".join(repr(value) for cls in owners for value in discriminator_values(cls))
        return (
            f"an option of another {DISCRIMINATOR}; {prefix}.{DISCRIMINATOR} is {chosen!r}, and {name} belongs to "
            f"{names}. Remove the key, or set {prefix}.{DISCRIMINATOR} to one that has it."
        )
    return f"an unknown key{where}; {nearest_name(name, key_names(section), prefix=prefix)}"


def nearest_name(name: str, names: list[str], *, prefix: str) -> str:
    """Say which valid name a misspelt key is nearest to, or which names are valid.

    Args:
        name: The last part of the unknown key.
        names: Valid keys beside it.
        prefix: The key above it; empty at the top.

    Returns:
        The "allowed" and "remedy" parts of a message.
    """
    dot = f"{prefix}." if prefix else ""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"the nearest valid name is {dot}{close[0]}. Correct the spelling, or remove the key."
    return f"valid names here: {', '.join(sorted(names)) or 'none'}. Correct the spelling, or remove the key."


def _allowed(detail: ErrorDetails) -> str:
    kind, ctx = detail["type"], detail.get("ctx", {})
    fixed = {
        "int_type": "must be an integer",
        "int_from_float": "must be an integer",
        "float_type": "must be a number",
        "bool_type": "must be true or false",
        "string_type": "must be a string",
        "dict_type": "must be a mapping",
        "model_type": "must be a mapping",
        "model_attributes_type": "must be a mapping",
        "tuple_type": "must be a list",
        "string_too_short": "must not be empty",
        "too_short": "must not be empty",
        "finite_number": "must be a finite number",
    }
    bounds = {"greater_than": ">", "greater_than_equal": ">=", "less_than": "<", "less_than_equal": "<="}
    limits = {"greater_than": "gt", "greater_than_equal": "ge", "less_than": "lt", "less_than_equal": "le"}
    if kind in fixed:
        return fixed[kind]
    if kind in bounds:
        return f"must be {bounds[kind]} {ctx[limits[kind]]}"
    if kind in ("literal_error", "union_tag_invalid"):
        return f"must be one of {ctx.get('expected', ctx.get('expected_tags'))}"
    if kind == "string_pattern_mismatch":
        return f"must match {ctx['pattern']}"
    return str(ctx["error"]) if "error" in ctx else detail["msg"]


def _remedy(detail: ErrorDetails, path: list[str]) -> str:
    field_key = path[-1] if path else "value"
    description = None
    schema: Any = MasterConfig
    for part in path:
        field = field_at(schema, part, {})
        if field is None:
            break
        schema, description = field.annotation, field.description
    if description:
        return f"{field_key} is: {' '.join(description.split())}"
    return f"Correct {field_key}."


def _shorten(value: Any) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
