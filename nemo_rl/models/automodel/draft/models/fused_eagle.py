"""What drafts on fused policy features have in common: the projection, the layers, norm and head.

The first layer attends over [embedding; hidden], the others over the hidden state.

Shape symbols: m rows, H width, A query heads, d head width, F concatenated features.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn

from nemo_rl.models.automodel.draft.architecture import FusedEagleArchitecture
from nemo_rl.models.automodel.draft.models.layers import DraftAttention, DraftMLP, DraftModule, RMSNorm, RopeFrequencies

__all__ = ["DraftLayer", "FusedEagleDraft"]


class FusedEagleDraft(DraftModule):
    """The modules; a subclass brings the forward."""

    def __init__(self, arch: FusedEagleArchitecture) -> None:
        """Create the modules with uninitialised parameters.

        Args:
            arch: the draft.
        """
        super().__init__()
        self.arch = arch
        hidden, eps = arch.hidden_size, arch.rms_norm_eps
        self.fc = nn.Linear(arch.feature_size, hidden, bias=False)
        if arch.norm_before_fc:
            self.input_norm = RMSNorm(arch.feature_size, eps)
        if arch.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(arch.target_hidden_size, eps) for _ in arch.feature_ids)
        self.layers = nn.ModuleList(DraftLayer(arch, i) for i in range(arch.num_hidden_layers))
        self.norm = RMSNorm(hidden, eps)
        self.lm_head = nn.Linear(hidden, arch.draft_vocab_size, bias=False)
        self.rope = RopeFrequencies(arch)

    def _decoder_layers(self) -> Iterator[DraftLayer]:
        return cast("Iterator[DraftLayer]", iter(self.layers))

    def fuse(self, features: Tensor) -> Tensor:
        """Project concatenated features [N, F] to the draft's width [N, H]."""
        if self.arch.norm_before_fc:
            features = self.input_norm(features)
        if self.arch.fc_norm:
            parts = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(features)


class DraftLayer(nn.Module):
    """A decoder layer; the first one attends over [embedding; hidden]."""

    def __init__(self, arch: FusedEagleArchitecture, index: int) -> None:
        """Create the modules.

        Args:
            arch: the draft.
            index: of the layer.
        """
        super().__init__()
        hidden, eps = arch.hidden_size, arch.rms_norm_eps
        self.is_first = index == 0
        self.norms_residual = arch.norm_before_residual
        self.input_layernorm = RMSNorm(hidden, eps)
        if self.is_first:
            self.hidden_norm = RMSNorm(hidden, eps)
        self.self_attn = DraftAttention(arch, 2 * hidden if self.is_first else hidden)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = DraftMLP(hidden, arch.intermediate_size)

    def attention_input(self, hidden: Tensor, embeds: Tensor) -> tuple[Tensor, Tensor]:
        """What attention projects ([m, 2H] in the first layer, else [m, H]) and the residual [m, H].

        Args:
            hidden: float [m, H].
            embeds: float [m, H], read by the first layer only.
        """
        if not self.is_first:
            return self.input_layernorm(hidden), hidden
        normed = self.hidden_norm(hidden)
        return torch.cat([self.input_layernorm(embeds), normed], dim=-1), normed if self.norms_residual else hidden

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        """Output projection, residual, MLP: [m, A, d] and [m, H] to [m, H]."""
        hidden = residual + self.self_attn.o_proj(attended.flatten(1))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))
