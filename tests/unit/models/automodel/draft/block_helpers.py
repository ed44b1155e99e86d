"""Small block drafts for the tests of every block algorithm; documents and steps are those of `helpers`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nemo_rl.models.automodel.draft.adapters.base import Serving
from nemo_rl.models.automodel.draft.architecture import BlockArchitecture, DFlashArchitecture
from nemo_rl.models.automodel.draft.block import BlockRuntime, charged_anchors, plan_blocks
from nemo_rl.models.automodel.draft.builders import BuiltDraft
from nemo_rl.models.automodel.draft.config import DFlashDraftConfig
from nemo_rl.models.automodel.draft.dflash import DFlashRuntime
from nemo_rl.models.automodel.draft.models.block import BlockDraft, BlockInputs
from nemo_rl.models.automodel.draft.vocab import VocabMap
from tests.unit.models.automodel.draft.helpers import VOCAB, StubPolicy, make_documents, make_spec

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


class OneBlock(NamedTuple):
    """One block in the form that an engine or another library computes it.

    Attributes:
        states: float [K, H], what our module gives.
        position_ids: int64 [1, n + B], of context and slots.
        embeddings: float [1, B, H], of the slots.
        features: float [1, n, F], of the context.
    """

    states: Tensor
    position_ids: Tensor
    embeddings: Tensor
    features: Tensor


def one_block(module: BlockDraft, policy: StubPolicy, *, anchor: int = 3) -> OneBlock:
    """The backbone's states of a whole block behind an anchor."""
    arch = module.arch
    count = anchor + arch.num_predicted + 1
    doc = make_documents(["0" * anchor + "1" * (count - anchor)], arch)[0]
    docs = torch.zeros(1, count, dtype=torch.long)
    charged = charged_anchors(torch.tensor([doc.sampled]), docs, num_predicted=arch.num_predicted)
    charged[:, :, anchor + 1 :] = False
    rows = plan_blocks(
        input_ids=torch.tensor([doc.tokens]),
        position_ids=torch.arange(count)[None],
        doc_ids=docs,
        charged=charged,
        is_complete=torch.ones(1, dtype=torch.bool),
        arch=arch,
        chunk_size=8,
    )
    assert rows is not None
    inputs = BlockInputs(
        plan=rows.plan,
        features=doc.features[rows.feature_rows],
        embedding=policy.embed.weight.detach(),
        head=torch.zeros(0),
        teacher_logits=torch.zeros(0),
        weights=torch.zeros(0),
        vocab_ids=None,
    )
    slots = torch.tensor([[doc.tokens[anchor]] + [arch.mask_token_id] * (arch.block_size - 1)])
    with torch.no_grad():
        return OneBlock(
            states=module.element_states(inputs),
            position_ids=torch.arange(anchor + arch.block_size)[None],
            embeddings=policy.embed(slots),
            features=doc.features[None, :anchor],
        )
