"""What every adapter reads from a config.json: sizes, positions, feature ids. Whatever is not said is an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nemo_rl.errors import ConfigError
from nemo_rl.utils.safe_files import shown

__all__ = [
    "EXPORT_MARK",
    "GEOMETRY",
    "KEY",
    "KNOWN",
    "LAYER",
    "LIMITS",
    "SPECULATORS_KNOWN",
    "WINDOW_KEYS",
    "agreed",
    "architecture_name",
    "block_at",
    "check_mask_token",
    "checked_triple",
    "default_feature_ids",
    "export_algo",
    "feature_ids_from_layer_outputs",
    "flag_at",
    "flat_rope",
    "integer_at",
    "integers_at",
    "is_speculators",
    "kept_extra",
    "number_at",
    "positive_integer_at",
    "read_geometry",
    "read_layer",
    "refuse_windows",
    "speculators_extra",
    "verifier_name",
    "written_geometry",
    "written_speculators",
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
    "max_position_embeddings": 1 << 24,
}
"""Largest size that a config.json may name: far above any model, far below what would exhaust memory or time before the
tensors in the files can contradict it."""

LAYER = "transformer_layer_config"
"""Block of the speculators layout that describes the decoder layers; the engine takes it for the draft's config."""

SPECULATORS_KNOWN = frozenset(
    {
        "speculators_model_type",
        "speculators_version",
        "speculators_config",
        LAYER,
        "aux_hidden_state_layer_ids",
        "eagle_aux_hidden_state_layer_ids",
        "num_aux_hidden_states",
        "embed_requires_grad",
    }
)
"""Keys of that layout which are rewritten for every algorithm."""

_SPECULATORS_VERSION = "0.9.0"
"""Version of the library whose form is written."""

WINDOW_KEYS = frozenset({"layer_types", "sliding_window", "use_sliding_window", "max_window_layers"})
"""Keys about sliding windows, which no draft here has; not written back, for they would speak of other layers."""

_MAX_NESTING = 32
"""Deepest value of a config.json that is written back."""

_MULTIMODAL_ROPE_KEYS = ("mrope_section", "mrope_interleaved")
_FOREIGN_ROPE_KEYS = ("rope_dim", "use_fope")
"""Entries that change the engine's table and that training does not read."""

_ROPE_NUMBERS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    ),
}
"""Type of a RoPE table whose frequencies do not depend on the sequence -> numbers that it needs, and may have."""


# -- values of a JSON object, typed ----------------------------------------------------------------------------------


def _wrong(of: str, key: str, value: Any, allowed: str) -> ConfigError:
    return ConfigError(f"{of}: its config.json has {key} {shown(value)}; must be {allowed}. Correct the file.")


def block_at(raw: Mapping[str, Any], key: str, *, of: str = KEY) -> Mapping[str, Any]:
    """A nested object; empty when it is absent or null.

    Args:
        raw: the parsed file, or a block of it.
        key: name of the value.
        of: YAML key named in errors.
    """
    value = raw.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _wrong(of, key, value, "an object")
    return value


def integer_at(raw: Mapping[str, Any], key: str, *, low: int = 0, high: int = 1 << 31, of: str = KEY) -> int | None:
    """An integer from `low` to `high`; None when it is absent or null. `2.0` and `true` are no integers.

    Args:
        raw: the parsed file, or a block of it.
        key: name of the value.
        low: smallest value that makes sense.
        high: largest one.
        of: YAML key named in errors.
    """
    value = raw.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _wrong(of, key, value, f"an integer from {low} to {high}")
    return value


def positive_integer_at(raw: Mapping[str, Any], key: str) -> int | None:
    """An integer from 1 to what `LIMITS` allows for the key.

    Args:
        raw: the parsed file, or a block of it.
        key: name of the value.
    """
    return integer_at(raw, key, low=1, high=LIMITS.get(key, 1 << 20))


