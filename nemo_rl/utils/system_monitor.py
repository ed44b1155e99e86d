"""Samples load and memory of the driver's machine, and of its NVIDIA GPUs where ``nvidia-smi`` exists, in a thread.

Every sample goes to ``<log_dir>/system_metrics.jsonl`` with its time; the averages since the last step join that
step's row of metrics. Only the machine of the driver is watched.
"""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import threading
import time
from pathlib import Path

_log = logging.getLogger(__name__)

SYSTEM_METRICS_FILE = "system_metrics.jsonl"
_GIB = float(1 << 30)
_SMI_QUERY = ("--query-gpu=index,utilization.gpu,memory.used", "--format=csv,noheader,nounits")


class SystemMonitor:
    """Background sampler; create, `start`, `take_averages` once per step, `stop`."""

    def __init__(self, log_dir: Path, *, collection_interval: float, flush_interval: float) -> None:
        """Prepare the sampler.

        Args:
            log_dir: Where ``system_metrics.jsonl`` is appended to.
            collection_interval: Seconds between samples.
            flush_interval: Seconds between writes of the collected samples to the file.
        """
        import psutil  # only where the monitor is switched on

        self._psutil = psutil
        self._path = log_dir / SYSTEM_METRICS_FILE
        self._collection_interval = float(collection_interval)
        self._flush_interval = float(flush_interval)
        self._nvidia_smi = shutil.which("nvidia-smi")
        self._lock = threading.Lock()
        self._since_step: list[dict[str, float]] = []
        self._unwritten: list[str] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="system-monitor", daemon=True)

    def start(self) -> None:
        """Begin sampling."""
        self._psutil.cpu_percent()  # the first call only sets the reference point
        self._thread.start()

    def stop(self) -> None:
        """End sampling and write what is left."""
        self._stopping.set()
        self._thread.join()
        self._flush()

    def take_averages(self) -> dict[str, float]:
        """Mean of every quantity since the last call; empty when no sample was taken in between."""
        with self._lock:
            samples, self._since_step = self._since_step, []
        names = sorted({name for sample in samples for name in sample})
        by_name = {name: [sample[name] for sample in samples if name in sample] for name in names}
        return {name: sum(values) / len(values) for name, values in by_name.items()}

    def _run(self) -> None:
        last_flush = time.monotonic()
        while not self._stopping.wait(self._collection_interval):
            sample = self._sample()
            with self._lock:
                self._since_step.append(sample)
                self._unwritten.append(json.dumps({"time": time.time(), "metrics": sample}))
            if time.monotonic() - last_flush >= self._flush_interval:
                self._flush()
                last_flush = time.monotonic()

    def _sample(self) -> dict[str, float]:
        memory = self._psutil.virtual_memory()
        sample = {
            "system/cpu_percent": float(self._psutil.cpu_percent()),
            "system/memory_used_gib": (memory.total - memory.available) / _GIB,
        }
        if self._nvidia_smi is not None:
            sample |= self._sample_gpus()
        return sample

    def _sample_gpus(self) -> dict[str, float]:
        try:
            output = subprocess.run(
                [str(self._nvidia_smi), *_SMI_QUERY], capture_output=True, text=True, timeout=30, check=True
            ).stdout
        except (OSError, subprocess.SubprocessError) as err:
            _log.warning("nvidia-smi failed, GPU metrics end here: %s", err)
            self._nvidia_smi = None
            return {}
        return parse_nvidia_smi(output)

    def _flush(self) -> None:
        with self._lock:
            lines, self._unwritten = self._unwritten, []
        if lines:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write("\n".join(lines) + "\n")


def parse_nvidia_smi(output: str) -> dict[str, float]:
    """Read ``index, utilization.gpu, memory.used`` rows in CSV without header and units.

    Args:
        output: For example ``0, 87, 60321``; a field that a device does not report is ``[N/A]`` and left out.

    Returns:
        ``system/gpu.{i}.util_percent`` and ``system/gpu.{i}.memory_used_gib`` by device index.
    """
    metrics: dict[str, float] = {}
    for line in output.strip().splitlines():
        index, utilization, memory_mib = (field.strip() for field in line.split(","))
        if utilization.replace(".", "", 1).isdigit():
            metrics[f"system/gpu.{index}.util_percent"] = float(utilization)
        if memory_mib.replace(".", "", 1).isdigit():
            metrics[f"system/gpu.{index}.memory_used_gib"] = float(memory_mib) / 1024.0
    return metrics
