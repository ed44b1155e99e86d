"""Environment names and what they stand for: the only dispatch on `env.name`."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import TYPE_CHECKING

from nemo_rl.environments.math_environment import MathEnvironment
from nemo_rl.environments.reasoning_gym_environment import ReasoningGymEnvironment
from nemo_rl.errors import ConfigError

if TYPE_CHECKING:
    from nemo_rl.environments.config import EnvConfig
    from nemo_rl.environments.interfaces import EnvironmentInterface

ENVIRONMENTS: MappingProxyType[str, Callable[[EnvConfig], EnvironmentInterface]] = MappingProxyType(
    {
        "math": lambda cfg: MathEnvironment(cfg.math),
        "reasoning_gym": lambda cfg: ReasoningGymEnvironment(cfg.reasoning_gym),
    }
)


def create_environment(cfg: EnvConfig) -> EnvironmentInterface:
    """Create the environment that the configuration names.

    Args:
        cfg: `env`.

    Returns:
        A running environment; `shutdown` ends it.

    Raises:
        ConfigError: unknown name or unusable settings.
    """
    if cfg.name not in ENVIRONMENTS:
        raise ConfigError(
            f"env.name: got {cfg.name!r}; must be one of {', '.join(sorted(ENVIRONMENTS))}. Correct the name."
        )
    return ENVIRONMENTS[cfg.name](cfg)
