"""Forward, loss, backward, accumulation, clipping and stepping of the policy and its draft.

Every branch that surrounds a collective is taken by all ranks alike: the number of micro-batches is agreed on first,
ranks without supervised tokens run zero-weight ones, and whether an update is skipped is decided from reduced values.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from nemo_rl.distributed.collectives import all_reduce_max, all_reduce_sum
from nemo_rl.models.automodel.data import (
    Microbatch,
    MicrobatchSpec,
    make_microbatches,
    microbatch_spec,
    plan_microbatches,
    rows_to_samples,
)
from nemo_rl.models.automodel.postprocess import full_logits, token_logprobs
from nemo_rl.models.automodel.setup import (
    OptimizerGroup,
    ParallelContext,
    forward_kwargs,
    local_tensor,
    reshard,
)
from nemo_rl.models.policy.results import BatchResult, GroupResult, MetricPairs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl.models.automodel.draft.runtime import _DraftRuntimeBase
    from nemo_rl.models.automodel.recorded_policy import RecordedPolicy
    from nemo_rl.models.policy.config import PolicyConfig

LossFn = Callable[..., Any]
"""`nemo_rl.algorithms.loss` call signature."""


@dataclass
class _Sums:
    """Running sums of one group over micro-batches, on the device until the end."""

    device: torch.device
    loss: Tensor = field(init=False)
    pairs: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.loss = torch.zeros((), dtype=torch.float32, device=self.device)

    def add(self, loss: Tensor, metrics: dict[str, tuple[Any, Any]]) -> None:
        self.loss += loss.detach().float()
        for name, (num, den) in metrics.items():
            pair = torch.stack([torch.as_tensor(x, device=self.device).detach().to(torch.float64) for x in (num, den)])
            self.pairs[name] = self.pairs[name] + pair if name in self.pairs else pair

    def as_floats(self) -> MetricPairs:
        if not self.pairs:
            return {}
        values = torch.stack(list(self.pairs.values())).tolist()
        return {name: (num, den) for name, (num, den) in zip(self.pairs, values, strict=True)}


class DraftTraining(NamedTuple):
    """A draft that is trained beside the policy, its optimizer, and how often it is trained."""

    runtime: _DraftRuntimeBase
    group: OptimizerGroup
    every: int

    def is_due(self, step: int) -> bool:
        """Whether the run's step (from 0) trains the draft: the first does, then every n-th."""
        return step % self.every == 0


@dataclass
class _PolicyPass:
    """The policy's side of a global batch on which the policy is trained, too."""

    loss_fn: LossFn
    valid: Tensor
    """Supervised tokens and kept samples of the global batch, float64 [2]."""
    sums: _Sums


