"""Prompts to completions to rewards: one step's experience as a :class:`BatchedDataDict`."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from nemo_rl.distributed.batched_data_dict import BatchedDataDict

if TYPE_CHECKING:
    from nemo_rl.data.datasets import PromptExample
    from nemo_rl.environments.interfaces import EnvironmentInterface
    from nemo_rl.models.generation.interfaces import GenerationInterface


class Decoder(Protocol):
    """The one tokenizer method that rollouts need."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Turn token ids into text."""


@dataclass(frozen=True)
class Rollout:
    """Completions of a list of prompts, ``num_generations`` each, prompt by prompt.

    ``batch`` holds, for ``N`` samples padded on the right to ``T``: ``input_ids`` int64 [N, T] (prompt and response),
    ``input_lengths`` int64 [N], ``token_mask`` bool [N, T] (True = sampled by the policy), ``sample_mask`` fp32 [N],
    ``generation_logprobs`` fp32 [N, T], ``response_lengths`` int64 [N], ``truncated`` bool [N] (stopped by the length
    limit), ``rewards`` fp32 [N].
    """

    batch: BatchedDataDict
    responses: list[str]
    answers: list[str | None]
    weight_versions: frozenset[int]
    env_metrics: dict[str, tuple[float, float]] = field(default_factory=dict)


def sample_seed(*, seed: int, step: int, draw: int, index: int, purpose: str = "rollout") -> int:
    """Seed of one sample's sampler, a function of what the sample *is*, not of how it was batched.

    Args:
        seed: the run's seed.
        step: training step.
        draw: number of the generation batch inside the step (dynamic sampling draws several).
        index: index of the sample in its generation batch.
        purpose: separates training rollouts from validation.

    Returns:
        An integer in ``[0, 2**31)``.
    """
    key = f"{purpose}:{seed}:{step}:{draw}:{index}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "little") >> 1


def pack_prompts(
    examples: list[PromptExample], *, num_generations: int, pad_token_id: int, seeds: list[int]
) -> BatchedDataDict:
    """Repeat each prompt ``num_generations`` times and pad on the right.

    Returns:
        ``input_ids`` int64 [N, P], ``input_lengths`` int64 [N], ``seeds`` int64 [N].
    """
    prompts = [example.prompt_ids for example in examples for _ in range(num_generations)]
    lengths = torch.tensor([len(p) for p in prompts], dtype=torch.int64)
    ids = torch.full((len(prompts), int(lengths.max())), pad_token_id, dtype=torch.int64)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt, dtype=torch.int64)
    return BatchedDataDict(
        {"input_ids": ids, "input_lengths": lengths, "seeds": torch.tensor(seeds, dtype=torch.int64)}
    )


def sample_responses(
    generation: GenerationInterface,
    examples: list[PromptExample],
    *,
    num_generations: int,
    pad_token_id: int,
    seeds: list[int],
    greedy: bool = False,
) -> tuple[BatchedDataDict, frozenset[int]]:
    """Sample completions for every prompt, without scoring them.

    Args:
        generation: the engine group; must hold the current weights.
        examples: prompts that fit the engine (too long ones are dropped by the caller).
        num_generations: completions per prompt.
        pad_token_id: fills the right side.
        seeds: one per completion, prompt by prompt.
        greedy: take the most likely token instead of sampling.

    Returns:
        The batch of a :class:`Rollout` without ``rewards``, and the weight versions that sampled it.
    """
    prompts = pack_prompts(examples, num_generations=num_generations, pad_token_id=pad_token_id, seeds=seeds)
    output = generation.generate(prompts, greedy=greedy)
    total_lengths = output["unpadded_sequence_lengths"]
    positions = torch.arange(output["output_ids"].shape[1])[None]
    token_mask = (positions >= prompts["input_lengths"][:, None]) & (positions < total_lengths[:, None])
    batch = BatchedDataDict(
        {
            "input_ids": output["output_ids"],
            "input_lengths": total_lengths,
            "token_mask": token_mask,
            "sample_mask": torch.ones(prompts.size, dtype=torch.float32),
            "generation_logprobs": torch.where(token_mask, output["logprobs"], torch.zeros_like(output["logprobs"])),
            "response_lengths": output["generation_lengths"],
            "truncated": torch.tensor([reason == "length" for reason in output["finish_reasons"]]),
        }
    )
    return batch, frozenset(output["weight_versions"].tolist())


def run_rollout(
    generation: GenerationInterface,
    environment: EnvironmentInterface,
    tokenizer: Decoder,
    examples: list[PromptExample],
    *,
    num_generations: int,
    pad_token_id: int,
    seeds: list[int],
    greedy: bool = False,
) -> Rollout:
    """Sample completions for every prompt and score them.

    Args:
        generation: the engine group; must hold the current weights.
        environment: scores responses.
        tokenizer: decodes responses for the environment.
        examples: prompts that fit the engine (too long ones are dropped by the caller).
        num_generations: completions per prompt.
        pad_token_id: fills the right side.
        seeds: one per completion, prompt by prompt.
        greedy: take the most likely token instead of sampling.

    Returns:
        The scored completions.
    """
    batch, versions = sample_responses(
        generation,
        examples,
        num_generations=num_generations,
        pad_token_id=pad_token_id,
        seeds=seeds,
        greedy=greedy,
    )
    ends = batch["input_lengths"]
    rows = zip(batch["input_ids"].tolist(), (ends - batch["response_lengths"]).tolist(), ends.tolist(), strict=True)
    responses = [tokenizer.decode(ids[start:end], skip_special_tokens=True) for ids, start, end in rows]
    metadata = [example.metadata for example in examples for _ in range(num_generations)]
    scored = environment.step(responses, metadata)
    batch["rewards"] = torch.tensor(scored.rewards, dtype=torch.float32)
    return Rollout(batch, responses, list(scored.answers), versions, dict(scored.metrics))
