"""The draft vocabulary: the only place that knows that `d2t` holds offsets and `t2d` a mask.

Draft id `i` stands for target id `i + d2t[i]` (the engine adds `arange` to the table), so the identity is all zeros.
Worked example: target ids `[3, 9, 17, 21]` give `d2t = [3, 8, 15, 18]`. Nothing here needs torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

__all__ = [
    "TableReading",
    "VocabMap",
    "VocabMapError",
    "coverage_by_size",
    "coverage_of",
    "read_either",
    "select_vocab",
    "selection_order",
    "table_problems",
]


class VocabMapError(ValueError):
    """The tables do not describe a draft vocabulary; callers add where the tables came from."""


@dataclass(frozen=True)
class VocabMap:
    """Which target ids a draft can propose.

    Attributes:
        ids: target id of each draft id.
        vocab_size: number of target ids.
    """

    ids: tuple[int, ...]
    vocab_size: int

    def __post_init__(self) -> None:
        size, unique = len(self.ids), set(self.ids)
        if not 1 <= size <= self.vocab_size:
            raise VocabMapError(f"a draft vocabulary has 1 to {self.vocab_size} ids, got {size}")
        outside = sorted(i for i in unique if not 0 <= i < self.vocab_size)
        if outside:
            raise VocabMapError(
                f"{len(outside)} of {size} ids lie outside the target's 0..{self.vocab_size - 1} (e.g. {outside[-1]})"
            )
        if len(unique) != size:
            repeated = min(i for i, count in Counter(self.ids).items() if count > 1)
            raise VocabMapError(f"target ids must be distinct; {repeated} occurs more than once")

    @classmethod
    def from_tables(
        cls, d2t: Sequence[int], *, vocab_size: int, draft_vocab_size: int, t2d: Sequence[int] | None = None
    ) -> VocabMap:
        """Read the tables of a checkpoint.

        Args:
            d2t: offsets, one per draft id.
            vocab_size: number of target ids.
            draft_vocab_size: number of draft ids that the checkpoint's config states.
            t2d: one flag per target id (bool, or 0 and 1), True = the draft can propose it; checked against `d2t`.
        """
        if len(d2t) != draft_vocab_size:
            raise VocabMapError(f"d2t has {len(d2t)} entries, draft_vocab_size is {draft_vocab_size}")
        try:
            mapping = cls(tuple(i + int(offset) for i, offset in enumerate(d2t)), vocab_size)
        except VocabMapError as err:
            raise VocabMapError(
                f"{err}; d2t holds offsets: target id = draft id + d2t[draft id], so the identity is all zeros, not "
                "arange"
            ) from err
        if t2d is not None:
            if len(t2d) != vocab_size:
                raise VocabMapError(f"t2d has {len(t2d)} entries, the target vocabulary {vocab_size}")
            flagged = {i for i, flag in enumerate(t2d) if flag}
            if flagged != set(mapping.ids):
                differing = sorted(flagged ^ set(mapping.ids))
                raise VocabMapError(f"t2d and d2t disagree about {len(differing)} target ids, first {differing[:5]}")
        return mapping

    @classmethod
    def from_mask(cls, t2d: Sequence[bool]) -> VocabMap:
        """Ascending ids of a presence mask; only for publishers known to keep their ids ascending."""
        return cls(tuple(i for i, flag in enumerate(t2d) if flag), len(t2d))

    @property
    def is_identity(self) -> bool:
        """True when draft ids are target ids."""
        return len(self.ids) == self.vocab_size and all(i == v for i, v in enumerate(self.ids))

    @property
    def is_ascending(self) -> bool:
        """False for maps whose teacher columns a boolean mask would pair wrongly."""
        return all(a < b for a, b in zip(self.ids, self.ids[1:], strict=False))

    def rows_of(self, smaller: VocabMap) -> list[int]:
        """Draft ids of this map that stand for the ids of a smaller one, in that one's order.

        Worked example: of ids `[3, 9, 17, 21]` the rows of `[9, 21]` are `[1, 3]`.

        Args:
            smaller: of the same target vocabulary; all its ids are ids of this map.
        """
        if smaller.vocab_size != self.vocab_size:
            raise VocabMapError(f"one map is of {self.vocab_size} target ids, the other of {smaller.vocab_size}")
        row = {v: i for i, v in enumerate(self.ids)}
        absent = sorted(set(smaller.ids) - row.keys())
        if absent:
            raise VocabMapError(
                f"{len(absent)} of {len(smaller.ids)} ids are not in the map of {len(self.ids)}, first {absent[:5]}"
            )
        return [row[v] for v in smaller.ids]

    @property
    def d2t(self) -> list[int]:
        """Offsets as the engine adds them."""
        return [v - i for i, v in enumerate(self.ids)]

    @property
    def t2d(self) -> list[bool]:
        """One flag per target id."""
        present = set(self.ids)
        return [v in present for v in range(self.vocab_size)]


def table_problems(
    d2t: Sequence[int], *, vocab_size: int, draft_vocab_size: int, t2d: Sequence[int] | None = None
) -> list[str]:
    """Everything that is wrong with the tables of a checkpoint, one line each; empty = they describe a vocabulary.

    Args:
        d2t: offsets, one per draft id.
        vocab_size: number of target ids.
        draft_vocab_size: number of draft ids that the checkpoint's config states.
        t2d: one flag per target id; None = the checkpoint has none.
    """
    problems = []
    if len(d2t) != draft_vocab_size:
        problems.append(f"d2t has {len(d2t)} entries, draft_vocab_size is {draft_vocab_size}")
    if not 1 <= draft_vocab_size <= vocab_size:
        problems.append(f"draft_vocab_size is {draft_vocab_size}; must be from 1 to {vocab_size}")
    ids = [i + int(offset) for i, offset in enumerate(d2t)]
    outside = [v for v in ids if not 0 <= v < vocab_size]
    if outside:
        problems.append(f"{len(outside)} ids lie outside 0..{vocab_size - 1}, first {outside[:5]}")
    repeated = sorted(v for v, count in Counter(ids).items() if count > 1)
    if repeated:
        problems.append(f"{len(repeated)} ids occur more than once, first {repeated[:5]}")
    if t2d is None:
        return problems
    flagged = {v for v, flag in enumerate(t2d) if flag}
    if len(t2d) != vocab_size:
        problems.append(f"t2d has {len(t2d)} entries, the target vocabulary {vocab_size}")
    if len(flagged) != draft_vocab_size:
        problems.append(f"t2d flags {len(flagged)} ids, draft_vocab_size is {draft_vocab_size}")
    for only, where, other in ((flagged - set(ids), "t2d", "d2t"), (set(ids) - flagged, "d2t", "t2d")):
        if only:
            problems.append(f"{len(only)} ids are in {where} and not in {other}, first {sorted(only)[:5]}")
    return problems


class TableReading(NamedTuple):
    """What a table holds that some writer called `d2t`.

    Attributes:
        vocab: the ids that it stands for.
        kind: `offsets`, as the engine reads it, or `absolute`: target ids themselves.
    """

    vocab: VocabMap
    kind: Literal["offsets", "absolute"]


def read_either(
    d2t: Sequence[int],
    *,
    vocab_size: int,
    draft_vocab_size: int,
    t2d: Sequence[int] | None = None,
    is_absolute: bool = False,
) -> TableReading:
    """Read a table that may hold target ids where the engine expects offsets.

    Worked example, 32 target ids: `[3, 9, 17, 30]` as offsets would be ids `3 10 19 33`, one outside, so it is
    absolute. `[3, 8, 15, 18]` could be both; then `t2d` decides, which must hold exactly the ids. `arange` of all 32 is
    the identity, absolute.

    Args:
        d2t: one entry per draft id.
        vocab_size: number of target ids.
        draft_vocab_size: number of draft ids that the checkpoint's config states.
        t2d: one flag per target id; None = the checkpoint has none.
        is_absolute: take the entries for target ids, whatever else they could be.

    Raises:
        VocabMapError: neither reading is possible, or both are.
    """
    tables = {"offsets": list(d2t), "absolute": [int(v) - i for i, v in enumerate(d2t)]}
    if is_absolute:
        del tables["offsets"]
    found: dict[str, VocabMap] = {}
    reasons = []
    for kind, offsets in tables.items():
        try:
            found[kind] = VocabMap.from_tables(
                offsets, vocab_size=vocab_size, draft_vocab_size=draft_vocab_size, t2d=t2d
            )
        except VocabMapError as err:
            reasons.append(f"as {'offsets' if kind == 'offsets' else 'target ids'}: {err}")
    if not found:
        raise VocabMapError("d2t describes no draft vocabulary; " + "; ".join(reasons))
    if len(set(found.values())) > 1:
        shown = {kind: list(vocab.ids[:3]) for kind, vocab in found.items()}
        raise VocabMapError(
            f"d2t can be read as offsets (ids {shown['offsets']} ...) and as target ids ({shown['absolute']} ...), and "
            "there is no t2d to tell"
        )
    return (
        TableReading(found["offsets"], "offsets") if "offsets" in found else TableReading(found["absolute"], "absolute")
    )


# -- selection -------------------------------------------------------------------------------------------------------


def selection_order(
    counts: Mapping[int, int], *, vocab_size: int, always: Iterable[int] = (), never: Iterable[int] = ()
) -> list[int]:
    """Target ids in the order in which a growing draft vocabulary takes them up.

    Those that must be in, then by falling count (ties to the smaller id), then the ids that never occurred, ascending.

    Args:
        counts: target id to how often the policy sampled it.
        vocab_size: number of target ids.
        always: ids that must be in.
        never: ids that must not be proposed: placeholder tokens, rows that pad the vocabulary.

    Raises:
        VocabMapError: an id that does not exist, a negative count, or an id in both lists.
    """
    first, banned = set(always), set(never)
    outside = sorted(v for v in {*counts, *first} if not 0 <= v < vocab_size)
    if outside:
        raise VocabMapError(f"ids {outside[:5]} lie outside the target's 0..{vocab_size - 1}")
    if any(count < 0 for count in counts.values()):
        raise VocabMapError("counts must not be negative")
    if first & banned:
        raise VocabMapError(f"ids {sorted(first & banned)[:5]} must be in and must not be proposed")
    free = [v for v in range(vocab_size) if v not in first and v not in banned]
    return sorted(first) + sorted(free, key=lambda v: (-counts.get(v, 0), v))


def coverage_of(counts: Mapping[int, int], ids: Iterable[int]) -> float:
    """Share of the counted tokens that are among some ids.

    Args:
        counts: target id to how often it occurred.
        ids: distinct target ids.

    Raises:
        VocabMapError: nothing was counted.
    """
    total = sum(counts.values())
    if not total:
        raise VocabMapError("no token was counted")
    return sum(counts.get(v, 0) for v in ids) / total


def coverage_by_size(counts: Mapping[int, int], order: Sequence[int], sizes: Iterable[int]) -> dict[int, float]:
    """Share of the counted tokens that draft vocabularies of several sizes hold.

    Args:
        counts: target id to how often it occurred.
        order: of `selection_order`.
        sizes: numbers of draft ids; those beyond the order are left out.
    """
    total = sum(counts.values())
    if not total:
        raise VocabMapError("no token was counted")
    sums = list(accumulate(counts.get(v, 0) for v in order))
    return {size: sums[size - 1] / total for size in sizes if 1 <= size <= len(order)}


def select_vocab(
    counts: Mapping[int, int],
    *,
    draft_vocab_size: int,
    vocab_size: int,
    always: Iterable[int] = (),
    never: Iterable[int] = (),
    min_coverage: float = 0.95,
) -> VocabMap:
    """Choose the most frequent ids of supervised tokens.

    Args:
        counts: target id to how often the policy sampled it.
        draft_vocab_size: ids to choose.
        vocab_size: number of target ids.
        always: ids that must be in (end of sequence, stop ids, special ids that can be generated).
        never: ids that must not be proposed: placeholder tokens, rows that pad the vocabulary.
        min_coverage: least share of the counted tokens that the chosen ids must hold.

    Returns:
        Ascending map. Ties go to the smaller id; with fewer distinct ids than asked for, the smallest unused ones
        fill up.

    Raises:
        VocabMapError: it cannot be chosen, or covers too little; with the size that would be enough.
    """
    must = set(always)
    order = selection_order(counts, vocab_size=vocab_size, always=must, never=never)
    if len(must) > draft_vocab_size:
        raise VocabMapError(f"{len(must)} ids must be in, the draft vocabulary holds {draft_vocab_size}")
    if not 1 <= draft_vocab_size <= len(order):
        raise VocabMapError(f"a draft vocabulary has 1 to {len(order)} ids here, got {draft_vocab_size}")
    chosen = order[:draft_vocab_size]
    coverage = coverage_of(counts, chosen)
    if coverage < min_coverage:
        by_size = coverage_by_size(counts, order, range(draft_vocab_size, len(order) + 1))
        enough = next((size for size, share in by_size.items() if share >= min_coverage), None)
        hint = "no number of ids does" if enough is None else f"{enough} ids do"
        raise VocabMapError(
            f"{draft_vocab_size} ids cover {coverage:.4f} of the counted tokens, at least {min_coverage} asked for; "
            f"{hint}"
        )
    return VocabMap(tuple(sorted(chosen)), vocab_size)
