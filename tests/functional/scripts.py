"""Runs the scripts of this directory: a recipe through the real command, and checks of what it logged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
TIMEOUT_S = 900

AUTOREGRESSIVE = ("deep", "eagle1", "peagle")
BLOCK = ("dflash", "domino", "dspark")
BASELINES = ("ngram", "none", "static")
ELSEWHERE = ("eagle3",)
"""`test_grpo_resume.py` runs this recipe, with more checks."""


def run_script(name: str, policy: Path, run_dir: Path) -> None:
    """Run `grpo_tiny_{name}.sh`; its output is the message when it fails."""
    env = os.environ | {"TINY_POLICY": str(policy), "RUN_DIR": str(run_dir), "PYTHON": sys.executable}
    command = ["bash", str(HERE / f"grpo_tiny_{name}.sh")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-4000:]
