from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from nemo_rl.algorithms.config import ClusterConfig
from nemo_rl.distributed import ray_runtime
from nemo_rl.errors import ConfigError

HERE = Path(__file__).parent
SIGNALS = {"sigint": signal.SIGINT, "sigkill": signal.SIGKILL}


class Ended:
    """A finished driver: its exit status, what it said had been started, and what it printed."""

    def __init__(self, returncode: int, report: dict, stderr: str, log_dir: Path) -> None:
        self.returncode, self.report, self.stderr, self.log_dir = returncode, report, stderr, log_dir

    def survivors(self, *, besides: tuple[str, ...] = ()) -> list[str]:
        found = []
        for pid, created in self.report["processes"].items():
            try:
                process = psutil.Process(int(pid))
                if process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(" ".join(process.cmdline())[:80].strip())
            except psutil.NoSuchProcess:
                continue
        return [name for name in found if name not in besides]


def start_driver(ending: str, log_dir: Path, **env: str) -> subprocess.Popen[str]:
    clean = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    clean["PYTHONPATH"] = os.pathsep.join([str(HERE), clean.get("PYTHONPATH", "")])
    command = [sys.executable, str(HERE / "teardown_driver.py"), ending, str(log_dir)]
    return subprocess.Popen(
        command, env={**clean, **env}, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )


def finish(driver: subprocess.Popen[str], ending: str, log_dir: Path) -> Ended:
    line = driver.stdout.readline()
    assert line, driver.communicate()[1]
    if ending in SIGNALS:
        time.sleep(1.0)  # the driver is waiting for a call that never returns
        os.kill(driver.pid, SIGNALS[ending])
    _, stderr = driver.communicate(timeout=300)
    return Ended(driver.returncode, json.loads(line), stderr, log_dir)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Ended]]:
    """One driver per way to end, two at a time."""
    results: dict[str, Ended] = {}
    for endings in (("success", "error"), ("sigint", "sigkill")):
        dirs = {ending: tmp_path_factory.mktemp(ending) for ending in endings}
        drivers = {ending: start_driver(ending, directory) for ending, directory in dirs.items()}
        results |= {ending: finish(driver, ending, dirs[ending]) for ending, driver in drivers.items()}
    yield results
    shutil.rmtree(results["sigkill"].report["run_dir"], ignore_errors=True)


@pytest.mark.ray
@pytest.mark.parametrize(
    ("ending", "is_success", "said"),
    [
        ("success", True, ""),
        ("error", False, "RuntimeError: the run failed"),
        ("sigint", False, "KeyboardInterrupt"),
    ],
)
def test_driver_leaves_no_process_and_no_directory(
    ended: dict[str, Ended], ending: str, is_success: bool, said: str
) -> None:
    result = ended[ending]
    assert (result.returncode == 0) == is_success, result.stderr
    assert said in result.stderr
    assert result.report["answers"] == [[0, "x", 5]]
    assert len(result.report["processes"]) >= 4
    assert result.survivors() == []
    assert not Path(result.report["run_dir"]).exists()


@pytest.mark.ray
def test_killed_driver_takes_its_processes_with_it_and_the_next_run_its_directory(ended: dict[str, Ended]) -> None:
    result = ended["sigkill"]
    assert result.returncode == -signal.SIGKILL
    # Ray's two agents, which hold no work of ours, notice too but first wait a minute for the dead control store.
    agents = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
    deadline = time.monotonic() + 20
    while result.survivors(besides=agents) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert result.survivors(besides=agents) == []
    run_dir = Path(result.report["run_dir"])
    assert run_dir.exists()
    ray_runtime._remove_stale_run_dirs(run_dir.parent)
    assert not run_dir.exists()


@pytest.mark.ray
def test_driver_imports_no_torch_and_keeps_quiet(ended: dict[str, Ended]) -> None:
    assert ended["success"].report["imported"] == []
    assert ended["success"].stderr == ""


@pytest.mark.ray
def test_joins_ray_address_and_leaves_the_cluster_running(
    cluster_runtime: ray_runtime.RayRuntime, tmp_path: Path
) -> None:
    driver = start_driver("joined", tmp_path, RAY_ADDRESS=cluster_runtime.address)
    result = finish(driver, "joined", tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.report["run_dir"] == "None"
    assert result.report["answers"] == [[0, "x", 5]]
    assert result.report["processes"] == {}
    assert ray_runtime.init_ray(ClusterConfig()) is cluster_runtime
    assert (cluster_runtime.run_dir / "lock").exists()


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1:1", "nothing answers there within 5 s"),
        ("nonsense", "must be host:port or 'auto'"),
        ("ray://127.0.0.1:10001", "Start the driver on a machine of the cluster"),
    ],
    ids=["dead", "malformed", "client"],
)
def test_bad_ray_address_is_a_config_error(address: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=said) as caught, ray_runtime._loopback_kept_as_given(address):
        pass
    assert f"RAY_ADDRESS: got {address!r}" in str(caught.value)


def test_stale_directories_go_and_used_ones_stay(tmp_path: Path) -> None:
    used, lock = ray_runtime._make_run_dir(tmp_path)
    stale, stale_lock = ray_runtime._make_run_dir(tmp_path)
    os.close(stale_lock)
    foreign = tmp_path / "nrl-without-lock"
    foreign.mkdir()
    ray_runtime._remove_stale_run_dirs(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([used, foreign])
    assert not stale.exists()
    os.close(lock)


def test_long_temporary_directory_is_not_used_for_sockets(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    assert ray_runtime.socket_base_dir(deep) == Path("/tmp")
    assert ray_runtime.socket_base_dir("/tmp") == Path("/tmp")
    assert len(str(Path("/tmp")) + ray_runtime.LONGEST_SOCKET_TAIL) <= 107


@pytest.mark.parametrize(
    ("free_gib", "expected_mib"), [(64, 1536), (1, 307), (0.0625, 512)], ids=["capped", "share", "docker default"]
)
def test_object_store_follows_shared_memory(
    free_gib: float, expected_mib: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil._ntuple_diskusage(0, 0, int(free_gib * 2**30))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    plan = ray_runtime.plan_object_store(None, shm_dir=tmp_path, fallback_dir=Path("/disk"))
    assert plan.num_bytes // 2**20 == expected_mib
    assert plan.directory == (Path("/disk") if free_gib < 0.1 else None)


@pytest.mark.parametrize("requested", [1, 2**60])
def test_impossible_object_store_is_a_config_error(requested: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"cluster.object_store_memory: got {requested}; must lie between"):
        ray_runtime.plan_object_store(requested, shm_dir=tmp_path, fallback_dir=tmp_path)


def test_a_signal_whose_exception_was_lost_is_raised_by_the_next_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    class Finalizer:
        def __del__(self) -> None:
            ray_runtime._exit_on_signal(signal.SIGINT, None)  # Python prints and drops what a finalizer raises

    monkeypatch.setattr(ray_runtime, "_received_signal", None)
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    ray_runtime.raise_received_signal()
    Finalizer()
    with pytest.raises(KeyboardInterrupt):
        ray_runtime.raise_received_signal()
    monkeypatch.setattr(ray_runtime, "_received_signal", signal.SIGTERM)
    with pytest.raises(SystemExit, match="143"):
        ray_runtime.raise_received_signal()
