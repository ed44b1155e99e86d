"""Small block drafts for the tests of every block algorithm; documents and steps are those of `helpers`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from nemo_rl.models.automodel.draft.adapters.base import Serving
from nemo_rl.models.automodel.draft.architecture import BlockArchitecture, DFlashArchitecture
from nemo_rl.models.automodel.draft.block import BlockRuntime
from nemo_rl.models.automodel.draft.builders import BuiltDraft
from nemo_rl.models.automodel.draft.config import DFlashDraftConfig
from nemo_rl.models.automodel.draft.dflash import DFlashRuntime
from nemo_rl.models.automodel.draft.vocab import VocabMap
from tests.unit.models.automodel.draft.helpers import VOCAB, make_spec

MASK = 22
PERMUTED_IDS = [17, 3, 9, 21, 0, 12, 5, 8, 20]


def make_block_arch(kind: type[BlockArchitecture] = DFlashArchitecture, **changes: Any) -> Any:
    """A tiny architecture whose head geometry is not hidden / heads, with more query than key heads."""
    base = {
        "layer_family": "qwen3",
        "hidden_size": 12,
        "target_hidden_size": 12,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCAB,
        "draft_vocab_size": VOCAB,
        "feature_ids": (1, 3),
        "rope": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 64,
        "block_size": 4,
        "mask_token_id": MASK,
        "causal": False,
    }
    return kind(**base | changes)


def make_block_module(runtime_class: type[BlockRuntime], arch: BlockArchitecture, seed: int = 0) -> Any:
    """Random matrices, vectors around one (an identity norm would hide a skipped or doubled one)."""
    module = runtime_class.module_class(arch)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(1 + 0.3 * noise if p.ndim == 1 else noise * 1.5 * p.shape[-1] ** -0.5)
    return module


def make_block_runtime(
    arch: BlockArchitecture,
    *,
    runtime_class: type[BlockRuntime] = DFlashRuntime,
    config_class: type = DFlashDraftConfig,
    ids: Sequence[int] | None = None,
    seed: int = 0,
    **settings: Any,
) -> Any:
    """A runtime on the CPU; further arguments are fields of the configuration."""
    cfg = config_class(enabled=True, **settings)
    vocab = None if ids is None else VocabMap(tuple(ids), arch.vocab_size)
    built = BuiltDraft(make_block_module(runtime_class, arch, seed), vocab, None)
    algo = runtime_class.adapter.algo
    spec = make_spec(arch, ids=ids, algo=algo, num_speculative_tokens=arch.num_predicted, serving=Serving(algo))
    return runtime_class(cfg, spec, built, device=torch.device("cpu"), dtype=torch.float32, seed=0)