def number_at(raw: Mapping[str, Any], key: str, *, of: str = KEY) -> float | None:
    """A finite number; None when it is absent or null.

    Args:
        raw: the parsed file, or a block of it.
        key: name of the value.
        of: YAML key named in errors.
    """
    value = raw.get(key)
    if value is None:
        return None
    # An integer of hundreds of digits is no float either.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= 1e300:
        raise _wrong(of, key, value, "a finite number")
    return float(value)


def flag_at(raw: Mapping[str, Any], key: str, *, of: str = KEY) -> bool | None:
    """True or false; None when it is absent or null.

    Args:
        raw: the parsed file, or a block of it.
        key: name of the value.
        of: YAML key named in errors.
    """
    value = raw.get(key)
    if value is not None and not isinstance(value, bool):
        raise _wrong(of, key, value, "true or false")
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
        raise _wrong(KEY, key, value, f"a list of integers from {low} to {high}")
    return tuple(value)


def architecture_name(raw: Mapping[str, Any]) -> str | None:
    """First entry of a config.json's `architectures`, None without one.

    Args:
        raw: the parsed file.
    """
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    return name if isinstance(name, str) else None


def export_algo(raw: Mapping[str, Any]) -> str | None:
    """Algorithm that this program recorded in its export, None for a file that somebody else wrote.

    Args:
        raw: the parsed file.
    """
    mark = raw.get(EXPORT_MARK)
    algo = mark.get("algo") if isinstance(mark, Mapping) else None
    return algo if isinstance(algo, str) else None


def verifier_name(raw: Mapping[str, Any]) -> str | None:
    """Name or path of the policy that a file in the speculators format names; None where it names none.

    Args:
        raw: the parsed file.
    """
    name: Any = raw
    for key in ("speculators_config", "verifier", "name_or_path"):
        name = name.get(key) if isinstance(name, Mapping) else None
    return name if isinstance(name, str) and name else None


