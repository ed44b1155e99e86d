"""P-EAGLE drafts in two layouts, `native` and `speculators`.

`native` is EAGLE-3's with a placeholder: the tensor `mask_hidden` and the id of the mask token, which the engine looks
for under several keys. nemo_automodel, SpecForge, verl-SpeCo and this program write it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from nemo_rl.errors import ConfigError
from nemo_rl.models.automodel.draft.adapters.base import DraftAdapter, Serving, SourceConfig, Verifier
from nemo_rl.models.automodel.draft.adapters.eagle3 import (
    FUSED_BLOCKS,
    FUSED_KNOWN,
    ID_KEYS,
    LAYER_FAMILIES,
    MASK_KEYS,
    NATIVE_FAMILIES,
    check_named_features,
    checked_eagle_config,
    has_mask_token,
    native_features,
    native_publisher,
    read_native_layers,
    speculators_features,
    written_fused,
)
from nemo_rl.models.automodel.draft.adapters.fields import (
    KEY,
    LIMITS,
    agreed,
    architecture_name,
    block_at,
    check_mask_token,
    checked_triple,
    export_algo,
    flag_at,
    integer_at,
    is_speculators,
    kept_extra,
    read_geometry,
    read_layer,
    speculators_extra,
    written_speculators,
)
from nemo_rl.models.automodel.draft.architecture import DraftArchitecture, PEagleArchitecture
from nemo_rl.models.automodel.draft.config import PEagleDraftConfig
from nemo_rl.utils.safe_files import shown

__all__ = ["PEagleAdapter"]

_PARALLEL_FAMILIES = {
    "PEagleDraftModel": "llama",
    "PeagleLlamaForCausalLM": "llama",
    "PeagleQwen3ForCausalLM": "qwen3",
    "LlamaForCausalLMPeagle": "llama",
}
_FAMILIES = NATIVE_FAMILIES | _PARALLEL_FAMILIES
_SWITCHES: Mapping[str, Any] = {"norm_before_residual": False, "norm_before_fc": False, "fc_norm": False}
_DEPTH_KEYS = ("num_depths", "para_depths")
_MOST_DEPTHS = 1 << 10
# Without feedback there is no state to feed back normed or not, so `norm_output` of a native file says nothing.
_KNOWN = FUSED_KNOWN | {*MASK_KEYS, *_DEPTH_KEYS}
_BLOCKS = {**FUSED_BLOCKS, "dflash_config": frozenset({MASK_KEYS[0]})}


class PEagleAdapter(DraftAdapter[PEagleDraftConfig, PEagleArchitecture]):
    """See the module docstring."""

    algo: ClassVar[str] = "peagle"
    k_rule: ClassVar[str] = "at most `num_depths`"
    architecture: ClassVar[type[DraftArchitecture]] = PEagleArchitecture
    default_num_layers: ClassVar[int] = 4
    switches: ClassVar[Mapping[str, Any]] = {**_SWITCHES, "num_depths": 8}
    depth_key: ClassVar[str] = "num_depths"
    layouts: ClassVar[tuple[str, ...]] = ("native", "speculators")

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

    def claims(self, raw: Mapping[str, Any]) -> bool:
        """An architecture of P-EAGLE, or one of EAGLE-3 that proposes in parallel."""
        if is_speculators(raw):
            return raw["speculators_model_type"] == self.algo
        own = export_algo(raw)
        return _is_native(raw) if own is None else own == self.algo

    def read_config(self, raw: Mapping[str, Any]) -> SourceConfig:
        """Recognise the publisher and read its config.json."""
        return _read_speculators(raw) if is_speculators(raw) else _read_native(raw)

    def check_source(self, cfg: PEagleDraftConfig, source: SourceConfig) -> None:
        """The mask token and the number of depths must be said by someone; ids that nobody can count."""
        check_named_features(cfg.aux_layer_indices, source)
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

    def computed_positions(self, cfg: PEagleDraftConfig, arch: PEagleArchitecture, *, tokens: int, samples: int) -> int:
        """What the drop of deeper depths leaves, in the largest of the segments."""
        kept = (max(cfg.down_sample_ratio**depth, cfg.down_sample_ratio_min) for depth in range(arch.num_depths))
        return -(-int(tokens * sum(kept)) // cfg.num_segments)

    def write_config(self, arch: PEagleArchitecture, *, dtype: str) -> dict[str, Any]:
        """The native layout."""
        return written_fused(arch, dtype=dtype, algo=self.algo) | {
            "norm_output": False,
            "parallel_drafting": True,
            "mask_token_id": arch.mask_token_id,
            "pard_token": arch.mask_token_id,
            "num_depths": arch.num_depths,
        }

    def write_speculators(self, arch: PEagleArchitecture, *, dtype: str, k: int, verifier: Verifier) -> dict[str, Any]:
        """The speculators layout; tensor names are those of the native one."""
        if arch.fc_norm:
            raise ConfigError(
                "policy.draft.export_layouts: got speculators for a draft with fc_norm, which the engine ignores for "
                "P-EAGLE drafts in that layout, so it would serve another draft than was trained. Remove it."
            )
        return written_speculators(
            arch,
            algo=self.algo,
            architecture="PEagleDraftModel",
            dtype=dtype,
            k=k,
            verifier=verifier,
            ids_key=ID_KEYS[0],
        ) | {
            **{key: getattr(arch, key) for key in _SWITCHES},
            "norm_output": False,
            "embed_requires_grad": True,
            "mask_token_id": arch.mask_token_id,
            "num_depths": arch.num_depths,
        }

    def serving(self, arch: PEagleArchitecture, *, device: str | None) -> Serving:
        """The engine's own method."""
        return Serving("eagle3", {"parallel_drafting": True})


