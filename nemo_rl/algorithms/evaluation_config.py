"""What an evaluation makes of the configuration of a training run; nothing here needs torch."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nemo_rl.algorithms.conflicts import DRAFT_TRAINING_KEYS
from nemo_rl.errors import ConfigError

if TYPE_CHECKING:
    from nemo_rl.algorithms.config import MasterConfig

__all__ = ["PLAIN", "SPECULATIVE", "evaluation_tree", "modes_of"]

PLAIN, SPECULATIVE = "plain", "speculative"
"""Ways of decoding."""

_AS_IT_IS = {"static": True, "serve": True}
_UNREAD_DRAFT_KEYS = (*DRAFT_TRAINING_KEYS, "loss_weight", "restart")


def evaluation_tree(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Turn the configuration of a training run into that of an evaluation.

    The draft of `policy.draft.model_name` is served as it is; a new one has nothing to propose and is left out, with
    its K. Nothing is trained or saved, so what only training reads goes.

    Args:
        tree: As `load_config` gives it.

    Returns:
        A new tree.
    """
    out = copy.deepcopy(dict(tree))
    policy = out.setdefault("policy", {})
    draft = policy.get("draft", {})
    if draft.get("enabled") and draft.get("model_name") is not None:
        policy["draft"] = {key: value for key, value in draft.items() if key not in _UNREAD_DRAFT_KEYS} | _AS_IT_IS
    elif draft.get("enabled"):
        policy["draft"] = {}
        policy.get("generation", {}).get("vllm_kwargs", {}).pop("speculative_config", None)
    out.setdefault("checkpointing", {})["enabled"] = False
    return out


def modes_of(cfg: MasterConfig, *, only: str | None) -> list[str]:
    """Which ways of decoding to evaluate.

    Args:
        cfg: The configuration.
        only: One of them; None = all that the configuration allows.

    Raises:
        ConfigError: Speculation is asked for, and nothing proposes.
    """
    speculates = cfg.policy.generation.speculative_config is not None
    if only == SPECULATIVE and not speculates:
        raise ConfigError(
            "--only: got speculative; must be plain, the configuration has no draft to serve. Set policy.draft.enabled "
            "and policy.draft.model_name (the `draft` directory of a checkpoint), or a method that needs none "
            "(policy.generation.vllm_kwargs.speculative_config)."
        )
    return [mode for mode in (PLAIN, *([SPECULATIVE] if speculates else [])) if only in (None, mode)]
