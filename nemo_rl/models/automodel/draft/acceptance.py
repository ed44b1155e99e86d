"""Per-element results of a draft -> metrics as (numerator, denominator) pairs; see `metrics` for their names.

Shape symbols: E supervised elements, n slots (places that a draft starts from), K depths.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from nemo_rl.models.automodel.draft.metrics import replay_drafting

__all__ = ["ElementTable", "Metrics", "depth_pairs", "element_metrics", "prefix_pairs", "replay_metrics"]

Metrics = dict[str, tuple[Tensor, Tensor]]
"""Metric name to (numerator, denominator), scalars; sums over micro-batches and ranks are formed by the caller."""


@dataclass(frozen=True)
class ElementTable:
    """Where each supervised element of a micro-batch stands: slot t at depth k proposes the (k + 1)-th token behind it.

    Attributes:
        slot: int64 [E], row of `chains` of each element.
        depth: int64 [E].
        has_label: bool [E], True = the predicted token exists.
        chains: bool [n, K], True = every depth up to this one is an element.
        draftable: bool [n, K], True = the engine could propose this token and have it accepted.
        places: int64 [n]; the places of one response are consecutive numbers, those of different responses are not.
        is_complete: bool [n], True = every draftable depth of every place of the slot's response is an element, so that
            the engine's walk along the response can be followed.
    """

    slot: Tensor
    depth: Tensor
    has_label: Tensor
    chains: Tensor
    draftable: Tensor
    places: Tensor
    is_complete: Tensor

    @property
    def num_depths(self) -> int:
        """K."""
        return self.chains.shape[1]

    def to(self, device: torch.device | str) -> ElementTable:
        """The table with its tensors on `device`."""
        return replace(self, **{f.name: getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)})


def _per_depth(table: ElementTable, values: Tensor) -> Tensor:
    """[K] sums of [E] values."""
    out = torch.zeros(table.num_depths, dtype=torch.float32, device=values.device)
    return out.index_add_(0, table.depth, values.to(torch.float32))


def _by_slot(table: ElementTable, values: Tensor) -> Tensor:
    """[n, K] from [E] values; 0 where there is no element."""
    out = torch.zeros(table.chains.shape, dtype=torch.float32, device=values.device)
    return out.index_put_((table.slot, table.depth), values.to(torch.float32))


def depth_pairs(table: ElementTable, values: Tensor, *, name: str) -> Metrics:
    """`{name}_{j}`: sums per ordinal, over the number of its elements.

    Args:
        table: of the micro-batch.
        values: float [E].
        name: of the family.
    """
    num, den = _per_depth(table, values), _per_depth(table, torch.ones_like(values))
    return {f"{name}_{k + 1}": (num[k], den[k]) for k in range(table.num_depths)}


def prefix_pairs(table: ElementTable, values: Tensor, *, name: str) -> Metrics:
    """`{name}_{j}`: products over ordinals 1..j, per chain that is supervised so far.

    Args:
        table: of the micro-batch.
        values: float [E].
        name: of the family.
    """
    num = (_by_slot(table, values).cumprod(1) * table.chains).sum(0)
    den = table.chains.sum(0).to(num.dtype)
    return {f"{name}_{k + 1}": (num[k], den[k]) for k in range(table.num_depths)}


def element_metrics(table: ElementTable, columns: Mapping[str, Tensor], *, kept: Tensor | None = None) -> Metrics:
    """Everything that every algorithm reports of its elements.

    Args:
        table: of the micro-batch.
        columns: fp32 [E] each: `cross_entropy` (of the soft teacher), `kl`, `top1`, `hit`, `greedy`, `overlap`,
            `coverage`, `argmax_in_vocab`; those that the algorithm does not compute may be absent.
        kept: bool or 0/1 [E], False = left out of loss, top1 and hit; None = all are kept.
    """
    device = next(iter(columns.values())).device
    ones = torch.ones(table.depth.shape, device=device)
    kept = ones if kept is None else kept.to(ones.dtype)
    counts = _per_depth(table, ones)
    families = {
        "loss_depth": ("cross_entropy", kept, counts, 0),
        "kl": ("kl", ones, counts, 1),
        "top1": ("top1", kept, _per_depth(table, kept), 1),
        "hit": ("hit", kept, _per_depth(table, kept * table.has_label), 1),
        "accept_greedy": ("greedy", ones, counts, 1),
        "accept_overlap": ("overlap", ones, counts, 1),
    }
    out: Metrics = {}
    for name, (column, factor, den, offset) in families.items():
        if column in columns:
            num = _per_depth(table, columns[column] * factor)
            out |= {f"{name}_{k + offset}": (num[k], den[k]) for k in range(table.num_depths)}
    for name, column in (("prefix_hit", "top1"), ("prefix_greedy", "greedy"), ("prefix_overlap", "overlap")):
        if column in columns:
            out |= prefix_pairs(table, columns[column], name=name)
    total = counts.sum()
    return out | {name: (columns[name].sum(), total) for name in ("coverage", "argmax_in_vocab") if name in columns}


def replay_metrics(table: ElementTable, hit: Tensor, *, k: int) -> Metrics:
    """Draft along the recorded responses as the engine did; see `metrics.replay_drafting`.

    Args:
        table: of the micro-batch; responses that are not complete are left out.
        hit: fp32 [E], 1 = the draft's choice is the sampled token.
        k: tokens that the engine proposes.

    Returns:
        Nothing when the draft is not trained so deep, or when no response is complete.
    """
    if k > table.num_depths or not bool(table.is_complete.any()):
        return {}
    draftable = table.draftable & table.is_complete[:, None]
    accepted = (_by_slot(table, hit) * draftable)[:, :k].cumprod(1).sum(1).long()
    counts = replay_drafting(torch.stack([table.places, accepted], dim=1)[draftable[:, 0]].tolist())
    pair = hit.new_tensor
    out: Metrics = {
        "replayed_acceptance_length": (pair(counts.num_drafts + counts.num_accepted), pair(counts.num_drafts))
    }
    for j in range(1, k + 1):
        out[f"replayed_acceptance_{j}"] = (pair(counts.at_least(j)), pair(counts.num_drafts))
    return out
