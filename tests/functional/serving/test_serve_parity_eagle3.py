"""Serve parity with the running engine: the trainer's unroll proposes the tokens that vLLM's drafter proposes.

One engine per K drafts for real prompts. Every proposal is repeated from the training forward: the policy's own hidden
states of the verified tokens, the module's unroll teacher-forced on the proposal's earlier tokens. Weights are random,
so a shift, a wrong layer, a wrong position, a missing norm or a stale weight changes most proposals.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl.models.automodel.draft.capture import FeatureCapture
from nemo_rl.models.automodel.draft.config import Eagle3DraftConfig
from nemo_rl.models.automodel.draft.eagle3 import Eagle3Runtime
from nemo_rl.models.automodel.draft.models.llama_eagle import UnrollInputs
from nemo_rl.models.automodel.draft.registry import build_draft_runtime, resolve_spec
from nemo_rl.models.automodel.draft.runtime import charged_depths
from nemo_rl.models.automodel.draft.unroll import plan_rows
from tests.functional.serving.engine import MAX_LEN, Proposal, ServedDraft  # sets the environment of vllm
from tests.tiny_models import write_tiny_policy

pytestmark = pytest.mark.timeout(1200)

NUM_LAYERS, NEW_TOKENS, NUM_PROMPTS, MAX_PROPOSALS = 4, 24, 6, 60


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


def recorded(engine: ServedDraft) -> list[Proposal]:
    """What the engine drafts for a few prompts."""
    generator = torch.Generator().manual_seed(3)
    lengths = (int(torch.randint(2, 24, (1,), generator=generator)) for _ in range(NUM_PROMPTS))
    prompts = [torch.randint(0, 250, (n,), generator=generator).tolist() for n in lengths]
    return engine.proposals(prompts)[:MAX_PROPOSALS]


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
) -> Iterator[tuple[ServedDraft, Eagle3Runtime, Eagle3Runtime]]:
    k = request.param
    first = make_runtime(policy, k=k, seed=5, **SETTINGS[k])
    second = make_runtime(policy, k=k, seed=6, **SETTINGS[k])
    engine = ServedDraft(policy_dir, policy, first, tmp_path_factory.mktemp("draft") / f"k{k}", new_tokens=NEW_TOKENS)
    yield engine, first, second
    engine.worker.shutdown()


def test_engine_proposes_what_the_trainer_does_before_and_after_a_refit(
    served: tuple[ServedDraft, Eagle3Runtime, Eagle3Runtime], policy: torch.nn.Module
) -> None:
    engine, first, second = served
    engine.refit(first, policy)
    proposals = recorded(engine)
    assert len(proposals) >= 20
    assert len({token for p in proposals for token in p.draft}) > 10, "a constant chain would hide an error"
    assert agreement(first, policy, proposals) == 1.0
    # What was not published does not agree: the test would see a stale engine.
    assert agreement(second, policy, proposals) < 0.5
    engine.refit(second, policy)
    assert agreement(second, policy, recorded(engine)) == 1.0


@pytest.mark.parametrize("fault", ["layer_ids", "pairing", "position"])
def test_parity_fails_when_the_trainer_is_off_by_one(
    policy_dir: Path, policy: torch.nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    runtime = make_runtime(policy, k=3, seed=5)
    engine = ServedDraft(policy_dir, policy, runtime, tmp_path / "draft", new_tokens=NEW_TOKENS)
    try:
        engine.refit(runtime, policy)
        proposals = recorded(engine)
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
