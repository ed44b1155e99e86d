"""Training and the live engine agree, for every draft algorithm.

Parity: whatever the engine proposes with random weights, the training forward proposes too, at every ordinal, before
and after a refit. Alignment: training on one batch of the engine's own responses drives its acceptance from about 1 to
nearly K + 1, and the acceptance that training counts is the engine's, exactly. Both fail when features are paired with
the wrong token, when a layer is off by one, and when an update is not published.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.automodel.draft.capture import FeatureCapture
from nemo_rl.models.automodel.draft.registry import build_draft_runtime, resolve_spec
from tests.functional.serving.engine import MAX_LEN, Proposal, ServedDraft, draw_weights  # sets the environment of vllm
from tests.tiny_models import write_tiny_policy
from tests.unit.models.automodel.draft.algorithms import ALGORITHMS, K, config_for
from tests.unit.models.automodel.draft.helpers import to_microbatch

pytestmark = pytest.mark.timeout(1200)

NUM_LAYERS, NEW_TOKENS, UPDATES, LEARNING_RATE = 4, 24, 150, 5e-3


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(write_tiny_policy(tmp_path_factory.mktemp("policy"), layers=NUM_LAYERS, heads=4, kv=2))


@pytest.fixture(scope="module")
def policy(policy_dir: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(policy_dir, attn_implementation="sdpa", dtype=torch.float32).eval()


def make_prompts(count: int, *, seed: int) -> list[list[int]]:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 20, (count,), generator=g).tolist()
    return [torch.randint(0, 250, (n,), generator=g).tolist() for n in lengths]


VARIANTS: dict[str, dict[str, Any]] = {
    **{algo: {} for algo in ALGORITHMS},
    "eagle1-deep": {"num_layers": 2},
    "peagle-deep": {"num_layers": 3, "norm_before_residual": True, "fc_norm": True},
    "dflash-causal": {"causal": True},
    "dflash-reduced": {"draft_vocab_size": 200},
    "dspark-fill": {"block_size": K + 1, "sample_from_anchor": False, "enable_confidence_head": False},
    "dspark-reduced": {"draft_vocab_size": 200},
    "domino-fill": {"block_size": K + 1, "shift_label": False, "pure_draft_prefix_len": 0},
}
"""Algorithm, or algorithm and what is special -> settings."""


def make_runtime(name: str, policy: torch.nn.Module, *, seed: int = 0, random: bool = False) -> Any:
    """A new draft; with `random`, every tensor is drawn anew."""
    settings = VARIANTS[name]
    cfg = config_for(name.split("-")[0], **settings)
    # Not ascending, so that an id and its rank differ.
    order = torch.randperm(300, generator=torch.Generator().manual_seed(1)).tolist()
    spec = resolve_spec(
        cfg,
        policy_config=policy.config.to_dict(),
        k=K,
        max_model_len=MAX_LEN,
        dtype="float32",
        device="cpu",
        vocab_ids=order[: settings["draft_vocab_size"]] if "draft_vocab_size" in settings else None,
    )
    runtime = build_draft_runtime(
        cfg, spec, policy_model=policy, device="cpu", dtype="float32", draft_dir=None, seed=seed
    )
    if random:
        draw_weights(runtime.module, seed=seed)
    return runtime


def to_batch(sequences: list[list[int]], prompt_lengths: list[int]) -> BatchedDataDict:
    width = max(map(len, sequences))
    place, length = torch.arange(width)[None], torch.tensor([len(s) for s in sequences])[:, None]
    is_response = (place >= torch.tensor(prompt_lengths)[:, None]) & (place < length)
    return BatchedDataDict(
        {
            "input_ids": torch.tensor([s + [0] * (width - len(s)) for s in sequences]),
            "input_lengths": length.squeeze(1),
            "token_mask": is_response.float(),
            "sample_mask": torch.ones(len(sequences)),
            "sample_index": torch.arange(len(sequences)),
        }
    )


def draft_loss(runtime: Any, policy: torch.nn.Module, batch: BatchedDataDict, *, pairing: int = 0) -> Any:
    """One forward of the policy and the draft's loss on it; `pairing` moves the features by that many tokens."""
    runtime.begin_global_batch(batch, step=0, dp_group=None, policy_model=policy)
    mb = to_microbatch(batch, list(range(batch.size)))
    with torch.no_grad(), runtime.capture(policy):
        logits = policy(input_ids=mb.input_ids, position_ids=mb.position_ids, use_cache=False).logits
    captured = runtime._capture._captured
    for key, state in captured.items():
        captured[key] = state.roll(pairing, dims=1)
    return runtime.loss(mb, logits)


def replayed(runtime: Any, policy: torch.nn.Module, batch: BatchedDataDict, **fault: int) -> list[float]:
    """Tokens per verification, then acceptance per ordinal, as the training forward counts them."""
    with torch.no_grad():
        metrics = draft_loss(runtime, policy, batch, **fault).metrics
    names = ["replayed_acceptance_length", *(f"replayed_acceptance_{j}" for j in range(1, K + 1))]
    return [float(metrics[name][0] / metrics[name][1]) for name in names]


def agreement(runtime: Any, policy: torch.nn.Module, proposals: list[Proposal], **fault: int) -> float:
    """Share of proposals that the training forward repeats at every ordinal.

    A proposal becomes a response: the replay accepts all of it at once exactly when it would have proposed the same.
    """
    sequences = [[*p.context, p.sampled, *p.draft] for p in proposals]
    batch = to_batch(sequences, [len(p.context) for p in proposals])
    with torch.no_grad():
        metrics = draft_loss(runtime, policy, batch, **fault).metrics
    return float(metrics[f"replayed_acceptance_{K}"][0]) / len(proposals)


