"""Answers to reasoning-gym questions, scored by the task that asked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from nemo_rl.environments.metrics import score_metrics
from nemo_rl.environments.reasoning_gym_scoring import ReasoningGymJob
from nemo_rl.environments.scoring_pool import ScoringPool
from nemo_rl.environments.scoring_worker import Scored
from nemo_rl.errors import ConfigError

if TYPE_CHECKING:
    from nemo_rl.environments.config import ReasoningGymEnvConfig

SECONDS_PER_ANSWER = 5.0
UNANSWERED = Scored(0.0, None, "ok")


class ReasoningGymEnvironment(EnvironmentInterface):
    """Rewards what the task's `score_answer` says, and 0.0 for a response without an answer."""

    def __init__(self, cfg: ReasoningGymEnvConfig) -> None:
        """Compile the expression and start a scoring process: several tasks evaluate answers symbolically and can hang.

        Args:
            cfg: `env.reasoning_gym`.

        Raises:
            ConfigError: the expression is not valid or has no group.
        """
        key = "env.reasoning_gym.answer_regex"
        try:
            self._pattern = re.compile(cfg.answer_regex, re.DOTALL)
        except re.error as err:
            raise ConfigError(
                f"{key}: got {cfg.answer_regex!r}; must be a regular expression ({err}). Correct it."
            ) from err
        if self._pattern.groups < 1:
            raise ConfigError(
                f"{key}: got {cfg.answer_regex!r}; must have a group around the answer. Write '<answer>(.*?)</answer>'."
            )
        self._pool = ScoringPool("reasoning_gym", num_workers=cfg.num_workers, seconds_per_job=SECONDS_PER_ANSWER)
        self._pool.start()

    def step(self, responses: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> EnvironmentReturn:
        """Score responses; the last match in a response is its answer, without surrounding space."""
        answers = [self._answer(text) for text in responses]
        jobs, places = [], []
        for place, (answer, data) in enumerate(zip(answers, metadata, strict=True)):
            if answer is not None:
                jobs.append(ReasoningGymJob(answer, data["task"], data["task_kwargs"], data["entry"]))
                places.append(place)
        scored = [UNANSWERED] * len(answers)
        for place, outcome in zip(places, self._pool.score(jobs), strict=True):
            scored[place] = outcome
        return EnvironmentReturn([item.score for item in scored], answers, score_metrics(responses, answers, scored))

    def shutdown(self) -> None:
        """End the scoring processes."""
        self._pool.shutdown()

    def _answer(self, response: str) -> str | None:
        answer = None
        for match in self._pattern.finditer(response):
            answer = match.group(1)
        return None if answer is None else answer.strip()
