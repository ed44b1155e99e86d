"""The shape of a draft as one plain value, and the tensors it consists of. Nothing here needs torch.

One class per algorithm; what all share is in `DraftArchitecture`. Names are those of exports and of the wire.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

__all__ = [
    "BlockArchitecture",
    "DFlashArchitecture",
    "DSparkArchitecture",
    "DominoArchitecture",
    "DraftArchitecture",
    "Eagle1Architecture",
    "Eagle3Architecture",
    "FusedEagleArchitecture",
    "PEagleArchitecture",
    "Shapes",
]

Shapes = dict[str, tuple[int, ...]]
"""Tensor name to shape."""

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, kw_only=True)
class DraftArchitecture(ABC):
    """Everything that a module builder, an exporter and the engine must agree on.

    Attributes:
        layer_family: `llama`, or `qwen3` (adds a norm per head to queries and keys).
        hidden_size: width H of the draft.
        target_hidden_size: width of the policy's features.
        intermediate_size: width of the MLP.
        num_hidden_layers: decoder layers.
        num_attention_heads: query heads.
        num_key_value_heads: key and value heads.
        head_dim: width of a head; not derived from the others.
        rms_norm_eps: of every norm.
        vocab_size: target ids V.
        draft_vocab_size: ids D that the draft can propose, D <= V.
        feature_ids: canonical ids "after l layers" of the policy features, ascending; empty when only the final state
            is read.
        rope: one flat table: `rope_type`, `rope_theta` and what the type needs.
        max_position_embeddings: positions that the RoPE table covers.
        extra: fields of a source config that mean nothing here and are written back on export.
    """

    reads_final_state: ClassVar[bool] = False
    """The feature is the policy's last hidden state behind its final norm, not those of `feature_ids`."""

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
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def feature_size(self) -> int:
        """Width of the features of one token, concatenated."""
        return (1 if self.reads_final_state else len(self.feature_ids)) * self.target_hidden_size

    @property
    def has_vocab_map(self) -> bool:
        """True when the draft proposes only some of the target ids."""
        return self.draft_vocab_size < self.vocab_size

    @property
    def owns_embedding(self) -> bool:
        """True when the draft has an embedding of its own, which the export holds."""
        return self.hidden_size != self.target_hidden_size

    @property
    def placeholder_id(self) -> int | None:
        """Token whose embedding stands for tokens not known yet; None for a draft without placeholders."""
        return None

    @property
    def has_live_head(self) -> bool:
        """True when the draft's head is a copy of the policy's rows for its ids, sent again with every refit."""
        return False

    @abstractmethod
    def trained_shapes(self) -> Shapes:
        """Every tensor that training may change, in the order in which it is published."""

    def published_shapes(self) -> Shapes:
        """Every tensor that a refit may have to send: the trained ones, and a live head."""
        head: Shapes = {HEAD: (self.draft_vocab_size, self.hidden_size)} if self.has_live_head else {}
        return self.trained_shapes() | head

    def frozen_shapes(self) -> Shapes:
        """What an export holds beside the published tensors."""
        shapes: Shapes = {}
        if self.owns_embedding and EMBEDDING not in self.trained_shapes():
            shapes[EMBEDDING] = (self.vocab_size, self.hidden_size)
        if self.has_vocab_map:
            shapes |= {"d2t": (self.draft_vocab_size,), "t2d": (self.vocab_size,)}
        return shapes

    def optional_names(self) -> frozenset[str]:
        """Tensors that a checkpoint may lack: what the policy's own can stand in for."""
        names = {EMBEDDING, HEAD} if self.hidden_size == self.target_hidden_size else set()
        return frozenset(names)

    def ignored_shapes(self) -> Shapes:
        """Tensors that a checkpoint may hold without their being read: copies of the policy's."""
        return {EMBEDDING: (self.vocab_size, self.hidden_size)}

    def zero_shapes(self) -> Shapes:
        """Tensors that a checkpoint may hold if they are zero throughout, for the engine leaves them out."""
        return {}

    def refusal(self, names: Collection[str]) -> str | None:
        """Why a checkpoint that holds these tensors cannot be used, where it is worth a sentence of its own.

        Args:
            names: canonical names of all its tensors.
        """
        return None

    def wide_names(self) -> frozenset[str]:
        """Tensors that the engine keeps in float32 whatever its dtype is."""
        return frozenset()

    def identity(self) -> dict[str, Any]:
        """The fields that decide whether weights fit, in a JSON-able form."""
        values = dataclasses.asdict(self)
        values.pop("extra")
        return values | {"feature_ids": list(self.feature_ids), "rope": dict(self.rope)}

    def _layer_shapes(self, index: int, *, input_width: int, has_input_norm: bool = True) -> Shapes:
        """A decoder layer whose attention reads `input_width` channels."""
        hidden, inner, layer = self.hidden_size, self.intermediate_size, f"layers.{index}"
        queries, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        shapes: Shapes = {
            f"{layer}.self_attn.q_proj.weight": (queries, input_width),
            f"{layer}.self_attn.k_proj.weight": (keys, input_width),
            f"{layer}.self_attn.v_proj.weight": (keys, input_width),
            f"{layer}.self_attn.o_proj.weight": (hidden, queries),
            f"{layer}.mlp.gate_proj.weight": (inner, hidden),
            f"{layer}.mlp.up_proj.weight": (inner, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, inner),
        }
        if has_input_norm:
            shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        if self.layer_family == "qwen3":
            shapes |= {f"{layer}.self_attn.{n}_norm.weight": (self.head_dim,) for n in ("q", "k")}
        return shapes


