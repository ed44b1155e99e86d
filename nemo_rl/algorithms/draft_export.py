"""The draft that a run leaves behind."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nemo_rl.utils.checkpoint import draft_dir_name

if TYPE_CHECKING:
    from nemo_rl.algorithms.config import MasterConfig
    from nemo_rl.models.policy.interfaces import PolicyInterface


def export_final_draft(policy: PolicyInterface, cfg: MasterConfig, *, log_dir: Path) -> Path | None:
    """Write the draft of a finished run, in every layout that the configuration asks for.

    Args:
        policy: holds the draft.
        cfg: the run's configuration.
        log_dir: `draft/` and `draft_<layout>/` are written below it.

    Returns:
        The directory that the engine loads; None = the run has no draft.
    """
    if not cfg.policy.draft_enabled:
        return None
    for layout in dict.fromkeys(("native", *cfg.policy.draft.export_layouts)):
        policy.export_draft(str((log_dir / draft_dir_name(layout)).absolute()), layout=layout)
    policy.offload_after_refit()
    return log_dir / draft_dir_name("native")
