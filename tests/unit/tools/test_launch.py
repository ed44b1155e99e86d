"""The launch scripts: ray.sub with stand-ins for Slurm and Ray, the Kubernetes manifest against its recipe."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_rl.utils.config import build_master_config, load_config

ROOT = Path(__file__).resolve().parents[3]
RAY_SUB = ROOT / "tools" / "launch" / "ray.sub"
RAYJOB = ROOT / "tools" / "launch" / "rayjob.yaml"

SRUN = """#!/usr/bin/env bash
# Writes down its options, then runs what follows them, as on every node.
options=()
while [[ $1 == --* ]]; do options+=("$1"); shift; done
echo "srun ${options[*]} | $*" >> "$LOG"
exec "$@"
"""
RAY = """#!/usr/bin/env bash
# `ray start` stays until it is killed, and says when that happens; the head answers once it has been started.
echo "ray $* auth=$RAY_AUTH_MODE/${#RAY_AUTH_TOKEN}" >> "$LOG"
case "$*" in
start*--head*) [ -z "${RAY_ADDRESS:-}" ] || exit 9
    [ -z "${FAIL_HEAD:-}" ] || exit 1 ;;
esac
case "$1" in
start) trap 'echo "stopped $*" >> "$LOG"; kill $!; exit 143' TERM
    touch "$STATE/$([[ $* == *--head* ]] && echo head || echo worker)"
    sleep 60 & wait $! ;;