def is_speculators(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json is in the speculators layout.

    Args:
        raw: the parsed file.
    """
    return raw.get("speculators_model_type") is not None


def kept_extra(
    raw: Mapping[str, Any], known: frozenset[str], *, blocks: Mapping[str, frozenset[str]] | None = None
) -> dict[str, Any]:
    """Fields of a source config that mean nothing here and are written back on export.

    Args:
        raw: the parsed file.
        known: keys that the adapter reads or rewrites, beside `KNOWN`.
        blocks: nested objects of which something is read -> keys in them that are read or rewritten.
    """
    blocks = blocks or {}
    extra = {key: value for key, value in raw.items() if key not in KNOWN | known | blocks.keys()}
    for name, read in blocks.items():
        kept = {key: value for key, value in block_at(raw, name).items() if key not in read}
        if kept:
            extra[name] = kept
    for key, value in extra.items():
        if _is_deep(value):
            raise ConfigError(
                f"{KEY}: its config.json has {shown(key)} nested more than {_MAX_NESTING} levels deep. Remove it."
            )
    return extra


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_MAX_NESTING):
        level = [
            inner
            for outer in level
            if isinstance(outer, (Mapping, list, tuple))
            for inner in (outer.values() if isinstance(outer, Mapping) else outer)
        ]
    return bool(level)


def agreed(
    raw: Mapping[str, Any],
    nested: Mapping[str, Any],
    key: str,
    *,
    default: Any,
    read: Callable[[Mapping[str, Any], str], Any] | None = None,
) -> Any:
    """A value that may be at top level, inside a nested block, or in both places with one value. Null says nothing.

    Args:
        raw: the parsed file.
        nested: a block of it, e.g. its `eagle_config`.
        key: name of the value in both.
        default: when neither has it.
        read: typed reader of the value, such as `flag_at`; None = any value.
    """
    outer, inner = (block.get(key) if read is None else read(block, key) for block in (raw, nested))
    if outer is not None and inner is not None and not _equal(outer, inner):
        raise ConfigError(
            f"{KEY}: its config.json says {key} is {shown(outer)} at top level and {shown(inner)} further in. Make "
            "them equal."
        )
    value = inner if outer is None else outer
    return default if value is None else value


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except RecursionError:
        return False


def read_geometry(raw: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Arguments of `DraftArchitecture` other than the feature ids.

    Args:
        raw: the parsed file, or the part of it that describes the layers.
        family: `llama` or `qwen3`.
    """
    missing = [key for key in GEOMETRY if raw.get(key) is None]
    if missing:
        raise ConfigError(f"{KEY}: its config.json lacks {missing}. Add them; nothing is guessed.")
    sizes = {key: positive_integer_at(raw, key) for key in LIMITS}
    for key in ("attention_bias", "mlp_bias"):
        if flag_at(raw, key):
            raise ConfigError(f"{KEY}: {key} is true; drafts with biases are not supported. Use another draft.")
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{KEY}: hidden_act is {shown(raw['hidden_act'])}; must be silu. Use another draft.")
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
    # Without the key the engine divides; tensor shapes are checked against the result.
    head_dim = sizes["head_dim"] or hidden // heads
    rope = flat_rope(raw, key=KEY)
    partial = rope.get("partial_rotary_factor", 1.0)
    if int(head_dim * partial) < 2 or int(head_dim * partial) % 2:
        raise ConfigError(
            f"{KEY}: its config.json has head_dim {head_dim} and partial_rotary_factor {partial}, so "
            f"{int(head_dim * partial)} channels are rotated; must be a positive even number. Correct the file."
        )
    return {key: sizes.get(key, eps) for key in GEOMETRY} | {
        "layer_family": family,
        "head_dim": head_dim,
        "target_hidden_size": sizes["target_hidden_size"] or hidden,
        "draft_vocab_size": sizes["draft_vocab_size"] or raw["vocab_size"],
        "rope": rope,
    }


def refuse_windows(raw: Mapping[str, Any], num_layers: int) -> None:
    """Refuse layers that see a window of positions only.

    Args:
        raw: the parsed file, or the part of it that describes the layers.
        num_layers: decoder layers of the draft.
    """
    kinds = raw.get("layer_types")
    if kinds is not None and not isinstance(kinds, list):
        raise _wrong(KEY, "layer_types", kinds, "a list")
    others = [kind for kind in (kinds or [])[:num_layers] if kind != "full_attention"]
    if others:
        raise ConfigError(
            f"{KEY}: its config.json has layer_types {shown(others)}; must be full_attention for all layers. Use a "
            "draft without sliding windows."
        )
    first = integer_at(raw, "max_window_layers")
    if flag_at(raw, "use_sliding_window") and not kinds and (first is None or first < num_layers):
        raise ConfigError(f"{KEY}: its config.json has use_sliding_window true. Use a draft without sliding windows.")


def written_geometry(arch: Any, *, dtype: str, algo: str) -> dict[str, Any]:
    """The part of a config.json that every export has, every field explicit.

    Args:
        arch: the draft, a `DraftArchitecture`.
        dtype: of the weights beside it.
        algo: draft algorithm, recorded so that the export is recognised as ours.
    """
    extra = dict(arch.extra)
    # What a source in the speculators layout says about its layers is at top level here.
    return (
        dict(extra.pop(LAYER, {}))
        | extra
        | {
            **_written_layer(arch),
            "target_hidden_size": arch.target_hidden_size,
            "draft_vocab_size": arch.draft_vocab_size,
            "torch_dtype": dtype,
            EXPORT_MARK: {"format_version": 1, "algo": algo},
        }
    )


def _written_layer(arch: Any) -> dict[str, Any]:
    # Old readers look for the base at top level, new ones in the table; the table is complete, so both agree.
    return {
        "model_type": arch.layer_family,
        **{key: getattr(arch, key) for key in GEOMETRY},
        "head_dim": arch.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": arch.rope["rope_theta"],
        "rope_parameters": dict(arch.rope),
        "tie_word_embeddings": False,
    }


# -- the speculators layout ------------------------------------------------------------------------------------------


def read_layer(raw: Mapping[str, Any], families: Sequence[str]) -> dict[str, Any]:
    """The part of a config.json in the speculators layout that describes the layers, sizes of the top level included.

    Args:
        raw: the parsed file.
        families: values of `model_type` that the algorithm's layers may have.
    """
    layer = block_at(raw, LAYER)
    if layer.get("model_type") not in families:
        raise ConfigError(
            f"{KEY}: its config.json needs {LAYER} of model_type {' or '.join(families)}, got "
            f"{shown(layer.get('model_type'))}. Use another draft."
        )
    merged = {**layer, **{k: raw[k] for k in ("draft_vocab_size", "target_hidden_size") if raw.get(k) is not None}}
    if raw.get("quantization_config"):
        merged["quantization_config"] = raw["quantization_config"]
    refuse_windows(merged, positive_integer_at(merged, "num_hidden_layers") or 0)
    return merged


def speculators_extra(
    raw: Mapping[str, Any], known: frozenset[str], *, blocks: Mapping[str, frozenset[str]] | None = None
) -> dict[str, Any]:
    """Fields of a config.json in the speculators layout that are written back, those about the layers in their block.

    Args:
        raw: the parsed file.
        known: keys that the adapter reads or rewrites, beside `SPECULATORS_KNOWN`.
        blocks: see `kept_extra`.
    """
    known = SPECULATORS_KNOWN | known
    layer = kept_extra(block_at(raw, LAYER), WINDOW_KEYS | known, blocks=blocks)
    return kept_extra(raw, known, blocks=blocks) | ({LAYER: layer} if layer else {})


def written_speculators(
    arch: Any,
    *,
    algo: str,
    architecture: str,
    dtype: str,
    k: int,
    verifier: tuple[str, Sequence[str]],
    ids_key: str,
) -> dict[str, Any]:
    """The part of a config.json in the speculators layout that every algorithm has, every field explicit.

    Args:
        arch: the draft, a `DraftArchitecture`.
        algo: `speculators_model_type`.
        architecture: of the library's class.
        dtype: of the weights beside it.
        k: tokens proposed per step.
        verifier: name or path, and architectures, of the policy.
        ids_key: where the feature ids go.
    """
    extra = dict(arch.extra)
    layer = dict(extra.pop(LAYER, {})) | {
        **_written_layer(arch),
        # The engine takes this block for the whole config and sizes the projection by the number in it.
        "num_aux_hidden_states": len(arch.feature_ids),
    }
    name_or_path, architectures = verifier
    return extra | {
        "architectures": [architecture],
        "speculators_model_type": algo,
        "speculators_version": _SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": algo,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": k}],
            "verifier": {"name_or_path": name_or_path, "architectures": list(architectures)},
        },
        LAYER: layer,
        "draft_vocab_size": arch.draft_vocab_size,
        "target_hidden_size": arch.target_hidden_size,
        ids_key: list(arch.feature_ids),
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
    }


