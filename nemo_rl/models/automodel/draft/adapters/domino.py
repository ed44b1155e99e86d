"""Domino drafts in the native layout: a block draft whose `dflash_config` names the projector and its sizes.

The engine has no Domino. An extension of this program adds it, on every device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from nemo_rl.errors import ConfigError
from nemo_rl.models.automodel.draft.adapters.base import Serving, SourceConfig
from nemo_rl.models.automodel.draft.adapters.block import (
    BlockAdapter,
    block_extra,
    read_native_block,
    written_block,
)
from nemo_rl.models.automodel.draft.adapters.fields import EXPORT_MARK, KEY, agreed, architecture_name
from nemo_rl.models.automodel.draft.architecture import DominoArchitecture, DraftArchitecture
from nemo_rl.models.automodel.draft.config import DominoDraftConfig

__all__ = ["DominoAdapter"]

_ARCHITECTURES = ("DominoDraftModel", "DFlashDraftModel", "Qwen3DFlashDraftModel")
"""Ours, whose name tells the engine's model table which class to build, and those of other publishers."""

_EXTENSION = "nemo_rl.models.automodel.draft.serving.domino:install"
_PROJECTOR = "domino"
_HEAD: Mapping[str, Any] = {"shift_label": True, "emb_dim": 256, "gru_hidden_dim": 1024, "pure_draft_prefix_len": 1}


class DominoAdapter(BlockAdapter[DominoDraftConfig, DominoArchitecture]):
    """See the module docstring."""

    algo: ClassVar[str] = "domino"
    k_rule: ClassVar[str] = "`block_size`; one less with `shift_label: false`"
    architecture: ClassVar[type[DraftArchitecture]] = DominoArchitecture
    switches: ClassVar[Mapping[str, Any]] = _HEAD

    def new_first_slot(self, cfg: DominoDraftConfig) -> int:
        """0 when the anchor's slot predicts."""
        return 1 if cfg.shift_label is False else 0

    def read_config(self, raw: Mapping[str, Any]) -> SourceConfig:
        """Recognise the publisher and read its config.json."""
        if architecture_name(raw) not in _ARCHITECTURES:
            raise ConfigError(
                f"{KEY}: its config.json has architectures {raw.get('architectures')!r}; a domino draft has one of "
                f"{list(_ARCHITECTURES)}. The directory holds a draft of another algorithm, or no draft."
            )
        nested = raw.get("dflash_config") or {}
        fields = read_native_block(raw, projectors=(_PROJECTOR,))
        head = {key: agreed(raw, nested, key, default=None) for key in _HEAD}
        missing = [key for key, value in head.items() if value is None]
        if missing:
            raise ConfigError(
                f"{KEY}: its config.json lacks {missing} in dflash_config; readers differ about what that means. Add "
                "what the draft was trained with."
            )
        return SourceConfig(
            publisher="nemo_rl" if EXPORT_MARK in raw else "native",
            feature_ids=fields.pop("feature_ids"),
            fields={**fields, **head, "extra": block_extra(raw, frozenset({*_HEAD, "projector_type"}))},
        )

    def check(
        self, cfg: DominoDraftConfig, arch: DominoArchitecture, *, policy: Mapping[str, Any], k: int | None
    ) -> None:
        """The block, and that something is left to correct."""
        super().check(cfg, arch, policy=policy, k=k)
        if arch.pure_draft_prefix_len >= arch.num_predicted:
            raise ConfigError(
                f"policy.draft.pure_draft_prefix_len: got {arch.pure_draft_prefix_len}; must be below the "
                f"{arch.num_predicted} tokens that a block predicts, or nothing is corrected. Lower it."
            )

    def write_config(self, arch: DominoArchitecture, *, dtype: str) -> dict[str, Any]:
        """The native layout."""
        nested = {"projector_type": _PROJECTOR, **{key: getattr(arch, key) for key in _HEAD}}
        return written_block(arch, dtype=dtype, algo=self.algo, nested=nested) | {"architectures": [_ARCHITECTURES[0]]}

    def serving(self, arch: DominoArchitecture, *, device: str | None) -> Serving:
        """The engine's block method with the extension that corrects its logits."""
        return Serving("dflash", extension=_EXTENSION)
