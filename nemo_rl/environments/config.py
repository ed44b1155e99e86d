"""Schema of `env`: what scores a response."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from nemo_rl.utils.schema import ConfigModel, NonEmptyStr


class MathEnvConfig(ConfigModel):
    """Mathematical answers, compared by math-verify."""

    num_workers: PositiveInt = 8
    """Processes that verify answers."""

    math_verify_impl: Literal["hf_math_verify"] = "hf_math_verify"
    """Library that compares answers."""


class ReasoningGymEnvConfig(ConfigModel):
    """Answers to reasoning-gym questions, scored by the task itself."""

    num_workers: PositiveInt = 1
    """Processes that score answers."""

    answer_regex: NonEmptyStr = "<answer>(.*?)</answer>"
    """Regular expression whose first group is the answer; the last match in a response counts."""


class EnvConfig(ConfigModel):
    """The environment of the run and the settings of each kind."""

    name: Literal["math", "reasoning_gym"] = "math"
    """Environment that scores the responses."""

    math: MathEnvConfig = Field(default_factory=MathEnvConfig)
    """Settings of the math environment."""

    reasoning_gym: ReasoningGymEnvConfig = Field(default_factory=ReasoningGymEnvConfig)
    """Settings of the reasoning-gym environment."""
