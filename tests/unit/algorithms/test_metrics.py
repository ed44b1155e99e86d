"""Ratios stay pairs until the last step."""

from __future__ import annotations

import pytest

from nemo_rl.algorithms.metrics import acceptance_metrics, add_pairs, fold
from nemo_rl.models.generation.vllm.spec_metrics import SpecCounters


def test_pairs_are_added_before_they_are_divided() -> None:
    total = add_pairs([{"hit": (1, 2)}, {"hit": (9, 10), "other": (3, 4)}])
    assert fold(total, prefix="p/") == {"p/hit": pytest.approx(10 / 12), "p/other": 0.75}


def test_what_was_not_measured_is_left_out() -> None:
    assert fold({"seen": (0.0, 2.0), "unseen": (0.0, 0.0)}) == {"seen": 0.0}


def test_forwards_without_a_proposal_are_counted_too() -> None:
    counters = SpecCounters(4, 12, 6, (3, 2, 1), num_decode_tokens=20, num_forwards=14)
    metrics = acceptance_metrics(counters, prefix="")
    assert metrics["acceptance_length"] == 2.5
    assert metrics["tokens_per_forward"] == pytest.approx(20 / 14)


def test_acceptance_length_counts_the_target_token() -> None:
    counters = SpecCounters(num_drafts=10, num_draft_tokens=30, num_accepted_tokens=15, accepted_per_pos=(9, 4, 2))
    metrics = acceptance_metrics(counters, prefix="s/")
    assert metrics["s/acceptance_length"] == 2.5
    assert [metrics[f"s/acceptance_rate_pos_{i}"] for i in range(3)] == [0.9, 0.4, 0.2]
    nothing = SpecCounters(num_drafts=5, num_draft_tokens=15, num_accepted_tokens=0, accepted_per_pos=(0, 0, 0))
    assert acceptance_metrics(nothing, prefix="")["acceptance_length"] == 1.0
    assert acceptance_metrics(counters - counters, prefix="") == {}
