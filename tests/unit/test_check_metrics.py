from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from nemo_rl.algorithms.config import LoggerConfig
from nemo_rl.utils.logger import Logger

TESTS = Path(__file__).parents[1]


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, TESTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check_metrics = load_script("check_metrics")
json_dump_tb_logs = load_script("json_dump_tb_logs")

DATA = {
    "train/reward": {1: 0.1, 2: 0.4, 3: 0.3, 4: 0.8},
    "late": {11: 1.0, 12: 2.0, 13: 3.0},
    "strings": {"1": 5.0, "10": 7.0, "2": 6.0},
    "broken": {1: 1.0, 2: None},
    "nan": {1: float("nan")},
    "scalar": 3.5,
}


@pytest.mark.parametrize(
    "check",
    [
        'min(data["train/reward"]) == 0.1',
        'max(data["train/reward"]) == 0.8',
        'first(data["train/reward"]) == 0.1',
        'last(data["train/reward"]) == 0.8',
        'mean(data["train/reward"]) == 0.4',
        'mean(data["train/reward"], 2) == 0.5',
        'mean(data["train/reward"], 2, 4) == 0.35',
        'mean(data["train/reward"], -2) == 0.55',
        'mean(data["train/reward"], -3, -1) == 0.35',
        'mean(data["train/reward"], ignore_top_p=0.25) < 0.3',
        'median(data["train/reward"], 1, 4) == 0.3',
        'ratio_above(data["train/reward"], 0.4) == 0.5',
        'mean(data["late"], -2) == 2.5',
        'mean(data["late"], 12, 13) == 2.0',
        'last(data["strings"]) == 7.0',
        'data["train/reward"][3] == 0.3',
        'data["scalar"] > 3',
        'abs(-1 * first(data["late"])) == 1',
        'len(data["late"]) == 3',
        '0.7 < last(data["train/reward"]) <= 0.8',
        'last(data["late"]) > 1 and not first(data["late"]) > 1',
        '"late" in data and "missing" not in data',
        'last(data["train/reward"]) - first(data["train/reward"]) >= 0.5',
    ],
)
def test_checks_that_hold(check: str) -> None:
    outcome = check_metrics.evaluate_check(DATA, check)
    assert outcome.passed, outcome


@pytest.mark.parametrize(
    ("check", "value"),
    [
        ('min(data["train/reward"]) > 0.1', "0.1"),
        ('mean(data["late"], -2) < 2.5', "2.5"),
        ('last(data["late"]) > 1 and first(data["late"]) > 1', "3, 1"),
    ],
)
def test_checks_that_do_not_hold_show_the_value(check: str, value: str) -> None:
    assert check_metrics.evaluate_check(DATA, check) == (False, value, "")


@pytest.mark.parametrize(
    ("check", "message"),
    [
        ('max(data["train/rewrd"]) > 0', "no metric 'train/rewrd'; near it: train/reward"),
        ('max(data["broken"]) > 0', "the value at step 2 is not a finite number"),
        ('min(data["nan"]) < 1', "the value at step 1 is not a finite number"),
        ('mean(data["late"], 1, 11) > 0', "no value in steps 1 to 10; steps are 11 to 13"),
        ('mean(data["late"])', "not a comparison"),
        ("max(data) > 0", "expected one metric"),
        ('max(data["late"], 3) > 0', "TypeError"),
        ('mean(data["late"], ignore_top_p=2) > 0', "ignore_top_p"),
        ('data["scalar"] >', "SyntaxError"),
        ('data["scalar"] / 0 > 1', "ZeroDivisionError"),
        ('max(data["scalar"]) > 1', "expected a metric"),
        ('__import__("os").getcwd() == ""', "Attribute is not allowed"),
        ("data.__class__ == 1", "Attribute is not allowed"),
        ('open("/etc/passwd") == 1', "unknown name 'open'"),
        ("[x for x in data] == 1", "is not allowed"),
        ("(lambda: 1)() == 1", "is not allowed"),
        ("9 ** 9 ** 9 > 1", "Pow is not allowed"),
    ],
)
def test_checks_that_cannot_be_evaluated_fail_with_a_reason(check: str, message: str) -> None:
    outcome = check_metrics.evaluate_check(DATA, check)
    assert not outcome.passed
    assert message in outcome.message or message in outcome.value


def run_script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TESTS / f"{name}.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_checks_a_real_log_and_its_tensorboard_dump(tmp_path: Path) -> None:
    config = LoggerConfig(log_dir=str(tmp_path), report=False)
    for resume_step, steps in ((None, range(1, 6)), (3, range(4, 7))):  # steps 4 and 5 are logged twice
        with Logger(config, run_config={}, resume_step=resume_step) as logger:
            for step in steps:
                logger.log_metrics({"reward": step / 8 if resume_step is None else float(step)}, step, prefix="train")
    dumped = tmp_path / "dump.json"
    dump = run_script("json_dump_tb_logs", str(tmp_path / "tensorboard"), "--output_path", str(dumped))
    assert dump.returncode == 0, dump.stderr
    expected = {"1": 0.125, "2": 0.25, "3": 0.375, "4": 4.0, "5": 5.0, "6": 6.0}
    assert json.loads(dumped.read_text()) == {"train/reward": expected}
    good, bad = 'mean(data["train/reward"], -3) == 5', 'len(data["train/reward"]) == 7'
    for file in (str(dumped), str(tmp_path / "metrics.jsonl")):
        passed = run_script("check_metrics", file, good)
        assert (passed.returncode, "PASS" in passed.stdout) == (0, True), passed
        failed = run_script("check_metrics", file, good, bad)
        assert failed.returncode == 1
        assert bad in failed.stdout
        assert "FAIL" in failed.stdout


def test_an_unreadable_file_is_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_metrics.main([str(tmp_path / "none.jsonl"), "1 == 1"]) == 2
    (tmp_path / "list.json").write_text("[]")
    assert check_metrics.main([str(tmp_path / "list.json"), "1 == 1"]) == 2
    assert "not a JSON object" in capsys.readouterr().err


def test_runs_that_disagree_are_reported_on_request(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", 2.0)):
        with Logger(LoggerConfig(log_dir=str(tmp_path / name), report=False), run_config={}) as logger:
            logger.log_metrics({"x": value}, 1)
    assert json_dump_tb_logs.read_scalars(tmp_path)["x"][1] in (1.0, 2.0)
    with pytest.raises(json_dump_tb_logs.ConflictError, match="x at step 1"):
        json_dump_tb_logs.read_scalars(tmp_path, error_on_conflicts=True)


def test_a_directory_without_event_files_is_an_error(tmp_path: Path) -> None:
    assert json_dump_tb_logs.main([str(tmp_path)]) == 1
