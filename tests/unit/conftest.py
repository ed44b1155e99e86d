"""Markers of the unit tests: which a directory implies, and when a marked test cannot run here."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from nemo_rl.distributed.device import cuda_obstacle

_HERE = Path(__file__).parent
_IMPLIED_MARKERS = {"models/automodel": "automodel", "models/policy": "automodel"}
"""Directory -> marker of every test in it."""

_ENGINE_DIRECTORIES = ("distributed/", "models/generation/")
"""What `make test` runs apart from the other unit tests."""

_NEEDED_PACKAGES = {"automodel": ("torch", "nemo_automodel"), "vllm": ("vllm",), "ray": ("ray",)}


def _obstacle(marker: str) -> str | None:
    """Say why tests with a marker cannot run here; None = they can."""
    if marker == "gpu":
        return cuda_obstacle()
    missing = [name for name in _NEEDED_PACKAGES[marker] if importlib.util.find_spec(name) is None]
    return f"{', '.join(missing)} not installed" if missing else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Add the implied markers, and skip marked tests whose needs are not met."""
    obstacles = {marker: _obstacle(marker) for marker in (*_NEEDED_PACKAGES, "gpu")}
    for item in items:
        if not item.path.is_relative_to(_HERE):
            continue
        where = item.path.relative_to(_HERE).as_posix()
        for directory, marker in _IMPLIED_MARKERS.items():
            if where.startswith(f"{directory}/"):
                item.add_marker(marker)
        if where.startswith(_ENGINE_DIRECTORIES):
            # `--dist loadgroup`: Ray clusters in one process, one after the other, in-process engines in another.
            group = "engines" if item.get_closest_marker("ray") is None else "clusters"
            item.add_marker(pytest.mark.xdist_group(group))
        for marker, obstacle in obstacles.items():
            if obstacle is not None and item.get_closest_marker(marker) is not None:
                item.add_marker(pytest.mark.skip(reason=f"{marker}: {obstacle}"))
