"""Checks of files, devices and sizes before anything is started: no Ray, no engine, no torch.

`preflight` runs every check that the ones before it allow, gathers what is wrong and raises one `ConfigError`. What it
found on the way (device, directories, the resolved draft) is returned, so that nothing is looked up twice. A dry run
makes the same checks, but does without weights, tokenizers, GPUs and models that are not on this machine, and says so.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from nemo_rl.algorithms.config import ALGORITHM, DRAFT_ALGORITHM
from nemo_rl.algorithms.conflicts import draft_run_conflicts
from nemo_rl.distributed.device import cuda_obstacle, resolve_device
from nemo_rl.errors import ConfigError
from nemo_rl.models.generation.vllm.speculative import (
    SPEC_KEY,
    SUFFIX_PACKAGE,
    baseline_problems,
    merge_speculative_config,
)
from nemo_rl.utils.config_messages import join_problems
from nemo_rl.utils.model_files import (
    check_weights,
    find_local_model_dir,
    find_model_dir,
    has_weights,
    read_model_config,
)
from nemo_rl.utils.preflight_files import check_checkpoint, check_writable, output_dirs, prompt_problems
from nemo_rl.utils.preflight_rollouts import check_recorded, check_recording, store_identity
from nemo_rl.utils.preflight_sizes import (
    batch_problems,
    draft_batch_problems,
    expert_problems,
    head_problems,
    layout_problems,
    length_problems,
)

if TYPE_CHECKING:
    from nemo_rl.algorithms.config import Device, MasterConfig
    from nemo_rl.data.rollout_index import StoreIdentity
    from nemo_rl.models.automodel.draft.spec import DraftSpec

T = TypeVar("T")


@dataclass(frozen=True)
class PreflightResult:
    """What the checks found; everything that the set-up need not look up again."""

    device: Device
    """The device of the run."""

    model_dir: str
    """Directory of the policy's checkpoint; its hub name when a dry run did without."""

    policy_config: dict[str, Any]
    """Content of the policy's config.json; empty when a dry run did without."""

    draft_dir: str | None
    """Directory of the draft checkpoint to start from; None = no draft, or a new one."""

    draft_spec: DraftSpec | None
    """The resolved draft; None = the run has no draft."""

    restarts_draft: bool = False
    """The draft is built anew beside the policy of the checkpoint that the run continues."""


def preflight(cfg: MasterConfig, *, algorithm: str = ALGORITHM, left_out: list[str] | None = None) -> PreflightResult:
    """Check everything that needs files or devices but neither Ray nor an engine.

    Args:
        cfg: A valid configuration.
        algorithm: What the run trains: `ALGORITHM` or `DRAFT_ALGORITHM`.
        left_out: For a dry run: what cannot be looked at because it is not on this machine is no problem, but is added
            here in a sentence. None = everything must be there, hub models are downloaded.

    Returns:
        The device, the directories and the resolved draft.

    Raises:
        ConfigError: One message that lists every problem found.
    """
    problems: list[str] = []
    is_draft_run = algorithm == DRAFT_ALGORITHM
    if is_draft_run:
        problems += draft_run_conflicts(cfg)
    _gather(problems, lambda: _check_packages(cfg, left_out))
    device = _gather(problems, lambda: _device(cfg, left_out))
    if device is not None:
        problems += layout_problems(cfg, device) + batch_problems(cfg, device)
        if is_draft_run:
            problems += draft_batch_problems(cfg, device)
    num_problems = len(problems)
    model_dir = _gather(problems, lambda: _find(cfg.policy.model_name, "policy.model_name", left_out))
    policy_config, draft = None, _Draft(directory=None, spec=None)
    if model_dir is None and left_out is not None and len(problems) == num_problems:
        left_out.append(_not_cached(cfg.policy.model_name, key="policy.model_name"))
    if model_dir is not None:
        policy_config = _gather(problems, lambda: read_model_config(model_dir, key="policy.model_name"))
        if left_out is None or has_weights(model_dir):
            _gather(problems, lambda: check_weights(model_dir, key="policy.model_name"))
        else:
            left_out.append(f"policy.model_name: {cfg.policy.model_name} has no weights here; they were not checked.")
        _gather(problems, lambda: _check_tokenizer(cfg, left_out))
    if policy_config is not None:
        problems += length_problems(cfg, policy_config) + head_problems(cfg, policy_config)
        problems += expert_problems(cfg, policy_config) + _speculation_problems(cfg, device)
        if cfg.policy.draft_enabled:
            resolved = _gather(problems, lambda: _resolve_draft(cfg, policy_config, device=device, left_out=left_out))
            draft = resolved or draft
        check_store = _store_check(cfg, is_draft_run=is_draft_run)
        if check_store is not None and left_out is not None:
            left_out.append("rollout_store: whether it belongs to this policy and tokenizer was not checked.")
        elif check_store is not None and model_dir is not None:
            _gather(problems, lambda: _check_store(check_store, cfg, model_dir, policy_config, draft.spec))
    restarts = False
    problems += _draft_run_prompt_problems(cfg) if is_draft_run else prompt_problems(cfg)
    for key, directory in output_dirs(cfg).items():
        _gather(problems, lambda key=key, directory=directory: check_writable(directory, key=key))
    if not problems:
        restarts = bool(_gather(problems, lambda: _check_resume(cfg, draft.spec, left_out, algorithm=algorithm)))
    if problems or device is None:
        raise ConfigError(join_problems(list(dict.fromkeys(problems))))
    return PreflightResult(
        device=device,
        model_dir=cfg.policy.model_name if model_dir is None else str(model_dir),
        policy_config=policy_config or {},
        draft_dir=None if draft.directory is None else str(draft.directory),
        draft_spec=draft.spec,
        restarts_draft=restarts,
    )


