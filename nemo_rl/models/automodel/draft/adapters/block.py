"""What block drafts have in common in configuration and in files: block, placeholder, features, transforms.

A native config.json keeps these in its `dflash_config`, at top level, or in both; `target_layer_ids` are layer outputs
counted from 0 there. The speculators layout has the layers in `transformer_layer_config`, the rest at top level, and
ids "after l layers". Whatever would need another forward pass than the trainer's is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, TypeVar

from nemo_rl.errors import ConfigError
from nemo_rl.models.automodel.draft.adapters.base import K_KEY, DraftAdapter, SourceConfig, Verifier
from nemo_rl.models.automodel.draft.adapters.fields import (
    EXPORT_MARK,
    KEY,
    LAYER,
    LIMITS,
    SPECULATORS_KNOWN,
    WINDOW_KEYS,
    architecture_name,
    block_at,
    check_mask_token,
    feature_ids_from_layer_outputs,
    flag_at,
    integer_at,
    integers_at,
    is_speculators,
    kept_extra,
    number_at,
    read_geometry,
    read_layer,
    refuse_windows,
    speculators_extra,
    written_geometry,
    written_speculators,
)
from nemo_rl.models.automodel.draft.architecture import BlockArchitecture
from nemo_rl.models.automodel.draft.config import BlockDraftConfigBase
from nemo_rl.utils.safe_files import shown

__all__ = [
    "MAX_BLOCK",
    "BlockAdapter",
    "block_algorithm",
    "block_extra",
    "check_proposed",
    "either",
    "publisher_of",
    "read_native_block",
    "read_speculators_block",
    "text_at",
    "written_block",
    "written_speculators_block",
]

T = TypeVar("T")

BlockConfigT = TypeVar("BlockConfigT", bound=BlockDraftConfigBase)
BlockArchT = TypeVar("BlockArchT", bound=BlockArchitecture)

NUM_FEATURES = 5
"""Policy layers that a new draft reads."""

MAX_BLOCK = 1 << 12
"""Most slots of a block that a config.json may name."""

_NESTED = "dflash_config"
_BLOCK_SIZE = ("block_size", "dspark_block_size")
_MASK_TOKEN = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
_LAYER_OUTPUTS = ("target_layer_ids", "dspark_target_layer_ids")
_AFTER_LAYERS = ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")
_CAUSAL = ("causal", "is_causal")
"""Names of one value each; the engine takes the first that it finds, in an order that its runners do not share."""

_SCALES = ("input_embedding_scale", "output_multiplier", "logit_scale", "attention_value_scale")
_LIMITS_OF_VALUES = ("final_logit_softcapping", "swa_window_size")
_SWITCHED_OFF = ("attention_sink_bias", "add_swa_attention_sink_bias", "use_swa")
_SWITCHED_ON = ("use_aux_hidden_state", "is_neox_style")
_TRANSFORMS = frozenset({*_SCALES, *_LIMITS_OF_VALUES, *_SWITCHED_OFF, *_SWITCHED_ON})
"""Transforms that the engine may apply; read only to refuse all but the values with which they do nothing."""

_STATED = {*_BLOCK_SIZE, *_MASK_TOKEN, *_LAYER_OUTPUTS, *_CAUSAL, "projector_type"}
_NESTED_KNOWN = _TRANSFORMS | _STATED
_KNOWN = (
    _NESTED_KNOWN
    | SPECULATORS_KNOWN
    | WINDOW_KEYS
    | {
        *_AFTER_LAYERS,
        _NESTED,
        "eagle_config",
        "num_target_layers",
        "sliding_window_non_causal",
        # The engine's own notes about K, which an export must not fix.
        "n_predict",
        "num_lookahead_tokens",
    }
)

_MODEL_TYPES = ("qwen3", "dflash", "dspark", "domino")
"""`model_type` of native drafts with layers of the Qwen3 family; the last three are verl-SpeCo's."""

_OTHER_MODELS = ("conv_", "selector_")


def block_algorithm(raw: Mapping[str, Any]) -> str | None:
    """The block algorithm that a config.json names, None for another or none.

    The class name decides; a DFlash class with a projector of another algorithm is that one's.

    Args:
        raw: the parsed file.
    """
    if not isinstance(raw, Mapping):
        return None
    if is_speculators(raw):
        kind = raw["speculators_model_type"]
        return kind if isinstance(kind, str) and kind in ("dflash", "dspark") else None
    name = architecture_name(raw) or ""
    if "DFlash2" in name:
        return None
    named = (algo for word, algo in (("Domino", "domino"), ("DSpark", "dspark"), ("DFlash", "dflash")) if word in name)
    algo = next(named, None)
    nested = raw.get(_NESTED)
    projectors = [block.get("projector_type") for block in (nested, raw) if isinstance(block, Mapping)]
    other = next((p for p in projectors if isinstance(p, str) and p in ("domino", "dspark")), None)
    return other if algo == "dflash" and other is not None else algo


