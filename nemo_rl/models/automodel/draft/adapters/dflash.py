"""DFlash drafts in two layouts, `native` and `speculators`.

`native` is that of the original authors, SpecForge and nemo_automodel; the engine loads it unchanged.
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
    written_block,
    written_speculators_block,
)
from nemo_rl.models.automodel.draft.adapters.fields import KEY, architecture_name, flag_at, is_speculators
from nemo_rl.models.automodel.draft.architecture import DFlashArchitecture, DraftArchitecture
from nemo_rl.models.automodel.draft.config import DFlashDraftConfig
from nemo_rl.utils.safe_files import shown

__all__ = ["DFlashAdapter"]

_ARCHITECTURES = ("DFlashDraftModel", "Qwen3DFlashDraftModel", "DFlashForCausalLM")
"""Of the original authors and SpecForge, of nemo_automodel, of older verl-SpeCo."""

_KNOWN = frozenset({"sample_from_anchor"})


class DFlashAdapter(BlockAdapter[DFlashDraftConfig, DFlashArchitecture]):
    """See the module docstring."""

    algo: ClassVar[str] = "dflash"
    k_rule: ClassVar[str] = "`block_size` - 1"
    architecture: ClassVar[type[DraftArchitecture]] = DFlashArchitecture
    switches: ClassVar[Mapping[str, Any]] = {"causal": False}
    layouts: ClassVar[tuple[str, ...]] = LAYOUTS

    def read_config(self, raw: Mapping[str, Any]) -> SourceConfig:
        """Recognise the publisher and read its config.json."""
        if either(raw, "sample_from_anchor", read=flag_at):
            raise ConfigError(
                f"{KEY}: its config.json has sample_from_anchor true; the slots of a dflash draft predict the token at "
                "their own position. Set policy.draft.algo to the draft's algorithm."
            )
        if is_speculators(raw):
            fields = read_speculators_block(raw, model_type="dflash")
            check_proposed(raw, fields["block_size"], first_slot=1)
        else:
            name = architecture_name(raw)
            if name not in _ARCHITECTURES:
                raise ConfigError(
                    f"{KEY}: its config.json has architectures {shown(name)}; a dflash draft has one of "
                    f"{list(_ARCHITECTURES)} or speculators_model_type dflash. The directory holds a draft of another "
                    "algorithm, or no draft."
                )
            fields = read_native_block(raw, projectors=(None, "dflash"))
        feature_ids = fields.pop("feature_ids")
        return SourceConfig(publisher_of(raw), fields | {"extra": block_extra(raw, _KNOWN)}, feature_ids)

    def write_config(self, arch: DFlashArchitecture, *, dtype: str) -> dict[str, Any]:
        """The native layout."""
        return written_block(arch, dtype=dtype, algo=self.algo, nested={}) | {"architectures": [_ARCHITECTURES[0]]}

    def write_speculators(self, arch: DFlashArchitecture, *, dtype: str, k: int, verifier: Verifier) -> dict[str, Any]:
        """The layout of vLLM's speculators library."""
        return written_speculators_block(
            arch, dtype=dtype, algo=self.algo, k=k, verifier=verifier, architecture="DFlashDraftModel", heads={}
        )

    def serving(self, arch: DFlashArchitecture, *, device: str | None) -> Serving:
        """The engine's own method."""
        return Serving("dflash")
