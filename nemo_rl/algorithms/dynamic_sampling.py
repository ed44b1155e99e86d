"""DAPO's dynamic sampling: train only on prompts whose completions differ in reward.

A group in which every completion earns the same has zero advantage and dilutes the batch (Yu et al. 2025, section 3.2),
so such groups are dropped and further prompts are drawn until the batch is full.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from nemo_rl.distributed.batched_data_dict import BatchedDataDict


class DynamicSamplingResult(NamedTuple):
    """A full batch and what it took to fill it."""

    batch: BatchedDataDict
    num_generation_batches: int
    num_groups_generated: int
    num_groups_dropped: int


def informative_groups(rewards: Tensor, *, num_generations: int) -> Tensor:
    """Which prompts have completions of different reward.

    Args:
        rewards: fp32 [G * num_generations], prompt by prompt.
        num_generations: completions per prompt.

    Returns:
        bool [G].
    """
    groups = rewards.view(-1, num_generations)
    return groups.amax(-1) != groups.amin(-1)


def sample_dynamically(
    generate: Callable[[int], BatchedDataDict], *, num_prompts: int, num_generations: int, max_gen_batches: int
) -> DynamicSamplingResult:
    """Draw generation batches until ``num_prompts`` informative groups are found; the surplus is discarded.

    Args:
        generate: called with the number of the draw (0, 1, ...); returns scored samples, prompt by prompt, with the key
            ``rewards``.
        num_prompts: groups needed.
        num_generations: completions per prompt.
        max_gen_batches: give up after this many draws.

    Returns:
        Exactly ``num_prompts * num_generations`` samples.

    Raises:
        RuntimeError: not enough informative groups within ``max_gen_batches`` draws.
    """
    kept: list[BatchedDataDict] = []
    found = generated = 0
    for draw in range(max_gen_batches):
        batch = generate(draw)
        keep = informative_groups(batch["rewards"], num_generations=num_generations)
        generated += keep.numel()
        found += int(keep.sum())
        rows = torch.nonzero(keep.repeat_interleave(num_generations)).flatten()
        if rows.numel():
            kept.append(batch.select_indices(rows))
        if found >= num_prompts:
            full = BatchedDataDict.from_batches(kept).slice(0, num_prompts * num_generations)
            return DynamicSamplingResult(full, draw + 1, generated, generated - found)
    raise RuntimeError(
        f"dynamic sampling found {found} of {num_prompts} prompts with different rewards after "
        f"grpo.dynamic_sampling_max_gen_batches={max_gen_batches} generation batches ({generated} prompts). The task "
        "is solved or out of reach for this policy: change the data, raise the limit, or set "
        "grpo.use_dynamic_sampling=false."
    )
