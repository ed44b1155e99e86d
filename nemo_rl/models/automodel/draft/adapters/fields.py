"""What every adapter reads from a config.json: sizes, positions, feature ids. Whatever is not said is an error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nemo_rl.errors import ConfigError

__all__ = [
    "EXPORT_MARK",
    "GEOMETRY",
    "KEY",
    "KNOWN",
    "LIMITS",
    "agreed",
    "architecture_name",
    "block_at",
    "check_mask_token",
    "checked_triple",
    "default_feature_ids",
    "feature_ids_from_layer_outputs",
    "flag_at",
    "flat_rope",
    "integer_at",
    "integers_at",
    "kept_extra",
    "number_at",
    "read_geometry",
    "written_geometry",
]

KEY = "policy.draft.model_name"
EXPORT_MARK = "nemo_rl_draft"
"""Key of a config.json that this program wrote."""

GEOMETRY = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "vocab_size",
    "max_position_embeddings",
)
KNOWN = frozenset(
    {
        *GEOMETRY,
        "architectures",
        "model_type",
        "head_dim",
        "hidden_act",
        "attention_bias",
        "mlp_bias",
        "target_hidden_size",
        "draft_vocab_size",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "partial_rotary_factor",
        "tie_word_embeddings",
        "torch_dtype",
        "dtype",
        "transformers_version",
        "auto_map",
        "_name_or_path",
        EXPORT_MARK,
    }
)
"""Keys that every adapter reads or rewrites; an adapter adds its own, everything else of a source config is kept."""

LIMITS: Mapping[str, int] = {
    "hidden_size": 1 << 17,
    "target_hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "num_hidden_layers": 1 << 10,
    "num_attention_heads": 1 << 12,
    "num_key_value_heads": 1 << 12,
    "head_dim": 1 << 13,
    "vocab_size": 1 << 24,
    "draft_vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 31,
}
"""Largest size that a config.json may name: far above any model, far below what would exhaust memory or time before the
tensors in the files can contradict it."""

_MULTIMODAL_ROPE_KEYS = ("mrope_section", "mrope_interleaved")
_STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


# -- values of a JSON object, typed ----------------------------------------------------------------------------------


def block_at(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A nested object; empty when it is absent or null.

    Args:
        raw: the parsed file, or a block of it.
        key: name of the value.
    """
    value = raw.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{KEY}: its config.json has {key} {_short(value)}; must be an object. Correct the file.")
    return value


def integer_at(raw: Mapping[str, Any], key: str, *, low: int = 0, high: int = 1 << 31) -> int | None:
    """An integer from `low` to `high`; None when it is absent or null. `2.0` and `true` are no integers.

    Args:
        raw: the parsed file, or a block of it.
        key: name of the value.
        low: smallest value that makes sense.
        high: largest one.
    """
    value = raw.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(
            f"{KEY}: its config.json has {key} {_short(value)}; must be an integer from {low} to {high}. Correct the "
            "file."
        )
    return value


def number_at(raw: Mapping[str, Any], key: str) -> float | None:
    """A finite number; None when it is absent or null.

    Args:
        raw: the parsed file, or a block of it.
        key: name of the value.
    """
    value = raw.get(key)
    if value is None:
        return None
    # An integer of hundreds of digits is no float either.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= 1e300:
        raise ConfigError(
            f"{KEY}: its config.json has {key} {_short(value)}; must be a finite number. Correct the file."
        )
    return float(value)


def flag_at(raw: Mapping[str, Any], key: str) -> bool | None:
    """True or false; None when it is absent or null.

    Args:
        raw: the parsed file, or a block of it.
        key: name of the value.
    """
    value = raw.get(key)
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"{KEY}: its config.json has {key} {_short(value)}; must be true or false. Correct the file.")
    return value


def integers_at(
    raw: Mapping[str, Any], key: str, *, low: int = -1, high: int = LIMITS["num_hidden_layers"]
) -> tuple[int, ...] | None:
    """A list of integers from `low` to `high`; None when it is absent, null or empty.

    Args:
        raw: the parsed file, or a block of it.
        key: name of the value.
        low: smallest value that makes sense.
        high: largest one; also bounds the length.
    """
    value = raw.get(key)
    if value is None or value == []:
        return None
    if (
        not isinstance(value, (list, tuple))
        or len(value) > high
        or any(isinstance(i, bool) or not isinstance(i, int) or not low <= i <= high for i in value)
    ):
        raise ConfigError(
            f"{KEY}: its config.json has {key} {_short(value)}; must be a list of integers from {low} to {high}. "
            "Correct the file."
        )
    return tuple(value)


