"""Random draws of the plans: which anchors a block draft trains on, which chains reach the deeper depths.

Every draw belongs to one document and comes from a generator of its own, keyed by the run's seed, its step, the
document's index in the global batch and the purpose. So a draw does not depend on rank, micro-batch, row or order, is
the same on ranks that hold the same document, and needs no state in a checkpoint. Drawing happens on the CPU: other
devices give other numbers.
"""

from __future__ import annotations

import hashlib
import math
from fractions import Fraction

import torch
from torch import Tensor

__all__ = ["cod_caps", "document_generator", "draw_anchors", "draw_cod"]


def document_generator(*, seed: int, step: int, sample: int, purpose: str) -> torch.Generator:
    """The generator of one kind of draw for one document in one step.

    Args:
        seed: of the run's draws.
        step: of the run.
        sample: index of the document in the global batch, not in a rank or a row.
        purpose: what is drawn; different purposes are independent.
    """
    digest = hashlib.sha256(f"{seed}/{step}/{sample}/{purpose}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _choose(pool: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """A uniform subset of `count` entries, in the order of the pool; all of them, without a draw, if there are fewer.

    Args:
        pool: int64 [n].
        count: size of the subset.
        generator: on the CPU.
    """
    if count >= pool.numel():
        return pool
    kept = torch.randperm(pool.numel(), generator=generator)[:count].sort().values
    return pool[kept]


def draw_anchors(candidates: Tensor, num_anchors: int, *, generator: torch.Generator) -> Tensor:
    """Anchors of one document: a uniform subset without replacement, ascending.

    Args:
        candidates: int64 [n], positions that may be an anchor, ascending.
        num_anchors: most anchors; all candidates are taken, without a draw, if there are no more.
        generator: of the document.

    Returns:
        int64 [min(n, num_anchors)].
    """
    return _choose(candidates, num_anchors, generator)


def cod_caps(num_chains: int, *, depths: int, ratio: float, ratio_min: float) -> list[int]:
    """Most chains that each depth keeps: all at depth 0, then floor((n - k) * max(ratio^k, ratio_min)).

    Worked example, ratio 0.7, least ratio 0.2, n = 10: 10, 6, 3, 2, 1, 1, 0, 0.

    Args:
        num_chains: n, supervised slots at depth 0.
        depths: number of depths K.
        ratio: share kept from one depth to the next.
        ratio_min: least share of all chains that a depth keeps.
    """
    # Exact arithmetic on the decimals that the user wrote: 0.7 ** 2 * 100 in floats is less than 49.
    kept, least = Fraction(str(ratio)), Fraction(str(ratio_min))
    caps = [math.floor(max(num_chains - k, 0) * max(kept**k, least)) for k in range(1, depths)]
    return [num_chains, *caps]


def draw_cod(charged: Tensor, *, ratio: float, ratio_min: float, generator: torch.Generator) -> list[Tensor]:
    """Conditional drop of deeper depths: which supervised slots of one document are trained at which depth.

    A depth draws from the chains that the depth before it kept and whose next token is supervised, too; so the sets are
    nested, which the attention relies on. The caps shrink with the depth. Once a depth keeps nothing, no deeper one
    does: short documents never reach the deep ones.

    Args:
        charged: bool [K, T] of `runtime.charged_depths` for the document alone; depth k is a subset of depth k - 1.
        ratio: share kept from one depth to the next.
        ratio_min: least share of the chains of depth 0 that a depth keeps.
        generator: of the document.

    Returns:
        K tensors int64, slots in ascending order; those of depth 0 are all supervised ones.
    """
    chosen = [charged[0].nonzero().squeeze(1)]
    caps = cod_caps(chosen[0].numel(), depths=charged.shape[0], ratio=ratio, ratio_min=ratio_min)
    for row, cap in zip(charged[1:], caps[1:], strict=True):
        pool = chosen[-1][row[chosen[-1]]]
        chosen.append(_choose(pool, cap, generator))
    return chosen
