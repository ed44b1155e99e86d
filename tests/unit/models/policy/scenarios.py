"""What the ranks of a `GlooPool` are asked to do: real workers on tiny policies, results as plain tensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from nemo_rl.algorithms.config import RolloutStoreConfig
from nemo_rl.algorithms.loss import ClippedPGLossFn, LossOutput
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.policy.results import BatchResult, fold_results
from nemo_rl.models.policy.sharding import deal_by_length
from nemo_rl.models.policy.workers.dtensor_policy_worker_v2 import DTensorPolicyWorkerV2
from nemo_rl.utils.config import build_master_config

LENGTHS = (23, 5, 17, 9, 12, 3, 20, 14)
TEMPERATURE = 0.7


def make_config(model_dir: str, **policy: Any) -> Any:
    """Configuration of a tiny CPU run; `policy` is merged over `policy`, its sections that are none of it elsewhere."""
    loss_fn = policy.pop("loss_fn", {})
    own = {name: policy.pop(name) for name in ("draft_run", "rollout_store") if name in policy}
    tree = {
        **own,
        "grpo": {"num_prompts_per_step": 4, "num_generations_per_prompt": 2, "seed": 3},
        "loss_fn": {"reference_policy_kl_penalty": 0.0, **loss_fn},
        "cluster": {"device": "cpu"},
        "policy": {
            "model_name": model_dir,
            "precision": "float32",
            "train_global_batch_size": len(LENGTHS),
            "train_micro_batch_size": 2,
            "logprob_batch_size": 3,
            "max_total_sequence_length": 32,
            "optimizer": {
                "name": "torch.optim.AdamW",
                "kwargs": {"lr": 1e-2, "weight_decay": 0.1, "betas": [0.9, 0.95], "eps": 1e-4, "foreach": False},
            },
            "scheduler": None,
            "generation": {"temperature": TEMPERATURE},
            **policy,
        },
    }
    return build_master_config(tree)


def make_batch(
    *,
    lengths: tuple[int, ...] = LENGTHS,
    width: int = 24,
    seed: int = 0,
    vocab: int = 256,
    masked: tuple[int, ...] = (),
) -> BatchedDataDict:
    """A training batch of unequal lengths.

    Args:
        lengths: tokens per sample; the first third is the prompt.
        width: padded length.
        seed: of the contents.
        vocab: ids are below this.
        masked: samples without supervised tokens.
    """
    g = torch.Generator().manual_seed(seed)
    n = len(lengths)
    ids = torch.randint(0, vocab, (n, width), generator=g)
    columns = torch.arange(width)[None]
    length = torch.tensor(lengths)
    is_token = columns < length[:, None]
    token_mask = is_token & (columns >= (length[:, None] + 2) // 3)
    sample_mask = torch.ones(n)
    sample_mask[list(masked)] = 0.0
    noise = lambda scale: torch.randn(n, width, generator=g) * scale * token_mask  # noqa: E731
    base = -2.0 * token_mask.float() + noise(0.3)
    return BatchedDataDict(
        {
            "input_ids": ids * is_token,
            "input_lengths": length,
            "token_mask": token_mask.float(),
            "sample_mask": sample_mask,
            "sample_index": torch.arange(n),
            "generation_logprobs": base,
            "prev_logprobs": base + noise(0.05),
            "reference_policy_logprobs": base + noise(0.1),
            "advantages": torch.randn(n, 1, generator=g) * token_mask,
        }
    )


def make_worker(config: Any, **kwargs: Any) -> DTensorPolicyWorkerV2:
    """A worker in this process, which already belongs to a process group."""
    worker = DTensorPolicyWorkerV2(config, **kwargs)
    worker.setup()
    return worker


def full_state(worker: DTensorPolicyWorkerV2) -> dict[str, Tensor]:
    """Whole parameters of the policy."""
    return {name: tensor.clone() for name, tensor in worker._wire_tensors()}


def shard_for(worker: DTensorPolicyWorkerV2, data: BatchedDataDict, *, is_dealt: bool = True) -> BatchedDataDict:
    """This rank's samples, as `Policy` deals them, or contiguous ones."""
    parallel = worker._parallel
    rank = torch.distributed.get_rank(parallel.dp_group)
    if not is_dealt:
        part = data.size // parallel.dp_size
        return data.slice(rank * part, (rank + 1) * part)
    batch = worker._config.policy.smallest_train_batch_size
    return data.select_indices(
        deal_by_length(data["input_lengths"], num_ranks=parallel.dp_size, batch_size=batch)[rank]
    )


