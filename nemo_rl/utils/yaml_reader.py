"""YAML as the configuration reads it: `1e-4` is a number, a key given twice is an error, nothing but plain data."""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
    """Safe loader with YAML 1.2's floats and without repeated keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue
            if key_node.value in seen:
                problem = f"found the key {key_node.value!r} twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(key_node.value)
        return super().construct_mapping(node, deep=deep)


# YAML 1.1 wants a dot and a signed exponent in a float; people write 1e-4 and 1e5.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def parse_yaml(text: str) -> Any:
    """Parse a YAML document.

    Args:
        text: The document.

    Returns:
        Dicts, lists, strings, numbers, booleans, None.

    Raises:
        yaml.YAMLError: It is not valid YAML, or gives a key twice.
    """
    return yaml.load(text, Loader=_Loader)
