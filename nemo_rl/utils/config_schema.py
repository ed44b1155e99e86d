"""The schema as data: which keys a section has, their defaults, and interpolation.

`complete` fills in what a file leaves out, `resolve` turns `${...}` into values. Only pydantic's field table is read,
so a new section or draft algorithm needs nothing here.
"""

from __future__ import annotations

import copy
import functools
import operator
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Union

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from nemo_rl.algorithms.config import MasterConfig
from nemo_rl.errors import ConfigError

DISCRIMINATOR = "algo"
"""Key that says which class a section of several possible ones is; always passed on, with its default if need be."""

_RESOLVERS: dict[str, Callable[..., Any]] = {
    "add": lambda *numbers: sum(numbers),
    "sub": operator.sub,
    "mul": lambda *numbers: functools.reduce(operator.mul, numbers),
    "div": operator.truediv,
    "floordiv": operator.floordiv,
    "max": lambda *numbers: max(numbers),
    "min": lambda *numbers: min(numbers),
}


def default_tree() -> dict[str, Any]:
    """Return the defaults of the whole schema, unresolved: what an empty file stands for.

    Returns:
        Nested dict; defaults that follow another key are interpolations, required keys are missing.
    """
    return complete(MasterConfig, {})


def complete(model: type[BaseModel], tree: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in the defaults of a section and of the sections inside it.

    Args:
        model: Schema of the section.
        tree: What is given. Unknown keys and values of a wrong type are kept for the validation to report.

    Returns:
        A new dict, keys of the schema first and in its order.
    """
    filled: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        key = field.alias or name
        value = tree[key] if key in tree else default_value(field)
        if value is PydanticUndefined:
            continue
        inner = section_class(field.annotation, value)
        filled[key] = (
            complete(inner, value) if inner is not None and isinstance(value, Mapping) else copy.deepcopy(value)
        )
    return filled | {key: copy.deepcopy(value) for key, value in tree.items() if key not in filled}


def register_resolvers() -> None:
    """Make the functions of interpolations (`${mul:a,b}`) known to OmegaConf."""
    for name, function in _RESOLVERS.items():
        OmegaConf.register_resolver(name, function, replace=True)


def resolve(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Resolve every interpolation; a key that it names may be given or be a default of the schema.

    Args:
        tree: Nested dict.

    Returns:
        Plain nested dict without interpolations: what was given, and the defaults that follow another key. Other
        defaults are left to the schema, so that a section can tell what was given (`model_fields_set`).

    Raises:
        ConfigError: An interpolation names a missing key, an unknown function, or itself.
    """
    filled = complete(MasterConfig, tree)
    if not _holds_interpolation(filled):
        return _without_defaults(MasterConfig, filled, given=tree)
    register_resolvers()
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(filled), resolve=True)
    except (OmegaConfBaseException, RecursionError, TypeError, ZeroDivisionError) as err:
        key = getattr(err, "full_key", None) or "configuration"
        detail = str(err).splitlines()[0] if str(err) else type(err).__name__
        raise ConfigError(
            f"{key}: cannot be resolved: {detail}. Name existing keys in ${{...}}; functions: {', '.join(_RESOLVERS)}."
        ) from err
    return _without_defaults(MasterConfig, typing.cast("dict[str, Any]", resolved), given=tree)