def publisher_of(raw: Mapping[str, Any]) -> str:
    """Who wrote a block draft's config.json, as far as it can be told.

    Args:
        raw: the parsed file.
    """
    return "nemo_rl" if EXPORT_MARK in raw else "speculators" if is_speculators(raw) else "native"


class BlockAdapter(DraftAdapter[BlockConfigT, BlockArchT]):
    """The half that all block drafts share."""

    layer_family: ClassVar[Literal["llama", "qwen3"]] = "qwen3"
    default_num_layers: ClassVar[int] = 5
    depth_key: ClassVar[str] = "block_size"

    settable: ClassVar[tuple[str, ...]] = ("block_size", "mask_token_id")
    """Fields that the configuration may state where a file does not."""

    def claims(self, raw: Mapping[str, Any]) -> bool:
        """By class name, projector or speculators type."""
        return block_algorithm(raw) == self.algo

    def default_feature_ids(self, num_layers: int) -> tuple[int, ...]:
        """Outputs of `NUM_FEATURES` layers, evenly spread from the second to the third from the end."""
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
        """What a file leaves open, readers fill in differently: the configuration must state it."""
        for key in self.settable:
            if source.fields[key] is None and getattr(cfg, key) is None:
                raise ConfigError(
                    f"policy.draft.{key}: got null, and the draft's config.json does not have it either; readers "
                    "differ about what that means. Set it to what the draft was trained with."
                )
        if source.feature_ids is None and cfg.aux_layer_indices is None:
            raise ConfigError(
                "policy.draft.aux_layer_indices: got null, and the draft's config.json has no target_layer_ids. Set "
                "the layers that it was trained on (counted from 0)."
            )

    def loaded_fields(self, cfg: BlockConfigT, source: SourceConfig) -> dict[str, Any]:
        """The file's, and the configuration's where the file is silent."""
        fields = dict(source.fields)
        return fields | {key: getattr(cfg, key) for key in self.settable if fields[key] is None}

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

    def computed_positions(self, cfg: BlockConfigT, arch: BlockArchT, *, tokens: int, samples: int) -> int:
        """The slots of all blocks."""
        return samples * cfg.num_anchors * arch.block_size


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


def text_at(raw: Mapping[str, Any], key: str, *, allowed: tuple[str, ...] | None = None) -> str | None:
    """A string; None when it is absent or null.

    Args:
        raw: the parsed file, or a block of it.
        key: name of the value.
        allowed: what it may be; None = anything.
    """
    value = raw.get(key)
    if value is None:
        return None
    if not isinstance(value, str) or (allowed is not None and value not in allowed):
        must = "a string" if allowed is None else f"one of {list(allowed)}"
        raise ConfigError(f"{KEY}: its config.json has {key} {shown(value)}; must be {must}. Correct the file.")
    return value


def either(raw: Mapping[str, Any], *keys: str, read: Callable[[Mapping[str, Any], str], T | None]) -> T | None:
    """The one value that a file states under any of several names, at top level, in its `dflash_config` or in both.

    Args:
        raw: the parsed file.
        keys: names of the value.
        read: typed reader of one name in one block.
    """
    blocks = (("", raw), (f"{_NESTED}.", block_at(raw, _NESTED)))
    stated = {f"{where}{key}": read(block, key) for key in keys for where, block in blocks}
    found = [(where, value) for where, value in stated.items() if value is not None]
    for where, value in found[1:]:
        if value != found[0][1]:
            raise ConfigError(
                f"{KEY}: its config.json states {keys[0]} twice: {found[0][0]} is {shown(found[0][1])}, {where} is "
                f"{shown(value)}. Make them equal, to what the draft was trained with."
            )
    return found[0][1] if found else None


