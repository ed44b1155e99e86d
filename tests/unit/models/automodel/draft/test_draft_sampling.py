"""Keyed draws: what they depend on, their distribution, the caps of the conditional drop."""

from __future__ import annotations

import math

import pytest
import torch

from nemo_rl.models.automodel.draft.runtime import charged_depths
from nemo_rl.models.automodel.draft.sampling import cod_caps, document_generator, draw_anchors, draw_cod

KEY = {"seed": 7, "step": 3, "sample": 11, "purpose": "anchors"}


def _charged(mask: str, depths: int = 8) -> torch.Tensor:
    sampled = torch.tensor([[c == "1" for c in mask]])
    return charged_depths(sampled, torch.zeros(1, len(mask), dtype=torch.long), depths=depths, mask_rule="contiguous")[
        :, 0
    ]


def _cod(mask: str, depths: int = 8, **key) -> list[list[int]]:
    generator = document_generator(**KEY | {"purpose": "cod"} | key)
    return [s.tolist() for s in draw_cod(_charged(mask, depths), ratio=0.7, ratio_min=0.2, generator=generator)]


# -- generators ------------------------------------------------------------------------------------------------------


def test_the_same_key_gives_the_same_numbers_and_every_part_of_it_counts():
    def numbers(**changes):
        return torch.rand(8, generator=document_generator(**KEY | changes)).tolist()

    assert numbers() == numbers()
    others = [{"seed": 8}, {"step": 4}, {"sample": 12}, {"purpose": "cod"}]
    # Parts must not run into each other: step 1, sample 11 is not step 11, sample 1.
    others += [{"step": 1, "sample": 11}, {"step": 11, "sample": 1}, {"seed": 73, "step": 1}]
    assert len({tuple(numbers(**c)) for c in [{}, *others]}) == 8


def test_a_draw_neither_reads_nor_moves_the_global_generator():
    candidates = torch.arange(1, 200)
    torch.manual_seed(0)
    first = draw_anchors(candidates, 9, generator=document_generator(**KEY))
    after = torch.rand(1)
    torch.manual_seed(0)
    assert torch.equal(torch.rand(1), after)
    torch.manual_seed(123)
    assert torch.equal(draw_anchors(candidates, 9, generator=document_generator(**KEY)), first)


def test_seeds_do_not_change_from_version_to_version():
    """Another spelling of the key would change every run that is resumed."""
    assert document_generator(**KEY).initial_seed() == PINNED_SEED


PINNED_SEED = 2156069104763075195


# -- anchors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "count"), [(0, 4), (1, 4), (4, 4), (5, 4), (40, 1)])
def test_anchors_are_a_sorted_subset_without_repetition(size, count):
    candidates = torch.arange(size) * 3 + 2
    got = draw_anchors(candidates, count, generator=document_generator(**KEY)).tolist()
    assert len(got) == min(size, count)
    assert got == sorted(set(got))
    assert set(got) <= set(candidates.tolist())


def test_every_candidate_and_pair_is_equally_likely():
    candidates, count, rounds = torch.tensor([2, 3, 5, 8, 13, 21]), 3, 4000
    single, pairs = torch.zeros(22), torch.zeros(22, 22)
    for sample in range(rounds):
        got = draw_anchors(candidates, count, generator=document_generator(**KEY | {"sample": sample}))
        single[got] += 1
        pairs[got[:, None], got[None]] += 1
    n = candidates.numel()
    for observed, p in (
        (single[candidates], count / n),
        (pairs[candidates][:, candidates][~torch.eye(n, dtype=torch.bool)], count * (count - 1) / (n * (n - 1))),
    ):
        z = (observed - rounds * p) / math.sqrt(rounds * p * (1 - p))
        assert z.abs().max() < 4.0, z


