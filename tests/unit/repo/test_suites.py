"""Recipes, scripts and suite lists agree; a violation names the file and the key."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.check_metrics import evaluate_check
from tests.unit.repo import suite_rules as rules

ROOT = Path(__file__).resolve().parents[3]
RECIPE, SIBLING = "grpo-qwen3-8b-1n8g-automodel-eagle3", "grpo-qwen3-8b-1n8g-automodel-none"
SUITE_SCRIPTS = sorted((ROOT / rules.SCRIPTS).glob("*.sh"))

GOOD = {
    "refit/verified": 1.0,
    "train/num_skipped_updates": 0.0,
    "train/token_mult_prob_error": 1.001,
    "train/reward": 0.9,
    "train/draft_loss": 1.0,
    "performance/spec_speedup": 2.0,
}
"""Metrics of a run in which all is well; those that move are added by `metrics_of_a_good_run`."""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """What the rules read of the repository; every test changes one thing in it."""
    for directory in ("examples/configs", rules.SCRIPTS, rules.FUNCTIONAL):
        shutil.copytree(ROOT / directory, tmp_path / directory, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    for path in (ROOT / "tests/test_suites").glob("*.txt"):
        shutil.copy(path, tmp_path / "tests/test_suites")
    return tmp_path


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


def only_problem(root: Path) -> str:
    problems = rules.all_problems(root)
    assert len(problems) == 1, problems
    return problems[0]


def test_repository_keeps_every_rule() -> None:
    assert rules.all_problems(ROOT) == []


def test_copy_keeps_every_rule(copy: Path) -> None:
    assert rules.all_problems(copy) == []
    assert len(rules.recipes(copy)) > 20


# --- bad input


def test_recipe_that_is_not_minimal(copy: Path) -> None:
    path = copy / rules.RECIPES / f"{RECIPE}.yaml"
    edit(path, "policy:\n", "policy:\n  max_total_sequence_length: 4096\n")
    message = only_problem(copy)
    assert message == f"{path}: policy.max_total_sequence_length: 4096 is what the file inherits. Remove it."


def test_recipe_with_an_unknown_key(copy: Path) -> None:
    path = copy / rules.RECIPES / f"{RECIPE}.yaml"
    edit(path, "  draft:\n", "  draft:\n    los_weight: 1.0\n")
    message = only_problem(copy)
    assert message.startswith(f"{path}: policy.draft.los_weight: got an unknown key; the nearest valid name is")


def test_recipe_without_a_script(copy: Path) -> None:
    (copy / rules.SCRIPTS / f"{RECIPE}.sh").unlink()
    problems = rules.all_problems(copy)
    assert problems[0].startswith(
        f"{copy / rules.RECIPES / RECIPE}.yaml: has no script. Add {rules.SCRIPTS}/{RECIPE}.sh"
    )
    # Its line is left behind, too.
    assert [problem.split(": ")[0] for problem in problems[1:]] == [str(copy / "tests/test_suites/nightly.txt")]


def test_script_without_a_recipe(copy: Path) -> None:
    stem = "grpo-qwen3-30ba3b-2507-instruct-4n8g-automodel-eagle3"
    (copy / rules.RECIPES / f"{stem}.yaml").unlink()
    assert only_problem(copy) == f"{copy / rules.SCRIPTS / stem}.sh: there is no recipe {rules.RECIPES}/{stem}.yaml."


def test_functional_script_of_an_unknown_recipe(copy: Path) -> None:
    path = copy / rules.FUNCTIONAL / "grpo_tiny_none.sh"
    edit(path, "run_recipe grpo-tiny-qwen3-1n0g-automodel-none", "run_recipe grpo-tiny-qwen3-1n0g-automodel-nothing")
    problems = rules.all_problems(copy)
    assert any(
        p == f"{path}: there is no recipe {rules.RECIPES}/grpo-tiny-qwen3-1n0g-automodel-nothing.yaml."
        for p in problems
    )
    assert any("automodel-none.yaml: has no script" in problem for problem in problems)


def test_script_in_no_list(copy: Path) -> None:
    edit(copy / "tests/test_suites/nightly.txt", f"{rules.SCRIPTS}/{RECIPE}.sh\n", "")
    assert only_problem(copy).startswith(f"{copy / rules.SCRIPTS / RECIPE}.sh: is in no list. Add a line")


def test_script_in_two_lists(copy: Path) -> None:
    with open(copy / "tests/test_suites/release.txt", "a", encoding="utf-8") as stream:
        stream.write("tests/functional/grpo_tiny_none.sh\n")
    message = only_problem(copy)
    assert message.endswith("grpo_tiny_none.sh: has 2 lines (functional, release); must have one.")


def test_line_without_a_script(copy: Path) -> None:
    with open(copy / "tests/test_suites/nightly.txt", "a", encoding="utf-8") as stream:
        stream.write(f"{rules.SCRIPTS}/nothing.sh\n")
    assert only_problem(copy) == (
        f"{copy / 'tests/test_suites'}/nightly.txt: {rules.SCRIPTS}/nothing.sh: there is no such script."
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("GPUS_PER_NODE=8", "GPUS_PER_NODE=4", "GPUS_PER_NODE: got 4; cluster.gpus_per_node of"),
        ("NUM_NODES=1", "NUM_NODES=2", "NUM_NODES: got 2; cluster.num_nodes of"),
        ("MAX_STEPS=30\n", "", "MAX_STEPS: is missing."),
        ("NUM_MINUTES=90", "NUM_MINUTES=long", "NUM_MINUTES: got long; must be a number."),
        ("NUM_MINUTES=90", "NUM_MINUTES=90\nNUM_GPUS=8", "NUM_GPUS: is not read by anything."),
        ("NUM_RUNS=$(((MAX", "NUM_RUNS=1 # $(((MAX", "NUM_RUNS: got 1 #"),
        ("# ===== BEGIN CONFIG", "# =====", "has no configuration block"),
    ],
)
def test_configuration_block_of_a_script(copy: Path, old: str, new: str, message: str) -> None:
    path = copy / rules.SCRIPTS / f"{RECIPE}.sh"
    edit(path, old, new)
    assert only_problem(copy).startswith(f"{path}: {message}")


def test_list_over_its_hours(copy: Path) -> None:
    edit(copy / rules.SCRIPTS / f"{RECIPE}.sh", "NUM_MINUTES=90", "NUM_MINUTES=900")
    message = only_problem(copy)
    assert message.startswith(f"{copy / 'tests/test_suites'}/nightly.txt: its scripts ask for 17")
    assert "GPU hours; must be at most 80" in message


def test_hours_count_nodes_gpus_and_runs() -> None:
    assert rules.Script(4, 8, steps_per_run=20, max_steps=50, num_minutes=30).gpu_hours == 4 * 8 * 3 * 0.5


@pytest.mark.parametrize(
    ("stem", "renamed", "message"),
    [
        (RECIPE, "grpo-qwen3-8b-1n8g-automodel-dflash2", "policy.draft.algo: got 'eagle3'; the name says 'dflash2'."),
        (SIBLING, "grpo-qwen3-8b-2n8g-automodel-none", "cluster.num_nodes: got 1; the name says 2."),
        (SIBLING, "grpo-qwen3-8b-1n4g-automodel-none", "cluster.gpus_per_node: got 8; the name says 4."),
        (SIBLING, "dapo-qwen3-9b-1n8g-automodel-none", "grpo.use_dynamic_sampling: got False; the name says True."),
        (SIBLING, "grpo-qwen3-9b-1n8g-automodel-none", "logger.log_dir: got 'logs/"),
        (SIBLING, "grpo_qwen3_8b", "name: must be <algo>-<model>"),
    ],
)
def test_recipe_that_is_not_what_its_name_says(copy: Path, stem: str, renamed: str, message: str) -> None:
    path = copy / rules.RECIPES / f"{renamed}.yaml"
    shutil.copy(copy / rules.RECIPES / f"{stem}.yaml", path)
    assert any(problem.startswith(f"{path}: {message}") for problem in rules.recipe_problems(path))


# --- the scripts themselves


def expressions(path: Path) -> list[str]:
    body = path.read_text(encoding="utf-8").split("check_when_finished \\\n")[1]
    return shlex.split(body.replace("\\\n", " "))


def metrics_of_a_good_run(num_steps: int) -> dict[str, dict[str, float]]:
    steps = range(1, num_steps + 1)
    metrics = {name: {str(step): value for step in steps} for name, value in GOOD.items()}
    metrics["refit/version"] = {str(step): float(step) for step in steps}
    metrics["train/loss"] = {str(step): 0.1 for step in steps}
    metrics["train/draft_loss"] = {str(step): 2.0 - step / num_steps for step in steps}
    metrics["vllm/spec_acceptance_length"] = {str(step): 1.0 + 2.5 * step / num_steps for step in steps}
    return metrics


@pytest.mark.parametrize("path", SUITE_SCRIPTS, ids=[path.stem for path in SUITE_SCRIPTS])
def test_checks_hold_for_a_good_run_and_fail_for_a_bad_one(path: Path) -> None:
    script, _ = rules.read_script(path)
    assert script is not None
    checks = expressions(path)
    good = metrics_of_a_good_run(script.max_steps)
    outcomes = {check: evaluate_check(good, check) for check in checks}
    assert {check: outcome for check, outcome in outcomes.items() if not outcome.passed} == {}
    bad = {name: {step: -value - 1 for step, value in series.items()} for name, series in good.items()}
    bad["train/num_skipped_updates"] = dict.fromkeys(bad["train/loss"], 1.0)
    bad["train/token_mult_prob_error"] = dict.fromkeys(bad["train/loss"], 1.5)
    for check in checks:
        outcome = evaluate_check(bad, check)
        assert outcome.message == ""
    assert sum(not evaluate_check(bad, check).passed for check in checks) >= len(checks) - 1


@pytest.mark.parametrize("path", SUITE_SCRIPTS, ids=[path.stem for path in SUITE_SCRIPTS])
def test_checks_are_about_what_the_recipe_is_about(path: Path) -> None:
    text = " ".join(expressions(path))
    assert "refit/verified" in text
    assert "token_mult_prob_error" in text
    cfg, _ = rules.load(rules.recipes(ROOT)[path.stem])
    assert cfg is not None
    assert ("spec_acceptance_length" in text) == cfg.policy.draft_enabled


@pytest.mark.parametrize("path", [ROOT / script for script in rules.scripts(ROOT)], ids=lambda path: path.stem)
def test_script_is_bash(path: Path) -> None:
    assert os.access(path, os.X_OK)
    assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0


PYTHON_STUB = """#!/usr/bin/env bash
# Writes down its arguments, and the metrics of as many steps as it is asked for.
if [ "$1" = - ]; then exec {python} "$@"; fi
echo "$@" >> {log}
for argument in "$@"; do
    case "$argument" in
    grpo.max_num_steps=*) echo "${{argument#*=}}" > {steps} ;;
    esac