@dataclass(frozen=True, kw_only=True)
class FusedEagleArchitecture(DraftArchitecture):
    """Drafts whose first layer reads embedding and fused features side by side (2H).

    Attributes:
        norm_before_residual: the first layer's residual is the normed hidden state.
        norm_before_fc: one norm over the concatenated features.
        fc_norm: one norm per feature.
    """

    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool

    def trained_shapes(self) -> Shapes:
        """Every tensor that training may change, in the order in which it is published."""
        hidden = self.hidden_size
        shapes: Shapes = {"fc.weight": (hidden, self.feature_size)}
        if self.norm_before_fc:
            shapes["input_norm.weight"] = (self.feature_size,)
        if self.fc_norm:
            shapes |= {f"fc_norm.{i}.weight": (self.target_hidden_size,) for i in range(len(self.feature_ids))}
        for i in range(self.num_hidden_layers):
            shapes |= self._layer_shapes(i, input_width=hidden if i else 2 * hidden)
            if i == 0:
                shapes["layers.0.hidden_norm.weight"] = (hidden,)
        return shapes | {"norm.weight": (hidden,), HEAD: (self.draft_vocab_size, hidden)}


@dataclass(frozen=True, kw_only=True)
class Eagle3Architecture(FusedEagleArchitecture):
    """EAGLE-3.

    Attributes:
        norm_output: the normed state is fed to the next depth.
    """

    norm_output: bool


@dataclass(frozen=True, kw_only=True)
class PEagleArchitecture(FusedEagleArchitecture):
    """P-EAGLE: placeholders for what is not known yet are learned, so embedding and head are the draft's own.

    Attributes:
        mask_token_id: token whose embedding row is the placeholder's.
        num_depths: tokens predicted per forward in training.
    """

    mask_token_id: int
    num_depths: int

    @property
    def placeholder_id(self) -> int:
        """Token whose embedding stands for tokens not known yet."""
        return self.mask_token_id

    @property
    def owns_embedding(self) -> bool:
        """Always: the placeholder's row is trained."""
        return True

    def trained_shapes(self) -> Shapes:
        """EAGLE-3's, the embedding and the placeholder's feature."""
        return super().trained_shapes() | {
            EMBEDDING: (self.vocab_size, self.hidden_size),
            "mask_hidden": (1, 1, self.feature_size),
        }

    def ignored_shapes(self) -> Shapes:
        """Nothing: every tensor is the draft's own."""
        return {}


@dataclass(frozen=True, kw_only=True)
class Eagle1Architecture(DraftArchitecture):
    """EAGLE-1: reads the policy's final state; its output goes to the policy's head without a norm."""

    reads_final_state: ClassVar[bool] = True

    def trained_shapes(self) -> Shapes:
        """The projection and the layers; the first layer has no input norm, the draft no final one."""
        hidden = self.hidden_size
        shapes: Shapes = {"fc.weight": (hidden, hidden + self.feature_size)}
        for i in range(self.num_hidden_layers):
            shapes |= self._layer_shapes(i, input_width=hidden, has_input_norm=i > 0)
        return shapes

    def zero_shapes(self) -> Shapes:
        """The projection's bias, with which the original authors' code makes it."""
        return {"fc.bias": (self.hidden_size,)}

    def refusal(self, names: Collection[str]) -> str | None:
        """EAGLE-3 norms what it reads; some EAGLE-1 trainers add norms that the engine has no place for."""
        if "layers.0.hidden_norm.weight" in names:
            return "holds layers.0.hidden_norm.weight: it is an EAGLE-3 draft. Set policy.draft.algo to eagle3."
        norms = [name for name in ("layers.0.input_layernorm.weight", "norm.weight") if name in names]
        if not norms:
            return None
        return (
            f"holds {norms}: the engine's EAGLE-1 has no norm before its first layer and none behind its last, so it "
            "cannot serve the draft. Use one trained without them."
        )


