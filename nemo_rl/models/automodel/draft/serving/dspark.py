"""DSpark on vLLM's V1 runner: the engine's own model class, with `method="dflash"` instead of `"dspark"`.

The directory is the one that `method="dspark"` loads on CUDA. Only the vanilla Markov head: the engine's class has no
other. The confidence head is loaded and updated, but nothing on this runner reads it.
"""

from __future__ import annotations

from torch import Tensor
from vllm.model_executor.models.qwen3_dspark import Qwen3DSparkForCausalLM

from nemo_rl.models.automodel.draft.serving import sequential_head

ARCHITECTURES = ("DFlashQwen3DSparkModel", "Qwen3DSparkModel")
"""What vLLM makes of an export for `method="dflash"`: of the native layout, and of the speculators one."""


class DSparkDraft(Qwen3DSparkForCausalLM, sequential_head.SequentialHead):
    """logits of ordinal j = base logits of its slot + W2 W1[token j-1]."""

    @property
    def predicts_from_anchor(self) -> bool:
        """See `SequentialHead`; the default is the engine's."""
        return getattr(self.config, "sample_from_anchor", True)

    def start_block(self, hidden: Tensor) -> Tensor:
        """See `SequentialHead`. Returns the base logits, float [R, K, D]."""
        return self.compute_draft_logits(hidden)

    def next_logits(self, block: Tensor, ordinal: int, previous: Tensor) -> Tensor:
        """See `SequentialHead`."""
        return block[:, ordinal - 1] + self.markov_bias(self.markov_embed(previous))


def install() -> None:
    """Let engines built in this process from now on serve these drafts with `method="dflash"`."""
    sequential_head.install(dict.fromkeys(ARCHITECTURES, DSparkDraft))
