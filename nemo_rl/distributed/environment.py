"""Environment variables of worker processes: the one place that sets them.

They go to the actor's runtime environment, so they are there before the worker's first import: several are read while
torch or vLLM is being imported.
"""

from __future__ import annotations

import os
from typing import Literal

Role = Literal["policy", "generation"]

LOOPBACK = "127.0.0.1"
PASSED_THROUGH = ("HF_HOME", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN")
"""Hub settings of the driver. A local cluster inherits them; workers of a joined one would not see them."""


def worker_env(role: Role, *, device: str, rank: int = 0, is_single_machine: bool = True) -> dict[str, str]:
    """Build the environment of one worker.

    Args:
        role: "policy" (torch.distributed training) or "generation" (a vLLM engine in the worker's own process).
        device: "cuda" or "cpu", as :func:`nemo_rl.distributed.device.resolve_device` gave it.
        rank: index of the worker in its group; on CPU it chooses the core of an engine.
        is_single_machine: all workers run on this machine, so every socket stays on the loopback interface.

    Returns:
        Variable name to value, for the ``env_vars`` of a :class:`~nemo_rl.distributed.worker_groups.RayWorkerGroup`.
    """
    if role not in ("policy", "generation"):
        raise ValueError(f"role: got {role!r}; must be 'policy' or 'generation'.")
    env = {name: os.environ[name] for name in PASSED_THROUGH if name in os.environ}
    env["TOKENIZERS_PARALLELISM"] = "false"
    env["OMP_NUM_THREADS"] = "1"
    # vLLM's n-gram lookup runs on numba, which raises the process's OpenMP threads to the number of its own.
    env["NUMBA_NUM_THREADS"] = "1"
    if is_single_machine:
        env["GLOO_SOCKET_IFNAME"] = "lo"
        if device == "cuda":
            env["NCCL_SOCKET_IFNAME"] = "lo"
    if role == "generation":
        env |= _vllm_env(device=device, rank=rank, is_single_machine=is_single_machine)
    return env


def _vllm_env(*, device: str, rank: int, is_single_machine: bool) -> dict[str, str]:
    env = {
        # The engine lives in the worker's process: weight updates reach it, and vLLM is imported once.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
    }
    if is_single_machine:
        env["VLLM_HOST_IP"] = LOOPBACK
    if device == "cpu":
        # A core list; vLLM pins its threads to it, one core per engine.
        cores = sorted(os.sched_getaffinity(0))
        env["VLLM_CPU_OMP_THREADS_BIND"] = str(cores[rank % len(cores)])
    return env
