"""One random draft per algorithm, written as each publisher of autoregressive drafts lays it out.

No published weights are at hand: names, fields and what is left out follow the publishers' code and model cards. Every
layout of an algorithm holds the same numbers, so whatever reads it must come to the same draft.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from nemo_rl.models.automodel.draft.adapters.base import Verifier
from nemo_rl.models.automodel.draft.architecture import (
    DraftArchitecture,
    Eagle1Architecture,
    Eagle3Architecture,
    PEagleArchitecture,
)
from nemo_rl.models.automodel.draft.registry import DRAFT_ALGORITHMS, adapter_of
from nemo_rl.models.automodel.draft.vocab import VocabMap

VOCAB, MASK, DEPTHS = 23, 22, 4
IDS = (0, 2, 3, 8, 9, 12, 17, 20, 21)
FREQUENT_FIRST = (17, 3, 9, 21, 0, 12, 2, 8, 20)
"""The same ids in an order that does not ascend, as nemo_automodel has them."""

DEFAULT_IDS = (2, 4, 5)
"""What the engine assumes for a policy of 8 layers whose draft names no ids."""

POLICY: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 8,
    "hidden_size": 16,
    "vocab_size": VOCAB,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 20,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "rope_theta": 1e4,
}
MAX_MODEL_LEN = 64
VERIFIER = Verifier("the/policy", ("Qwen3ForCausalLM",))
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_GEOMETRY: dict[str, Any] = {
    "layer_family": "llama",
    "hidden_size": 16,
    "target_hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB,
    "draft_vocab_size": VOCAB,
    "rope": {"rope_type": "default", "rope_theta": 10000.0},
    "max_position_embeddings": 64,
}
_FUSED: dict[str, Any] = {
    "feature_ids": DEFAULT_IDS,
    "norm_before_residual": False,
    "norm_before_fc": False,
    "fc_norm": False,
}


def eagle1(**changes: Any) -> Eagle1Architecture:
    """The EAGLE-1 draft."""
    return Eagle1Architecture(**_GEOMETRY | {"feature_ids": ()} | changes)


def eagle3(**changes: Any) -> Eagle3Architecture:
    """The EAGLE-3 draft."""
    return Eagle3Architecture(**_GEOMETRY | _FUSED | {"norm_output": False} | changes)


def peagle(**changes: Any) -> PEagleArchitecture:
    """The P-EAGLE draft."""
    changes = {"num_hidden_layers": 2, "mask_token_id": MASK, "num_depths": DEPTHS} | changes
    return PEagleArchitecture(**_GEOMETRY | _FUSED | changes)


@dataclasses.dataclass
class Published:
    """A checkpoint as its publisher writes it, and what it must be read as.

    Attributes:
        algo: draft algorithm.
        publisher: of the `SourceConfig`.
        architecture: without `extra`.
        config: config.json.
        tensors: as stored.
        canonical: canonical names.
        ids: target id of each draft id; None = all.
        settings: fields of `policy.draft` without which the file cannot be read.
        extra: fields that must survive an export.
    """

    algo: str
    publisher: str
    architecture: DraftArchitecture
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    canonical: dict[str, Tensor]
    ids: tuple[int, ...] | None = None
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)

    def write(self, directory: Path) -> Path:
        """Put config.json and model.safetensors into a directory."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config))
        save_file({name: t.contiguous() for name, t in self.tensors.items()}, directory / "model.safetensors")
        return directory

    def cfg(self, directory: Path, **changes: Any) -> Any:
        """`policy.draft` that loads the directory."""
        settings = {"enabled": True, "model_name": str(directory)} | self.settings | changes
        return DRAFT_ALGORITHMS[self.algo].config(**settings)


def random_tensors(arch: DraftArchitecture, ids: tuple[int, ...] | None = None) -> dict[str, Tensor]:
    """Tensors of a draft under canonical names, fp32; a tensor's numbers depend on its name and shape alone."""
    tensors = {}
    for name, shape in arch.trained_shapes().items():
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(sum(name.encode())))
        tensors[name] = 1 + 0.3 * noise if len(shape) == 1 else noise * shape[-1] ** -0.5
    if ids is not None:
        vocab = VocabMap(ids, arch.vocab_size)
        tensors |= {"d2t": torch.tensor(vocab.d2t), "t2d": torch.tensor(vocab.t2d)}
    return tensors


def _plain(arch: DraftArchitecture, **fields: Any) -> dict[str, Any]:
    """What a config derived from Llama's says of any draft."""
    keys = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "vocab_size",
        "max_position_embeddings",
    )
    return {
        "model_type": "llama",
        **{key: getattr(arch, key) for key in keys},
        "hidden_act": "silu",
        "rope_theta": arch.rope["rope_theta"],
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        **fields,
    }


