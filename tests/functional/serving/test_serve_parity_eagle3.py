"""Serve parity with the running engine: the trainer's unroll proposes the tokens that vLLM's drafter proposes.

One engine per K drafts for real prompts. Every proposal is repeated from the training forward: the policy's own hidden
states of the verified tokens, the module's unroll teacher-forced on the proposal's earlier tokens. Weights are random,
so a shift, a wrong layer, a wrong position, a missing norm or a stale weight changes most proposals.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Read when vllm is imported.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")

import pytest
import torch

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.automodel.draft.capture import FeatureCapture
from nemo_rl.models.automodel.draft.config import Eagle3DraftConfig
from nemo_rl.models.automodel.draft.eagle3 import Eagle3Runtime
from nemo_rl.models.automodel.draft.models.llama_eagle import UnrollInputs
from nemo_rl.models.automodel.draft.registry import build_draft_runtime, resolve_spec
from nemo_rl.models.automodel.draft.runtime import charged_depths
from nemo_rl.models.automodel.draft.unroll import plan_rows
from nemo_rl.models.generation.config import GenerationConfig, SamplingCheckConfig, VllmConfig
from nemo_rl.models.generation.vllm.vllm_worker import VllmGenerationWorker
from nemo_rl.weight_sync.checksum import dtype_name, tensor_checksum
from nemo_rl.weight_sync.interfaces import DRAFT_PREFIX, RefitManifest, RefitPayload, TensorInfo
from nemo_rl.weight_sync.transport import pack_tensors
from tests.tiny_models import write_tiny_policy

pytestmark = [pytest.mark.vllm, pytest.mark.automodel, pytest.mark.timeout(1200)]

NUM_LAYERS, MAX_LEN, NEW_TOKENS, NUM_PROMPTS, MAX_PROPOSALS = 4, 96, 24, 6, 60


@dataclass(frozen=True)
class Proposal:
    """`draft` was proposed after `context` had been verified and `sampled` had been sampled."""

    context: list[int]
    sampled: int
    draft: list[int]


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(write_tiny_policy(tmp_path_factory.mktemp("policy"), layers=NUM_LAYERS, heads=4, kv=2))


@pytest.fixture(scope="module")
def policy(policy_dir: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(policy_dir, attn_implementation="sdpa", dtype=torch.float32).eval()


def make_runtime(policy: torch.nn.Module, *, k: int, seed: int, **settings: Any) -> Eagle3Runtime:
    cfg = Eagle3DraftConfig(enabled=True, ttt_steps=k, aux_layer_indices=(0, 1, 2), **settings)
    spec = resolve_spec(cfg, policy_config=policy.config.to_dict(), k=k, max_model_len=MAX_LEN, dtype="float32")
    runtime = build_draft_runtime(cfg, spec, policy_model=policy, device="cpu", dtype="float32", draft_dir=None, seed=0)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in runtime.module.parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(1 + 0.3 * noise if p.ndim == 1 else noise * 2 * p.shape[-1] ** -0.5)
    return runtime


def trainer_draft(runtime: Eagle3Runtime, policy: torch.nn.Module, proposal: Proposal) -> list[int]:
    """The training forward's greedy choice at every depth, teacher-forced on the engine's proposal."""
    arch, k = runtime.spec.architecture, len(proposal.draft)
    capture = FeatureCapture(arch.feature_ids, num_layers=NUM_LAYERS)
    with torch.no_grad(), capture(policy):
        policy(torch.tensor([proposal.context]))
    features = torch.cat(capture.take((1, len(proposal.context))), -1)[0]
    slot = len(proposal.context) - 1
    ids = torch.tensor([[*proposal.context, proposal.sampled, *proposal.draft, 0]])
    width = ids.shape[1]
    docs = torch.zeros_like(ids)
    charged = charged_depths(torch.arange(width)[None] > slot, docs, depths=k, mask_rule="contiguous")
    plan = plan_rows(
        input_ids=ids,
        position_ids=torch.arange(width)[None],
        doc_ids=docs,
        charged=charged & (torch.arange(width) == slot),
        num_layers=arch.num_hidden_layers,
        chunk_size=1024,
        is_packed=False,
    )
    # Features that the engine does not have are NaN: reading one would show.
    unknown = torch.full((width - len(features), features.shape[1]), float("nan"))
    inputs = UnrollInputs(
        plan=plan.unroll,
        features=torch.cat([features, unknown])[plan.feature_rows],
        embedding=policy.get_input_embeddings().weight.detach(),
        teacher_logits=torch.zeros(1, 1),
        weights=torch.zeros(0),
        vocab_ids=None,
        drop_out_of_vocab=False,
    )
    with torch.no_grad():
        return [int(runtime.module.lm_head(out[0]).argmax()) for out in runtime.module._unroll(inputs)]


class Engine:
    """A speculative engine whose drafter's proposals are recorded."""

    def __init__(self, policy_dir: Path, policy: torch.nn.Module, runtime: Eagle3Runtime, draft_dir: Path) -> None:
        self._policy = {name: p.detach().clone() for name, p in policy.named_parameters()}
        runtime.export(str(draft_dir), policy)
        config = GenerationConfig(
            max_new_tokens=NEW_TOKENS,
            vllm_cfg=VllmConfig(precision="float32", max_model_len=MAX_LEN, enforce_eager=True),
            sampling_check=SamplingCheckConfig(),
        )
        self.worker = VllmGenerationWorker(
            config, model_dir=str(policy_dir), tokenizer_dir=str(policy_dir), device="cpu", seed=0
        )
        self.worker.build(
            speculative_config=runtime.spec.speculative_config(model_dir=str(draft_dir)),
            trained_draft_tensors=runtime.spec.trained_names,
        )
        self.version = -1
        self._recorded: list[tuple[int, int, list[int]]] = []
        drafter = self.worker._llm.collective_rpc(lambda worker: worker.model_runner.drafter)[0]
        stock: Callable[..., torch.Tensor] = drafter.propose

        def propose(*args: Any, **kwargs: Any) -> torch.Tensor:
            out = stock(*args, **kwargs)
            at = kwargs["token_indices_to_sample"]
            row = -1 if at is None else int(at[0])
            verified = int(kwargs["target_positions"][row]) + 1
            self._recorded.append((verified, int(kwargs["next_token_ids"][0]), out[0].tolist()))
            return out

        drafter.propose = propose

    def refit(self, runtime: Eagle3Runtime) -> None:
        """Publish the draft (and the unchanged policy) as a training step does."""
        draft = {name.removeprefix(DRAFT_PREFIX): t for name, t in runtime.stream(policy)}
        wire = {**self._policy, **{DRAFT_PREFIX + name: t for name, t in draft.items()}}
        describe = lambda ts: {n: TensorInfo(tuple(t.shape), dtype_name(t.dtype)) for n, t in ts.items()}  # noqa: E731
        self.version += 1
        report = self.worker.update_weights(
            RefitPayload(
                version=self.version,
                manifest=RefitManifest(policy=describe(self._policy), draft=describe(draft)),
                checksums={name: tensor_checksum(t) for name, t in wire.items()},
                tensors=pack_tensors(wire.items()),
            )
        )
        assert report.num_checked == len(wire)

    def proposals(self) -> list[Proposal]:
        """Draft greedily for a few prompts, one at a time."""
        generator = torch.Generator().manual_seed(3)
        found = []
        for i in range(NUM_PROMPTS):
            length = int(torch.randint(2, 24, (1,), generator=generator))
            prompt = torch.randint(0, 250, (1, length), generator=generator)
            self._recorded.clear()
            data = BatchedDataDict(
                {"input_ids": prompt, "input_lengths": torch.tensor([length]), "seeds": torch.tensor([i])}
            )
            tokens = self.worker.generate(data, greedy=True)["output_ids"][0].tolist()
            for verified, sampled, draft in self._recorded:
                if verified < len(tokens):
                    assert tokens[verified] == sampled
                    found.append(Proposal(tokens[:verified], sampled, draft))
        return found[:MAX_PROPOSALS]


