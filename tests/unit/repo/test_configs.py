"""Every shipped YAML loads, is valid and repeats nothing; the exemplar is the schema."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.models.automodel.draft.config import DraftConfigBase
from nemo_rl.utils.config import build_master_config, load_config, load_tree, read_yaml
from nemo_rl.utils.config_schema import default_tree
from tools import config_cli

ROOT = Path(__file__).resolve().parents[3]
CONFIGS = sorted((ROOT / "examples" / "configs").rglob("*.yaml"))
RECIPES = [path for path in CONFIGS if "recipes" in path.parts]
EXEMPLAR = ROOT / "examples" / "configs" / "grpo_math_1B.yaml"

EXEMPLAR_OVERRIDES = {"policy.model_name": "Qwen/Qwen2.5-1.5B"}
"""The only keys of the exemplar that are not the schema's defaults."""


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = list(value) if isinstance(value, tuple) else value
    return flat


def ids(paths: list[Path]) -> list[str]:
    return [path.stem for path in paths]


@pytest.mark.parametrize("path", CONFIGS, ids=ids(CONFIGS))
def test_configuration_is_valid(path: Path) -> None:
    build_master_config(load_config(path))


@pytest.mark.parametrize("path", CONFIGS, ids=ids(CONFIGS))
def test_configuration_repeats_nothing(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert config_cli.main(["minimize-check", str(path)]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("path", RECIPES, ids=ids(RECIPES))
def test_recipe_inherits_and_is_named_by_the_rule(path: Path) -> None:
    assert "defaults" in read_yaml(path)
    # <algo>-<model>-<nodes>n<gpus>g-<backend>-<draft>[-modifier]
    assert re.fullmatch(r"(grpo|dapo)-[a-z0-9.]+(-[a-z0-9.]+)*-\d+n\d+g-automodel-[a-z0-9]+(-[a-z0-9.]+)*", path.stem)


def test_there_are_recipes() -> None:
    assert RECIPES


def draft_keys_of_one_algorithm() -> set[str]:
    keys = default_tree()["policy"]["draft"].keys() - DraftConfigBase.model_fields.keys() - {"algo"}
    return {f"policy.draft.{key}" for key in keys}


def test_exemplar_equals_the_schema() -> None:
    exemplar, schema = flatten(load_tree(EXEMPLAR)), flatten(default_tree())
    for key, value in EXEMPLAR_OVERRIDES.items():
        assert exemplar.pop(key) == value
    for key in draft_keys_of_one_algorithm():
        del schema[key]
    assert exemplar == schema


def test_exemplar_means_the_schema() -> None:
    bare = build_master_config({"policy": {"model_name": EXEMPLAR_OVERRIDES["policy.model_name"]}})
    assert build_master_config(load_config(EXEMPLAR)) == bare


def test_exemplar_shows_the_keys_of_the_default_draft_as_comments() -> None:
    text = EXEMPLAR.read_text(encoding="utf-8")
    schema = flatten(default_tree())
    shown = dict(re.findall(r"^    # (\w+): (\S+)", text, flags=re.MULTILINE))
    for key in draft_keys_of_one_algorithm():
        value = schema[key]
        expected = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        assert shown[key.rsplit(".", 1)[1]].strip('"') == expected


def test_every_key_is_described() -> None:
    """The string under a field reaches the messages and the exemplar."""
    text = EXEMPLAR.read_text(encoding="utf-8")
    undescribed = [
        line.strip()
        for line, above in zip(text.splitlines()[1:], text.splitlines(), strict=False)
        if re.match(r"^ +\w+:", line) and "#" not in line and not above.strip().startswith("#")
    ]
    free_form = "lr|weight_decay|betas|eps|foreach|fused|start_factor|end_factor|total_iters|factor"
    list_entry = "kwargs|name|milestones"
    inside_free_form = re.compile(rf"(- )?({free_form}|{list_entry})\b")
    assert [line for line in undescribed if not inside_free_form.match(line)] == []
