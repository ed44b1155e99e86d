"""Published draft checkpoints <-> one canonical form: pure functions on dicts and names, no files, no torch.

Two EAGLE-3 layouts are read and written: `native` (the flat one of the original authors, SpecForge, ModelOpt and
nemo_automodel; the one the engine loads unchanged) and `speculators`. Whatever a reader would have to guess is an error
that names the key to set. Feature ids are "after l layers" everywhere inside; see `feature_ids_from_layer_outputs`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_rl.errors import CheckpointError, ConfigError
from nemo_rl.models.automodel.draft.architecture import (
    DraftArchitecture,
    frozen_tensor_shapes,
    trained_tensor_shapes,
)

__all__ = [
    "NormalizedNames",
    "SourceConfig",
    "check_tensor_shapes",
    "default_feature_ids",
    "feature_ids_from_layer_outputs",
    "flat_rope",
    "normalize_names",
    "read_config",
    "write_native_config",
    "write_speculators_config",
]

KEY = "policy.draft.model_name"
EXPORT_MARK = "nemo_rl_draft"

_NATIVE_FAMILIES = {
    "LlamaForCausalLMEagle3": "llama",
    "Eagle3LlamaForCausalLM": "llama",
    "LlamaEagle3DraftModel": "llama",
    "Eagle3Qwen3ForCausalLM": "qwen3",
}
_ARCHITECTURES = {"llama": "LlamaForCausalLMEagle3", "qwen3": "Eagle3Qwen3ForCausalLM"}
_SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_ID_KEYS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
_MULTIMODAL_ROPE_KEYS = ("mrope_section", "mrope_interleaved")
_STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")

_GEOMETRY = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "vocab_size",
    "max_position_embeddings",
)
# Read by this module or rewritten on export; everything else of a source config is kept.
_KNOWN = {
    *_GEOMETRY,
    *_SWITCHES,
    *_ID_KEYS,
    "architectures",
    "model_type",
    "head_dim",
    "hidden_act",
    "attention_bias",
    "mlp_bias",
    "target_hidden_size",
    "draft_vocab_size",
    "num_aux_hidden_states",
    "num_aux_layers",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "eagle_config",
    "tie_word_embeddings",
    "torch_dtype",
    "dtype",
    "transformers_version",
    "auto_map",
    "_name_or_path",
    "speculators_model_type",
    "speculators_version",
    "speculators_config",
    "transformer_layer_config",
    EXPORT_MARK,
}


@dataclass(frozen=True)
class SourceConfig:
    """What a checkpoint's config.json says, before the user's settings are merged in.

    Attributes:
        publisher: `native`, `nemo_rl` (our own export), `automodel` or `speculators`.
        fields: arguments of `DraftArchitecture` other than `feature_ids`.
        feature_ids: canonical ids, or None when the file does not say.
        num_features: features that the file counts, or None.
        is_norm_output_ambiguous: the file turns `norm_output` on and publishers differ about its meaning.
    """

    publisher: str
    fields: Mapping[str, Any]
    feature_ids: tuple[int, ...] | None
    num_features: int | None
    is_norm_output_ambiguous: bool = False


# -- config.json -> canonical ----------------------------------------------------------------------------------------


def read_config(raw: Mapping[str, Any]) -> SourceConfig:
    """Recognise the publisher of an EAGLE-3 draft and read its config.json.

    Args:
        raw: the parsed file.
    """
    if "speculators_model_type" in raw:
        return _read_speculators(raw)
    architectures = raw.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    if name not in _NATIVE_FAMILIES:
        raise ConfigError(
            f"{KEY}: its config.json has architectures {architectures!r}; an eagle3 draft has one of "
            f"{sorted(_NATIVE_FAMILIES)} or speculators_model_type eagle3. The directory holds a draft of another "
            "algorithm, or no draft."
        )
    return _read_native(raw, name)


def _read_native(raw: Mapping[str, Any], architecture: str) -> SourceConfig:
    eagle = raw.get("eagle_config") or {}
    for key, bad in (
        ("use_aux_hidden_state", False),
        ("use_input_layernorm_in_first_layer", False),
        ("use_last_layernorm", False),
        ("use_mtp_layernorm", True),
    ):
        if key in eagle and bool(eagle[key]) is bad:
            raise ConfigError(f"{KEY}: eagle_config.{key} is {eagle[key]}; such drafts cannot be served. Use another.")
    if raw.get("parallel_drafting") or eagle.get("parallel_draft_step", 1) not in (None, 1):
        raise ConfigError(
            f"{KEY}: the draft proposes in parallel (P-EAGLE); policy.draft.algo is eagle3. Use another draft."
        )
    family = _NATIVE_FAMILIES[architecture]
    publisher = "automodel" if architecture == "LlamaEagle3DraftModel" else "native"
    publisher = "nemo_rl" if EXPORT_MARK in raw else publisher
    switches = {key: bool(_agreed(raw, eagle, key, default=False)) for key in _SWITCHES}
    ids = _agreed(raw, eagle, _ID_KEYS[0], default=None)
    return SourceConfig(
        publisher=publisher,
        fields=_geometry(raw, family) | switches | {"extra": {k: v for k, v in raw.items() if k not in _KNOWN}},
        feature_ids=None if ids is None else tuple(ids),
        num_features=raw.get("num_aux_hidden_states", raw.get("num_aux_layers")),
        is_norm_output_ambiguous=switches["norm_output"] and publisher == "native",
    )


def _read_speculators(raw: Mapping[str, Any]) -> SourceConfig:
    kind = raw["speculators_model_type"]
    if kind != "eagle3":
        raise ConfigError(
            f"{KEY}: its config.json has speculators_model_type {kind!r}; policy.draft.algo is eagle3. Use that."
        )
    layer = raw.get("transformer_layer_config")
    if not isinstance(layer, Mapping) or layer.get("model_type") not in ("llama", "qwen3"):
        raise ConfigError(f"{KEY}: its config.json needs transformer_layer_config of model_type llama or qwen3.")
    # The engine's reading of this format: the residual is the normed state unless the file says otherwise.
    defaults = {"norm_before_residual": True, "norm_before_fc": False, "fc_norm": False, "norm_output": False}
    outer = {k: raw[k] for k in ("draft_vocab_size", "target_hidden_size") if raw.get(k) is not None}
    ids = raw.get(_ID_KEYS[0]) or raw.get(_ID_KEYS[1])
    extra = {k: v for k, v in {**layer, **raw}.items() if k not in _KNOWN}
    return SourceConfig(
        publisher="speculators",
        fields=_geometry({**layer, **outer}, layer["model_type"])
        | {k: bool(raw.get(k, default)) for k, default in defaults.items()}
        | {"extra": extra},
        feature_ids=tuple(ids) if ids else None,
        num_features=None,
    )


def _agreed(raw: Mapping[str, Any], nested: Mapping[str, Any], key: str, *, default: Any) -> Any:
    """A value that may be at top level, inside `eagle_config`, or in both places with one value."""
    if key in raw and key in nested and raw[key] != nested[key]:
        raise ConfigError(
            f"{KEY}: {key} is {raw[key]!r} at top level and {nested[key]!r} in eagle_config. Make them equal."
        )
    return raw.get(key, nested.get(key, default))


def _geometry(raw: Mapping[str, Any], family: str) -> dict[str, Any]:
    missing = [key for key in _GEOMETRY if raw.get(key) is None]
    if missing:
        raise ConfigError(f"{KEY}: its config.json lacks {missing}. Add them; nothing is guessed.")
    for key in ("attention_bias", "mlp_bias"):
        if raw.get(key):
            raise ConfigError(f"{KEY}: {key} is true; drafts with biases are not supported. Use another draft.")
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{KEY}: hidden_act is {raw['hidden_act']!r}; must be silu. Use another draft.")
    if raw.get("quantization_config"):
        raise ConfigError(
            f"{KEY}: the draft is quantized; a draft to be trained must not be. Use its full-precision form."
        )
    heads = raw["num_attention_heads"]
    # Without the key the engine divides; tensor shapes are checked against the result.
    head_dim = raw.get("head_dim") or raw["hidden_size"] // heads
    return {key: raw[key] for key in _GEOMETRY} | {
        "layer_family": family,
        "head_dim": head_dim,
        "target_hidden_size": raw.get("target_hidden_size") or raw["hidden_size"],
        "draft_vocab_size": raw["vocab_size"] if raw.get("draft_vocab_size") is None else raw["draft_vocab_size"],
        "rope": flat_rope(raw, key=KEY),
    }


def flat_rope(raw: Mapping[str, Any], *, key: str) -> dict[str, Any]:
    """One flat RoPE table of a config: both schemas are read, multimodal fields dropped, a partial factor kept.

    Args:
        raw: a config.json.
        key: YAML key named in errors.
    """
    table = dict(raw.get("rope_parameters") or {})
    if table and all(isinstance(v, Mapping) for v in table.values()):
        if "full_attention" not in table:
            raise ConfigError(
                f"{key}: rope_parameters has tables for {sorted(table)} only; one for full_attention is needed."
            )
        table = dict(table["full_attention"])
    scaling = dict(raw.get("rope_scaling") or {})
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


# -- feature ids -----------------------------------------------------------------------------------------------------


def feature_ids_from_layer_outputs(indices: Sequence[int]) -> tuple[int, ...]:
    """0-based layer outputs, as a user writes them, to canonical ids "after l layers".

    Index -1 (the embedding) becomes 0, index 1 (output of the second layer) becomes 2.
    """
    return tuple(i + 1 for i in indices)


def default_feature_ids(num_layers: int) -> tuple[int, ...]:
    """Canonical ids that the engine assumes when a config names none: (2, N//2, N-3)."""
    return 2, num_layers // 2, num_layers - 3


# -- canonical -> config.json ----------------------------------------------------------------------------------------


def write_native_config(arch: DraftArchitecture, *, dtype: str, algo: str) -> dict[str, Any]:
    """The config.json of an export: every field explicit, no reader's default relied upon.

    Args:
        arch: the draft.
        dtype: of the weights beside it.
        algo: draft algorithm, recorded so that the export is recognised as ours.
    """
    ids = list(arch.feature_ids)
    rope = dict(arch.rope)
    config = dict(arch.extra) | {
        "architectures": [_ARCHITECTURES[arch.layer_family]],
        "model_type": arch.layer_family,
        **{key: getattr(arch, key) for key in _GEOMETRY},
        "head_dim": arch.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "target_hidden_size": arch.target_hidden_size,
        "draft_vocab_size": arch.draft_vocab_size,
        **{key: getattr(arch, key) for key in _SWITCHES},
        "num_aux_hidden_states": len(ids),
        _ID_KEYS[0]: ids,
        # Some engine runners read the ids only here, others only above.
        "eagle_config": {
            _ID_KEYS[0]: ids,
            "use_aux_hidden_state": True,
            "norm_before_fc": arch.norm_before_fc,
        },
        "rope_theta": rope["rope_theta"],
        "rope_parameters": rope,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        EXPORT_MARK: {"format_version": 1, "algo": algo},
    }
    return config


def write_speculators_config(
    arch: DraftArchitecture, *, dtype: str, k: int, verifier: str, verifier_architectures: Sequence[str]
) -> dict[str, Any]:
    """The same draft in the speculators layout; tensor names are those of the native one.

    Args:
        arch: the draft.
        dtype: of the weights beside it.
        k: tokens proposed per step.
        verifier: name or path of the policy.
        verifier_architectures: of the policy.
    """
    layer = {
        "model_type": arch.layer_family,
        **{key: getattr(arch, key) for key in _GEOMETRY},
        "head_dim": arch.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": arch.rope["rope_theta"],
        "rope_parameters": dict(arch.rope),
        "tie_word_embeddings": False,
    }
    return dict(arch.extra) | {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": k}],
            "verifier": {"name_or_path": verifier, "architectures": list(verifier_architectures)},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": arch.draft_vocab_size,
        "target_hidden_size": arch.target_hidden_size,
        **{key: getattr(arch, key) for key in _SWITCHES},
        _ID_KEYS[0]: list(arch.feature_ids),
        "torch_dtype": dtype,
    }


# -- tensor names ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NormalizedNames:
    """Tensor names of a checkpoint in canonical form.

    Attributes:
        canonical: canonical name to name as stored.
        dropped: names as stored that are derived or belong to the target.
    """

    canonical: Mapping[str, str]
    dropped: tuple[str, ...] = field(default=())


_WRAPPER_PREFIXES = ("draft.", "module.", "eagle_module.", "model.")
_DERIVED_SUFFIXES = ("rotary_emb.inv_freq",)
_TARGET_OWNED = ("verifier_lm_head.weight", "verifier_norm.weight")
_FUSED = ("qkv_proj", "gate_up_proj", "linear_qkv")


def normalize_names(names: Iterable[str]) -> NormalizedNames:
    """Map the dialects of every publisher to one set of names.

    Worked example: `draft.model.midlayer.mlp.up_proj.weight` -> `layers.0.mlp.up_proj.weight`.

    Args:
        names: as stored.
    """
    canonical: dict[str, str] = {}
    dropped = []
    for stored in names:
        name = stored
        while name.startswith(_WRAPPER_PREFIXES):
            name = name.split(".", 1)[1]
        if name.startswith("midlayer."):
            name = "layers.0." + name.removeprefix("midlayer.")
        if name in ("draft_id_to_target_id", "d2t.weight"):
            name = "d2t"
        if name.endswith(_DERIVED_SUFFIXES) or name in _TARGET_OWNED:
            dropped.append(stored)
            continue
        if any(part in name for part in _FUSED):
            raise CheckpointError(
                f"tensor {stored} is fused; whether its rows are grouped by head or by kind is not recorded. Export "
                "the draft with separate q/k/v and gate/up projections."
            )
        if name in canonical:
            raise CheckpointError(
                f"tensors {canonical[name]} and {stored} are the same one, {name}. Remove one of them."
            )
        canonical[name] = stored
    return NormalizedNames(canonical, tuple(dropped))


def check_tensor_shapes(shapes: Mapping[str, Sequence[int]], arch: DraftArchitecture) -> None:
    """Check canonical names and shapes against what the architecture consists of; list every difference.

    May be absent: `lm_head.weight` (then made from the policy's head), a table that can be rebuilt. May be present
    without being used: a copy of the policy's embedding, the tables of an identity map.

    Args:
        shapes: canonical name to shape.
        arch: the draft.
    """
    trained, frozen = trained_tensor_shapes(arch), frozen_tensor_shapes(arch)
    tables = {"d2t": (arch.draft_vocab_size,), "t2d": (arch.vocab_size,)}
    embedding = {"embed_tokens.weight": (arch.vocab_size, arch.hidden_size)}
    allowed = {**trained, **frozen, **tables, **embedding}
    optional = {"lm_head.weight", *tables} if not arch.owns_embedding else set(tables)
    missing = sorted((trained.keys() | frozen.keys()) - optional - shapes.keys())
    unexpected = sorted(shapes.keys() - allowed.keys())
    wrong = [
        f"{name} has shape {list(shape)}, {list(allowed[name])} needed"
        for name, shape in sorted(shapes.items())
        if name in allowed and tuple(shape) != allowed[name]
    ]
    if "mask_hidden" in unexpected:
        raise CheckpointError("holds mask_hidden: it is a parallel (P-EAGLE) draft, policy.draft.algo is eagle3.")
    problems = [f"{len(missing)} missing: {missing}"] if missing else []
    problems += [f"{len(unexpected)} unexpected: {unexpected}"] if unexpected else []
    problems += wrong
    if problems:
        raise CheckpointError("tensors do not fit its config.json: " + "; ".join(problems) + ".")
