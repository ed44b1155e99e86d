"""Gloo ranks and tiny policies for the tests of the policy workers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("torch")
pytest.importorskip("nemo_automodel")

from tests.tiny_models import write_tiny_policy
from tests.unit.models.policy.gloo_pool import GlooPool


@pytest.fixture(scope="session")
def pools(two_ranks: GlooPool) -> Iterator[dict[int, GlooPool]]:
    """One and two ranks; both start at once, because importing takes them seconds."""
    alone = GlooPool(1)
    yield {1: alone, 2: two_ranks}
    alone.close()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_policy(tmp_path_factory.mktemp("policy"), layers=2, heads=4, kv=2))


@pytest.fixture(scope="session")
def tied_model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_policy(tmp_path_factory.mktemp("tied"), layers=1, tie=True))
