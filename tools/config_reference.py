"""Write the configuration reference from the schema; a test compares the page with the code.

.venv/bin/python tools/config_reference.py > docs/reference/configuration.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from nemo_rl.algorithms.config import MasterConfig
from nemo_rl.models.automodel.draft.config import DraftConfigBase
from nemo_rl.utils.config_schema import default_value, discriminator_values, section_class, sibling_classes

HEAD = """\
# Configuration reference

Every key, made from the schema by `tools/config_reference.py` and compared with it by a test. A default
`${policy.x}` is the value of that key. A key that is not listed here stops the run and names the nearest one that is.
"""

_JSON_TYPES = {
    "integer": "integer",
    "number": "number",
    "string": "text",
    "boolean": "true, false",
    "object": "mapping",
}


def page() -> str:
    """The whole page in Markdown."""
    return HEAD + "".join(section(MasterConfig, prefix="", level=0))


def section(model: type[BaseModel], *, prefix: str, level: int) -> Iterator[str]:
    """A section's heading, its table, then the sections inside it.

    Args:
        model: schema of the section.
        prefix: dotted key of the section with a dot behind it; empty at the top.
        level: of its heading.
    """
    properties = model.model_json_schema(by_alias=True)["properties"]
    inner: list[tuple[str, FieldInfo]] = []
    lines: list[str] = []
    for name, field in model.model_fields.items():
        key = field.alias or name
        if sibling_classes(field.annotation) or section_class(field.annotation, {}) is not None:
            inner.append((key, field))
        else:
            lines.append(_row(key, properties[key], field))
    if prefix:
        yield f"\n{'#' * (level + 1)} `{prefix.removesuffix('.')}`\n\n{_sentence(model.__doc__)}\n"
    if lines:
        yield "\n" + "\n".join(["| key | value | default | meaning |", "| --- | --- | --- | --- |", *lines]) + "\n"
    for key, field in inner:
        classes = sibling_classes(field.annotation)
        if classes:
            yield from _alternatives(classes, prefix=f"{prefix}{key}.", level=level + 1)
        else:
            found = section_class(field.annotation, {})
            assert found is not None, "sorted above"
            yield from section(found, prefix=f"{prefix}{key}.", level=min(level + 1, 4))


def _alternatives(classes: list[type[BaseModel]], *, prefix: str, level: int) -> Iterator[str]:
    """A section that is one of several: what all share, then what each adds."""
    shared = DraftConfigBase
    yield from section(shared, prefix=prefix, level=level)
    for model in classes:
        names = " or ".join(f"`{value}`" for value in discriminator_values(model))
        properties = model.model_json_schema(by_alias=True)["properties"]
        own = [
            _row(field.alias or name, properties[field.alias or name], field)
            for name, field in model.model_fields.items()
            if name not in shared.model_fields
        ]
        yield f"\n{'#' * (level + 2)} `{prefix}algo`: {names}\n\n{_sentence(model.__doc__)}\n\n"
        yield "\n".join(["| key | value | default | meaning |", "| --- | --- | --- | --- |", *own]) + "\n"


def _row(key: str, schema: Mapping[str, Any], field: FieldInfo) -> str:
    meaning = _cell(field.description or "")
    return f"| `{key}` | {_cell(_kind(schema))} | {_default(field)} | {meaning} |"


def _kind(schema: Mapping[str, Any]) -> str:
    """What may be written, in words."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_kind(part) for part in schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    if schema.get("type") == "null":
        return "null"
    name = _JSON_TYPES.get(schema.get("type", ""), "any")
    bounds = [
        f"{sign} {schema[bound]:g}"
        for bound, sign in (("minimum", ">="), ("exclusiveMinimum", ">"), ("maximum", "<="), ("exclusiveMaximum", "<"))
        if bound in schema
    ]
    return " ".join([name, *([", ".join(bounds)] if bounds else [])])


def _default(field: FieldInfo) -> str:
    value = default_value(field)
    return "required" if value is PydanticUndefined else f"`{_cell(json.dumps(value))}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _sentence(text: str | None) -> str:
    return "\n".join(line.strip() for line in (text or "").strip().splitlines())


def main() -> None:
    """Print it."""
    sys.stdout.write(page())


if __name__ == "__main__":
    main()