@dataclass(frozen=True, kw_only=True)
class BlockArchitecture(DraftArchitecture):
    """Drafts that fill a block of masked tokens behind an anchor in one forward; embedding and head are the policy's.

    Attributes:
        block_size: slots B of a block, the anchor's included.
        mask_token_id: token whose embedding stands for a token not known yet.
        causal: slots of a block see only earlier ones.
    """

    block_size: int
    mask_token_id: int
    causal: bool

    @property
    def placeholder_id(self) -> int:
        """Token whose embedding stands for tokens not known yet."""
        return self.mask_token_id

    @property
    def first_slot(self) -> int:
        """First slot of a block that predicts: 0 when the anchor's own slot predicts the token behind it, else 1."""
        return 1

    @property
    def num_predicted(self) -> int:
        """Tokens that a block predicts."""
        return self.block_size - self.first_slot

    @property
    def has_live_head(self) -> bool:
        """A draft of a reduced vocabulary carries the policy's head rows of its ids."""
        return self.has_vocab_map

    def trained_shapes(self) -> Shapes:
        """Projection, norms and layers."""
        hidden = self.hidden_size
        shapes: Shapes = {
            "fc.weight": (hidden, self.feature_size),
            "hidden_norm.weight": (hidden,),
            "norm.weight": (hidden,),
        }
        for i in range(self.num_hidden_layers):
            shapes |= self._layer_shapes(i, input_width=hidden)
        return shapes

    def ignored_shapes(self) -> Shapes:
        """Copies of the policy's embedding and head, which go stale with its first update."""
        return {
            EMBEDDING: (self.vocab_size, self.hidden_size),
            HEAD: (self.draft_vocab_size, self.hidden_size),
        }


@dataclass(frozen=True, kw_only=True)
class DFlashArchitecture(BlockArchitecture):
    """DFlash: each slot predicts the token at its own position."""


@dataclass(frozen=True, kw_only=True)
class DSparkArchitecture(BlockArchitecture):
    """DSpark.

    Attributes:
        sample_from_anchor: the anchor's slot predicts the first token.
        markov_rank: rank r of the Markov head.
        markov_head_type: `vanilla`, `gated` or `rnn`.
        enable_confidence_head: predicts the acceptance of each token.
        confidence_head_with_markov: it also reads the Markov embedding.
    """

    sample_from_anchor: bool
    markov_rank: int
    markov_head_type: Literal["vanilla", "gated", "rnn"]
    enable_confidence_head: bool
    confidence_head_with_markov: bool

    @property
    def first_slot(self) -> int:
        """First slot of a block that predicts."""
        return 0 if self.sample_from_anchor else 1

    def trained_shapes(self) -> Shapes:
        """The backbone and both heads."""
        hidden, rank = self.hidden_size, self.markov_rank
        head: Shapes = {
            "markov_head.markov_w1.weight": (self.vocab_size, rank),
            "markov_head.markov_w2.weight": (self.draft_vocab_size, rank),
        }
        if self.markov_head_type == "gated":
            head |= {
                "markov_head.gate_proj.weight": (rank, hidden + rank),
                "markov_head.gate_proj.bias": (rank,),
            }
        if self.markov_head_type == "rnn":
            head |= {
                "markov_head.joint_proj.weight": (3 * rank, 2 * rank + hidden),
                "markov_head.joint_proj.bias": (3 * rank,),
            }
        if self.enable_confidence_head:
            width = hidden + (rank if self.confidence_head_with_markov else 0)
            head |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
        return super().trained_shapes() | head

    def wide_names(self) -> frozenset[str]:
        """The confidence head."""
        names = ("confidence_head.proj.weight", "confidence_head.proj.bias")
        return frozenset(names if self.enable_confidence_head else ())


@dataclass(frozen=True, kw_only=True)
class DominoArchitecture(BlockArchitecture):
    """Domino.

    Attributes:
        shift_label: the anchor's slot predicts the first token.
        emb_dim: inner width of the correction.
        gru_hidden_dim: width of the recurrent state.
        pure_draft_prefix_len: first predicted tokens that stay uncorrected.
    """

    shift_label: bool
    emb_dim: int
    gru_hidden_dim: int
    pure_draft_prefix_len: int

    @property
    def first_slot(self) -> int:
        """First slot of a block that predicts."""
        return 0 if self.shift_label else 1

    def trained_shapes(self) -> Shapes:
        """The backbone, the recurrent head and the correction."""
        hidden, state = self.hidden_size, self.gru_hidden_dim
        return super().trained_shapes() | {
            "prefix_gru.weight_ih_l0": (3 * state, hidden),
            "prefix_gru.weight_hh_l0": (3 * state, state),
            "embed_proj.0.weight": (self.emb_dim, hidden + state),
            "embed_proj.2.weight": (self.draft_vocab_size, self.emb_dim),
        }
