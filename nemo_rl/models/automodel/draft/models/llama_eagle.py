"""The EAGLE-3 draft: fused policy features, a decoder layer over [embedding; hidden], unrolled over depths.

Written anew rather than on nemo_automodel's `LlamaEagle3DraftModel`, which differs from what the engine serves: it
has no `norm_before_residual`, no second layer, names tensors under `model.`, rounds RoPE frequencies with
`.to(bfloat16)`, and computes attention, MLP and head for every position at every depth. Here positions that nothing
supervised depends on are never computed: the trunk of depth 0 gives keys and values for all positions, queries exist
only for active slots.

Shape symbols: N trunk rows, n_k active slots at depth k, E supervised elements, H width, A query heads, G key heads,
d head width, F concatenated features, V target ids, M rows of teacher logits.

Worked example (x0 x1 prompt, x2..x5 sampled), depth k of slot t: token x[t+1+k], hidden fc(f[t]) for k = 0 else the
output of depth k - 1 at the same slot, RoPE position t + k, teacher p[t+1+k], predicts x[t+2+k].

    k  slots    tokens    positions  predicts
    0  1 2 3    x2 x3 x4  1 2 3      x3 x4 x5
    1  1 2      x3 x4     2 3        x4 x5
    2  1        x4        3          x5
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nemo_rl.models.automodel.draft.architecture import DraftArchitecture
from nemo_rl.models.automodel.draft.attention import TrunkLayout, trunk_branch_attention
from nemo_rl.models.automodel.draft.losses import LossChunks, soft_distillation

__all__ = ["LlamaEagleDraft", "RopeFrequencies", "UnrollInputs", "UnrollOutput", "UnrollPlan"]


@dataclass(frozen=True)
class UnrollPlan:
    """Which rows are computed at which depth. Slots are ordered by chain length, so depth k uses the first n_k.

    Attributes:
        trunk_tokens: int64 [N], token of each trunk row at depth 0 (the one after the row's own position).
        trunk_positions: int64 [N], RoPE positions.
        active_rows: int64 [n_0], trunk row of each active slot.
        num_active: n_k per depth; depths without active slots are left out.
        depth_tokens: int64 [n_k] per depth k >= 1.
        layout: of the active slots.
        trunk_layout: of all trunk rows; None when the draft has one layer, whose other rows nobody reads.
        element_rows: int64 [E], row of each supervised element in the concatenation of the depths' outputs.
        labels: int64 [E], sampled target id that the element predicts, -1 = none.
        chunks: elements cut for the loss.
    """

    trunk_tokens: Tensor
    trunk_positions: Tensor
    active_rows: Tensor
    num_active: tuple[int, ...]
    depth_tokens: tuple[Tensor, ...]
    layout: TrunkLayout
    trunk_layout: TrunkLayout | None
    element_rows: Tensor
    labels: Tensor
    chunks: LossChunks

    def to(self, device: torch.device | str) -> UnrollPlan:
        """The plan with its tensors on `device`."""
        moved = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, (Tensor, TrunkLayout, LossChunks)):
                moved[f.name] = value.to(device)
        return replace(self, **moved, depth_tokens=tuple(t.to(device, non_blocking=True) for t in self.depth_tokens))


@dataclass(frozen=True)
class UnrollInputs:
    """Everything the module reads in one call; nothing here is differentiated.

    Attributes:
        plan: what to compute.
        features: float [N, F], concatenated hidden states of the policy.
        embedding: float [V, H], the embedding in use (the policy's live one, unless the draft owns one).
        teacher_logits: float [M, V], raw logits of the policy.
        weights: fp32 [E], factor of each element's loss.
        vocab_ids: int64 [D], target id of each draft id; None = draft ids are target ids.
        drop_out_of_vocab: no loss where the policy's most likely token is no draft id.
    """

    plan: UnrollPlan
    features: Tensor
    embedding: Tensor
    teacher_logits: Tensor
    weights: Tensor
    vocab_ids: Tensor | None
    drop_out_of_vocab: bool


class UnrollOutput(NamedTuple):
    """Result of one call; a tuple, because sharding looks for the tensors that need gradients in it.

    Attributes:
        loss: fp32 scalar.
        stats: fp32 [E, len(losses.STATS)], detached; empty without elements.
    """

    loss: Tensor
    stats: Tensor


class LlamaEagleDraft(nn.Module):
    """Draft module. Its one call runs all depths and the loss, so that sharding hooks fire once around everything.

    The compute dtype is that of the parameters inside the call: fp32, or what mixed-precision sharding casts them to.
    """

    def __init__(self, arch: DraftArchitecture) -> None:
        """Create the modules with uninitialised parameters.

        Args:
            arch: the draft.
        """
        super().__init__()
        self.arch = arch
        hidden, eps = arch.hidden_size, arch.rms_norm_eps
        self.fc = nn.Linear(arch.fc_input_size, hidden, bias=False)
        if arch.norm_before_fc:
            self.input_norm = RMSNorm(arch.fc_input_size, eps)
        if arch.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(arch.target_hidden_size, eps) for _ in arch.feature_ids)
        self.layers = nn.ModuleList(DraftLayer(arch, i) for i in range(arch.num_hidden_layers))
        self.norm = RMSNorm(hidden, eps)
        self.lm_head = nn.Linear(hidden, arch.draft_vocab_size, bias=False)
        self.rope = RopeFrequencies(arch)

    def forward(self, inputs: UnrollInputs | None) -> UnrollOutput:
        """Unroll the draft and distil.

        Args:
            inputs: what to compute; None = nothing here is supervised: a zero loss that reaches every parameter.
        """
        if inputs is None:
            loss = torch.stack([(p * 0.0).sum().to(torch.float32) for p in self.parameters()]).sum()
            return UnrollOutput(loss, loss.new_zeros(0, 0))
        plan = inputs.plan
        # A concatenation over depths, then one pass of the head: its gradient is accumulated once.
        states = torch.cat(self._unroll(inputs))
        loss, stats = soft_distillation(
            states.index_select(0, plan.element_rows),
            self.lm_head.weight,
            inputs.teacher_logits,
            weights=inputs.weights,
            labels=plan.labels,
            chunks=plan.chunks,
            vocab_ids=inputs.vocab_ids,
            drop_out_of_vocab=inputs.drop_out_of_vocab,
        )
        return UnrollOutput(loss, stats)

    def _unroll(self, inputs: UnrollInputs) -> list[Tensor]:
        """Normed output [n_k, H] of each depth."""
        plan, dtype = inputs.plan, self.fc.weight.dtype

        def embed(tokens: Tensor) -> Tensor:
            return F.embedding(tokens, inputs.embedding).to(dtype)

        caches = [_LayerCache() for _ in self.layers]
        hidden = self._trunk(self.fuse(inputs.features.to(dtype)), embed(plan.trunk_tokens), plan, caches)
        positions = plan.trunk_positions[plan.active_rows]
        outputs = [self.norm(hidden)]
        for depth, count in enumerate(plan.num_active[1:], start=1):
            fed_back = outputs[-1] if self.arch.norm_output else hidden
            hidden = self._branch(
                fed_back[:count], embed(plan.depth_tokens[depth - 1]), positions[:count] + depth, plan.layout, caches
            )
            outputs.append(self.norm(hidden))
        return outputs

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

    def _trunk(self, hidden: Tensor, embeds: Tensor, plan: UnrollPlan, caches: list[_LayerCache]) -> Tensor:
        """Depth 0: keys and values of every trunk row [N, H]; the state [n_0, H] of the active slots."""
        positions, rows = plan.trunk_positions, plan.active_rows
        for layer, cache in zip(self._decoder_layers(), caches, strict=True):
            is_last = layer is self.layers[-1]
            x, residual = layer.attention_input(hidden, embeds)
            cos, sin = self.rope(positions, x.dtype)
            keys, values = layer.self_attn.keys_values(x, cos, sin)
            cache.keys, cache.values = plan.layout.place_keys(keys), plan.layout.place_keys(values)
            if is_last:
                layout, trunk_keys, trunk_values = plan.layout, cache.keys, cache.values
                x, residual, cos, sin = x[rows], residual[rows], cos[rows], sin[rows]
            else:
                assert plan.trunk_layout is not None, "a draft of several layers reads the other trunk rows, too"
                layout = plan.trunk_layout
                trunk_keys, trunk_values = layout.place_keys(keys), layout.place_keys(values)
            queries = layer.self_attn.queries(x, cos, sin)
            attended = trunk_branch_attention(
                queries, trunk_keys, trunk_values, [], [], layout=layout, scale=layer.self_attn.scale
            )
            hidden = layer.finish(attended, residual)
        return hidden

    def _branch(
        self, hidden: Tensor, embeds: Tensor, positions: Tensor, layout: TrunkLayout, caches: list[_LayerCache]
    ) -> Tensor:
        """One depth >= 1: [n_k, H] in, [n_k, H] out; adds one key and value per slot to each layer's branch."""
        cos, sin = self.rope(positions, hidden.dtype)
        count = hidden.shape[0]
        for layer, cache in zip(self._decoder_layers(), caches, strict=True):
            x, residual = layer.attention_input(hidden, embeds)
            keys, values = layer.self_attn.keys_values(x, cos, sin)
            cache.branch_keys.append(keys)
            cache.branch_values.append(values)
            attended = trunk_branch_attention(
                layer.self_attn.queries(x, cos, sin),
                cache.keys,
                cache.values,
                [k[:count] for k in cache.branch_keys],
                [v[:count] for v in cache.branch_values],
                layout=layout,
                scale=layer.self_attn.scale,
            )
            hidden = layer.finish(attended, residual)
        return hidden


class _LayerCache:
    """Keys and values of one layer: the trunk's, laid out, and one [n_k, G, d] per depth >= 1."""

    def __init__(self) -> None:
        self.keys: Tensor
        self.values: Tensor
        self.branch_keys: list[Tensor] = []
        self.branch_values: list[Tensor] = []


class DraftLayer(nn.Module):
    """A decoder layer; the first one attends over [embedding; hidden]."""

    def __init__(self, arch: DraftArchitecture, index: int) -> None:
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


class DraftAttention(nn.Module):
    """Projections and rotation; the attention itself is `attention.trunk_branch_attention`."""

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
