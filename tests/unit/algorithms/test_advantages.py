"""Group baselines, shaping and scaling of rewards."""

from __future__ import annotations

import statistics

import pytest
import torch

from nemo_rl.algorithms.advantages import group_advantages, group_statistics, scale_rewards, shape_overlong_rewards
from nemo_rl.algorithms.config import RewardScalingConfig, RewardShapingConfig

REWARDS = torch.tensor([1.0, 0.0, 0.5, 0.0, 1.0, 1.0, 1.0, 1.0, 0.2, 0.9, 0.4, 0.1])
ALL = torch.ones(12, dtype=torch.bool)


@pytest.mark.parametrize("leave_one_out", [True, False])
def test_statistics_match_the_textbook(leave_one_out: bool) -> None:
    stats = group_statistics(REWARDS, ALL, num_generations=4, use_leave_one_out_baseline=leave_one_out)
    for i, reward in enumerate(REWARDS.tolist()):
        group = REWARDS[i // 4 * 4 : i // 4 * 4 + 4].tolist()
        mean = (sum(group) - reward) / 3 if leave_one_out else sum(group) / 4
        assert float(stats.baseline[i]) == pytest.approx(mean, abs=1e-6)
        assert float(stats.std[i]) == pytest.approx(statistics.stdev(group), abs=1e-6)


def test_invalid_samples_neither_count_nor_train() -> None:
    valid = ALL.clone()
    valid[0] = False
    poisoned = REWARDS.clone()
    poisoned[0] = float("nan")
    advantages, stats = group_advantages(
        poisoned, valid, num_generations=4, use_leave_one_out_baseline=True, normalize_rewards=False
    )
    assert float(advantages[0]) == 0.0
    assert float(stats.num_valid[1]) == 3.0
    assert float(advantages[2]) == pytest.approx(0.5 - 0.0)
    assert torch.isfinite(advantages).all()


def test_groups_without_spread_have_zero_advantage() -> None:
    third = torch.full((4,), 1 / 3)
    advantages, stats = group_advantages(
        third,
        torch.ones(4, dtype=torch.bool),
        num_generations=4,
        use_leave_one_out_baseline=True,
        normalize_rewards=True,
    )
    assert torch.equal(advantages, torch.zeros(4))
    assert torch.equal(stats.std, torch.zeros(4))


def test_single_valid_sample_has_zero_advantage() -> None:
    valid = torch.tensor([True, False, False, False])
    advantages, _ = group_advantages(
        REWARDS[:4], valid, num_generations=4, use_leave_one_out_baseline=True, normalize_rewards=True
    )
    assert torch.equal(advantages, torch.zeros(4))


def test_normalised_advantages_have_unit_spread_and_clip() -> None:
    advantages, _ = group_advantages(
        REWARDS, ALL, num_generations=4, use_leave_one_out_baseline=False, normalize_rewards=True
    )
    assert float(advantages[:4].std()) == pytest.approx(1.0, rel=1e-4)
    assert float(advantages[:4].sum()) == pytest.approx(0.0, abs=1e-5)
    clipped, _ = group_advantages(
        REWARDS,
        ALL,
        num_generations=4,
        use_leave_one_out_baseline=False,
        normalize_rewards=True,
        clip_low=-0.5,
        clip_high=0.25,
    )
    assert float(clipped.min()) == -0.5
    assert float(clipped.max()) == 0.25


def test_scaling_maps_and_clamps() -> None:
    cfg = RewardScalingConfig(enabled=True, source_min=0.0, source_max=1.0, target_min=-1.0, target_max=1.0)
    assert scale_rewards(torch.tensor([-3.0, 0.0, 0.25, 1.0, 7.0]), cfg).tolist() == [-1.0, -1.0, -0.5, 1.0, 1.0]
    assert scale_rewards(REWARDS, RewardScalingConfig()) is REWARDS


def test_overlong_penalty_is_linear_over_the_buffer() -> None:
    cfg = RewardShapingConfig(
        enabled=True, overlong_buffer_length=4, overlong_buffer_penalty=2.0, max_response_length=10
    )
    shaped = shape_overlong_rewards(torch.ones(5), torch.tensor([1, 6, 7, 10, 30]), cfg)
    assert shaped.tolist() == [1.0, 1.0, 0.5, -1.0, -1.0]
