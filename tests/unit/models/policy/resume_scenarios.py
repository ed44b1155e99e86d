"""What the ranks of a `GlooPool` are asked to do in test_policy_resume.py."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from nemo_rl.algorithms.loss import ClippedPGLossFn
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.automodel.draft.metadata import optimizer_layout
from nemo_rl.models.policy.workers.dtensor_policy_worker_v2 import DTensorPolicyWorkerV2
from tests.unit.models.policy.scenarios import make_worker, shard_for

State = dict[str, Tensor]


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()


def everything(worker: DTensorPolicyWorkerV2) -> dict[str, State]:
    """Whole tensors of policy and draft, and of the optimizers of both, by parameter."""
    state: dict[str, State] = {
        "policy": {n: whole(p) for n, p in worker._trainer.model.named_parameters()},
        "draft": {} if worker._draft is None else {n: whole(t) for n, t in worker._draft.state_dict().items()},
    }
    for group in worker._groups():
        names = {id(p): n for n, p in group.module.named_parameters()}
        state[f"{group.name} optimizer"] = {
            f"{names[id(p)]}.{key}": whole(value)
            for p, own in group.optimizer.state.items()
            for key, value in own.items()
        }
    return state


def optimizer_names(config: Any, **worker_kwargs: Any) -> tuple[dict[str, Any] | None, dict[str, list[str]]]:
    """The layout as the driver computes it, and the parameter names of the real optimizer's groups."""
    worker = make_worker(config, **worker_kwargs)
    group = worker._trainer.draft.group
    names = {id(p): n for n, p in group.module.named_parameters()}
    real = [sorted(names[id(p)] for p in g["params"]) for g in group.optimizer.param_groups]
    return optimizer_layout(config.policy, worker._draft.spec), dict(zip(("matrices", "vectors"), real, strict=True))


def draw() -> list[float]:
    return [float(torch.rand(())), random.random(), float(np.random.rand())]


def run(
    config: Any,
    data: BatchedDataDict,
    *,
    steps: range = range(0),
    load_from: str | None = None,
    restart_draft: bool = False,
    save_to: str | None = None,
    **worker_kwargs: Any,
) -> dict[str, Any]:
    """Continue a checkpoint or not, look at everything, train, and leave a checkpoint or not."""
    worker = make_worker(config, **worker_kwargs)
    if load_from is not None:
        torch.manual_seed(999)
        worker.load_checkpoint(load_from, restart_draft=restart_draft)
    at_start = everything(worker)
    draws = draw() if save_to is None else []
    shard, loss_fn = shard_for(worker, data), ClippedPGLossFn(config.loss_fn)
    results = [worker.train(shard, loss_fn, step) for step in steps]
    at_end = everything(worker)
    if save_to is not None:
        worker.save_checkpoint(save_to)
        draws = draw()  # what whoever continues must draw first
    out = {"start": at_start, "draws": draws, "results": results, "end": at_end}
    draft = worker._draft
    if draft is not None:
        out["updates"] = draft.num_updates
        out["lr"] = None if worker._trainer.draft is None else worker._trainer.draft.group.lr
    return out


def vocabulary_in_use(
    config: Any, *, load_from: str, export_to: str, check_rows: bool, **worker_kwargs: Any
) -> dict[str, list[int]]:
    """Target ids as the loss, the export and (told by the policy's head rows) the refit have them after a resume."""
    worker = make_worker(config, **worker_kwargs)
    worker.load_checkpoint(load_from)
    draft, model = worker._draft, worker._trainer.model
    worker.export_draft(export_to)
    exported = load_file(Path(export_to) / "model.safetensors")
    d2t = exported["d2t"]
    used = {
        "loss": draft._vocab_ids.tolist(),
        "export": (torch.arange(len(d2t)) + d2t).tolist(),
        "mask": exported["t2d"].nonzero().flatten().tolist(),
        "checkpoint": (torch.arange(len(d2t)) + draft.state_dict()["d2t"]).tolist(),
    }
    if check_rows:
        head = whole(model.get_output_embeddings().weight)
        sent = {name.removeprefix("draft."): tensor for name, tensor in worker._draft_tensors()}["lm_head.weight"]
        used["refit"] = [int((head == row).all(dim=1).nonzero()[0]) for row in sent]
    return used
