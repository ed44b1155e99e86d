"""What directories mark: a test whose package is missing is skipped with that reason, and groups stay together."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

FILES = ("tests/unit/models/automodel/test_checkpoint_index.py", "tests/functional/test_bad_input.py")
ROOT = Path(__file__).resolve().parents[3]
PYTEST_WITHOUT = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == sys.argv[1] else find(name, *rest)
import pytest
sys.exit(pytest.main([*sys.argv[2:], "-q", "-p", "no:cacheprovider"]))
"""


def test_missing_package_skips_what_directories_mark() -> None:
    """One test file of each kind: unit tests that load a model, and functional ones that need everything."""
    done = subprocess.run(
        [sys.executable, "-c", PYTEST_WITHOUT, "nemo_automodel", *FILES],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for file in FILES:
        assert re.search(rf"SKIPPED \[\d+\] {file}:\d+: automodel: nemo_automodel not installed", done.stdout)
    assert " skipped" in done.stdout
    assert " passed" not in done.stdout


def test_groups_are_known_to_whoever_hands_out_tests() -> None:
    """A file's fixtures are made once; depends on pytest and pytest-xdist alike, and on the order of hooks."""
    file = "tests/functional/test_bad_input.py"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", file, "-k", "test_unknown_flag or test_an_unknown_layout"),
            *("-n", "2", "--dist", "loadgroup", "-v", "-p", "no:cacheprovider"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.findall(r"^\[(gw\d)\] .* PASSED (\S+)", done.stdout, flags=re.MULTILINE)
    assert len(passed) >= 2
    assert {name.rpartition("@")[2] for _, name in passed} == {"test_bad_input"}
    assert len({worker for worker, _ in passed}) == 1
