"""Two gloo ranks that the tests of policy and draft share: their imports are paid once per test process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.unit.models.policy.gloo_pool import GlooPool


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[GlooPool]:
    # Imported here: the tests of the generation need no torch.distributed.
    from tests.unit.models.policy.gloo_pool import GlooPool

    pool = GlooPool(2)
    yield pool
    pool.close()