def agreement(runtime: Eagle3Runtime, policy: torch.nn.Module, proposals: list[Proposal]) -> float:
    """Share of proposals that the trainer repeats at every depth."""
    return sum(trainer_draft(runtime, policy, p) == p.draft for p in proposals) / len(proposals)


SETTINGS = {
    1: {},
    2: {"num_layers": 2, "norm_before_residual": True},
    4: {"norm_output": True},
    5: {"fc_norm": True},
    6: {"norm_before_fc": True},
    7: {},
}
"""K -> settings; the plain draft of K = 3 is in test_live_alignment.py."""


@pytest.fixture(scope="module", params=sorted(SETTINGS), ids=lambda k: f"K{k}")
def served(
    request: pytest.FixtureRequest, policy_dir: Path, policy: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, Eagle3Runtime, Eagle3Runtime]]:
    k = request.param
    first = make_runtime(policy, k=k, seed=5, **SETTINGS[k])
    second = make_runtime(policy, k=k, seed=6, **SETTINGS[k])
    engine = Engine(policy_dir, policy, first, tmp_path_factory.mktemp("draft") / f"k{k}")
    yield engine, first, second
    engine.worker.shutdown()


def test_engine_proposes_what_the_trainer_does_before_and_after_a_refit(
    served: tuple[Engine, Eagle3Runtime, Eagle3Runtime], policy: torch.nn.Module
) -> None:
    engine, first, second = served
    engine.refit(first)
    proposals = engine.proposals()
    assert len(proposals) >= 20
    assert len({token for p in proposals for token in p.draft}) > 10, "a constant chain would hide an error"
    assert agreement(first, policy, proposals) == 1.0
    # What was not published does not agree: the test would see a stale engine.
    assert agreement(second, policy, proposals) < 0.5
    engine.refit(second)
    assert agreement(second, policy, engine.proposals()) == 1.0


@pytest.mark.parametrize("fault", ["layer_ids", "pairing", "position"])
def test_parity_fails_when_the_trainer_is_off_by_one(
    policy_dir: Path, policy: torch.nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    runtime = make_runtime(policy, k=3, seed=5)
    engine = Engine(policy_dir, policy, runtime, tmp_path / "draft")
    try:
        engine.refit(runtime)
        proposals = engine.proposals()
    finally:
        engine.worker.shutdown()
    assert agreement(runtime, policy, proposals) == 1.0
    if fault == "layer_ids":
        take = FeatureCapture.__init__
        monkeypatch.setattr(
            FeatureCapture,
            "__init__",
            lambda self, ids, *, num_layers: take(self, tuple(i - 1 for i in ids), num_layers=num_layers),
        )
    elif fault == "pairing":
        proposals = [Proposal(p.context[:1] + p.context, p.context[-1], p.draft) for p in proposals]
        proposals = [Proposal(p.context[:-1], p.sampled, p.draft) for p in proposals]
    else:
        rope = runtime.module.rope
        monkeypatch.setattr(runtime.module, "rope", lambda positions, dtype: rope(2 * positions, dtype))
    assert agreement(runtime, policy, proposals) < 0.7
