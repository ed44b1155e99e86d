"""Which speculative decoding the engine runs: the user's settings merged with what the trained draft requires."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_rl.errors import ConfigError

SPEC_KEY = "policy.generation.vllm_kwargs.speculative_config"
DRAFT_KEY = "policy.draft"

EXACT_REJECTION_METHODS = frozenset({"standard", "block"})
"""Rejection sampling whose output has exactly the target's distribution."""

INEXACT_KEYS = frozenset({"synthetic_acceptance_rates", "synthetic_acceptance_length"})
"""Settings that make the engine accept tokens for another reason than the target's probabilities."""


def merge_speculative_config(
    user: Mapping[str, Any] | None, required: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """Combine `vllm_kwargs.speculative_config` with the settings that a trained draft requires.

    The user types K (`num_speculative_tokens`) and options; the draft brings method, model and whatever else it cannot
    do without. A key that both give must have the same value.

    Args:
        user: The block from the configuration, or None.
        required: What the trained draft needs, or None when no draft is trained; `user` alone then describes a draft
            that stays as it is.

    Returns:
        The engine's speculative config, or None for plain decoding.

    Raises:
        ConfigError: Contradicting keys, K missing or not a positive integer, or a setting under which the samples
            would not have the policy's distribution.
    """
    if user is None and required is None:
        return None
    user, required = dict(user or {}), dict(required or {})
    _check_exact(user)
    conflicts = [
        f"{SPEC_KEY}.{key}: got {user[key]!r}, but {DRAFT_KEY} requires {value!r}. "
        f"Remove {SPEC_KEY}.{key}: with {DRAFT_KEY}.enabled it follows from {DRAFT_KEY}, or set {DRAFT_KEY}.enabled to "
        "false to serve another draft without training it."
        for key, value in required.items()
        if key in user and user[key] != value
    ]
    if conflicts:
        raise ConfigError("\n".join(conflicts))
    merged = {**user, **required}
    k = merged.get("num_speculative_tokens")
    if not isinstance(k, int) or isinstance(k, bool) or k < 1:
        raise ConfigError(
            f"{SPEC_KEY}.num_speculative_tokens: got {k!r}; must be an integer >= 1. Set it to the number of tokens "
            "the draft proposes per step, or remove the block to decode without speculation."
        )
    return merged


def _check_exact(user: Mapping[str, Any]) -> None:
    """Refuse settings under which rollouts are not samples of the policy."""
    method = user.get("rejection_sample_method", "standard")
    if method not in EXACT_REJECTION_METHODS:
        raise ConfigError(
            f"{SPEC_KEY}.rejection_sample_method: got {method!r}; must be one of {sorted(EXACT_REJECTION_METHODS)}. "
            "The policy gradient assumes that rollouts are exact samples of the policy. Remove the key."
        )
    for key in sorted(INEXACT_KEYS & user.keys()):
        if user[key] is not None:
            raise ConfigError(
                f"{SPEC_KEY}.{key}: got {user[key]!r}; must be absent. It makes the engine accept tokens that the "
                "policy would not sample. Remove the key."
            )
