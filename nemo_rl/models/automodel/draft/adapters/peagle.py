"""P-EAGLE drafts in two layouts, `native` and `speculators`.

`native` is EAGLE-3's with a placeholder: the tensor `mask_hidden` and the id of the mask token, which the engine looks
for under several keys. nemo_automodel and this program write it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from nemo_rl.errors import ConfigError
from nemo_rl.models.automodel.draft.adapters.base import DraftAdapter, Serving, SourceConfig
from nemo_rl.models.automodel.draft.adapters.eagle3 import (
    ID_KEYS,
    NATIVE_FAMILIES,
    read_speculators_layers,
    refuse_eagle_config,
    written_fused,
)
from nemo_rl.models.automodel.draft.adapters.fields import (
    EXPORT_MARK,
    KEY,
    agreed,
    check_mask_token,
    checked_triple,
    kept_extra,
    read_geometry,
)
from nemo_rl.models.automodel.draft.architecture import DraftArchitecture, PEagleArchitecture
from nemo_rl.models.automodel.draft.config import PEagleDraftConfig

__all__ = ["PEagleAdapter"]

_PARALLEL_FAMILIES = {
    "PEagleDraftModel": "llama",
    "PeagleLlamaForCausalLM": "llama",
    "PeagleQwen3ForCausalLM": "qwen3",
}
_SWITCHES: Mapping[str, Any] = {"norm_before_residual": False, "norm_before_fc": False, "fc_norm": False}
_MASK_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
"""Where the engine looks for the mask token, after `dflash_config.mask_token_id`, in its order."""
_DEPTH_KEYS = ("num_depths", "para_depths")
_KNOWN = frozenset(
    {
        *_SWITCHES,
        *ID_KEYS,
        *_MASK_KEYS,
        *_DEPTH_KEYS,
        # Without feedback there is no state to feed back normed or not.
        "norm_output",
        "parallel_drafting",
        "num_aux_hidden_states",
        "num_aux_layers",
        "eagle_config",
        "dflash_config",
        "speculators_model_type",
        "speculators_version",
        "speculators_config",
        "transformer_layer_config",
    }
)


class PEagleAdapter(DraftAdapter[PEagleDraftConfig, PEagleArchitecture]):
    """See the module docstring."""

    algo: ClassVar[str] = "peagle"
    k_rule: ClassVar[str] = "at most `num_depths`"
    architecture: ClassVar[type[DraftArchitecture]] = PEagleArchitecture
    default_num_layers: ClassVar[int] = 4
    switches: ClassVar[Mapping[str, Any]] = {**_SWITCHES, "num_depths": 8}
    depth_key: ClassVar[str] = "num_depths"

    def default_feature_ids(self, num_layers: int) -> tuple[int, ...]:
        """What the engine assumes when a config names none."""
        return checked_triple(num_layers)

    def new_fields(self, cfg: PEagleDraftConfig, *, policy: Mapping[str, Any], k: int | None) -> dict[str, Any]:
        """The placeholder's token."""
        if cfg.mask_token_id is None:
            raise ConfigError(
                "policy.draft.mask_token_id: got null for a new draft. Set it to a token id that never occurs in the "
                f"policy's text, below its vocab_size of {policy['vocab_size']} (151669 for Qwen3, 128002 for Llama 3)."
            )
        return {"mask_token_id": cfg.mask_token_id}

    def read_config(self, raw: Mapping[str, Any]) -> SourceConfig:
        """Recognise the publisher and read its config.json."""
        return _read_speculators(raw) if "speculators_model_type" in raw else _read_native(raw)

    def check_source(self, cfg: PEagleDraftConfig, source: SourceConfig) -> None:
        """The mask token and the number of depths must be said by someone."""
        for key, meaning in (("mask_token_id", "the token id"), ("num_depths", "the number of tokens per forward")):
            if source.fields[key] is None and getattr(cfg, key) is None:
                raise ConfigError(
                    f"policy.draft.{key}: got null, and the draft's config.json does not have it either. Set it to "
                    f"{meaning} that the draft was trained with."
                )

    def loaded_fields(self, cfg: PEagleDraftConfig, source: SourceConfig) -> dict[str, Any]:
        """The number of depths is how it is trained from now on, so the configuration may change it."""
        fields = dict(source.fields)
        fields["num_depths"] = fields["num_depths"] if cfg.num_depths is None else cfg.num_depths
        fields["mask_token_id"] = cfg.mask_token_id if fields["mask_token_id"] is None else fields["mask_token_id"]
        return fields

    def check(
        self, cfg: PEagleDraftConfig, arch: PEagleArchitecture, *, policy: Mapping[str, Any], k: int | None
    ) -> None:
        """The placeholder's token; both norms before the projection exclude each other."""
        if cfg.mask_token_id not in (None, arch.mask_token_id):
            raise ConfigError(
                f"policy.draft.mask_token_id: got {cfg.mask_token_id}; the draft in policy.draft.model_name has "
                f"{arch.mask_token_id}. Remove the key or set it to {arch.mask_token_id}."
            )
        check_mask_token(arch.mask_token_id, policy, vocab_size=arch.vocab_size)
        if arch.fc_norm and arch.norm_before_fc:
            raise ConfigError(
                "policy.draft.fc_norm: got true beside norm_before_fc; they exclude each other. Turn one off."
            )

    def max_num_speculative_tokens(self, cfg: PEagleDraftConfig, arch: PEagleArchitecture) -> int | None:
        """Depths trained."""
        return arch.num_depths

    def write_config(self, arch: PEagleArchitecture, *, dtype: str) -> dict[str, Any]:
        """The native layout."""
        return written_fused(arch, dtype=dtype, algo=self.algo) | {
            "norm_output": False,
            "parallel_drafting": True,
            "mask_token_id": arch.mask_token_id,
            "pard_token": arch.mask_token_id,
            "num_depths": arch.num_depths,
        }

    def serving(self, arch: PEagleArchitecture, *, device: str | None) -> Serving:
        """The engine's own method."""
        return Serving("eagle3", {"parallel_drafting": True})


