"""Checks of sizes that depend on the device or on the policy's config.json; pure functions that return messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nemo_rl.models.policy import layout
from nemo_rl.utils.model_files import max_positions

if TYPE_CHECKING:
    from nemo_rl.algorithms.config import Device, MasterConfig


_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Where the families of mixture-of-experts policies keep the number of experts per layer."""


def num_experts(policy_config: Mapping[str, Any]) -> int:
    """Experts per layer of a policy; 0 = it has none.

    Args:
        policy_config: Content of the policy's config.json.
    """
    text = policy_config.get("text_config", policy_config)
    return next((text[key] for key in _EXPERT_KEYS if isinstance(text.get(key), int)), 0)


def layout_problems(cfg: MasterConfig, device: Device) -> list[str]:
    """Check the parallel layout of training and generation against the device.

    Args:
        cfg: The configuration.
        device: The device of the run.

    Returns:
        One message per problem.
    """
    dtensor, vllm = cfg.policy.dtensor_cfg, cfg.policy.generation.vllm_cfg
    found: list[str] = []
    if device == "cpu":
        cuda_only = {
            "policy.dtensor_cfg.expert_parallel_size": (dtensor.expert_parallel_size, 1),
            "policy.dtensor_cfg.cpu_offload": (dtensor.cpu_offload, False),
            "policy.generation.vllm_cfg.tensor_parallel_size": (vllm.tensor_parallel_size, 1),
            "policy.generation.vllm_cfg.pipeline_parallel_size": (vllm.pipeline_parallel_size, 1),
            "policy.generation.vllm_cfg.expert_parallel_size": (vllm.expert_parallel_size, 1),
        }
        found += [
            f"{key}: got {_yaml(got)}; must be {_yaml(only)} on CPU. Set it, or run on GPUs (cluster.device: cuda)."
            for key, (got, only) in cuda_only.items()
            if got != only
        ]
    workers = cfg.num_policy_workers(device)
    found += layout.layout_problems(cfg.policy, num_workers=workers)
    gpus = cfg.cluster.gpus_per_node * cfg.cluster.num_nodes
    if device == "cuda" and workers > gpus:
        found.append(
            f"policy.dtensor_cfg.num_workers: got {workers}; must be at most cluster.gpus_per_node x cluster.num_nodes "
            f"({gpus}). Lower it, or use null (one per GPU)."
        )
    per_engine = vllm.tensor_parallel_size * vllm.pipeline_parallel_size
    engines = cfg.num_generation_engines(device)
    if device == "cuda" and (engines < 1 or engines * per_engine > gpus):
        found.append(
            f"policy.generation.num_engines: got {engines} of {per_engine} GPUs each; must be at least 1, and fit the "
            f"{gpus} GPUs of the cluster. Lower it or policy.generation.vllm_cfg.tensor_parallel_size, or use null."
        )
    return found


def batch_problems(cfg: MasterConfig, device: Device) -> list[str]:
    """Check that each data-parallel worker's part of the global batch splits evenly into micro-batches.

    Args:
        cfg: The configuration.
        device: The device of the run.

    Returns:
        One message per problem; none for a batch that does not even split over the workers (see `layout_problems`).
    """
    policy = cfg.policy
    workers = max(1, cfg.policy_data_parallel_size(device))
    batch, micro = policy.train_global_batch_size, policy.train_micro_batch_size
    if batch % workers:
        return []
    if policy.dynamic_batching.enabled or policy.sequence_packing.enabled or batch % (workers * micro) == 0:
        return []
    return [
        f"policy.train_global_batch_size: got {batch}; must be a multiple of data-parallel workers x "
        f"policy.train_micro_batch_size ({workers} x {micro} = {workers * micro}). "
        f"Use {layout.next_multiple(batch, workers * micro)}, or a micro-batch size that divides {batch // workers}."
    ]


def draft_batch_problems(cfg: MasterConfig, device: Device) -> list[str]:
    """Check that each data-parallel worker's part of an update of a draft run splits evenly into micro-batches.

    Args:
        cfg: The configuration.
        device: The device of the run.

    Returns:
        One message per problem.
    """
    batch, ranks = cfg.draft_run_batch_size, max(1, cfg.policy_data_parallel_size(device))
    if batch % ranks == 0:
        return []
    return [
        f"policy.draft.train_global_batch_size: got {batch} (null = policy.train_global_batch_size, at most the "
        f"samples of a step); must be a multiple of the number of data-parallel workers ({ranks}). Use "
        f"{layout.next_multiple(batch, ranks)}, or change draft_run.num_prompts_per_step."
    ]


def length_problems(cfg: MasterConfig, policy_config: dict[str, Any]) -> list[str]:
    """Check the sequence lengths against the positions that the policy was made for.

    Args:
        cfg: The configuration.
        policy_config: Content of the policy's config.json.

    Returns:
        One message per problem.
    """
    limit = max_positions(policy_config)
    if limit is None:
        return []
    lengths = {
        "policy.max_total_sequence_length": cfg.policy.max_total_sequence_length,
        "policy.generation.vllm_cfg.max_model_len": cfg.policy.generation.vllm_cfg.max_model_len,
    }
    return [
        f"{key}: got {length}; must be at most {limit}, the max_position_embeddings of {cfg.policy.model_name}. "
        "Shorten the sequences, or take a policy with longer context."
        for key, length in lengths.items()
        if length > limit
    ]


def head_problems(cfg: MasterConfig, policy_config: dict[str, Any]) -> list[str]:
    """Check that tensor parallelism splits the policy's attention heads evenly.

    Args:
        cfg: The configuration.
        policy_config: Content of the policy's config.json.

    Returns:
        One message per problem.
    """
    text = policy_config.get("text_config", policy_config)
    sizes = {
        "policy.dtensor_cfg.tensor_parallel_size": cfg.policy.dtensor_cfg.tensor_parallel_size,
        "policy.generation.vllm_cfg.tensor_parallel_size": cfg.policy.generation.vllm_cfg.tensor_parallel_size,
    }
    heads = text.get("num_attention_heads")
    return [
        f"{key}: got {size}; must divide the {heads} attention heads of {cfg.policy.model_name}. Choose a divisor."
        for key, size in sizes.items()
        if isinstance(heads, int) and heads % size
    ]


def expert_problems(cfg: MasterConfig, policy_config: dict[str, Any]) -> list[str]:
    """Check that the policy has experts to spread, and that they split evenly.

    Args:
        cfg: The configuration.
        policy_config: Content of the policy's config.json.

    Returns:
        One message per problem.
    """
    experts = num_experts(policy_config)
    sizes = {
        "policy.dtensor_cfg.expert_parallel_size": cfg.policy.dtensor_cfg.expert_parallel_size,
        "policy.generation.vllm_cfg.expert_parallel_size": cfg.policy.generation.vllm_cfg.expert_parallel_size,
    }
    allowed = f"must divide the {experts} experts of each layer of" if experts else "must be 1, there are no experts in"
    return [
        f"{key}: got {size}; {allowed} {cfg.policy.model_name}. {'Choose a divisor' if experts else 'Set it to 1'}."
        for key, size in sizes.items()
        if size > 1 and (not experts or experts % size)
    ]


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
