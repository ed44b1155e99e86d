"""One refit as the driver sees it: gather from the policy, apply to every engine, verified or not at all."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from nemo_rl.errors import RefitError
from nemo_rl.weight_sync.interfaces import RefitReport

if TYPE_CHECKING:
    from nemo_rl.models.generation.interfaces import GenerationInterface
    from nemo_rl.models.policy.interfaces import PolicyInterface

logger = logging.getLogger(__name__)


class WeightSynchronizer:
    """Carries the trained weights of policy and draft to the engines, both or neither."""

    def __init__(self, policy: PolicyInterface, generation: GenerationInterface) -> None:
        """Connect the two sides.

        Args:
            policy: Source of the weights.
            generation: Engines that receive them.
        """
        self._policy = policy
        self._generation = generation
        self._version = -1

    @property
    def version(self) -> int:
        """Version that the engines hold; -1 before the first update."""
        return self._version

    def sync(self, version: int, *, draft_only: bool = False) -> RefitReport:
        """Send the policy's current weights to the engines and verify what they then hold.

        Args:
            version: Number of this update; must exceed the one before.
            draft_only: Send the draft alone; the policy has not changed since an earlier update.

        Returns:
            The report of a complete update.

        Raises:
            RefitError: The update was refused (the engines still serve the old weights) or failed half way (they refuse
                to generate). The run must stop either way: policy and engines would drift apart.
        """
        if version <= self._version:
            raise RefitError(
                f"sync: got version {version}; must exceed {self._version}, which the engines hold. Number updates by "
                "the step."
            )
        start = time.perf_counter()
        payload = self._policy.weights_ref(version, draft_only=draft_only)
        gathered = time.perf_counter()
        if payload.version != version:
            raise RefitError(
                f"The policy sent version {payload.version} when asked for {version}; nothing was applied."
            )
        update = self._generation.update_weights(payload)
        applied = time.perf_counter()
        self._version = version
        if update.unchecked:
            logger.warning(
                "Refit %d: %d tensor(s) could not be read back from the engine: %s",
                version,
                len(update.unchecked),
                ", ".join(update.unchecked[:8]),
            )
        num_tensors = len(payload.manifest.wire_entries())
        return RefitReport(
            version=version,
            seconds_gather=gathered - start,
            seconds_apply=applied - gathered,
            verified=update.num_checked == num_tensors,
            num_tensors=num_tensors,
            num_checked=update.num_checked,
            unchecked=update.unchecked,
        )