health-check) [ -e "$STATE/head" ] && [ -z "${NEVER_HEALTHY:-}" ] ;;
esac
"""
PYTHON = """#!/usr/bin/env bash
# Counts nodes for ray.sub; runs everything else.
case "$*" in *ray.nodes*) [ -e "$STATE/worker" ] ;; *) exec {python} "$@" ;; esac
"""


class Slurm:
    """A job on nodes that exist only in the stand-ins."""

    def __init__(self, tmp_path: Path, nodes: list[str]) -> None:
        self.directory, self.log, self.submit = tmp_path, tmp_path / "log", tmp_path / "submit"
        stubs = {
            "srun": SRUN,
            "ray": RAY,
            "python": PYTHON.format(python=sys.executable),
            "scontrol": "#!/bin/sh\nprintf '%s\\n' " + " ".join(nodes) + "\n",
            "hostname": "#!/bin/sh\necho 10.0.0.7 fe80::1\n",
        }
        for directory in ("bin", "state", "submit"):
            (tmp_path / directory).mkdir()
        for name, text in stubs.items():
            (tmp_path / "bin" / name).write_text(text)
            (tmp_path / "bin" / name).chmod(0o755)
        self.log.write_text("")

    def env(self, **settings: str) -> dict[str, str]:
        base = {
            "PATH": f"{self.directory / 'bin'}:{os.environ['PATH']}",
            "LOG": str(self.log),
            "STATE": str(self.directory / "state"),
            "SLURM_JOB_ID": "77",
            "SLURM_JOB_NODELIST": "n[1-3]",
            "SLURM_CPUS_ON_NODE": "32",
            "SLURM_SUBMIT_DIR": str(self.submit),
            "POLL_SECONDS": "1",
            "START_TIMEOUT": "20",
        }
        return {name: value for name, value in (base | settings).items() if value != "-"}

    def run(self, **settings: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(RAY_SUB)], env=self.env(**settings), capture_output=True, text=True, timeout=60, check=False
        )

    def calls(self, first: str) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if line.startswith(first)]


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    return Slurm(tmp_path, ["n1", "n2", "n3"])


def test_scripts_are_bash() -> None:
    assert subprocess.run(["bash", "-n", str(RAY_SUB)], check=False).returncode == 0
    assert os.access(RAY_SUB, os.X_OK)


def test_cluster_command_and_end(slurm: Slurm) -> None:
    command = 'echo "address $RAY_ADDRESS, setup $FROM_SETUP"; exit 7'
    done = slurm.run(COMMAND=command, SETUP="export FROM_SETUP=done", GPUS_PER_NODE="4")
    assert done.returncode == 7, done.stderr
    assert "address 10.0.0.7:6379, setup done" in done.stdout
    head, worker = slurm.calls("ray start")
    assert "--num-gpus=4 --num-cpus=32 --head --node-ip-address=10.0.0.7 --port=6379" in head
    assert "--num-gpus=4 --num-cpus=32 --address=10.0.0.7:6379" in worker
    assert head.endswith("auth=token/64")
    assert worker.split("auth=")[1] == head.split("auth=")[1]
    steps = slurm.calls("srun")
    assert any("--nodes=2 --ntasks=2 --ntasks-per-node=1 --nodelist=n2,n3" in step for step in steps)
    assert all("--nodelist=n1 " in step for step in steps if "--nodes=1 " in step)
    assert len(slurm.calls("stopped")) == 2, "Ray is taken down on every node"
    assert (slurm.submit / "logs/slurm-77/command.log").read_text().startswith("address 10.0.0.7")


def test_one_node_needs_no_workers(tmp_path: Path) -> None:
    slurm = Slurm(tmp_path, ["n1"])
    assert slurm.run(COMMAND="true").returncode == 0
    assert len(slurm.calls("ray start")) == 1


def test_container_and_mounts(slurm: Slurm) -> None:
    assert slurm.run(COMMAND="true", CONTAINER="image.sqsh", MOUNTS="/data:/data:ro").returncode == 0
    steps = [step for step in slurm.calls("srun") if "| bash" in step]
    expected = f"--container-image=image.sqsh --container-mounts={slurm.submit}:{slurm.submit},/tmp:/tmp,/data:/data:ro"
    assert steps
    assert all(expected in step for step in steps)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"SLURM_JOB_ID": "-"}, "SLURM_JOB_ID: got nothing; this script runs inside a job. Submit it with sbatch."),
        ({"GPUS_PER_NODE": "eight"}, "GPUS_PER_NODE: got 'eight'; must be a number >= 0."),
        ({"SLURM_CPUS_ON_NODE": "-"}, "CPUS_PER_NODE: got ''; must be a number >= 1."),
        ({"PORT": "80"}, "PORT: got '80'; must be a number >= 1024."),
        ({"MOUNTS": "/a:/a"}, "MOUNTS: got '/a:/a' without CONTAINER; there is nothing to mount into."),
    ],
)
def test_bad_settings_start_nothing(slurm: Slurm, settings: dict[str, str], message: str) -> None:
    done = slurm.run(COMMAND="true", **settings)
    assert done.returncode == 2
    assert done.stderr == f"ray.sub: {message}\n"
    assert slurm.log.read_text() == ""


def test_ray_that_does_not_start(slurm: Slurm) -> None:
    done = slurm.run(COMMAND="true", FAIL_HEAD="1")
    assert done.returncode == 1
    assert "Ray ended while waiting for head. Read" in done.stderr


def test_cluster_that_is_late(slurm: Slurm) -> None:
    done = slurm.run(COMMAND="true", NEVER_HEALTHY="1", START_TIMEOUT="2")
    assert done.returncode == 1
    assert "no head after 2 s (START_TIMEOUT)" in done.stderr
    assert len(slurm.calls("stopped")) == 1


def test_without_a_command_the_cluster_stays_until_the_job_ends(slurm: Slurm) -> None:
    process = subprocess.Popen(["bash", str(RAY_SUB)], env=slurm.env(), stdout=subprocess.PIPE, text=True)
    attach = slurm.submit / "logs/slurm-77/attach.sh"
    deadline = time.monotonic() + 30
    while not attach.is_file() or "--pty" not in attach.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    text = attach.read_text()
    assert "export RAY_ADDRESS=10.0.0.7:6379 RAY_AUTH_MODE=token RAY_AUTH_TOKEN=" in text
    assert "--jobid=77 --nodes=1 --ntasks=1 --nodelist=n1 --pty bash" in text
    assert attach.stat().st_mode & 0o077 == 0, "it holds the token"
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 143
    assert not attach.exists()
    assert len(slurm.calls("stopped")) == 2


# --- Kubernetes


def manifest() -> dict[str, Any]:
    return yaml.safe_load(RAYJOB.read_text(encoding="utf-8"))


def test_rayjob_fits_its_recipe() -> None:
    job = manifest()
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    words = job["spec"]["entrypoint"].split()
    assert words[:2] == ["python", "examples/run_grpo.py"]
    cfg = build_master_config(load_config(ROOT / words[3], words[4:]))
    (workers,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == cfg.cluster.num_nodes
    gpus = str(cfg.cluster.gpus_per_node)
    assert workers["rayStartParams"]["num-gpus"] == gpus
    (container,) = workers["template"]["spec"]["containers"]
    for kind in ("requests", "limits"):
        assert container["resources"][kind]["nvidia.com/gpu"] == gpus
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]
    assert head["rayStartParams"]["num-gpus"] == "0", "the head drives, it does not train"


def test_rayjob_keeps_logs_and_checkpoints_outside_the_pods() -> None:
    spec = manifest()["spec"]
    shared = [word.split("=")[1] for word in spec["entrypoint"].split() if "_dir=" in word]
    assert len(shared) == 2
    cluster = spec["rayClusterSpec"]
    templates = [cluster["headGroupSpec"]["template"], *(group["template"] for group in cluster["workerGroupSpecs"])]
    for template in templates:
        (container,) = template["spec"]["containers"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert all(path.startswith(mounts["shared"]) for path in shared)
        assert {volume["name"] for volume in template["spec"]["volumes"]} == set(mounts)
        assert "/dev/shm" in mounts.values()
    assert spec["shutdownAfterJobFinishes"] is True


def test_rayjob_names_the_ray_of_the_pinned_set() -> None:
    pins = (ROOT / "requirements" / "cpu.txt").read_text(encoding="utf-8").splitlines()
    assert f"ray=={manifest()['spec']['rayClusterSpec']['rayVersion']}" in pins
