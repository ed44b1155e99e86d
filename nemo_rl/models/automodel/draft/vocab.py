"""The draft vocabulary: the only place that knows that `d2t` holds offsets and `t2d` a mask.

Draft id `i` stands for target id `i + d2t[i]` (the engine adds `arange` to the table), so the identity is all zeros.
Worked example: target ids `[3, 9, 17, 21]` give `d2t = [3, 8, 15, 18]`. Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["VocabMap", "VocabMapError", "select_vocab"]


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
                f"{len(outside)} of {size} ids lie outside the target's 0..{self.vocab_size - 1} (e.g. {outside[-1]}). "
                "d2t holds offsets: target id = draft id + d2t[draft id]; the identity is all zeros, not arange"
            )
        if len(unique) != size:
            repeated = next(i for i in self.ids if self.ids.count(i) > 1) if size < 4096 else "some"
            raise VocabMapError(f"target ids must be distinct; {repeated} occur(s) more than once")

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
        mapping = cls(tuple(i + int(offset) for i, offset in enumerate(d2t)), vocab_size)
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

    @property
    def d2t(self) -> list[int]:
        """Offsets as the engine adds them."""
        return [v - i for i, v in enumerate(self.ids)]

    @property
    def t2d(self) -> list[bool]:
        """One flag per target id."""
        present = set(self.ids)
        return [v in present for v in range(self.vocab_size)]


def select_vocab(
    counts: Mapping[int, int],
    *,
    draft_vocab_size: int,
    vocab_size: int,
    always: Iterable[int] = (),
    min_coverage: float = 0.95,
) -> VocabMap:
    """Choose the most frequent ids of supervised tokens.

    Args:
        counts: target id to how often the policy sampled it.
        draft_vocab_size: ids to choose.
        vocab_size: number of target ids.
        always: ids that must be in (end of sequence, stop ids, special ids that can be generated).
        min_coverage: least share of the counted tokens that the chosen ids must hold.

    Returns:
        Ascending map. Ties go to the smaller id; with fewer distinct ids than asked for, the smallest unused ones
        fill up.
    """
    must = sorted(set(always))
    if len(must) > draft_vocab_size:
        raise VocabMapError(f"{len(must)} ids must be in, the draft vocabulary holds {draft_vocab_size}")
    ranked = sorted((i for i in counts if i not in set(must)), key=lambda i: (-counts[i], i))
    chosen = set(must) | set(ranked[: draft_vocab_size - len(must)])
    fill = iter(range(vocab_size))
    while len(chosen) < min(draft_vocab_size, vocab_size):
        chosen.add(next(fill))
    total = sum(counts.values())
    coverage = sum(counts.get(i, 0) for i in chosen) / total if total else 1.0
    if coverage < min_coverage:
        raise VocabMapError(
            f"{draft_vocab_size} ids cover {coverage:.3f} of the counted tokens, at least {min_coverage} asked for"
        )
    return VocabMap(tuple(sorted(chosen)), vocab_size)