def read_native_block(raw: Mapping[str, Any], *, projectors: tuple[str | None, ...]) -> dict[str, Any]:
    """Arguments of a `BlockArchitecture` from a native config.json, `feature_ids` included, `extra` not.

    Args:
        raw: the parsed file.
        projectors: values of `projector_type` that name this algorithm.
    """
    text_at(raw, "model_type", allowed=_MODEL_TYPES)
    projector = either(raw, "projector_type", read=text_at)
    if projector not in projectors:
        raise ConfigError(
            f"{KEY}: its config.json has projector_type {shown(projector)}; must be one of {list(projectors)}. The "
            "draft is another algorithm's: set policy.draft.algo to that."
        )
    _refuse_transforms(raw)
    outputs = either(raw, *_LAYER_OUTPUTS, read=integers_at)
    ids = either(raw, *_AFTER_LAYERS, read=_ids_at)
    after = None if outputs is None else feature_ids_from_layer_outputs(outputs)
    if ids is not None and after is not None and ids != after:
        raise ConfigError(
            f"{KEY}: its config.json has target_layer_ids {list(outputs or ())}, counted from 0, and "
            f"eagle_aux_hidden_state_layer_ids {list(ids)}, which the engine takes first and reads as layers passed "
            f"({list(after)} would be equal). Remove the latter, or make them agree."
        )
    fields: dict[str, Any] = read_geometry(raw, "qwen3") | _stated_block(raw)
    _refuse_windows(raw, fields["num_hidden_layers"])
    return fields | {
        "causal": bool(either(raw, *_CAUSAL, read=flag_at)),
        "feature_ids": after if ids is None else ids,
    }


def read_speculators_block(raw: Mapping[str, Any], *, model_type: str) -> dict[str, Any]:
    """The same from a file in the speculators layout.

    Args:
        raw: the parsed file.
        model_type: what its `speculators_model_type` must be.
    """
    if raw.get("speculators_model_type") != model_type:
        raise ConfigError(
            f"{KEY}: its config.json has speculators_model_type {shown(raw.get('speculators_model_type'))}; must be "
            f"{model_type}. Set policy.draft.algo to the draft's algorithm."
        )
    layer = read_layer(raw, ("qwen3",))
    _refuse_transforms(raw)
    _refuse_transforms(layer)
    fields: dict[str, Any] = read_geometry(layer, "qwen3") | _stated_block(raw)
    for block in (raw, layer):
        _refuse_windows(block, fields["num_hidden_layers"])
    # Of layers without a window it says nothing: the library never lets them be causal.
    flag_at(raw, "sliding_window_non_causal")
    return fields | {"causal": False, "feature_ids": either(raw, *_AFTER_LAYERS, read=_ids_at)}


def check_proposed(raw: Mapping[str, Any], block_size: int | None, *, first_slot: int | None) -> None:
    """Refuse a file in the speculators layout that proposes another number of tokens than its blocks predict.

    Args:
        raw: the parsed file.
        block_size: that it names.
        first_slot: first slot that predicts; None = it does not say.
    """
    methods = block_at(raw, "speculators_config").get("proposal_methods")
    if methods is None:
        return
    if not isinstance(methods, (list, tuple)) or not all(isinstance(m, Mapping) for m in methods):
        raise ConfigError(
            f"{KEY}: its config.json has speculators_config.proposal_methods that are no list of objects. Correct the "
            "file."
        )
    for method in methods:
        proposed = integer_at(method, "speculative_tokens", low=1)
        if proposed is None or block_size is None or first_slot is None:
            continue
        if proposed != block_size - first_slot:
            raise ConfigError(
                f"{KEY}: its config.json proposes {proposed} tokens from blocks of {block_size} slots, which predict "
                f"{block_size - first_slot}. Correct speculative_tokens or block_size in the file to what was trained."
            )