@dataclass
class TrainRecord:
    """What a training run leaves behind."""

    results: list[list[BatchResult]]
    state: dict[str, Tensor]
    logprobs: Tensor


def train_steps(
    config: Any,
    data: BatchedDataDict,
    *,
    num_steps: int = 2,
    is_dealt: bool = True,
    worker_kwargs: dict[str, Any] | None = None,
) -> TrainRecord:
    """Train on the same batch a few times; log-probabilities before each step, as a run computes them."""
    worker = make_worker(config, **(worker_kwargs or {}))
    results, loss_fn = [], ClippedPGLossFn(config.loss_fn)
    shard = shard_for(worker, data, is_dealt=is_dealt)
    logprobs = worker.get_logprobs(shard)
    for step in range(num_steps):
        results.append(worker.train(shard, loss_fn, step))
        worker.get_logprobs(shard)
    return TrainRecord(results, full_state(worker), logprobs)


def fold(records: list[TrainRecord], *, tp: int = 1) -> list[dict[str, Any]]:
    """Per step, what `Policy.train` would return."""
    leaders = records[::tp]
    return [fold_results([r.results[i] for r in leaders]) for i in range(len(leaders[0].results))]


def layout_of(config: Any) -> dict[str, str]:
    """Parameter name to how it is stored, to prove that sharding took place."""
    worker = make_worker(config)
    return {
        n: str(p.placements) if isinstance(p, DTensor) else "plain" for n, p in worker._trainer.model.named_parameters()
    }


@dataclass(frozen=True)
class PoisonedLoss:
    """The policy loss, but not finite for the sample with the given index."""

    inner: ClippedPGLossFn
    sample_index: int
    value: float

    def __call__(self, curr_logprobs: Tensor, data: BatchedDataDict, **kwargs: Any) -> LossOutput:
        out = self.inner(curr_logprobs, data, **kwargs)
        if (data["sample_index"] == self.sample_index).any() and data["sample_mask"].sum() > 0:
            return LossOutput(out.loss * self.value, out.metrics)
        return out


def train_poisoned(config: Any, data: BatchedDataDict, *, sample_index: int, value: float) -> dict[str, Any]:
    """A step whose loss is not finite on one rank, then a good one."""
    worker = make_worker(config)
    before, shard = full_state(worker), shard_for(worker, data)
    loss_fn = ClippedPGLossFn(config.loss_fn)
    bad = worker.train(shard, PoisonedLoss(loss_fn, sample_index, value), 0)
    after_bad = full_state(worker)
    good = worker.train(shard, loss_fn, 1)
    return {"bad": bad, "good": good, "before": before, "after_bad": after_bad, "after_good": full_state(worker)}


def reference_after_training(config: Any, data: BatchedDataDict) -> dict[str, Tensor]:
    """Log-probabilities of policy and reference, before and after training."""
    worker = make_worker(config, init_reference_model=True)
    shard, loss_fn = shard_for(worker, data), ClippedPGLossFn(config.loss_fn)
    out = {"policy_0": worker.get_logprobs(shard), "reference_0": worker.get_reference_policy_logprobs(shard)}
    worker.train(shard, loss_fn, 0)
    trained = full_state(worker)
    out |= {"policy_1": worker.get_logprobs(shard), "reference_1": worker.get_reference_policy_logprobs(shard)}
    out["restored"] = torch.tensor([torch.equal(v, full_state(worker)[k]) for k, v in trained.items()])
    # Twice, with another training step between: the swap must reach the weights that the next forward uses.
    worker.train(shard, loss_fn, 1)
    out["reference_2"] = worker.get_reference_policy_logprobs(shard)
    return out


def logprobs(config: Any, data: BatchedDataDict) -> Tensor:
    """Log-probabilities of this rank's contiguous samples; the call leaves no trace."""
    worker = make_worker(config)
    model = worker._trainer.model
    shard = shard_for(worker, data, is_dealt=False)
    out = worker.get_logprobs(shard)
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    return out


