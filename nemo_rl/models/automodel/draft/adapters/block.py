"""What block drafts have in common in configuration and in files: block, placeholder, features, transforms.

A native config.json keeps these in its `dflash_config`, at top level, or in both; `target_layer_ids` are layer outputs
counted from 0 there. Whatever would need another forward pass than the trainer's is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeVar

from nemo_rl.errors import ConfigError
from nemo_rl.models.automodel.draft.adapters.base import K_KEY, DraftAdapter, SourceConfig
from nemo_rl.models.automodel.draft.adapters.fields import (
    KEY,
    agreed,
    check_mask_token,
    feature_ids_from_layer_outputs,
    kept_extra,
    read_geometry,
    written_geometry,
)
from nemo_rl.models.automodel.draft.architecture import BlockArchitecture
from nemo_rl.models.automodel.draft.config import BlockDraftConfigBase

__all__ = [
    "BlockAdapter",
    "block_extra",
    "proposed_tokens",
    "read_native_block",
    "read_speculators_block",
    "written_block",
]

BlockConfigT = TypeVar("BlockConfigT", bound=BlockDraftConfigBase)
BlockArchT = TypeVar("BlockArchT", bound=BlockArchitecture)

NUM_FEATURES = 5
"""Policy layers that a new draft reads."""

_KNOWN = frozenset(
    {
        "dflash_config",
        "block_size",
        "mask_token_id",
        "target_layer_ids",
        "dspark_target_layer_ids",
        "is_causal",
        "layer_types",
        "sliding_window",
        "use_sliding_window",
        "max_window_layers",
        "speculators_model_type",
        "speculators_version",
        "speculators_config",
        "transformer_layer_config",
        "aux_hidden_state_layer_ids",
        "eagle_aux_hidden_state_layer_ids",
        "sliding_window_non_causal",
        "use_aux_hidden_state",
    }
)
_NESTED = "dflash_config"
_NESTED_KNOWN = frozenset({"mask_token_id", "target_layer_ids", "block_size", "causal", "projector_type"})
_IDENTITIES: Mapping[str, tuple[Any, ...]] = {
    "input_embedding_scale": (None, 1, 1.0),
    "output_multiplier": (None, 1, 1.0),
    "logit_scale": (None, 1, 1.0),
    "attention_value_scale": (None, 1, 1.0),
    "final_logit_softcapping": (None,),
    "attention_sink_bias": (None, False),
    "use_swa": (None, False),
    "swa_window_size": (None,),
    "use_aux_hidden_state": (None, True),
}
"""Transforms that the engine may apply; the values with which they do nothing."""

_OTHER_MODELS = ("conv_", "selector_")


class BlockAdapter(DraftAdapter[BlockConfigT, BlockArchT]):
    """The half that all block drafts share."""

    layer_family: ClassVar[Literal["llama", "qwen3"]] = "qwen3"
    default_num_layers: ClassVar[int] = 5
    depth_key: ClassVar[str] = "block_size"

    def default_feature_ids(self, num_layers: int) -> tuple[int, ...]:
        """Outputs of `NUM_FEATURES` layers, evenly spread from the second to the fourth from the end."""
        last = num_layers - 4
        indices = [round(1 + i * last / (NUM_FEATURES - 1)) for i in range(NUM_FEATURES)]
        if last < NUM_FEATURES - 1:
            example = list(range(max(1, min(3, num_layers - 1))))
            raise ConfigError(
                f"policy.draft.aux_layer_indices: got null; the default is {NUM_FEATURES} layers, spread from layer 1 "
                f"to N-3, which are not different ones in a policy of {num_layers} layers. Set it, e.g. to {example}."
            )
        return feature_ids_from_layer_outputs(indices)

    def new_fields(self, cfg: BlockConfigT, *, policy: Mapping[str, Any], k: int | None) -> dict[str, Any]:
        """Block size and placeholder."""
        size = cfg.block_size
        if size is None and k is not None:
            size = k + self.new_first_slot(cfg)
        if size is None:
            raise ConfigError(
                "policy.draft.block_size: got null for a new draft that is not served. Set it, e.g. to 8."
            )
        if cfg.mask_token_id is None:
            raise ConfigError(
                "policy.draft.mask_token_id: got null for a new draft. Set it to a token id that never occurs in the "
                f"policy's text, below its vocab_size of {policy['vocab_size']} (151669 for Qwen3)."
            )
        extra = {"num_target_layers": int(policy["num_hidden_layers"])}
        causal = {} if "causal" in self.switches else {"causal": False}
        return {"block_size": size, "mask_token_id": cfg.mask_token_id, "extra": extra} | causal

    def new_first_slot(self, cfg: BlockConfigT) -> int:
        """First predicting slot of a new draft; see `BlockArchitecture.first_slot`."""
        return 1

    def check_source(self, cfg: BlockConfigT, source: SourceConfig) -> None:
        """Readers of a file without feature ids assume different ones."""
        if source.feature_ids is None and cfg.aux_layer_indices is None:
            raise ConfigError(
                "policy.draft.aux_layer_indices: got null, and the draft's config.json has no target_layer_ids. Set "
                "the layers that it was trained on (counted from 0)."
            )

    def check(self, cfg: BlockConfigT, arch: BlockArchT, *, policy: Mapping[str, Any], k: int | None) -> None:
        """Block size, placeholder, number of proposed tokens, the policy that the draft was made for."""
        for key in ("block_size", "mask_token_id"):
            given, own = getattr(cfg, key), getattr(arch, key)
            if given is not None and given != own:
                raise ConfigError(
                    f"policy.draft.{key}: got {given}; the draft in policy.draft.model_name has {own}. Remove the key "
                    f"or set it to {own}."
                )
        _check_block(arch, k)
        check_mask_token(arch.mask_token_id, policy, vocab_size=arch.vocab_size)
        layers = arch.extra.get("num_target_layers")
        if layers is not None and layers != policy["num_hidden_layers"]:
            raise ConfigError(
                f"policy.draft.model_name: the draft was made for a policy of {layers} layers; this one has "
                f"{policy['num_hidden_layers']}. Use a draft of this policy."
            )

    def max_num_speculative_tokens(self, cfg: BlockConfigT, arch: BlockArchT) -> int | None:
        """Tokens that a block predicts."""
        return arch.num_predicted


def _check_block(arch: BlockArchitecture, k: int | None) -> None:
    size, predicted = arch.block_size, arch.num_predicted
    if isinstance(size, bool) or not isinstance(size, int) or size < 2:
        raise ConfigError(
            f"policy.draft.block_size: got {size!r}; must be an integer >= 2. Set it to what was trained."
        )
    if k is not None and k != predicted:
        raise ConfigError(
            f"{K_KEY}: got {k}; a block of {size} slots predicts {predicted} tokens, all of which see each other, so "
            f"another number is not what is trained. Set it to {predicted}, or policy.draft.block_size to "
            f"{k + arch.first_slot} for a new draft."
        )


# -- reading ---------------------------------------------------------------------------------------------------------


def read_native_block(raw: Mapping[str, Any], *, projectors: tuple[str | None, ...]) -> dict[str, Any]:
    """Arguments of a `BlockArchitecture` from a native config.json, `feature_ids` and `extra` included.

    Args:
        raw: the parsed file.
        projectors: values of `projector_type` that name this algorithm.
    """
    nested = raw.get("dflash_config") or {}
    if raw.get("model_type", "qwen3") != "qwen3":
        raise ConfigError(
            f"{KEY}: its config.json has model_type {raw['model_type']!r}; block drafts of type qwen3 are supported. "
            "Use another draft."
        )
    projector = nested.get("projector_type", raw.get("projector_type"))
    if projector not in projectors:
        raise ConfigError(
            f"{KEY}: its config.json has projector_type {projector!r}; must be one of {list(projectors)}. The draft "
            "is another algorithm's: set policy.draft.algo to that."
        )
    _refuse_transforms(raw, nested)
    _refuse_windows(raw)
    causal = raw.get("is_causal")
    block = {key: agreed(raw, nested, key, default=None) for key in ("block_size", "mask_token_id")}
    outputs = agreed(raw, nested, "target_layer_ids", default=raw.get("dspark_target_layer_ids"))
    return _block_fields(raw, block) | {
        "causal": bool(nested.get("causal", False) if causal is None else causal),
        "feature_ids": None if outputs is None else feature_ids_from_layer_outputs(outputs),
    }


def read_speculators_block(raw: Mapping[str, Any], *, model_type: str) -> dict[str, Any]:
    """The same from a file in the speculators format.

    Args:
        raw: the parsed file.
        model_type: what its `speculators_model_type` must be.
    """
    if raw["speculators_model_type"] != model_type:
        raise ConfigError(
            f"{KEY}: its config.json has speculators_model_type {raw['speculators_model_type']!r}; must be "
            f"{model_type}. Set policy.draft.algo to the draft's algorithm."
        )
    layer = raw.get("transformer_layer_config")
    if not isinstance(layer, Mapping) or layer.get("model_type") != "qwen3":
        raise ConfigError(f"{KEY}: its config.json needs transformer_layer_config of model_type qwen3.")
    _refuse_transforms(raw, {})
    _refuse_windows({**layer, **raw})
    outer = {key: raw[key] for key in ("draft_vocab_size", "target_hidden_size") if raw.get(key) is not None}
    fields = _block_fields({**layer, **outer}, {key: raw.get(key) for key in ("block_size", "mask_token_id")})
    ids = raw.get("aux_hidden_state_layer_ids") or raw.get("eagle_aux_hidden_state_layer_ids")
    return fields | {"causal": False, "feature_ids": tuple(ids) if ids else None}


def proposed_tokens(raw: Mapping[str, Any]) -> int | None:
    """Tokens per step that a file in the speculators format proposes, where it says so."""
    for method in (raw.get("speculators_config") or {}).get("proposal_methods") or ():
        if method.get("speculative_tokens") is not None:
            return int(method["speculative_tokens"])
    return None


def block_extra(raw: Mapping[str, Any], known: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Fields of a source config that are written back on export, those inside `dflash_config` included.

    Args:
        raw: the parsed file.
        known: keys that the adapter reads in either place, beside those of all block drafts.
    """
    nested = {
        key: value
        for key, value in (raw.get(_NESTED) or {}).items()
        if key not in _NESTED_KNOWN | known | _IDENTITIES.keys()
    }
    extra = kept_extra(raw, _KNOWN | known | _IDENTITIES.keys())
    return extra | ({_NESTED: nested} if nested else {})