def architecture_name(raw: Mapping[str, Any]) -> str | None:
    """First entry of a config.json's `architectures`, None without one.

    Args:
        raw: the parsed file.
    """
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    return name if isinstance(name, str) else None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def kept_extra(raw: Mapping[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """Fields of a source config that mean nothing here and are written back on export.

    Args:
        raw: the parsed file.
        known: keys that the adapter reads or rewrites, beside `KNOWN`.
    """
    return {key: value for key, value in raw.items() if key not in KNOWN and key not in known}


def agreed(raw: Mapping[str, Any], nested: Mapping[str, Any], key: str, *, default: Any) -> Any:
    """A value that may be at top level, inside a nested block, or in both places with one value.

    Args:
        raw: the parsed file.
        nested: a block of it, e.g. its `eagle_config`.
        key: name of the value in both.
        default: when neither has it.
    """
    if key in raw and key in nested and raw[key] != nested[key]:
        raise ConfigError(
            f"{KEY}: its config.json says {key} is {raw[key]!r} at top level and {nested[key]!r} further in. Make them "
            "equal."
        )
    return raw.get(key, nested.get(key, default))


def read_geometry(raw: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Arguments of `DraftArchitecture` other than the feature ids.

    Args:
        raw: the parsed file, or the part of it that describes the layers.
        family: `llama` or `qwen3`.
    """
    missing = [key for key in GEOMETRY if raw.get(key) is None]
    if missing:
        raise ConfigError(f"{KEY}: its config.json lacks {missing}. Add them; nothing is guessed.")
    sizes = {key: integer_at(raw, key, low=1, high=high) for key, high in LIMITS.items()}
    for key in ("attention_bias", "mlp_bias"):
        if flag_at(raw, key):
            raise ConfigError(f"{KEY}: {key} is true; drafts with biases are not supported. Use another draft.")
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{KEY}: hidden_act is {raw['hidden_act']!r}; must be silu. Use another draft.")
    if raw.get("quantization_config"):
        raise ConfigError(
            f"{KEY}: the draft is quantized; a draft to be trained must not be. Use its full-precision form."
        )
    eps = number_at(raw, "rms_norm_eps")
    if eps is None or not 0 < eps < 1:
        raise ConfigError(f"{KEY}: its config.json has rms_norm_eps {eps}; must be above 0 and below 1.")
    hidden, heads = raw["hidden_size"], raw["num_attention_heads"]
    if sizes["head_dim"] is None and hidden % heads:
        raise ConfigError(
            f"{KEY}: its config.json has no head_dim, and num_attention_heads {heads} does not divide hidden_size "
            f"{hidden}. Add the head_dim that the draft was trained with."
        )
    return {key: sizes.get(key, eps) for key in GEOMETRY} | {
        "layer_family": family,
        # Without the key the engine divides; tensor shapes are checked against the result.
        "head_dim": sizes["head_dim"] or hidden // heads,
        "target_hidden_size": sizes["target_hidden_size"] or hidden,
        "draft_vocab_size": sizes["draft_vocab_size"] or raw["vocab_size"],
        "rope": flat_rope(raw, key=KEY),
    }


def written_geometry(arch: Any, *, dtype: str, algo: str) -> dict[str, Any]:
    """The part of a config.json that every export has, every field explicit.

    Args:
        arch: the draft, a `DraftArchitecture`.
        dtype: of the weights beside it.
        algo: draft algorithm, recorded so that the export is recognised as ours.
    """
    rope = dict(arch.rope)
    return dict(arch.extra) | {
        "model_type": arch.layer_family,
        **{key: getattr(arch, key) for key in GEOMETRY},
        "head_dim": arch.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "target_hidden_size": arch.target_hidden_size,
        "draft_vocab_size": arch.draft_vocab_size,
        "rope_theta": rope["rope_theta"],
        "rope_parameters": rope,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        EXPORT_MARK: {"format_version": 1, "algo": algo},
    }


def flat_rope(raw: Mapping[str, Any], *, key: str) -> dict[str, Any]:
    """One flat RoPE table of a config: both schemas are read, multimodal fields dropped, a partial factor kept.

    Args:
        raw: a config.json.
        key: YAML key named in errors.
    """
    table = dict(block_at(raw, "rope_parameters"))
    if table and all(isinstance(v, Mapping) for v in table.values()):
        if "full_attention" not in table:
            raise ConfigError(
                f"{key}: rope_parameters has tables for {sorted(table)} only; one for full_attention is needed."
            )
        table = dict(table["full_attention"])
    scaling = dict(block_at(raw, "rope_scaling"))
    table = scaling | table
    legacy_type = table.pop("type", None)
    rope_type = table.get("rope_type") or legacy_type or "default"
    theta = table.get("rope_theta", raw.get("rope_theta"))
    if theta is None:
        raise ConfigError(
            f"{key}: its config.json has neither rope_theta nor rope_parameters.rope_theta. Add the base that the "
            "model was trained with; it is never defaulted."
        )
    if "rope_theta" in raw and "rope_theta" in table and raw["rope_theta"] != table["rope_theta"]:
        raise ConfigError(f"{key}: rope_theta is {raw['rope_theta']} and {table['rope_theta']} in rope_parameters.")
    is_multimodal = rope_type == "mrope" or any(k in table for k in _MULTIMODAL_ROPE_KEYS)
    rope_type = "default" if rope_type == "mrope" else rope_type
    if rope_type not in _STATIC_ROPE_TYPES:
        raise ConfigError(
            f"{key}: rope_type is {rope_type!r}; must be one of {list(_STATIC_ROPE_TYPES)}: the frequencies of the "
            "others depend on the sequence length, so training and serving would differ."
        )
    if is_multimodal:
        table = {k: v for k, v in table.items() if k not in _MULTIMODAL_ROPE_KEYS}
    factor = table.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    out = {k: v for k, v in table.items() if v is not None} | {"rope_type": rope_type, "rope_theta": float(theta)}
    return out | ({} if factor in (None, 1, 1.0) else {"partial_rotary_factor": factor})


def check_mask_token(mask: Any, policy: Mapping[str, Any], *, vocab_size: int) -> None:
    """Refuse a placeholder that is no row of the embedding, or a token that the policy's text holds.

    Args:
        mask: what configuration or file name.
        policy: config.json of the policy (of its text part).
        vocab_size: target ids V.
    """
    if isinstance(mask, bool) or not isinstance(mask, int) or not 0 <= mask < vocab_size:
        raise ConfigError(
            f"policy.draft.mask_token_id: got {mask!r}; must be an integer from 0 to {vocab_size - 1}, a row of the "
            "embedding. Set it to a token id that never occurs (151669 for Qwen3, 128002 for Llama 3)."
        )
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        used = policy.get(key)
        if mask == used or (isinstance(used, (list, tuple)) and mask in used):
            raise ConfigError(
                f"policy.draft.mask_token_id: got {mask}, the policy's {key}; must be a token that never occurs. Set "
                "it to an unused id."
            )


# -- feature ids -----------------------------------------------------------------------------------------------------


def feature_ids_from_layer_outputs(indices: Sequence[int]) -> tuple[int, ...]:
    """0-based layer outputs, as a user writes them, to canonical ids "after l layers".

    Index -1 (the embedding) becomes 0, index 1 (output of the second layer) becomes 2.
    """
    return tuple(i + 1 for i in indices)


def default_feature_ids(num_layers: int) -> tuple[int, ...]:
    """Canonical ids that the engine assumes when a config names none: (2, N//2, N-3)."""
    return 2, num_layers // 2, num_layers - 3


def checked_triple(num_layers: int) -> tuple[int, ...]:
    """`default_feature_ids`, for a policy that has three such layers.

    Args:
        num_layers: decoder layers of the policy.
    """
    ids = default_feature_ids(num_layers)
    if not 1 <= ids[0] < ids[1] < ids[2]:
        example = list(range(min(3, max(1, num_layers - 1))))
        raise ConfigError(
            "policy.draft.aux_layer_indices: got null; the default (layers 1, N/2-1, N-4) is no three different layers "
            f"for a policy of {num_layers} layers. Set it, e.g. to {example}."
        )
    return ids
