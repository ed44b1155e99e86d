"""DAPO's dynamic sampling fills the batch with informative prompts or says why it cannot."""

from __future__ import annotations

import pytest
import torch

from nemo_rl.algorithms.dynamic_sampling import informative_groups, sample_dynamically
from nemo_rl.distributed.batched_data_dict import BatchedDataDict


def draws(*batches: list[float]):
    def generate(draw: int) -> BatchedDataDict:
        rewards = torch.tensor(batches[draw])
        length = draw + 3  # draws of different width must be padded together
        ids = torch.arange(rewards.numel())[:, None].expand(-1, length) + 100 * draw
        return BatchedDataDict({"rewards": rewards, "input_ids": ids.clone()})

    return generate


def test_informative_means_rewards_differ() -> None:
    assert informative_groups(torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0]), num_generations=2).tolist() == [
        False,
        True,
        False,
    ]


def test_draws_until_full_and_discards_the_surplus() -> None:
    generate = draws([1, 1, 0, 1], [0, 1, 1, 0], [5, 5, 5, 5])
    result = sample_dynamically(generate, num_prompts=2, num_generations=2, max_gen_batches=3)
    assert result.num_generation_batches == 2
    assert result.num_groups_generated == 4
    assert result.num_groups_dropped == 1
    assert result.batch["rewards"].tolist() == [0, 1, 0, 1]
    assert result.batch["input_ids"][:, 0].tolist() == [2, 3, 100, 101]


def test_gives_up_with_a_remedy() -> None:
    with pytest.raises(RuntimeError, match=r"found 1 of 2 prompts.*dynamic_sampling_max_gen_batches=2"):
        sample_dynamically(draws([1, 1, 0, 1], [1, 1, 1, 1]), num_prompts=2, num_generations=2, max_gen_batches=2)
