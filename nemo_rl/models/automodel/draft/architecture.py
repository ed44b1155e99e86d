"""The shape of an EAGLE-type draft as one plain value, and the tensors it consists of. Nothing here needs torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["DraftArchitecture", "frozen_tensor_shapes", "trained_tensor_shapes"]


@dataclass(frozen=True)
class DraftArchitecture:
    """Everything that a module builder, an exporter and the engine must agree on.

    Attributes:
        layer_family: `llama`, or `qwen3` (adds a norm per head to queries and keys).
        hidden_size: width H of the draft.
        target_hidden_size: width of the policy's features.
        intermediate_size: width of the MLP.
        num_hidden_layers: decoder layers; the first one reads embedding and hidden state side by side (2H).
        num_attention_heads: query heads.
        num_key_value_heads: key and value heads.
        head_dim: width of a head; not derived from the others.
        rms_norm_eps: of every norm.
        vocab_size: target ids V.
        draft_vocab_size: ids D that the draft can propose, D <= V.
        feature_ids: canonical ids "after l layers" of the policy features, ascending.
        rope: one flat table: `rope_type`, `rope_theta` and what the type needs.
        max_position_embeddings: positions that the RoPE table covers.
        norm_before_residual: the first layer's residual is the normed hidden state.
        norm_before_fc: one norm over the concatenated features.
        fc_norm: one norm per feature.
        norm_output: the normed state is fed to the next depth.
        extra: fields of a source config that mean nothing here and are written back on export.
    """

    layer_family: Literal["llama", "qwen3"]
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    vocab_size: int
    draft_vocab_size: int
    feature_ids: tuple[int, ...]
    rope: Mapping[str, Any]
    max_position_embeddings: int
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fc_input_size(self) -> int:
        """Width of the concatenated features."""
        return len(self.feature_ids) * self.target_hidden_size

    @property
    def has_vocab_map(self) -> bool:
        """True when the draft proposes only some of the target ids."""
        return self.draft_vocab_size < self.vocab_size

    @property
    def owns_embedding(self) -> bool:
        """True when the policy's embedding is too wide or too narrow to be shared."""
        return self.hidden_size != self.target_hidden_size

    def identity(self) -> dict[str, Any]:
        """The fields that decide whether weights fit, in a JSON-able form."""
        values = dataclasses.asdict(self)
        values.pop("extra")
        return values | {"feature_ids": list(self.feature_ids), "rope": dict(self.rope)}


def trained_tensor_shapes(arch: DraftArchitecture) -> dict[str, tuple[int, ...]]:
    """Name (as exported and published) to shape of every tensor that is trained."""
    hidden, inner = arch.hidden_size, arch.intermediate_size
    queries, keys = arch.num_attention_heads * arch.head_dim, arch.num_key_value_heads * arch.head_dim
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, arch.fc_input_size)}
    if arch.norm_before_fc:
        shapes["input_norm.weight"] = (arch.fc_input_size,)
    if arch.fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (arch.target_hidden_size,) for i in range(len(arch.feature_ids))}
    for i in range(arch.num_hidden_layers):
        width = 2 * hidden if i == 0 else hidden
        layer = f"layers.{i}"
        shapes |= {
            f"{layer}.self_attn.q_proj.weight": (queries, width),
            f"{layer}.self_attn.k_proj.weight": (keys, width),
            f"{layer}.self_attn.v_proj.weight": (keys, width),
            f"{layer}.self_attn.o_proj.weight": (hidden, queries),
            f"{layer}.mlp.gate_proj.weight": (inner, hidden),
            f"{layer}.mlp.up_proj.weight": (inner, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, inner),
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
        }
        if i == 0:
            shapes["layers.0.hidden_norm.weight"] = (hidden,)
        if arch.layer_family == "qwen3":
            shapes |= {f"{layer}.self_attn.{n}_norm.weight": (arch.head_dim,) for n in ("q", "k")}
    return shapes | {"norm.weight": (hidden,), "lm_head.weight": (arch.draft_vocab_size, hidden)}


def frozen_tensor_shapes(arch: DraftArchitecture) -> dict[str, tuple[int, ...]]:
    """Name to shape of what an export holds beside the trained tensors."""
    shapes: dict[str, tuple[int, ...]] = {}
    if arch.owns_embedding:
        shapes["embed_tokens.weight"] = (arch.vocab_size, arch.hidden_size)
    if arch.has_vocab_map:
        shapes |= {"d2t": (arch.draft_vocab_size,), "t2d": (arch.vocab_size,)}
    return shapes
