"""Every script of this directory: a recipe through the real command, and checks of what it logged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_rl.models.automodel.draft.registry import DRAFT_ALGORITHMS

HERE = Path(__file__).parent
SCRIPTS = sorted(path.name for path in HERE.glob("grpo_*.sh"))
pytestmark = pytest.mark.timeout(1200)


def test_each_algorithm_has_a_script_and_a_recipe() -> None:
    recipes = HERE.parents[1] / "examples/configs/recipes/llm"
    for algo in DRAFT_ALGORITHMS:
        assert f"grpo_tiny_{algo}.sh" in SCRIPTS
        assert (recipes / f"grpo-tiny-qwen3-1n0g-automodel-{algo}.yaml").is_file()


@pytest.mark.parametrize("script", SCRIPTS)
def test_script(script: str, tiny_policy: Path, tmp_path: Path) -> None:
    env = os.environ | {"TINY_POLICY": str(tiny_policy), "RUN_DIR": str(tmp_path), "PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", str(HERE / script)], env=env, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-4000:]