_PLAIN_EXTRA = {"initializer_range": 0.02, "use_cache": True}


def _rename(tensors: Mapping[str, Tensor], rule: Callable[[str], str]) -> dict[str, Tensor]:
    return {rule(name): tensor for name, tensor in tensors.items()}


def _midlayer(name: str) -> str:
    return name.replace("layers.0.", "midlayer.")


def _wrapped(name: str) -> str:
    return name if name in ("lm_head.weight", "mask_hidden", "d2t", "t2d") else f"model.{name}"


# -- the publishers --------------------------------------------------------------------------------------------------


def authors_eagle1() -> Published:
    """The original authors' EAGLE-1: no width of a head, a bias of zeros."""
    arch = eagle1()
    tensors = random_tensors(arch)
    config = _plain(arch, architectures=["LlamaForCausalLM"], bias=True, bos_token_id=1)
    del config["head_dim"]
    stored = tensors | {"fc.bias": torch.zeros(16), "embed_tokens.weight": torch.ones(VOCAB, 16)}
    return Published("eagle1", "eagle", arch, config, stored, tensors, extra=_PLAIN_EXTRA | {"bos_token_id": 1})


def authors_eagle3() -> Published:
    """The original authors' EAGLE-3: told from EAGLE-1 by `draft_vocab_size`; fewer positions than the engine's."""
    arch = eagle3(draft_vocab_size=len(IDS))
    tensors = random_tensors(arch, IDS)
    config = _plain(
        arch, architectures=["LlamaForCausalLM"], draft_vocab_size=len(IDS), max_position_embeddings=16, bias=False
    )
    stored = _rename(tensors, _midlayer)
    return Published("eagle3", "eagle", arch, config, stored, tensors, IDS, extra=_PLAIN_EXTRA)


def specforge_eagle3() -> Published:
    """SpecForge: both RoPE schemas, tables of an identity map, an embedding, norms per feature."""
    arch = eagle3(fc_norm=True, rope={**LLAMA3, "rope_theta": 5e5})
    tensors = random_tensors(arch)
    config = _plain(
        arch,
        architectures=["LlamaForCausalLMEagle3"],
        draft_vocab_size=VOCAB,
        fc_norm=True,
        rope_scaling=LLAMA3,
        rope_parameters={**LLAMA3, "rope_theta": 5e5},
        tie_word_embeddings=False,
    )
    stored = _rename(tensors, _midlayer) | {
        "d2t": torch.zeros(VOCAB, dtype=torch.int64),
        "t2d": torch.ones(VOCAB, dtype=torch.bool),
        "embed_tokens.weight": torch.ones(VOCAB, 16),
    }
    return Published("eagle3", "native", arch, config, stored, tensors, extra=_PLAIN_EXTRA)


def specforge_eagle31() -> Published:
    """SpecForge's EAGLE-3.1, whose `norm_output` means something else unless the user says so."""
    draft = specforge_eagle3()
    draft.config["norm_output"] = True
    draft.architecture = dataclasses.replace(draft.architecture, norm_output=True)
    draft.settings = {"norm_output": True}
    return draft


def specforge_peagle() -> Published:
    """SpecForge's P-EAGLE, which writes neither the mask token nor the depths."""
    arch = peagle()
    tensors = random_tensors(arch)
    config = _plain(arch, architectures=["PEagleDraftModel"], draft_vocab_size=VOCAB, norm_before_residual=False)
    settings = {"mask_token_id": MASK, "num_depths": DEPTHS}
    return Published("peagle", "specforge", arch, config, tensors, tensors, settings=settings, extra=_PLAIN_EXTRA)


def angelslim_eagle3() -> Published:
    """AngelSlim: the engine's architecture, leftovers of the policy's windows."""
    arch = eagle3(draft_vocab_size=len(IDS))
    tensors = random_tensors(arch, IDS)
    config = _plain(
        arch,
        architectures=["Eagle3LlamaForCausalLM"],
        draft_vocab_size=len(IDS),
        attention_bias=False,
        rope_scaling=None,
        max_window_layers=36,
        sliding_window=None,
        use_sliding_window=False,
        tie_word_embeddings=False,
    )
    return Published("eagle3", "angelslim", arch, config, _rename(tensors, _midlayer), tensors, IDS, extra=_PLAIN_EXTRA)