def block_extra(raw: Mapping[str, Any], known: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Fields of a source config that are written back on export, those of its nested blocks included.

    Args:
        raw: the parsed file.
        known: keys that the adapter reads in either place, beside those of all block drafts.
    """
    nested = {k: v for k, v in block_at(raw, _NESTED).items() if k not in _NESTED_KNOWN | known}
    layers = _target_layers({**block_at(raw, LAYER), **raw})
    return (
        (speculators_extra if is_speculators(raw) else kept_extra)(raw, _KNOWN | known)
        | ({} if layers is None else {"num_target_layers": layers})
        | ({_NESTED: kept_extra(nested, frozenset())} if nested else {})
    )


def _ids_at(raw: Mapping[str, Any], key: str) -> tuple[int, ...] | None:
    return integers_at(raw, key, low=0)


def _stated_block(raw: Mapping[str, Any]) -> dict[str, int | None]:
    def size_at(block: Mapping[str, Any], key: str) -> int | None:
        return integer_at(block, key, low=2, high=MAX_BLOCK)

    def token_at(block: Mapping[str, Any], key: str) -> int | None:
        return integer_at(block, key, high=LIMITS["vocab_size"] - 1)

    return {
        "block_size": either(raw, *_BLOCK_SIZE, read=size_at),
        "mask_token_id": either(raw, *_MASK_TOKEN, read=token_at),
    }


def _target_layers(raw: Mapping[str, Any]) -> int | None:
    """Layers of the policy that a draft was made for."""
    high = LIMITS["num_hidden_layers"]
    stated = integer_at(raw, "num_target_layers", low=1, high=high)
    # verl-SpeCo's name; its older files count the draft's features under the usual one.
    own = integer_at(raw, "target_num_hidden_layers", low=1, high=high)
    features = integer_at(raw, "num_context_layers", low=1, high=high)
    if own is not None and stated not in (None, own, features):
        raise ConfigError(
            f"{KEY}: its config.json has num_target_layers {stated} and target_num_hidden_layers {own}. Make them "
            "equal."
        )
    return stated if own is None else own


def _refuse_transforms(raw: Mapping[str, Any]) -> None:
    nested = block_at(raw, _NESTED)
    for block in (raw, nested):
        stated: dict[str, Any] = {key: number_at(block, key) for key in (*_SCALES, *_LIMITS_OF_VALUES)}
        stated |= {key: flag_at(block, key) for key in (*_SWITCHED_OFF, *_SWITCHED_ON)}
        for key, value in stated.items():
            nothing = 1.0 if key in _SCALES else None if key in _LIMITS_OF_VALUES else key in _SWITCHED_ON
            if value not in (None, nothing):
                raise ConfigError(
                    f"{KEY}: its config.json has {key} {value!r}, which training does not apply. Use a draft without "
                    "it."
                )
    other = sorted(key for key in {*raw, *nested} if key.startswith(_OTHER_MODELS))
    if other:
        raise ConfigError(f"{KEY}: its config.json has {shown(other)}; such drafts (DFlash 2) are not supported.")
    if raw.get("eagle_config"):
        raise ConfigError(
            f"{KEY}: its config.json has an eagle_config, whose entries the engine mixes with those of dflash_config. "
            "Remove it if the draft is one of blocks; otherwise set policy.draft.algo to the draft's algorithm."
        )


def _refuse_windows(raw: Mapping[str, Any], num_layers: int) -> None:
    """Refuse layers with a sliding window, and a file that does not say of all whether they have one.

    Args:
        raw: the parsed file, or its part about the layers.
        num_layers: decoder layers of the draft.
    """
    refuse_windows(raw, num_layers)
    kinds = raw.get("layer_types")
    if kinds and len(kinds) < num_layers:
        raise ConfigError(
            f"{KEY}: its config.json has {len(kinds)} layer_types for num_hidden_layers {num_layers}. Make them agree."
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
        _NESTED: {
            **arch.extra.get(_NESTED, {}),
            "mask_token_id": arch.mask_token_id,
            "target_layer_ids": [i - 1 for i in arch.feature_ids],
            "block_size": arch.block_size,
            "causal": arch.causal,
            **nested,
        },
    }


def written_speculators_block(
    arch: BlockArchitecture,
    *,
    dtype: str,
    algo: str,
    k: int,
    verifier: Verifier,
    architecture: str,
    heads: Mapping[str, Any],
) -> dict[str, Any]:
    """A config.json in the speculators layout that the library and the engine read to the same draft.

    Args:
        arch: the draft.
        dtype: of the weights beside it.
        algo: draft algorithm, which is the library's name of it.
        k: tokens proposed per step.
        verifier: the policy.
        architecture: the library's class.
        heads: fields of the algorithm.

    Raises:
        ConfigError: the layout has no such draft.
    """
    _check_expressible(arch, k)
    written = written_speculators(
        arch,
        algo=algo,
        architecture=architecture,
        dtype=dtype,
        k=k,
        verifier=verifier,
        ids_key=_AFTER_LAYERS[0],
    )
    layer = written[LAYER] | {"layer_types": ["full_attention"] * arch.num_hidden_layers}
    return written | {
        LAYER: layer,
        "block_size": arch.block_size,
        "mask_token_id": arch.mask_token_id,
        "sample_from_anchor": arch.first_slot == 0,
        # The engine takes false as "causal" for all layers; the library asks it of layers with a window only.
        "sliding_window_non_causal": True,
        **heads,
    }


def _check_expressible(arch: BlockArchitecture, k: int) -> None:
    reason = None
    if arch.causal:
        reason = "slots that see only earlier ones (causal: true), where the library has full attention"
    elif arch.hidden_size != arch.target_hidden_size:
        reason = f"a hidden size of {arch.hidden_size}, where the policy's of {arch.target_hidden_size} is assumed"
    elif "partial_rotary_factor" in arch.rope:
        reason = "a partial_rotary_factor, which the library does not apply"
    if reason is not None:
        raise ConfigError(
            f"policy.draft.export_layouts: got speculators; the draft has {reason}. Remove it and export native."
        )
    if k != arch.num_predicted:
        raise ConfigError(f"{K_KEY}: got {k}; a block of {arch.block_size} slots predicts {arch.num_predicted}.")
