"""Tiny checkpoint directories of block drafts in the layout of each publisher, all from one random draft.

Every function of `LAYOUTS` turns the canonical draft into what one publisher writes: its config.json, the names of its
tensors, and what the file leaves for `policy.draft` to say.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from nemo_rl.models.automodel.draft.architecture import (
    BlockArchitecture,
    DFlashArchitecture,
    DominoArchitecture,
    DSparkArchitecture,
)
from tests.unit.models.automodel.draft.block_helpers import MASK, PERMUTED_IDS, make_block_arch
from tests.unit.models.automodel.draft.helpers import TARGET_LAYERS, VOCAB

HEADS: dict[type[BlockArchitecture], dict[str, Any]] = {
    DFlashArchitecture: {},
    DSparkArchitecture: {
        "sample_from_anchor": True,
        "markov_rank": 5,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    },
    DominoArchitecture: {"shift_label": True, "emb_dim": 6, "gru_hidden_dim": 7, "pure_draft_prefix_len": 1},
}
KINDS = {"dflash": DFlashArchitecture, "dspark": DSparkArchitecture, "domino": DominoArchitecture}


def canonical_arch(algo: str, **changes: Any) -> Any:
    return make_block_arch(KINDS[algo], **HEADS[KINDS[algo]] | changes)


def canonical_tensors(arch: BlockArchitecture, seed: int = 0) -> dict[str, Tensor]:
    """Every trained tensor at random, and the tables and head of a reduced vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in arch.published_shapes().items()}
    if arch.has_vocab_map:
        ids = torch.tensor(sorted(PERMUTED_IDS[: arch.draft_vocab_size]))
        tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": torch.isin(torch.arange(arch.vocab_size), ids)}
    return tensors


def policy_copies(arch: BlockArchitecture) -> dict[str, Tensor]:
    """What some publishers store beside the draft."""
    generator = torch.Generator().manual_seed(99)
    shape = (arch.vocab_size, arch.hidden_size)
    return {name: torch.randn(shape, generator=generator) for name in ("embed_tokens.weight", "lm_head.weight")}


@dataclass(frozen=True)
class Published:
    """One publisher's files of the canonical draft.

    Attributes:
        algo: the draft's algorithm.
        arch: the canonical draft.
        config: config.json.
        tensors: as stored.
        settings: fields of `policy.draft` that the files leave open.
    """

    algo: str
    arch: Any
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    settings: dict[str, Any] = field(default_factory=dict)

    def write(self, directory: Path) -> Path:
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(self.config))
        save_file({name: t.contiguous() for name, t in self.tensors.items()}, directory / "model.safetensors")
        return directory


def _qwen3(arch: BlockArchitecture, **fields: Any) -> dict[str, Any]:
    """The fields that a Qwen3 config of the Hugging Face library has; null removes one."""
    raw = {
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 19,
        "dtype": "bfloat16",
        "eos_token_id": 20,
        "head_dim": arch.head_dim,
        "hidden_act": "silu",
        "hidden_size": arch.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": arch.intermediate_size,
        "layer_types": ["full_attention"] * arch.num_hidden_layers,
        "max_position_embeddings": arch.max_position_embeddings,
        "max_window_layers": arch.num_hidden_layers,
        "num_attention_heads": arch.num_attention_heads,
        "num_hidden_layers": arch.num_hidden_layers,
        "num_key_value_heads": arch.num_key_value_heads,
        "num_target_layers": TARGET_LAYERS,
        "rms_norm_eps": arch.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": arch.rope["rope_theta"],
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": arch.vocab_size,
        "vendor_note": {"kept": [1]},
    }
    return raw | fields


_TRANSFORMERS_5 = {"rope_theta", "rope_scaling"}
"""Keys that newer releases write in `rope_parameters` only."""


def _newer(raw: dict[str, Any]) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": raw["rope_theta"]}
    return {k: v for k, v in raw.items() if k not in _TRANSFORMERS_5} | {
        "rope_parameters": rope,
        "transformers_version": "5.18.0",
    }


def _nested(arch: BlockArchitecture, **fields: Any) -> dict[str, Any]:
    outputs = [i - 1 for i in arch.feature_ids]
    return {"mask_token_id": MASK, "target_layer_ids": outputs, "vendor_detail": "kept"} | fields


def _heads(arch: Any) -> dict[str, Any]:
    return {key: getattr(arch, key) for key in HEADS[type(arch)]}


def _layout(
    algo: str, config: dict[str, Any], arch: Any, *, copies: tuple[str, ...] = (), **settings: Any
) -> Published:
    copied = {name: t for name, t in policy_copies(arch).items() if name in copies}
    return Published(algo, arch, config, copied | canonical_tensors(arch), settings)


def _in_container(tensors: dict[str, Tensor], *parts: str) -> dict[str, Tensor]:
    return {f"logit_head.{name}" if name.startswith(parts) else name: t for name, t in tensors.items()}


# -- DFlash ----------------------------------------------------------------------------------------------------------