def _modelopt(arch: Eagle3Architecture, **nested: Any) -> dict[str, Any]:
    return _plain(
        arch,
        architectures=["LlamaForCausalLMEagle3"],
        draft_vocab_size=arch.draft_vocab_size,
        rope_scaling=None,
        attention_bias=None,
        mlp_bias=None,
        pretraining_tp=None,
        eagle_config={
            "eagle_aux_hidden_state_layer_ids": list(arch.feature_ids),
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
            "next_layer_regular": True,
            "parallel_draft_step": 1,
            "parallel_draft_heads_num_layers": None,
            **nested,
        },
    )


_MODELOPT_EXTRA = {
    "eagle_config": {
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
        "parallel_draft_heads_num_layers": None,
    },
    "pretraining_tp": None,
}


def modelopt_eagle3() -> Published:
    """ModelOpt: ids inside `eagle_config` alone, its wrapper's prefix, no presence mask."""
    arch = eagle3(draft_vocab_size=len(IDS), feature_ids=(1, 3, 6))
    tensors = random_tensors(arch, IDS)
    stored = {f"eagle_module.{name}": t for name, t in tensors.items() if name != "t2d"}
    extra = _PLAIN_EXTRA | _MODELOPT_EXTRA
    return Published("eagle3", "modelopt", arch, _modelopt(arch), stored, tensors, IDS, extra=extra)


def modelopt_full_vocabulary() -> Published:
    """ModelOpt with every token: the head is the policy's and not stored; one norm over all features."""
    arch = eagle3(norm_before_fc=True)
    tensors = random_tensors(arch)
    del tensors["lm_head.weight"]
    config = _modelopt(arch, norm_before_fc=True)
    return Published("eagle3", "modelopt", arch, config, tensors, tensors, extra=_PLAIN_EXTRA | _MODELOPT_EXTRA)


def _speculators(arch: DraftArchitecture, kind: str, **fields: Any) -> dict[str, Any]:
    layer = _plain(arch, rope_parameters=dict(arch.rope), pad_token_id=None, bos_token_id=1, tie_word_embeddings=True)
    del layer["rope_theta"], layer["torch_dtype"], layer["transformers_version"]
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": kind,
        "speculators_version": "0.5.0",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": DEPTHS, "verifier_accept_k": 1}],
            "verifier": {"name_or_path": "the/policy", "architectures": ["Qwen3ForCausalLM"]},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": arch.draft_vocab_size,
        "embed_requires_grad": False,
        "has_no_defaults_at_init": False,
        **fields,
    }


_SPECULATORS_EXTRA = {
    "has_no_defaults_at_init": False,
    "transformer_layer_config": _PLAIN_EXTRA | {"pad_token_id": None, "bos_token_id": 1},
}


def speculators_eagle3() -> Published:
    """speculators: norm_before_residual left to the reader, the verifier's tensors beside the draft's."""
    arch = eagle3(draft_vocab_size=len(IDS), norm_before_residual=True, layer_family="qwen3")
    tensors = random_tensors(arch, IDS)
    config = _speculators(arch, "eagle3", eagle_aux_hidden_state_layer_ids=list(arch.feature_ids))
    config["transformer_layer_config"]["model_type"] = "qwen3"
    stored = tensors | {
        "verifier_lm_head.weight": torch.ones(len(IDS), 16),
        "verifier_norm.weight": torch.ones(16),
        "embed_tokens.weight": torch.ones(VOCAB, 16),
    }
    return Published("eagle3", "speculators", arch, config, stored, tensors, IDS, extra=_SPECULATORS_EXTRA)


def speculators_peagle() -> Published:
    """speculators' P-EAGLE: the depths are the number of proposed tokens."""
    arch = peagle(feature_ids=(1, 4))
    tensors = random_tensors(arch)
    ids = list(arch.feature_ids)
    config = _speculators(arch, "peagle", mask_token_id=MASK, eagle_aux_hidden_state_layer_ids=ids)
    return Published("peagle", "speculators", arch, config, tensors, tensors, extra=_SPECULATORS_EXTRA)


def automodel_eagle3() -> Published:
    """nemo_automodel: a copy of the policy's config, its number of layers included, and no feature ids."""
    arch = eagle3(draft_vocab_size=len(FREQUENT_FIRST), norm_output=True)
    tensors = random_tensors(arch, FREQUENT_FIRST)
    config = _plain(
        arch,
        architectures=["LlamaEagle3DraftModel"],
        model_type="qwen3",
        num_hidden_layers=POLICY["num_hidden_layers"],
        layer_types=["full_attention"] * 7 + ["sliding_attention"],
        draft_vocab_size=len(FREQUENT_FIRST),
        target_hidden_size=16,
        norm_output=True,
        fc_norm=False,
        parallel_drafting=False,
        attn_implementation="eager",
        tie_word_embeddings=False,
    )
    return Published(
        "eagle3",
        "automodel",
        arch,
        config,
        _rename(tensors, _wrapped),
        tensors,
        FREQUENT_FIRST,
        settings={"aux_layer_indices": [1, 3, 4]},
        extra=_PLAIN_EXTRA | {"attn_implementation": "eager"},
    )


