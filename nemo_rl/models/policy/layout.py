"""What the parallel layout of the training workers must satisfy.

Needs no torch, so that the driver refuses a layout before it starts anything; the workers ask the same again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nemo_rl.errors import ConfigError

if TYPE_CHECKING:
    from nemo_rl.models.policy.config import PolicyConfig


def layout_problems(policy: PolicyConfig, *, num_workers: int) -> list[str]:
    """Compare the layout with the number of workers, and the batches with the ranks that hold different samples.

    Args:
        policy: `policy`.
        num_workers: training workers of the run.

    Returns:
        One message per problem; empty = the workers can form it.
    """
    tp, cp = policy.dtensor_cfg.tensor_parallel_size, policy.dtensor_cfg.context_parallel_size
    if cp != 1:
        return [
            f"policy.dtensor_cfg.context_parallel_size: got {cp}; must be 1, context parallelism is not implemented. "
            "Use tensor_parallel_size, activation_checkpointing or a smaller micro-batch for long sequences."
        ]
    if num_workers % tp:
        return [
            f"policy.dtensor_cfg.tensor_parallel_size: got {tp}; must divide the number of training workers "
            f"({num_workers}). Choose a divisor, or set policy.dtensor_cfg.num_workers to a multiple (null = one per "
            "GPU, on CPU 1)."
        ]
    ranks = num_workers // tp
    sizes = {"policy.train_global_batch_size": policy.train_global_batch_size}
    if policy.draft_enabled and policy.draft.train_global_batch_size is not None:
        sizes["policy.draft.train_global_batch_size"] = policy.draft.train_global_batch_size
    return [
        f"{key}: got {size}; must be a multiple of the number of data-parallel workers ({ranks}). "
        f"Use {next_multiple(size, ranks)}, or change policy.dtensor_cfg.num_workers."
        for key, size in sizes.items()
        if size % ranks
    ]


def check_layout(policy: PolicyConfig, *, num_workers: int) -> None:
    """Refuse a layout that the workers cannot form.

    Args:
        policy: `policy`.
        num_workers: training workers of the run.

    Raises:
        ConfigError: with the messages of :func:`layout_problems`.
    """
    problems = layout_problems(policy, num_workers=num_workers)
    if problems:
        raise ConfigError("\n".join(problems))


def next_multiple(value: int, factor: int) -> int:
    """Smallest multiple of `factor` that is >= `value`."""
    return -(-value // factor) * factor
