from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_rl.errors import ConfigError
from nemo_rl.models.generation.config import GenerationConfig, VllmConfig
from nemo_rl.models.generation.vllm.engine_args import (
    EngineLimits,
    build_engine_kwargs,
    check_vllm_kwargs,
    engine_limits,
    model_max_positions,
)

LIMITS = EngineLimits(engine_max_model_len=68, max_total_tokens=64)


def _config(**overrides: object) -> GenerationConfig:
    values = {"max_new_tokens": 8, "vllm_cfg": VllmConfig(precision="float32", max_model_len=64)}
    return GenerationConfig(**{**values, **overrides})


def _kwargs(config: GenerationConfig, *, device: str = "cpu", speculative: dict | None = None) -> dict:
    return build_engine_kwargs(
        config,
        model_dir="m",
        tokenizer_dir="t",
        device=device,
        seed=1,
        speculative_config=speculative,
        trained_draft_tensors=("fc.weight",) if speculative else (),
        frozen_draft_tensors=("embed_tokens.weight",) if speculative else (),
        draft_extension="module:function" if speculative else None,
        limits=LIMITS,
    )


@pytest.mark.parametrize(
    ("model_max", "k", "engine", "requests"),
    [
        (512, 3, 68, 64),  # the policy has the positions: requests keep their full length
        (64, 3, 64, 60),  # it has not: prompt 40 leaves 20 tokens
        (66, 3, 66, 62),
        (64, 0, 64, 64),  # without speculation nothing is given up
        (None, 3, 68, 64),
    ],
)
def test_headroom_at_the_length_limit(model_max: int | None, k: int, engine: int, requests: int) -> None:
    limits = engine_limits(max_model_len=64, model_max_len=model_max, num_speculative_tokens=k)
    assert limits == EngineLimits(engine_max_model_len=engine, max_total_tokens=requests)


def test_no_room_for_a_token_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"max_model_len: got 64 with K=63"):
        engine_limits(max_model_len=64, model_max_len=64, num_speculative_tokens=63)


def test_log_probabilities_follow_the_sampling_temperature() -> None:
    assert _kwargs(_config(temperature=1.0))["logprobs_mode"] == "raw_logprobs"
    assert _kwargs(_config(temperature=0.7))["logprobs_mode"] == "processed_logprobs"


def test_the_tokenizer_is_loaded_only_for_stop_strings() -> None:
    assert _kwargs(_config())["skip_tokenizer_init"] is True
    assert _kwargs(_config(stop_strings=("x",)))["skip_tokenizer_init"] is False


def test_device_settings() -> None:
    cpu, cuda = _kwargs(_config()), _kwargs(_config(), device="cuda")
    assert cpu["enforce_eager"] is True
    assert cpu["kv_cache_memory_bytes"] == 64 << 20
    assert "enable_sleep_mode" not in cpu
    assert cuda["enforce_eager"] is False
    assert cuda["kv_cache_memory_bytes"] is None
    assert cuda["enable_sleep_mode"] is True
    assert cuda["worker_cls"].endswith("cuda_engine_worker.CudaEngineWorker")


def test_speculation_reaches_the_engine_with_its_counters() -> None:
    plain = _kwargs(_config(vllm_kwargs={"speculative_config": {"num_speculative_tokens": 3}}))
    assert "speculative_config" not in plain
    assert "per_request_spec_decode_metrics" not in plain
    spec = _kwargs(_config(), speculative={"method": "x", "num_speculative_tokens": 3})
    assert spec["speculative_config"] == {"method": "x", "num_speculative_tokens": 3}
    assert spec["per_request_spec_decode_metrics"] == "detailed"
    assert spec["additional_config"]["nemo_rl"] == {
        "trained_draft_tensors": ["fc.weight"],
        "frozen_draft_tensors": ["embed_tokens.weight"],
        "draft_extension": "module:function",
    }


def test_free_engine_arguments_pass_through() -> None:
    assert _kwargs(_config(vllm_kwargs={"block_size": 16}))["block_size"] == 16


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("max_model_len", "policy.generation.vllm_cfg.max_model_len"),
        ("dtype", "policy.generation.vllm_cfg.precision"),
        ("seed", "grpo.seed"),
        ("worker_cls", "Remove the key"),
        ("weight_transfer_config", "Remove the key"),
    ],
)
def test_an_argument_that_is_not_the_users_names_the_right_key(name: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as info:
        check_vllm_kwargs({name: "v"})
    assert f"policy.generation.vllm_kwargs.{name}: got 'v'" in str(info.value)
    assert remedy in str(info.value)


def test_positions_of_a_policy(tmp_path: Path) -> None:
    assert model_max_positions("org/some-model") is None
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 77}))
    assert model_max_positions(str(tmp_path)) == 77
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"max_position_embeddings": 33}}))
    assert model_max_positions(str(tmp_path)) == 33