def automodel_peagle() -> Published:
    """nemo_automodel's P-EAGLE: the mask token at top level, the feature of the placeholder with three axes."""
    arch = peagle()
    tensors = random_tensors(arch)
    config = _plain(
        arch,
        architectures=["LlamaEagle3DraftModel"],
        model_type="qwen3",
        draft_vocab_size=VOCAB,
        parallel_drafting=True,
        mask_token_id=MASK,
        num_depths=DEPTHS,
        down_sample_ratio=0.8,
        norm_output=False,
    )
    return Published(
        "peagle",
        "automodel",
        arch,
        config,
        _rename(tensors, _wrapped),
        tensors,
        settings={"aux_layer_indices": [1, 3, 4]},
        extra=_PLAIN_EXTRA | {"down_sample_ratio": 0.8},
    )


def speco_eagle3() -> Published:
    """verl-SpeCo: canonical names, the ids twice more under its own key."""
    arch = eagle3(feature_ids=(1, 3, 6))
    tensors = random_tensors(arch)
    ids = list(arch.feature_ids)
    config = _plain(
        arch,
        architectures=["LlamaForCausalLMEagle3"],
        draft_vocab_size=VOCAB,
        num_aux_hidden_states=3,
        eagle_aux_hidden_state_layer_ids=ids,
        eagle_config={"eagle_aux_hidden_state_layer_ids": ids, "target_hidden_layer_ids": ids},
    )
    stored = tensors | {
        "d2t": torch.zeros(VOCAB, dtype=torch.int64),
        "t2d": torch.ones(VOCAB, dtype=torch.bool),
    }
    return Published("eagle3", "speco", arch, config, stored, tensors, extra=_PLAIN_EXTRA)


def speco_peagle() -> Published:
    """verl-SpeCo's P-EAGLE: a model type of its own, and a number of layers of its own."""
    arch = peagle()
    tensors = random_tensors(arch)
    config = _plain(
        arch,
        architectures=["LlamaForCausalLMPeagle"],
        model_type="llama_peagle",
        num_hidden_layers=32,
        num_draft_layers=2,
        num_aux_hidden_states=3,
        draft_vocab_size=VOCAB,
        target_hidden_size=16,
        mask_token_id=MASK,
        num_depths=DEPTHS,
        parallel_drafting=True,
        fc_norm=False,
        norm_output=False,
    )
    return Published("peagle", "speco", arch, config, tensors, tensors, extra=_PLAIN_EXTRA)


def _own(arch: DraftArchitecture, algo: str, layout: str, ids: tuple[int, ...] | None = None) -> Published:
    adapter, tensors = adapter_of(algo), random_tensors(arch, ids)
    if layout == "native":
        config, publisher = adapter.write_config(arch, dtype="float32"), "nemo_rl"
    else:
        config, publisher = adapter.write_speculators(arch, dtype="float32", k=3, verifier=VERIFIER), "speculators"
    return Published(algo, publisher, arch, config, tensors, tensors, ids)


PUBLISHED: dict[str, Callable[[], Published]] = {
    maker.__name__: maker
    for maker in (
        authors_eagle1,
        authors_eagle3,
        specforge_eagle3,
        specforge_eagle31,
        specforge_peagle,
        angelslim_eagle3,
        modelopt_eagle3,
        modelopt_full_vocabulary,
        speculators_eagle3,
        speculators_peagle,
        automodel_eagle3,
        automodel_peagle,
        speco_eagle3,
        speco_peagle,
    )
} | {
    "own_eagle1": lambda: _own(eagle1(num_hidden_layers=2), "eagle1", "native"),
    "own_eagle3": lambda: _own(eagle3(draft_vocab_size=len(IDS), fc_norm=True), "eagle3", "native", IDS),
    "own_eagle3_speculators": lambda: _own(eagle3(norm_output=True), "eagle3", "speculators"),
    "own_peagle": lambda: _own(peagle(fc_norm=True), "peagle", "native"),
    "own_peagle_speculators": lambda: _own(peagle(draft_vocab_size=len(IDS)), "peagle", "speculators", IDS),
}
"""Name of a layout -> the draft in it."""
