"""Optimizer groups and schedules."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nemo_rl.errors import ConfigError
from nemo_rl.models.automodel.setup import build_optimizer_group, build_scheduler
from nemo_rl.models.policy.config import SchedulerEntry
from nemo_rl.models.policy.layout import check_layout
from tests.unit.models.policy import scenarios
from tests.unit.models.policy.scenarios import make_config


def test_norms_and_biases_are_not_decayed(pools, model_dir):
    decayed, kept, _ = pools[1].run(scenarios.group_layout, make_config(model_dir))[0]
    assert decayed["weight_decay"] == 0.1
    assert kept["weight_decay"] == 0.0
    assert all("norm" in name for name in kept["names"])
    assert not any("norm" in name for name in decayed["names"])
    assert len(decayed["names"]) + len(kept["names"]) == 2 * 11 + 3  # two layers; embedding, final norm, head


def test_schedules_hand_over_at_the_milestones(pools, model_dir):
    schedule = [
        {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.5, "total_iters": 2}},
        {"name": "torch.optim.lr_scheduler.ConstantLR", "kwargs": {"factor": 1.0, "total_iters": 10}},
        {"milestones": [2]},
    ]
    *_, last = pools[1].run(scenarios.group_layout, make_config(model_dir, scheduler=schedule))[0]
    assert last["rates"] == pytest.approx([0.005, 0.0075, 0.01, 0.01, 0.01])


def build(**kwargs):
    return build_optimizer_group(
        "policy",
        nn.Linear(2, 2),
        **{"optimizer": "torch.optim.SGD", "kwargs": {"lr": 0.1}, "schedule": None, "max_grad_norm": 1.0, **kwargs},
    )


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"optimizer": "torch.optim.AdamWW"}, ["policy.optimizer.name", "AdamWW"]),
        ({"optimizer": "no_such_package.X"}, ["policy.optimizer.name", "no_such_package"]),
        ({"kwargs": {"lr": 0.1, "bettas": 1}}, ["policy.optimizer.kwargs", "bettas"]),
        ({"kwargs": {"lr": -1.0}}, ["policy.optimizer.kwargs", "-1.0"]),
        (
            {"schedule": [SchedulerEntry(name="torch.optim.lr_scheduler.LinearLR", kwargs={"warmup": 3})]},
            ["policy.scheduler[0].kwargs", "warmup"],
        ),
    ],
    ids=["class", "package", "argument", "value", "schedule"],
)
def test_wrong_optimizer_is_named(kwargs, words):
    with pytest.raises(ConfigError) as info:
        build(**kwargs)
    assert all(word in str(info.value) for word in words)


@pytest.mark.parametrize(
    ("dtensor", "num_workers", "key"),
    [
        ({"context_parallel_size": 2}, 2, "context_parallel_size: got 2"),
        ({"tensor_parallel_size": 2}, 3, "tensor_parallel_size: got 2"),
        ({}, 3, "train_global_batch_size: got 8"),
    ],
    ids=["context-parallel", "tensor-parallel", "batch"],
)
def test_layouts_that_cannot_be_formed_are_refused(model_dir, dtensor, num_workers, key):
    config = make_config(model_dir, dtensor_cfg=dtensor)
    with pytest.raises(ConfigError, match=key):
        check_layout(config.policy, num_workers=num_workers)


def test_optimizer_without_weight_decay_argument():
    group = build(optimizer="torch.optim.Rprop", kwargs={"lr": 0.1})
    assert isinstance(group.optimizer, torch.optim.Rprop)
    assert build_scheduler(group.optimizer, None, key="policy") is None
    assert group.lr == 0.1
