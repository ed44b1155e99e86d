"""Pages that are made from code equal it, and keys that pages name exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from nemo_rl.models.automodel.draft.registry import DRAFT_ALGORITHMS
from tools import config_migrate, config_reference, draft_timing, licenses, recipe_figures
from tools.draft_slots import WORDS
from tools.migration.engine import schema_keys

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"


def test_configuration_reference_is_the_schema() -> None:
    page = (DOCS / "reference" / "configuration.md").read_text(encoding="utf-8")
    assert page == config_reference.page(), "run tools/config_reference.py"
    names = {key.rsplit(".", 1)[-1] for key in schema_keys()[0]}
    assert all(f"`{name}`" in page or f".{name}`" in page for name in names)


def test_licence_list_is_the_pinned_set() -> None:
    page = (DOCS / "reference" / "licenses.md").read_text(encoding="utf-8")
    assert page == licenses.page(), "run tools/licenses.py"


@pytest.mark.parametrize("algo", DRAFT_ALGORITHMS)
def test_guide_shows_the_figures_that_were_measured(algo: str) -> None:
    figures = json.loads(recipe_figures.DATA.read_text(encoding="utf-8"))
    page = recipe_figures.guide(algo).read_text(encoding="utf-8")
    assert page == recipe_figures.with_table(page, recipe_figures.table(algo, figures)), (
        "run tools/recipe_figures.py write"
    )


def test_curves_are_those_that_were_measured() -> None:
    figures = json.loads(recipe_figures.DATA.read_text(encoding="utf-8"))
    picture = recipe_figures.CURVES.read_text(encoding="utf-8")
    assert picture == recipe_figures.curves_svg(figures), "run tools/recipe_figures.py write"
    assert recipe_figures.CURVES.name in (DOCS / "guides" / "draft-algorithms.md").read_text(encoding="utf-8")


def test_figures_are_read_off_a_run() -> None:
    lengths = {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}
    metrics = {
        "vllm/spec_acceptance_length": lengths,
        "vllm/spec_acceptance_rate_pos_0": lengths,
        "train/draft_loss": {1: 4.0, 2: 3.0, 3: 2.0, 4: 1.0},
        "train/reward": lengths,
        "performance/spec_speedup": {4: 1.5},
        "timing/train/draft_s": {1: 9.0, 2: 1.0, 3: 1.0, 4: 1.0},
        "timing/train/policy_fwd_bwd_s": {1: 2.0, 2: 2.0, 3: 2.0, 4: 2.0},
    }
    found = recipe_figures.summarize(metrics, k=1)
    assert (found["acceptance_first"], found["acceptance_last"], found["draft_loss_last"]) == (1.0, 3.0, 2.0)
    assert (found["positions"], found["speedup"], found["draft_to_policy_seconds"]) == ([300], 1.5, 0.5)
    assert found["acceptance"] == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("algo", DRAFT_ALGORITHMS)
def test_timing_diagram_is_what_the_tool_draws(algo: str) -> None:
    drawn = draft_timing.timing_svg(algo).encode()
    # Not compared inside the assert: it would show the difference of two long files.
    is_same = (draft_timing.FIGURES / f"timing-{algo}.svg").read_bytes() == drawn
    assert is_same, "run tools/draft_timing.py"
    assert len(drawn) < 40_000


@pytest.mark.parametrize("algo", DRAFT_ALGORITHMS)
def test_pages_show_the_timing_diagram(algo: str) -> None:
    image = f"![{WORDS[algo].alt}]({{}}figures/timing-{algo}.svg)"
    assert image.format("") in (DOCS / "concepts.md").read_text(encoding="utf-8")
    assert image.format("../../") in recipe_figures.guide(algo).read_text(encoding="utf-8")


@pytest.mark.parametrize("project", config_migrate.PROJECTS.values(), ids=config_migrate.PROJECTS)
def test_migration_guide_holds_the_rules_of_the_command(project: config_migrate.Project) -> None:
    page = (DOCS / "migrating.md").read_text(encoding="utf-8")
    is_same = config_migrate.marked(project) in page
    assert is_same, f"run tools/config_migrate.py --table {project.name} and paste its output"


def test_migration_guide_names_keys_that_exist() -> None:
    """Right column of its tables: every span that starts with a section's name is a key, or the parent of one."""
    known, _ = schema_keys()
    sections = {key.split(".")[0] for key in known}
    text = (DOCS / "migrating.md").read_text(encoding="utf-8")
    cells = [line.split("|")[2] for line in text.splitlines() if line.startswith("|") and not line.startswith("|--")]
    named = {match for cell in cells for match in re.findall(r"`([a-z_]+(?:\.[A-Za-z0-9_]+)+)[`:*]", cell)}
    keys = {name for name in named if name.split(".")[0] in sections}
    assert len(keys) > 20
    free_form = ("policy.generation.vllm_kwargs.", "policy.draft.optimizer.kwargs.")
    assert [key for key in sorted(keys) if key not in known and not key.startswith(free_form)] == []


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda path: path.stem)
def test_yaml_blocks_of_pages_name_keys_that_exist(page: Path) -> None:
    known, _ = schema_keys()
    sections = {key.split(".")[0] for key in known}
    unknown = []
    for block in re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL):
        path: list[tuple[int, str]] = []
        for line in block.splitlines():
            match = re.match(r"^( *)([A-Za-z_]+):", line)
            if match is None:
                continue
            indent = len(match[1])
            path = [(depth, key) for depth, key in path if depth < indent] + [(indent, match[2])]
            dotted = ".".join(key for _, key in path)
            if dotted.split(".")[0] in sections and not re.search(r"vllm_kwargs\.|kwargs\.", dotted):
                unknown += [dotted] if dotted not in known else []
    assert unknown == []
