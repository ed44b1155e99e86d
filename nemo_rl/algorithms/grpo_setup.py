"""Builds what a run is made of from a checked configuration; runs the loop, reports, tears down."""

from __future__ import annotations

import itertools
import json
import logging
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, cast

from nemo_rl.algorithms.config import ALGORITHM
from nemo_rl.algorithms.draft_export import export_final_draft
from nemo_rl.algorithms.grpo import DATALOADER_FILE, GRPOComponents, GRPOState, grpo_train
from nemo_rl.algorithms.loss import ClippedPGLossFn
from nemo_rl.algorithms.run_setup import (
    build_loader,
    conclude,
    pad_token_of,
    probe_throughput,
    start_clusters,
    start_engines,
    start_generation,
)
from nemo_rl.data.datasets import build_datasets
from nemo_rl.data.rollout_store import RolloutWriter
from nemo_rl.data.tokenizer import load_tokenizer
from nemo_rl.environments.registry import create_environment
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.utils.checkpoint import CheckpointManager, ResumePoint
from nemo_rl.utils.logger import Logger
from nemo_rl.utils.preflight_rollouts import store_identity
from nemo_rl.utils.progress import RunProgress
from nemo_rl.utils.run_summary import RunSummary
from nemo_rl.utils.timer import Timer

if TYPE_CHECKING:
    from nemo_rl.algorithms.config import MasterConfig
    from nemo_rl.algorithms.validation import ValidationResult
    from nemo_rl.experience.rollouts import Decoder
    from nemo_rl.utils.preflight import PreflightResult

log = logging.getLogger(__name__)


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
        resume = checkpointer.find_resume_point(algorithm=ALGORITHM, with_draft=not checked.restarts_draft)
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
        progress.status("writing the draft")
        exported = export_final_draft(components.policy, cfg, log_dir=logger.log_dir)
        if cfg.policy.generation.throughput_probe.enabled and cfg.policy.generation.speculative_config is not None:
            progress.status("measuring rollouts with and without speculation")
            _probe(components)
        return conclude(cfg, logger, progress, started=started, title="GRPO run", draft_dir=exported)


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
    policy_cluster, generation_cluster = start_clusters(cfg, checked, stack=stack, logger=logger)
    generation = start_generation(cfg, checked, generation_cluster, stack=stack)
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
    loader = build_loader(cfg, train, num_prompts=cfg.grpo.num_prompts_per_step, key="grpo.num_prompts_per_step")
    environment = create_environment(cfg.env)
    stack.callback(environment.shutdown)

    state = GRPOState()
    if resume is not None:
        progress.status(f"loading the checkpoint of step {resume.step}")
        policy.load_checkpoint(str(resume.path), restart_draft=checked.restarts_draft)
        loader.load_state_dict(json.loads((resume.path / DATALOADER_FILE).read_text(encoding="utf-8")))
        state = GRPOState.from_dict(resume.training_info)

    synchronizer = start_engines(
        cfg, checked, policy, generation, version=state.step, log_dir=logger.log_dir, progress=progress
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
        pad_token_id=pad_token_of(tokenizer),
        loader=loader,
        val_dataset=val,
        loss_fn=ClippedPGLossFn(cfg.loss_fn),
        logger=logger,
        timer=Timer(),
        checkpointer=checkpointer,
        state=state,
        on_step=progress.step,
        on_validation=on_validation,
        rollout_writer=build_rollout_writer(cfg, checked, resume),
    )


def build_rollout_writer(
    cfg: MasterConfig, checked: PreflightResult, resume: ResumePoint | None
) -> RolloutWriter | None:
    """Open the rollout store for writing; steps behind the resume point, which the run writes again, leave it.

    Args:
        cfg: the run's configuration.
        checked: what preflight found.
        resume: where the run continues, or None.

    Returns:
        None when nothing is recorded.
    """
    if cfg.rollout_store.mode == "off":
        return None
    identity = store_identity(
        cfg, model_dir=checked.model_dir, policy_config=checked.policy_config, draft_spec=checked.draft_spec
    )
    return RolloutWriter(
        cfg.rollout_store,
        identity,
        run=cfg.checkpointing.checkpoint_dir,
        resume_step=None if resume is None else resume.step,
    )


def _probe(c: GRPOComponents) -> None:
    """Measure what speculation is worth on held-out prompts, or on training prompts where there are none."""
    num_prompts = c.cfg.policy.generation.throughput_probe.num_prompts
    dataset = c.val_dataset if c.val_dataset is not None else c.loader.dataset
    examples = [e for e in itertools.islice(dataset, 4 * num_prompts) if not e.too_long][:num_prompts]
    probe_throughput(
        c.cfg,
        c.policy,
        c.generation,
        examples,
        version=c.state.step,
        pad_token_id=c.pad_token_id,
        logger=c.logger,
    )


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
        anew = ", the draft starts anew" if checked.restarts_draft else ""
        facts["resuming"] = f"{resume.path} (step {resume.step}){anew}"
    return facts
