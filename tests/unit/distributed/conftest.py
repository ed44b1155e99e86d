"""Marks what needs Ray and starts one local cluster for all of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

ray = pytest.importorskip("ray")

from nemo_rl.algorithms.config import ClusterConfig  # noqa: E402  after the guard
from nemo_rl.distributed import ray_runtime  # noqa: E402  after the guard

NUM_LOGICAL_GPUS = 2


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and "cluster_runtime" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.ray)


@pytest.fixture(scope="session")
def cluster_runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ray_runtime.RayRuntime]:
    """One cluster for the session. Ray is told of two GPUs: it only counts them, so their bookkeeping runs anywhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        # Workers inherit the environment of the cluster's start: they must find cluster_workers.py.
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        patch.setattr(ray_runtime, "resolve_device", lambda _: "cuda")
        patch.setattr(ray_runtime, "visible_gpu_count", lambda: NUM_LOGICAL_GPUS)
        config = ClusterConfig(gpus_per_node=NUM_LOGICAL_GPUS, object_store_memory=128 * 2**20)
        yield ray_runtime.init_ray(config, log_dir=tmp_path_factory.mktemp("run"))
        ray_runtime.shutdown_ray()
