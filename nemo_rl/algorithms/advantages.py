"""Rewards to advantages: scaling, overlong shaping, and the group baseline of GRPO.

All functions are pure and work on one step's samples, ordered prompt by prompt: sample ``i`` answers prompt
``i // num_generations``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from nemo_rl.algorithms.config import RewardScalingConfig, RewardShapingConfig


class GroupStatistics(NamedTuple):
    """Per-sample view of the statistics of its group, fp32 [N] each."""

    baseline: Tensor
    std: Tensor
    num_valid: Tensor


def scale_rewards(rewards: Tensor, cfg: RewardScalingConfig) -> Tensor:
    """Map ``[source_min, source_max]`` linearly onto ``[target_min, target_max]``; rewards outside are clamped first.

    Args:
        rewards: fp32 [N].
        cfg: ranges; unchanged rewards when not enabled.

    Returns:
        fp32 [N].
    """
    if not cfg.enabled:
        return rewards
    unit = (rewards.clamp(cfg.source_min, cfg.source_max) - cfg.source_min) / (cfg.source_max - cfg.source_min)
    return cfg.target_min + unit * (cfg.target_max - cfg.target_min)


def shape_overlong_rewards(rewards: Tensor, response_lengths: Tensor, cfg: RewardShapingConfig) -> Tensor:
    """Soft overlong punishment of DAPO (Yu et al. 2025, eq. 13).

    Responses longer than ``max_response_length - overlong_buffer_length`` lose up to ``overlong_buffer_penalty``,
    linearly over the buffer.

    Args:
        rewards: fp32 [N].
        response_lengths: int64 [N], sampled tokens.
        cfg: lengths in tokens; unchanged rewards when not enabled.

    Returns:
        fp32 [N].
    """
    if not cfg.enabled:
        return rewards
    start = cfg.max_response_length - cfg.overlong_buffer_length
    excess = (response_lengths - start).clamp(min=0).float() / cfg.overlong_buffer_length
    return rewards - excess.clamp(max=1.0) * cfg.overlong_buffer_penalty


def group_statistics(
    rewards: Tensor, valid_mask: Tensor, *, num_generations: int, use_leave_one_out_baseline: bool
) -> GroupStatistics:
    """Mean and sample standard deviation of each prompt's valid rewards.

    Args:
        rewards: fp32 [N], ``N`` a multiple of ``num_generations``.
        valid_mask: bool [N]; False = the sample neither counts nor is trained on.
        num_generations: samples per prompt.
        use_leave_one_out_baseline: the baseline of a sample is the mean of the *other* valid samples of its group,
            which keeps the estimator unbiased (Kool et al. 2019; Ahmadian et al. 2024).

    Returns:
        Statistics per sample. A group with fewer than two valid samples has std 0 and its own reward as baseline.
    """
    groups = rewards.double().view(-1, num_generations)
    valid = valid_mask.view(-1, num_generations).double()
    groups = torch.where(valid.bool(), groups, torch.zeros_like(groups))
    count = valid.sum(-1, keepdim=True)
    total = (groups * valid).sum(-1, keepdim=True)
    mean = total / count.clamp(min=1)
    variance = ((groups - mean).square() * valid).sum(-1, keepdim=True) / (count - 1).clamp(min=1)
    # All-equal rewards must give exactly zero, not rounding noise that the normalisation would blow up.
    spread = torch.where(valid.bool(), groups, -torch.inf).amax(-1, keepdim=True) - torch.where(
        valid.bool(), groups, torch.inf
    ).amin(-1, keepdim=True)
    std = torch.where((spread > 0) & (count > 1), variance.sqrt(), torch.zeros_like(variance))
    baseline = mean.expand_as(groups)
    if use_leave_one_out_baseline:
        others = (total - groups) / (count - 1).clamp(min=1)
        baseline = torch.where(count > 1, others, groups)
    flat = lambda x: x.expand_as(groups).reshape(-1).float()  # noqa: E731
    return GroupStatistics(flat(baseline), flat(std), flat(count))


def group_advantages(
    rewards: Tensor,
    valid_mask: Tensor,
    *,
    num_generations: int,
    use_leave_one_out_baseline: bool,
    normalize_rewards: bool,
    clip_low: float | None = None,
    clip_high: float | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, GroupStatistics]:
    """Group-relative advantage of each sample (GRPO, Shao et al. 2024, section 4.1).

    Args:
        rewards: fp32 [N].
        valid_mask: bool [N].
        num_generations: samples per prompt.
        use_leave_one_out_baseline: see :func:`group_statistics`.
        normalize_rewards: divide by the group's standard deviation where it is positive.
        clip_low: lower bound on advantages; None = none.
        clip_high: upper bound on advantages; None = none.
        eps: added to the standard deviation.

    Returns:
        Advantages fp32 [N] (zero for invalid samples and for groups without spread), and the statistics behind them.
    """
    stats = group_statistics(
        rewards, valid_mask, num_generations=num_generations, use_leave_one_out_baseline=use_leave_one_out_baseline
    )
    advantages = torch.where(stats.std > 0, rewards - stats.baseline, torch.zeros_like(rewards))
    if normalize_rewards:
        advantages = torch.where(stats.std > 0, advantages / (stats.std + eps), advantages)
    if clip_low is not None or clip_high is not None:
        advantages = advantages.clamp(clip_low, clip_high)
    return torch.where(valid_mask, advantages, torch.zeros_like(advantages)), stats
