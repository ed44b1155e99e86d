"""The demo recipe through the real command: it runs, is killed with SIGKILL, continues, and reports the same numbers.

A reduced batch and a short warm start keep this within CI's budget. The draft takes one update per step, so that the
training forward and the rollouts of a step use the same draft and their acceptance can be compared exactly.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "examples/configs/recipes/llm/grpo-tiny-qwen3-1n0g-automodel-eagle3.yaml"
STEPS = 6
pytestmark = pytest.mark.timeout(1800)
START_TIMEOUT_S = 240


def command(policy: Path, run_dir: Path) -> list[str]:
    return [
        sys.executable,
        str(ROOT / "examples/run_grpo.py"),
        "--config",
        str(RECIPE),
        f"policy.model_name={policy}",
        f"grpo.max_num_steps={STEPS}",
        "grpo.num_prompts_per_step=16",
        "grpo.num_generations_per_prompt=4",
        "policy.train_global_batch_size=64",
        "policy.draft.train_global_batch_size=null",
        "grpo.val_period=3",
        "grpo.max_val_samples=16",
        "checkpointing.save_period=2",
        f"checkpointing.checkpoint_dir={run_dir / 'checkpoints'}",
        f"logger.log_dir={run_dir / 'logs'}",
    ]


def environment() -> dict[str, str]:
    return os.environ | {"HF_HUB_OFFLINE": "1"}


def rows(run_dir: Path) -> dict[int, dict[str, float]]:
    merged: dict[int, dict[str, float]] = {}
    path = run_dir / "logs" / "metrics.jsonl"
    if path.exists():
        for line in path.read_text().splitlines():
            row = json.loads(line)
            merged.setdefault(row["step"], {}).update(row["metrics"])
    return merged


def run_to_end(policy: Path, run_dir: Path) -> str:
    done = subprocess.run(
        command(policy, run_dir), env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def uninterrupted(tiny_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    run_dir = tmp_path_factory.mktemp("whole")
    return run_dir, run_to_end(tiny_policy, run_dir)


def test_run_learns_and_every_refit_is_verified(uninterrupted: tuple[Path, str]) -> None:
    run_dir, stdout = uninterrupted
    path = run_dir / "logs" / "metrics.jsonl"
    checks = [
        f'len(data["train/reward"]) == {STEPS}',
        'min(data["refit/verified"]) == 1',
        'last(data["train/draft_loss"]) < 0.8 * first(data["train/draft_loss"])',
        'last(data["vllm/spec_acceptance_length"]) > first(data["vllm/spec_acceptance_length"]) + 0.05',
        'max(data["train/token_mult_prob_error"]) < 1.01',
        'max(data["train/num_skipped_updates"]) == 0',
        'max(data["train/num_prompts_dropped"]) == 0',
        'min(data["validation/num_samples"]) == 16',
        f'last(data["refit/version"]) == {STEPS}',
    ]
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/check_metrics.py"), str(path), *checks],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = run_dir / "logs" / "report" / "report.html"
    assert report.exists()
    assert report.read_text().count("data:image/png;base64,") >= 5
    assert "report.html" in stdout.replace("\n", "")
    # The run leaves the draft behind, the same as its last checkpoint holds.
    final, saved = run_dir / "logs" / "draft", run_dir / "checkpoints" / f"step_{STEPS}" / "draft"
    assert str(final) in "".join(line.strip("│ ") for line in stdout.splitlines())
    assert {p.name: p.read_bytes() for p in final.iterdir()} == {p.name: p.read_bytes() for p in saved.iterdir()}
    # Rollouts of a step use the weights that the step before published.
    assert [m["train/rollout_weight_version"] for s, m in sorted(rows(run_dir).items()) if s > 0] == list(range(STEPS))


def test_acceptance_in_training_equals_acceptance_in_the_engine(uninterrupted: tuple[Path, str]) -> None:
    """The training forward replays the engine's drafting on the same responses with the same weights: equal counts."""
    compared = 0
    for step, metrics in rows(uninterrupted[0]).items():
        if step == 0:
            continue
        measured, replayed = metrics["vllm/spec_acceptance_length"], metrics["train/draft_replayed_acceptance_length"]
        assert replayed == pytest.approx(measured, rel=1e-6), f"step {step}"
        for j in (1, 2, 3):
            rate = metrics[f"vllm/spec_acceptance_rate_pos_{j - 1}"]
            assert metrics[f"train/draft_replayed_acceptance_{j}"] == pytest.approx(rate, abs=1e-6), f"step {step}"
        compared += metrics["vllm/spec_acceptance_rate_pos_0"] > 0.02
    assert compared >= 3, "almost nothing was accepted: the comparison would be empty"


def start(policy: Path, run_dir: Path) -> subprocess.Popen[bytes]:
    with (run_dir / "stderr.txt").open("wb") as stderr:
        return subprocess.Popen(
            command(policy, run_dir),
            env=environment(),
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,
        )


def wait_for_step(process: subprocess.Popen[bytes], run_dir: Path, step: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while max(rows(run_dir), default=0) < step:
        assert process.poll() is None, "the run ended too early: " + (run_dir / "stderr.txt").read_text()[-4000:]
        assert time.monotonic() < deadline, "the run did not reach the step in time"
        time.sleep(0.1)


def workers(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The Ray actors of a run, policy and engine."""
    children = psutil.Process(process.pid).children(recursive=True)
    return [child for child in children if "WorkerHost" in " ".join(child.cmdline())]


def saved_steps(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").glob("step_*"))


def test_killed_run_continues_with_the_same_numbers(
    tiny_policy: Path, uninterrupted: tuple[Path, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A worker is killed, then the command itself; the third start ends the run."""
    run_dir = tmp_path_factory.mktemp("killed")
    process = start(tiny_policy, run_dir)
    wait_for_step(process, run_dir, 3)
    actors = workers(process)
    assert len(actors) == 2
    actors[0].kill()
    assert process.wait(timeout=60) == 1
    message = (run_dir / "stderr.txt").read_text()
    assert "worker group" in message
    assert "rank 0" in message
    _, alive = psutil.wait_procs(actors, timeout=30)
    assert not alive
    assert "step_2" in saved_steps(run_dir)

    process = start(tiny_policy, run_dir)
    wait_for_step(process, run_dir, 5)
    actors = workers(process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=10)
    _, alive = psutil.wait_procs(actors, timeout=60)
    assert not alive
    assert "step_4" in saved_steps(run_dir)

    run_to_end(tiny_policy, run_dir)
    whole, resumed = rows(uninterrupted[0]), rows(run_dir)
    assert sorted(resumed) == sorted(whole)
    for step, expected in whole.items():
        got = resumed[step]
        for name, value in expected.items():
            if name.startswith(("timing/", "performance/")) or "seconds" in name:
                continue
            assert got[name] == value, f"step {step} {name}"
