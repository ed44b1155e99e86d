from __future__ import annotations

import pytest

from nemo_rl.models.generation.vllm.spec_metrics import SpecCounters


def test_histogram_is_counted_by_hand() -> None:
    # Drafts that had 0, 1, 2 and 3 tokens accepted: 4, 2, 1 and 3 of them.
    counters = SpecCounters.from_histogram([4, 2, 1, 3], num_draft_tokens=30)
    assert counters == SpecCounters(10, 30, 2 + 2 + 9, (6, 4, 3))
    assert counters.acceptance_length == pytest.approx(1 + 13 / 10)
    assert counters.per_position_rates == pytest.approx((0.6, 0.4, 0.3))


def test_nothing_accepted_gives_one_and_everything_gives_k_plus_one() -> None:
    assert SpecCounters.from_histogram([5, 0, 0], num_draft_tokens=10).acceptance_length == 1.0
    assert SpecCounters.from_histogram([0, 0, 5], num_draft_tokens=10).acceptance_length == 3.0


def test_no_draft_gives_one() -> None:
    assert SpecCounters().acceptance_length == 1.0
    assert SpecCounters().per_position_rates == ()
    assert SpecCounters(accepted_per_pos=(0, 0)).per_position_rates == (0.0, 0.0)


def test_engines_are_summed_before_dividing() -> None:
    busy, idle = SpecCounters(20, 60, 10, (10, 0, 0)), SpecCounters()
    assert sum([busy, idle], SpecCounters()).per_position_rates[0] == 0.5


def test_a_difference_is_one_interval() -> None:
    first = SpecCounters.from_histogram([1, 1], num_draft_tokens=2)
    second = SpecCounters.from_histogram([0, 3], num_draft_tokens=3)
    assert (first + second) - first == second
    assert first - SpecCounters() == first