def _mask_token(raw: Mapping[str, Any]) -> int | None:
    """The one id under all the keys that a config.json has, None without any."""
    nested = raw.get("dflash_config") or {}
    found = {key: raw[key] for key in _MASK_KEYS if raw.get(key) is not None}
    found |= {f"dflash_config.{key}": nested[key] for key in _MASK_KEYS[:1] if nested.get(key) is not None}
    if len(set(found.values())) > 1:
        raise ConfigError(
            f"{KEY}: its config.json names different mask tokens: {found}; the engine takes one, the trainer another. "
            "Keep the one that the draft was trained with."
        )
    return next(iter(found.values()), None)


def _depths(raw: Mapping[str, Any]) -> int | None:
    return next((raw[key] for key in _DEPTH_KEYS if raw.get(key) is not None), None)


def _read_native(raw: Mapping[str, Any]) -> SourceConfig:
    architectures = raw.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    families = {**NATIVE_FAMILIES, **_PARALLEL_FAMILIES}
    if name not in families:
        raise ConfigError(
            f"{KEY}: its config.json has architectures {architectures!r}; a peagle draft has one of "
            f"{sorted(families)} or speculators_model_type peagle. The directory holds a draft of another algorithm, "
            "or no draft."
        )
    mask = _mask_token(raw)
    if name not in _PARALLEL_FAMILIES and mask is None and not raw.get("parallel_drafting"):
        raise ConfigError(
            f"{KEY}: its config.json has neither parallel_drafting nor a mask token, so it is an eagle3 draft; "
            "policy.draft.algo is peagle. Set that to eagle3, or use another draft."
        )
    eagle = raw.get("eagle_config") or {}
    refuse_eagle_config(eagle)
    publisher = "automodel" if name == "LlamaEagle3DraftModel" else "native"
    ids = agreed(raw, eagle, ID_KEYS[0], default=None)
    return SourceConfig(
        publisher="nemo_rl" if EXPORT_MARK in raw else publisher,
        fields={
            **read_geometry(raw, families[name]),
            **{key: bool(agreed(raw, eagle, key, default=default)) for key, default in _SWITCHES.items()},
            "mask_token_id": mask,
            "num_depths": _depths(raw),
            "extra": kept_extra(raw, _KNOWN),
        },
        feature_ids=None if ids is None else tuple(ids),
        num_features=raw.get("num_aux_hidden_states", raw.get("num_aux_layers")),
    )


def _read_speculators(raw: Mapping[str, Any]) -> SourceConfig:
    kind = raw["speculators_model_type"]
    if kind != "peagle":
        raise ConfigError(
            f"{KEY}: its config.json has speculators_model_type {kind!r}; policy.draft.algo is peagle. Set that to the "
            "draft's algorithm."
        )
    for key in ("fc_norm", "norm_output"):
        if raw.get(key):
            raise ConfigError(
                f"{KEY}: its config.json has {key} {raw[key]}; the engine ignores that in this format, so the draft is "
                "served otherwise than it was trained. Use another draft."
            )
    ids = raw.get(ID_KEYS[0]) or raw.get(ID_KEYS[1])
    return SourceConfig(
        publisher="speculators",
        fields={
            **read_speculators_layers(raw, _KNOWN),
            # The engine's reading of this format: what the file does not say is off.
            **{key: bool(raw.get(key, default)) for key, default in _SWITCHES.items()},
            "mask_token_id": _mask_token(raw),
            "num_depths": _depths(raw),
        },
        feature_ids=tuple(ids) if ids else None,
    )
