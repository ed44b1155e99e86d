"""The draft algorithm of docs/guides/adding-a-draft.md: added to the registry, it keeps what all algorithms keep."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from nemo_rl.models.automodel.draft import registry
from tests.unit.models.automodel.draft import test_registry_invariants as invariants
from tests.unit.models.automodel.draft.algorithms import SETTINGS

ROOT = Path(__file__).resolve().parents[5]
CODE = ROOT / "docs" / "examples" / "medusa_draft.py"
ALGO = "medusa"


@pytest.fixture(scope="module", autouse=True)
def _added() -> Iterator[None]:
    """What the guide says to add: one entry in the registry; and a small configuration for the tests."""
    spec = importlib.util.spec_from_file_location("medusa_draft", CODE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["medusa_draft"] = module
    spec.loader.exec_module(module)
    with pytest.MonkeyPatch.context() as patch:
        entry = registry.DraftAlgorithm(
            module.MedusaDraftConfig, "medusa_draft:MedusaAdapter", "medusa_draft:MedusaRuntime"
        )
        table = MappingProxyType({**registry.DRAFT_ALGORITHMS, ALGO: entry})
        patch.setattr(registry, "DRAFT_ALGORITHMS", table)
        patch.setattr("tests.unit.models.automodel.draft.algorithms.DRAFT_ALGORITHMS", table)
        patch.setitem(SETTINGS, ALGO, {"num_heads": 3})
        yield
    del sys.modules["medusa_draft"]


@pytest.fixture(scope="module")
def policy(draft_policy_dir: str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(draft_policy_dir, attn_implementation="sdpa").eval()


def test_it_is_short() -> None:
    assert len(CODE.read_text(encoding="utf-8").splitlines()) < 210


CHECKS = [
    invariants.test_split_and_packing_do_not_matter,
    invariants.test_documents_of_a_row_do_not_see_each_other,
    invariants.test_padding_may_hold_anything,
    invariants.test_the_shortest_supervised_chain_learns,
    invariants.test_an_all_padding_row_contributes_nothing,
    invariants.test_resume_continues_bit_identically,
    invariants.test_a_shifted_pairing_changes_the_result,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("test_"))
def test_it_keeps_what_every_algorithm_keeps(check: Any, policy: torch.nn.Module) -> None:
    check(ALGO, policy)


def test_nothing_to_learn_is_a_finite_zero(policy: torch.nn.Module) -> None:
    invariants.test_nothing_to_learn_is_a_finite_zero_for_every_parameter(ALGO, policy, (1, 4), (0, 1))


def test_what_is_trained_is_published_and_exported(policy: torch.nn.Module, tmp_path: Path) -> None:
    invariants.test_trained_published_and_exported_sets_are_one(ALGO, policy, tmp_path)
    for dtype in ("float32", "bfloat16"):
        invariants.test_export_load_export_is_byte_identical(ALGO, policy, tmp_path / dtype, dtype)


def test_loss_is_that_of_a_plain_loop(policy: torch.nn.Module) -> None:
    """Head k at the state of x[t] against the policy's distribution of x[t+2+k], token by token in float64."""
    runtime, batch = invariants.make_runtime(ALGO, policy), invariants.make_batch()
    got, _, metrics = invariants.one_step(runtime, policy, batch, [list(range(batch.size))])
    weights = [p.detach().double() for p in runtime.module.parameters()]
    head = policy.get_output_embeddings().weight.detach().double()
    total, count = 0.0, 0
    for ids, length, sampled in zip(batch["input_ids"], batch["input_lengths"], batch["token_mask"], strict=True):
        with torch.no_grad():
            out = policy.model(input_ids=ids[None, :length])
        states = out.last_hidden_state[0].double()
        logits = states @ head.T
        for t in range(int(length)):
            for k, weight in enumerate(weights):
                span = range(t + 1, t + 3 + k)
                if span[-1] >= length or not all(sampled[i] for i in span):
                    continue
                g = states[t]
                draft = head @ (g + torch.nn.functional.silu(weight @ g))
                total -= float((logits[t + 1 + k].softmax(-1) * draft.log_softmax(-1)).sum())
                count += 1
    assert count == sum(metrics[f"accept_greedy_{k}"][1] for k in (1, 2, 3))
    assert got == pytest.approx(total / count, rel=1e-5)