def _without_defaults(model: type[BaseModel], filled: dict[str, Any], *, given: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in filled.items():
        field = field_at(model, key, filled)
        inner = None if field is None else section_class(field.annotation, value)
        if isinstance(value, dict) and inner is not None:
            below = given.get(key)
            section = _without_defaults(inner, value, given=below if isinstance(below, Mapping) else {})
            if section or key in given:
                kept[key] = section
        elif key in given or key == DISCRIMINATOR or (field is not None and _is_interpolation(field.default)):
            kept[key] = value
    return kept


def _is_interpolation(value: object) -> bool:
    return isinstance(value, str) and "${" in value


def _holds_interpolation(node: object) -> bool:
    if isinstance(node, Mapping):
        return any(_holds_interpolation(item) for item in node.values())
    if isinstance(node, list):
        return any(_holds_interpolation(item) for item in node)
    return _is_interpolation(node)


def default_value(field: FieldInfo) -> Any:
    """Return the raw default of a field: interpolations as text, `{}` for a section, lists instead of tuples."""
    inner = section_class(field.annotation, {})
    if inner is not None and (field.is_required() or inner is field.default_factory):
        return {}
    if field.default_factory is None:
        return field.default
    value = field.get_default(call_default_factory=True, validated_data={})
    return list(value) if isinstance(value, tuple) else value


def section_class(annotation: Any, value: Any) -> type[BaseModel] | None:
    """Return the schema class of a field that holds a section; of several, the one that `algo` names."""
    classes = [part for part in _flatten(annotation) if isinstance(part, type) and issubclass(part, BaseModel)]
    if len(classes) <= 1 or not isinstance(value, Mapping):
        return classes[0] if classes else None
    for candidate in classes:
        if value.get(DISCRIMINATOR, classes[0].model_fields[DISCRIMINATOR].default) in discriminator_values(candidate):
            return candidate
    return None


def sibling_classes(annotation: Any) -> list[type[BaseModel]]:
    """List the classes of a field that may hold one of several sections; empty for any other field."""
    classes = [part for part in _flatten(annotation) if isinstance(part, type) and issubclass(part, BaseModel)]
    return classes if len(classes) > 1 else []


def discriminator_values(model: type[BaseModel]) -> tuple[str, ...]:
    """Return the values of `algo` that choose a class."""
    return typing.get_args(model.model_fields[DISCRIMINATOR].annotation)


def _flatten(annotation: Any) -> list[Any]:
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        return _flatten(typing.get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [leaf for part in typing.get_args(annotation) for leaf in _flatten(part)]
    return [annotation]


def section_at(schema: Any, node: Any) -> Any:
    """Return the section class of an annotation, given the value there; the annotation itself if it is no section."""
    return section_class(schema, node) or schema


def is_free_form(schema: Any) -> bool:
    """Tell whether an annotation is a block with keys of another library."""
    return schema is Any or any(typing.get_origin(part) is dict for part in _flatten(schema))


def key_names(schema: Any) -> list[str]:
    """List the keys of a section class; none for anything else."""
    if not (isinstance(schema, type) and issubclass(schema, BaseModel)):
        return []
    return [field.alias or name for name, field in schema.model_fields.items()]


def field_at(schema: Any, part: str, node: Any) -> FieldInfo | None:
    """Return the field behind a key of a section, given the section's value; None = there is no such field."""
    model = section_at(schema, node)
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        return None
    return next((field for name, field in model.model_fields.items() if (field.alias or name) == part), None)


def has_key(node: Any, part: str) -> bool:
    """Tell whether a mapping holds a key, or a list an index."""
    if isinstance(node, list):
        return part.isdigit() and int(part) < len(node)
    return isinstance(node, Mapping) and part in node


def child_type(schema: Any, part: str, node: Any) -> Any:
    """Return the annotation below a key; None = the schema has no such key."""
    field = field_at(schema, part, node)
    if field is not None:
        return field.annotation
    if is_free_form(schema):
        return Any if has_key(node, part) else None
    items = [kind for kind in _flatten(schema) if typing.get_origin(kind) in (tuple, list)]
    return typing.get_args(items[0])[0] if items and has_key(node, part) else None


def default_below(schema: Any, part: str, node: Any) -> Any:
    """Return a copy of a free-form block's or a list's default, from which an override inside it starts."""
    field = field_at(schema, part, node)
    value = None if field is None else default_value(field)
    return copy.deepcopy(value) if isinstance(value, (dict, list)) else None
