"""Do the sampled tokens follow the policy's probabilities? The statistics behind the start-up check.

The engine samples responses; then it reads each response as a prompt and reports, for every position, the policy's k
most likely tokens S with their log-probabilities at temperature 1. That second pass shares nothing with the sampler:
the log-probabilities returned *while* sampling may come from the very logits that a defect has already divided by a
wrong temperature, and would then agree with the samples.

Given that a token falls into S, exact sampling at temperature T draws it from q(x) = p(x)^(1/T) / sum_S p^(1/T), which
is known for any vocabulary size. Three statistics, each near standard normal when sampling is exact:

    z             (sum of -log q(x) minus sum of the entropies of q) / sqrt(sum of variances + largest (log q(x))^2).
                  Too large: noise or a temperature too high; too small: too cold, or likely drafts accepted unchecked.
                  The last term only matters when almost all tokens are certain and one rare token would decide.
    z_uniformity  chi-square of the probability integral transform of x under q, as a normal deviate: finds samples that
                  are wrong although their mean surprise happens to be right.
    z_coverage    how many tokens fall into S, against a lower bound of their number (the tail outside S weighs at most
                  what its mass and its largest possible member allow). Only too few is an error: noise over a large
                  vocabulary almost never hits S.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass

from nemo_rl.errors import SamplingCheckError
from nemo_rl.models.generation.interfaces import SamplingCheckReport

_NUM_BINS = 16
_SMALLEST_VARIANCE = 1e-12


@dataclass(frozen=True)
class SampledPosition:
    """One sampled token and the policy's view of its position.

    Attributes:
        token: The sampled token id.
        top_logprobs: Token id to log-probability at temperature 1, of the most likely tokens.
        temperature: At which the token was sampled.
    """

    token: int
    top_logprobs: dict[int, float]
    temperature: float


def check_samples(positions: Iterable[SampledPosition], *, vocab_size: int, max_z: float) -> SamplingCheckReport:
    """Compute the statistics above.

    Args:
        positions: What was sampled, without top-p or top-k.
        vocab_size: Tokens that the policy can emit.
        max_z: Largest accepted deviation.

    Returns:
        The report of an engine that samples correctly.

    Raises:
        SamplingCheckError: A statistic is outside, or nothing was sampled.
    """
    surprise = entropy = variance = largest = 0.0
    expected_kept = kept_variance = 0.0
    count = kept = 0
    bins = [0] * _NUM_BINS
    draws = random.Random(0)
    for position in positions:
        count += 1
        tempered = {token: value / position.temperature for token, value in position.top_logprobs.items()}
        highest = max(tempered.values())
        total = math.fsum(math.exp(value - highest) for value in tempered.values())
        q = {token: math.exp(value - highest) / total for token, value in tempered.items()}
        share = _least_share_of_top(position, total=total * math.exp(highest), vocab_size=vocab_size)
        expected_kept += share
        kept_variance += share * (1.0 - share)
        if position.token not in q:
            continue
        kept += 1
        surprises = {token: -math.log(p) if p > 0.0 else math.inf for token, p in q.items()}
        mean = math.fsum(p * surprises[token] for token, p in q.items() if p > 0.0)
        surprise += surprises[position.token]
        largest = max(largest, surprises[position.token])
        entropy += mean
        variance += math.fsum(p * (surprises[token] - mean) ** 2 for token, p in q.items() if p > 0.0)
        bins[_bin_of(position.token, q, draws)] += 1
    if not kept:
        raise SamplingCheckError(
            f"policy.generation.sampling_check: none of {count} sampled tokens is among the policy's most likely ones. "
            "The engine does not sample from the policy."
        )
    report = SamplingCheckReport(
        num_tokens=count,
        mean_nll=surprise / kept,
        mean_entropy=entropy / kept,
        z=(surprise - entropy) / math.sqrt(max(variance + largest**2, _SMALLEST_VARIANCE)),
        z_uniformity=_normal_deviate(bins),
        z_coverage=(kept - expected_kept) / math.sqrt(max(kept_variance, 1.0)),
    )
    if not (abs(report.z) <= max_z and report.z_uniformity <= max_z and report.z_coverage >= -max_z):  # NaN fails too
        raise SamplingCheckError(
            f"policy.generation.sampling_check: got z={report.z:.1f}, z_uniformity={report.z_uniformity:.1f}, "
            f"z_coverage={report.z_coverage:.1f} over {count} tokens (mean negative log-likelihood "
            f"{report.mean_nll:.4f}, expected {report.mean_entropy:.4f} nats); must be within {max_z:g} standard "
            "errors. The engine does not sample from the policy, so training on its rollouts would be wrong. Remove "
            "policy.generation.vllm_kwargs.speculative_config to decode without speculation, or use a vLLM build whose "
            "rejection sampler is correct on this device."
        )
    return report


def _least_share_of_top(position: SampledPosition, *, total: float, vocab_size: int) -> float:
    """Lower bound of the probability, at the position's temperature T, that the token is one of the reported ones.

    The other tokens have together the mass r = 1 - sum(p) and each at most the smallest reported p. Their sum of
    p^(1/T) is largest when equal (T > 1, concave) or when as many as possible have that p (T <= 1, convex).

    Args:
        position: The reported tokens.
        total: Sum of p^(1/T) over them.
        vocab_size: Size of the vocabulary.
    """
    temperature = position.temperature
    others = vocab_size - len(position.top_logprobs)
    rest = max(1.0 - math.fsum(math.exp(value) for value in position.top_logprobs.values()), 0.0)
    if others <= 0 or rest == 0.0:
        return 1.0
    if temperature > 1.0:
        tail = others ** (1.0 - 1.0 / temperature) * rest ** (1.0 / temperature)
    else:
        tail = rest * math.exp(min(position.top_logprobs.values()) * (1.0 / temperature - 1.0))
    return total / (total + tail)


def _bin_of(token: int, q: dict[int, float], draws: random.Random) -> int:
    """Bin of the randomized probability integral transform: uniform when `token` was drawn from `q`."""
    before = math.fsum(p for other, p in q.items() if (p, other) > (q[token], token))
    return min(int((before + draws.random() * q[token]) * _NUM_BINS), _NUM_BINS - 1)


def _normal_deviate(bins: list[int]) -> float:
    """Chi-square of equally likely bins as a standard normal deviate (Wilson and Hilferty)."""
    expected, df = sum(bins) / len(bins), len(bins) - 1
    chi_square = sum((observed - expected) ** 2 for observed in bins) / expected
    return ((chi_square / df) ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df))