# -- positions and placeholder ---------------------------------------------------------------------------------------


def flat_rope(raw: Mapping[str, Any], *, key: str) -> dict[str, Any]:
    """One flat RoPE table of a config: both schemas are read, multimodal fields dropped, a partial factor kept.

    Args:
        raw: a config.json.
        key: YAML key named in errors.
    """
    table = _merged_rope(raw, key)
    is_multimodal = any(name in table for name in _MULTIMODAL_ROPE_KEYS)
    rope_type = _rope_type(table, key)
    if rope_type == "mrope":
        is_multimodal, rope_type = True, "default"
    if not isinstance(rope_type, str) or rope_type not in _ROPE_NUMBERS:
        raise ConfigError(
            f"{key}: rope_type is {shown(rope_type)}; must be one of {list(_ROPE_NUMBERS)}: the frequencies of the "
            "others depend on the sequence length, so training and serving would differ."
        )
    if is_multimodal:
        table = {name: value for name, value in table.items() if name not in _MULTIMODAL_ROPE_KEYS}
    table = {name: value for name, value in table.items() if value is not None}
    for name, value in table.items():
        if name in _FOREIGN_ROPE_KEYS or isinstance(value, (Mapping, list)):
            raise ConfigError(
                f"{key}: its config.json has {shown(name)} {shown(value)} in its RoPE table, which training does not "
                "apply. Remove it, or use another model."
            )
    theta, partial = number_at(table, "rope_theta", of=key), number_at(table, "partial_rotary_factor", of=key)
    if theta is None:
        raise ConfigError(
            f"{key}: its config.json has neither rope_theta nor rope_parameters.rope_theta. Add the base that the "
            "model was trained with; it is never defaulted."
        )
    if not 1 < theta <= 1e15:
        raise _wrong(key, "rope_theta", theta, "a number above 1")
    if partial is not None and not 0 < partial <= 1:
        raise _wrong(key, "partial_rotary_factor", partial, "above 0 and at most 1")
    _check_rope_numbers(table, rope_type, key)
    table = {name: value for name, value in table.items() if name != "partial_rotary_factor"}
    table |= {"rope_type": rope_type, "rope_theta": theta}
    return table | ({} if partial in (None, 1.0) else {"partial_rotary_factor": partial})


