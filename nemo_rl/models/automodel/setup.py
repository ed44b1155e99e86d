"""Builds what a policy worker trains: device mesh, model, optimizer groups.

The model comes from nemo_automodel (class, parallelizer, state-dict adapter) on CPU and CUDA alike. Master weights are
fp32; forward and backward run in `policy.precision`, gradients are reduced in fp32.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from nemo_rl.errors import ConfigError
from nemo_rl.models.automodel.cpu_shim import automodel_without_cuda
from nemo_rl.models.policy.layout import check_layout

if TYPE_CHECKING:
    from nemo_automodel.components.distributed.mesh import MeshContext
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from transformers import PreTrainedModel

    from nemo_rl.models.optim_config import SchedulerEntry
    from nemo_rl.models.policy.config import PolicyConfig

log = logging.getLogger(__name__)

WRAPPER_PREFIXES = ("_checkpoint_wrapped_module.", "_orig_mod.")
"""What activation checkpointing and compilation insert into parameter names."""


@dataclass(frozen=True)
class ParallelContext:
    """Where this rank stands.

    Attributes:
        device: where it computes.
        mesh: nemo_automodel's meshes and policies.
        dp_mesh: one-dimensional mesh of the ranks that hold different samples and the same part of the model.
        dp_group: those ranks.
        dp_size: size of `dp_group`.
        tp_size: ranks that share each layer.
        average_size: ranks whose gradients FSDP averages (data times context parallel).
    """

    device: torch.device
    mesh: MeshContext
    dp_mesh: DeviceMesh
    dp_group: dist.ProcessGroup
    dp_size: int
    tp_size: int
    average_size: int


@dataclass
class OptimizerGroup:
    """One independently stepped, clipped and scheduled set of parameters.

    Attributes:
        name: `policy` or `draft`.
        module: owner of the parameters.
        optimizer: over the trainable parameters of `module`.
        scheduler: None = constant rates. The policy's is stepped once per training call, the draft's once per update.
        max_grad_norm: clip of the group's own norm; None = no clip.
    """

    name: str
    module: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler | None
    max_grad_norm: float | None

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def step_schedule(self) -> None:
        """Move the learning rate on, if there is a schedule."""
        if self.scheduler is not None:
            self.scheduler.step()


# -- mesh and model --------------------------------------------------------------------------------------------------


def mixed_precision(cfg: PolicyConfig) -> MixedPrecisionPolicy:
    """Compute in `policy.precision`, reduce gradients in fp32."""
    return MixedPrecisionPolicy(
        param_dtype=getattr(torch, cfg.precision), reduce_dtype=torch.float32, cast_forward_inputs=False
    )


def build_parallel_context(cfg: PolicyConfig, *, device: torch.device) -> ParallelContext:
    """Create the meshes over the initialised default process group.

    Raises:
        ConfigError: the sizes do not divide the number of workers, or need what the worker does not have.
    """
    from nemo_automodel.components.distributed.config import DistributedSetup, FSDP2Config
    from nemo_automodel.components.distributed.mesh import ParallelismSizes

    dtensor, world = cfg.dtensor_cfg, dist.get_world_size()
    check_layout(cfg, num_workers=world)
    offload = CPUOffloadPolicy() if dtensor.cpu_offload and device.type == "cuda" else None
    setup = DistributedSetup.build(
        FSDP2Config(
            mp_policy=mixed_precision(cfg),
            sequence_parallel=dtensor.sequence_parallel,
            tp_plan=dtensor.custom_parallel_plan,
            offload_policy=offload,
        ),
        ParallelismSizes(
            tp_size=dtensor.tensor_parallel_size,
            cp_size=dtensor.context_parallel_size,
            ep_size=dtensor.expert_parallel_size,
        ),
        activation_checkpointing=dtensor.activation_checkpointing,
        world_size=world,
    )
    mesh = setup.mesh_context
    dp_mesh, dp_size = _flat_mesh(mesh, "dp"), mesh.dp_size
    assert dp_size is not None, "FSDP2 meshes have a data-parallel axis"
    return ParallelContext(
        device=device,
        mesh=mesh,
        dp_mesh=dp_mesh,
        dp_group=dp_mesh.get_group(),
        dp_size=dp_size,
        tp_size=mesh.tp_size,
        average_size=dp_size * mesh.cp_size,
    )


def _flat_mesh(mesh: MeshContext, name: str) -> DeviceMesh:
    """The one-dimensional mesh of this name."""
    from nemo_automodel.components.distributed.mesh_utils import get_flat_mesh

    assert mesh.device_mesh is not None, "DistributedSetup.build makes the meshes of an FSDP2Config"
    return get_flat_mesh(mesh.device_mesh, name)


def build_model(cfg: PolicyConfig, parallel: ParallelContext) -> PreTrainedModel:
    """Load the policy, sharded over the mesh, in fp32 master weights.

    Raises:
        ConfigError: the model's class cannot do what the configuration asks for.
    """
    # Imported here: building is the only part that needs the seconds this import costs.
    from nemo_automodel import NeMoAutoModelForCausalLM
    from nemo_automodel.components.distributed.config import DistributedSetup

    _quiet_automodel()
    kwargs = {
        "attn_implementation": "sdpa",
        "use_liger_kernel": False,
        "use_sdpa_patching": False,
        **cfg.dtensor_cfg.automodel_kwargs,
    }
    mesh = parallel.mesh
    setup = DistributedSetup(
        mesh_context=mesh,
        strategy_config=mesh.strategy_config,
        moe_parallel_config=mesh.moe_parallel_config,
        activation_checkpointing=mesh.activation_checkpointing,
    )
    with automodel_without_cuda():
        model = NeMoAutoModelForCausalLM.from_pretrained(
            cfg.model_name, dtype=torch.float32, distributed_setup=setup, **kwargs
        )
    if dist.get_world_size() == 1 and cfg.precision != "float32":
        _shard_on_one_rank(model, cfg, parallel)
    if cfg.sequence_packing.enabled and not _uses_transformers_attention(model):
        raise ConfigError(
            f"policy.sequence_packing.enabled: got true; must be false for {type(model).__name__}, whose attention "
            "cannot keep documents of a row apart. Use policy.dynamic_batching, or "
            "policy.dtensor_cfg.automodel_kwargs.force_hf=true."
        )
    return model


def _quiet_automodel() -> None:
    """Keep nemo_automodel's progress notes out of the log; its modules set their own level when they are imported."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("nemo_automodel") and isinstance(logger, logging.Logger):
            logger.setLevel(logging.WARNING)


