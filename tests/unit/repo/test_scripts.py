"""Each draft algorithm has a recipe and a functional script, and each script is run by a test."""

from __future__ import annotations

from pathlib import Path

from nemo_rl.models.automodel.draft.registry import DRAFT_ALGORITHMS
from tests.functional.scripts import AUTOREGRESSIVE, BASELINES, BLOCK, ELSEWHERE

ROOT = Path(__file__).resolve().parents[3]


def test_each_algorithm_has_a_script_and_a_recipe() -> None:
    for algo in DRAFT_ALGORITHMS:
        assert (ROOT / f"tests/functional/grpo_tiny_{algo}.sh").is_file()
        assert (ROOT / f"examples/configs/recipes/llm/grpo-tiny-qwen3-1n0g-automodel-{algo}.yaml").is_file()


def test_each_script_is_run() -> None:
    found = {path.stem.removeprefix("grpo_tiny_") for path in (ROOT / "tests/functional").glob("grpo_*.sh")}
    listed = [*AUTOREGRESSIVE, *BLOCK, *BASELINES, *ELSEWHERE]
    assert sorted(listed) == sorted(found)
    resumed = (ROOT / "tests/functional/test_grpo_resume.py").read_text()
    assert all(f"automodel-{name}.yaml" in resumed for name in ELSEWHERE)
