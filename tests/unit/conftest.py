"""Markers of the unit tests that a directory implies."""

from __future__ import annotations

from pathlib import Path

import pytest

_HERE = Path(__file__).parent
_IMPLIED_MARKERS = {"models/automodel": "automodel", "models/policy": "automodel"}
"""Directory -> marker of every test in it."""

_ENGINE_DIRECTORIES = ("distributed/", "models/generation/")
"""What `make test` runs apart from the other unit tests."""


_LONGEST = "models/policy/"
"""Files that take longest; handed out first, so that no test process is left alone with one of them at the end."""


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in its own
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Add the implied markers and groups, and put the longest files first."""
    items.sort(key=lambda item: not item.path.is_relative_to(_HERE / _LONGEST))
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
