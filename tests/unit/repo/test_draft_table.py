"""The table of draft algorithms in the guide is what the code says."""

from __future__ import annotations

import re
from pathlib import Path

from nemo_rl.models.automodel.draft.registry import DRAFT_ALGORITHMS
from tools.draft_table import table

ROOT = Path(__file__).resolve().parents[3]


def test_guide_holds_the_table_of_the_registry() -> None:
    text = (ROOT / "docs/guides/draft-algorithms.md").read_text()
    found = re.search(r"<!-- draft-table:.*?-->\n(.*?)\n<!-- end of draft-table -->", text, re.DOTALL)
    assert found is not None
    assert found[1] == table(), "run tools/draft_table.py and paste its output"
    assert all(f"| `{algo}` |" in found[1] for algo in DRAFT_ALGORITHMS)


def test_readme_names_every_algorithm() -> None:
    text = (ROOT / "README.md").read_text().lower().replace("-", "")
    assert all(algo in text for algo in DRAFT_ALGORITHMS)