@pytest.fixture(scope="module", params=VARIANTS)
def served(
    request: pytest.FixtureRequest, policy_dir: Path, policy: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, ServedDraft]]:
    algo = request.param
    runtime = make_runtime(algo, policy, seed=5, random=True)
    engine = ServedDraft(policy_dir, policy, runtime, tmp_path_factory.mktemp("draft") / algo, new_tokens=NEW_TOKENS)
    yield algo, engine
    engine.worker.shutdown()


def test_engine_proposes_what_training_does_before_and_after_a_refit(
    served: tuple[str, ServedDraft], policy: torch.nn.Module
) -> None:
    algo, engine = served
    first, second = (make_runtime(algo, policy, seed=seed, random=True) for seed in (5, 6))
    prompts = make_prompts(4, seed=3)
    proposals = engine.proposals(prompts)
    assert len(proposals) >= 30
    assert len({token for p in proposals for token in p.draft}) > 10, "a constant chain would hide an error"
    assert agreement(first, policy, proposals) == 1.0
    # The placeholders of a block depend on the features but weakly while weights are random.
    assert agreement(first, policy, proposals, pairing=1) < 0.5
    assert agreement(second, policy, proposals) < 0.2, "stale weights must show"
    # The policy moves with it: embedding, features and head that the draft reads are others.
    moved = copy.deepcopy(policy)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for p in moved.parameters():
            p.mul_(1 + 0.2 * torch.randn(p.shape, generator=generator))
    engine.refit(second, moved)
    proposals = engine.proposals(prompts)
    assert agreement(second, moved, proposals) == 1.0
    assert agreement(second, policy, proposals) < 0.5, "a stale policy must show"
    assert agreement(first, moved, proposals) < 0.2
    # Prompts that the scheduler cuts are drafted behind as whole ones are.
    with engine.cut_prompts(K + 3):
        behind_cuts = engine.proposals(prompts)
    assert agreement(second, moved, behind_cuts) == 1.0
    drafted = {(*p.context, p.sampled): p.draft for p in behind_cuts}
    assert all(drafted[(*p.context, p.sampled)] == p.draft for p in proposals)


def train(runtime: Any, policy: torch.nn.Module, batch: BatchedDataDict, **fault: int) -> None:
    optimizer = torch.optim.AdamW(runtime.param_group()["params"], lr=LEARNING_RATE, betas=(0.9, 0.95))
    for update in range(UPDATES):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * (1 - update / UPDATES)
        optimizer.zero_grad()
        draft_loss(runtime, policy, batch, **fault).loss.backward()
        torch.nn.utils.clip_grad_norm_(runtime.module.parameters(), 1.0)
        optimizer.step()


def plain_greedy(policy: torch.nn.Module, prompt: list[int], length: int) -> list[int]:
    """The policy's most likely continuation, by transformers."""
    with torch.no_grad():
        out = policy.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_length=length, do_sample=False
        )
    return out[0].tolist()


def capture_wrong_layers(runtime: Any) -> None:
    """Every feature one layer later; for a draft of the final state, the state before its norm."""
    ids = runtime.spec.architecture.feature_ids or (NUM_LAYERS - 1,)
    runtime._capture = FeatureCapture([i + 1 for i in ids], num_layers=NUM_LAYERS)


def check_alignment(algo: str, engine: ServedDraft, policy: torch.nn.Module, *, fault: str | None = None) -> None:
    """Train a new draft on one batch, publish it, and compare."""
    runtime = make_runtime(algo, policy, seed=7)
    prompts = make_prompts(4, seed=11)
    lengths = [len(p) for p in prompts]
    engine.refit(runtime, policy)
    sequences, before = engine.generate(prompts, greedy=True)
    assert sequences == [plain_greedy(policy, prompt, len(s)) for prompt, s in zip(prompts, sequences, strict=True)]
    assert before.acceptance_length < 1.7
    shift = {"pairing": 1} if fault == "pairing" else {}
    if fault == "layer":
        capture_wrong_layers(runtime)
    batch = to_batch(sequences, lengths)
    train(runtime, policy, batch, **shift)
    counted = replayed(runtime, policy, batch, **shift)
    if fault != "unpublished":
        engine.refit(runtime, policy)
    again, after = engine.generate(prompts, greedy=True)
    assert again == sequences, "speculation changed a greedy response"
    assert after.acceptance_length > K + 1 - 0.7
    assert [after.acceptance_length, *after.per_position_rates] == pytest.approx(counted, abs=1e-6)


@pytest.mark.parametrize("served", ALGORITHMS, indirect=True)
def test_training_on_one_batch_drives_acceptance_to_its_limit(
    served: tuple[str, ServedDraft], policy: torch.nn.Module
) -> None:
    check_alignment(*served, policy)


@pytest.mark.parametrize("served", ALGORITHMS, indirect=True)
@pytest.mark.parametrize("fault", ["pairing", "layer", "unpublished"])
def test_a_fault_breaks_the_alignment(served: tuple[str, ServedDraft], policy: torch.nn.Module, fault: str) -> None:
    with pytest.raises(AssertionError, match=r"acceptance_length"):
        check_alignment(*served, policy, fault=fault)