def _mask_token(*blocks: Mapping[str, Any]) -> int | None:
    """The one id under all the keys that the engine would look at, None without any.

    Args:
        blocks: the parsed file, and what else the engine takes for it.
    """
    found = []
    for block in blocks:
        nested = {f"dflash_config.{MASK_KEYS[0]}": block_at(block, "dflash_config").get(MASK_KEYS[0])}
        named = {**nested, **{key: block.get(key) for key in MASK_KEYS}}
        found += [
            (key, value) for key in named if (value := integer_at(named, key, high=LIMITS["vocab_size"])) is not None
        ]
    if len({value for _, value in found}) > 1:
        listed = ", ".join(f"{key} {value}" for key, value in found)
        raise ConfigError(
            f"{KEY}: its config.json names different mask tokens: {listed}; the engine takes one, the trainer another. "
            "Keep the one that the draft was trained with."
        )
    return found[0][1] if found else None


def _depths(raw: Mapping[str, Any]) -> int | None:
    found = {key: integer_at(raw, key, low=1, high=_MOST_DEPTHS) for key in _DEPTH_KEYS}
    named = {value for value in found.values() if value is not None}
    if len(named) > 1:
        raise ConfigError(f"{KEY}: its config.json has {found}. Make them equal.")
    return next(iter(named), None)


# -- the native layout -----------------------------------------------------------------------------------------------


def _is_native(raw: Mapping[str, Any]) -> bool:
    name = architecture_name(raw)
    return name in _PARALLEL_FAMILIES or (
        name in NATIVE_FAMILIES and bool(raw.get("parallel_drafting") or has_mask_token(raw))
    )


def _read_native(raw: Mapping[str, Any]) -> SourceConfig:
    name = architecture_name(raw)
    if name not in _FAMILIES:
        raise ConfigError(
            f"{KEY}: its config.json has architectures {shown(raw.get('architectures'))}; a peagle draft has one of "
            f"{sorted(_FAMILIES)} or speculators_model_type peagle. The directory holds a draft of another algorithm, "
            "or no draft."
        )
    mask, is_parallel = _mask_token(raw), flag_at(raw, "parallel_drafting")
    if name not in _PARALLEL_FAMILIES and mask is None and not is_parallel:
        raise ConfigError(
            f"{KEY}: its config.json has neither parallel_drafting nor a mask token, so it is an eagle3 draft; "
            "policy.draft.algo is peagle. Set that to eagle3, or use another draft."
        )
    eagle = checked_eagle_config(raw)
    publisher = native_publisher(raw)
    flag_at(raw, "norm_output")
    return SourceConfig(
        publisher=publisher,
        fields={
            **read_native_layers(raw, _FAMILIES[name], publisher=publisher),
            **{key: agreed(raw, eagle, key, default=default, read=flag_at) for key, default in _SWITCHES.items()},
            "mask_token_id": mask,
            "num_depths": _depths(raw),
            "extra": kept_extra(raw, _KNOWN, blocks=_BLOCKS),
        },
        **native_features(raw, eagle),
    )


# -- the speculators layout ------------------------------------------------------------------------------------------


def _read_speculators(raw: Mapping[str, Any]) -> SourceConfig:
    kind = raw["speculators_model_type"]
    if kind != "peagle":
        raise ConfigError(
            f"{KEY}: its config.json has speculators_model_type {shown(kind)}; policy.draft.algo is peagle. Set that "
            "to the draft's algorithm, or use another draft."
        )
    for key in ("fc_norm", "norm_output"):
        if flag_at(raw, key):
            raise ConfigError(
                f"{KEY}: its config.json has {key} {raw[key]}; the engine ignores that in this format, so the draft is "
                "served otherwise than it was trained. Use another draft."
            )
    layer = read_layer(raw, LAYER_FAMILIES)
    checked_eagle_config(layer)
    # The engine takes the block of the layers for the whole config and adds the token to it.
    mask, depths = _mask_token(raw, layer), _depths(raw)
    return SourceConfig(
        publisher="speculators",
        fields={
            **read_geometry(layer, layer["model_type"]),
            # The engine's reading of this format: what the file does not say is off.
            **{key: bool(flag_at(raw, key)) for key in _SWITCHES},
            "mask_token_id": mask,
            "num_depths": _proposed(raw) if depths is None else depths,
            "extra": speculators_extra(raw, _KNOWN, blocks=_BLOCKS),
        },
        feature_ids=speculators_features(raw),
    )


def _proposed(raw: Mapping[str, Any]) -> int | None:
    """Tokens per step in `proposal_methods`, where that library's trainer writes the number of depths."""
    methods = block_at(raw, "speculators_config").get("proposal_methods")
    if methods is None:
        return None
    if not isinstance(methods, list) or not all(isinstance(method, Mapping) for method in methods):
        raise ConfigError(
            f"{KEY}: its config.json has speculators_config.proposal_methods {shown(methods)}; must be a list of "
            "objects. Correct the file."
        )
    return integer_at(methods[0], "speculative_tokens", low=1, high=_MOST_DEPTHS) if methods else None