def _shard_on_one_rank(model: nn.Module, cfg: PolicyConfig, parallel: ParallelContext) -> None:
    """Apply FSDP2 for its mixed precision: nemo_automodel leaves the model of a one-rank mesh as it is."""
    from nemo_automodel.components.distributed.config import FSDP2Config
    from nemo_automodel.components.distributed.parallelizer import apply_fsdp2_sharding_recursively

    strategy = parallel.mesh.strategy_config
    assert isinstance(strategy, FSDP2Config), "build_parallel_context makes no other"
    mesh = _flat_mesh(parallel.mesh, "dp_shard_cp")
    policy, offload = mixed_precision(cfg), strategy.offload_policy
    apply_fsdp2_sharding_recursively(model, mesh, policy, offload)
    fully_shard(
        model, mesh=mesh, mp_policy=policy, offload_policy=offload or OffloadPolicy(), reshard_after_forward=False
    )


def _uses_transformers_attention(model: nn.Module) -> bool:
    """Whether attention goes through transformers, which keeps packed documents apart by their positions."""
    declared = getattr(model, "_uses_hf_attention", None)
    if declared is not None:
        return bool(declared)
    return any(cls.__module__.startswith("transformers.models.") for cls in type(model).__mro__)


def forward_kwargs(model: nn.Module) -> frozenset[str]:
    """Names of the optional forward arguments that the model's class understands."""
    return frozenset(inspect.signature(type(model).forward).parameters)


