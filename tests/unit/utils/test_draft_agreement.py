"""Engine and trainer side by side: which of the trainer's answers counts, and what their difference is."""

from __future__ import annotations

import math

import pytest

from nemo_rl.utils.draft_agreement import Acceptance, gap_metrics, measured, trained

ENGINE = {
    "vllm/spec_acceptance_length": 2.5,
    "vllm/spec_acceptance_rate_pos_0": 0.8,
    "vllm/spec_acceptance_rate_pos_1": 0.5,
    "vllm/spec_acceptance_rate_pos_2": 0.2,
}
REPLAYED = {
    "train/draft_replayed_acceptance_length": 2.4,
    "train/draft_replayed_acceptance_1": 0.8,
    "train/draft_replayed_acceptance_2": 0.45,
    "train/draft_replayed_acceptance_3": 0.15,
}
EXPECTED = {
    "train/draft_expected_acceptance_length": 2.1,
    **{f"train/draft_prefix_greedy_{j}": rate for j, rate in enumerate((0.7, 0.3, 0.1, 0.05), start=1)},
}


def test_the_replay_comes_before_the_expectation() -> None:
    assert trained(ENGINE | EXPECTED | REPLAYED) == Acceptance(2.4, (0.8, 0.45, 0.15))
    assert gap_metrics(ENGINE | EXPECTED | REPLAYED) == {
        "train/draft_acceptance_gap": pytest.approx(0.1),
        "train/draft_acceptance_gap_1": 0.0,
        "train/draft_acceptance_gap_2": pytest.approx(0.05),
        "train/draft_acceptance_gap_3": pytest.approx(0.05),
    }


def test_without_a_replay_the_expectation_counts_up_to_k() -> None:
    """The draft is trained one depth deeper than the engine proposes."""
    assert trained(ENGINE | EXPECTED) == Acceptance(2.1, (0.7, 0.3, 0.1))
    gaps = gap_metrics(ENGINE | EXPECTED)
    assert list(gaps) == ["train/draft_acceptance_gap", *(f"train/draft_acceptance_gap_{j}" for j in (1, 2, 3))]
    assert gaps["train/draft_acceptance_gap_2"] == pytest.approx(0.2)


def test_a_draft_with_one_depth_is_compared_at_the_first_position_only() -> None:
    metrics = ENGINE | {"train/draft_prefix_greedy_1": 0.75}
    assert trained(metrics) == Acceptance(None, (0.75,))
    assert gap_metrics(metrics) == {"train/draft_acceptance_gap_1": pytest.approx(0.05)}
    assert trained(metrics).describe() == "(75%)"


@pytest.mark.parametrize("metrics", [{}, ENGINE, EXPECTED], ids=["none", "engine", "trainer"])
def test_one_side_alone_has_no_gap(metrics: dict[str, float]) -> None:
    assert gap_metrics(metrics) == {}


def test_what_is_not_finite_is_not_known() -> None:
    assert not measured({"vllm/spec_acceptance_length": math.nan}).is_known
    assert measured(ENGINE | {"vllm/spec_acceptance_rate_pos_1": math.inf}).rates == (0.8,)


def test_description_names_length_ceiling_and_rates() -> None:
    assert measured(ENGINE).describe(ceiling=4) == "2.50/4 (80/50/20%)"
    assert measured(ENGINE).describe() == "2.50 (80/50/20%)"
    many = Acceptance(3.0, tuple(0.9 - 0.05 * i for i in range(16)))
    assert many.describe() == "3.00 (90/85/80/75/70/65/../15%)"
