"""Checks of the rollout store: may this run add to it, can a draft be trained from it. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl.data.rollout_index import (
    KEY,
    FeatureLayout,
    StoreIdentity,
    policy_fingerprint,
    read_index,
    reading_problems,
    require_index,
    writing_problems,
)
from nemo_rl.data.tokenizer_identity import tokenizer_fingerprint
from nemo_rl.errors import CheckpointError, ConfigError
from nemo_rl.utils.model_files import find_model_dir
from nemo_rl.utils.preflight_files import check_writable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nemo_rl.algorithms.config import MasterConfig
    from nemo_rl.models.automodel.draft.spec import DraftSpec


def store_identity(
    cfg: MasterConfig, *, model_dir: str | Path, policy_config: Mapping[str, Any], draft_spec: DraftSpec | None
) -> StoreIdentity:
    """What rollouts of this run have in common.

    Args:
        cfg: The configuration.
        model_dir: The policy's checkpoint.
        policy_config: Content of its config.json.
        draft_spec: The draft, whose features are recorded with `rollout_store.features`.
    """
    features = None
    if cfg.rollout_store.features and draft_spec is not None:
        arch = draft_spec.architecture
        features = FeatureLayout(ids=arch.feature_ids, size=arch.target_hidden_size, dtype=cfg.policy.precision)
    tokenizer_dir = find_model_dir(cfg.policy.tokenizer.name, key="policy.tokenizer.name")
    text = policy_config if "vocab_size" in policy_config else policy_config["text_config"]
    return StoreIdentity(
        vocab_size=text["vocab_size"],
        tokenizer=tokenizer_fingerprint(tokenizer_dir) or "",
        policy=policy_fingerprint(Path(model_dir)),
        policy_name=cfg.policy.model_name,
        features=features,
    )


def check_recording(cfg: MasterConfig, identity: StoreIdentity) -> None:
    """Check that a run can add its rollouts to the store.

    Args:
        cfg: The configuration.
        identity: Of its rollouts.

    Raises:
        ConfigError: The directory cannot be written, the store is damaged, or its samples are of another kind.
    """
    directory = cfg.rollout_store.dir
    check_writable(Path(directory), key=KEY)
    try:
        index = read_index(Path(directory))
    except CheckpointError as err:
        raise ConfigError(f"{KEY}: {err}") from err
    problems = [] if index is None else writing_problems(index, identity, directory=directory)
    if problems:
        raise ConfigError("\n".join(problems))


def check_recorded(cfg: MasterConfig, identity: StoreIdentity) -> None:
    """Check that a draft can be trained from the store with this policy.

    Args:
        cfg: The configuration.
        identity: What this run would record itself.

    Raises:
        ConfigError: There is no store, it is damaged or too small, or its samples do not fit policy or draft.
    """
    directory = cfg.rollout_store.dir
    problems = reading_problems(
        require_index(directory),
        identity,
        directory=directory,
        with_features=cfg.rollout_store.features,
        num_samples=cfg.draft_run_step_size,
    )
    if problems:
        raise ConfigError("\n".join(problems))
