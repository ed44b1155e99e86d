from __future__ import annotations

from collections.abc import Iterator

import pytest

from nemo_rl.environments import math_environment
from nemo_rl.environments.config import MathEnvConfig
from nemo_rl.environments.math_environment import MathEnvironment


def start(*, seconds_per_answer: float) -> Iterator[MathEnvironment]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(math_environment, "SECONDS_PER_ANSWER", seconds_per_answer)
        environment = MathEnvironment(MathEnvConfig(num_workers=1))
    yield environment
    environment.shutdown()


@pytest.fixture(scope="module")
def environment() -> Iterator[MathEnvironment]:
    """Its limit is for a busy machine: the first comparison of a worker takes seconds there."""
    yield from start(seconds_per_answer=60.0)


@pytest.fixture
def hasty_environment() -> Iterator[MathEnvironment]:
    yield from start(seconds_per_answer=2.0)


CASES = [
    ("It is \\boxed{\\frac{1}{2}}.", "0.5", 1.0, True),
    ("The answer is 42", "42", 1.0, True),
    ("$x^2 + 2x + 1$", "(x+1)^2", 1.0, True),
    ("\\boxed{1,000}", "1000", 1.0, True),
    ("first 3, then \\boxed{4}", "4", 1.0, True),
    ("\\boxed{3}", "4", 0.0, True),
    ("I cannot say", "4", 0.0, False),
    ("", "4", 0.0, False),
    ("\\boxed{\\frac{1}{", "4", 0.0, None),
]


def test_answers_are_compared_as_mathematics(environment: MathEnvironment) -> None:
    result = environment.step([case[0] for case in CASES], [{"ground_truth": case[1]} for case in CASES])
    for case, reward, answer in zip(CASES, result.rewards, result.answers, strict=True):
        assert reward == case[2], case
        assert isinstance(reward, float)
        if case[3] is not None:
            assert (answer is not None) == case[3], case


def test_metrics_are_numerators_over_all_responses(hasty_environment: MathEnvironment) -> None:
    texts = ["\\boxed{1}", "\\boxed{2}", "none", "$9999^{9999^{9999}}$"]
    result = hasty_environment.step(texts, [{"ground_truth": "1"}] * 4)
    assert result.rewards == [1.0, 0.0, 0.0, 0.0]
    assert result.metrics == {
        "accuracy": (1.0, 4.0),
        "answered": (2.0, 4.0),
        "response_chars": (float(sum(map(len, texts))), 4.0),
        "scoring_timeouts": (1.0, 4.0),
        "scoring_errors": (0.0, 4.0),
    }


def test_expected_answer_that_is_no_mathematics_is_counted(environment: MathEnvironment) -> None:
    result = environment.step(["\\boxed{1}"], [{"ground_truth": ""}])
    assert result.rewards == [0.0]
    assert result.metrics["scoring_errors"] == (1.0, 1.0)


def test_responses_and_metadata_must_match(environment: MathEnvironment) -> None:
    with pytest.raises(ValueError, match="zip"):
        environment.step(["1", "2"], [{"ground_truth": "1"}])
