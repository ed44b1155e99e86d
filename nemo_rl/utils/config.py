"""The one loader of configuration files: inheritance, command-line overrides, interpolation, validation.

    tree = load_config("recipe.yaml", ["grpo.max_num_steps=5"])   # plain dict, everything resolved
    cfg = build_master_config(tree)                               # validated, frozen; or one ConfigError

A file names its parents in `defaults:` (a path or a list, relative to the file); its own keys win. A mapping that holds
`_override_: true` replaces the parent's mapping instead of merging into it. `${...}` may name any key, given or
not. Nothing here imports torch.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from nemo_rl.algorithms.config import MasterConfig
from nemo_rl.errors import ConfigError
from nemo_rl.utils.config_messages import explain, join_problems, structural_problems
from nemo_rl.utils.config_overrides import apply_override
from nemo_rl.utils.config_schema import DISCRIMINATOR, resolve
from nemo_rl.utils.yaml_reader import parse_yaml

REPLACE_MARKER = "_override_"
"""Key that makes a mapping replace its parent's instead of merging into it."""


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """Load a configuration file with its parents, apply overrides, resolve interpolations.

    Args:
        path: YAML file.
        overrides: ``key=value`` (the key must exist), ``++key=value`` or ``+key=value`` (add, inside free-form blocks),
            ``~key`` (delete; the schema's default takes its place). Values are YAML.

    Returns:
        Plain nested dict without interpolations, not yet validated; defaults of the schema are not filled in, except
        those that follow another key.

    Raises:
        ConfigError: A file is missing or malformed, an override cannot apply, an interpolation cannot be resolved.
    """
    tree = load_tree(path)
    # Which class a section is decides which keys it has, so that comes first in whatever order it is given.
    for text in sorted(overrides, key=lambda text: not text.partition("=")[0].endswith(f".{DISCRIMINATOR}")):
        apply_override(tree, text)
    return resolve(tree)


def build_master_config(tree: Mapping[str, Any]) -> MasterConfig:
    """Validate a nested dict; missing keys take the defaults of the schema.

    Args:
        tree: Nested dict; may hold interpolations.

    Returns:
        The frozen configuration.

    Raises:
        ConfigError: One message that lists every problem: key, got, allowed, remedy.
    """
    try:
        resolved = resolve(tree)
    except ConfigError as err:
        # A key that is missing or misplaced also breaks the interpolations that name it: report the cause instead.
        raise ConfigError(join_problems(structural_problems(tree) or [str(err)])) from err
    try:
        return MasterConfig.model_validate(resolved)
    except ValidationError as err:
        problems = explain(err.errors(include_url=False), resolved)
    raise ConfigError(join_problems(problems))


def to_dict(cfg: BaseModel) -> dict[str, Any]:
    """Turn a validated configuration back into the plain dict that YAML and JSON can hold.

    Args:
        cfg: The configuration or one of its sections.

    Returns:
        Nested dict with the keys of the YAML files; validating it gives an equal configuration.
    """
    return cfg.model_dump(mode="json", by_alias=True)


def load_tree(path: str | Path) -> dict[str, Any]:
    """Load a file and its parents; interpolations stay as text, no defaults are filled in.

    Args:
        path: YAML file.

    Returns:
        Plain nested dict without `defaults`.

    Raises:
        ConfigError: A file is missing, malformed, or its own ancestor.
    """
    return _load_tree(Path(path), chain=())


def read_yaml(path: Path) -> dict[str, Any]:
    """Read one YAML mapping; interpolations stay as text.

    Args:
        path: YAML file.

    Returns:
        Plain nested dict, `defaults` included.

    Raises:
        ConfigError: The file is missing, unreadable, not YAML, or not a mapping.
    """
    try:
        content = parse_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"--config: got {str(path)!r}; no such file. Give the path of a YAML file.") from None
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"{path}: cannot be read ({err}). Give the path of a YAML file.") from err
    except yaml.YAMLError as err:
        raise ConfigError(f"{path}: is not valid YAML: {' '.join(str(err).split())}. Correct the file.") from err
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"{path}: must be a mapping of sections (grpo, policy, ...). Correct the file.")
    return content


def parents_of(path: Path, own: Mapping[str, Any]) -> list[Path]:
    """List the parents that a file names in `defaults`, in the order in which they are merged.

    Args:
        path: The file.
        own: Its content.

    Returns:
        Paths, relative ones taken from the directory of the file.

    Raises:
        ConfigError: `defaults` is neither a path nor a list of paths.
    """
    named = own.get("defaults", [])
    names = [named] if isinstance(named, str) else named
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{path}: defaults: got {named!r}; must be a path or a list of paths. Correct the file.")
    return [path.parent / name for name in names]


def merge(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two trees: mappings key by key, anything else is replaced by the top one.

    Args:
        base: The lower tree.
        top: The tree that wins. A mapping in it that holds `_override_: true` replaces the lower one.

    Returns:
        A new tree.
    """
    merged = dict(copy.deepcopy(base))
    for key, value in top.items():
        below = merged.get(key)
        if isinstance(value, Mapping):
            replaces = value.get(REPLACE_MARKER, False)
            value = {name: item for name, item in value.items() if name != REPLACE_MARKER}
            merged[key] = merge({} if replaces or not isinstance(below, Mapping) else below, value)
        else:
            merged[key] = copy.deepcopy(value)
    return merged


def _load_tree(path: Path, *, chain: tuple[Path, ...]) -> dict[str, Any]:
    identity = path.resolve()
    if identity in chain:
        cycle = " -> ".join(str(item) for item in (*chain[chain.index(identity) :], identity))
        raise ConfigError(f"{path}: defaults: the file inherits from itself ({cycle}). Remove one link.")
    if chain and not path.exists():
        raise ConfigError(f"{chain[-1]}: defaults: got {str(path)!r}; no such file. Paths are relative to the file.")
    own = read_yaml(path)
    tree: dict[str, Any] = {}
    for parent in parents_of(path, own):
        tree = merge(tree, _load_tree(parent, chain=(*chain, identity)))
    own.pop("defaults", None)
    return merge(tree, own)
