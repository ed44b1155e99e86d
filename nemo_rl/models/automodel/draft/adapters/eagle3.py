"""EAGLE-3 drafts in two layouts, `native` and `speculators`.

`native` is the flat one of the original authors, SpecForge, AngelSlim, ModelOpt, nemo_automodel and verl-SpeCo, in
dialects that differ in names and in what they leave out; an export is in the one that the engine loads unchanged.
Feature ids are "after l layers" everywhere inside; see `fields.feature_ids_from_layer_outputs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from nemo_rl.errors import ConfigError
from nemo_rl.models.automodel.draft.adapters.base import DraftAdapter, Serving, SourceConfig, Verifier
from nemo_rl.models.automodel.draft.adapters.fields import (
    KEY,
    LIMITS,
    SPECULATORS_KNOWN,
    WINDOW_KEYS,
    agreed,
    architecture_name,
    block_at,
    checked_triple,
    export_algo,
    flag_at,
    integer_at,
    integers_at,
    is_speculators,
    kept_extra,
    number_at,
    positive_integer_at,
    read_geometry,
    read_layer,
    refuse_windows,
    speculators_extra,
    written_geometry,
    written_speculators,
)
from nemo_rl.models.automodel.draft.architecture import (
    DraftArchitecture,
    Eagle3Architecture,
    FusedEagleArchitecture,
)
from nemo_rl.models.automodel.draft.config import Eagle3DraftConfig
from nemo_rl.utils.safe_files import shown

__all__ = [
    "FUSED_BLOCKS",
    "FUSED_KNOWN",
    "ID_KEYS",
    "LAYER_FAMILIES",
    "MASK_KEYS",
    "NATIVE_FAMILIES",
    "Eagle3Adapter",
    "check_named_features",
    "checked_eagle_config",
    "has_mask_token",
    "native_features",
    "native_publisher",
    "read_native_layers",
    "speculators_features",
    "written_fused",
]

ID_KEYS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
LAYER_FAMILIES = ("llama", "qwen3")
NATIVE_FAMILIES = {
    "LlamaForCausalLMEagle3": "llama",
    "Eagle3LlamaForCausalLM": "llama",
    "Eagle3Qwen2_5vlForCausalLM": "llama",
    "Eagle3Qwen3vlForCausalLM": "llama",
    "LlamaEagle3DraftModel": "llama",
    "Qwen3Eagle3Model": "llama",
    "Eagle3Qwen3ForCausalLM": "qwen3",
}
"""Architecture that names such a draft -> family of its layers."""

_AUTHORS = "LlamaForCausalLM"
"""What the original authors write, for EAGLE-1 too; only theirs of EAGLE-3 has a `draft_vocab_size`."""

_ARCHITECTURES = {"llama": "LlamaForCausalLMEagle3", "qwen3": "Eagle3Qwen3ForCausalLM"}
_SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
MASK_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
"""Where the engine looks for the mask token, after `dflash_config.mask_token_id`, in its order."""

_FEATURE_COUNTS = ("num_aux_hidden_states", "num_aux_layers")
_FOREIGN_IDS = (
    "aux_hidden_state_layer_ids",
    "aux_hidden_states_layer_ids",
    "target_hidden_layer_ids",
    "target_layer_ids",
)
"""Keys under which publishers name policy layers and that the engine does not read in the native layout."""

_NO_BIAS = frozenset({"bias", "fc_bias", "qkv_bias"})
"""Biases that a checkpoint's tensors decide about; the engine would look for them in other places."""

FUSED_KNOWN = frozenset(
    {
        *_SWITCHES,
        *ID_KEYS,
        *_FEATURE_COUNTS,
        *_FOREIGN_IDS,
        *_NO_BIAS,
        *WINDOW_KEYS,
        *SPECULATORS_KNOWN,
        "is_causal",
        "logit_scale",
        "num_draft_layers",
        "parallel_drafting",
    }
)
"""Keys that are read or rewritten for every draft on fused features."""

FUSED_BLOCKS: Mapping[str, frozenset[str]] = {
    "eagle_config": frozenset({*_SWITCHES, *ID_KEYS, *_FOREIGN_IDS, *_FEATURE_COUNTS, "use_aux_hidden_state"})
}
"""Nested objects of which something is read or rewritten."""

