"""What the ranks of a `GlooPool` are asked to do: a sharded policy, its real forward, the sharded draft."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from nemo_rl.data.token_counts import count_tokens
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.automodel.draft.registry import build_draft_runtime, resolve_spec
from tests.unit.models.automodel.draft.algorithms import K, config_for
from tests.unit.models.automodel.draft.helpers import to_microbatch

LENGTHS = (19, 6, 14, 9, 11, 3, 17, 8)
"""Unequal; the samples of the second rank, 4..7, can be masked out altogether."""


def make_batch(*, masked: tuple[int, ...] = (), vocab: int = 320) -> BatchedDataDict:
    g = torch.Generator().manual_seed(4)
    n, width = len(LENGTHS), max(LENGTHS)
    length = torch.tensor(LENGTHS)
    is_token = torch.arange(width)[None] < length[:, None]
    sample_mask = torch.ones(n)
    sample_mask[list(masked)] = 0.0
    return BatchedDataDict(
        {
            "input_ids": torch.randint(vocab, (n, width), generator=g) * is_token,
            "input_lengths": length,
            "token_mask": (is_token & (torch.arange(width)[None] >= (length[:, None] + 2) // 3)).float(),
            "sample_mask": sample_mask,
            "sample_index": torch.arange(n),
        }
    )


def draft_step(
    model_dir: str,
    *,
    masked: tuple[int, ...] = (),
    micro_batch: int = 2,
    packed: bool = False,
    checkpointing: str | None = None,
    shard: bool = True,
    dtype: str = "float32",
    steps: int = 1,
    algo: str = "eagle3",
    settings: dict[str, Any] | None = None,
    export_to: str | None = None,
) -> dict[str, Any]:
    """Optimizer steps on a policy with two heads of gradient: its own loss and the draft's.

    Args:
        export_to: directory of the export; None = one that does not last.

    Returns:
        On every rank: loss, gradients and metrics of the last step summed over ranks, the policy's gradient, exported
        file names and published tensors.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    policy = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="sdpa")
    policy.train()
    mesh = init_device_mesh("cpu", (world,))
    if checkpointing == "wrapper":
        for i, layer in enumerate(policy.model.layers):
            policy.model.layers[i] = checkpoint_wrapper(layer)
    elif checkpointing == "transformers":
        policy.gradient_checkpointing_enable({"use_reentrant": False})
    if shard:
        for layer in policy.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(policy, mesh=mesh)
    own = {"ttt_steps": 4} if algo == "eagle3" else {}
    cfg = config_for(algo, loss_chunk_size=16, **own, **(settings or {}))
    spec = resolve_spec(cfg, policy_config=policy.config.to_dict(), k=K, max_model_len=64, dtype=dtype)
    runtime = build_draft_runtime(cfg, spec, policy_model=policy, device="cpu", dtype=dtype, draft_dir=None, seed=1)
    if shard:
        runtime.parallelize(mesh)
    optimizer = torch.optim.SGD(runtime.param_group()["params"], lr=0.1)
    batch = make_batch(masked=masked)
    local = batch.shard_by_batch_size(world)[rank]
    for step in range(steps):
        result = _one_step(policy, runtime, optimizer, local, step, micro_batch=micro_batch, packed=packed)
    with tempfile.TemporaryDirectory() as scratch:
        path = [export_to or str(Path(scratch) / "draft")]
        dist.broadcast_object_list(path)
        runtime.export(path[0], policy)
        dist.barrier()
        result["exported"] = sorted(p.name for p in Path(path[0]).iterdir())
        dist.barrier()
    result["published"] = dict(runtime.stream(policy))
    result["local_numel"] = sum(
        (p.to_local() if isinstance(p, DTensor) else p).numel() for p in runtime.module.parameters()
    )
    return result


def _one_step(policy, runtime, optimizer, local, step, *, micro_batch, packed) -> dict[str, Any]:
    world = dist.get_world_size()
    group = dist.group.WORLD
    policy.zero_grad()
    optimizer.zero_grad()
    runtime.begin_global_batch(local, step=step, dp_group=group, policy_model=policy)
    loss, sums = torch.zeros(()), {}
    for start in range(0, local.size, micro_batch):
        indices = list(range(start, min(start + micro_batch, local.size)))
        mb = to_microbatch(local, indices, mode="packed" if packed else "fixed")
        with runtime.capture(policy):
            logits = policy(input_ids=mb.input_ids, position_ids=mb.position_ids, use_cache=False).logits
        # The policy's backward replays checkpointed layers before the draft reads what was captured.
        (logits.float().log_softmax(-1)[..., 7] * (mb.doc_ids >= 0)).sum().backward()
        out = runtime.loss(mb, logits)
        (out.loss * world).backward()
        loss += out.loss.detach()
        for name, pair in out.metrics.items():
            sums[name] = sums.get(name, torch.zeros(2)) + torch.stack([x.float() for x in pair])
    dist.all_reduce(loss)
    names = sorted({n for names in _gathered(sorted(sums)) for n in names})
    table = torch.stack([sums.get(n, torch.zeros(2)) for n in names])
    dist.all_reduce(table)
    optimizer.step()
    return {
        "loss": float(loss),
        "grads": {n: _full(p.grad) for n, p in runtime.module.named_parameters()},
        "metrics": dict(zip(names, table.tolist(), strict=True)),
        "policy_grads": {
            n.replace("_checkpoint_wrapped_module.", ""): _full(p.grad) for n, p in policy.named_parameters()
        },
    }


def _gathered(value):
    out = [None] * dist.get_world_size()
    dist.all_gather_object(out, value)
    return out


def _full(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def policy_gradients(
    model_dir: str, *, with_draft: bool, policy_loss: bool = True, algo: str = "eagle3"
) -> dict[str, Any]:
    """Gradients of an unsharded policy after one backward of policy loss plus draft loss."""
    policy = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="sdpa")
    batch = make_batch()
    mb = to_microbatch(batch, list(range(batch.size)))
    if not with_draft:
        logits = policy(input_ids=mb.input_ids, position_ids=mb.position_ids, use_cache=False).logits
        logits.float().log_softmax(-1)[..., 7].sum().backward()
        return {n: p.grad for n, p in policy.named_parameters()}
    cfg = config_for(algo)
    spec = resolve_spec(cfg, policy_config=policy.config.to_dict(), k=K, max_model_len=64, dtype="float32")
    runtime = build_draft_runtime(cfg, spec, policy_model=policy, device="cpu", dtype="float32", draft_dir=None, seed=1)
    runtime.begin_global_batch(batch, step=0, dp_group=None, policy_model=policy)
    with runtime.capture(policy):
        logits = policy(input_ids=mb.input_ids, position_ids=mb.position_ids, use_cache=False).logits
    total = runtime.loss(mb, logits).loss
    if policy_loss:
        total = total + logits.float().log_softmax(-1)[..., 7].sum()
    total.backward()
    assert all(p.grad is not None for p in runtime.module.parameters())
    return {n: p.grad for n, p in policy.named_parameters()}


def count_on_last_rank(ids: torch.Tensor, mask: torch.Tensor, *, vocab_size: int) -> list[int] | str:
    """Counts over all ranks, of which only the last one has tokens; or why this rank has none."""
    part = slice(0, None) if dist.get_rank() == dist.get_world_size() - 1 else slice(0, 0)
    try:
        return count_tokens(ids[part], mask[part], vocab_size=vocab_size, group=dist.group.WORLD).tolist()
    except ValueError as err:
        return str(err)