def _merged_rope(raw: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Everything that a config says about positions, in one table; two values of one entry are an error."""
    table = block_at(raw, "rope_parameters", of=key)
    if table and all(isinstance(value, Mapping) for value in table.values()):
        if "full_attention" not in table:
            raise ConfigError(
                f"{key}: rope_parameters has tables for {shown(sorted(table))} only; one for full_attention is needed."
            )
        table = block_at(table, "full_attention", of=key)
    outside = {name: raw.get(name) for name in ("rope_theta", "partial_rotary_factor")}
    merged: dict[str, Any] = {}
    for source in (block_at(raw, "rope_scaling", of=key), table, outside):
        for name, value in source.items():
            if value is None:
                continue
            if merged.get(name) is not None and not _equal(merged[name], value):
                raise ConfigError(
                    f"{key}: {shown(name)} is {shown(value)} and {shown(merged[name])} in rope_parameters or "
                    "rope_scaling. Make them equal."
                )
            merged[name] = value
    return merged


def _rope_type(table: dict[str, Any], key: str) -> Any:
    """Type of a table, taken out of it; `type` is its old name."""
    new, old = table.pop("rope_type", None), table.pop("type", None)
    if new is not None and old not in (None, "mrope") and not _equal(new, old):
        raise ConfigError(f"{key}: a RoPE table has rope_type {shown(new)} and type {shown(old)}. Make them equal.")
    return "mrope" if old == "mrope" and new in (None, "default") else new or old or "default"


def _check_rope_numbers(table: Mapping[str, Any], rope_type: str, key: str) -> None:
    needed, optional = _ROPE_NUMBERS[rope_type]
    missing = [name for name in needed if name not in table]
    if missing:
        raise ConfigError(f"{key}: its RoPE table of type {rope_type} lacks {missing}. Add what the model has.")
    for name in (*needed, *optional):
        if name == "original_max_position_embeddings":
            integer_at(table, name, low=1, high=LIMITS["max_position_embeddings"], of=key)
            continue
        value = number_at(table, name, of=key)
        if value is not None and not 0 < value <= 1 << 20:
            raise _wrong(key, name, value, f"above 0 and at most {1 << 20}")
    flag_at(table, "truncate", of=key)
    if rope_type == "llama3" and not table["low_freq_factor"] < table["high_freq_factor"]:
        raise _wrong(key, "low_freq_factor", table["low_freq_factor"], "below high_freq_factor")


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
