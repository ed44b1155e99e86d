"""Schema of `policy.generation`: sampling, the vLLM engines and their start-up check."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from nemo_rl.utils.schema import ConfigModel, FreeForm, interpolated

Precision = Literal["float32", "bfloat16", "float16"]
"""Number format of weights and activations."""


class VllmConfig(ConfigModel):
    """What every vLLM engine is started with."""

    async_engine: Literal[False] = False
    """Present for NeMo-RL recipes; only the synchronous in-process engine exists here."""

    precision: Precision = interpolated("${policy.precision}")
    """Number format of the engine's weights."""

    tensor_parallel_size: PositiveInt = 1
    """GPUs that share each layer of one engine."""

    pipeline_parallel_size: PositiveInt = 1
    """Groups of layers of one engine on different GPUs."""

    expert_parallel_size: PositiveInt = 1
    """GPUs over which one engine spreads the experts of a mixture-of-experts policy."""

    gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=1.0)] = 0.6
    """Share of each GPU's memory for weights and KV cache (CUDA only)."""

    max_model_len: PositiveInt = interpolated("${policy.max_total_sequence_length}")
    """Longest prompt plus response, in tokens."""

    enforce_eager: bool = False
    """Run without CUDA graphs and compilation."""

    kv_cache_memory_bytes: PositiveInt | None = None
    """Bytes of KV cache per engine; null = from `gpu_memory_utilization` on CUDA, 64 MiB on CPU."""

    max_num_seqs: PositiveInt = 256
    """Sequences that one engine decodes at once."""


class ColocatedResources(ConfigModel):
    """Devices that belong to generation alone."""

    gpus_per_node: PositiveInt | None = None
    """GPUs for generation when there is one node."""

    num_nodes: PositiveInt | None = None
    """Nodes for generation when there are several."""


class ColocatedConfig(ConfigModel):
    """Whether training and generation take turns on the same devices."""

    enabled: bool = True
    """Share the devices. False = generation has its own, named by `resources`."""

    resources: ColocatedResources = Field(default_factory=ColocatedResources)
    """Devices of generation when they are not shared."""


class SamplingCheckConfig(ConfigModel):
    """Start-up check that an engine's samples follow its own probabilities."""

    enabled: bool = True
    """Sample at start-up and stop the run when the samples are off."""

    num_samples: Annotated[int, Field(ge=2)] = 64
    """Sequences to sample."""

    max_new_tokens: PositiveInt = 16
    """Tokens per sequence."""

    max_z: PositiveFloat = 6.0
    """Largest accepted distance between mean negative log-likelihood and mean entropy, in standard errors."""


class ThroughputProbeConfig(ConfigModel):
    """Measurement, after the last step, of what speculation gains."""

    enabled: bool = False
    """Generate the same prompts with and without speculation and log both speeds."""

    num_prompts: PositiveInt = 32
    """Prompts per measurement."""

    batch_size: PositiveInt = 8
    """Prompts generated at once."""

    repeats: PositiveInt = 3
    """Measurements of each kind, in turns."""


class GenerationConfig(ConfigModel):
    """How responses are sampled, and by how many engines."""

    backend: Literal["vllm"] = "vllm"
    """Generation library."""

    max_new_tokens: PositiveInt = interpolated("${policy.max_total_sequence_length}")
    """Longest response, in tokens."""

    temperature: PositiveFloat = 1.0
    """Sampling temperature; training log-probabilities are taken at the same one."""

    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus sampling. Only 1.0 (off) agrees with the log-probabilities of training."""

    top_k: PositiveInt | None = None
    """Sample among the k most likely tokens. Only null (off) agrees with the log-probabilities of training."""

    stop_token_ids: Annotated[tuple[NonNegativeInt, ...], Field(strict=False)] | None = None
    """Token ids that end a response, besides the tokenizer's end of sequence."""

    stop_strings: Annotated[tuple[str, ...], Field(strict=False)] | None = None
    """Strings that end a response."""

    num_engines: PositiveInt | None = None
    """Engines that share the prompts; null = as many as the GPUs allow, 1 on CPU."""

    vllm_cfg: VllmConfig = Field(default_factory=VllmConfig)
    """Engine settings."""

    vllm_kwargs: FreeForm = Field(default_factory=dict)
    """Further engine arguments, in vLLM's own names. `speculative_config.num_speculative_tokens` is K."""

    colocated: ColocatedConfig = Field(default_factory=ColocatedConfig)
    """Whether training and generation share devices."""

    sampling_check: SamplingCheckConfig = Field(default_factory=SamplingCheckConfig)
    """Start-up check of the engine's sampling."""

    throughput_probe: ThroughputProbeConfig = Field(default_factory=ThroughputProbeConfig)
    """Measurement of what speculation gains."""

    @property
    def speculative_config(self) -> dict[str, Any] | None:
        """The user's part of the engine's speculative decoding settings, or None without any."""
        value = self.vllm_kwargs.get("speculative_config")
        return None if value is None else dict(value)

    @property
    def num_speculative_tokens(self) -> int | None:
        """K, the tokens proposed per step; None when the user asked for no speculation."""
        spec = self.speculative_config
        return None if spec is None else spec.get("num_speculative_tokens")
