"""A command submitted to Slurm, on one node that is this machine: `tools/launch/ray.sub` and Ray are the real ones."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 600

STAND_INS = {
    "srun": '#!/usr/bin/env bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n',
    "scontrol": "#!/bin/sh\necho n1\n",
    "hostname": "#!/bin/sh\necho 127.0.0.1\n",
}
"""What ray.sub asks Slurm and the system."""


def run_as_job(command: list[str], directory: Path) -> str:
    """Run a command on a cluster of its own; its output is the message when it fails.

    Args:
        command: joins the cluster that the script starts (`RAY_ADDRESS`).
        directory: of the stand-ins and the logs.

    Returns:
        What script and command wrote to stdout.
    """
    (directory / "bin").mkdir(parents=True)
    for name, text in STAND_INS.items():
        (directory / "bin" / name).write_text(text)
        (directory / "bin" / name).chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {
        "COMMAND": shlex.join(command),
        "PATH": f"{directory / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NODELIST": "n1",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "LOG_DIR": str(directory / "logs"),
        "GPUS_PER_NODE": "0",
        "CPUS_PER_NODE": "4",
        "PORT": str(port),
        "POLL_SECONDS": "1",
    }
    done = subprocess.run(
        ["bash", str(ROOT / "tools/launch/ray.sub")],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "ray.sub: the command ended with status 0" in done.stdout
    return done.stdout