@dataclass(frozen=True)
class _Draft:
    directory: Path | None
    spec: DraftSpec | None


def _describe(cfg: MasterConfig, spec: DraftSpec) -> dict[str, Any]:
    """Return what a checkpoint's draft must agree with for its weights and its optimizer's state to fit."""
    from nemo_rl.models.automodel.draft.metadata import describe, optimizer_layout

    described = describe(spec, vocab_ids=spec.vocab_ids, optimizer=optimizer_layout(cfg.policy, spec))
    if spec.architecture.has_vocab_map and spec.vocab_ids is None:
        del described["spec"]["vocab_ids"]  # in a pickle, which the workers read
    return described


def _gather(problems: list[str], check: Callable[[], T]) -> T | None:
    try:
        return check()
    except ConfigError as err:
        problems.extend(str(err).splitlines())
        return None


def _device(cfg: MasterConfig, left_out: list[str] | None) -> Device:
    obstacle = None if left_out is None or cfg.cluster.device != "cuda" else cuda_obstacle()
    if left_out is None or obstacle is None:
        return resolve_device(cfg.cluster.device)
    left_out.append(f"cluster.device: got 'cuda', and on this machine {obstacle}; a start needs GPUs.")
    return "cuda"


def _find(name: str, key: str, left_out: list[str] | None) -> Path | None:
    return find_model_dir(name, key=key) if left_out is None else find_local_model_dir(name, key=key)


def _not_cached(name: str, *, key: str) -> str:
    return (
        f"{key}: {name} is not in the local hub cache; nothing that depends on it was checked. A start downloads it "
        f"(`hf download {name} config.json` is enough for a dry run)."
    )


def _check_resume(
    cfg: MasterConfig, spec: DraftSpec | None, left_out: list[str] | None, *, algorithm: str
) -> bool | None:
    """Last, because looking into the directory also clears what an interrupted run left half written."""
    directory = Path(cfg.checkpointing.checkpoint_dir)
    if left_out is None:
        return check_checkpoint(cfg, algorithm=algorithm, draft=None if spec is None else _describe(cfg, spec))
    if cfg.checkpointing.enabled and any(directory.glob("*step_*")):
        left_out.append(
            f"checkpointing.checkpoint_dir: {directory} holds checkpoints; whether the run can continue from the "
            "latest one was not checked."
        )
    return None


def _speculation_problems(cfg: MasterConfig, device: Device | None) -> list[str]:
    """Check what the device and the installed packages decide about the engine's speculative decoding."""
    user = cfg.policy.generation.speculative_config
    found: list[str] = []
    _gather(found, lambda: merge_speculative_config(user, None))
    if user is None or cfg.policy.draft_served:
        return found
    if user.get("method") == "suffix" and importlib.util.find_spec(SUFFIX_PACKAGE) is None:
        found.append(
            f"{SPEC_KEY}.method: got 'suffix'; the package {SUFFIX_PACKAGE} must be installed. See "
            "docs/guides/draft-cotraining.md (baselines) for how to build it, or use method: ngram, which needs none."
        )
    return found + baseline_problems(user, device=device)


