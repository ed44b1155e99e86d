"""A real checkpoint of policy and draft, killed in every phase of its save, and damaged in every kind of file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]


@pytest.mark.timeout(300)
def test_whatever_phase_a_save_is_killed_in_the_newest_whole_checkpoint_loads(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.unit.models.policy.killed_saves", str(tmp_path)]
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