def save_then_continue(
    config: Any, data: BatchedDataDict, directory: str, *, num_before: int, **worker_kwargs: Any
) -> dict[str, Any]:
    """Train, save, draw random numbers, train on: what a resumed run must repeat."""
    worker = make_worker(config, **worker_kwargs)
    shard, loss_fn = shard_for(worker, data), ClippedPGLossFn(config.loss_fn)
    for step in range(num_before):
        worker.train(shard, loss_fn, step)
    worker.save_checkpoint(directory)
    worker.export_hf(f"{directory}/hf")
    return {"saved": full_state(worker), **_continue(worker, shard, loss_fn, num_before)}


def load_then_continue(
    config: Any, data: BatchedDataDict, directory: str, *, num_before: int, **worker_kwargs: Any
) -> dict[str, Any]:
    """Load what `save_then_continue` saved and train on."""
    worker = make_worker(config, **worker_kwargs)
    torch.manual_seed(999)
    worker.load_checkpoint(directory)
    shard, loss_fn = shard_for(worker, data), ClippedPGLossFn(config.loss_fn)
    return {"saved": full_state(worker), **_continue(worker, shard, loss_fn, num_before)}


def _continue(worker: DTensorPolicyWorkerV2, shard: BatchedDataDict, loss_fn: Any, step: int) -> dict[str, Any]:
    import random

    import numpy as np

    optimizer = worker._trainer.policy_group.optimizer
    steps = sorted({float(s["step"]) for s in optimizer.state.values()})
    draws = [float(torch.rand(())), random.random(), float(np.random.rand())]
    results = [worker.train(shard, loss_fn, step + i) for i in range(2)]
    return {"results": results, "final": full_state(worker), "draws": draws, "adam_steps": steps}


def try_load(config: Any, directory: str, **worker_kwargs: Any) -> str:
    """Message of the CheckpointError that loading raises."""
    from nemo_rl.errors import CheckpointError

    worker = make_worker(config, **worker_kwargs)
    try:
        worker.load_checkpoint(directory)
    except CheckpointError as err:
        return str(err)
    raise AssertionError("the checkpoint was loaded")


def gather(config: Any, *, version: int = 5, **worker_kwargs: Any) -> Any:
    """The refit payload of rank 0."""
    return make_worker(config, **worker_kwargs).gather_weights(version)


def group_layout(config: Any) -> list[dict[str, Any]]:
    """Parameter groups of the policy's optimizer, and the learning rates of its first steps."""
    worker = make_worker(config)
    group = worker._trainer.policy_group
    names = {id(p): n for n, p in worker._trainer.model.named_parameters()}
    out = [
        {"names": [names[id(p)] for p in g["params"]], "weight_decay": g["weight_decay"]}
        for g in group.optimizer.param_groups
    ]
    rates = []
    for _ in range(5):
        rates.append(group.lr)
        group.optimizer.step()
        if group.scheduler is not None:
            group.scheduler.step()
    return [*out, {"rates": rates}]


# -- with a draft ----------------------------------------------------------------------------------------------------


def draft_spec_of(config: Any, *, k: int | None = 3) -> Any:
    """The draft of a configuration, resolved as the driver does."""
    import json
    from pathlib import Path

    from nemo_rl.models.automodel.draft.registry import resolve_spec

    policy_config = json.loads((Path(config.policy.model_name) / "config.json").read_text())
    return resolve_spec(config.policy.draft, policy_config=policy_config, k=k, max_model_len=32, dtype="float32")


def train_with_broken_draft(config: Any, data: BatchedDataDict, *, spec: Any) -> dict[str, Any]:
    """Three steps; in the second one a weight of the draft is infinite, so that its loss is not finite."""
    worker = make_worker(config, draft_spec=spec)
    shard, loss_fn = shard_for(worker, data), ClippedPGLossFn(config.loss_fn)
    results = [worker.train(shard, loss_fn, 0)]
    weight = next(p for p in worker._draft.module.parameters() if p.ndim == 2)
    local = weight.detach().to_local()
    saved, state = local.clone(), full_state(worker)
    local.fill_(float("inf"))
    results.append(worker.train(shard, loss_fn, 1))
    local.copy_(saved)
    state_after = full_state(worker)
    results.append(worker.train(shard, loss_fn, 2))
    return {"results": results, "before": state, "after": state_after, "final": full_state(worker)}


def train_with_poisoned_policy(config: Any, data: BatchedDataDict, *, spec: Any) -> TrainRecord:
    """One step whose policy loss is not finite."""
    worker = make_worker(config, draft_spec=spec)
    loss_fn = PoisonedLoss(ClippedPGLossFn(config.loss_fn), 0, float("nan"))
    shard = shard_for(worker, data)
    return TrainRecord([worker.train(shard, loss_fn, 0)], full_state(worker), torch.zeros(0))


