from __future__ import annotations

import os
import subprocess
import sys

import pytest

from nemo_rl.distributed import device
from nemo_rl.distributed.environment import worker_env
from nemo_rl.errors import ConfigError


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def test_agrees_with_torch_about_this_machine() -> None:
    torch = pytest.importorskip("torch")
    assert device.torch_cuda_version() == torch.version.cuda
    assert device.resolve_device("auto") == ("cuda" if torch.cuda.is_available() else "cpu")
    assert device.resolve_device("cpu") == "cpu"


def test_cuda_without_a_gpu_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match=r"cluster.device: got 'cuda', but .*allowed here: 'cpu' or 'auto'"):
        device.resolve_device("cuda")
    assert device.resolve_device("auto") == "cpu"


def test_driver_of_a_joined_cluster_may_lack_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert device.resolve_device("cuda") == "cuda"


def test_unknown_device_names_the_allowed() -> None:
    with pytest.raises(ConfigError, match=r"cluster.device: got 'tpu'; must be one of auto, cuda, cpu"):
        device.resolve_device("tpu")


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, 4), ("", 0), ("-1", 0), ("1", 1), ("0,3", 2), ("0,7,1", 1), ("GPU-abc,MIG-def", 2), ("NoDevFiles", 0)],
)
def test_visible_devices_are_counted_as_cuda_does(
    visible: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "_nvml_gpu_count", lambda: 4)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert device.visible_gpu_count() == expected


def test_policy_environment() -> None:
    env = worker_env("policy", device="cpu")
    one_thread = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    assert env.items() >= (one_thread | {"GLOO_SOCKET_IFNAME": "lo"}).items()
    assert not [name for name in env if name.startswith(("VLLM", "NCCL"))]
    assert worker_env("policy", device="cuda")["NCCL_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in worker_env("policy", device="cuda", is_single_machine=False)


def test_generation_environment_gives_each_engine_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5, 2})
    envs = [worker_env("generation", device="cpu", rank=rank) for rank in range(3)]
    assert [env["VLLM_CPU_OMP_THREADS_BIND"] for env in envs] == ["2", "5", "2"]
    assert envs[0]["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert envs[0]["VLLM_NO_USAGE_STATS"] == "1"
    assert envs[0]["VLLM_HOST_IP"] == "127.0.0.1"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in worker_env("generation", device="cuda")
    assert "VLLM_HOST_IP" not in worker_env("generation", device="cuda", is_single_machine=False)


def test_hub_settings_pass_through_when_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    env = worker_env("policy", device="cpu")
    assert env["HF_HUB_OFFLINE"] == "1"
    assert "HF_TOKEN" not in env


def test_unknown_role_is_refused() -> None:
    with pytest.raises(ValueError, match="role: got 'reward'"):
        worker_env("reward", device="cpu")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("nemo_rl.distributed", {"torch", "ray", "numpy"}),
        ("nemo_rl.distributed.device", {"torch", "ray"}),
        ("nemo_rl.distributed.environment", {"torch", "ray"}),
        ("nemo_rl.distributed.named_sharding", {"torch", "ray"}),
        ("nemo_rl.distributed.worker_groups", {"torch", "vllm", "transformers"}),
    ],
)
def test_import_stays_light(module: str, forbidden: set[str]) -> None:
    code = f"import sys, {module}; sys.exit(' '.join(sorted({forbidden!r} & set(sys.modules))))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""
