"""Base class and field helpers of the configuration schema.

Each section of the configuration is a frozen pydantic model that rejects unknown keys. A default lives on its field
and nowhere else. A default that follows another key is written as an interpolation on the field:

    max_new_tokens: PositiveInt = interpolated("${policy.max_total_sequence_length}")

`nemo_rl.utils.config.build_master_config` fills in missing keys and resolves interpolations before it validates, so a
validated configuration never holds one.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from nemo_rl.errors import ConfigError

NonEmptyStr = Annotated[str, StringConstraints(min_length=1)]
"""A string with at least one character."""

Probability = Annotated[float, Field(ge=0.0, le=1.0)]
"""A number from 0 to 1."""

FreeForm = dict[str, Any]
"""A block whose keys are those of another library; passed on as it is."""


class ConfigModel(BaseModel):
    """A section of the configuration: frozen, strictly typed, unknown keys refused."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        validate_default=True,
    )

    refused_keys: ClassVar[Mapping[str, str]] = {}
    """Patterns of keys that other programs have, each with a sentence that says why they do not exist here."""

    @classmethod
    def reason_to_refuse(cls, key: str) -> str | None:
        """Why a key does not exist in this section; None = it is just unknown.

        Args:
            key: Its last part.
        """
        return next((reason for pattern, reason in cls.refused_keys.items() if fnmatchcase(key, pattern)), None)


class ConfigConflicts(ConfigError):
    """Values that are legal alone but not together.

    Attributes:
        conflicts: One complete message per conflict, in key order.
    """

    def __init__(self, conflicts: list[str]) -> None:
        """Store the messages.

        Args:
            conflicts: One complete message per conflict.
        """
        super().__init__("\n".join(conflicts))
        self.conflicts = conflicts


def interpolated(expression: str) -> Any:
    """Declare a field whose default follows another key.

    Args:
        expression: OmegaConf interpolation with absolute keys, e.g. ``"${policy.precision}"``.

    Returns:
        A pydantic field. Constructing its model directly without a value fails on the type of the field; only
        `nemo_rl.utils.config.build_master_config` resolves the expression.
    """
    return Field(default=expression)
