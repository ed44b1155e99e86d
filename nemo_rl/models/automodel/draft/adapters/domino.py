"""Domino drafts in the native layout: a block draft whose `dflash_config` names the projector and its sizes.

The engine has no Domino. An extension of this program adds it, on every device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from nemo_rl.errors import ConfigError
from nemo_rl.models.automodel.draft.adapters.base import Serving, SourceConfig
from nemo_rl.models.automodel.draft.adapters.block import (
    MAX_BLOCK,
    BlockAdapter,
    block_extra,
    either,
    publisher_of,
    read_native_block,
    written_block,
)
from nemo_rl.models.automodel.draft.adapters.fields import (
    KEY,
    LIMITS,
    architecture_name,
    flag_at,
    integer_at,
)
from nemo_rl.models.automodel.draft.architecture import DominoArchitecture, DraftArchitecture
from nemo_rl.models.automodel.draft.config import DominoDraftConfig
from nemo_rl.utils.safe_files import shown

__all__ = ["DominoAdapter"]

_ARCHITECTURES = ("DominoDraftModel", "Qwen3DominoModel", "DFlashDraftModel", "Qwen3DFlashDraftModel")
"""Ours, whose name tells the engine's model table which class to build, and those of other publishers. The class names
of the original authors and of nemo_automodel are those of a plain block draft, with the projector beside them."""

_EXTENSION = "nemo_rl.models.automodel.draft.serving.domino:install"
_PROJECTOR = "domino"
_HEAD: Mapping[str, Any] = {"shift_label": True, "emb_dim": 256, "gru_hidden_dim": 1024, "pure_draft_prefix_len": 1}


class DominoAdapter(BlockAdapter[DominoDraftConfig, DominoArchitecture]):
    """See the module docstring."""

    algo: ClassVar[str] = "domino"
    k_rule: ClassVar[str] = "`block_size`; one less with `shift_label: false`"
    architecture: ClassVar[type[DraftArchitecture]] = DominoArchitecture
    switches: ClassVar[Mapping[str, Any]] = _HEAD
    settable: ClassVar[tuple[str, ...]] = (*BlockAdapter.settable, "shift_label", "pure_draft_prefix_len")

    def new_first_slot(self, cfg: DominoDraftConfig) -> int:
        """0 when the anchor's slot predicts."""
        return 1 if cfg.shift_label is False else 0

    def read_config(self, raw: Mapping[str, Any]) -> SourceConfig:
        """Recognise the publisher and read its config.json."""
        name = architecture_name(raw)
        if name not in _ARCHITECTURES:
            raise ConfigError(
                f"{KEY}: its config.json has architectures {shown(name)}; a domino draft has one of "
                f"{list(_ARCHITECTURES)}. The directory holds a draft of another algorithm, or no draft."
            )
        fields = read_native_block(raw, projectors=(_PROJECTOR,))
        head = {
            "shift_label": either(raw, "shift_label", read=flag_at),
            "emb_dim": either(raw, "emb_dim", read=_width_at),
            "gru_hidden_dim": either(raw, "gru_hidden_dim", read=_width_at),
            "pure_draft_prefix_len": either(raw, "pure_draft_prefix_len", read=_prefix_at),
        }
        missing = [key for key in ("emb_dim", "gru_hidden_dim") if head[key] is None]
        if missing:
            raise ConfigError(
                f"{KEY}: its config.json lacks {missing} in dflash_config. Add what the draft was trained with."
            )
        return SourceConfig(
            publisher=publisher_of(raw),
            feature_ids=fields.pop("feature_ids"),
            fields={**fields, **head, "extra": block_extra(raw, frozenset(_HEAD))},
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


def _width_at(raw: Mapping[str, Any], key: str) -> int | None:
    return integer_at(raw, key, low=1, high=LIMITS["hidden_size"])


def _prefix_at(raw: Mapping[str, Any], key: str) -> int | None:
    return integer_at(raw, key, high=MAX_BLOCK)