@dataclass
class DraftRecord:
    """What happened to a draft over some steps of one worker.

    Attributes:
        results: of each step.
        states: whole tensors of the draft before the first step and after each.
        calls: per step, how often the draft's plan, capture and module were used.
        policy: whole parameters of the policy at the end.
        sent: names of the draft tensors that a refit sends at the end, announced and streamed.
        trainable: names of the draft's parameters that require a gradient.
        optimized: per group of the draft's optimizer, the names in it and its weight decay; None = no optimizer.
    """

    results: list[list[BatchResult]]
    states: list[dict[str, Tensor]]
    calls: list[dict[str, int]]
    policy: dict[str, Tensor]
    sent: tuple[list[str], list[str]]
    trainable: list[str]
    optimized: list[tuple[list[str], float]] | None


def train_and_watch(
    config: Any,
    data: BatchedDataDict,
    *,
    spec: Any,
    steps: range,
    draft_dir: str | None = None,
    load_from: str | None = None,
    save_to: str | None = None,
) -> DraftRecord:
    """Run steps of a worker with a draft, continuing a checkpoint or leaving one if asked to."""
    worker = make_worker(config, draft_spec=spec, draft_dir=draft_dir)
    if load_from is not None:
        worker.load_checkpoint(load_from)
    draft, shard, loss_fn = worker._draft, shard_for(worker, data), ClippedPGLossFn(config.loss_fn)
    counts = {"plan": 0, "capture": 0, "module": 0}
    for name in ("begin_global_batch", "capture"):
        _count_calls(draft, name, counts, key={"begin_global_batch": "plan"}.get(name, name))
    draft.module.register_forward_pre_hook(lambda *_: counts.update(module=counts["module"] + 1))
    results, states, calls = [], [_whole(draft)], []
    for step in steps:
        before = dict(counts)
        results.append(worker.train(shard, loss_fn, step))
        worker.get_logprobs(shard)
        calls.append({key: counts[key] - before[key] for key in counts})
        states.append(_whole(draft))
    if save_to is not None:
        worker.save_checkpoint(save_to)
    final = full_state(worker)
    training = worker._trainer.draft
    names = {id(p): n for n, p in draft.module.named_parameters()}
    return DraftRecord(
        results,
        states,
        calls,
        policy={name: tensor for name, tensor in final.items() if not name.startswith("draft.")},
        sent=(
            list(worker.refit_manifest().draft),
            [name.removeprefix("draft.") for name in final if name.startswith("draft.")],
        ),
        trainable=[name for name, p in draft.module.named_parameters() if p.requires_grad],
        optimized=None
        if training is None
        else [
            ([names[id(p)] for p in group["params"]], group["weight_decay"])
            for group in training.group.optimizer.param_groups
        ],
    )


@dataclass
class AloneRecord:
    """What training a draft alone leaves behind.

    Attributes:
        results: of each step.
        state: whole parameters of policy and draft at the end.
        num_forwards: how often the policy was run.
        grads: names of the policy's parameters that have a gradient.
        groups: names of the optimizers.
    """

    results: list[list[BatchResult]]
    state: dict[str, Tensor]
    num_forwards: int
    grads: list[str]
    groups: list[str]


def train_draft_alone(
    config: Any,
    data: BatchedDataDict,
    *,
    spec: Any,
    steps: range,
    load_from: str | None = None,
    save_to: str | None = None,
) -> AloneRecord:
    """Run steps of a worker whose policy stays as it is, continuing a checkpoint or leaving one if asked to."""
    worker = make_worker(config, draft_spec=spec, train_policy=False)
    if load_from is not None:
        torch.manual_seed(999)
        worker.load_checkpoint(load_from)
    parallel, size = worker._parallel, config.draft_run_batch_size
    rank = torch.distributed.get_rank(parallel.dp_group)
    hands = deal_by_length(data["input_lengths"], num_ranks=parallel.dp_size, batch_size=size)
    forwards: list[None] = []
    worker._trainer.model.register_forward_hook(lambda *_: forwards.append(None))
    results = [worker.train_draft(data.select_indices(hands[rank]), step) for step in steps]
    if save_to is not None:
        worker.save_checkpoint(save_to)
    grads = [name for name, p in worker._trainer.model.named_parameters() if p.grad is not None]
    groups = [group.name for group in worker._groups()]
    return AloneRecord(results, full_state(worker), len(forwards), grads, groups)


