"""How much memory a run needs on each GPU, from sizes alone: no torch, no weights, nothing measured.

Every line of the estimate is a formula of this file, with its assumptions beside it. Workspaces of kernels,
fragmentation, NCCL's buffers and the CUDA context (together a few GiB) are in none of them. Take the result as a lower
bound for what to try, not as a promise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from nemo_rl.models.generation.vllm.engine_args import DEFAULT_CPU_KV_CACHE_BYTES
from nemo_rl.utils.preflight_sizes import num_experts

if TYPE_CHECKING:
    from nemo_rl.algorithms.config import Device, MasterConfig
    from nemo_rl.models.automodel.draft.spec import DraftSpec

__all__ = [
    "DraftMemory",
    "EngineMemory",
    "ModelSizes",
    "TrainingMemory",
    "draft_memory",
    "engine_memory",
    "micro_batch_tokens",
    "model_sizes",
    "training_memory",
]

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MASTER_BYTES, GRADIENT_BYTES, MOMENT_BYTES = 4, 4, 8
"""Per trained parameter: fp32 weight, fp32 gradient, two fp32 moments. Every optimizer is taken for AdamW."""


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a decoder-only policy, from its config.json.

    Attributes:
        num_layers: Decoder layers.
        hidden: Width.
        vocab: Rows of the embedding.
        kv_width: Width of a layer's keys, and of its values.
        embedding: Parameters of embedding and head; a tied head counts once.
        layers: Parameters of all layers without their experts, final norm included.
        experts: Parameters of all experts.
        layer_elements: Numbers per token that the backward pass of one layer reads.
    """

    num_layers: int
    hidden: int
    vocab: int
    kv_width: int
    embedding: int
    layers: int
    experts: int
    layer_elements: int

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.embedding + self.layers + self.experts


def model_sizes(config: Mapping[str, Any]) -> ModelSizes | None:
    """Count the parameters of a Llama-, Qwen- or Mistral-like model, dense or with experts.

    A layer has projections of queries, keys, values and output, a gated MLP or a router and experts (on every layer
    but those of `mlp_only_layers` and off `decoder_sparse_step`), two norms, and for Qwen3 a norm per head.

    Args:
        config: Content of config.json.

    Returns:
        None when the file lacks a size that the formulas need.
    """
    text = config.get("text_config", config)
    needed = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size")
    if not all(isinstance(text.get(key), int) for key in needed):
        return None
    hidden, layers, heads, vocab, mlp = (int(text[key]) for key in needed)
    head_dim = text.get("head_dim") or hidden // heads
    queries, kv = heads * head_dim, (text.get("num_key_value_heads") or heads) * head_dim
    is_qwen2, is_qwen3 = (str(text.get("model_type", "")).startswith(name) for name in ("qwen2", "qwen3"))
    attention = hidden * (2 * queries + 2 * kv) + 2 * hidden
    attention += 2 * head_dim if is_qwen3 else 0
    attention += queries + 2 * kv if is_qwen2 or text.get("attention_bias") else 0
    experts = num_experts(config)
    num_sparse = _num_sparse_layers(text, layers) if experts else 0
    expert_mlp, chosen = text.get("moe_intermediate_size") or mlp, text.get("num_experts_per_tok") or 1
    dense = layers * attention + (layers - num_sparse) * 3 * hidden * mlp + num_sparse * hidden * experts
    # Inputs of both norms, outputs of attention and MLP; queries, keys, values and what attention makes of them; gate,
    # up and their product, in each chosen expert beside its input.
    inner = chosen * (3 * expert_mlp + hidden) if num_sparse else 3 * mlp
    return ModelSizes(
        num_layers=layers,
        hidden=hidden,
        vocab=vocab,
        kv_width=kv,
        embedding=vocab * hidden * (1 if text.get("tie_word_embeddings") else 2),
        layers=dense + hidden,
        experts=num_sparse * experts * 3 * hidden * expert_mlp,
        layer_elements=4 * hidden + 2 * queries + 2 * kv + inner,
    )


