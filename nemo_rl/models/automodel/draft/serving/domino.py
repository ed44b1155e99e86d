"""Domino in vLLM: a block draft whose logits are corrected by a recurrent summary of the tokens before each one.

Served with `method="dflash"` on the V1 runner, on every device. `dflash_config` of the exported config.json holds the
sizes (`emb_dim`, `gru_hidden_dim`), the number of uncorrected leading predictions (`pure_draft_prefix_len`) and the
layout (`shift_label`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM, DFlashQwen3Model
from vllm.model_executor.models.utils import maybe_prefix

from nemo_rl.models.automodel.draft.serving import sequential_head

EXPORTED_ARCHITECTURE = "DominoDraftModel"
ARCHITECTURE = f"DFlash{EXPORTED_ARCHITECTURE}"
"""What vLLM makes of the exported name for `method="dflash"`. It looks up both."""


class PrefixGRU(nn.Module):
    """One layer of a GRU without bias, a token at a time; tensor names and gate order (r, z, n) are torch's."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        """Create the weights, in the dtype that is the default while vLLM builds a model."""
        super().__init__()
        self.hidden_size = hidden_size
        self.weight_ih_l0 = nn.Parameter(torch.empty(3 * hidden_size, input_size), requires_grad=False)
        self.weight_hh_l0 = nn.Parameter(torch.empty(3 * hidden_size, hidden_size), requires_grad=False)

    def forward(self, token: Tensor, state: Tensor) -> Tensor:
        """Take in one token.

        Args:
            token: float [R, input_size], its embedding.
            state: float [R, hidden_size]; zeros before the first.

        Returns:
            float [R, hidden_size], the next state.
        """
        reset_x, update_x, new_x = functional.linear(token, self.weight_ih_l0).chunk(3, -1)
        reset_h, update_h, new_h = functional.linear(state, self.weight_hh_l0).chunk(3, -1)
        new = torch.tanh(new_x + torch.sigmoid(reset_x + reset_h) * new_h)
        return torch.lerp(new, state, torch.sigmoid(update_x + update_h))


class DominoModel(DFlashQwen3Model):
    """The block's backbone with the tensors of the head beside it, where the loader looks for all of them."""

    def __init__(self, *, vllm_config: VllmConfig, start_layer_id: int = 0, prefix: str = "") -> None:
        """Build the backbone as vLLM does, then the head."""
        super().__init__(vllm_config=vllm_config, start_layer_id=start_layer_id, prefix=prefix)
        config: Any = self.config
        sizes, hidden_size = config.dflash_config, config.hidden_size
        state_size, rank = sizes["gru_hidden_dim"], sizes["emb_dim"]

        def linear(inputs: int, outputs: int, name: str) -> nn.Module:
            # Replicated: the head runs once per token, and sharding it would add a gather to each.
            return ReplicatedLinear(
                inputs, outputs, bias=False, return_bias=False, prefix=maybe_prefix(prefix, f"embed_proj.{name}")
            )

        self.prefix_gru = PrefixGRU(hidden_size, state_size)
        self.embed_proj = nn.Sequential(
            linear(hidden_size + state_size, rank, "0"),
            nn.SiLU(),
            linear(rank, getattr(config, "draft_vocab_size", None) or config.vocab_size, "2"),
        )


@dataclass
class _Block:
    """Blocks of R requests in the making.

    Attributes:
        hidden: float [R, K, H].
        base: float [R, K, D], logits before the correction.
        prefix: float [R, gru_hidden_dim], summary of the tokens taken in so far.
    """

    hidden: Tensor
    base: Tensor
    prefix: Tensor


class DominoDraft(DFlashQwen3ForCausalLM, sequential_head.SequentialHead):
    """logits of ordinal j = base logits of its slot, + embed_proj([slot, GRU(x_n .. token j-1)]) if j > P."""

    model_cls = DominoModel
    model: Any

    @property
    def predicts_from_anchor(self) -> bool:
        """See `SequentialHead`."""
        return self.config.dflash_config["shift_label"]

    def start_block(self, hidden: Tensor) -> _Block:
        """See `SequentialHead`."""
        base = self.logits_processor(self.lm_head, hidden)
        return _Block(hidden, base, hidden.new_zeros(hidden.shape[0], self.model.prefix_gru.hidden_size))

    def next_logits(self, block: _Block, ordinal: int, previous: Tensor) -> Tensor:
        """See `SequentialHead`."""
        block.prefix = self.model.prefix_gru(self.model.embed_input_ids(previous), block.prefix)
        base, slot = block.base[:, ordinal - 1], block.hidden[:, ordinal - 1]
        if ordinal <= self.config.dflash_config["pure_draft_prefix_len"]:
            return base
        return base + self.model.embed_proj(torch.cat([slot, block.prefix], -1))


def install() -> None:
    """Let engines built in this process from now on serve these drafts with `method="dflash"`."""
    sequential_head.install({EXPORTED_ARCHITECTURE: DominoDraft, ARCHITECTURE: DominoDraft})
