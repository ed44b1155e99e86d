"""The statistic of the start-up check on distributions that are known exactly; no engine."""

from __future__ import annotations

import math

import pytest
import torch

from nemo_rl.errors import SamplingCheckError
from nemo_rl.models.generation.vllm.sampling_check import SampledPosition, check_samples

VOCAB = 500


def _positions(*, temperature: float, top_k: int, seed: int, count: int = 1000) -> list[SampledPosition]:
    """Samples at `temperature` that report the probabilities of temperature 1."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2.5 * torch.randn(count, VOCAB, generator=generator)
    logprobs = logits.log_softmax(-1)
    tokens = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]
    top = logprobs.topk(top_k, dim=-1)
    return [
        SampledPosition(token, dict(zip(ids, values, strict=True)))
        for token, ids, values in zip(tokens.tolist(), top.indices.tolist(), top.values.tolist(), strict=True)
    ]


@pytest.mark.parametrize("top_k", [4, 64, VOCAB])
def test_exact_samples_pass_and_z_is_standard_normal(top_k: int) -> None:
    zs = torch.tensor(
        [check_samples(_positions(temperature=1.0, top_k=top_k, seed=s, count=300), max_z=6.0).z for s in range(40)]
    )
    assert abs(float(zs.mean())) < 4 / math.sqrt(40)
    assert 0.6 < float(zs.std()) < 1.5


@pytest.mark.parametrize("temperature", [0.7, 1.4], ids=["too cold", "too hot"])
@pytest.mark.parametrize("top_k", [64, VOCAB])
def test_a_wrong_temperature_is_found(temperature: float, top_k: int) -> None:
    with pytest.raises(SamplingCheckError, match=r"sampling_check: got z="):
        check_samples(_positions(temperature=temperature, top_k=top_k, seed=0), max_z=6.0)


def test_with_the_whole_vocabulary_it_is_nll_and_entropy() -> None:
    positions = _positions(temperature=1.0, top_k=VOCAB, seed=3)
    report = check_samples(positions, max_z=6.0)
    nll = -sum(p.top_logprobs[p.token] for p in positions) / len(positions)
    entropy = -sum(math.exp(v) * v for p in positions for v in p.top_logprobs.values()) / len(positions)
    assert report.mean_nll == pytest.approx(nll, abs=1e-6)
    assert report.mean_entropy == pytest.approx(entropy, abs=1e-4)
    assert report.num_tokens == len(positions)


def test_an_impossible_token_is_found() -> None:
    positions = [SampledPosition(0, {0: -math.inf, 1: 0.0})]
    with pytest.raises(SamplingCheckError):
        check_samples(positions, max_z=6.0)


def test_nearly_certain_distributions_do_not_raise_false_alarms() -> None:
    certain = {7: math.log1p(-1e-7), 8: math.log(1e-7)}
    assert abs(check_samples([SampledPosition(7, certain)] * 500, max_z=6.0).z) < 1


def test_no_token_is_an_error() -> None:
    with pytest.raises(SamplingCheckError, match="no token"):
        check_samples([], max_z=6.0)
