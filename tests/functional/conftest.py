"""What the tests of this directory need: all packages, and a warm-started tiny policy that they share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def tiny_policy(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Half of the demo's warm start; made by whichever test process needs it first."""
    root = tmp_path_factory.getbasetemp()
    root = root if worker_id == "master" else root.parent
    out = root / "tiny-policy"
    with FileLock(root / "tiny-policy.lock"):
        # More threads than free cores spin for each other: other files' engines run beside this.
        command = [sys.executable, str(ROOT / "tools/make_tiny_policy.py"), "--out", str(out)]
        subprocess.run([*command, "--steps", "200", "--threads", "1"], check=True, timeout=900, cwd=ROOT)
    return out


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in its own
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what all of this directory needs, and group it for `--dist loadgroup`.

    A file stays in one process, for its fixtures; scripts are handed out one by one.
    """
    here = Path(__file__).parent
    for item in items:
        if not item.path.is_relative_to(here):
            continue
        for marker in ("automodel", "vllm") if "serving" in item.path.parts else ("automodel", "vllm", "ray"):
            item.add_marker(marker)
        if not item.path.name.startswith("test_scripts_"):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
