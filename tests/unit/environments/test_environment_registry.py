from __future__ import annotations

import typing

import pytest

from nemo_rl.environments.config import EnvConfig
from nemo_rl.environments.interfaces import EnvironmentInterface
from nemo_rl.environments.registry import ENVIRONMENTS, create_environment
from nemo_rl.errors import ConfigError


def test_every_configurable_name_has_an_environment() -> None:
    assert set(ENVIRONMENTS) == set(typing.get_args(EnvConfig.model_fields["name"].annotation))


@pytest.mark.parametrize("name", sorted(ENVIRONMENTS))
def test_environment_is_created_and_shut_down(name: str) -> None:
    environment = create_environment(EnvConfig(name=name))
    assert isinstance(environment, EnvironmentInterface)
    environment.shutdown()
    environment.shutdown()


def test_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"env\.name: got 'chess'; must be one of math, reasoning_gym"):
        create_environment(EnvConfig().model_copy(update={"name": "chess"}))
