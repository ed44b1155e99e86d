"""A draft is trained without RL, evaluated, taken by GRPO, which records its rollouts, and trained from those.

Runs of the demo recipe through the real commands, reduced to what shows that each does its part.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from examples import run_grpo
from tests.functional.one_node_job import run_as_job

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "examples/configs/recipes/llm/grpo-tiny-qwen3-1n0g-automodel-eagle3.yaml"
STEPS = 6
pytestmark = pytest.mark.timeout(1800)

COMMON = (
    "grpo.val_at_start=false",
    "policy.generation.throughput_probe.enabled=false",
    "policy.generation.sampling_check.enabled=false",
)
DRAFT_RUN = (
    f"draft_run.max_num_steps={STEPS}",
    "draft_run.num_prompts_per_step=64",
    "draft_run.num_eval_prompts=48",
    "policy.draft.train_global_batch_size=8",
)


class Run(NamedTuple):
    """A finished run."""

    directory: Path
    stdout: str

    @property
    def rows(self) -> dict[int, dict[str, float]]:
        merged: dict[int, dict[str, float]] = {}
        for line in (self.directory / "logs" / "metrics.jsonl").read_text().splitlines():
            row = json.loads(line)
            merged.setdefault(row["step"], {}).update(row["metrics"])
        return merged

    @property
    def evaluations(self) -> list[float]:
        """Acceptance lengths in the live engine, step by step."""
        return [row["eval/acceptance_length"] for row in self.rows.values() if "eval/acceptance_length" in row]


def run(script: str, policy: Path, directory: Path, *overrides: str) -> Run:
    command = [
        *(sys.executable, str(ROOT / "examples" / script), "--config", str(RECIPE)),
        f"policy.model_name={policy}",
        f"checkpointing.checkpoint_dir={directory / 'checkpoints'}",
        f"logger.log_dir={directory / 'logs'}",
        *COMMON,
        *overrides,
    ]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return Run(directory, done.stdout)


def digests(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}


@pytest.fixture(scope="module")
def warm_start(tiny_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    before = digests(tiny_policy)
    finished = run("run_draft.py", tiny_policy, tmp_path_factory.mktemp("prompts"), *DRAFT_RUN)
    assert digests(tiny_policy) == before
    return finished


@pytest.fixture(scope="module")
def grpo(warm_start: Run, tiny_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two steps of RL from the draft of the warm start's checkpoint; the rollouts are recorded."""
    directory = tmp_path_factory.mktemp("grpo")
    return run(
        "run_grpo.py",
        tiny_policy,
        directory,
        f"policy.draft.model_name={warm_start.directory}/checkpoints/step_{STEPS}/draft",
        "grpo.max_num_steps=2",
        "grpo.num_prompts_per_step=16",
        "grpo.num_generations_per_prompt=4",
        "policy.train_global_batch_size=64",
        "policy.draft.optimizer.kwargs.lr=1e-4",
        "checkpointing.enabled=false",
        "logger.report=false",
        "rollout_store.mode=record",
        "rollout_store.features=true",
        f"rollout_store.dir={directory / 'rollouts'}",
    )


def test_the_engine_accepts_more_after_the_run_than_before(warm_start: Run) -> None:
    """Measured: 1.04 before, 1.8 to 1.9 after."""
    first, last = warm_start.evaluations
    assert first < 1.2
    assert last > 1.5
    rows = warm_start.rows
    assert sorted(rows) == list(range(STEPS + 1))
    assert rows[STEPS]["train/draft_loss"] < 0.7 * rows[1]["train/draft_loss"]
    for step in range(1, STEPS + 1):
        assert rows[step]["refit/verified"] == 1
        assert rows[step]["refit/version"] == step
        assert rows[step]["train/rollout_weight_version"] == step - 1
    # Rollouts propose with the draft of the step before, so they get faster while the draft learns.
    assert rows[STEPS]["vllm/spec_acceptance_length"] > rows[1]["vllm/spec_acceptance_length"] + 0.3