def zlab() -> Published:
    arch = canonical_arch("dflash")
    raw = _qwen3(arch, architectures=["DFlashDraftModel"], auto_map={"AutoModel": "dflash.DFlashDraftModel"})
    return _layout("dflash", raw | {"block_size": 4, "dflash_config": _nested(arch)}, arch)


def zlab_newer() -> Published:
    """Block size nested only, causality stated."""
    arch = canonical_arch("dflash")
    raw = _newer(_qwen3(arch, architectures=["DFlashDraftModel"], is_causal=False))
    return _layout("dflash", raw | {"dflash_config": _nested(arch, block_size=4)}, arch)


def specforge_dflash() -> Published:
    """Written by `save_pretrained`, then mirrored for older readers."""
    arch = canonical_arch("dflash", rope={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0})
    raw = _qwen3(arch, architectures=["DFlashDraftModel"], auto_map={"AutoModel": "dflash.DFlashDraftModel"})
    raw |= {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_parameters": dict(arch.rope)}
    return _layout("dflash", raw | {"block_size": 4, "dflash_config": _nested(arch, projector_type=None)}, arch)


def automodel_dflash() -> Published:
    arch = canonical_arch("dflash")
    raw = _newer(_qwen3(arch, architectures=["Qwen3DFlashDraftModel"], is_causal=False, block_size=4))
    unity = {"output_multiplier": 1.0, "final_logit_softcapping": None, "input_embedding_scale": 1.0}
    return _layout("dflash", raw | {"dflash_config": _nested(arch, block_size=4, **unity)}, arch)


def automodel_causal() -> Published:
    """JetSpec, by a release that does not stamp `is_causal`."""
    arch = canonical_arch("dflash", causal=True)
    raw = _newer(_qwen3(arch, architectures=["Qwen3DFlashDraftModel"], block_size=4))
    return _layout("dflash", raw | {"dflash_config": _nested(arch, block_size=4, causal=True)}, arch)


def speculators(algo: str, **changes: Any) -> Published:
    arch = canonical_arch(algo, **changes)
    layer = _newer(_qwen3(arch))
    del layer["num_target_layers"]
    raw = {
        "architectures": [{"dflash": "DFlashDraftModel", "dspark": "DSparkDraftModel"}[algo]],
        "speculators_model_type": algo,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": algo,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": arch.num_predicted}],
            "verifier": {"name_or_path": "policy", "architectures": ["Qwen3ForCausalLM"]},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": arch.draft_vocab_size,
        "target_hidden_size": None,
        "aux_hidden_state_layer_ids": list(arch.feature_ids),
        "mask_token_id": MASK,
        "block_size": arch.block_size,
        "sample_from_anchor": arch.first_slot == 0,
        # The library's default; its layers without a window see the whole block all the same.
        "sliding_window_non_causal": False,
        "vendor_note": {"kept": [2]},
        **_heads(arch),
    }
    return _layout(algo, raw, arch)


def _speco(arch: Any, name: str, kind: str, **fields: Any) -> dict[str, Any]:
    """verl-SpeCo's own flat config: no head_dim, features counted, the policy's layers under a second name."""
    size = {k: v for k, v in _qwen3(arch).items() if k in ("attention_dropout", "vendor_note") or "_size" in k}
    return size | {
        "architectures": [name],
        "model_type": kind,
        "head_dim": arch.head_dim,
        "num_hidden_layers": arch.num_hidden_layers,
        "num_attention_heads": arch.num_attention_heads,
        "num_key_value_heads": arch.num_key_value_heads,
        "rms_norm_eps": arch.rms_norm_eps,
        "max_position_embeddings": arch.max_position_embeddings,
        "rope_theta": arch.rope["rope_theta"],
        "target_hidden_size": arch.target_hidden_size,
        "target_num_hidden_layers": TARGET_LAYERS,
        "num_target_layers": TARGET_LAYERS,
        "num_context_layers": len(arch.feature_ids),
        "target_layer_ids": [i - 1 for i in arch.feature_ids],
        "mask_token_id": MASK,
        **fields,
    }


def speco_dflash() -> Published:
    """Its files do not hold the block size; older ones count features where others count the policy's layers."""
    arch = canonical_arch("dflash")
    raw = _speco(arch, "DFlashForCausalLM", "dflash", num_target_layers=len(arch.feature_ids))
    return _layout("dflash", raw, arch, copies=("embed_tokens.weight",), block_size=4)


# -- DSpark ----------------------------------------------------------------------------------------------------------


def deepseek() -> Published:
    """Flat, without the slot layout, with stale copies of the policy's tensors."""
    arch = canonical_arch("dspark")
    raw = _qwen3(arch, architectures=["Qwen3DSparkModel"], num_anchors=512, block_size=4, mask_token_id=MASK)
    raw |= {"target_layer_ids": [i - 1 for i in arch.feature_ids]} | _heads(arch)
    del raw["sample_from_anchor"]
    return _layout("dspark", raw, arch, copies=("embed_tokens.weight", "lm_head.weight"))


