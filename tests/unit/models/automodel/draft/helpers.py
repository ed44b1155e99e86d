"""Small drafts, documents and micro-batches for the draft's tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.automodel.data import Microbatch, MicrobatchSpec, make_microbatch
from nemo_rl.models.automodel.draft.adapters.base import Serving
from nemo_rl.models.automodel.draft.architecture import Eagle3Architecture
from nemo_rl.models.automodel.draft.builders import BuiltDraft
from nemo_rl.models.automodel.draft.config import Eagle3DraftConfig
from nemo_rl.models.automodel.draft.eagle3 import Eagle3Runtime
from nemo_rl.models.automodel.draft.models.llama_eagle import LlamaEagleDraft
from nemo_rl.models.automodel.draft.spec import DraftSpec
from nemo_rl.models.automodel.draft.vocab import VocabMap
from tests.unit.models.automodel.draft.reference import Document, NaiveEagle3

VOCAB, TARGET_LAYERS = 23, 5


def make_arch(**changes) -> Eagle3Architecture:
    """A tiny architecture whose head geometry is not hidden / heads, with more query than key heads."""
    base = {
        "layer_family": "llama",
        "hidden_size": 12,
        "target_hidden_size": 12,
        "intermediate_size": 20,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCAB,
        "draft_vocab_size": VOCAB,
        "feature_ids": (1, 3),
        "rope": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 64,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
    }
    return Eagle3Architecture(**base | changes)


def make_spec(arch: Eagle3Architecture, *, ids: Sequence[int] | None = None, **changes) -> DraftSpec:
    base = DraftSpec(
        algo="eagle3",
        architecture=arch,
        source="scratch",
        num_target_layers=TARGET_LAYERS,
        num_speculative_tokens=1,
        max_model_len=64,
        dtype="float32",
        initializer_range=0.2,
        vocab_ids=None if ids is None else tuple(ids),
        serving=Serving("eagle3"),
    )
    return dataclasses.replace(base, **changes)


def make_module(arch: Eagle3Architecture, seed: int = 0) -> LlamaEagleDraft:
    """Random matrices, norm weights around one (an identity norm would hide a skipped or doubled one)."""
    module = LlamaEagleDraft(arch)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(1 + 0.3 * noise if p.ndim == 1 else noise * p.shape[-1] ** -0.5)
    return module


class StubPolicy(nn.Module):
    """Holds the embedding and head that the draft reads; features and logits are given by the test."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.head = nn.Linear(width, VOCAB, bias=False)
        with torch.no_grad():
            self.embed.weight.normal_(generator=torch.Generator().manual_seed(77))
            self.head.weight.normal_(generator=torch.Generator().manual_seed(78))

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed

    def get_output_embeddings(self) -> nn.Linear:
        return self.head


def make_runtime(
    arch: Eagle3Architecture, cfg: Eagle3DraftConfig, *, ids: Sequence[int] | None = None, seed: int = 0
) -> Eagle3Runtime:
    vocab = None if ids is None else VocabMap(tuple(ids), arch.vocab_size)
    built = BuiltDraft(make_module(arch, seed), vocab, None)
    spec = make_spec(arch, ids=ids, num_speculative_tokens=min(3, cfg.ttt_steps))
    return Eagle3Runtime(cfg, spec, built, device=torch.device("cpu"), dtype=torch.float32, seed=0)


def make_documents(masks: Sequence[str], arch: Eagle3Architecture, seed: int = 1) -> list[Document]:
    """One document per mask; `1` = sampled."""
    g = torch.Generator().manual_seed(seed)
    width = arch.feature_size
    return [
        Document(
            tokens=torch.randint(arch.vocab_size, (len(m),), generator=g).tolist(),
            sampled=[c == "1" for c in m],
            features=torch.randn(len(m), width, generator=g),
            logits=torch.randn(len(m), arch.vocab_size, generator=g) * 2,
        )
        for m in masks
    ]


def to_batch(docs: Sequence[Document], *, width: int | None = None, first_index: int = 0) -> BatchedDataDict:
    """Right-padded training batch of documents."""
    width = width or max(len(d.tokens) for d in docs)
    ids, mask = torch.zeros(len(docs), width, dtype=torch.long), torch.zeros(len(docs), width)
    for i, d in enumerate(docs):
        ids[i, : len(d.tokens)] = torch.tensor(d.tokens)
        mask[i, : len(d.tokens)] = torch.tensor(d.sampled).float()
    return BatchedDataDict(
        {
            "input_ids": ids,
            "input_lengths": torch.tensor([len(d.tokens) for d in docs]),
            "token_mask": mask,
            "sample_mask": torch.ones(len(docs)),
            "sample_index": torch.arange(len(docs)) + first_index,
        }
    )


def to_microbatch(
    batch: BatchedDataDict, indices: Sequence[int], *, mode: str = "fixed", multiple: int = 1
) -> Microbatch:
    """Rows as the training worker makes them."""
    spec = MicrobatchSpec(mode, len(indices), 10_000, multiple, "concatenative")
    return make_microbatch(batch, indices, spec, device=torch.device("cpu"))


def give_features(runtime: Eagle3Runtime, mb: Microbatch, docs: Sequence[Document], *, padding: float = 0.0) -> Tensor:
    """Put the documents' features where the capture would have, and return row logits; padding holds `padding`."""
    arch = runtime.spec.architecture
    shape = mb.input_ids.shape
    features = torch.full((*shape, arch.feature_size), padding)
    logits = torch.full((*shape, arch.vocab_size), padding)
    index = mb.sample_index.tolist()
    for r in range(shape[0]):
        for s in range(shape[1]):
            d = int(mb.doc_ids[r, s])
            if d >= 0:
                doc = docs[index[d]]
                features[r, s] = doc.features[int(mb.position_ids[r, s])]
                logits[r, s] = doc.logits[int(mb.position_ids[r, s])]
    parts = features.split(arch.target_hidden_size, -1)
    runtime._capture._captured = dict(zip(runtime._capture._ids, parts, strict=True))
    return logits


@dataclasses.dataclass
class StepResult:
    loss: Tensor
    grads: dict[str, Tensor]
    metrics: dict[str, tuple[float, float]]


def run_step(
    runtime: Eagle3Runtime,
    docs: Sequence[Document],
    groups: Sequence[Sequence[int]],
    *,
    mode: str = "fixed",
    multiple: int = 1,
    padding: float = 0.0,
    upstream: float = 1.0,
) -> StepResult:
    """One optimizer step's loss, gradients and metrics over micro-batches of document indices."""
    runtime.module.zero_grad(set_to_none=True)
    batch = to_batch(docs)
    runtime.begin_global_batch(batch, step=0, dp_group=None, policy_model=StubPolicy())
    loss, sums = torch.zeros(()), {}
    for group in groups:
        mb = to_microbatch(batch, group, mode=mode, multiple=multiple)
        out = runtime.loss(mb, give_features(runtime, mb, docs, padding=padding))
        (out.loss * upstream).backward()
        loss = loss + out.loss.detach()
        for name, (num, den) in out.metrics.items():
            old = sums.get(name, (0.0, 0.0))
            sums[name] = (old[0] + float(num), old[1] + float(den))
    grads = {n: p.grad.clone() for n, p in runtime.module.named_parameters()}
    return StepResult(loss, grads, sums)


def naive_of(runtime: Eagle3Runtime) -> NaiveEagle3:
    return NaiveEagle3(dict(runtime.module.named_parameters()), runtime.spec.architecture)
