"""What a draft trains, shares and sends, and under which names: the same function for the wire and for the export.

A name on the wire is `draft.` and the name in the exported file. Whether embedding and head are trained is declared,
not guessed from names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nemo_rl.errors import RefitError
from nemo_rl.models.automodel.draft.architecture import trained_tensor_shapes
from nemo_rl.models.automodel.draft.capture import full_tensor
from nemo_rl.models.automodel.draft.spec import DraftSpec
from nemo_rl.weight_sync.interfaces import TensorInfo

__all__ = ["PublishContract", "check_contract", "manifest", "published_tensors"]

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")


class PublishContract(NamedTuple):
    """What an algorithm does with the two tensors that a draft may share with the policy."""

    trains_lm_head: bool
    trains_embeddings: bool


def clean_name(name: str) -> str:
    """The parameter's name without what wrappers put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def check_contract(module: nn.Module, spec: DraftSpec, contract: PublishContract) -> None:
    """Assert that declared, trained and published sets are one.

    Args:
        module: the draft.
        spec: of the draft.
        contract: of its algorithm.
    """
    trained = {clean_name(n) for n, p in module.named_parameters() if p.requires_grad}
    published = set(trained_tensor_shapes(spec.architecture))
    if trained != published:
        raise RefitError(f"trained and published tensors differ in {sorted(trained ^ published)}.")
    for name, declared in (
        ("lm_head.weight", contract.trains_lm_head),
        ("embed_tokens.weight", contract.trains_embeddings),
    ):
        if (name in trained) is not declared:
            raise RefitError(f"{name}: the contract says trained = {declared}, the module says {name in trained}.")


def manifest(spec: DraftSpec) -> dict[str, TensorInfo]:
    """Name (no prefix) to shape and serving dtype of what each refit sends."""
    shapes = trained_tensor_shapes(spec.architecture)
    return {name: TensorInfo(shape, spec.dtype) for name, shape in shapes.items()}


def published_tensors(module: nn.Module, spec: DraftSpec) -> Iterator[tuple[str, Tensor]]:
    """Yield (name without prefix, tensor) in the manifest's order, gathered one at a time.

    Collective when the module is sharded: every rank must exhaust it.

    Args:
        module: the draft.
        spec: of the draft.

    Returns:
        Whole, contiguous tensors of the serving dtype that share no memory with the parameters.
    """
    parameters: Mapping[str, Tensor] = {clean_name(n): p for n, p in module.named_parameters()}
    serving = getattr(torch, spec.dtype)
    for name, info in manifest(spec).items():
        tensor = full_tensor(parameters[name]).to(serving, copy=True).contiguous()
        if tuple(tensor.shape) != info.shape:
            raise RefitError(f"draft.{name}: has shape {tuple(tensor.shape)}, the manifest says {info.shape}.")
        if not bool(tensor.isfinite().all()):
            raise RefitError(f"draft.{name}: holds NaN or infinity; nothing was sent.")
        yield name, tensor
