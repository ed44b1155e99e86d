"""Mathematical answers, compared with the expected one by math-verify."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from nemo_rl.environments.math_job import MathJob
from nemo_rl.environments.metrics import score_metrics
from nemo_rl.environments.scoring_pool import ScoringPool

if TYPE_CHECKING:
    from nemo_rl.environments.config import MathEnvConfig

SECONDS_PER_ANSWER = 5.0


class MathEnvironment(EnvironmentInterface):
    r"""Rewards 1.0 for a response whose answer equals `metadata["ground_truth"]`, else 0.0.

    The answer is what math-verify extracts: the content of `\boxed{}`, LaTeX, or a plain number or expression.
    """

    def __init__(self, cfg: MathEnvConfig) -> None:
        """Start the first verifier process; the others follow with the first batch.

        Args:
            cfg: `env.math`.
        """
        self._pool = ScoringPool("math", num_workers=cfg.num_workers, seconds_per_job=SECONDS_PER_ANSWER)
        self._pool.start()

    def step(self, responses: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> EnvironmentReturn:
        """Score responses; an answer that takes too long to compare scores 0 and is counted in `scoring_timeouts`."""
        jobs = [MathJob(text, data["ground_truth"]) for text, data in zip(responses, metadata, strict=True)]
        scored = self._pool.score(jobs)
        answers = [item.answer for item in scored]
        return EnvironmentReturn([item.score for item in scored], answers, score_metrics(responses, answers, scored))

    def shutdown(self) -> None:
        """End the verifier processes."""
        self._pool.shutdown()
