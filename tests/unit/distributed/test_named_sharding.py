from __future__ import annotations

import numpy as np
import pytest

from nemo_rl.distributed.named_sharding import NamedSharding


@pytest.fixture
def sharding() -> NamedSharding:
    return NamedSharding.from_sizes(dp=2, cp=2, tp=2)


def test_numbers_ranks_with_the_last_axis_fastest(sharding: NamedSharding) -> None:
    assert sharding.layout.tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert sharding.shape == {"dp": 2, "cp": 2, "tp": 2}
    assert (sharding.size, sharding.ndim, sharding.names) == (8, 3, ["dp", "cp", "tp"])
    assert (sharding.get_axis_index("cp"), sharding.get_axis_size("tp")) == (1, 2)


def test_coordinates_invert_the_layout(sharding: NamedSharding) -> None:
    assert sharding.get_worker_coords(6) == {"dp": 1, "cp": 1, "tp": 0}
    for rank in range(8):
        assert sharding.get_ranks(**sharding.get_worker_coords(rank)) == rank


def test_fixed_axes_leave_a_smaller_sharding(sharding: NamedSharding) -> None:
    assert sharding.get_ranks(dp=1) == NamedSharding([[4, 5], [6, 7]], ["cp", "tp"])
    assert sharding.get_ranks(tp=1, dp=0) == NamedSharding([1, 3], ["cp"])
    assert sharding.get_ranks(dp=1, cp=0, tp=1) == 5
    assert sharding.get_ranks_by_coord(cp=1) == [2, 3, 6, 7]
    assert sharding.get_ranks_by_coord(dp=0, cp=0, tp=0) == [0]
    assert sharding.get_ranks_by_coord() == list(range(8))


def test_ranks_that_share_data_differ_only_on_other_axes(sharding: NamedSharding) -> None:
    assert sharding.ranks_sharing_data(5, data_axes=["dp"]) == [4, 5, 6, 7]
    assert sharding.ranks_sharing_data(5, data_axes=["dp", "cp"]) == [4, 5]
    assert sharding.ranks_sharing_data(5, data_axes=["dp", "cp", "tp"]) == [5]


def test_layout_may_be_permuted_and_is_copied() -> None:
    permuted = NamedSharding(np.array([[3, 1], [0, 2]]), ["dp", "tp"])
    assert permuted.get_worker_coords(0) == {"dp": 1, "tp": 0}
    assert permuted.get_ranks_by_coord(dp=0) == [1, 3]
    permuted.layout[0, 0] = 9
    assert permuted.get_worker_coords(3) == {"dp": 0, "tp": 0}
    assert permuted != NamedSharding([[3, 1], [0, 2]], ["tp", "dp"])
    assert len({permuted, NamedSharding([[3, 1], [0, 2]], ["dp", "tp"])}) == 1


@pytest.mark.parametrize(
    ("layout", "names", "said"),
    [
        ([[0, 1], [1, 2]], ["a", "b"], r"ranks \[1\] appear more than once"),
        ([0.5, 1.0], ["a"], "must hold integer ranks"),
        ([[0, 1]], ["a"], "the layout has 2 dimensions"),
        ([[0, 1]], ["a", "a"], "each axis needs its own name"),
    ],
)
def test_impossible_layouts_are_refused(layout: list, names: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        NamedSharding(layout, names)


def test_unknown_axis_rank_and_index_name_the_allowed(sharding: NamedSharding) -> None:
    with pytest.raises(ValueError, match="axis: got 'pp'; must be one of dp, cp, tp"):
        sharding.get_ranks(pp=0)
    with pytest.raises(IndexError, match=r"dp: got 2; the axis has 2 slices \(0 to 1\)"):
        sharding.get_ranks(dp=2)
    with pytest.raises(ValueError, match="rank: got 8"):
        sharding.get_worker_coords(8)
    with pytest.raises(ValueError, match="every axis needs a size >= 1"):
        NamedSharding.from_sizes(dp=0)
