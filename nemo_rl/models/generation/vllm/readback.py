"""Where in the running model a checkpoint tensor lives, and reading it back from there.

vLLM fuses projections, pads the vocabulary and splits tensors over tensor-parallel ranks. This file undoes the first
two and says which part of a full tensor a rank must hold.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

FUSED_PROJECTIONS: dict[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Fused module to the checkpoint modules that it joins along dimension 0, in order."""

_ALIASES = (("", ""), ("", "model."), ("midlayer.", "model.layers.0."))
"""(prefix in the checkpoint, prefix in the model): the names a loader may add or rewrite."""


class ModelTensors:
    """Named access to the tensors of a loaded model under their checkpoint names."""

    def __init__(self, model: nn.Module, *, tp_rank: int = 0, tp_size: int = 1) -> None:
        """Index the model as it is now; build a new one after modules were exchanged.

        Args:
            model: A vLLM model, loaded.
            tp_rank: This process's index in its tensor-parallel group.
            tp_size: Size of that group.
        """
        self._tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
        self._tensors.update(model.named_buffers(remove_duplicate=False))
        self._modules: dict[str, Any] = dict(model.named_modules(remove_duplicate=False))
        self._tp_rank, self._tp_size = tp_rank, tp_size
        self._fused = dict(FUSED_PROJECTIONS)
        packed: Any = getattr(model, "packed_modules_mapping", {})
        self._fused.update({fused: tuple(parts) for fused, parts in packed.items()})

    def parameter_name(self, name: str) -> str | None:
        """Name inside the model of the tensor that holds (at least) checkpoint tensor `name`; None if there is none."""
        located = self._locate(name)
        return located[0] if located else None

    def read(self, name: str) -> torch.Tensor | None:
        """This rank's part of checkpoint tensor `name` as the model holds it, a view; None if it cannot be read."""
        located = self._locate(name)
        if located is None:
            return None
        full_name, part = located
        tensor = self._tensors[full_name].detach()
        owner = self._modules[full_name.rpartition(".")[0]]
        if part is not None:
            sizes = getattr(owner, "output_partition_sizes", None)
            if sizes is None or sum(sizes) != tensor.shape[0]:
                return None  # packed or emptied by a kernel
            return tensor[sum(sizes[:part]) : sum(sizes[: part + 1])]
        shards = getattr(owner, "shard_indices", None)
        if shards is not None:  # vocabulary rows behind the real ones are padding
            return tensor[: shards.org_vocab_end_index - shards.org_vocab_start_index]
        return tensor if tensor.numel() else None

    def expected_part(self, name: str, full: torch.Tensor) -> torch.Tensor | None:
        """The part of a full checkpoint tensor that this rank must hold, a view; None if that cannot be told."""
        held = self.read(name)
        if held is None:
            return None
        if self._tp_size == 1 or held.shape == full.shape:
            return full
        full_name, _ = self._locate(name) or ("", None)
        shards = getattr(self._modules[full_name.rpartition(".")[0]], "shard_indices", None)
        if shards is not None:
            return full[shards.org_vocab_start_index : shards.org_vocab_end_index]
        return local_part(full, shape=tuple(held.shape), tp_rank=self._tp_rank, tp_size=self._tp_size)

    def floating_names(self) -> set[str]:
        """Names inside the model of all floating-point parameters."""
        return {
            name
            for name, tensor in self._tensors.items()
            if isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
        }

    def storages(self, names: Iterable[str] | None = None) -> dict[int, str]:
        """Storage address to name inside the model, of non-empty parameters."""
        chosen = self._tensors if names is None else {name: self._tensors[name] for name in names}
        return {
            tensor.untyped_storage().data_ptr(): name
            for name, tensor in chosen.items()
            if isinstance(tensor, nn.Parameter) and tensor.numel()
        }

    def _locate(self, name: str) -> tuple[str, int | None] | None:
        """Checkpoint name -> (name inside the model, index in a fused module or None)."""
        for old, new in _ALIASES:
            if not name.startswith(old):
                continue
            candidate = new + name[len(old) :]
            if candidate in self._tensors:
                return candidate, None
            module, _, leaf = candidate.rpartition(".")
            parent, _, projection = module.rpartition(".")
            for fused, parts in self._fused.items():
                fused_name = f"{parent}.{fused}.{leaf}"
                if projection in parts and fused_name in self._tensors:
                    return fused_name, parts.index(projection)
        return None


def local_part(full: torch.Tensor, *, shape: tuple[int, ...], tp_rank: int, tp_size: int) -> torch.Tensor | None:
    """Cut a full tensor to one tensor-parallel rank's part.

    The one dimension in which the sizes differ is split evenly; when it has fewer parts than there are ranks (key/value
    heads), consecutive ranks hold copies. Example: 8 rows, shape 4 rows, 4 ranks -> ranks 0 and 1 hold rows 0..3.

    Args:
        full: Any dtype and shape.
        shape: Shape of the part.
        tp_rank: Rank.
        tp_size: Ranks.

    Returns:
        A view, or None when the shapes are no such split.
    """
    differing = [axis for axis, (a, b) in enumerate(zip(full.shape, shape, strict=True)) if a != b]
    if not differing:
        return full
    axis = differing[0]
    parts, rest = divmod(full.shape[axis], shape[axis])
    if len(differing) > 1 or rest or tp_size % parts:
        return None
    return full.narrow(axis, (tp_rank * parts // tp_size) * shape[axis], shape[axis])
