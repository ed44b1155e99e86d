"""Builds what a draft run is made of from a checked configuration; runs the loop, reports, tears down."""

from __future__ import annotations

import itertools
import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_rl.algorithms.config import DRAFT_ALGORITHM
from nemo_rl.algorithms.draft_export import export_final_draft
from nemo_rl.algorithms.draft_run import (
    DraftRunComponents,
    DraftRunState,
    Evaluator,
    PromptSamples,
    RecordedSamples,
    draft_train,
)
from nemo_rl.algorithms.grpo import DATALOADER_FILE
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
from nemo_rl.data.rollout_store import RolloutReader
from nemo_rl.data.tokenizer import load_tokenizer
from nemo_rl.errors import ConfigError
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.utils.checkpoint import CheckpointManager, ResumePoint
from nemo_rl.utils.logger import Logger
from nemo_rl.utils.progress import RunProgress
from nemo_rl.utils.run_summary import RunSummary
from nemo_rl.utils.timer import Timer

if TYPE_CHECKING:
    from nemo_rl.algorithms.config import CheckpointingConfig, MasterConfig
    from nemo_rl.algorithms.draft_run import SampleSource
    from nemo_rl.data.datasets import PromptDataset, PromptExample
    from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration
    from nemo_rl.utils.preflight import PreflightResult

_RANKED_BY = ("val:acceptance_", "val:tokens_per_forward", "train:draft_", "train:vllm/spec_")
"""What a draft run measures of what checkpoints can be ranked by."""


def run(cfg: MasterConfig, checked: PreflightResult) -> RunSummary:
    """Train a draft beside a policy that stays as it is, from a checked configuration to its end.

    Everything that was started is taken down again on success, on an error and on Ctrl-C.

    Args:
        cfg: the run's configuration.
        checked: what :func:`nemo_rl.utils.preflight.preflight` found.

    Returns:
        The figures of the run.
    """
    started = time.monotonic()
    with ExitStack() as stack:
        ranking = ranking_of(cfg.checkpointing)
        checkpointer = CheckpointManager(ranking)
        resume = checkpointer.find_resume_point(algorithm=DRAFT_ALGORITHM)
        recorded = recorded_samples(cfg) if cfg.draft_run.source == "rollouts" else None
        num_steps = cfg.draft_run.max_num_steps
        progress = stack.enter_context(
            RunProgress(
                total_steps=num_steps if recorded is None else min(num_steps, recorded.num_steps),
                num_speculative_tokens=cfg.policy.generation.num_speculative_tokens,
                first_step=resume.step if resume else 0,
            )
        )
        progress.header("nemo_rl draft run", _header_facts(cfg, checked, resume, ranking))
        logger = stack.enter_context(
            Logger(
                cfg.logger,
                run_config=cfg.model_dump(mode="json", by_alias=True),
                resume_step=resume.step if resume else None,
            )
        )
        components = setup(
            cfg,
            checked,
            recorded,
            stack=stack,
            logger=logger,
            progress=progress,
            checkpointer=checkpointer,
            resume=resume,
        )
        checkpointer.start_iterations()
        progress.start()
        draft_train(components)
        progress.status("writing the draft")
        exported = export_final_draft(components.policy, cfg, log_dir=logger.log_dir)
        probe, evaluator = cfg.policy.generation.throughput_probe, components.evaluator
        if probe.enabled and evaluator is not None:
            progress.status("measuring rollouts with and without speculation")
            probe_throughput(
                cfg,
                components.policy,
                evaluator.generation,
                evaluator.examples[: probe.num_prompts],
                version=components.state.step,
                pad_token_id=evaluator.pad_token_id,
                logger=logger,
            )
        return conclude(cfg, logger, progress, started=started, title="Draft run", draft_dir=exported)


def ranking_of(checkpointing: CheckpointingConfig) -> CheckpointingConfig:
    """Replace a ranking that this kind of run cannot give (by reward, say) by none: the latest checkpoints are kept."""
    name = checkpointing.metric_name
    if name is None or name.startswith(_RANKED_BY):
        return checkpointing
    return checkpointing.model_copy(update={"metric_name": None})


def recorded_samples(cfg: MasterConfig) -> RecordedSamples:
    """Open the store of recorded rollouts."""
    return RecordedSamples(
        RolloutReader(Path(cfg.rollout_store.dir)),
        cfg.draft_run,
        seed=cfg.grpo.seed,
        batch_size=cfg.draft_run_step_size,
        max_length=cfg.policy.max_total_sequence_length,
    )