class PolicyTrainer:
    """The computations of one policy rank. Holds no RPC and no file handling."""

    def __init__(
        self,
        cfg: PolicyConfig,
        parallel: ParallelContext,
        model: PreTrainedModel,
        policy_group: OptimizerGroup | None,
        *,
        draft: DraftTraining | None,
        recorded: RecordedPolicy | None = None,
    ) -> None:
        """Store the parts.

        Args:
            cfg: `policy`.
            parallel: where this rank stands.
            model: the policy.
            policy_group: its optimizer; None = the policy stays as it is.
            draft: the draft's runtime and optimizer; None = no draft is trained.
            recorded: stands in for the policy's forward when the draft alone is trained; None = the policy is run.
        """
        self.cfg = cfg
        self.parallel = parallel
        self.model = model
        self.policy_group = policy_group
        self.draft = draft
        self.recorded = recorded
        self._forward_kwargs = forward_kwargs(model)
        self._temperature = float(cfg.generation.temperature)

    # -- forward -----------------------------------------------------------------------------------------------------

    def forward(self, mb: Microbatch) -> Tensor:
        """Raw logits [R, S, V] of a micro-batch; a DTensor under tensor parallel."""
        kwargs: dict[str, Any] = {}
        if "use_cache" in self._forward_kwargs:
            kwargs["use_cache"] = False
        if "padding_mask" in self._forward_kwargs:
            kwargs["padding_mask"] = mb.doc_ids < 0
        # No attention mask: right padding is invisible to a causal row, and transformers keeps packed documents
        # apart by the restarts of `position_ids`.
        out = self.model(input_ids=mb.input_ids, position_ids=mb.position_ids, attention_mask=None, **kwargs)
        return out.logits if hasattr(out, "logits") else out

    def _logprobs(self, logits: Tensor, mb: Microbatch) -> Tensor:
        per_row = token_logprobs(
            logits, mb.input_ids, temperature=self._temperature, chunk_size=self.cfg.logprob_chunk_size
        )
        return rows_to_samples(per_row, mb)

    @torch.no_grad()
    def logprobs(self, data: BatchedDataDict) -> Tensor:
        """Log-probabilities of this rank's samples; leaves no trace in the model. Collective.

        Args:
            data: `input_ids` int64 [B, T], `input_lengths` int64 [B].

        Returns:
            fp32 [B, T] on the CPU; 0 at t = 0 and on padding.
        """
        out = torch.zeros(data["input_ids"].shape, dtype=torch.float32)
        spec = microbatch_spec(self.cfg, is_training=False)
        groups, num_steps = self._plan(data, spec)
        was_training = self.model.training
        self.model.eval()
        try:
            batches = make_microbatches(data, groups, spec, num_steps=num_steps, device=self.parallel.device)
            for i, mb in enumerate(batches):
                values = self._logprobs(self.forward(mb), mb).cpu()
                if i < len(groups):
                    width = min(values.shape[1], out.shape[1])
                    out[groups[i], :width] = values[:, :width]
        finally:
            self.model.train(was_training)
            reshard(self.model)
        return out

    def _plan(self, data: BatchedDataDict, spec: MicrobatchSpec) -> tuple[list[list[int]], int]:
        groups = plan_microbatches([int(n) for n in data["input_lengths"]], spec)
        own = torch.tensor(len(groups), device=self.parallel.device)
        return groups, int(all_reduce_max(own, self.parallel.dp_group))

    # -- training ----------------------------------------------------------------------------------------------------

    def train_batch(self, data: BatchedDataDict, loss_fn: LossFn, *, step: int) -> BatchResult:
        """One optimizer step of the policy on this rank's shard of a global batch. Collective.

        The draft may take several in the meantime, one per `policy.draft.train_global_batch_size` samples, on the same
        forward of the policy; or none, when it is not its step.

        Args:
            data: this rank's samples, keys of a training batch.
            loss_fn: the policy loss.
            step: the run's step, the key of the draft's random draws.
        """
        group = self.policy_group
        if group is None:
            raise RuntimeError("train_batch: this policy was built to stay as it is; it has no optimizer.")
        clock = _Clock(self.parallel.device)
        draft = self.draft if self.draft is not None and self.draft.is_due(step) else None
        valid = self._global_counts(data)
        self.model.train()
        group.optimizer.zero_grad(set_to_none=True)
        policy = _PolicyPass(loss_fn, valid, _Sums(self.parallel.device))
        size = None if draft is None else self.cfg.draft.train_global_batch_size
        num_microbatches, draft_results = 0, []
        for part in self._draft_batches(data, size):
            num, results = self._train_part(part, draft, policy, step=step, clock=clock)
            num_microbatches += num
            draft_results += results
        with clock("optimizer_s"):
            policy_result = self._step_group(group, policy.sums, is_measured=False)
        toks, seqs = valid.tolist()
        return BatchResult(policy_result, tuple(draft_results), toks, seqs, num_microbatches, clock.seconds)

    def train_draft(self, data: BatchedDataDict, *, step: int, batch_size: int) -> BatchResult:
        """Updates of the draft alone, on this rank's shard of some global batches. Collective.

        The policy is run without gradients and stays as it is; for the draft everything is as in `train_batch`.

        Args:
            data: this rank's samples: `input_ids`, `input_lengths`, `token_mask`, `sample_mask`, `sample_index`.
            step: the run's step, the key of the draft's random draws.
            batch_size: samples per update, over all ranks.
        """
        if self.draft is None:
            raise RuntimeError("train_draft: no draft is trained beside this policy.")
        clock = _Clock(self.parallel.device)
        valid = self._global_counts(data)
        was_training = self.model.training
        self.model.eval()
        num_microbatches, draft_results = 0, []
        try:
            for part in self._draft_batches(data, batch_size):
                num, results = self._train_part(part, self.draft, None, step=step, clock=clock)
                num_microbatches += num
                draft_results += results
        finally:
            self.model.train(was_training)
            reshard(self.model)
        toks, seqs = valid.tolist()
        return BatchResult(None, tuple(draft_results), toks, seqs, num_microbatches, clock.seconds)

    def _draft_batches(self, data: BatchedDataDict, size: int | None) -> list[BatchedDataDict]:
        """This rank's part of each global batch of `size` samples; the whole of `data` when that is None."""
        part = data.size if size is None else size // self.parallel.dp_size
        return [data.slice(start, start + part) for start in range(0, data.size, part)]

    def _train_part(
        self,
        data: BatchedDataDict,
        draft: DraftTraining | None,
        policy: _PolicyPass | None,
        *,
        step: int,
        clock: _Clock,
    ) -> tuple[int, list[GroupResult]]:
        """One global batch of the draft: forwards and backwards, and its update.

        Args:
            data: this rank's samples of it.
            draft: None = no draft is trained in this step.
            policy: what the policy's backward needs; None = the policy stays as it is.
            step: the run's step.
            clock: takes the times.

        Returns:
            Number of micro-batches, and the result of the draft's update, if there was one.
        """
        sums = _Sums(self.parallel.device)
        num_microbatches = self._accumulate(data, draft, sums, policy, step=step, clock=clock)
        if draft is None:
            return num_microbatches, []
        with clock("draft_s"):
            # Its movement is the sign that the draft learns; the copy of a policy would be too large.
            result = self._step_group(draft.group, sums, is_measured=True)
            draft.group.step_schedule()
        return num_microbatches, [result]

    def _accumulate(
        self,
        data: BatchedDataDict,
        draft: DraftTraining | None,
        draft_sums: _Sums,
        policy: _PolicyPass | None,
        *,
        step: int,
        clock: _Clock,
    ) -> int:
        """Forward and backward of policy and draft over one global batch of the draft; returns the micro-batches."""
        spec = microbatch_spec(self.cfg, is_training=True)
        groups, num_steps = self._plan(data, spec)
        runtime = None
        if draft is not None:
            runtime = draft.runtime
            draft.group.optimizer.zero_grad(set_to_none=True)
            with clock("draft_s"):
                runtime.begin_global_batch(data, step=step, dp_group=self.parallel.dp_group, policy_model=self.model)
        for mb in make_microbatches(data, groups, spec, num_steps=num_steps, device=self.parallel.device):
            with clock("policy_forward_s" if policy is None else "policy_fwd_bwd_s"):
                if policy is not None:
                    logits = self._captured_forward(mb, runtime)
                    self._policy_backward(logits, mb, policy)
                else:
                    logits = self._teacher_forward(mb, runtime)
            if runtime is not None:
                with clock("draft_s"):
                    self._draft_backward(runtime, full_logits(logits), mb, draft_sums)
            del logits
        return num_steps

    def _captured_forward(self, mb: Microbatch, runtime: _DraftRuntimeBase | None) -> Tensor:
        """`forward` that hands the policy's hidden states to the draft's runtime, if there is one."""
        with runtime.capture(self.model) if runtime is not None else nullcontext():
            return self.forward(mb)

    @torch.no_grad()
    def _teacher_forward(self, mb: Microbatch, runtime: _DraftRuntimeBase | None) -> Tensor:
        """`_captured_forward` without gradients, or what was recorded of it."""
        if self.recorded is None or runtime is None:
            return self._captured_forward(mb, runtime)
        with runtime.capture(self.recorded):
            return self.recorded(mb)

    def _global_counts(self, data: BatchedDataDict) -> Tensor:
        mask = data["token_mask"].bool() & data["sample_mask"].bool()[:, None]
        counts = torch.stack([mask.sum(), data["sample_mask"].bool().sum()])
        counts = counts.to(dtype=torch.float64, device=self.parallel.device)
        return all_reduce_sum(counts, self.parallel.dp_group)

    def _policy_backward(self, logits: Tensor, mb: Microbatch, policy: _PolicyPass) -> None:
        logprobs, valid = self._logprobs(logits, mb), policy.valid.float()
        out = policy.loss_fn(logprobs, mb.data, global_valid_toks=valid[0], global_valid_seqs=valid[1])
        policy.sums.add(out.loss, out.metrics)
        # FSDP averages gradients over data (and context) parallel ranks; the loss is a share of the global mean.
        (out.loss * self.parallel.average_size).backward()

    def _draft_backward(self, draft: _DraftRuntimeBase, logits: Tensor, mb: Microbatch, sums: _Sums) -> None:
        out = draft.loss(mb, logits)
        sums.add(out.loss, out.metrics)
        (out.loss * (self.cfg.draft.loss_weight * self.parallel.average_size)).backward()

    # -- update ------------------------------------------------------------------------------------------------------

    def _step_group(self, group: OptimizerGroup, sums: _Sums, *, is_measured: bool) -> GroupResult:
        """Clip and step a group, or skip it on all ranks.

        Args:
            group: what to step.
            sums: loss and metrics behind its gradients.
            is_measured: report how far its parameters moved; needs a copy of them.
        """
        norm = self._clip(group)
        is_bad = ~(torch.isfinite(sums.loss) & torch.isfinite(norm))
        bad = bool(all_reduce_max(is_bad.float()).item())
        before = [local_tensor(p).clone() for p in _params(group)] if is_measured else []
        lr = group.lr
        if not bad:
            group.optimizer.step()
        group.optimizer.zero_grad(set_to_none=True)
        change = self._change_norm(group, before) if is_measured else None
        return GroupResult(float(sums.loss), float(norm), lr, bad, sums.as_floats(), change)

    def _clip(self, group: OptimizerGroup) -> Tensor:
        # Imported here: the module pulls in most of nemo_automodel's training code.
        from nemo_automodel.components.distributed.tp_replicas import synchronize_tp_replica_gradients
        from nemo_automodel.components.training.utils import scale_grads_and_clip_grad_norm

        mesh = self.parallel.mesh
        # Parameters that tensor parallelism replicates (norms) hold one rank's partial view of the same gradient.
        synchronize_tp_replica_gradients([group.module], mesh.device_mesh)
        norm = scale_grads_and_clip_grad_norm(
            float("inf") if group.max_grad_norm is None else group.max_grad_norm,
            [group.module],
            device_mesh=mesh.device_mesh,
            moe_mesh=mesh.moe_mesh,
            ep_axis_name="ep" if mesh.moe_mesh is not None else None,
            dp_group_size=self.parallel.average_size,
            foreach=self.parallel.device.type == "cuda",
        )
        norm = norm.full_tensor() if isinstance(norm, DTensor) else torch.as_tensor(norm)
        return norm.detach().to(device=self.parallel.device, dtype=torch.float32)

    @torch.no_grad()
    def _change_norm(self, group: OptimizerGroup, before: list[Tensor]) -> float:
        """Norm of the parameter update over all shards."""
        sharded = torch.zeros((), dtype=torch.float64, device=self.parallel.device)
        whole = torch.zeros_like(sharded)
        for p, old in zip(_params(group), before, strict=True):
            change = (local_tensor(p) - old).double().square().sum().to(sharded.device)
            if isinstance(p, DTensor) and any(isinstance(x, Shard) for x in p.placements):
                sharded += change
            else:
                whole += change
        return float((all_reduce_sum(sharded, self.parallel.dp_group) + whole).sqrt())


def _params(group: OptimizerGroup) -> Iterator[Tensor]:
    for param_group in group.optimizer.param_groups:
        yield from param_group["params"]


class _Clock:
    """Seconds per named phase, device work included."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = self._now()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self._now() - start

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
