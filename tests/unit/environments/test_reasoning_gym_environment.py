from __future__ import annotations

from collections.abc import Iterator

import pytest

from nemo_rl.data.sources import ReasoningGymSource
from nemo_rl.environments import reasoning_gym_environment
from nemo_rl.environments.config import ReasoningGymEnvConfig
from nemo_rl.environments.reasoning_gym_environment import ReasoningGymEnvironment
from nemo_rl.errors import ConfigError


@pytest.fixture(scope="module")
def environment() -> Iterator[ReasoningGymEnvironment]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reasoning_gym_environment, "SECONDS_PER_ANSWER", 2.0)
        environment = ReasoningGymEnvironment(ReasoningGymEnvConfig())
    yield environment
    environment.shutdown()


def metadata(task: str, **kwargs: object) -> dict:
    return dict(ReasoningGymSource(task, size=1, seed=0, kwargs=kwargs)[0].metadata)


def test_task_scores_the_last_answer(environment: ReasoningGymEnvironment) -> None:
    data = metadata("spell_backward", min_word_len=4, max_word_len=4)
    answer = data["ground_truth"]
    half = answer[:2] + "##"
    responses = [
        f"<think>1a</think><answer> {answer}\n</answer>",
        f"<answer>{half}</answer>",
        f"<answer>####</answer><answer>{answer}</answer>",
        f"<answer>{answer}</answer><answer>####</answer>",
        answer,
        f"<answer>{answer}",
    ]
    result = environment.step(responses, [data] * len(responses))
    assert result.rewards == pytest.approx([1.0, 0.5, 1.0, 0.0, 0.0, 0.0])
    assert result.answers == [answer, half, answer, "####", None, None]
    assert result.metrics["accuracy"] == (2.0, 6.0)
    assert result.metrics["answered"] == (4.0, 6.0)
    assert result.metrics["response_chars"] == (float(sum(map(len, responses))), 6.0)


def test_tasks_may_be_mixed_in_a_batch(environment: ReasoningGymEnvironment) -> None:
    tasks = ["chain_sum", "spell_backward", "countdown", "basic_arithmetic"]
    data = [metadata(task) for task in tasks]
    responses = [f"<answer>{item['ground_truth']}</answer>" for item in data]
    assert environment.step(responses, data).rewards == [1.0] * 4
    assert environment.step(["<answer>x</answer>"] * 4, data).rewards != [1.0] * 4


def test_answer_that_hangs_the_tasks_rule_scores_zero_and_is_counted(environment: ReasoningGymEnvironment) -> None:
    data = metadata("countdown")  # evaluates the answer symbolically
    right = f"<answer>{data['ground_truth']}</answer>"
    result = environment.step(["<answer>9**9**9**9</answer>", right], [data] * 2)
    assert result.rewards == [0.0, 1.0]
    assert result.metrics["scoring_timeouts"] == (1.0, 2.0)


def test_answer_pattern_is_configurable() -> None:
    environment = ReasoningGymEnvironment(ReasoningGymEnvConfig(answer_regex=r"Answer: (\w+)"))
    data = metadata("spell_backward")
    result = environment.step([f"Answer: {data['ground_truth']}."], [data])
    environment.shutdown()
    assert result.rewards == [1.0]


@pytest.mark.parametrize("pattern", ["(", "<answer>.*</answer>"], ids=["invalid", "no-group"])
def test_unusable_pattern_is_named(pattern: str) -> None:
    with pytest.raises(ConfigError, match=r"env\.reasoning_gym\.answer_regex: got") as caught:
        ReasoningGymEnvironment(ReasoningGymEnvConfig(answer_regex=pattern))
    assert repr(pattern) in str(caught.value)