def setup(
    cfg: MasterConfig,
    checked: PreflightResult,
    recorded: RecordedSamples | None,
    *,
    stack: ExitStack,
    logger: Logger,
    progress: RunProgress,
    checkpointer: CheckpointManager,
    resume: ResumePoint | None,
) -> DraftRunComponents:
    """Start everything that a run needs and bring policy, draft and engines to the same weights.

    Engines are started when they have something to do: sample responses, or measure the acceptance of the draft.

    Args:
        cfg: the run's configuration.
        checked: what preflight found.
        recorded: where responses come from; None = they are sampled.
        stack: what is started is taken down when it closes, last started first.
        logger: receives the metrics.
        progress: shows the run.
        checkpointer: saves the run.
        resume: where to continue, or None.

    Returns:
        Components whose engines hold version ``state.step``.
    """
    is_served = cfg.policy.draft_served
    progress.status("starting Ray")
    policy_cluster, generation_cluster = start_clusters(cfg, checked, stack=stack, logger=logger)
    generation = None
    if recorded is None or is_served:
        generation = start_generation(cfg, checked, generation_cluster, stack=stack)
    progress.status("building the policy")
    policy = Policy(
        policy_cluster,
        cfg,
        draft_spec=checked.draft_spec,
        draft_dir=checked.draft_dir,
        init_reference_model=False,
        train_policy=False,
    )
    stack.callback(policy.shutdown)

    source: SampleSource | None = recorded
    evaluator = None
    if generation is not None:
        tokenizer = load_tokenizer(cfg.policy.tokenizer)
        train, val = build_datasets(
            cfg.data, cfg.env, tokenizer, max_input_len=cfg.data.max_input_seq_length, seed=cfg.grpo.seed
        )
        pad_token_id = pad_token_of(tokenizer)
        if source is None:
            source = _prompt_samples(cfg, generation, train, pad_token_id=pad_token_id)
        if is_served:
            examples = _evaluation_prompts(cfg, train if val is None else val)
            evaluator = Evaluator(generation, examples, seed=cfg.grpo.seed, pad_token_id=pad_token_id)
    assert source is not None, "without recorded samples there are engines"

    state = DraftRunState()
    if resume is not None:
        progress.status(f"loading the checkpoint of step {resume.step}")
        policy.load_checkpoint(str(resume.path))
        source.load_state_dict(json.loads((resume.path / DATALOADER_FILE).read_text(encoding="utf-8")))
        state = DraftRunState.from_dict(resume.training_info)

    synchronizer = None
    if generation is not None:
        synchronizer = start_engines(
            cfg, checked, policy, generation, version=state.step, log_dir=logger.log_dir, progress=progress
        )
        generation.finish_generation()  # the first step may need the devices for training
    return DraftRunComponents(
        cfg=cfg,
        policy=policy,
        source=source,
        synchronizer=synchronizer if is_served else None,
        evaluator=evaluator,
        logger=logger,
        timer=Timer(),
        checkpointer=checkpointer,
        state=state,
        on_step=progress.step,
        on_evaluation=progress.evaluation,
    )


def _prompt_samples(
    cfg: MasterConfig, generation: VllmGeneration, prompts: PromptDataset, *, pad_token_id: int
) -> PromptSamples:
    num_prompts = cfg.draft_run.num_prompts_per_step
    return PromptSamples(
        generation,
        build_loader(cfg, prompts, num_prompts=num_prompts, key="draft_run.num_prompts_per_step"),
        cfg.draft_run,
        seed=cfg.grpo.seed,
        pad_token_id=pad_token_id,
        is_draft_served=cfg.policy.draft_served,
    )


def _evaluation_prompts(cfg: MasterConfig, prompts: PromptDataset) -> list[PromptExample]:
    examples = list(itertools.islice((e for e in prompts if not e.too_long), cfg.draft_run.num_eval_prompts))
    if not examples:
        raise ConfigError(
            f"data.max_input_seq_length: got {cfg.data.max_input_seq_length}; no prompt to measure the acceptance with "
            "is that short. Raise it."
        )
    return examples


def _header_facts(
    cfg: MasterConfig, checked: PreflightResult, resume: ResumePoint | None, ranking: CheckpointingConfig
) -> dict[str, object]:
    k, is_recorded = cfg.policy.generation.num_speculative_tokens, cfg.draft_run.source == "rollouts"
    engines = 0 if is_recorded and not cfg.policy.draft_served else cfg.num_generation_engines(checked.device)
    facts: dict[str, object] = {
        "policy": f"{checked.model_dir} (stays as it is)",
        "draft": "none" if checked.draft_spec is None else checked.draft_spec.describe(),
        "speculation": f"K = {k}" if cfg.policy.draft_served else "off: the draft is not served, nothing is measured",
        "device": checked.device,
        "workers": f"{cfg.num_policy_workers(checked.device)} policy, {engines} vLLM",
        "samples": f"recorded in {cfg.rollout_store.dir}" if is_recorded else "responses to the training prompts",
        "batch": f"{cfg.draft_run_step_size} samples, {cfg.draft_run_batch_size} per update",
        "logs": str(Path(cfg.logger.log_dir)),
    }
    if cfg.checkpointing.enabled and ranking.metric_name != cfg.checkpointing.metric_name:
        facts["checkpoints"] = f"the latest are kept; {cfg.checkpointing.metric_name} is not measured without RL"
    if resume is not None:
        facts["resuming"] = f"{resume.path} (step {resume.step})"
    return facts
