"""Which device a run uses, decided without importing torch."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_rl.errors import ConfigError

if TYPE_CHECKING:
    from nemo_rl.algorithms.config import Device

DEVICES = ("auto", "cuda", "cpu")


def resolve_device(device: str) -> Device:
    """Turn ``cluster.device`` into the device that the workers use.

    Args:
        device: "auto", "cuda" or "cpu". "auto" is CUDA where the installed torch can use a visible GPU.

    Returns:
        "cuda" or "cpu".

    Raises:
        ConfigError: unknown name, or CUDA asked for where torch cannot use one. A driver that joins a cluster through
            ``RAY_ADDRESS`` may sit on a node without GPU: there "cuda" is taken at its word.
    """
    if device not in DEVICES:
        raise ConfigError(f"cluster.device: got {device!r}; must be one of {', '.join(DEVICES)}.")
    if device == "cpu":
        return "cpu"
    if device == "cuda" and is_joining_cluster():
        return "cuda"
    obstacle = cuda_obstacle()
    if obstacle is None:
        return "cuda"
    if device == "cuda":
        raise ConfigError(
            f"cluster.device: got 'cuda', but {obstacle}; allowed here: 'cpu' or 'auto'. "
            "Set cluster.device=cpu, or install the CUDA build of torch on a machine with a visible NVIDIA GPU."
        )
    return "cpu"


def is_joining_cluster() -> bool:
    """Whether ``RAY_ADDRESS`` asks for a cluster that already runs."""
    return os.environ.get("RAY_ADDRESS", "") not in ("", "local")


def cuda_obstacle() -> str | None:
    """Say why torch cannot use CUDA on this machine, or None when it can."""
    if torch_cuda_version() is None:
        return "the installed torch has no CUDA support"
    if visible_gpu_count() == 0:
        return "no NVIDIA GPU is visible"
    return None


def torch_cuda_version() -> str | None:
    """CUDA version that the installed torch was built for; None for a CPU build or without torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    match = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", text, flags=re.MULTILINE)
    return match.group(1) if match else None


def visible_gpu_count() -> int:
    """Number of NVIDIA GPUs that ``CUDA_VISIBLE_DEVICES`` leaves visible; does not initialise CUDA."""
    present = _nvml_gpu_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or present == 0:
        return present
    listed = [entry.strip() for entry in visible.split(",") if entry.strip()]
    # CUDA stops at the first entry that names no device.
    usable = 0
    for entry in listed:
        if entry.isdigit() and int(entry) >= present:
            break
        if not entry.isdigit() and not entry.startswith(("GPU-", "MIG-")):
            break
        usable += 1
    return usable


def _nvml_gpu_count() -> int:
    """Ask the driver's management library; 0 where it is missing or refuses."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    if nvml.nvmlInit_v2() != 0:
        return 0
    count = ctypes.c_uint()
    status = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    nvml.nvmlShutdown()
    return count.value if status == 0 else 0
