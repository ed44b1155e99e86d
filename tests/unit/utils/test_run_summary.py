from __future__ import annotations

import math

import pytest

from nemo_rl.utils.run_summary import FirstLast, TimeSplit, summarize, time_split


def series(*values: float) -> dict[int, float]:
    return dict(enumerate(values, start=1))


def test_first_value_and_mean_of_the_last_three() -> None:
    summary = summarize(
        {
            "train/reward": series(0.2, 0.9, 0.3, 0.6, 0.9),
            "vllm/spec_acceptance_length": series(1.0, 3.0),
            "validation/accuracy": {0: 0.1, 5: 0.4, 10: 0.8},
        },
        num_speculative_tokens=3,
        wall_seconds=61.0,
    )
    assert summary.num_steps == 5
    assert summary.reward == FirstLast(0.2, pytest.approx(0.6))
    assert summary.acceptance_length == FirstLast(1.0, 2.0)
    assert summary.validation_accuracy == FirstLast(0.1, 0.8)


def test_values_that_are_not_finite_are_passed_over() -> None:
    summary = summarize({"train/draft_loss": series(math.nan, 4.0, 2.0, math.inf)})
    assert summary.draft_loss == FirstLast(4.0, 3.0)


def test_what_was_not_logged_is_none_and_has_no_line() -> None:
    summary = summarize({"train/reward": series(0.5)})
    assert summary.draft_loss is None
    assert summary.refits is None
    assert summary.speedup is None
    assert [name for name, _ in summary.lines(arrow="->")] == ["steps", "reward"]


def test_a_run_that_trains_a_draft_alone_shows_both_evaluations() -> None:
    summary = summarize(
        {
            "train/draft_loss": {1: 4.0, 2: 2.0},
            "eval/acceptance_length": {0: 1.0, 1: 1.5, 2: 2.0},
            "eval/acceptance_rate_pos_0": {0: 0.0, 1: 0.5, 2: 0.75},
        }
    )
    assert list(summary.lines(arrow="->")) == [
        ("steps", "2 (last = mean of the last 2)"),
        ("evaluated acceptance", "1.00 (0%) -> 2.00 (75%)"),
        ("draft loss", "4.000 -> 3.000"),
    ]


def test_an_unverified_refit_is_not_counted_as_verified() -> None:
    summary = summarize({"refit/verified": series(1.0, 0.0, math.nan, 1.0)})
    assert (summary.refits_verified, summary.refits) == (2, 4)
    assert dict(summary.lines(arrow="->"))["refits verified"] == "2/4"


def test_speedup_is_the_logged_one_or_the_ratio_of_the_probes() -> None:
    probes = {"performance/plain_tokens_per_sec": {20: 500.0}, "performance/spec_tokens_per_sec": {20: 800.0}}
    assert summarize(probes).speedup == pytest.approx(1.6)
    assert summarize(probes | {"performance/spec_speedup": {20: 1.5}}).speedup == 1.5


def test_lines_say_every_figure() -> None:
    summary = summarize(
        {
            "train/reward": series(0.35, 0.9),
            "vllm/spec_acceptance_length": series(1.0, 3.5),
            "vllm/spec_acceptance_rate_pos_0": series(0.0, 0.9),
            "train/draft_replayed_acceptance_length": series(1.0, 3.4),
            "train/draft_replayed_acceptance_1": series(0.0, 0.86),
            "train/draft_loss": series(6.0, 0.5),
            "refit/verified": series(1.0, 1.0),
            "performance/rollout_tokens_per_sec": series(900.0, 1900.0),
            "performance/plain_tokens_per_sec": {2: 722.0},
            "performance/spec_tokens_per_sec": {2: 1180.0},
        },
        num_speculative_tokens=3,
        wall_seconds=3723.4,
    )
    assert dict(summary.lines(arrow="->")) == {
        "steps": "2 (last = mean of the last 2)",
        "reward": "0.350 -> 0.625",
        "acceptance length": "1.00 -> 2.25 of 4",
        "acceptance at the end": "engine 2.25 (45%), trainer 2.20 (43%)",
        "draft loss": "6.000 -> 3.250",
        "refits verified": "2/2",
        "rollout tokens/s": "900 -> 1,400",
        "decoding probe": "plain 722 tokens/s -> speculative 1,180 tokens/s = 1.63x",
        "wall time": "1:02:03",
    }


def test_both_sides_of_acceptance_are_those_of_the_same_last_steps() -> None:
    """The draft is trained in every other step, so the engine's own last steps are not all comparable."""
    engine = series(0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
    trainer = {1: 0.1, 3: 0.25, 5: 0.45}
    summary = summarize({"vllm/spec_acceptance_rate_pos_0": engine, "train/draft_prefix_greedy_1": trainer})
    assert summary.engine_acceptance.rates == (pytest.approx((0.1 + 0.3 + 0.5) / 3),)
    assert summary.trainer_acceptance.rates == (pytest.approx((0.1 + 0.25 + 0.45) / 3),)


def test_acceptance_without_a_trained_draft_is_the_engines_alone() -> None:
    rates = {"vllm/spec_acceptance_rate_pos_0": series(0.5, 0.7), "vllm/spec_acceptance_length": series(1.5, 1.7)}
    summary = summarize(rates, num_speculative_tokens=2)
    assert summary.trainer_acceptance is None
    assert dict(summary.lines(arrow="->"))["acceptance at the end"] == "engine 1.60 (60%)"


def test_a_run_without_speculation_has_no_acceptance() -> None:
    names = [name for name, _ in summarize({"train/reward": series(0.5)}).lines(arrow="->")]
    assert not any("acceptance" in name for name in names)


def test_time_split_adds_up_to_the_step() -> None:
    split = time_split(
        {
            "timing/train/total_step_time": 10.0,
            "timing/train/generation": 4.0,
            "timing/train/logprobs": 1.0,
            "timing/train/policy_training": 3.0,
            "timing/train/refit": 0.5,
            "timing/train/draft_s": 2.0,
        }
    )
    assert split == TimeSplit(generation=4.0, training=4.0, refit=0.5, other=1.5)
    assert split.total == 10.0


@pytest.mark.parametrize("total", [None, 0.0, math.nan])
def test_no_time_split_without_a_total(total: float | None) -> None:
    metrics = {"timing/train/generation": 1.0}
    assert time_split(metrics if total is None else metrics | {"timing/train/total_step_time": total}) is None