done
case "$1" in
*json_dump_tb_logs.py)
    {python} -c 'import json, sys; n = int(sys.argv[2]); json.dump({{"train/loss": {{s: 0 for s in range(1, n + 1)}}}},
open(sys.argv[1], "w"))' "$4" "$(cat {steps})" ;;
esac
"""


def run_script(path: Path, tmp_path: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    log, stub = tmp_path / "log", tmp_path / "python"
    log.write_text("")
    stub.write_text(PYTHON_STUB.format(python=sys.executable, log=log, steps=tmp_path / "steps"))
    stub.chmod(0o755)
    env = os.environ | {"PYTHON": str(stub), "EXP_DIR": str(tmp_path / "exp")}
    done = subprocess.run(
        ["bash", str(path), *arguments], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    return done, log.read_text().splitlines()


def test_script_trains_its_recipe_then_checks(tmp_path: Path) -> None:
    path = ROOT / rules.SCRIPTS / f"{RECIPE}.sh"
    done, calls = run_script(path, tmp_path, "logger.wandb_enabled=true")
    assert done.returncode == 0, done.stderr
    assert [call.split()[0] for call in calls] == [
        "examples/run_grpo.py",
        "tests/json_dump_tb_logs.py",
        "tests/check_metrics.py",
    ]
    assert f"--config {ROOT}/{rules.RECIPES}/{RECIPE}.yaml grpo.max_num_steps=30 " in calls[0]
    assert calls[0].endswith(" logger.wandb_enabled=true")
    again, calls = run_script(path, tmp_path)
    assert again.returncode == 0
    assert "has all 30 steps" in again.stdout
    assert calls == []


def test_script_of_several_runs_continues(tmp_path: Path) -> None:
    path = ROOT / rules.SCRIPTS / "grpo-qwen3-30ba3b-2507-instruct-4n8g-automodel-eagle3.sh"
    for steps, is_last in ((15, False), (30, True)):
        done, calls = run_script(path, tmp_path)
        assert done.returncode == 0, done.stderr
        assert f"grpo.max_num_steps={steps} " in calls[0]
        assert any("check_metrics.py" in call for call in calls) == is_last


def test_script_fails_with_its_run(tmp_path: Path) -> None:
    path = ROOT / rules.SCRIPTS / f"{RECIPE}.sh"
    stub = tmp_path / "python"
    stub.write_text(f'#!/bin/sh\nif [ "$1" = - ]; then exec {sys.executable} "$@"; fi\nexit 3\n')
    stub.chmod(0o755)
    env = os.environ | {"PYTHON": str(stub), "EXP_DIR": str(tmp_path / "exp")}
    assert subprocess.run(["bash", str(path)], env=env, capture_output=True, timeout=60, check=False).returncode == 3
