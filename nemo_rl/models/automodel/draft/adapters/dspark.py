"""DSpark drafts: native (flat, or with everything in `dflash_config`) and speculators.

The native layout is written flat, with what both runners of the engine read in the places where each looks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from nemo_rl.errors import ConfigError
from nemo_rl.models.automodel.draft.adapters.base import Serving, SourceConfig
from nemo_rl.models.automodel.draft.adapters.block import (
    BlockAdapter,
    block_extra,
    proposed_tokens,
    read_native_block,
    read_speculators_block,
    written_block,
)
from nemo_rl.models.automodel.draft.adapters.fields import EXPORT_MARK, KEY, agreed, architecture_name
from nemo_rl.models.automodel.draft.architecture import DraftArchitecture, DSparkArchitecture
from nemo_rl.models.automodel.draft.config import DSparkDraftConfig

__all__ = ["DSparkAdapter"]

_ARCHITECTURES = ("Qwen3DSparkModel", "DSparkDraftModel")
_EXTENSION = "nemo_rl.models.automodel.draft.serving.dspark:install"
_HEADS: Mapping[str, Any] = {
    "sample_from_anchor": True,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
_REQUIRED = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
_KNOWN = frozenset({*_HEADS, "dspark_bonus_anchor", "projector_type"})


class DSparkAdapter(BlockAdapter[DSparkDraftConfig, DSparkArchitecture]):
    """See the module docstring."""

    algo: ClassVar[str] = "dspark"
    k_rule: ClassVar[str] = "`block_size`; one less with `sample_from_anchor: false`"
    architecture: ClassVar[type[DraftArchitecture]] = DSparkArchitecture
    switches: ClassVar[Mapping[str, Any]] = _HEADS

    def new_first_slot(self, cfg: DSparkDraftConfig) -> int:
        """0 when the anchor's slot predicts."""
        return 1 if cfg.sample_from_anchor is False else 0

    def read_config(self, raw: Mapping[str, Any]) -> SourceConfig:
        """Recognise the publisher and read its config.json."""
        if "speculators_model_type" in raw:
            return _read_speculators(raw)
        if architecture_name(raw) not in _ARCHITECTURES:
            raise ConfigError(
                f"{KEY}: its config.json has architectures {raw.get('architectures')!r}; a dspark draft has one of "
                f"{list(_ARCHITECTURES)} or speculators_model_type dspark. The directory holds a draft of another "
                "algorithm, or no draft."
            )
        nested = raw.get("dflash_config") or {}
        heads = {key: agreed(raw, nested, key, default=None) for key in _HEADS}
        # A native draft without the key predicts from the anchor.
        heads["sample_from_anchor"] = True if heads["sample_from_anchor"] is None else heads["sample_from_anchor"]
        publisher = "nemo_rl" if EXPORT_MARK in raw else "native"
        return _source(raw, publisher, read_native_block(raw, projectors=(None, "dspark")), heads)

    def check_source(self, cfg: DSparkDraftConfig, source: SourceConfig) -> None:
        """A speculators file without the layout is read in two ways."""
        super().check_source(cfg, source)
        if source.fields["sample_from_anchor"] is None and cfg.sample_from_anchor is None:
            raise ConfigError(
                "policy.draft.sample_from_anchor: got null, and the draft's config.json does not have it either. The "
                "engine reads that as false, the trainer that wrote the file meant true. Set it to how the draft was "
                "trained."
            )

    def check(
        self, cfg: DSparkDraftConfig, arch: DSparkArchitecture, *, policy: Mapping[str, Any], k: int | None
    ) -> None:
        """The block, and what the engine can serve of the heads."""
        super().check(cfg, arch, policy=policy, k=k)
        if arch.markov_head_type not in ("vanilla", "gated", "rnn"):
            raise ConfigError(
                f"policy.draft.markov_head_type: got {arch.markov_head_type!r}; must be vanilla, gated or rnn."
            )
        if isinstance(arch.markov_rank, bool) or not isinstance(arch.markov_rank, int) or arch.markov_rank < 1:
            raise ConfigError(
                f"policy.draft.markov_rank: got {arch.markov_rank!r}; must be an integer >= 1. A draft without a "
                "Markov head is a dflash draft."
            )
        if cfg.serve and arch.markov_head_type != "vanilla":
            raise ConfigError(
                f"policy.draft.markov_head_type: got {arch.markov_head_type}; the engine serves vanilla only. Set "
                "policy.draft.serve: false to train the draft without serving it, or use a vanilla head."
            )

    def write_config(self, arch: DSparkArchitecture, *, dtype: str) -> dict[str, Any]:
        """The native layout."""
        ids = [i - 1 for i in arch.feature_ids]
        return written_block(arch, dtype=dtype, algo=self.algo, nested={}) | {
            "architectures": [_ARCHITECTURES[0]],
            **{key: getattr(arch, key) for key in _HEADS},
            # One runner of the engine reads these two here, the other in dflash_config.
            "target_layer_ids": ids,
            "mask_token_id": arch.mask_token_id,
        }

    def serving(self, arch: DSparkArchitecture, *, device: str | None) -> Serving:
        """The engine's own method; on CPU its runner lacks that, and the extension adds it to the block method."""
        return Serving("dflash", extension=_EXTENSION) if device == "cpu" else Serving("dspark")


def _source(raw: Mapping[str, Any], publisher: str, block: Mapping[str, Any], heads: Mapping[str, Any]) -> SourceConfig:
    if heads["enable_confidence_head"] is False:
        heads = {**heads, "confidence_head_with_markov": bool(heads["confidence_head_with_markov"])}
    missing = [key for key in _REQUIRED if heads[key] is None]
    if missing:
        raise ConfigError(f"{KEY}: its config.json lacks {missing}. Add what the draft was trained with.")
    fields: dict[str, Any] = {**block, **heads, "extra": block_extra(raw, _KNOWN)}
    return SourceConfig(publisher=publisher, feature_ids=fields.pop("feature_ids"), fields=fields)


def _read_speculators(raw: Mapping[str, Any]) -> SourceConfig:
    block = read_speculators_block(raw, model_type="dspark")
    heads = {key: raw.get(key) for key in _HEADS}
    proposed = proposed_tokens(raw)
    sizes = {True: block["block_size"], False: block["block_size"] - 1}
    is_anchor_first = heads["sample_from_anchor"]
    if proposed is not None and is_anchor_first is not None and proposed != sizes[bool(is_anchor_first)]:
        raise ConfigError(
            f"{KEY}: its config.json proposes {proposed} tokens; a block of {block['block_size']} slots with "
            f"sample_from_anchor {is_anchor_first} predicts {sizes[bool(is_anchor_first)]}. Make them agree."
        )
    return _source(raw, "speculators", block, heads)
