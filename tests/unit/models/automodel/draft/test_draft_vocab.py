"""The draft vocabulary: offsets, masks, selection."""

from __future__ import annotations

import random

import pytest

from nemo_rl.models.automodel.draft.vocab import VocabMap, VocabMapError, select_vocab


def test_tables_hold_offsets_and_presence():
    mapping = VocabMap((3, 9, 17, 21), 32)
    assert mapping.d2t == [3, 8, 15, 18]
    assert [i for i, flag in enumerate(mapping.t2d) if flag] == [3, 9, 17, 21]


def test_identity_is_all_zeros():
    mapping = VocabMap(tuple(range(32)), 32)
    assert mapping.d2t == [0] * 32
    assert mapping.is_identity


@pytest.mark.parametrize("seed", range(4))
def test_round_trip_through_the_engines_formula(seed):
    ids = random.Random(seed).sample(range(50), 20)
    mapping = VocabMap(tuple(ids), 50)
    engine = [i + offset for i, offset in enumerate(mapping.d2t)]
    assert engine == ids
    again = VocabMap.from_tables(mapping.d2t, vocab_size=50, draft_vocab_size=20, t2d=mapping.t2d)
    assert again == mapping
    assert mapping.is_ascending == (ids == sorted(ids))


def test_arange_offsets_are_refused():
    """A table of `arange` (target id 2 i) is the fault of writers that take the offsets for ids."""
    with pytest.raises(VocabMapError, match=r"lie outside.*62.*offsets.*zeros, not arange"):
        VocabMap.from_tables(list(range(32)), vocab_size=32, draft_vocab_size=32)


@pytest.mark.parametrize(
    ("ids", "match"),
    [
        ((1, 1, 2), "distinct"),
        ((-1, 2), "outside"),
        ((5, 32), "outside"),
        ((), "1 to 32"),
        (tuple(range(33)), "1 to 32"),
    ],
)
def test_impossible_maps_are_refused(ids, match):
    with pytest.raises(VocabMapError, match=match):
        VocabMap(ids, 32)


def test_tables_must_agree():
    mapping = VocabMap((3, 9), 12)
    wrong = mapping.t2d
    wrong[4] = True
    with pytest.raises(VocabMapError, match=r"disagree about 1 target ids, first \[4\]"):
        VocabMap.from_tables(mapping.d2t, vocab_size=12, draft_vocab_size=2, t2d=wrong)
    with pytest.raises(VocabMapError, match="d2t has 2 entries, draft_vocab_size is 3"):
        VocabMap.from_tables(mapping.d2t, vocab_size=12, draft_vocab_size=3)
    with pytest.raises(VocabMapError, match="t2d has 11 entries"):
        VocabMap.from_tables(mapping.d2t, vocab_size=12, draft_vocab_size=2, t2d=wrong[:-1])
    assert VocabMap.from_mask(mapping.t2d) == mapping


def test_selection_is_by_frequency_with_forced_ids_and_ascending():
    counts = {7: 10, 3: 5, 9: 5, 1: 1, 2: 1}
    chosen = select_vocab(counts, draft_vocab_size=4, vocab_size=16, always=[15], min_coverage=0.5)
    assert chosen.ids == (3, 7, 9, 15)
    filled = select_vocab({7: 1}, draft_vocab_size=4, vocab_size=16)
    assert filled.ids == (0, 1, 2, 7)
    with pytest.raises(VocabMapError, match=r"cover 0\.455 of the counted tokens"):
        select_vocab(counts, draft_vocab_size=1, vocab_size=16)
    with pytest.raises(VocabMapError, match="2 ids must be in"):
        select_vocab(counts, draft_vocab_size=1, vocab_size=16, always=[1, 2])
