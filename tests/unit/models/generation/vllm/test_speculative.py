from __future__ import annotations

import pytest

from nemo_rl.errors import ConfigError
from nemo_rl.models.generation.vllm.speculative import merge_speculative_config

REQUIRED = {"method": "some_method", "model": "/run/draft", "num_speculative_tokens": 3}


def test_without_either_there_is_no_speculation() -> None:
    assert merge_speculative_config(None, None) is None


def test_the_user_types_k_once_and_the_draft_brings_the_rest() -> None:
    user = {"num_speculative_tokens": 3, "draft_sample_method": "greedy"}
    assert merge_speculative_config(user, REQUIRED) == {**REQUIRED, "draft_sample_method": "greedy"}
    assert merge_speculative_config(None, REQUIRED) == REQUIRED


def test_inputs_are_not_changed() -> None:
    user = {"num_speculative_tokens": 3}
    merged = merge_speculative_config(user, REQUIRED)
    merged["x"] = 1
    assert user == {"num_speculative_tokens": 3}
    assert "x" not in REQUIRED


def test_a_static_draft_is_described_by_the_user_alone() -> None:
    user = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 4}
    assert merge_speculative_config(user, None) == user


@pytest.mark.parametrize(
    ("key", "value"), [("method", "ngram"), ("model", "/elsewhere"), ("num_speculative_tokens", 5)], ids=str
)
def test_a_contradiction_names_both_sides(key: str, value: object) -> None:
    with pytest.raises(ConfigError) as info:
        merge_speculative_config({key: value}, REQUIRED)
    message = str(info.value)
    assert f"policy.generation.vllm_kwargs.speculative_config.{key}: got {value!r}" in message
    assert f"policy.draft requires {REQUIRED[key]!r}" in message


def test_all_contradictions_are_reported_together() -> None:
    with pytest.raises(ConfigError) as info:
        merge_speculative_config({"method": "ngram", "model": "x", "num_speculative_tokens": 3}, REQUIRED)
    assert len(str(info.value).splitlines()) == 2


@pytest.mark.parametrize("k", [None, 0, -1, 2.0, "3", True], ids=repr)
def test_k_must_be_a_positive_integer(k: object) -> None:
    with pytest.raises(ConfigError, match="num_speculative_tokens: got"):
        merge_speculative_config({"method": "ngram", "num_speculative_tokens": k}, None)


@pytest.mark.parametrize(
    "inexact",
    [
        {"rejection_sample_method": "synthetic"},
        {"synthetic_acceptance_length": 2.0},
        {"synthetic_acceptance_rates": [0.5]},
    ],
    ids=lambda d: next(iter(d)),
)
@pytest.mark.parametrize("required", [None, REQUIRED], ids=["static", "trained"])
def test_only_exact_rejection_sampling_is_allowed(inexact: dict, required: dict | None) -> None:
    with pytest.raises(ConfigError, match=next(iter(inexact))):
        merge_speculative_config({"method": "some_method", "num_speculative_tokens": 3, **inexact}, required)


@pytest.mark.parametrize("exact", ["standard", "block"])
def test_exact_methods_pass(exact: str) -> None:
    assert merge_speculative_config({"rejection_sample_method": exact}, REQUIRED)["rejection_sample_method"] == exact
