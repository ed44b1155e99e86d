"""Which speculative decoding the engine runs: the user's settings merged with what the trained draft requires.

Without a draft of `policy.draft` the user's block says it all: a method that needs no draft model (`ngram`, `suffix`),
or another draft that stays as it is. No torch, no vllm: the driver checks all of it before anything starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard, get_args

from nemo_rl.errors import ConfigError
from nemo_rl.models.automodel.draft.config import DraftConfig, DraftConfigBase

SPEC_KEY = "policy.generation.vllm_kwargs.speculative_config"
DRAFT_KEY = "policy.draft"

SUFFIX_PACKAGE = "arctic_inference"
"""What vLLM's suffix method imports; not part of any of our extras."""


@dataclass(frozen=True)
class _Option:
    """A key of `speculative_config` that belongs to some methods.

    Attributes:
        allowed: what a value must be, in words.
        is_valid: whether a value is that.
    """

    allowed: str
    is_valid: Callable[[Any], bool]


def _is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_int(value) or isinstance(value, float)


_COUNT = _Option("an integer >= 1", lambda value: _is_int(value) and value >= 1)
_LOOKUP = {"prompt_lookup_min": _COUNT, "prompt_lookup_max": _COUNT}

DRAFT_FREE_METHODS: Mapping[str, Mapping[str, _Option]] = {
    "ngram": _LOOKUP,
    "ngram_gpu": _LOOKUP,
    "suffix": {
        "suffix_decoding_max_tree_depth": _COUNT,
        "suffix_decoding_max_cached_requests": _Option("an integer >= 0", lambda value: _is_int(value) and value >= 0),
        "suffix_decoding_max_spec_factor": _Option("a number >= 0", lambda value: _is_number(value) and value >= 0),
        "suffix_decoding_min_token_prob": _Option(
            "a number from 0 to 1", lambda value: _is_number(value) and 0 <= value <= 1
        ),
    },
}
"""Methods that look up their proposals instead of running a model, with their options."""

_OPTION_PREFIXES = ("prompt_lookup_", "suffix_decoding_")
_MODEL_METHODS = frozenset({"custom_class", "draft_model", "medusa", "mlp_speculator"}) | {
    method for cls in get_args(get_args(DraftConfig)[0]) for method in cls.serving_methods
}
_SELF_DRAFTING_METHODS = frozenset({"mtp"})
"""Methods that need no `model`: the draft is part of the policy's checkpoint."""

KNOWN_METHODS = (*DRAFT_FREE_METHODS, *sorted(_MODEL_METHODS | _SELF_DRAFTING_METHODS))
"""Values of `method` that propose tokens."""

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


def baseline_problems(user: Mapping[str, Any], *, device: str | None = None) -> list[str]:
    """Check a speculative config that no draft of `policy.draft` completes: its method, and the options of methods.

    Args:
        user: The block from the configuration.
        device: "cuda" or "cpu", when known.

    Returns:
        One message per problem.
    """
    method, model, k = user.get("method"), user.get("model"), user.get("num_speculative_tokens")
    if method is None and model is None:
        return [
            f"{SPEC_KEY}.method: got nothing, and no draft of {DRAFT_KEY} is served; must be one of "
            f"{list(KNOWN_METHODS)}. Name one, or remove the block to decode without speculation: '~{SPEC_KEY}'."
        ]
    if method is not None and method not in KNOWN_METHODS:
        return [
            f"{SPEC_KEY}.method: got {method!r}; must be one of {list(KNOWN_METHODS)}. Correct it, or remove the block."
        ]
    found = option_problems(user, method=method)
    if not _is_int(k) or k < 1:
        got = "nothing" if k is None else repr(k)
        found.append(
            f"{SPEC_KEY}.num_speculative_tokens: got {got}; must be an integer >= 1, the tokens to propose per step. "
            "Set it, or remove the block to decode without speculation."
        )
    if method in DRAFT_FREE_METHODS and model is not None:
        found.append(
            f"{SPEC_KEY}.model: got {model!r}; must be absent with method: {method}, which runs no draft model. "
            "Remove the key."
        )
    if method in _MODEL_METHODS and model is None:
        found.append(
            f"{SPEC_KEY}.model: got nothing; must be the draft's directory with method: {method}. Set it, or set "
            f"{DRAFT_KEY}.enabled: true and {DRAFT_KEY}.model_name."
        )
    if method == "ngram_gpu" and device == "cpu":
        found.append(f"{SPEC_KEY}.method: got 'ngram_gpu'; must be 'ngram' on CPU. Change it.")
    return found


def option_problems(user: Mapping[str, Any], *, method: str | None) -> list[str]:
    """Check the options that belong to methods without a draft model.

    Args:
        user: The block from the configuration.
        method: The method in use; None = the engine finds it out from the model.

    Returns:
        One message per option that is misspelt, out of range, or of another method.
    """
    own = DRAFT_FREE_METHODS.get(method or "", {})
    found: list[str] = []
    for key, value in user.items():
        owners = [name for name, options in DRAFT_FREE_METHODS.items() if key in options]
        if key in own and not own[key].is_valid(value):
            found.append(f"{SPEC_KEY}.{key}: got {value!r}; must be {own[key].allowed}. Correct it.")
        elif owners and key not in own:
            found.append(
                f"{SPEC_KEY}.{key}: got {value!r} with method: {method or 'null'}; it is an option of "
                f"{' and '.join(map(repr, owners))}. Remove the key."
            )
        elif not owners and key.startswith(_OPTION_PREFIXES):
            names = sorted({name for options in DRAFT_FREE_METHODS.values() for name in options})
            found.append(f"{SPEC_KEY}.{key}: got an unknown key; options of this kind: {', '.join(names)}. Correct it.")
    low, high = (user.get(f"prompt_lookup_{end}") for end in ("min", "max"))
    if own is _LOOKUP and not found and low is not None and high is not None and low > high:
        found.append(f"{SPEC_KEY}.prompt_lookup_min: got {low}; must be at most prompt_lookup_max ({high}). Lower it.")
    return found


def refused_problems(user: Mapping[str, Any]) -> list[str]:
    """Refuse what the engine cannot do, whatever drafts.

    Args:
        user: The block from the configuration.

    Returns:
        One message per such key.
    """
    reasons = {key: DraftConfigBase.reason_to_refuse(key) for key in user}
    return [
        f"{SPEC_KEY}.{key}: got {user[key]!r}; must be absent: {reason} Remove the key."
        for key, reason in reasons.items()
        if reason is not None
    ]


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