def _block_fields(raw: Mapping[str, Any], block: Mapping[str, Any]) -> dict[str, Any]:
    missing = [key for key, value in block.items() if value is None]
    if missing:
        raise ConfigError(f"{KEY}: its config.json lacks {missing}. Add what the draft was trained with.")
    return read_geometry(raw, "qwen3") | dict(block)


def _refuse_transforms(raw: Mapping[str, Any], nested: Mapping[str, Any]) -> None:
    for key, identities in _IDENTITIES.items():
        for block in (raw, nested):
            if block.get(key) not in identities:
                raise ConfigError(
                    f"{KEY}: its config.json has {key} {block[key]!r}, which training does not apply. Use a draft "
                    "without it."
                )
    other = sorted(key for key in {*raw, *nested} if key.startswith(_OTHER_MODELS))
    if other:
        raise ConfigError(f"{KEY}: its config.json has {other}; such drafts (DFlash 2) are not supported.")


def _refuse_windows(raw: Mapping[str, Any]) -> None:
    kinds = set(raw.get("layer_types") or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ConfigError(
            f"{KEY}: its config.json has layer_types {sorted(kinds)}; must be full_attention for all layers. Use a "
            "draft without sliding windows."
        )


# -- writing ---------------------------------------------------------------------------------------------------------


def written_block(arch: BlockArchitecture, *, dtype: str, algo: str, nested: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a native config.json that all block drafts have.

    Args:
        arch: the draft.
        dtype: of the weights beside it.
        algo: draft algorithm.
        nested: further entries of `dflash_config`.
    """
    return written_geometry(arch, dtype=dtype, algo=algo) | {
        "block_size": arch.block_size,
        "layer_types": ["full_attention"] * arch.num_hidden_layers,
        "dflash_config": {
            "mask_token_id": arch.mask_token_id,
            "target_layer_ids": [i - 1 for i in arch.feature_ids],
            "block_size": arch.block_size,
            "causal": arch.causal,
            **nested,
        }
        | dict(arch.extra.get(_NESTED, {})),
    }
