"""Applies the rules of a project to a configuration of it; the result inherits one of our exemplars."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel

from nemo_rl.algorithms.config import MasterConfig
from nemo_rl.errors import ConfigError
from nemo_rl.utils.config import REPLACE_MARKER, build_master_config, load_tree, merge, read_yaml
from nemo_rl.utils.config_schema import (
    complete,
    is_free_form,
    register_resolvers,
    section_class,
    sibling_classes,
)
from nemo_rl.utils.yaml_reader import parse_yaml
from tools.migration.rules import Ask, Drop, Entry, Key, Nothing, Project, Put, Rule, Source, leaves, nested

CONFIGS = Path(__file__).resolve().parents[2] / "examples" / "configs"
EXEMPLAR, DAPO_EXEMPLAR = "grpo_math_1B.yaml", "dapo_math_1B.yaml"
RECIPE_TO_CONFIGS = "../../"
"""From examples/configs/recipes/llm/, where recipes belong, to the exemplars."""

OPTIMIZER = ("policy", "optimizer")

_UNRESOLVABLE = (OmegaConfBaseException, RecursionError, TypeError, ZeroDivisionError, ValueError)

Kind = Literal["left out", "changed", "to decide", "unknown", "nothing"]


@dataclass(frozen=True)
class Remark:
    """What is said of a key of theirs.

    Attributes:
        kind: what became of it; "nothing" = leaving it out loses nothing.
        key: their key, or a pattern of several that a rule treats alike.
        value: its value as text; of several keys their number.
        text: why, or what to decide.
    """

    kind: Kind
    key: str
    value: str
    text: str


@dataclass
class Migration:
    """The result.

    Attributes:
        exemplar: file name of the exemplar that the recipe inherits.
        recipe: what differs from it.
        remarks: in the order of their file.
        rules: rules that decided about a key.
    """

    exemplar: str
    recipe: dict[str, Any] = field(default_factory=dict)
    remarks: list[Remark] = field(default_factory=list)
    rules: list[Rule] = field(default_factory=list)

    def of(self, kind: Kind) -> list[Remark]:
        """Return the remarks of one kind."""
        return [remark for remark in self.remarks if remark.kind == kind]

    def text(self) -> str:
        """The recipe as YAML."""
        tree = {"defaults": f"{RECIPE_TO_CONFIGS}{self.exemplar}", **self.recipe}
        return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=120)

    def check(self) -> None:
        """Validate the recipe with the schema.

        Raises:
            ConfigError: One message that lists every problem.
        """
        build_master_config(merge(load_tree(CONFIGS / self.exemplar), self.recipe))


def migrate(project: Project, path: Path, overrides: Iterable[str] = ()) -> Migration:
    """Turn a configuration of another project into a recipe of ours.

    Args:
        project: the other project.
        path: its YAML file; parents that it names are read, too.
        overrides: `key=value`, `+key=value`, `++key=value`, `~key` in that project's keys.

    Returns:
        The recipe, not yet validated, and what there is to say about it.

    Raises:
        ConfigError: a file cannot be read, or an override cannot be applied.
    """
    tree, groups = _read_hydra(path, chain=()) if project.has_defaults_of_hydra else (load_tree(path), [])
    for text in overrides:
        _override(tree, text)
    source = read_source(tree)
    result = Migration(exemplar="")
    values, raw = _apply(project, source, result)
    result.exemplar = DAPO_EXEMPLAR if values.get(("grpo", "use_dynamic_sampling")) is True else EXEMPLAR
    base = load_tree(CONFIGS / result.exemplar)
    result.recipe = _differences(base, values, raw)
    result.remarks += [
        Remark("to decide", "defaults", group, "is not beside the file: give the composed configuration (--cfg job)")
        for group in groups
    ]
    result.remarks += _silent_values(project, source, values, base, result)
    return result


def read_source(tree: Mapping[str, Any]) -> Source:
    """Flatten a tree of theirs and resolve its interpolations one by one, so that one that fails spoils no other.

    Args:
        tree: their configuration.

    Returns:
        The leaves.
    """
    register_resolvers()
    root = OmegaConf.create(dict(tree))
    values: dict[Key, Any] = {}
    raw: dict[Key, str] = {}
    unresolved: dict[Key, str] = {}
    for key, written in leaves(tree):
        value = written
        if _mentions(written, "${") or written == "???":
            try:
                value = _resolved(root, key)
            except _UNRESOLVABLE as err:
                unresolved[key] = str(err).splitlines()[0] if str(err) else type(err).__name__
                continue
        if isinstance(written, str) and "${" in written:
            raw[key] = written
        # An interpolation can name a whole section.
        values |= dict(leaves(value, key)) if isinstance(value, Mapping) and value else {key: value}
    return Source(values=values, raw=raw, unresolved=unresolved)


@functools.cache
def schema_keys() -> tuple[frozenset[str], tuple[str, ...]]:
    """List the keys of the schema.

    Returns:
        Dotted keys, those of every draft algorithm included; prefixes (with a dot) of blocks whose keys are free.
    """
    keys: set[str] = set()
    free: list[str] = []

    def walk(model: type[BaseModel], prefix: str) -> None:
        for name, info in model.model_fields.items():
            key = f"{prefix}{info.alias or name}"
            keys.add(key)
            if is_free_form(info.annotation):
                free.append(f"{key}.")
            for inner in sibling_classes(info.annotation) or [section_class(info.annotation, {})]:
                if inner is not None:
                    walk(inner, f"{key}.")

    walk(MasterConfig, "")
    return frozenset(keys), tuple(free)


def exists(key: str) -> bool:
    """Tell whether the schema has a dotted key, or lets any key stand in that place."""
    keys, free = schema_keys()
    return key in keys or key.startswith(free)


def _apply(project: Project, source: Source, result: Migration) -> tuple[dict[Key, Any], dict[Key, str]]:
    """Ask the rules about every key.

    Returns:
        Our keys with their values, and how their file writes those that keep their name and are interpolations.
    """
    values: dict[Key, Any] = {}
    raw: dict[Key, str] = {}
    grouped: dict[tuple[int, str, Kind], list[tuple[str, Any, str]]] = {}
    known, rules = schema_keys(), project.rules
    for key, value in source.values.items():
        entry = Entry(".".join(map(str, key)), value, source)
        number, pattern = _deciding_rule(rules, entry.key, known)
        if number is None:
            grouped[-1, entry.key, "unknown"] = [(entry.key, value, "no rule knows it: left out")]
            continue
        rule = rules[number]
        result.rules.append(rule)
        outcome = rule.outcome(entry)
        if isinstance(outcome, Put):
            for ours, item in outcome.values.items():
                path = key if ours == entry.key else tuple(ours.split("."))
                values[path] = item
                if path == key and key in source.raw:
                    raw[path] = source.raw[key]
        said = _said(outcome)
        if said is not None:
            grouped.setdefault((number, pattern, said[0]), []).append((entry.key, value, said[1]))
    result.remarks += [_remark(kind, pattern, found) for (_, pattern, kind), found in grouped.items()]
    for parts, why in source.unresolved.items():
        key = ".".join(map(str, parts))
        number, _ = _deciding_rule(rules, key, known)
        if number is None or not rules[number].quiet:
            result.remarks.append(Remark("to decide", key, "no value", f"cannot be resolved: {why}"))
    return values, raw


def _deciding_rule(
    rules: Sequence[Rule], key: str, known: tuple[frozenset[str], tuple[str, ...]]
) -> tuple[int | None, str]:
    keys, free = known
    for number, rule in enumerate(rules):
        pattern = rule.pattern_of(key)
        # A pattern of keys that keep their name means those that the schema has.
        keeps_name = rule.ours == rule.theirs and pattern is not None and "*" in pattern
        if pattern is not None and not (keeps_name and key not in keys and not key.startswith(free)):
            return number, pattern
    return None, ""


def _said(outcome: Put | Drop | Ask | Nothing) -> tuple[Kind, str] | None:
    if isinstance(outcome, Put):
        return ("changed", outcome.note) if outcome.note else None
    if isinstance(outcome, Drop):
        return "left out", outcome.reason
    return ("to decide", outcome.reason) if isinstance(outcome, Ask) else ("nothing", "")


def _remark(kind: Kind, pattern: str, found: list[tuple[str, Any, str]]) -> Remark:
    key, value, text = found[0]
    if len(found) > 1:
        return Remark(kind, pattern, f"{len(found)} keys", text)
    return Remark(kind, key, _show(value), text)


def _silent_values(
    project: Project, source: Source, values: Mapping[Key, Any], base: Mapping[str, Any], result: Migration
) -> Iterator[Remark]:
    """What the recipe inherits without their file having a say in it, where that matters."""
    inherited = dict(leaves(base))
    for theirs, ours in project.expected.items():
        key = tuple(theirs.split("."))
        if key not in source.values and key not in source.unresolved:
            value = _show(inherited.get(tuple(ours.split(".")), ...))
            yield Remark("to decide", theirs, "absent", f"{ours} stays what {result.exemplar} has: {value}")
    if result.exemplar == DAPO_EXEMPLAR:
        plain = dict(leaves(load_tree(CONFIGS / EXEMPLAR)))
        for key, value in inherited.items():
            if value != plain.get(key, ...) and key not in values:
                yield Remark("to decide", ".".join(key), "absent", f"stays what {result.exemplar} has: {_show(value)}")


def _differences(base: Mapping[str, Any], values: Mapping[Key, Any], raw: Mapping[Key, str]) -> dict[str, Any]:
    """Keep what the exemplar does not give already, as their file writes it where that means the same here."""
    algo = values.get(("policy", "draft", "algo"), "eagle3")
    filled = dict(leaves(complete(MasterConfig, merge(base, {"policy": {"draft": {"algo": algo}}}))))
    kept = dict(values)
    replaces = _replaces_optimizer(values, filled)
    for key, value in values.items():
        if replaces and key[:3] == (*OPTIMIZER, "kwargs"):
            continue
        if key in filled and _equal(value, filled[key]) and key != ("policy", "draft", "algo"):
            del kept[key]
    if replaces:
        kept[*OPTIMIZER, "kwargs", REPLACE_MARKER] = True
    root = OmegaConf.create(complete(MasterConfig, merge(base, nested(kept))))
    for key in [key for key in kept if _mentions(filled.get(key), "${")]:
        if _means(root, key, text=filled[key], value=kept[key]):
            del kept[key]
    for key, text in raw.items():
        if key in kept and _means(root, key, text=text, value=kept[key]):
            kept[key] = text
    if ("policy", "draft", "algo") in kept and algo == base["policy"]["draft"]["algo"]:
        del kept["policy", "draft", "algo"]
    return _ordered(nested(kept), merge(base, complete(MasterConfig, base)))


def _replaces_optimizer(values: Mapping[Key, Any], filled: Mapping[Key, Any]) -> bool:
    """Another class has other arguments: those of the exemplar must not reach it."""
    name = (*OPTIMIZER, "name")
    return name in values and values[name] != filled[name]


def _means(root: Any, key: Key, *, text: str, value: Any) -> bool:
    """Tell whether an interpolation stands for a value in a tree, and leave it there if so."""
    *above, name = key
    node = root
    for part in above:
        node = node[part]
    node[name] = text
    try:
        is_same = node[name] == value
    except _UNRESOLVABLE:
        is_same = False
    if not is_same:
        node[name] = value
    return is_same


def _ordered(tree: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    names = sorted(tree, key=lambda name: list(model).index(name) if name in model else len(model))
    result: dict[str, Any] = {}
    for name in names:
        value, below = tree[name], model.get(name)
        is_section = isinstance(value, Mapping) and isinstance(below, Mapping)
        result[name] = _ordered(value, below) if is_section else value
    return result


def _equal(value: Any, other: Any) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _mentions(value: Any, text: str) -> bool:
    if isinstance(value, str):
        return text in value
    if isinstance(value, list):
        return any(_mentions(item, text) for item in value)
    return isinstance(value, Mapping) and any(_mentions(item, text) for item in value.values())


def _resolved(root: Any, key: Key) -> Any:
    node = root
    for part in key:
        node = node[part]
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node


def _read_hydra(path: Path, *, chain: tuple[Path, ...]) -> tuple[dict[str, Any], list[str]]:
    """Read a file of Hydra with the groups beside it.

    Returns:
        The tree, and the groups of `defaults` that are not there.
    """
    identity = path.resolve()
    if identity in chain:
        raise ConfigError(f"{path}: defaults: the file inherits from itself. Remove one link.")
    own = read_yaml(path)
    listed = own.pop("defaults", [])
    if not isinstance(listed, list):
        raise ConfigError(f"{path}: defaults: got {listed!r}; must be a list of Hydra's groups. Correct the file.")
    tree: dict[str, Any] = {}
    missing: list[str] = []
    if "_self_" not in listed:
        listed = [*listed, "_self_"]
    for group in listed:
        beside = path.parent / f"{str(group).removesuffix('.yaml')}.yaml"
        if group == "_self_":
            tree = merge(tree, own)
        elif isinstance(group, str) and beside.is_file():
            below, missing_below = _read_hydra(beside, chain=(*chain, identity))
            tree, missing = merge(tree, below), [*missing, *missing_below]
        else:
            missing.append(group if isinstance(group, str) else _show(group))
    return tree, missing


def _override(tree: dict[str, Any], text: str) -> None:
    key, equals, written = text.partition("=")
    parts = key.lstrip("+~").split(".")
    deletes = key.startswith("~")
    if (not equals and not deletes) or not all(parts) or key.startswith("-"):
        raise ConfigError(
            f"command line: got {text!r}; must be key=value, +key=value, ++key=value or ~key in the keys of the other "
            "project. Correct it."
        )
    node = tree
    for part in parts[:-1]:
        below = node.get(part)
        if not isinstance(below, dict):
            below = node[part] = {}
        node = below
    if deletes:
        node.pop(parts[-1], None)
        return
    try:
        node[parts[-1]] = parse_yaml(written)
    except yaml.YAMLError as err:
        raise ConfigError(f"{key}: got {written!r}; is not valid YAML. Quote the value: '{key}=\"...\"'.") from err


def _show(value: Any) -> str:
    if value is ...:
        return "the schema's default"
    if isinstance(value, str):
        return value
    text = (
        yaml.safe_dump(copy.deepcopy(value), default_flow_style=True, width=10_000).strip().removesuffix("...").strip()
    )
    return text if len(text) <= 60 else f"{text[:57]}..."
