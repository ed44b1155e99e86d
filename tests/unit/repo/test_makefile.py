"""`make environment` with a stand-in for pip: which torch it takes, and what it says when there is none for CPUs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
REQUIREMENTS = (ROOT / "requirements" / "cpu.txt").read_text(encoding="utf-8").splitlines()
TORCH = next(line for line in REQUIREMENTS if line.startswith("torch=="))
PYTHON = """#!/bin/sh
# python of a virtual environment: answers `-m pip install` from the outcomes below, runs everything else.
if [ "$2" != pip ]; then PYTHONPATH={site} exec {python} "$@"; fi
echo "$@" >> {log}
case "$*" in
*torch==*+cpu*) exit {with_tag} ;;
*torch==*) exit {without_tag} ;;
esac
"""

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def make_environment(tmp_path: Path, *, with_tag: bool, without_tag: bool, cuda: str | None) -> tuple[int, str, str]:
    """Run it; returns status, stderr and pip's arguments, one call per line."""
    venv, site, log = tmp_path / "venv", tmp_path / "site", tmp_path / "log"
    (venv / "bin").mkdir(parents=True)
    (site / "torch").mkdir(parents=True)
    (site / "torch" / "__init__.py").write_text("raise ImportError('its dependencies are not installed yet')\n")
    (site / "torch" / "version.py").write_text(f"cuda = {cuda!r}\n")
    python = venv / "bin" / "python"
    outcomes = {"with_tag": int(not with_tag), "without_tag": int(not without_tag)}
    python.write_text(PYTHON.format(site=site, python=sys.executable, log=log, **outcomes))
    python.chmod(0o755)
    done = subprocess.run(
        ["make", "environment", f"VENV={venv}"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (venv / ".installed").is_file() == (done.returncode == 0)
    return done.returncode, done.stderr, log.read_text()


def test_makefile_names_no_package_index() -> None:
    assert "://" not in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_the_cpu_build_by_its_tag(tmp_path: Path) -> None:
    status, _, calls = make_environment(tmp_path, with_tag=True, without_tag=False, cuda=None)
    assert status == 0
    assert [line.split()[-1] for line in calls.splitlines()] == [f"{TORCH}+cpu", "requirements/cpu.txt", "."]
    assert all("--no-deps" in line for line in calls.splitlines())


def test_the_plain_version_where_that_is_a_cpu_build(tmp_path: Path) -> None:
    status, _, calls = make_environment(tmp_path, with_tag=False, without_tag=True, cuda=None)
    assert status == 0
    assert [line.split()[-1] for line in calls.splitlines()][:2] == [f"{TORCH}+cpu", TORCH]


@pytest.mark.parametrize(("without_tag", "cuda"), [(True, "13.0"), (False, None)], ids=["cuda-build", "no-build"])
def test_no_cpu_build_is_an_error_that_says_what_to_do(tmp_path: Path, without_tag: bool, cuda: str | None) -> None:
    status, error, calls = make_environment(tmp_path, with_tag=False, without_tag=without_tag, cuda=cuda)
    assert status == 2
    assert f"pip found no CPU build of torch {TORCH.removeprefix('torch==')} ({TORCH}+cpu): install one into" in error
    assert "or set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU wheels, then run make again" in error
    assert len(calls.splitlines()) == 2
