"""Validation rounds: sampled completions of held-out prompts, scored by the environment."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from nemo_rl.algorithms.metrics import acceptance_metrics, add_pairs, fold
from nemo_rl.experience.rollouts import run_rollout, sample_seed

if TYPE_CHECKING:
    from nemo_rl.data.datasets import PromptExample
    from nemo_rl.environments.interfaces import EnvironmentInterface
    from nemo_rl.experience.rollouts import Decoder
    from nemo_rl.models.generation.interfaces import GenerationInterface


class ValidationResult(NamedTuple):
    """Scalars of one round, and a few transcripts."""

    metrics: dict[str, float]
    samples: list[tuple[str, str, float]]
    """``(prompt, response, reward)`` of the first prompts."""

    num_correct: tuple[int, ...]
    """Completions with full reward, per prompt."""


def validate(
    generation: GenerationInterface,
    environment: EnvironmentInterface,
    tokenizer: Decoder,
    examples: list[PromptExample],
    *,
    step: int,
    seed: int,
    batch_size: int,
    num_generations: int,
    pad_token_id: int,
    num_samples_to_keep: int,
) -> ValidationResult:
    """Score ``num_generations`` sampled completions of every example.

    Draws are keyed by (seed, prompt), not by the step, so rounds differ only by the policy. The acceptance counters of
    a round are its own: rollouts of the training step never mix with them.

    Args:
        generation: the engine group with the current weights.
        environment: scores responses.
        tokenizer: decodes responses.
        examples: held-out prompts that fit the engine.
        step: recorded for error messages only.
        seed: the run's seed.
        batch_size: prompts per generation call.
        num_generations: completions per prompt; above 1 ``pass_k`` is reported too.
        pad_token_id: fills the right side.
        num_samples_to_keep: transcripts to return.

    Returns:
        ``accuracy`` (share of completions with full reward), ``mean_reward``, ``mean_response_length`` (tokens),
        ``truncated_fraction``, ``num_samples``, acceptance metrics, and the environment's own.
    """
    if not examples:
        raise ValueError(f"validation at step {step} got no example")
    before = generation.spec_counters()
    rewards, lengths, truncated, env_metrics, kept = [], [], [], [], []
    for start in range(0, len(examples), batch_size):
        chunk = examples[start : start + batch_size]
        seeds = [
            sample_seed(seed=seed, step=0, draw=0, index=(start + i) * num_generations + k, purpose="validation")
            for i in range(len(chunk))
            for k in range(num_generations)
        ]
        rollout = run_rollout(
            generation,
            environment,
            tokenizer,
            chunk,
            num_generations=num_generations,
            pad_token_id=pad_token_id,
            seeds=seeds,
        )
        rewards.append(rollout.batch["rewards"])
        lengths.append(rollout.batch["response_lengths"])
        truncated.append(rollout.batch["truncated"])
        env_metrics.append(rollout.env_metrics)
        for i, example in enumerate(chunk):
            if len(kept) < num_samples_to_keep:
                j = i * num_generations
                kept.append((example.prompt_text, rollout.responses[j], float(rollout.batch["rewards"][j])))
    reward = torch.cat(rewards)
    metrics = {
        "accuracy": float((reward >= 1.0).float().mean()),
        "mean_reward": float(reward.mean()),
        "mean_response_length": float(torch.cat(lengths).float().mean()),
        "truncated_fraction": float(torch.cat(truncated).float().mean()),
        "num_samples": float(reward.numel()),
    }
    num_correct = (reward >= 1.0).view(-1, num_generations).sum(-1)
    if num_generations > 1:
        metrics["pass_k"] = float((num_correct > 0).float().mean())
    metrics |= fold(add_pairs(env_metrics), prefix="env_")
    metrics |= acceptance_metrics(generation.spec_counters() - before, prefix="spec_")
    return ValidationResult(metrics, kept, tuple(num_correct.tolist()))
