"""Which tests share a process when `make test` runs two at a time (pytest-xdist, `--dist loadgroup`).

Engines, Ray clusters and pools of gloo ranks are session fixtures of their directory, so the tests of a directory stay
together and each of these is started once.
"""

from __future__ import annotations

from pathlib import Path

import pytest

_HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group tests by directory; functional tests by file, each of which starts a run of its own."""
    for item in items:
        if item.path.is_relative_to(_HERE):
            where = item.path.relative_to(_HERE)
            group = where if where.parts[0] == "functional" else where.parent
            item.add_marker(pytest.mark.xdist_group(group.as_posix()))