def _num_sparse_layers(text: Mapping[str, Any], layers: int) -> int:
    step, plain = text.get("decoder_sparse_step") or 1, set(text.get("mlp_only_layers") or ())
    return sum((index + 1) % step == 0 and index not in plain for index in range(layers))


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes on one GPU while the policy trains.

    Attributes:
        weights: fp32 weights, sharded over all workers (FSDP over samples, tensor parallel over layers, experts over
            both).
        gradients: fp32 gradients, sharded alike.
        optimizer: The moments, sharded alike.
        gathered: What FSDP puts together for a moment, in the compute format: embedding and head, the layer at work,
            the next one, and the gradient of one; of the experts only those that live on this GPU.
        activations: With activation checkpointing one input per layer and the inside of one layer, without it the
            inside of all. Attention keeps no matrix of tokens by tokens.
        logits: Of one micro-batch: in the compute format, in fp32, and their gradient. `policy.logprob_chunk_size`
            bounds the two fp32 ones.
        micro_batch_tokens: Tokens of that micro-batch.
    """

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int
    logits: int
    micro_batch_tokens: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.gathered + self.activations + self.logits


def micro_batch_tokens(cfg: MasterConfig) -> int:
    """Tokens that a worker computes at once in training: a full row or micro-batch, at the longest length.

    Args:
        cfg: The configuration.
    """
    policy = cfg.policy
    for block in (policy.sequence_packing, policy.dynamic_batching):
        if block.enabled:
            return block.train_mb_tokens
    return policy.train_micro_batch_size * policy.max_total_sequence_length


def training_memory(cfg: MasterConfig, sizes: ModelSizes, *, device: Device) -> TrainingMemory:
    """Estimate what the policy's training needs.

    Args:
        cfg: The configuration.
        sizes: Of the policy.
        device: Of the run.
    """
    policy, workers = cfg.policy, cfg.num_policy_workers(device)
    dtensor, compute = policy.dtensor_cfg, BYTES[policy.precision]
    tp, tokens = dtensor.tensor_parallel_size, micro_batch_tokens(cfg)
    share = 0 if dtensor.cpu_offload else sizes.parameters // workers
    layer = sizes.layers // sizes.num_layers // tp
    layer += sizes.experts // sizes.num_layers // dtensor.expert_parallel_size
    gathered = (sizes.embedding // tp + 3 * layer) * compute if workers > 1 or compute < MASTER_BYTES else 0
    inside = tokens * sizes.layer_elements * compute // tp
    inputs = sizes.num_layers * tokens * sizes.hidden * compute
    fp32_tokens = min(tokens, policy.logprob_chunk_size or tokens)
    return TrainingMemory(
        weights=MASTER_BYTES * share,
        gradients=GRADIENT_BYTES * share,
        optimizer=MOMENT_BYTES * share,
        gathered=gathered,
        activations=inputs + inside if dtensor.activation_checkpointing else sizes.num_layers * inside,
        logits=(tokens * compute + 2 * fp32_tokens * 4) * sizes.vocab // tp,
        micro_batch_tokens=tokens,
    )


@dataclass(frozen=True)
class DraftMemory:
    """Bytes on one GPU that the draft's training adds.

    Attributes:
        parameters: Of the draft, those it has from the policy not counted.
        trained: Of these, the trained ones.
        state: fp32 weights; gradients and moments of the trained part; sharded over all workers.
        features: States of the policy's layers for one micro-batch, in the compute format.
        activations: Inside of the draft's layers for all positions that it computes in one micro-batch; nothing is
            recomputed.
        logits: fp32 logits of draft and policy for `policy.draft.loss_chunk_size` positions, and the gradient.
    """

    parameters: int
    trained: int
    state: int
    features: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.state + self.features + self.activations + self.logits


def draft_memory(cfg: MasterConfig, spec: DraftSpec, *, device: Device) -> DraftMemory:
    """Estimate what the draft adds to training; a static draft adds nothing.

    Args:
        cfg: The configuration.
        spec: The resolved draft.
        device: Of the run.
    """
    from nemo_rl.models.automodel.draft.registry import adapter_of  # only runs with a draft read it

    arch, workers, compute = spec.architecture, cfg.num_policy_workers(device), BYTES[cfg.policy.precision]
    shapes = arch.trained_shapes()
    own = {**shapes, **{name: shape for name, shape in arch.frozen_shapes().items() if len(shape) > 1}}
    parameters = sum(prod(shape) for shape in own.values())
    trained = 0 if spec.is_static else sum(prod(shapes[name]) for name in spec.trained_names)
    if spec.is_static:
        return DraftMemory(parameters, trained, state=0, features=0, activations=0, logits=0)
    tokens = micro_batch_tokens(cfg)
    samples = -(-tokens // cfg.policy.max_total_sequence_length)
    positions = adapter_of(spec.algo).computed_positions(cfg.policy.draft, arch, tokens=tokens, samples=samples)
    queries, kv = (heads * arch.head_dim for heads in (arch.num_attention_heads, arch.num_key_value_heads))
    inside = 4 * arch.hidden_size + 2 * queries + 2 * kv + 3 * arch.intermediate_size
    chunk = min(positions, cfg.policy.draft.loss_chunk_size)
    return DraftMemory(
        parameters,
        trained,
        state=(MASTER_BYTES * parameters + (GRADIENT_BYTES + MOMENT_BYTES) * trained) // workers,
        features=tokens * arch.feature_size * compute,
        activations=arch.num_hidden_layers * positions * inside * compute,
        logits=chunk * (2 * arch.draft_vocab_size + arch.vocab_size) * 4,
    )


@dataclass(frozen=True)
class EngineMemory:
    """What one GPU of a generation engine holds.

    Attributes:
        weights: Bytes of policy and draft in the engine's format, split over the engine's GPUs.
        kv_bytes_per_token: Keys and values of one token, draft included.
        sequence: Bytes of keys and values of a sequence of full length.
        utilization: Share of the GPU that the engine takes for weights, cache and its own activations; None on CPU.
        cache: Bytes of the cache where the configuration says so, else None.
    """

    weights: int
    kv_bytes_per_token: int
    sequence: int
    utilization: float | None
    cache: int | None

    def sequences(self, gpu_bytes: int) -> int:
        """Sequences of full length that the cache of a GPU holds at once; the engine's activations not counted.

        Args:
            gpu_bytes: Memory of the GPU.
        """
        free = self.cache if self.cache is not None else int((self.utilization or 0) * gpu_bytes) - self.weights
        return max(0, free // self.sequence)


def engine_memory(
    cfg: MasterConfig, sizes: ModelSizes, *, spec: DraftSpec | None, draft_parameters: int, device: Device
) -> EngineMemory:
    """Estimate what generation needs.

    Args:
        cfg: The configuration.
        sizes: Of the policy.
        spec: The resolved draft; None = no draft.
        draft_parameters: Of the draft, those it has from the policy not counted.
        device: Of the run.
    """
    vllm = cfg.policy.generation.vllm_cfg
    width, gpus = BYTES[vllm.precision], vllm.tensor_parallel_size * vllm.pipeline_parallel_size
    is_served = spec is not None and spec.serving is not None
    kv = 2 * sizes.num_layers * sizes.kv_width * width // gpus
    if is_served and spec is not None:
        arch = spec.architecture
        kv += 2 * arch.num_hidden_layers * arch.num_key_value_heads * arch.head_dim * width // gpus
    return EngineMemory(
        weights=(sizes.parameters + (draft_parameters if is_served else 0)) * width // gpus,
        kv_bytes_per_token=kv,
        sequence=kv * vllm.max_model_len,
        utilization=vllm.gpu_memory_utilization if device == "cuda" else None,
        cache=vllm.kv_cache_memory_bytes or (None if device == "cuda" else DEFAULT_CPU_KV_CACHE_BYTES),
    )
