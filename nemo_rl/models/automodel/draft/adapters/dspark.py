"""DSpark drafts: native (flat, or with everything in `dflash_config`) and speculators.

The native layout is written flat, with what both runners of the engine read in the places where each looks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from nemo_rl.errors import ConfigError
from nemo_rl.models.automodel.draft.adapters.base import LAYOUTS, Serving, SourceConfig, Verifier
from nemo_rl.models.automodel.draft.adapters.block import (
    BlockAdapter,
    block_extra,
    check_proposed,
    either,
    publisher_of,
    read_native_block,
    read_speculators_block,
    text_at,
    written_block,
    written_speculators_block,
)
from nemo_rl.models.automodel.draft.adapters.fields import (
    KEY,
    architecture_name,
    flag_at,
    integer_at,
    is_speculators,
    number_at,
)
from nemo_rl.models.automodel.draft.architecture import DraftArchitecture, DSparkArchitecture
from nemo_rl.models.automodel.draft.config import DSparkDraftConfig
from nemo_rl.utils.safe_files import shown

__all__ = ["DSparkAdapter"]

_ARCHITECTURES = ("Qwen3DSparkModel", "DSparkDraftModel", "DFlashDraftModel")
"""Of the original authors and nemo_automodel; of SpecForge and verl-SpeCo; one with the projector beside it."""

_EXTENSION = "nemo_rl.models.automodel.draft.serving.dspark:install"
_MAX_RANK = 1 << 14
_MARKOV_HEADS = ("vanilla", "gated", "rnn")
_HEADS: Mapping[str, Any] = {
    "sample_from_anchor": True,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
_REQUIRED = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
_KNOWN = frozenset({*_HEADS, "dspark_bonus_anchor"})


class DSparkAdapter(BlockAdapter[DSparkDraftConfig, DSparkArchitecture]):
    """See the module docstring."""

    algo: ClassVar[str] = "dspark"
    k_rule: ClassVar[str] = "`block_size`; one less with `sample_from_anchor: false`"
    architecture: ClassVar[type[DraftArchitecture]] = DSparkArchitecture
    switches: ClassVar[Mapping[str, Any]] = _HEADS
    settable: ClassVar[tuple[str, ...]] = (*BlockAdapter.settable, "sample_from_anchor")
    layouts: ClassVar[tuple[str, ...]] = LAYOUTS

    def new_first_slot(self, cfg: DSparkDraftConfig) -> int:
        """0 when the anchor's slot predicts."""
        return 1 if cfg.sample_from_anchor is False else 0

    def read_config(self, raw: Mapping[str, Any]) -> SourceConfig:
        """Recognise the publisher and read its config.json."""
        if is_speculators(raw):
            # Without the key the engine reads false, and the library meant true: `check_source` asks for it.
            block, heads = read_speculators_block(raw, model_type="dspark"), _read_heads(raw)
            anchor_first = heads["sample_from_anchor"]
            first_slot = None if anchor_first is None else 0 if anchor_first else 1
            check_proposed(raw, block["block_size"], first_slot=first_slot)
        else:
            name = architecture_name(raw)
            # A plain class is told by its projector, the others may do without.
            projectors = ("dspark",) if name == "DFlashDraftModel" else (None, "dspark")
            if name not in _ARCHITECTURES:
                raise ConfigError(
                    f"{KEY}: its config.json has architectures {shown(name)}; a dspark draft has one of "
                    f"{list(_ARCHITECTURES)} or speculators_model_type dspark. The directory holds a draft of another "
                    "algorithm, or no draft."
                )
            block, heads = read_native_block(raw, projectors=projectors), _read_heads(raw)
            if heads["sample_from_anchor"] is None:
                # A native draft without the key predicts from the anchor.
                heads["sample_from_anchor"] = True
        missing = [key for key in _REQUIRED if heads[key] is None]
        if missing:
            raise ConfigError(f"{KEY}: its config.json lacks {missing}. Add what the draft was trained with.")
        fields: dict[str, Any] = {**block, **heads, "extra": block_extra(raw, _KNOWN)}
        return SourceConfig(publisher=publisher_of(raw), feature_ids=fields.pop("feature_ids"), fields=fields)

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

    def write_speculators(self, arch: DSparkArchitecture, *, dtype: str, k: int, verifier: Verifier) -> dict[str, Any]:
        """The layout of vLLM's speculators library."""
        return written_speculators_block(
            arch,
            dtype=dtype,
            algo=self.algo,
            k=k,
            verifier=verifier,
            architecture="DSparkDraftModel",
            heads={key: getattr(arch, key) for key in _HEADS},
        )

    def serving(self, arch: DSparkArchitecture, *, device: str | None) -> Serving:
        """The engine's own method; on CPU its runner lacks that, and the extension adds it to the block method."""
        return Serving("dflash", extension=_EXTENSION) if device == "cpu" else Serving("dspark")


def _read_heads(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of both heads and of the layout, None where the file is silent and nothing follows."""
    rank = either(raw, "markov_rank", read=lambda block, key: integer_at(block, key, high=_MAX_RANK))
    if rank == 0:
        raise ConfigError(
            f"{KEY}: its config.json has markov_rank 0; a draft without a Markov head is a dflash draft. Set "
            "policy.draft.algo to dflash if its tensors agree."
        )
    anchor_first = either(raw, "sample_from_anchor", read=flag_at)
    bonus = either(raw, "dspark_bonus_anchor", read=flag_at)
    if bonus is not None and anchor_first not in (None, not bonus):
        raise ConfigError(
            f"{KEY}: its config.json has sample_from_anchor {anchor_first} and dspark_bonus_anchor {bonus}, which say "
            "the opposite of each other. Make them agree."
        )
    enabled = either(raw, "enable_confidence_head", read=flag_at)
    if enabled is None:
        # Both trainers that write the weight of its loss make the head when that is positive.
        weight = either(raw, "confidence_head_alpha", read=number_at)
        enabled = None if weight is None else weight > 0
    with_markov = either(raw, "confidence_head_with_markov", read=flag_at)
    return {
        "sample_from_anchor": (None if bonus is None else not bonus) if anchor_first is None else anchor_first,
        "markov_rank": rank,
        "markov_head_type": either(raw, "markov_head_type", read=_kind_at),
        "enable_confidence_head": enabled,
        # Means nothing without the head, and some leave it out then.
        "confidence_head_with_markov": False if with_markov is None and enabled is False else with_markov,
    }


def _kind_at(raw: Mapping[str, Any], key: str) -> str | None:
    return text_at(raw, key, allowed=_MARKOV_HEADS)
