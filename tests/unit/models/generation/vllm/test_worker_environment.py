"""The configuration alone decides: no variable of the caller's environment reaches past it into the engine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.unit.models.generation.vllm.conftest import generation_config, make_worker


def test_the_cache_size_is_not_read_from_the_environment(
    model_dirs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "40")
    make_worker(model_dirs[0], generation_config())
    assert "VLLM_CPU_KVCACHE_SPACE" not in os.environ
