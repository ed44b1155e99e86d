"""What the training loop may ask of an environment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class EnvironmentReturn:
    """Scores of a list of responses, in their order.

    Attributes:
        rewards: one per response.
        answers: the answer found in each response; None where there is none.
        metrics: name to (numerator, denominator), to be added up over calls and divided last.
    """

    rewards: list[float]
    answers: list[str | None]
    metrics: dict[str, tuple[float, float]]


class EnvironmentInterface(ABC):
    """Scores responses; one instance serves the whole run, from any thread."""

    @abstractmethod
    def step(self, responses: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> EnvironmentReturn:
        """Score responses.

        Args:
            responses: texts without special tokens.
            metadata: of the prompt behind each response (`PromptExample.metadata`).

        Returns:
            Scores and metrics.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """End the environment's processes; calling it again does nothing."""
