"""EAGLE-3 drafts in two layouts, `native` and `speculators`.

`native` is the flat one of the original authors, SpecForge, ModelOpt and nemo_automodel; the engine loads it unchanged.
Feature ids are "after l layers" everywhere inside; see `fields.feature_ids_from_layer_outputs`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from nemo_rl.errors import ConfigError
from nemo_rl.models.automodel.draft.adapters.base import DraftAdapter, Serving, SourceConfig
from nemo_rl.models.automodel.draft.adapters.fields import (
    EXPORT_MARK,
    GEOMETRY,
    KEY,
    agreed,
    checked_triple,
    kept_extra,
    read_geometry,
    written_geometry,
)
from nemo_rl.models.automodel.draft.architecture import (
    DraftArchitecture,
    Eagle3Architecture,
    FusedEagleArchitecture,
)
from nemo_rl.models.automodel.draft.config import Eagle3DraftConfig

__all__ = [
    "ID_KEYS",
    "NATIVE_FAMILIES",
    "Eagle3Adapter",
    "read_speculators_layers",
    "refuse_eagle_config",
    "write_speculators_config",
    "written_fused",
]

ID_KEYS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
NATIVE_FAMILIES = {
    "LlamaForCausalLMEagle3": "llama",
    "Eagle3LlamaForCausalLM": "llama",
    "LlamaEagle3DraftModel": "llama",
    "Eagle3Qwen3ForCausalLM": "qwen3",
}
_ARCHITECTURES = {"llama": "LlamaForCausalLMEagle3", "qwen3": "Eagle3Qwen3ForCausalLM"}
_SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_KNOWN = frozenset(
    {
        *_SWITCHES,
        *ID_KEYS,
        "num_aux_hidden_states",
        "num_aux_layers",
        "eagle_config",
        "speculators_model_type",
        "speculators_version",
        "speculators_config",
        "transformer_layer_config",
    }
)


class Eagle3Adapter(DraftAdapter[Eagle3DraftConfig, Eagle3Architecture]):
    """See the module docstring."""

    algo: ClassVar[str] = "eagle3"
    k_rule: ClassVar[str] = "at most `ttt_steps`"
    architecture: ClassVar[type[DraftArchitecture]] = Eagle3Architecture
    switches: ClassVar[Mapping[str, Any]] = dict.fromkeys(_SWITCHES, False)
    depth_key: ClassVar[str] = "ttt_steps"

    def default_feature_ids(self, num_layers: int) -> tuple[int, ...]:
        """What the engine assumes when a config names none."""
        return checked_triple(num_layers)

    def read_config(self, raw: Mapping[str, Any]) -> SourceConfig:
        """Recognise the publisher and read its config.json."""
        if "speculators_model_type" in raw:
            return _read_speculators(raw)
        architectures = raw.get("architectures")
        name = architectures[0] if isinstance(architectures, list) and architectures else None
        if name not in NATIVE_FAMILIES:
            raise ConfigError(
                f"{KEY}: its config.json has architectures {architectures!r}; an eagle3 draft has one of "
                f"{sorted(NATIVE_FAMILIES)} or speculators_model_type eagle3. The directory holds a draft of another "
                "algorithm, or no draft."
            )
        return _read_native(raw, name)

    def check_source(self, cfg: Eagle3DraftConfig, source: SourceConfig) -> None:
        """The flag `norm_output` means two things."""
        if source.is_norm_output_ambiguous and cfg.norm_output is None:
            raise ConfigError(
                "policy.draft.norm_output: got nothing, and the draft's config.json turns it on. Some publishers mean "
                "that the normed state is fed to the next depth (so does the engine), others only that the head reads "
                "it. Set policy.draft.norm_output: true if it was trained the first way; the second kind cannot be "
                "served."
            )

    def check(
        self, cfg: Eagle3DraftConfig, arch: Eagle3Architecture, *, policy: Mapping[str, Any], k: int | None
    ) -> None:
        """Both norms before the projection exclude each other."""
        if arch.fc_norm and arch.norm_before_fc:
            raise ConfigError(
                "policy.draft.fc_norm: got true beside norm_before_fc; they exclude each other. Turn one off."
            )

    def max_num_speculative_tokens(self, cfg: Eagle3DraftConfig, arch: Eagle3Architecture) -> int | None:
        """Depths unrolled in training."""
        return cfg.ttt_steps

    def write_config(self, arch: Eagle3Architecture, *, dtype: str) -> dict[str, Any]:
        """The native layout."""
        return written_fused(arch, dtype=dtype, algo=self.algo) | {"norm_output": arch.norm_output}

    def serving(self, arch: Eagle3Architecture, *, device: str | None) -> Serving:
        """The engine's own method."""
        return Serving("eagle3")


