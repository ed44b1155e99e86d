"""What a speculative engine samples, against transformers and against plain decoding. One engine for the file."""

from __future__ import annotations

import pytest
import torch
from vllm.v1.sample import rejection_sampler

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.errors import SamplingCheckError
from nemo_rl.models.generation.vllm import cpu_sampler_fix
from tests.unit.models.generation.vllm import counting_models as counting
from tests.unit.models.generation.vllm.conftest import (
    MAX_LEN,
    STOP_TOKEN,
    Served,
    generation_config,
    make_worker,
    prompts,
)

TEMPERATURE = 1.3


def _next_token_probs(model, ids: torch.Tensor) -> torch.Tensor:
    """float64 [rows, vocab]: the policy's distribution of the token behind each row."""
    with torch.no_grad():
        return (model(ids).logits[:, -1].double() / TEMPERATURE).softmax(-1)


def _chi_square_p(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """p-value of the counts; cells expected less than 8 times are merged."""
    expected = probs * counts.sum()
    rare = expected < 8
    cells_e = torch.cat([expected[~rare], expected[rare].sum()[None]])
    cells_o = torch.cat([counts[~rare], counts[rare].sum()[None]]).double()
    keep = cells_e > 0
    statistic = ((cells_o[keep] - cells_e[keep]) ** 2 / cells_e[keep]).sum()
    df = int(keep.sum()) - 1
    return float(torch.special.gammaincc(torch.tensor(df / 2, dtype=torch.float64), statistic / 2))


def test_greedy_speculation_equals_greedy_plain_decoding(served: Served, reference_model) -> None:
    """Invariant 6 on 50 prompts; the oracle is a plain loop over transformers' forward."""
    data = prompts(50, seed=1)
    before = served.worker.spec_counters()
    out = served.worker.generate(data, greedy=True)
    used = served.worker.spec_counters() - before
    # The draft was right sometimes, and sometimes not: both paths of the verifier ran at every position.
    assert all(0.1 < rate < 0.95 for rate in used.per_position_rates), used
    for row in range(data.size):
        start, end = int(data["input_lengths"][row]), int(out["unpadded_sequence_lengths"][row])
        ids = data["input_ids"][row, :start].tolist()
        with torch.no_grad():  # one forward over the response checks every choice in it
            logits = reference_model(out["output_ids"][row : row + 1, :end]).logits[0, start - 1 : end - 1]
        assert logits.argmax(-1).tolist() == out["output_ids"][row, start:end].tolist(), (row, ids)
        assert int(out["generation_lengths"][row]) == 32 or int(out["output_ids"][row, end - 1]) == STOP_TOKEN


def test_sampled_tokens_have_the_policys_distribution(
    served: Served, reference_model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chi-square of the first two sampled tokens; the second goes through the rejection sampler."""
    count = 4000
    monkeypatch.setattr(served.worker, "_config", served.worker._config.model_copy(update={"max_new_tokens": 2}))
    prompt = torch.tensor([[17, 101, 100, 101]])
    data = BatchedDataDict(
        {
            "input_ids": prompt.repeat(count, 1),
            "input_lengths": torch.full((count,), 4),
            "seeds": torch.arange(count) + 50_000,
        }
    )
    before = served.worker.spec_counters()
    out = served.worker.generate(data)
    used = served.worker.spec_counters() - before
    assert used.num_drafts == count
    assert used.per_position_rates[0] > 0.1, used  # accepted drafts are among the samples

    vocab_size = reference_model.config.vocab_size
    first = _next_token_probs(reference_model, prompt)[0]
    continued = torch.cat([prompt.repeat(vocab_size, 1), torch.arange(vocab_size)[:, None]], dim=1)
    conditional = _next_token_probs(reference_model, continued)
    tokens = out["output_ids"][:, 4:6]
    counts_1 = torch.bincount(tokens[:, 0], minlength=vocab_size)
    assert _chi_square_p(counts_1, first) > 1e-4
    alive = tokens[:, 0] != STOP_TOKEN
    first_alive = first.clone()
    first_alive[STOP_TOKEN] = 0
    second = (first_alive / first_alive.sum()) @ conditional
    counts_2 = torch.bincount(tokens[alive, 1], minlength=vocab_size)
    assert _chi_square_p(counts_2, second) > 1e-4
    # The pair: given the most likely first token, so that dependence is tested too.
    top = int(first.argmax())
    assert _chi_square_p(torch.bincount(tokens[tokens[:, 0] == top, 1], minlength=vocab_size), conditional[top]) > 1e-4


def test_chi_square_would_notice_another_temperature() -> None:
    probs = torch.softmax(torch.linspace(3, -3, 40, dtype=torch.float64), 0)
    wrong = probs.pow(1.15) / probs.pow(1.15).sum()
    counts = torch.bincount(
        torch.multinomial(wrong, 4000, replacement=True, generator=torch.Generator().manual_seed(0)), minlength=40
    )
    assert _chi_square_p(counts, probs) < 1e-4


def test_logprobs_are_the_policys_at_the_sampling_temperature(served: Served, reference_model) -> None:
    data = prompts(8, seed=2)
    out = served.worker.generate(data)
    for row in range(data.size):
        start, end = int(data["input_lengths"][row]), int(out["unpadded_sequence_lengths"][row])
        ids = out["output_ids"][row : row + 1, :end]
        with torch.no_grad():
            logprobs = (reference_model(ids).logits[0] / TEMPERATURE).log_softmax(-1)
        expected = logprobs[start - 1 : end - 1].gather(-1, ids[0, start:end, None])[:, 0]
        torch.testing.assert_close(out["logprobs"][row, start:end], expected, atol=2e-5, rtol=0)
        assert not out["logprobs"][row, :start].any()
        assert not out["logprobs"][row, end:].any()


def test_where_prompts_are_cut_changes_no_sample(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token budget of 24 cuts most of these prompts; what is sampled behind a part is thrown away and drawn again."""
    data = prompts(12, seed=21, low=10)
    before = served.worker.spec_counters()
    whole = served.worker.generate(data)
    between = served.worker.spec_counters()
    scheduler = served.worker._llm.llm_engine.engine_core.engine_core.scheduler
    monkeypatch.setattr(scheduler, "max_num_scheduled_tokens", 24)
    cut = served.worker.generate(data)
    after = served.worker.spec_counters()
    assert torch.equal(cut["output_ids"], whole["output_ids"])
    assert after - between == between - before, "proposals after a cut prompt are those after a whole one"


def test_batch_layout(served: Served) -> None:
    data = prompts(6, seed=3)
    out = served.worker.generate(data)
    lengths = data["input_lengths"]
    assert torch.equal(out["unpadded_sequence_lengths"], lengths + out["generation_lengths"])
    assert out["output_ids"].shape[1] == int(out["unpadded_sequence_lengths"].max())
    for row, length in enumerate(lengths.tolist()):
        assert torch.equal(out["output_ids"][row, :length], data["input_ids"][row, :length])
        assert not out["output_ids"][row, int(out["unpadded_sequence_lengths"][row]) :].any()
    assert set(out["finish_reasons"]) <= {"stop", "length"}
    assert out["weight_versions"].tolist() == [served.version] * 6


def test_a_seeded_sample_does_not_depend_on_its_batch(served: Served) -> None:
    data = prompts(12, seed=4)
    together = served.worker.generate(data)
    order = [7, 2, 11]
    alone = served.worker.generate(data.select_indices(order))
    for row, source in enumerate(order):
        end = int(alone["unpadded_sequence_lengths"][row])
        assert torch.equal(alone["output_ids"][row, :end], together["output_ids"][source, :end])
    other = data.select_indices(range(12))
    other["seeds"] = data["seeds"] + 1
    assert not torch.equal(served.worker.generate(other)["output_ids"], together["output_ids"])


def test_responses_may_use_every_position_and_never_more(served: Served) -> None:
    assert served.worker.limits.engine_max_model_len == MAX_LEN + 4
    ids = torch.arange(100, 100 + 90)[None]
    data = BatchedDataDict({"input_ids": ids.repeat(3, 1), "input_lengths": torch.tensor([72, 82, 66])})
    before = served.worker.spec_counters()
    out = served.worker.generate(data, greedy=True)
    used = served.worker.spec_counters() - before
    assert out["generation_lengths"].tolist() == [24, 14, 30]
    assert out["finish_reasons"] == ["length"] * 3
    assert used.num_draft_tokens == 3 * used.num_drafts


def test_acceptance_does_not_collapse_at_the_length_limit(served: Served) -> None:
    """Too close to its limit the engine sends zeros as drafts, for the whole batch."""
    data = prompts(16, seed=8, low=82, high=83)
    before = served.worker.spec_counters()
    out = served.worker.generate(data, greedy=True)
    assert out["generation_lengths"].tolist() == [14] * 16
    assert (served.worker.spec_counters() - before).acceptance_length > 1.3


@pytest.mark.parametrize("length", [0, MAX_LEN])
def test_a_prompt_that_leaves_no_room_is_refused(served: Served, length: int) -> None:
    data = BatchedDataDict({"input_ids": torch.ones(1, 99, dtype=torch.int64), "input_lengths": torch.tensor([length])})
    with pytest.raises(ValueError, match=rf"input_lengths\[0\]: got {length}; must be 1 to {MAX_LEN - 1}"):
        served.worker.generate(data)


def test_a_stop_token_ends_the_response_and_is_part_of_it(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft proposes tokens behind it in the same step; they must not appear."""
    data = prompts(12, seed=9)
    free = served.worker.generate(data, greedy=True)
    monkeypatch.setattr(served.worker, "_stop_token_ids", list(range(0, 320, 7)))
    out = served.worker.generate(data, greedy=True)
    for row, start in enumerate(data["input_lengths"].tolist()):
        response = free["output_ids"][row, start : int(free["unpadded_sequence_lengths"][row])].tolist()
        stops = [index for index, token in enumerate(response) if token % 7 == 0]
        end = start + (stops[0] + 1 if stops else len(response))
        assert out["output_ids"][row, start:end].tolist() == response[: end - start]
        assert int(out["unpadded_sequence_lengths"][row]) == end
        assert out["finish_reasons"][row] == ("stop" if stops else "length")
    assert out["finish_reasons"].count("stop") >= 6


def test_stop_tokens_are_the_configured_ones_and_the_end_of_sequence(served: Served, reference_model) -> None:
    assert served.worker._stop_token_ids == sorted({STOP_TOKEN, reference_model.config.eos_token_id})


def test_a_stop_string_ends_the_response_at_the_token_that_completes_it(served: Served) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(served.policy_dir)
    data = BatchedDataDict({"input_ids": torch.arange(60, 68)[None], "input_lengths": torch.tensor([8])})
    free = served.worker.generate(data, greedy=True)["output_ids"][0, 8:].tolist()
    stop = tokenizer.decode(free[9:11])
    first_end = next(n for n in range(1, len(free)) if stop in tokenizer.decode(free[:n]))
    data["stop_strings"] = [[stop]]
    out = served.worker.generate(data, greedy=True)
    assert out["output_ids"][0, 8:].tolist() == free[:first_end]
    assert out["finish_reasons"] == ["stop"]
    assert out["logprobs"].shape == out["output_ids"].shape


def test_counters_grow_by_what_a_call_used(served: Served) -> None:
    data = prompts(4, seed=5)
    start = served.worker.spec_counters()
    served.worker.generate(data, greedy=True)
    once = served.worker.spec_counters() - start
    served.worker.generate(data, greedy=True)
    twice = served.worker.spec_counters() - start
    assert twice - once == once
    assert len(once.accepted_per_pos) == 3
    assert sum(once.accepted_per_pos) == once.num_accepted_tokens
    assert list(once.accepted_per_pos) == sorted(once.accepted_per_pos, reverse=True)


def test_self_check_passes_and_is_not_counted(served: Served) -> None:
    before = served.worker.spec_counters()
    report = served.worker.sampling_self_check()
    assert abs(report.z) < 6
    assert 400 < report.num_tokens < 64 * 16
    assert served.worker.spec_counters() == before


def test_self_check_stops_an_engine_with_the_stock_cpu_sampler(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", cpu_sampler_fix.STOCK_EXPAND)
    with pytest.raises(SamplingCheckError, match=r"policy\.generation\.sampling_check: got z="):
        served.worker.sampling_self_check()


def test_self_check_stops_an_engine_that_accepts_every_draft(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a bad draft that is never questioned the output is not the policy's."""

    def accept_all(draft_token_ids, num_draft_tokens, max_spec_len, cu, draft_probs, target_logits, bonus, *_, **__):
        out = torch.full((len(num_draft_tokens), max_spec_len + 1), -1, dtype=torch.int32)
        start = 0
        for row, n in enumerate(num_draft_tokens):
            out[row, :n] = draft_token_ids[start : start + n]
            out[row, n] = bonus[row]
            start += n
        return out

    good = served.draft
    served.update(served.policy, {**good, "lm_head.weight": -good["lm_head.weight"]})
    assert abs(served.worker.sampling_self_check().z) < 6  # a bad draft alone does no harm
    monkeypatch.setattr(rejection_sampler, "rejection_sample", accept_all)
    with pytest.raises(SamplingCheckError):
        served.worker.sampling_self_check()
    served.update(served.policy, good)


def test_throughput_is_measured_on_the_same_weights_and_leaves_the_engine_usable(served: Served) -> None:
    data = prompts(6, seed=6)
    before, counters = served.worker.generate(data, greedy=True)["output_ids"], served.worker.spec_counters()
    payload = counting.make_payload(served.version, served.policy, served.draft)
    result = served.worker.measure_throughput(data, payload=payload, batch_size=4, repeats=1)
    assert result.plain > 0
    assert result.speedup == result.speculative / result.plain
    assert served.worker.spec_counters() == counters
    assert torch.equal(served.worker.generate(data, greedy=True)["output_ids"], before)


def test_a_worker_that_was_not_built_says_so(served: Served) -> None:
    worker = make_worker(served.policy_dir, generation_config())
    with pytest.raises(RuntimeError, match="was not built"):
        worker.generate(prompts(1))
