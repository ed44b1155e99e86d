"""Environment of every test and of the processes it starts; skips what cannot run here, with its reason."""

from __future__ import annotations

import importlib.util
import os

import pytest

# Read while libraries are imported, so before the first test module. One OpenMP thread (numba's number becomes
# OpenMP's): several test files and the workers they start share the cores, and threads that outnumber the cores spin
# while they wait for each other.
for _name, _value in {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}.items():
    os.environ.setdefault(_name, _value)

_NEEDED_PACKAGES = {"automodel": ("torch", "nemo_automodel"), "vllm": ("vllm",), "ray": ("ray",)}


def _obstacle(marker: str) -> str | None:
    """Say why tests with a marker cannot run here; None = they can."""
    if marker == "gpu":
        from nemo_rl.distributed.device import cuda_obstacle  # after the environment above

        return cuda_obstacle()
    missing = [name for name in _NEEDED_PACKAGES[marker] if importlib.util.find_spec(name) is None]
    return f"{', '.join(missing)} not installed" if missing else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip marked tests whose needs are not met, after the directories have added their markers."""
    obstacles = {marker: _obstacle(marker) for marker in (*_NEEDED_PACKAGES, "gpu")}
    for item in items:
        for marker, obstacle in obstacles.items():
            if obstacle is not None and item.get_closest_marker(marker) is not None:
                item.add_marker(pytest.mark.skip(reason=f"{marker}: {obstacle}"))
