"""Do the sampled tokens follow the engine's own probabilities? The statistic behind the start-up check.

At every position the engine reports the k most likely tokens with their probabilities and the sampled token. Merge all
other tokens into one outcome "other" of probability r = 1 - sum(p). Under exact sampling the outcome has the known
distribution (p_1..p_k, r), so its surprise s = -log(probability of the outcome) has known mean H (the entropy of that
distribution) and known variance. Summed over positions, sum(s - H) is a martingale, hence

    z = sum(s - H) / sqrt(sum(var))

is close to standard normal, for any vocabulary size and temperature, without a full-vocabulary read-out. With a
vocabulary of at most k tokens mean(s) is exactly the mean negative log-likelihood and mean(H) the mean entropy. Both
directions are errors: too surprising (noise, wrong temperature), or not surprising enough (drafts accepted unchecked).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from nemo_rl.errors import SamplingCheckError
from nemo_rl.models.generation.interfaces import SamplingCheckReport

_SMALLEST_REST = 1e-6  # float32 sums of probabilities are no better


@dataclass(frozen=True)
class SampledPosition:
    """One sampled token and what the engine said about its position.

    Attributes:
        token: The sampled token id.
        top_logprobs: Token id to log-probability of the k most likely tokens.
    """

    token: int
    top_logprobs: dict[int, float]


def check_samples(positions: Iterable[SampledPosition], *, max_z: float) -> SamplingCheckReport:
    """Compute the statistic above.

    Args:
        positions: Sampled at the probabilities that they report.
        max_z: Largest accepted absolute value of z.

    Returns:
        The report of an engine that samples correctly.

    Raises:
        SamplingCheckError: |z| exceeds `max_z`, or nothing was sampled.
    """
    total_surprise = total_entropy = total_variance = 0.0
    count = 0
    for position in positions:
        outcomes = [value for value in position.top_logprobs.values() if value > -math.inf]
        rest = max(1.0 - math.fsum(math.exp(value) for value in outcomes), _SMALLEST_REST)
        surprise = -position.top_logprobs.get(position.token, math.log(rest))
        weighted = [(math.exp(value), -value) for value in outcomes] + [(rest, -math.log(rest))]
        entropy = math.fsum(p * s for p, s in weighted)
        total_variance += math.fsum(p * s * s for p, s in weighted) - entropy * entropy
        total_surprise += surprise
        total_entropy += entropy
        count += 1
    if not count:
        raise SamplingCheckError("policy.generation.sampling_check: the engine generated no token to look at.")
    z = (total_surprise - total_entropy) / math.sqrt(max(total_variance, 1e-12))
    report = SamplingCheckReport(count, total_surprise / count, total_entropy / count, z)
    if not abs(z) <= max_z:  # also catches NaN
        raise SamplingCheckError(
            f"policy.generation.sampling_check: got z={z:.1f} over {count} tokens (mean negative log-likelihood "
            f"{report.mean_nll:.4f}, expected {report.mean_entropy:.4f} nats); must be within +-{max_z:g}. The engine does "
            "not sample from the policy, so training on its rollouts would be wrong. Remove "
            "policy.generation.vllm_kwargs.speculative_config to decode without speculation, or use a vLLM build whose "
            "rejection sampler is correct on this device."
        )
    return report