def automodel_dspark() -> Published:
    """Without a confidence head it says nothing about that head's input."""
    arch = canonical_arch("dspark", enable_confidence_head=False, confidence_head_with_markov=False)
    raw = _newer(deepseek().config)
    del raw["confidence_head_with_markov"]
    raw["enable_confidence_head"] = False
    return _layout("dspark", raw, arch, copies=("embed_tokens.weight", "lm_head.weight"))


def specforge_dspark() -> Published:
    """Everything in the nested block, code to be run, heads under an older container."""
    arch = canonical_arch("dspark")
    raw = _qwen3(arch, architectures=["DSparkDraftModel"], auto_map={"AutoModel": "dspark.DSparkDraftModel"})
    heads = {k: v for k, v in _heads(arch).items() if k not in ("sample_from_anchor", "enable_confidence_head")}
    nested = _nested(arch, projector_type="dspark", attention_mode="gqa", confidence_head_alpha=1.0, **heads)
    raw |= {"block_size": 4, "dflash_config": nested, "target_hidden_size": None}
    return Published("dspark", arch, raw, _in_container(canonical_tensors(arch), "markov_head", "confidence_head"))


def specforge_dspark_plain_class() -> Published:
    """A class name that two algorithms share, and a reduced vocabulary."""
    arch = canonical_arch("dspark", draft_vocab_size=9)
    raw = _qwen3(arch, architectures=["DFlashDraftModel"], block_size=4, draft_vocab_size=9)
    return _layout("dspark", raw | {"dflash_config": _nested(arch, projector_type="dspark", **_heads(arch))}, arch)


def speco_dspark() -> Published:
    arch = canonical_arch("dspark")
    heads = {k: v for k, v in _heads(arch).items() if k != "sample_from_anchor"}
    losses = {"ce_loss_alpha": 0.1, "l1_loss_alpha": 0.9, "loss_decay_gamma": 7.0, "confidence_head_alpha": 1.0}
    raw = _speco(arch, "DSparkDraftModel", "dspark", block_size=4, num_anchors=64, **heads, **losses)
    return _layout("dspark", raw, arch, copies=("embed_tokens.weight",))


# -- Domino ----------------------------------------------------------------------------------------------------------


def specforge_domino() -> Published:
    """A plain class name with the projector, one size stated twice."""
    arch = canonical_arch("domino")
    raw = _qwen3(arch, architectures=["DFlashDraftModel"], auto_map={"AutoModel": "dflash.DFlashDraftModel"})
    raw |= {"block_size": 4, "emb_dim": 6, "dflash_config": _nested(arch, projector_type="domino", **_heads(arch))}
    return _layout("domino", raw, arch)


def specforge_domino_newer() -> Published:
    """Its own class name; heads under an older container."""
    base = specforge_domino()
    tensors = _in_container(base.tensors, "prefix_gru", "embed_proj")
    return Published("domino", base.arch, base.config | {"architectures": ["DominoDraftModel"]}, tensors)


def automodel_domino() -> Published:
    """The label's shift is left to the reader's default by older releases."""
    arch = canonical_arch("domino", shift_label=False, block_size=5)
    raw = _newer(_qwen3(arch, architectures=["Qwen3DFlashDraftModel"], is_causal=False, block_size=5))
    nested = _nested(arch, block_size=5, projector_type="domino", output_multiplier=1.0, **_heads(arch))
    del nested["shift_label"]
    return _layout("domino", raw | {"dflash_config": nested}, arch, shift_label=False)


def speco_domino() -> Published:
    arch = canonical_arch("domino")
    raw = _speco(arch, "DominoDraftModel", "domino", block_size=4, projector_type="domino", **_heads(arch))
    return _layout("domino", raw | {"lambda_base_start": 1.0}, arch, copies=("embed_tokens.weight",))


LAYOUTS: dict[str, Callable[[], Published]] = {
    function.__name__: function
    for function in (
        zlab,
        zlab_newer,
        specforge_dflash,
        automodel_dflash,
        automodel_causal,
        speco_dflash,
        deepseek,
        automodel_dspark,
        specforge_dspark,
        specforge_dspark_plain_class,
        speco_dspark,
        specforge_domino,
        specforge_domino_newer,
        automodel_domino,
        speco_domino,
    )
} | {
    "speculators_dflash": lambda: speculators("dflash"),
    "speculators_dflash_reduced": lambda: speculators("dflash", draft_vocab_size=9),
    "speculators_dspark": lambda: speculators("dspark"),
    "speculators_dspark_bonus_anchor": lambda: speculators("dspark", sample_from_anchor=False, block_size=5),
    "speculators_dspark_reduced": lambda: speculators("dspark", draft_vocab_size=9),
}

POLICY = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": TARGET_LAYERS,
    "hidden_size": 12,
    "vocab_size": VOCAB,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 20,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "rope_theta": 1e4,
    "eos_token_id": [20, 21],
}
