"""The values exchanged during a refit. Nothing here imports torch, so the driver can handle them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

DRAFT_PREFIX = "draft."
"""Wire names of draft tensors are this prefix followed by the name in the exported draft directory."""


class TensorInfo(NamedTuple):
    """What must be known of a tensor before its bytes are looked at."""

    shape: tuple[int, ...]
    dtype: str
    """The torch name without its module: `float32`, `bfloat16`, `int64`, ..."""


@dataclass(frozen=True)
class RefitManifest:
    """The complete set of tensors of one refit.

    Attributes:
        policy: Name in the Hugging Face checkpoint to shape and dtype.
        draft: Name in the exported draft directory (no `draft.` prefix) to shape and dtype; empty without a draft.
        draft_only: The policy is left out on purpose: the engines hold it from an earlier refit, and it has not
            changed.
    """

    policy: Mapping[str, TensorInfo]
    draft: Mapping[str, TensorInfo]
    draft_only: bool = False

    def wire_entries(self) -> dict[str, TensorInfo]:
        """Wire name to shape and dtype, policy first, then draft."""
        return {**self.policy, **{DRAFT_PREFIX + name: info for name, info in self.draft.items()}}


@dataclass(frozen=True)
class RefitPayload:
    """One refit on its way to the engines: policy and draft together, both or neither.

    Attributes:
        version: Grows with every refit; an engine refuses anything that is not newer than what it holds.
        manifest: The complete set of tensors.
        checksums: Wire name to `tensor_checksum` of the tensor as the trainer sent it.
        tensors: The transport's handle. For the Ray object store an `ObjectRef` of (or directly) a
            `dict[wire name, np.ndarray]`; dtypes numpy lacks (bfloat16) travel as int16 views of the same bytes
            and the manifest tells the true dtype.
    """

    version: int
    manifest: RefitManifest
    checksums: Mapping[str, str]
    tensors: Any


@dataclass(frozen=True)
class RefitReport:
    """What one refit did.

    Attributes:
        version: The version that every engine now holds.
        seconds_gather: Time the policy needed to gather and hand over its weights.
        seconds_apply: Time from handing the payload to the engines until the last one confirmed.
        verified: True when each tensor read back from each engine had the trainer's checksum.
        num_tensors: Tensors in the payload (policy and draft).
        num_checked: Tensors read back and compared, per engine; below `num_tensors` only by the names in `unchecked`.
        unchecked: Wire names the engine holds in a form that cannot be read back; normally empty.
    """

    version: int
    seconds_gather: float
    seconds_apply: float
    verified: bool
    num_tensors: int
    num_checked: int = 0
    unchecked: tuple[str, ...] = ()