_MODELOPT_KEYS = frozenset(
    {"use_input_layernorm_in_first_layer", "use_last_layernorm", "use_mtp_layernorm", "next_layer_regular"}
)


class Eagle3Adapter(DraftAdapter[Eagle3DraftConfig, Eagle3Architecture]):
    """See the module docstring."""

    algo: ClassVar[str] = "eagle3"
    k_rule: ClassVar[str] = "at most `ttt_steps`"
    architecture: ClassVar[type[DraftArchitecture]] = Eagle3Architecture
    switches: ClassVar[Mapping[str, Any]] = dict.fromkeys(_SWITCHES, False)
    depth_key: ClassVar[str] = "ttt_steps"
    layouts: ClassVar[tuple[str, ...]] = ("native", "speculators")

    def default_feature_ids(self, num_layers: int) -> tuple[int, ...]:
        """What the engine assumes when a config names none."""
        return checked_triple(num_layers)

    def claims(self, raw: Mapping[str, Any]) -> bool:
        """An architecture of EAGLE-3 without a word about proposing in parallel."""
        if is_speculators(raw):
            return raw["speculators_model_type"] == self.algo
        own = export_algo(raw)
        if own is not None:
            return own == self.algo
        return _is_native(raw) and not _is_parallel(raw)

    def read_config(self, raw: Mapping[str, Any]) -> SourceConfig:
        """Recognise the publisher and read its config.json."""
        if is_speculators(raw):
            return _read_speculators(raw)
        if not _is_native(raw):
            raise ConfigError(
                f"{KEY}: its config.json has architectures {shown(raw.get('architectures'))}; an eagle3 draft has one "
                f"of {sorted(NATIVE_FAMILIES)}, {_AUTHORS} beside a draft_vocab_size, or speculators_model_type "
                "eagle3. The directory holds a draft of another algorithm, or no draft."
            )
        return _read_native(raw)

    def check_source(self, cfg: Eagle3DraftConfig, source: SourceConfig) -> None:
        """The flag `norm_output` means two things; ids that nobody can count."""
        check_named_features(cfg.aux_layer_indices, source)
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

    def write_speculators(self, arch: Eagle3Architecture, *, dtype: str, k: int, verifier: Verifier) -> dict[str, Any]:
        """The speculators layout; tensor names are those of the native one."""
        return written_speculators(
            arch,
            algo=self.algo,
            architecture="Eagle3DraftModel",
            dtype=dtype,
            k=k,
            verifier=verifier,
            ids_key=ID_KEYS[0],
        ) | {**{key: getattr(arch, key) for key in _SWITCHES}, "embed_requires_grad": False}

    def serving(self, arch: Eagle3Architecture, *, device: str | None) -> Serving:
        """The engine's own method."""
        return Serving("eagle3")


# -- the native layout -----------------------------------------------------------------------------------------------


def _is_native(raw: Mapping[str, Any]) -> bool:
    name = architecture_name(raw)
    return name in NATIVE_FAMILIES or (
        name == _AUTHORS
        and raw.get("model_type") == "llama"
        and raw.get("draft_vocab_size") is not None
        and export_algo(raw) is None
    )


def has_mask_token(raw: Mapping[str, Any]) -> bool:
    """Whether the engine would find a mask token in a native config.json, whatever its value is.

    Args:
        raw: the parsed file.
    """
    nested = raw.get("dflash_config")
    is_nested = isinstance(nested, Mapping) and nested.get(MASK_KEYS[0]) is not None
    return is_nested or any(raw.get(key) is not None for key in MASK_KEYS)


def _is_parallel(raw: Mapping[str, Any]) -> bool:
    return bool(raw.get("parallel_drafting") or has_mask_token(raw))