def test_the_run_shows_and_keeps_what_it_did(warm_start: Run) -> None:
    assert f"evaluation at step {STEPS}" in warm_start.stdout
    assert "evaluated acceptance" in warm_start.stdout
    assert "val:accuracy is not measured without RL" in warm_start.stdout
    report = (warm_start.directory / "logs" / "report" / "report.html").read_text()
    assert 'id="acceptance_length"' in report
    assert 'id="reward"' not in report
    final, saved = (digests(warm_start.directory / path) for path in ("logs/draft", f"checkpoints/step_{STEPS}/draft"))
    assert final == saved


def test_rl_starts_with_the_acceptance_that_was_measured(warm_start: Run, grpo: Run) -> None:
    """Other prompts, and as many samples: measured within 0.15."""
    started = grpo.rows[1]["vllm/spec_acceptance_length"]
    assert abs(started - warm_start.evaluations[-1]) < 0.35


def test_rl_does_not_continue_a_draft_run_and_says_what_to_do(
    warm_start: Run, tiny_policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = warm_start.directory / "checkpoints"
    status = run_grpo.main(
        [
            *("--config", str(RECIPE), f"policy.model_name={tiny_policy}"),
            f"checkpointing.checkpoint_dir={checkpoints}",
            f"logger.log_dir={tmp_path}",
        ]
    )
    assert status == 2
    assert f"policy.draft.model_name={checkpoints}/step_{STEPS}/draft" in capsys.readouterr().err


def test_a_draft_learns_from_recorded_rollouts(
    grpo: Run, tiny_policy: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Anew, without a forward of the policy; the engine only measures."""
    offline = run(
        "run_draft.py",
        tiny_policy,
        tmp_path_factory.mktemp("rollouts"),
        *DRAFT_RUN,
        "draft_run.source=rollouts",
        "draft_run.max_num_epochs=2",
        f"rollout_store.dir={grpo.directory / 'rollouts'}",
        "rollout_store.features=true",
        "logger.report=false",
    )
    rows = offline.rows
    assert sorted(rows) == [0, 1, 2, 3, 4], "two epochs of two batches, fewer than max_num_steps"
    first, last = offline.evaluations
    assert first < 1.2
    assert last > 1.35
    assert "timing/train/policy_forward_s" in rows[1]
    assert not [name for name in rows[1] if name.startswith("vllm/")]


def test_evaluation_as_a_slurm_job_finds_the_same_acceptance(
    warm_start: Run, tiny_policy: Path, tmp_path: Path
) -> None:
    """run_eval.py joins the cluster of ray.sub; plain decoding and speculation answer the same prompts."""
    num_prompts, num_completions, output = 24, 4, tmp_path / "eval.json"
    shown = run_as_job(
        [
            *(sys.executable, str(ROOT / "examples/run_eval.py"), "--config", str(RECIPE), "--output", str(output)),
            f"policy.model_name={tiny_policy}",
            f"policy.draft.model_name={warm_start.directory}/checkpoints/step_{STEPS}/draft",
            f"grpo.max_val_samples={num_prompts}",
            f"grpo.val_num_generations_per_prompt={num_completions}",
            f"logger.log_dir={tmp_path / 'logs'}",
        ],
        tmp_path / "job",
    )
    assert "times the tokens per second" in shown
    results = json.loads(output.read_text())
    assert set(results) == {"plain", "speculative"}
    plain, speculative = results["plain"], results["speculative"]
    for result in (plain, speculative):
        assert result["num_samples"] == num_prompts * num_completions
        assert result["pass@1"] == pytest.approx(result["accuracy"])
        assert result["pass@1"] <= result["pass@2"] <= result["pass@4"]
        assert result["tokens_per_sec"] > 0
    assert "spec_acceptance_length" not in plain
    # Fewer samples than the draft run evaluates with, hence more noise; a draft that was not loaded gives 1.0.
    assert abs(speculative["spec_acceptance_length"] - warm_start.evaluations[-1]) < 0.35
    # Speculation changes no distribution: accuracies of 96 samples differ by chance only (three standard errors).
    assert abs(plain["accuracy"] - speculative["accuracy"]) < 3 * (2 * 0.25 / (num_prompts * num_completions)) ** 0.5
