"""The Ray object store as the carrier of weights: the policy puts one dict, every engine maps it read-only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import ray

from nemo_rl.weight_sync.checksum import to_numpy

if TYPE_CHECKING:
    import numpy as np
    import torch


def pack_tensors(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, np.ndarray]:
    """Wire name to numpy array; what `RefitPayload.tensors` holds or refers to.

    Args:
        tensors: (wire name, full tensor of any dtype and device).
    """
    return {name: to_numpy(tensor) for name, tensor in tensors}


def resolve_tensors(handle: Any) -> Mapping[str, np.ndarray]:
    """The arrays behind `RefitPayload.tensors`, whether it is an object reference or the dict itself."""
    return ray.get(handle) if isinstance(handle, ray.ObjectRef) else handle
