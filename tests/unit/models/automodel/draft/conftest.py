"""Gloo ranks and tiny policies for the draft's tests."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("nemo_automodel")

import torch.distributed as dist

from tests.tiny_models import write_tiny_policy
from tests.unit.models.policy.gloo_pool import GlooPool


class _ThisProcess:
    """One rank without a process of its own: its imports are paid already."""

    def __init__(self) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def run(self, fn, *args, **kwargs):
        return [fn(*args, **kwargs)]

    def close(self) -> None:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def draft_pools(two_ranks: GlooPool):
    """One and two ranks. This process leaves its group behind each module: others form their own."""
    alone = _ThisProcess()
    yield {1: alone, 2: two_ranks}
    alone.close()


@pytest.fixture(scope="session")
def draft_policy_dir(tmp_path_factory) -> str:
    return str(write_tiny_policy(tmp_path_factory.mktemp("draft_policy"), layers=4, heads=4, kv=2))