def record_features(config: Any, data: BatchedDataDict, directory: str, *, spec: Any) -> Any:
    """Run the policy over this rank's samples and write what a draft reads."""
    worker = make_worker(config, draft_spec=spec, train_policy=False)
    return worker.collect_features(shard_for(worker, data, is_dealt=False), directory, "run_01_step_000001")


def record_and_replay(config: Any, data: BatchedDataDict, directory: str, *, spec: Any) -> dict[str, Any]:
    """Record this rank's samples, the last one as padding; then compare the stand-in's logits with the policy's.

    Returns:
        The rank's report, per micro-batch of the same grouping whether logits are equal, and the samples' lengths.
    """
    from nemo_rl.data.rollout_index import FeatureLayout, StoreIdentity
    from nemo_rl.data.rollout_store import RolloutReader, RolloutWriter
    from nemo_rl.models.automodel.data import make_microbatches, microbatch_spec, plan_microbatches
    from nemo_rl.models.automodel.postprocess import full_logits
    from nemo_rl.models.automodel.recorded_policy import RecordedPolicy

    worker = make_worker(config, draft_spec=spec)
    shard = shard_for(worker, data, is_dealt=False)
    shard["sample_index"] = torch.cat([shard["sample_index"][:-1], torch.tensor([-1])])
    arch, dtype = spec.architecture, getattr(torch, config.policy.precision)
    layout = FeatureLayout(ids=arch.feature_ids, size=arch.target_hidden_size, dtype=config.policy.precision)
    identity = StoreIdentity(vocab_size=arch.vocab_size, tokenizer="t", policy="p", policy_name="tiny", features=layout)
    writer = None
    if torch.distributed.get_rank() == 0:
        store = RolloutStoreConfig(mode="record", dir=directory, features=True)
        writer = RolloutWriter(store, identity, run="a", resume_step=None)
    torch.distributed.barrier()
    report = worker.collect_features(shard, directory, "run_01_step_000001")
    reports: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(reports, report)
    if writer is not None:
        kept = sorted(index for part in reports for index in part.samples)
        batch = data.select_indices(kept)
        batch["rewards"], batch["truncated"] = torch.zeros(len(kept)), torch.zeros(len(kept), dtype=torch.bool)
        batch["response_lengths"] = batch["input_lengths"]
        writer.add(1, batch, versions=frozenset({0}), features=reports)
    torch.distributed.barrier()
    reader = RolloutReader(Path(directory))
    model, trainer = worker._trainer.model, worker._trainer
    recorded = RecordedPolicy(
        model, reader, feature_ids=arch.feature_ids, num_layers=spec.num_target_layers, dtype=dtype
    )
    own = reader.samples([number for number in range(reader.num_samples) if _is_own(reader, number, shard)])
    grouping = microbatch_spec(config.policy, is_training=False)
    groups = plan_microbatches(own["input_lengths"].tolist(), grouping)
    is_equal = []
    with torch.no_grad():
        for mb in make_microbatches(own, groups, grouping, num_steps=len(groups), device=torch.device("cpu")):
            want, got, is_token = full_logits(trainer.forward(mb)), recorded(mb), mb.doc_ids >= 0
            assert got.dtype == want.dtype == dtype
            is_equal.append(torch.equal(got[is_token], want[is_token]))
    return {"report": report, "is_equal": is_equal, "lengths": own["input_lengths"].tolist()}


def _is_own(reader: Any, number: int, shard: BatchedDataDict) -> bool:
    sample = reader.samples([number])
    length = int(sample["input_lengths"][0])
    return any(
        int(n) == length and torch.equal(sample["input_ids"][0], ids[:length])
        for n, ids in zip(shard["input_lengths"], shard["input_ids"], strict=True)
    )


def _count_calls(owner: Any, name: str, counts: dict[str, int], *, key: str) -> None:
    method = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        counts[key] += 1
        return method(*args, **kwargs)

    setattr(owner, name, counted)


def _whole(draft: Any) -> dict[str, Tensor]:
    """Whole tensors of the draft's checkpoint state."""
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for name, tensor in draft.state_dict().items()
    }
