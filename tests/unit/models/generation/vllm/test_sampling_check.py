"""The statistic of the start-up check on distributions that are known exactly; no engine."""

from __future__ import annotations

import math

import pytest
import torch

from nemo_rl.errors import SamplingCheckError
from nemo_rl.models.generation.vllm.sampling_check import SampledPosition, check_samples

VOCAB = 500


def _positions(
    *,
    temperature: float,
    top_k: int,
    seed: int,
    count: int = 1000,
    peak: float = 2.5,
    asked: float | None = None,
) -> list[SampledPosition]:
    """Samples at `temperature` for which `asked` was asked, with the most likely tokens at temperature 1."""
    generator = torch.Generator().manual_seed(seed)
    logits = peak * torch.randn(count, VOCAB, generator=generator)
    tokens = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]
    return _report(logits, tokens, top_k=top_k, temperature=temperature if asked is None else asked)


def _report(
    logits: torch.Tensor, tokens: torch.Tensor, *, top_k: int, temperature: float = 1.0
) -> list[SampledPosition]:
    top = logits.log_softmax(-1).topk(top_k, dim=-1)
    return [
        SampledPosition(token, dict(zip(ids, values, strict=True)), temperature)
        for token, ids, values in zip(tokens.tolist(), top.indices.tolist(), top.values.tolist(), strict=True)
    ]


@pytest.mark.parametrize("top_k", [8, 64])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
def test_exact_samples_pass_and_the_deviates_are_standard_normal(top_k: int, temperature: float) -> None:
    reports = [
        check_samples(
            _positions(temperature=temperature, top_k=top_k, seed=s, count=300),
            vocab_size=VOCAB,
            max_z=6.0,
        )
        for s in range(30)
    ]
    for name in ("z", "z_uniformity"):
        deviates = torch.tensor([getattr(report, name) for report in reports])
        assert abs(float(deviates.mean())) < 4 / math.sqrt(30), name
        assert 0.5 < float(deviates.std()) < 1.6, name
    assert min(report.z_coverage for report in reports) > -4


@pytest.mark.parametrize(("asked", "got"), [(1.0, 0.8), (1.0, 1.25), (0.6, 1.0), (1.5, 1.0)])
@pytest.mark.parametrize("top_k", [64, VOCAB])
def test_a_wrong_temperature_is_found(asked: float, got: float, top_k: int) -> None:
    with pytest.raises(SamplingCheckError, match=r"sampling_check: got z="):
        check_samples(_positions(temperature=got, asked=asked, top_k=top_k, seed=0), vocab_size=VOCAB, max_z=6.0)


def test_noise_over_a_large_vocabulary_is_found_although_it_misses_the_likely_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 3.0 * torch.randn(600, 20_000, generator=generator)
    noise = torch.randint(20_000, (600,), generator=generator)
    noise[:3] = logits[:3].argmax(-1)  # a few hits, else there is nothing to compare
    with pytest.raises(SamplingCheckError, match=r"z_coverage=-\d{2}"):
        check_samples(_report(logits, noise, top_k=64), vocab_size=20_000, max_z=6.0)


def test_wrong_samples_of_the_right_surprise_are_found() -> None:
    """Always the same of four equally likely tokens: its surprise is right every time."""
    even = {1: math.log(0.25), 2: math.log(0.25), 3: math.log(0.25), 4: math.log(0.25)}
    wrong = [SampledPosition(1, even, 1.0)] * 400
    with pytest.raises(SamplingCheckError, match=r"got z=0\.0"):
        check_samples(wrong, vocab_size=4, max_z=6.0)


def test_with_the_whole_vocabulary_it_is_nll_and_entropy() -> None:
    positions = _positions(temperature=1.0, top_k=VOCAB, seed=3)
    report = check_samples(positions, vocab_size=VOCAB, max_z=6.0)
    nll = -sum(p.top_logprobs[p.token] for p in positions) / len(positions)
    entropy = -sum(math.exp(v) * v for p in positions for v in p.top_logprobs.values()) / len(positions)
    assert report.mean_nll == pytest.approx(nll, abs=1e-5)
    assert report.mean_entropy == pytest.approx(entropy, abs=1e-4)
    assert report.num_tokens == len(positions)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_the_bound_of_the_coverage_is_a_bound(temperature: float) -> None:
    """Exact samples never fall below it, whatever the shape of the tail."""
    for peak in (0.1, 1.0, 4.0):
        positions = _positions(temperature=temperature, top_k=8, seed=5, peak=peak)
        report = check_samples(positions, vocab_size=VOCAB, max_z=6.0)
        assert report.z_coverage > -4


def test_nearly_certain_distributions_do_not_raise_false_alarms() -> None:
    certain = {7: math.log1p(-1e-7), 8: math.log(1e-7)}
    report = check_samples([SampledPosition(7, certain, 1.0)] * 500, vocab_size=2, max_z=6.0)
    assert abs(report.z) < 1
    rare = [SampledPosition(7, certain, 1.0)] * 500 + [SampledPosition(8, certain, 1.0)] * 2
    assert abs(check_samples(rare, vocab_size=2, max_z=6.0).z) < 3


def test_an_impossible_token_is_found() -> None:
    positions = [SampledPosition(0, {0: -1000.0, 1: 0.0}, 1.0)] * 3
    with pytest.raises(SamplingCheckError):
        check_samples(positions, vocab_size=2, max_z=6.0)


def test_nothing_to_look_at_is_an_error() -> None:
    with pytest.raises(SamplingCheckError, match="none of 0 sampled tokens"):
        check_samples([], vocab_size=2, max_z=6.0)