# -- access to sharded parameters ------------------------------------------------------------------------------------


def reshard(model: nn.Module) -> None:
    """Drop gathered parameters, so that `named_parameters` are the sharded ones that the optimizer holds.

    After a forward without backward, FSDP leaves the root's parameters gathered; whoever reads or writes weights then
    would touch the wrong tensors.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def clean_name(name: str) -> str:
    """Remove what wrappers put into a parameter's name."""
    for prefix in WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    return name


def named_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers under their unwrapped names, each shared tensor once.

    Returns:
        Name to parameter or buffer (DTensor when sharded), in the order of the module tree.
    """
    reshard(model)
    out: dict[str, Tensor] = {clean_name(n): p for n, p in model.named_parameters()}
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                out[clean_name(f"{prefix}.{name}" if prefix else name)] = buffer
    return out


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's storage of a tensor or DTensor, sharing memory, without graph."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class WeightSnapshot:
    """This rank's part of a model's weights, kept in host memory and swapped in for a while.

    The reference policy is the initial weights; swapping costs one copy and no second model.
    """

    def __init__(self, model: nn.Module) -> None:
        """Copy the current weights."""
        self._model = model
        self._saved = {name: local_tensor(t).cpu().clone() for name, t in named_state(model).items()}

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the model's weights with the snapshot's; twice is exact identity."""
        for name, tensor in named_state(self._model).items():
            local = local_tensor(tensor)
            current = local.cpu().clone()
            local.copy_(self._saved[name])
            self._saved[name] = current

    def tensors(self) -> dict[str, Tensor]:
        """This rank's part of each tensor, on the CPU."""
        return self._saved


# -- optimizers ------------------------------------------------------------------------------------------------------


def resolve_class(path: str, *, key: str) -> type:
    """Import a class by its dotted path.

    Raises:
        ConfigError: naming the configuration key.
    """
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as err:
        raise ConfigError(f"{key}: got {path!r}; must be the dotted path of a class ({err}).") from err


def build_optimizer_group(
    name: str,
    module: nn.Module,
    *,
    optimizer: str,
    kwargs: Mapping[str, Any],
    schedule: Sequence[SchedulerEntry] | None,
    max_grad_norm: float | None,
    warmup_steps: int = 0,
    params: Iterable[tuple[str, nn.Parameter]] | None = None,
) -> OptimizerGroup:
    """Create optimizer and schedule of one group. Must run before the module's first forward.

    Args:
        name: of the group; also the configuration prefix in messages.
        module: owner of the parameters.
        optimizer: dotted path of the class.
        kwargs: its arguments. `weight_decay` applies to matrices; norms and biases get none.
        schedule: entries of `policy.scheduler` or `policy.draft.scheduler`.
        max_grad_norm: clip.
        warmup_steps: steps of a linear warm-up in front of `schedule`.
        params: the trainable parameters by name; None = those of `module` that require a gradient.

    Raises:
        ConfigError: the class does not exist or refuses its arguments.
    """
    key = "policy" if name == "policy" else f"policy.{name}"
    named = list(params) if params is not None else [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in kwargs.items()}
    matrices: dict[str, Any] = {"params": [p for _, p in named if p.ndim >= 2], "group_name": name}
    vectors: dict[str, Any] = {"params": [p for _, p in named if p.ndim < 2], "group_name": name}
    if "weight_decay" in options:
        vectors["weight_decay"] = 0.0
    cls = resolve_class(optimizer, key=f"{key}.optimizer.name")
    try:
        built = cls([g for g in (matrices, vectors) if g["params"]], **options)
    except (TypeError, ValueError) as err:
        raise ConfigError(f"{key}.optimizer.kwargs: got {dict(kwargs)}; {optimizer} refuses them: {err}") from err
    scheduler = build_scheduler(built, schedule, key=key, warmup_steps=warmup_steps)
    return OptimizerGroup(name, module, built, scheduler, max_grad_norm)