def native_publisher(raw: Mapping[str, Any]) -> str:
    """Who wrote a native config.json, as far as its fields tell.

    Args:
        raw: the parsed file.
    """
    if export_algo(raw) is not None:
        return "nemo_rl"
    eagle = raw.get("eagle_config")
    eagle = eagle if isinstance(eagle, Mapping) else {}
    name = architecture_name(raw)
    if name == "LlamaEagle3DraftModel":
        return "automodel"
    if name in ("LlamaForCausalLMPeagle", "Qwen3Eagle3Model") or "target_hidden_layer_ids" in eagle:
        return "speco"
    if not _MODELOPT_KEYS.isdisjoint(eagle):
        return "modelopt"
    if name == _AUTHORS:
        return "eagle"
    if name == "PEagleDraftModel":
        return "specforge"
    if name in ("Eagle3LlamaForCausalLM", "Eagle3Qwen2_5vlForCausalLM", "Eagle3Qwen3vlForCausalLM"):
        return "angelslim"
    return "native"


def checked_eagle_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The `eagle_config` of a native config.json; what training or the engine do not run is refused.

    Args:
        raw: the parsed file, or the block of it that the engine takes for the whole.
    """
    eagle = block_at(raw, "eagle_config")
    for key, wanted in (
        ("use_aux_hidden_state", True),
        ("use_input_layernorm_in_first_layer", True),
        ("use_last_layernorm", True),
        ("next_layer_regular", True),
        ("use_mtp_layernorm", False),
    ):
        value = flag_at(eagle, key)
        if value is not None and value is not wanted:
            raise ConfigError(f"{KEY}: eagle_config.{key} is {value}; such drafts cannot be served. Use another.")
    if (integer_at(eagle, "parallel_draft_step") or 1) > 1:
        raise ConfigError(
            f"{KEY}: eagle_config.parallel_draft_step is {eagle['parallel_draft_step']}; the engine has no such heads. "
            "Use another draft."
        )
    if flag_at(raw, "is_causal") is False:
        raise ConfigError(f"{KEY}: is_causal is false; these drafts see earlier positions only. Use another draft.")
    if flag_at(raw, "qkv_bias"):
        raise ConfigError(f"{KEY}: qkv_bias is true; drafts with biases are not supported. Use another draft.")
    if number_at(raw, "logit_scale") not in (None, 1.0):
        raise ConfigError(
            f"{KEY}: logit_scale is {shown(raw['logit_scale'])}, which training does not apply. Remove the key, or use "
            "another draft."
        )
    return eagle


def read_native_layers(raw: Mapping[str, Any], family: str, *, publisher: str) -> dict[str, Any]:
    """Geometry of a native config.json.

    Args:
        raw: the parsed file.
        family: of the layers.
        publisher: who wrote it.
    """
    if publisher == "automodel" and not flag_at(raw, "parallel_drafting"):
        # It copies the policy's config, number of layers and windows included, and always builds one plain layer.
        raw = {**raw, "num_hidden_layers": 1}
    elif publisher != "automodel":
        drafted = integer_at(raw, "num_draft_layers", low=1, high=LIMITS["num_hidden_layers"])
        if publisher == "speco" and drafted is not None:
            raw = {**raw, "num_hidden_layers": drafted}
        refuse_windows(raw, positive_integer_at(raw, "num_hidden_layers") or 0)
    return read_geometry(raw, family)


def native_features(raw: Mapping[str, Any], eagle: Mapping[str, Any]) -> dict[str, Any]:
    """What a native config.json says about features, as arguments of `SourceConfig`.

    Args:
        raw: the parsed file.
        eagle: its `eagle_config`.
    """
    ids = agreed(raw, eagle, ID_KEYS[0], default=None, read=_ids)
    counts = {key: agreed(raw, eagle, key, default=None, read=positive_integer_at) for key in _FEATURE_COUNTS}
    sizes = {size for size in (*counts.values(), len(ids) if ids else None) if size is not None}
    if len(sizes) > 1:
        raise ConfigError(
            f"{KEY}: its config.json names features after layers {shown(ids)} and counts {counts}; readers of the "
            "file would differ. Make them agree."
        )
    unclear = [
        key
        for key in _FOREIGN_IDS
        for block in (raw, eagle)
        if (other := _ids(block, key, low=-1)) is not None and other != ids
    ]
    if unclear and ids is not None:
        raise ConfigError(
            f"{KEY}: its config.json names other layers in {unclear[0]} than in {ID_KEYS[0]}. Remove the wrong one."
        )
    return {
        "feature_ids": ids,
        "num_features": next(iter(sizes), None),
        "unclear_ids": unclear[0] if unclear else None,
    }


def _ids(raw: Mapping[str, Any], key: str, low: int = 0) -> tuple[int, ...] | None:
    return integers_at(raw, key, low=low)


def check_named_features(indices: Any, source: SourceConfig) -> None:
    """Layers under a key that the engine does not read are counted in a way that nobody wrote down.

    Args:
        indices: `policy.draft.aux_layer_indices`.
        source: what the file says.
    """
    if source.unclear_ids is not None and indices is None:
        raise ConfigError(
            f"policy.draft.aux_layer_indices: got null, and the draft's config.json names layers in "
            f"{source.unclear_ids}, which the engine does not read and publishers count in different ways. Set the "
            "layers that it was trained on (outputs, counted from 0)."
        )


def written_fused(arch: FusedEagleArchitecture, *, dtype: str, algo: str) -> dict[str, Any]:
    """The part of a native config.json that all drafts on fused features have.

    Args:
        arch: the draft.
        dtype: of the weights beside it.
        algo: draft algorithm.
    """
    ids = list(arch.feature_ids)
    written = written_geometry(arch, dtype=dtype, algo=algo)
    return written | {
        "architectures": [_ARCHITECTURES[arch.layer_family]],
        **{key: getattr(arch, key) for key in ("norm_before_residual", "norm_before_fc", "fc_norm")},
        "num_aux_hidden_states": len(ids),
        ID_KEYS[0]: ids,
        # Some engine runners read the ids only here, others only above.
        "eagle_config": {
            **written.get("eagle_config", {}),
            ID_KEYS[0]: ids,
            "use_aux_hidden_state": True,
            "norm_before_fc": arch.norm_before_fc,
        },
    }


def _read_native(raw: Mapping[str, Any]) -> SourceConfig:
    eagle = checked_eagle_config(raw)
    if _is_parallel(raw):
        raise ConfigError(
            f"{KEY}: the draft proposes in parallel (P-EAGLE); policy.draft.algo is eagle3. Set that to peagle, or use "
            "another draft."
        )
    family = NATIVE_FAMILIES.get(architecture_name(raw) or "", "llama")
    publisher = native_publisher(raw)
    switches = {key: agreed(raw, eagle, key, default=False, read=flag_at) for key in _SWITCHES}
    return SourceConfig(
        publisher=publisher,
        fields={
            **read_native_layers(raw, family, publisher=publisher),
            **switches,
            "extra": kept_extra(raw, FUSED_KNOWN, blocks=FUSED_BLOCKS),
        },
        is_norm_output_ambiguous=switches["norm_output"] and publisher not in ("automodel", "nemo_rl"),
        **native_features(raw, eagle),
    )


# -- the speculators layout ------------------------------------------------------------------------------------------


def speculators_features(raw: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Feature ids of a config.json in the speculators layout.

    Args:
        raw: the parsed file.
    """
    found = {key: ids for key in ID_KEYS if (ids := _ids(raw, key)) is not None}
    if len(set(found.values())) > 1:
        raise ConfigError(f"{KEY}: its config.json names different layers: {shown(found)}. Make them equal.")
    return next(iter(found.values()), None)


def _read_speculators(raw: Mapping[str, Any]) -> SourceConfig:
    kind = raw["speculators_model_type"]
    if kind != "eagle3":
        raise ConfigError(
            f"{KEY}: its config.json has speculators_model_type {shown(kind)}; policy.draft.algo is eagle3. Set that "
            "to the draft's algorithm, or use another draft."
        )
    layer = read_layer(raw, LAYER_FAMILIES)
    checked_eagle_config(layer)
    # The engine's reading of this format: the residual is the normed state unless the file says otherwise.
    defaults = {"norm_before_residual": True, "norm_before_fc": False, "fc_norm": False, "norm_output": False}
    switches = {key: flag_at(raw, key) for key in defaults}
    return SourceConfig(
        publisher="speculators",
        fields={
            **read_geometry(layer, layer["model_type"]),
            **{key: default if switches[key] is None else switches[key] for key, default in defaults.items()},
            "extra": speculators_extra(raw, FUSED_KNOWN, blocks=FUSED_BLOCKS),
        },
        feature_ids=speculators_features(raw),
    )
