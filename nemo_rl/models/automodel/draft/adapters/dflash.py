"""DFlash drafts in two layouts, `native` and `speculators`.

`native` is that of the original authors, SpecForge and nemo_automodel; the engine loads it unchanged.
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
from nemo_rl.models.automodel.draft.adapters.fields import EXPORT_MARK, KEY, architecture_name
from nemo_rl.models.automodel.draft.architecture import DFlashArchitecture, DraftArchitecture
from nemo_rl.models.automodel.draft.config import DFlashDraftConfig

__all__ = ["DFlashAdapter"]

_NATIVE = ("DFlashDraftModel", "Qwen3DFlashDraftModel")
_KNOWN = frozenset({"sample_from_anchor", "is_neox_style"})


class DFlashAdapter(BlockAdapter[DFlashDraftConfig, DFlashArchitecture]):
    """See the module docstring."""

    algo: ClassVar[str] = "dflash"
    k_rule: ClassVar[str] = "`block_size` - 1"
    architecture: ClassVar[type[DraftArchitecture]] = DFlashArchitecture
    switches: ClassVar[Mapping[str, Any]] = {"causal": False}

    def read_config(self, raw: Mapping[str, Any]) -> SourceConfig:
        """Recognise the publisher and read its config.json."""
        if raw.get("sample_from_anchor") or (raw.get("dflash_config") or {}).get("sample_from_anchor"):
            raise ConfigError(
                f"{KEY}: its config.json has sample_from_anchor true; the slots of a dflash draft predict the token at "
                "their own position. Set policy.draft.algo to the draft's algorithm."
            )
        if raw.get("is_neox_style") is False:
            raise ConfigError(
                f"{KEY}: its config.json has is_neox_style false; interleaved rotary positions are not supported. Use "
                "another draft."
            )
        is_speculators = "speculators_model_type" in raw
        if is_speculators:
            fields = read_speculators_block(raw, model_type="dflash")
            _check_proposed(raw, fields["block_size"])
        else:
            name = architecture_name(raw)
            if name not in _NATIVE:
                raise ConfigError(
                    f"{KEY}: its config.json has architectures {raw.get('architectures')!r}; a dflash draft has one of "
                    f"{list(_NATIVE)} or speculators_model_type dflash. The directory holds a draft of another "
                    "algorithm, or no draft."
                )
            fields = read_native_block(raw, projectors=(None, "dflash"))
        feature_ids = fields.pop("feature_ids")
        publisher = "speculators" if is_speculators else "nemo_rl" if EXPORT_MARK in raw else "native"
        return SourceConfig(publisher, fields | {"extra": block_extra(raw, _KNOWN)}, feature_ids)

    def write_config(self, arch: DFlashArchitecture, *, dtype: str) -> dict[str, Any]:
        """The native layout."""
        return written_block(arch, dtype=dtype, algo=self.algo, nested={}) | {"architectures": ["DFlashDraftModel"]}

    def serving(self, arch: DFlashArchitecture, *, device: str | None) -> Serving:
        """The engine's own method."""
        return Serving("dflash")


def _check_proposed(raw: Mapping[str, Any], block_size: int) -> None:
    proposed = proposed_tokens(raw)
    if proposed is not None and proposed != block_size - 1:
        raise ConfigError(
            f"{KEY}: its config.json proposes {proposed} tokens from blocks of {block_size} slots, which predict "
            f"{block_size - 1}. Correct speculative_tokens or block_size in the file to what was trained."
        )
