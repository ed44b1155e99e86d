from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from nemo_rl.utils.system_monitor import SystemMonitor, parse_nvidia_smi


def make_command(directory: Path, *, script: str) -> None:
    """Put an executable ``nvidia-smi`` into a directory."""
    path = directory / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_query_output_is_read_per_device() -> None:
    assert parse_nvidia_smi("0, 87, 60416\n1, [N/A], 512\n") == {
        "system/gpu.0.util_percent": 87.0,
        "system/gpu.0.memory_used_gib": 59.0,
        "system/gpu.1.memory_used_gib": 0.5,
    }


def test_gpus_are_sampled_through_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make_command(tmp_path, script='echo "$@" > "$0.args"; echo "0, 50, 2048"')
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monitor = SystemMonitor(tmp_path, collection_interval=1.0, flush_interval=1.0)
    sample = monitor._sample()
    assert sample["system/gpu.0.util_percent"] == 50.0
    assert sample["system/gpu.0.memory_used_gib"] == 2.0
    arguments = (tmp_path / "nvidia-smi.args").read_text().split()
    assert arguments == ["--query-gpu=index,utilization.gpu,memory.used", "--format=csv,noheader,nounits"]


def test_a_failing_command_ends_gpu_metrics_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make_command(tmp_path, script="exit 9")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monitor = SystemMonitor(tmp_path, collection_interval=1.0, flush_interval=1.0)
    assert monitor._sample().keys() == {"system/cpu_percent", "system/memory_used_gib"}
    assert monitor._nvidia_smi is None


def test_averages_cover_the_time_since_the_last_call(tmp_path: Path) -> None:
    monitor = SystemMonitor(tmp_path, collection_interval=1.0, flush_interval=1.0)
    monitor._since_step = [{"a": 1.0, "b": 5.0}, {"a": 3.0}]
    assert monitor.take_averages() == {"a": 2.0, "b": 5.0}
    assert monitor.take_averages() == {}