def written_fused(arch: FusedEagleArchitecture, *, dtype: str, algo: str) -> dict[str, Any]:
    """The part of a native config.json that all drafts on fused features have.

    Args:
        arch: the draft.
        dtype: of the weights beside it.
        algo: draft algorithm.
    """
    ids = list(arch.feature_ids)
    return written_geometry(arch, dtype=dtype, algo=algo) | {
        "architectures": [_ARCHITECTURES[arch.layer_family]],
        **{key: getattr(arch, key) for key in ("norm_before_residual", "norm_before_fc", "fc_norm")},
        "num_aux_hidden_states": len(ids),
        ID_KEYS[0]: ids,
        # Some engine runners read the ids only here, others only above.
        "eagle_config": {
            ID_KEYS[0]: ids,
            "use_aux_hidden_state": True,
            "norm_before_fc": arch.norm_before_fc,
        },
    }


def refuse_eagle_config(eagle: Mapping[str, Any]) -> None:
    """Refuse what the engine does not run.

    Args:
        eagle: the `eagle_config` of a native config.json.
    """
    for key, bad in (
        ("use_aux_hidden_state", False),
        ("use_input_layernorm_in_first_layer", False),
        ("use_last_layernorm", False),
        ("use_mtp_layernorm", True),
    ):
        if key in eagle and bool(eagle[key]) is bad:
            raise ConfigError(f"{KEY}: eagle_config.{key} is {eagle[key]}; such drafts cannot be served. Use another.")


def _read_native(raw: Mapping[str, Any], architecture: str) -> SourceConfig:
    eagle = raw.get("eagle_config") or {}
    refuse_eagle_config(eagle)
    if raw.get("parallel_drafting") or eagle.get("parallel_draft_step", 1) not in (None, 1):
        raise ConfigError(
            f"{KEY}: the draft proposes in parallel (P-EAGLE); policy.draft.algo is eagle3. Use another draft."
        )
    family = NATIVE_FAMILIES[architecture]
    publisher = "automodel" if architecture == "LlamaEagle3DraftModel" else "native"
    publisher = "nemo_rl" if EXPORT_MARK in raw else publisher
    switches = {key: bool(agreed(raw, eagle, key, default=False)) for key in _SWITCHES}
    ids = agreed(raw, eagle, ID_KEYS[0], default=None)
    return SourceConfig(
        publisher=publisher,
        fields=read_geometry(raw, family) | switches | {"extra": kept_extra(raw, _KNOWN)},
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
    # The engine's reading of this format: the residual is the normed state unless the file says otherwise.
    defaults = {"norm_before_residual": True, "norm_before_fc": False, "fc_norm": False, "norm_output": False}
    ids = raw.get(ID_KEYS[0]) or raw.get(ID_KEYS[1])
    return SourceConfig(
        publisher="speculators",
        fields=read_speculators_layers(raw, _KNOWN) | {k: bool(raw.get(k, default)) for k, default in defaults.items()},
        feature_ids=tuple(ids) if ids else None,
        num_features=None,
    )


def read_speculators_layers(raw: Mapping[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """Geometry and kept fields of a config.json in the speculators layout.

    Args:
        raw: the parsed file.
        known: keys that the adapter reads or rewrites.
    """
    layer = raw.get("transformer_layer_config")
    if not isinstance(layer, Mapping) or layer.get("model_type") not in ("llama", "qwen3"):
        raise ConfigError(f"{KEY}: its config.json needs transformer_layer_config of model_type llama or qwen3.")
    outer = {k: raw[k] for k in ("draft_vocab_size", "target_hidden_size") if raw.get(k) is not None}
    extra = kept_extra({**layer, **raw}, known)
    return read_geometry({**layer, **outer}, layer["model_type"]) | {"extra": extra}


def write_speculators_config(
    arch: Eagle3Architecture, *, dtype: str, k: int, verifier: str, verifier_architectures: Sequence[str]
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
        **{key: getattr(arch, key) for key in GEOMETRY},
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
        ID_KEYS[0]: list(arch.feature_ids),
        "torch_dtype": dtype,
    }
