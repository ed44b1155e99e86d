"""Schema of optimizers and learning-rate schedules; shared by the policy and the draft."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field, PositiveInt, StringConstraints, model_validator

from nemo_rl.utils.schema import ConfigModel, FreeForm

ImportPath = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$")]
"""Dotted path of a class, e.g. ``torch.optim.AdamW``."""


class OptimizerConfig(ConfigModel):
    """One optimizer: a class and its arguments."""

    name: ImportPath = "torch.optim.AdamW"
    """Dotted path of the optimizer class."""

    kwargs: FreeForm = Field(
        default_factory=lambda: {
            "lr": 5.0e-6,
            "weight_decay": 0.01,
            "betas": [0.9, 0.999],
            "eps": 1.0e-8,
            "foreach": False,
            "fused": False,
        }
    )
    """Arguments of the optimizer class. Giving this block replaces the whole default block."""


class SchedulerEntry(ConfigModel):
    """One learning-rate schedule, or the steps at which the list moves on to its next schedule."""

    name: ImportPath | None = None
    """Dotted path of the scheduler class."""

    kwargs: FreeForm = Field(default_factory=dict)
    """Arguments of the scheduler class."""

    milestones: Annotated[tuple[PositiveInt, ...], Field(strict=False)] | None = None
    """Optimizer steps at which the next schedule of the list takes over."""

    @model_validator(mode="after")
    def _is_schedule_or_milestones(self) -> SchedulerEntry:
        if (self.name is None) == (self.milestones is None):
            raise ValueError("must have either `name` (with `kwargs`) or `milestones`")
        return self


def _check_milestones(entries: tuple[SchedulerEntry, ...]) -> tuple[SchedulerEntry, ...]:
    schedules = [entry for entry in entries if entry.name is not None]
    milestones = [entry.milestones for entry in entries if entry.milestones is not None]
    if not schedules:
        raise ValueError("must name at least one scheduler class; use null for a constant learning rate")
    if len(milestones) > 1:
        raise ValueError("must hold at most one `milestones` entry")
    steps = milestones[0] if milestones else ()
    if len(steps) != len(schedules) - 1 or list(steps) != sorted(set(steps)):
        raise ValueError(
            f"{len(schedules)} schedules need {len(schedules) - 1} increasing milestones, got {list(steps)}"
        )
    return entries


def default_policy_scheduler() -> Any:
    """Default schedule of the policy: linear warm-up over 50 optimizer steps, then constant.

    Returns:
        Raw entries; the field that uses them turns them into `SchedulerEntry`.
    """
    return (
        {
            "name": "torch.optim.lr_scheduler.LinearLR",
            "kwargs": {"start_factor": 0.1, "end_factor": 1.0, "total_iters": 50},
        },
        {
            "name": "torch.optim.lr_scheduler.ConstantLR",
            "kwargs": {"factor": 1.0, "total_iters": 10000000000},
        },
        {"milestones": [50]},
    )


SchedulerConfig = Annotated[tuple[SchedulerEntry, ...], Field(strict=False), AfterValidator(_check_milestones)]
"""Schedules run one after the other; one `milestones` entry says when each hands over to the next."""