def build_scheduler(
    optimizer: Optimizer, entries: Sequence[SchedulerEntry] | None, *, key: str, warmup_steps: int = 0
) -> LRScheduler | None:
    """Create the schedules of a list and chain them at its milestones.

    Args:
        optimizer: whose learning rates they change.
        entries: of `policy.scheduler` or `policy.draft.scheduler`.
        key: section of the configuration, for messages.
        warmup_steps: W steps in front of the list at 1/(W+1), 2/(W+1), ... of the rate; the list counts from there.

    Raises:
        ConfigError: a class does not exist or refuses its arguments.
    """
    from torch.optim.lr_scheduler import LinearLR, SequentialLR

    schedulers: list[LRScheduler] = []
    milestones: list[int] = []
    if warmup_steps:
        schedulers.append(LinearLR(optimizer, start_factor=1 / (warmup_steps + 1), total_iters=warmup_steps))
        milestones = [warmup_steps] if entries else []
    for i, entry in enumerate(entries or ()):
        if entry.name is None:
            milestones += [warmup_steps + step for step in entry.milestones or ()]
            continue
        cls = resolve_class(entry.name, key=f"{key}.scheduler[{i}].name")
        try:
            schedulers.append(cls(optimizer, **entry.kwargs))
        except (TypeError, ValueError) as err:
            raise ConfigError(
                f"{key}.scheduler[{i}].kwargs: got {dict(entry.kwargs)}; {entry.name} refuses them: {err}"
            ) from err
    if len(schedulers) <= 1:
        return schedulers[0] if schedulers else None
    return SequentialLR(optimizer, schedulers, milestones=milestones)


# -- weights by their Hugging Face names -----------------------------------------------------------------------------


def tied_head_alias(model: PreTrainedModel) -> tuple[str, str] | None:
    """Return (name of the head, name of the embedding that it shares) when the model ties them, else None.

    The generation engine repacks the head, so a shared head has to be sent under its own name too.
    """
    if not getattr(model.config, "tie_word_embeddings", False):
        return None
    names = {id(m): clean_name(n) for n, m in model.named_modules()}
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return f"{names[id(head)]}.weight", f"{names[id(embedding)]}.weight"


def _to_checkpoint_names(model: PreTrainedModel, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    adapter: Any = getattr(model, "state_dict_adapter", None)
    if adapter is None:
        return [(name, tensor)]
    return adapter.convert_single_tensor_to_hf(name, tensor, exclude_key_regex=r".*_extra_state.*", quantization=False)


def checkpoint_layout(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the policy in its Hugging Face checkpoint; communicates nothing."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in named_state(model).items():
        for hf_name, t in _to_checkpoint_names(model, name, torch.empty(tensor.shape, device="meta")):
            shapes[hf_name] = tuple(t.shape)
    alias = tied_head_alias(model)
    if alias is not None:
        shapes[alias[0]] = shapes[alias[1]]
    return shapes


@torch.no_grad()
def checkpoint_tensors(model: PreTrainedModel, *, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Gather the policy one tensor at a time. Collective: every rank must consume the whole iterator.

    Args:
        model: the policy.
        dtype: floating-point tensors are converted to this.

    Yields:
        Hugging Face checkpoint name, full tensor on the CPU (never sharing memory with a parameter).
    """
    alias = tied_head_alias(model)
    for name, tensor in named_state(model).items():
        full = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
        for hf_name, t in _to_checkpoint_names(model, name, full):
            target = dtype if t.is_floating_point() else t.dtype
            sent = t.to(device="cpu", dtype=target, copy=True).contiguous()
            yield hf_name, sent
            if alias is not None and hf_name == alias[1]:
                yield alias[0], sent
