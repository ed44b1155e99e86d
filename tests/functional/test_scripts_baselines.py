"""Runs without a trained draft, through the real command.

Apart from the other scripts, so that two test processes share them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.functional.scripts import BASELINES, run_script


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", BASELINES)
def test_script(name: str, tiny_policy: Path, tmp_path: Path) -> None:
    run_script(name, tiny_policy, tmp_path)
