"""What a draft trains, shares and sends, and under which names: the same function for the wire and for the export.

A name on the wire is `draft.` and the name in the exported file. Whether embedding and head are trained is declared,
not guessed from names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nemo_rl.errors import RefitError
from nemo_rl.models.automodel.draft.architecture import EMBEDDING, HEAD
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
    live = {HEAD} if spec.architecture.has_live_head else set()
    published = set(spec.architecture.published_shapes()) - set(spec.frozen) - live
    if trained != published:
        raise RefitError(f"trained and published tensors differ in {sorted(trained ^ published)}.")
    for name, declared in ((HEAD, contract.trains_lm_head), (EMBEDDING, contract.trains_embeddings)):
        if (name in trained or name in spec.frozen) is not declared:
            raise RefitError(f"{name}: the contract says trained = {declared}, the module says {name in trained}.")


def manifest(spec: DraftSpec) -> dict[str, TensorInfo]:
    """Name (no prefix) to shape and serving dtype of everything that a refit may send."""
    wide = spec.architecture.wide_names()
    return {
        name: TensorInfo(shape, "float32" if name in wide else spec.dtype)
        for name, shape in spec.architecture.published_shapes().items()
    }


def published_tensors(
    module: nn.Module, spec: DraftSpec, names: Iterable[str], *, live_head: Tensor | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name without prefix, tensor) in the order of `names`, gathered one at a time.

    Collective when the module is sharded: every rank must exhaust it.

    Args:
        module: the draft.
        spec: of the draft.
        names: which tensors, a part of the manifest.
        live_head: float [D, H], the policy's head rows of a draft that carries them.

    Returns:
        Whole, contiguous tensors of their serving dtype that share no memory with the parameters.
    """
    parameters: dict[str, Tensor] = {clean_name(n): p for n, p in module.named_parameters()}
    if live_head is not None:
        parameters[HEAD] = live_head
    infos = manifest(spec)
    for name in names:
        info = infos[name]
        tensor = full_tensor(parameters[name]).to(getattr(torch, info.dtype), copy=True).contiguous()
        if tuple(tensor.shape) != info.shape:
            raise RefitError(f"draft.{name}: has shape {tuple(tensor.shape)}, the manifest says {info.shape}.")
        if not bool(tensor.isfinite().all()):
            raise RefitError(f"draft.{name}: holds NaN or infinity; nothing was sent.")
        yield name, tensor