def _check_packages(cfg: MasterConfig, left_out: list[str] | None) -> None:
    needed = {"torch": "automodel", "nemo_automodel": "automodel", "vllm": "vllm"}
    optional = {"wandb": cfg.logger.wandb_enabled, "mlflow": cfg.logger.mlflow_enabled}
    needed |= {name: name for name, is_enabled in optional.items() if is_enabled}
    keys = {"wandb": "logger.wandb_enabled: got true", "mlflow": "logger.mlflow_enabled: got true"}
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing and left_out is not None:
        left_out.append(f"environment: {', '.join(missing)} not installed here; a start needs them.")
    elif missing:
        raise ConfigError(
            "\n".join(
                f"{keys.get(name, 'environment')}; the package {name} must be installed. "
                f'Run pip install -e ".[{needed[name]}]" (on CPU: make demo builds the environment).'
                for name in missing
            )
        )


def _check_tokenizer(cfg: MasterConfig, left_out: list[str] | None) -> None:
    name = cfg.policy.tokenizer.name
    directory = _find(name, "policy.tokenizer.name", left_out)
    has_one = directory is not None and any(
        (directory / file).is_file() for file in ("tokenizer.json", "tokenizer_config.json", "vocab.json")
    )
    if not has_one and left_out is not None:
        left_out.append(f"policy.tokenizer.name: {name} has no tokenizer here; token ids were not checked against it.")
    elif not has_one:
        raise ConfigError(
            f"policy.tokenizer.name: got {name!r}; must hold a tokenizer (tokenizer.json), and it holds none. Copy the "
            "tokenizer's files there, or name another directory."
        )


def _store_check(cfg: MasterConfig, *, is_draft_run: bool) -> Callable[[MasterConfig, StoreIdentity], None] | None:
    if is_draft_run:
        return check_recorded if cfg.draft_run.source == "rollouts" else None
    return None if cfg.rollout_store.mode == "off" else check_recording


def _check_store(
    check: Callable[[MasterConfig, StoreIdentity], None],
    cfg: MasterConfig,
    model_dir: Path,
    policy_config: dict[str, Any],
    draft_spec: DraftSpec | None,
) -> None:
    if cfg.rollout_store.features and draft_spec is None:
        return  # what keeps the draft from being resolved is reported already
    identity = store_identity(cfg, model_dir=model_dir, policy_config=policy_config, draft_spec=draft_spec)
    check(cfg, identity)


def _draft_run_prompt_problems(cfg: MasterConfig) -> list[str]:
    """Prompts are sampled from, or serve to measure acceptance; a run that does neither needs none."""
    if cfg.draft_run.source == "prompts":
        needed = cfg.draft_run.num_prompts_per_step
        return prompt_problems(cfg, needed=needed, needed_by="draft_run.num_prompts_per_step")
    return prompt_problems(cfg, needed=1) if cfg.policy.draft_served else []


def _resolve_draft(
    cfg: MasterConfig, policy_config: dict[str, Any], *, device: Device | None, left_out: list[str] | None
) -> _Draft:
    # The registry is torch-free up to here; imported late so that runs without a draft do not read it.
    from nemo_rl.models.automodel.draft.registry import resolve_spec

    draft, key = cfg.policy.draft, "policy.draft.model_name"
    directory, needs_weights = None, True
    if draft.model_name is not None and left_out is not None:
        directory = find_local_model_dir(draft.model_name, key=key)
        if directory is None:
            left_out.append(_not_cached(draft.model_name, key=key))
            return _Draft(directory=None, spec=None)
        needs_weights = has_weights(directory)
        if not needs_weights:
            left_out.append(f"{key}: {draft.model_name} has no weights here; tensors and vocabulary were not checked.")
    elif draft.model_name is not None:
        directory = find_model_dir(draft.model_name, key=key, allows_pickle=draft.trust_pickle)
    if directory is not None:
        draft = draft.model_copy(update={"model_name": str(directory)})
    if cfg.rollout_store.mode == "collect_only":
        draft = draft.model_copy(update={"loss_weight": 0.0})  # also a new draft is served as it is
    user = cfg.policy.generation.speculative_config
    spec = resolve_spec(
        draft,
        policy_config=policy_config,
        tokenizer_dir=_find(cfg.policy.tokenizer.name, "policy.tokenizer.name", left_out),
        k=cfg.policy.generation.num_speculative_tokens if draft.serve else None,
        max_model_len=cfg.policy.generation.vllm_cfg.max_model_len,
        dtype=cfg.policy.generation.vllm_cfg.precision,
        device=device,
        needs_weights=needs_weights,
        policy_name=cfg.policy.model_name,
    )
    if cfg.policy.draft_served:
        merge_speculative_config(user, spec.speculative_config(model_dir="the exported draft"))
    return _Draft(directory=directory, spec=spec)
