"""Arguments of the vLLM engine, derived from `policy.generation`. No torch, no vllm: the driver checks them early."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl.errors import ConfigError

if TYPE_CHECKING:
    from nemo_rl.models.generation.config import GenerationConfig

KEY = "policy.generation"

TRANSFER_BACKEND = "nemo_rl"
"""Name under which our weight-transfer engine is registered with vLLM."""

DEFAULT_CPU_KV_CACHE_BYTES = 64 << 20
SELF_CHECK_TOP_K = 64
"""Log-probabilities per position that the sampling check asks for."""

_SETTINGS = {
    "model": "policy.model_name",
    "tokenizer": "policy.tokenizer.name",
    "seed": "grpo.seed",
    "dtype": f"{KEY}.vllm_cfg.precision",
    "max_model_len": f"{KEY}.vllm_cfg.max_model_len",
    "max_num_seqs": f"{KEY}.vllm_cfg.max_num_seqs",
    "tensor_parallel_size": f"{KEY}.vllm_cfg.tensor_parallel_size",
    "pipeline_parallel_size": f"{KEY}.vllm_cfg.pipeline_parallel_size",
    "enable_expert_parallel": f"{KEY}.vllm_cfg.expert_parallel_size",
    "gpu_memory_utilization": f"{KEY}.vllm_cfg.gpu_memory_utilization",
    "kv_cache_memory_bytes": f"{KEY}.vllm_cfg.kv_cache_memory_bytes",
    "enforce_eager": f"{KEY}.vllm_cfg.enforce_eager",
    "enable_sleep_mode": f"{KEY}.colocated.enabled",
    "skip_tokenizer_init": f"{KEY}.stop_strings",
    "logprobs_mode": f"{KEY}.temperature",
}
"""Engine argument to the key of our schema that decides it."""

_RESERVED = frozenset(
    {
        "worker_cls",
        "weight_transfer_config",
        "additional_config",
        "per_request_spec_decode_metrics",
        "disable_log_stats",
        "generation_config",
        "max_logprobs",
    }
)
"""Engine arguments that refit, counters and the sampling check rely on."""


@dataclass(frozen=True)
class EngineLimits:
    """Lengths in tokens.

    Attributes:
        engine_max_model_len: What the engine is started with.
        max_total_tokens: Longest prompt plus response of a request.
    """

    engine_max_model_len: int
    max_total_tokens: int


def engine_limits(*, max_model_len: int, model_max_len: int | None, num_speculative_tokens: int) -> EngineLimits:
    """Lengths that leave room for K proposed tokens and the target's own one behind the last token of a request.

    Near its maximum the engine stops drafting for the whole batch, and a draft position beyond it would read unmapped
    cache memory. So with speculation the engine gets K + 1 positions more than requests may use; if the policy has no
    such positions, requests get K + 1 fewer. Example: model_max_len 64, max_model_len 64, K=3 -> engine 64, requests
    60; model_max_len 512 -> engine 68, requests 64.

    Args:
        max_model_len: `policy.generation.vllm_cfg.max_model_len`.
        model_max_len: The policy's `max_position_embeddings`; None when its config names none.
        num_speculative_tokens: K; 0 without speculation.
    """
    headroom = num_speculative_tokens + 1 if num_speculative_tokens else 0
    engine = max_model_len + headroom
    if model_max_len is not None:
        engine = min(engine, model_max_len)
    total = min(max_model_len, engine - headroom)
    if total < 1:
        raise ConfigError(
            f"{KEY}.vllm_cfg.max_model_len: got {max_model_len} with K={num_speculative_tokens} and a policy of "
            f"{model_max_len} positions; no token fits. Use a policy with more positions or fewer speculative tokens."
        )
    return EngineLimits(engine_max_model_len=engine, max_total_tokens=total)


def check_vllm_kwargs(vllm_kwargs: dict[str, Any]) -> None:
    """Refuse engine arguments that another key decides or that this program depends on.

    Raises:
        ConfigError: One line per such argument.
    """
    problems = [
        f"{KEY}.vllm_kwargs.{name}: got {vllm_kwargs[name]!r}; must be absent. Set {_SETTINGS[name]} instead."
        for name in sorted(_SETTINGS.keys() & vllm_kwargs.keys())
    ]
    problems += [
        f"{KEY}.vllm_kwargs.{name}: got {vllm_kwargs[name]!r}; must be absent: the weight update and the metrics "
        "depend on it. Remove the key."
        for name in sorted(_RESERVED & vllm_kwargs.keys())
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def engine_worker_class(device: str) -> str:
    """Qualified name of the vLLM worker class for "cuda" or "cpu"."""
    return f"nemo_rl.models.generation.vllm.{device}_engine_worker.{device.capitalize()}EngineWorker"


def read_model_config(model_dir: str) -> dict[str, Any]:
    """`config.json` of a model directory; empty when the model is not a local directory."""
    path = Path(model_dir) / "config.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def model_max_positions(model_dir: str) -> int | None:
    """`max_position_embeddings` of the policy (of its text part); None when it names none."""
    config = read_model_config(model_dir)
    return config.get("text_config", config).get("max_position_embeddings")


def build_engine_kwargs(
    config: GenerationConfig,
    *,
    model_dir: str,
    tokenizer_dir: str,
    device: str,
    seed: int,
    speculative_config: dict[str, Any] | None,
    trained_draft_tensors: tuple[str, ...],
    frozen_draft_tensors: tuple[str, ...],
    draft_extension: str | None,
    limits: EngineLimits,
) -> dict[str, Any]:
    """Keyword arguments for `vllm.LLM`.

    Args:
        config: The validated section.
        model_dir: Directory (or hub id) of the policy.
        tokenizer_dir: Directory (or hub id) of the tokenizer.
        device: "cuda" or "cpu".
        seed: Of the engine.
        speculative_config: As `merge_speculative_config` made it; None decodes without speculation.
        trained_draft_tensors: Export names of the tensors that training sends; empty when no draft is trained.
        frozen_draft_tensors: Export names of the draft's own tensors that training does not send.
        draft_extension: As `install_draft_extension` takes it; for the engine's further processes.
        limits: As `engine_limits` made it.
    """
    check_vllm_kwargs(config.vllm_kwargs)
    cfg, on_cpu = config.vllm_cfg, device == "cpu"
    kwargs: dict[str, Any] = {
        "model": model_dir,
        "tokenizer": tokenizer_dir,
        "seed": seed,
        "dtype": cfg.precision,
        "max_model_len": limits.engine_max_model_len,
        "max_num_seqs": cfg.max_num_seqs,
        "tensor_parallel_size": cfg.tensor_parallel_size,
        "pipeline_parallel_size": cfg.pipeline_parallel_size,
        "enable_expert_parallel": cfg.expert_parallel_size > 1,
        "gpu_memory_utilization": cfg.gpu_memory_utilization,
        # Compilation makes the CPU engine slower, and its warm-up is skipped only when eager with an explicit cache.
        "enforce_eager": on_cpu or cfg.enforce_eager,
        "kv_cache_memory_bytes": cfg.kv_cache_memory_bytes or (DEFAULT_CPU_KV_CACHE_BYTES if on_cpu else None),
        # Stop strings are matched on text; everything else works on token ids.
        "skip_tokenizer_init": not config.stop_strings,
        # The policy's end-of-sequence ids are passed per request; nothing else of its sampling defaults may apply.
        "generation_config": "vllm",
        # Raw log-probabilities are those of temperature 1; otherwise ask for the ones after the temperature.
        "logprobs_mode": "raw_logprobs" if config.temperature == 1.0 else "processed_logprobs",
        "max_logprobs": SELF_CHECK_TOP_K,
        "disable_log_stats": True,
        "weight_transfer_config": {"backend": TRANSFER_BACKEND},
        "worker_cls": engine_worker_class(device),
        "additional_config": {
            "nemo_rl": {
                "trained_draft_tensors": list(trained_draft_tensors),
                "frozen_draft_tensors": list(frozen_draft_tensors),
                "draft_extension": draft_extension,
            }
        },
    }
    if not on_cpu and config.colocated.enabled:
        kwargs["enable_sleep_mode"] = True
    kwargs |= {name: value for name, value in config.vllm_kwargs.items() if name != "speculative_config"}
    if speculative_config is not None:
        kwargs["speculative_config"] = dict(speculative_config)
        kwargs["per_request_spec_decode_metrics"] = "detailed"
    return kwargs
