from __future__ import annotations

import pytest

from nemo_rl.models.generation.vllm.spec_metrics import SpecCounters


def request(*steps: int, k: int = 3, cut: int = 0) -> SpecCounters:
    """A request with one draft per step; `cut` tokens of what was emitted lie behind the end of the response."""
    emitted = 1 + sum(steps) + len(steps)
    return SpecCounters.from_request(steps, k=k, num_draft_tokens=k * len(steps), num_response_tokens=emitted - cut)


def test_steps_are_counted_by_hand() -> None:
    # Drafts that had 0, 1, 2 and 3 tokens accepted: 4, 2, 1 and 3 of them.
    counters = request(0, 3, 0, 1, 3, 0, 2, 1, 0, 3)
    assert counters == SpecCounters(10, 30, 2 + 2 + 9, (6, 4, 3), num_decode_tokens=10 + 13, num_forwards=10)
    assert counters.acceptance_length == pytest.approx(1 + 13 / 10)
    assert counters.per_position_rates == pytest.approx((0.6, 0.4, 0.3))


def test_nothing_accepted_gives_one_and_everything_gives_k_plus_one() -> None:
    assert request(0, 0, 0, 0, 0, k=2).acceptance_length == 1.0
    assert request(2, 2, 2, 2, 2, k=2).acceptance_length == 3.0


def test_tokens_behind_the_end_of_a_response_are_not_counted() -> None:
    # The last step accepted three tokens and added one; the response ended with the first, the second or the last.
    assert request(1, 3, cut=3) == SpecCounters(2, 6, 2, (2, 0, 0), 3, 2)
    assert request(1, 3, cut=2) == SpecCounters(2, 6, 3, (2, 1, 0), 4, 2)
    assert request(1, 3, cut=0) == SpecCounters(2, 6, 4, (2, 1, 1), 6, 2)
    # A request whose first token ended it had no step.
    assert SpecCounters.from_request([], k=3, num_draft_tokens=0, num_response_tokens=1).num_drafts == 0


def test_steps_without_a_proposal_count_as_forwards_only() -> None:
    # 9 tokens behind the first: two drafts that gave 1 + 1 and 2 + 1, and four steps with nothing to propose.
    counters = SpecCounters.from_request([1, 2], k=3, num_draft_tokens=5, num_response_tokens=10)
    assert counters.acceptance_length == pytest.approx(1 + 3 / 2)
    assert counters.tokens_per_forward == pytest.approx(9 / 6)
    assert (counters + counters).tokens_per_forward == counters.tokens_per_forward
    assert (counters + counters - counters) == counters


def test_tokens_per_forward_is_the_acceptance_length_but_for_the_ends() -> None:
    whole = request(0, 3, 0, 1, 3, 0, 2)
    assert whole.tokens_per_forward == whole.acceptance_length
    # The policy's own token of the last step lies behind the end.
    assert request(1, 1, cut=1).tokens_per_forward == 3 / 2
    assert request(1, 1, cut=1).acceptance_length == 2.0


def test_no_draft_gives_one() -> None:
    assert SpecCounters().acceptance_length == 1.0
    assert SpecCounters().tokens_per_forward == 1.0
    assert SpecCounters.from_request([], k=3, num_draft_tokens=0, num_response_tokens=9).tokens_per_forward == 1.0
    assert SpecCounters().per_position_rates == ()
    assert SpecCounters(accepted_per_pos=(0, 0)).per_position_rates == (0.0, 0.0)


def test_engines_are_summed_before_dividing() -> None:
    busy, idle = SpecCounters(20, 60, 10, (10, 0, 0)), SpecCounters()
    assert sum([busy, idle], SpecCounters()).per_position_rates[0] == 0.5


def test_a_difference_is_one_interval() -> None:
    first, second = request(0, 1, k=1), request(1, 1, 1, k=1)
    assert (first + second) - first == second
    assert first - SpecCounters() == first