# -- conditional drop ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chains", "caps"),
    [
        (10, [6, 3, 2, 1, 1, 0, 0]),
        (100, [69, 48, 33, 23, 19, 18, 18]),
        (1000, [699, 489, 341, 239, 199, 198, 198]),
        (1, [0] * 7),
        (0, [0] * 7),
    ],
)
def test_caps_table(chains, caps):
    assert cod_caps(chains, depths=8, ratio=0.7, ratio_min=0.2) == [chains, *caps]


def test_the_floor_is_taken_of_the_exact_product():
    assert 100 * 0.7**2 < 49.0, "floats fall short of the product"
    assert cod_caps(102, depths=3, ratio=0.7, ratio_min=0.2)[2] == 49
    assert cod_caps(11, depths=2, ratio=1.0, ratio_min=0.0) == [11, 10]


@pytest.mark.parametrize("length", [10, 100])
def test_sets_have_the_size_of_the_caps_and_are_nested(length):
    chosen = _cod("00" + "1" * (length + 1))
    # The first sampled token is no prediction of the draft.
    assert chosen[0] == list(range(1, length + 1))
    caps = cod_caps(len(chosen[0]), depths=8, ratio=0.7, ratio_min=0.2)
    charged = _charged("00" + "1" * (length + 1))
    for k in range(1, 8):
        assert set(chosen[k]) <= set(chosen[k - 1])
        assert chosen[k] == sorted(set(chosen[k]))
        pool = [a for a in chosen[k - 1] if bool(charged[k, a])]
        assert len(chosen[k]) == min(caps[k], len(pool))
        assert all(bool(charged[k, a]) for a in chosen[k])


def test_every_chain_of_the_pool_is_equally_likely():
    rounds, charged = 2000, _charged("00" + "1" * 12, 3)
    counts = torch.zeros(3, charged.shape[1])
    for sample in range(rounds):
        generator = document_generator(**KEY | {"purpose": "cod", "sample": sample})
        for k, slots in enumerate(draw_cod(charged, ratio=0.7, ratio_min=0.2, generator=generator)):
            counts[k, slots] += 1
    assert counts[0, charged[0]].eq(rounds).all()
    # Of the 11 chains, 10 have a second prediction; depth 1 keeps 7 of them.
    pool = charged[1].nonzero().squeeze(1)
    p = 7 / pool.numel()
    z = (counts[1, pool] - rounds * p) / math.sqrt(rounds * p * (1 - p))
    assert z.abs().max() < 4.0, z


def test_a_chain_stops_at_a_token_that_was_not_sampled():
    chosen = _cod("0111111011111111", depths=4)
    assert chosen[0] == [0, 1, 2, 3, 4, 7, 8, 9, 10, 11, 12, 13]
    # Chains from slots 3 and 12 on end before their third prediction.
    assert not {3, 4, 12, 13} & set(chosen[2])


@pytest.mark.parametrize("mask", ["0", "1", "01", "11", "000", "001"])
def test_documents_without_a_chain_choose_nothing(mask):
    assert _cod(mask) == [[]] * 8


def test_the_first_position_is_the_least_anchor():
    """Nothing is drawn before the document: a negative slot would be read from its end."""
    assert _cod("1111", depths=3)[0] == [0, 1]
    assert all(a >= 0 for depth in _cod("1" * 50) for a in depth)


def test_draws_do_not_depend_on_where_the_document_lies():
    """Alone, right padded, and as part of a packed row: the same local slots."""
    mask, depths = "00111111111111", 5
    alone = _cod(mask, depths)
    row = "0111" + mask + "011"
    docs = torch.tensor([[0] * 4 + [1] * len(mask) + [2] * 3 + [-1] * 6])
    sampled = torch.tensor([[c == "1" for c in row + "0" * 6]])
    charged = charged_depths(sampled, docs, depths=depths, mask_rule="contiguous")[:, 0]
    inside = charged[:, 4 : 4 + len(mask)]
    generator = document_generator(**KEY | {"purpose": "cod"})
    got = draw_cod(inside, ratio=0.7, ratio_min=0.2, generator=generator)
    assert [s.tolist() for s in got] == alone
    assert _cod(mask + "000", depths) == alone
