"""Building blocks of the drafts' modules: projections, MLP, norms, rotary positions; and the base class of a draft.

Shape symbols: m rows, H width, A query heads, G key heads, d head width.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nemo_rl.models.automodel.draft.architecture import DraftArchitecture

__all__ = ["DraftAttention", "DraftMLP", "DraftModule", "RMSNorm", "RopeFrequencies", "rotate", "zero_of"]


class DraftModule(nn.Module):
    """A draft: its one call runs forward and loss, so that sharding hooks fire once around everything."""

    def initial_std(self) -> Mapping[str, float]:
        """Standard deviations of a new draft's matrices, by tensor name, where they are not the policy's initial one.

        0 starts a matrix from zeros.
        """
        return {}


def zero_of(module: nn.Module) -> Tensor:
    """A zero, fp32 scalar, whose gradient reaches every parameter of a module."""
    return torch.stack([(p * 0.0).sum().to(torch.float32) for p in module.parameters()]).sum()


class DraftAttention(nn.Module):
    """Projections and rotation; the attention itself is in `attention`."""

    def __init__(self, arch: DraftArchitecture, width: int) -> None:
        """Create the projections.

        Args:
            arch: the draft.
            width: of the input.
        """
        super().__init__()
        self.head_dim = arch.head_dim
        self.scale = arch.head_dim**-0.5
        self.q_proj = nn.Linear(width, arch.num_attention_heads * arch.head_dim, bias=False)
        self.k_proj = nn.Linear(width, arch.num_key_value_heads * arch.head_dim, bias=False)
        self.v_proj = nn.Linear(width, arch.num_key_value_heads * arch.head_dim, bias=False)
        self.o_proj = nn.Linear(arch.num_attention_heads * arch.head_dim, arch.hidden_size, bias=False)
        self.has_head_norms = arch.layer_family == "qwen3"
        if self.has_head_norms:
            self.q_norm = RMSNorm(arch.head_dim, arch.rms_norm_eps)
            self.k_norm = RMSNorm(arch.head_dim, arch.rms_norm_eps)

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotated queries [m, A, d] of inputs [m, width]."""
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        return rotate(self.q_norm(q) if self.has_head_norms else q, cos, sin)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values [m, G, d] of inputs [m, width]."""
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        return rotate(self.k_norm(k) if self.has_head_norms else k, cos, sin), self.v_proj(x).view_as(k)


class DraftMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        """Create the projections.

        Args:
            hidden_size: H.
            intermediate_size: inner width.
        """
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[m, H] -> [m, H]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class RMSNorm(nn.Module):
    """Root-mean-square norm; statistics in fp32 or wider, rounded before the weight is applied, as the engine does."""

    def __init__(self, size: int, eps: float) -> None:
        """Create the weight.

        Args:
            size: of the last axis.
            eps: added to the mean square.
        """
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return F.rms_norm(wide, (x.shape[-1],), None, self.eps).to(x.dtype) * self.weight


class RopeFrequencies:
    """cos and sin of positions. No module, so that `.to(bfloat16)`, sharding and checkpoints cannot touch it.

    Frequencies come from the config in fp32; rounding them to bfloat16 gives phase errors of radians at long positions.
    """

    def __init__(self, arch: DraftArchitecture) -> None:
        """Compute the frequencies.

        Args:
            arch: the draft.
        """
        # Modules are created on the meta device; the table must have values from the start.
        with torch.device("cpu"):
            self.inv_freq, self.attention_scaling = _rope_table(arch)
        self._by_device: dict[torch.device, Tensor] = {}

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Tables of positions.

        Args:
            positions: int64 [m].
            dtype: of the result.

        Returns:
            cos and sin, [m, 1, rotary width / 2]; angles are computed in fp32.
        """
        inv_freq = self._by_device.setdefault(positions.device, self.inv_freq.to(positions.device))
        angles = (positions[:, None].to(torch.float32) * inv_freq)[:, None]
        return (angles.cos() * self.attention_scaling).to(dtype), (angles.sin() * self.attention_scaling).to(dtype)


def _rope_table(arch: DraftArchitecture) -> tuple[Tensor, float]:
    """Frequencies fp32 [rotary width / 2] and the factor of cos and sin."""
    table = dict(arch.rope)
    if table["rope_type"] == "default":
        dim = int(arch.head_dim * table.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float32) / dim
        return 1.0 / (table["rope_theta"] ** exponents), 1.0
    # Imported here: transformers' tables are needed for scaled RoPE only.
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=arch.hidden_size,
        num_attention_heads=arch.num_attention_heads,
        head_dim=arch.head_dim,
        max_position_embeddings=arch.max_position_embeddings,
        rope_parameters=table,
    )
    return ROPE_INIT_FUNCTIONS[table["rope_type"]](config, torch.device("cpu"))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + width / 2) of the first `2 * cos.shape[-1]` channels, the others pass.

    Args:
        x: float [m, heads, d].
        cos: float [m, 1, rotary width / 2].
        sin: likewise.
    """
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
