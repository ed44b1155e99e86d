"""Speculation without a draft model: what is sampled, counted and refitted. One engine per method."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.generation.vllm.speculative import SUFFIX_PACKAGE, baseline_problems, merge_speculative_config
from nemo_rl.models.generation.vllm.vllm_worker import release_beside_another
from tests.unit.models.generation.vllm import counting_models as counting
from tests.unit.models.generation.vllm.conftest import Served, generation_config, make_worker

pytestmark = pytest.mark.vllm

K, LOOKUP_MIN, LOOKUP_MAX = 3, 2, 4
METHODS = {
    "ngram": {"method": "ngram", "prompt_lookup_min": LOOKUP_MIN, "prompt_lookup_max": LOOKUP_MAX},
    "suffix": {"method": "suffix", "suffix_decoding_max_cached_requests": 100},
}


def repetitive_prompts(count: int, *, seed: int) -> BatchedDataDict:
    """Prompts that begin a sequence again which they hold already, for the first tokens of the response to be found."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, 200, (count,), generator=generator)
    run, again = torch.arange(14), torch.arange(4)
    ids = torch.stack([torch.cat([start + run, start + again]) for start in starts])
    return BatchedDataDict(
        {"input_ids": ids, "input_lengths": torch.full((count,), ids.shape[1]), "seeds": torch.arange(count) + seed}
    )


@pytest.fixture(
    scope="module",
    params=[
        "ngram",
        pytest.param(
            "suffix",
            marks=pytest.mark.skipif(
                importlib.util.find_spec(SUFFIX_PACKAGE) is None, reason=f"{SUFFIX_PACKAGE} is not installed"
            ),
        ),
    ],
)
def engine(request: pytest.FixtureRequest, model_dirs: tuple[Path, Path]) -> Iterator[tuple[str, Served]]:
    """The counting policy, speculating without a draft model."""
    policy_dir, _ = model_dirs
    user = METHODS[request.param] | {"num_speculative_tokens": K}
    assert baseline_problems(user, device="cpu") == []
    worker = make_worker(policy_dir, generation_config(vllm_kwargs={"block_size": 32, "speculative_config": user}))
    worker.build(speculative_config=merge_speculative_config(user, None))
    served = Served(worker, policy_dir, policy_dir, load_file(str(policy_dir / "model.safetensors")), {})
    served.update(served.policy, {})
    yield request.param, served
    release_beside_another(worker._llm)


def greedy_choices(model, tokens: torch.Tensor, *, start: int) -> list[int]:
    with torch.no_grad():
        return model(tokens[None]).logits[0, start - 1 : -1].argmax(-1).tolist()


def test_greedy_decoding_equals_plain_decoding(engine: tuple[str, Served], reference_model) -> None:
    _, served = engine
    data = repetitive_prompts(24, seed=1)
    before = served.worker.spec_counters()
    out = served.worker.generate(data, greedy=True)
    used = served.worker.spec_counters() - before
    assert used.num_drafts > 0
    assert torch.get_num_threads() == 1, "numba must not give torch its own number of threads"
    assert 0 < used.num_accepted_tokens < used.num_draft_tokens, used
    for row, start in enumerate(data["input_lengths"].tolist()):
        tokens = out["output_ids"][row, : int(out["unpadded_sequence_lengths"][row])]
        assert greedy_choices(reference_model, tokens, start=start) == tokens[start:].tolist(), row


def lookup(tokens: list[int]) -> list[int]:
    """Up to K tokens behind the earliest place of the longest end of `tokens` that occurred before."""
    for n in range(LOOKUP_MAX, LOOKUP_MIN - 1, -1):
        for start in range(len(tokens) - n):
            if tokens[start : start + n] == tokens[-n:]:
                return tokens[start + n : start + n + K]
    return []


def test_ngram_counters_are_those_of_a_replay(engine: tuple[str, Served]) -> None:
    """Look the proposals up along the responses; what was accepted behind an end, the engine cannot tell apart."""
    method, served = engine
    if method != "ngram":
        pytest.skip("the lookup of this test is that of n-grams")
    data = repetitive_prompts(24, seed=2)
    before = served.worker.spec_counters()
    out = served.worker.generate(data)
    used = served.worker.spec_counters() - before
    drafts = proposed = forwards = emitted = behind_end = 0
    accepted = [0] * K
    for row, start in enumerate(data["input_lengths"].tolist()):
        tokens = out["output_ids"][row, : int(out["unpadded_sequence_lengths"][row])].tolist()
        place = start + 1
        emitted += len(tokens) - place
        while place < len(tokens):
            proposal = lookup(tokens[:place])
            actual = tokens[place : place + len(proposal)]
            hits = next((i for i, pair in enumerate(zip(proposal, actual, strict=False)) if pair[0] != pair[1]), None)
            hits = len(actual) if hits is None else hits
            drafts += bool(proposal)
            proposed += len(proposal)
            forwards += 1
            for i in range(hits):
                accepted[i] += 1
            behind_end += len(proposal) - hits if place + hits == len(tokens) else 0
            place += hits + 1
    assert (used.num_drafts, used.num_draft_tokens, used.num_decode_tokens) == (drafts, proposed, emitted)
    assert 0 < drafts < forwards, "steps without a proposal must occur"
    assert 0 <= used.num_accepted_tokens - sum(accepted) <= behind_end
    assert abs(used.num_forwards - forwards) <= behind_end
    assert used.accepted_per_pos[0] >= accepted[0] > 0
    assert 1.0 < used.tokens_per_forward < used.acceptance_length <= K + 1


def test_refit_without_a_draft_reaches_the_engine(engine: tuple[str, Served], reference_model) -> None:
    """An update of the policy alone is verified whole, and what is generated then is the new policy's."""
    _, served = engine
    data = repetitive_prompts(6, seed=3)
    before = served.worker.generate(data, greedy=True)["output_ids"]
    old = served.policy
    new = counting.perturbed(old, seed=5, scale=0.3)
    report = served.update(new, {})
    assert report.num_checked == len(new)
    assert report.unchecked == ()
    try:
        reference_model.load_state_dict(new)
        out = served.worker.generate(data, greedy=True)
        assert not torch.equal(out["output_ids"], before)
        for row, start in enumerate(data["input_lengths"].tolist()):
            tokens = out["output_ids"][row, : int(out["unpadded_sequence_lengths"][row])]
            assert greedy_choices(reference_model, tokens, start=start) == tokens[start:].tolist(), row
    finally:
        reference_model.load_state_dict(old)
        served.update(old, {})


def test_checks_and_probe_work(engine: tuple[str, Served]) -> None:
    _, served = engine
    assert abs(served.worker.sampling_self_check().z) < 6
    counters = served.worker.spec_counters()
    payload = counting.make_payload(served.version, served.policy, {})
    result = served.worker.measure_throughput(repetitive_prompts(4, seed=4), payload=payload, batch_size=2, repeats=1)
    assert min(result.plain, result.speculative) > 0
    assert served.worker.spec_counters() == counters
