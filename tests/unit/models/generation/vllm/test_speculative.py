from __future__ import annotations

import pytest

from nemo_rl.errors import ConfigError
from nemo_rl.models.generation.vllm.speculative import (
    DRAFT_FREE_METHODS,
    KNOWN_METHODS,
    baseline_problems,
    merge_speculative_config,
    option_problems,
    refused_problems,
)

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


# --- without a draft of policy.draft

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    "user",
    [
        NGRAM,
        NGRAM | {"prompt_lookup_min": 2, "prompt_lookup_max": 2},
        NGRAM | {"prompt_lookup_max": 4, "rejection_sample_method": "block"},
        SUFFIX,
        SUFFIX | {"suffix_decoding_max_tree_depth": 8, "suffix_decoding_max_spec_factor": 2.0},
        SUFFIX | {"suffix_decoding_max_cached_requests": 0, "suffix_decoding_min_token_prob": 0},
        {"method": "eagle3", "model": "/a/draft", "num_speculative_tokens": 2},
        {"model": "/a/small/policy", "num_speculative_tokens": 2},
        {"method": "mtp", "num_speculative_tokens": 1},
    ],
    ids=str,
)
def test_what_the_engine_can_do_without_a_trained_draft_is_accepted(user: dict) -> None:
    assert baseline_problems(user, device="cpu") == []


@pytest.mark.parametrize(
    ("user", "parts"),
    [
        ({"num_speculative_tokens": 3}, ["method: got nothing", "'ngram'", "'suffix'", "remove the block"]),
        (NGRAM | {"method": "ngrams"}, ["method: got 'ngrams'", "must be one of", "'ngram'"]),
        ({"method": "ngram"}, ["num_speculative_tokens: got nothing", ">= 1"]),
        (NGRAM | {"num_speculative_tokens": "3"}, ["num_speculative_tokens: got '3'"]),
        (NGRAM | {"model": "/m"}, ["model: got '/m'", "must be absent with method: ngram"]),
        (NGRAM | {"prompt_lookup_min": 0}, ["prompt_lookup_min: got 0", ">= 1"]),
        (NGRAM | {"prompt_lookup_max": 2.0}, ["prompt_lookup_max: got 2.0", "an integer"]),
        (NGRAM | {"prompt_lookup_min": 5, "prompt_lookup_max": 2}, ["prompt_lookup_min: got 5", "(2)"]),
        (NGRAM | {"prompt_lookup_maxx": 2}, ["prompt_lookup_maxx: got an unknown key", "prompt_lookup_max,"]),
        (
            NGRAM | {"suffix_decoding_max_tree_depth": 3},
            ["suffix_decoding_max_tree_depth: got 3 with method: ngram", "'suffix'"],
        ),
        (SUFFIX | {"prompt_lookup_min": 3}, ["prompt_lookup_min: got 3 with method: suffix", "'ngram'"]),
        (SUFFIX | {"suffix_decoding_min_token_prob": 1.5}, ["suffix_decoding_min_token_prob: got 1.5", "from 0 to 1"]),
        (SUFFIX | {"suffix_decoding_max_spec_factor": -1}, ["suffix_decoding_max_spec_factor: got -1", ">= 0"]),
        (SUFFIX | {"suffix_decoding_max_cached_requests": True}, ["max_cached_requests: got True", "an integer >= 0"]),
        ({"method": "medusa", "num_speculative_tokens": 2}, ["model: got nothing", "the draft's directory"]),
        (NGRAM | {"method": "ngram_gpu"}, ["method: got 'ngram_gpu'", "on CPU"]),
    ],
    ids=str,
)
def test_a_mistake_without_a_trained_draft_gives_one_message(user: dict, parts: list[str]) -> None:
    (problem,) = baseline_problems(user, device="cpu")
    assert all(part in problem for part in parts), problem


def test_options_of_other_methods_do_not_go_with_a_trained_draft() -> None:
    (problem,) = option_problems({"num_speculative_tokens": 3, "prompt_lookup_max": 3}, method="some_method")
    assert "prompt_lookup_max: got 3 with method: some_method; it is an option of 'ngram' and 'ngram_gpu'" in problem


@pytest.mark.parametrize("key", ["speculative_token_tree", "tree_choices", "total_tokens", "depth", "top_k"])
def test_a_draft_tree_is_refused_with_the_reason(key: str) -> None:
    (problem,) = refused_problems({"num_speculative_tokens": 3, key: 8})
    assert f"speculative_config.{key}: got 8; must be absent: the engine (vLLM) has no draft tree" in problem


def test_every_method_and_option_exists_in_the_engine() -> None:
    speculative = pytest.importorskip("vllm.config.speculative")
    fields = set(speculative.SpeculativeConfig.__dataclass_fields__)
    assert {name for options in DRAFT_FREE_METHODS.values() for name in options} <= fields
    known = str(speculative.SpeculativeMethod)
    assert [name for name in KNOWN_METHODS if f"'{name}'" not in known] == []
