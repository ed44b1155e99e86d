"""Hidden states of the policy's own training forward, taken by hooks on its decoder layers.

Canonical id `l` is the residual stream after `l` layers: the output of layer `l - 1`, or for `l = 0` the input of layer
0. `l = N` is the last layer's output, before the final norm. Hooks exist only inside the `with` block, so forwards for
log-probabilities capture nothing and the recomputation of activation checkpointing, which runs in the backward pass,
finds no hook.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "FeatureCapture",
    "embedding_weight",
    "find_decoder_layers",
    "find_final_norm",
    "full_tensor",
    "head_weight",
]

_FINAL = -1
"""Key of the state behind the final norm."""
_LAYER_PATHS = ("model.layers", "model.language_model.layers", "language_model.model.layers", "transformer.h", "layers")


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor, detached; gathers when it is a DTensor (then collective over its mesh).

    Args:
        tensor: any; as a DTensor with any placement.
    """
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def embedding_weight(model: nn.Module) -> Tensor:
    """The weight [V, H] of the policy's embedding as it is held: a DTensor when sharded."""
    return cast("PreTrainedModel", model).get_input_embeddings().get_parameter("weight")


def head_weight(model: nn.Module) -> Tensor:
    """The weight [V, H] of the policy's head as it is held; that of the embedding for a policy without a head."""
    head = cast("PreTrainedModel", model).get_output_embeddings()
    return embedding_weight(model) if head is None else head.get_parameter("weight")


def find_decoder_layers(model: nn.Module, num_layers: int) -> list[nn.Module]:
    """The policy's decoder layers in order, through wrappers and for both kinds of container.

    Args:
        model: the policy.
        num_layers: how many its config states.
    """
    for path in _LAYER_PATHS:
        container: Any = model
        for name in path.split("."):
            container = getattr(container, name, None)
        if isinstance(container, (nn.ModuleList, nn.ModuleDict)) and len(container) == num_layers:
            return list(container.values()) if isinstance(container, nn.ModuleDict) else list(container)
    raise RuntimeError(
        f"{type(model).__name__}: found no {num_layers} decoder layers under any of {list(_LAYER_PATHS)}; the features "
        "of the draft cannot be captured from this policy."
    )


def find_final_norm(model: nn.Module) -> nn.Module | None:
    """The norm between the policy's last layer and its head; None when it is not where transformers puts it.

    Args:
        model: the policy.
    """
    for path in _LAYER_PATHS:
        owner: Any = model
        for name in path.split(".")[:-1]:
            owner = getattr(owner, name, None)
        norm = getattr(owner, "norm", None)
        if isinstance(norm, nn.Module):
            return norm
    return None


class FeatureCapture:
    """Captures the configured hidden states of one forward at a time."""

    def __init__(self, feature_ids: Sequence[int], *, num_layers: int, with_final_state: bool = False) -> None:
        """Store what to capture.

        Args:
            feature_ids: canonical ids, ascending.
            num_layers: decoder layers of the policy.
            with_final_state: also the state behind the final norm, as the last one.
        """
        self._ids = (*feature_ids, _FINAL) if with_final_state else tuple(feature_ids)
        self._num_layers = num_layers
        self._captured: dict[int, Tensor] = {}

    @contextmanager
    def __call__(self, model: nn.Module) -> Iterator[None]:
        """Arm the hooks for the forward inside the block; what an earlier block left is dropped."""
        self._captured = {}
        layers = find_decoder_layers(model, self._num_layers)
        handles = []
        for l in self._ids:  # noqa: E741 - the symbol of the specification
            if l == _FINAL:
                norm = find_final_norm(model)
                if norm is None:
                    raise RuntimeError(
                        f"{type(model).__name__}: found no final norm beside its decoder layers; the final state that "
                        "the draft reads cannot be captured from this policy."
                    )
                handles.append(norm.register_forward_hook(self._on_output(_FINAL)))
            elif l == 0:
                handles.append(layers[0].register_forward_pre_hook(self._on_input, with_kwargs=True))
            else:
                handles.append(layers[l - 1].register_forward_hook(self._on_output(l)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _on_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._store(0, args[0] if args else kwargs["hidden_states"])

    def _on_output(self, feature_id: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._store(feature_id, output[0] if isinstance(output, (tuple, list)) else output)

        return hook

    def _store(self, feature_id: int, hidden: Tensor) -> None:
        self._captured[feature_id] = hidden.detach()

    def take(self, shape: torch.Size | tuple[int, int]) -> list[Tensor]:
        """Hand over the captured states, in ascending order of their ids, the final one last, and forget them.

        Args:
            shape: rows and row length [R, S] of the micro-batch that was run.

        Returns:
            One float [R, S, H] per id, detached, in the policy's compute dtype.
        """
        missing = [l for l in self._ids if l not in self._captured]  # noqa: E741
        if missing:
            raise RuntimeError(
                f"no hidden state was captured for feature ids {missing}; run the policy's forward inside capture() "
                "once before each loss()."
            )
        states = [full_tensor(self._captured[l]) for l in self._ids]  # noqa: E741
        self._captured = {}
        for feature_id, state in zip(self._ids, states, strict=True):
            if tuple(state.shape[:2]) != tuple(shape):
                raise RuntimeError(
                    f"the state captured for feature id {feature_id} covers {tuple(state.shape[:2])} positions, the "
                    f"micro-batch has {tuple(shape)}."
                )
        return states
