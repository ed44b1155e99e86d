"""DFlash: blocks whose slots predict the token at their own position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from nemo_rl.models.automodel.draft.adapters.base import DraftAdapter
from nemo_rl.models.automodel.draft.adapters.dflash import DFlashAdapter
from nemo_rl.models.automodel.draft.block import BlockRuntime
from nemo_rl.models.automodel.draft.config import DFlashDraftConfig
from nemo_rl.models.automodel.draft.models.block import BlockInputs
from nemo_rl.models.automodel.draft.models.dflash import DFlashDraft, DFlashInputs
from nemo_rl.models.automodel.draft.models.layers import DraftModule

__all__ = ["DFlashRuntime"]


class DFlashRuntime(BlockRuntime[DFlashDraftConfig]):
    """See `BlockRuntime`."""

    adapter: ClassVar[DraftAdapter[Any, Any]] = DFlashAdapter()
    module_class: ClassVar[Callable[[Any], DraftModule]] = DFlashDraft

    def _inputs(self, common: BlockInputs) -> BlockInputs:
        return DFlashInputs(**vars(common), label=self.cfg.label)
