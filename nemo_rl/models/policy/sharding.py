"""Which worker gets which samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nemo_rl.distributed.named_sharding import NamedSharding
from nemo_rl.models.policy.layout import check_layout

if TYPE_CHECKING:
    from nemo_rl.algorithms.config import MasterConfig


def policy_sharding(config: MasterConfig, *, num_workers: int) -> NamedSharding:
    """Lay the workers out as nemo_automodel's meshes do: data parallel outermost, tensor parallel innermost.

    Raises:
        ConfigError: the workers cannot form the configured layout.
    """
    check_layout(config.policy, num_workers=num_workers)
    dtensor = config.policy.dtensor_cfg
    inner = dtensor.context_parallel_size * dtensor.tensor_parallel_size
    return NamedSharding.from_sizes(
        dp=num_workers // inner, cp=dtensor.context_parallel_size, tp=dtensor.tensor_parallel_size
    )


def deal_by_length(lengths: torch.Tensor, *, num_ranks: int, batch_size: int) -> list[list[int]]:
    """Give every rank equally many samples of every batch, and about equally many tokens.

    Samples are dealt longest first, back and forth: with two ranks and lengths 9 7 5 1, rank 0 gets 9 and 1.

    Args:
        lengths: int64 [N]; N is a multiple of `batch_size`, which is a multiple of `num_ranks`.
        num_ranks: data-parallel ranks.
        batch_size: samples per optimizer step.

    Returns:
        Sample indices per rank, batch by batch; ascending inside each batch.
    """
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    for start in range(0, len(lengths), batch_size):
        order = torch.sort(lengths[start : start + batch_size], descending=True, stable=True).indices.tolist()
        hands: list[list[int]] = [[] for _ in range(num_ranks)]
        for k, i in enumerate(order):
            turn = k % (2 * num_ranks)
            hands[turn if turn < num_ranks else 2 * num_ranks - 1 - turn].append(start + i)
        for rank, hand in zip(ranks, hands, strict=True):
            rank.extend(sorted(hand))
    return ranks
