from __future__ import annotations

import pickle

import pytest

torch = pytest.importorskip("torch")

from nemo_rl.distributed.batched_data_dict import BatchedDataDict  # noqa: E402  after the guard


def make(size: int = 8, *, length: int = 3) -> BatchedDataDict:
    ids = torch.arange(size * length).view(size, length)
    return BatchedDataDict(
        {"input_ids": ids, "reward": torch.arange(size).float(), "text": [f"t{i}" for i in range(size)]}
    )


def test_size_and_dict() -> None:
    batch = make(4)
    assert batch.size == 4
    assert BatchedDataDict().size == 0
    assert list(batch.get_dict()) == ["input_ids", "reward", "text"]
    assert type(batch.get_dict()) is dict


def test_column_of_another_length_fails_where_it_is_set() -> None:
    batch = make(4)
    with pytest.raises(ValueError, match=r"BatchedDataDict\['advantages'\]: got 3 rows; 'input_ids' has 4"):
        batch["advantages"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"BatchedDataDict\['input_ids'\]: got 5 rows; 'reward' has 4"):
        batch["input_ids"] = torch.zeros(5, 2)
    with pytest.raises(ValueError, match=r"got 2 rows; 'a' has 1"):
        BatchedDataDict({"a": [1], "b": [1, 2]})
    with pytest.raises(ValueError, match="without dimensions"):
        batch["loss"] = torch.tensor(1.0)
    with pytest.raises(TypeError, match="got float; must be a tensor or a list"):
        batch["loss"] = 1.0
    assert set(batch) == {"input_ids", "reward", "text"}
    only = BatchedDataDict({"a": [1]})
    only["a"] = [1, 2]
    assert only.size == 2


def test_slice_cuts_every_column_and_stops_at_the_end() -> None:
    part = make(4).slice(1, 3)
    assert part["reward"].tolist() == [1.0, 2.0]
    assert part["text"] == ["t1", "t2"]
    assert make(4).slice(3, 10).size == 1
    with pytest.raises(IndexError, match=r"got \[3, 1\)"):
        make(4).slice(3, 1)
    with pytest.raises(IndexError, match=r"got \[-1, 1\)"):
        make(4).slice(-1, 1)


def test_select_indices_keeps_order_and_repeats() -> None:
    for indices in ([2, 0, 2], torch.tensor([2, 0, 2])):
        picked = make(4).select_indices(indices)
        assert picked["reward"].tolist() == [2.0, 0.0, 2.0]
        assert picked["text"] == ["t2", "t0", "t2"]
    assert make(4).select_indices([]).size == 0
    with pytest.raises(IndexError, match="the batch has rows 0 to 3"):
        make(4).select_indices([4])
    with pytest.raises(IndexError, match="rows 0 to 3"):
        make(4).select_indices([-1])


def test_shards_are_contiguous_and_equal() -> None:
    shards = make(8).shard_by_batch_size(2)
    assert [shard["reward"].tolist() for shard in shards] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [shard["text"] for shard in shards] == [["t0", "t1", "t2", "t3"], ["t4", "t5", "t6", "t7"]]


def test_shards_of_several_batches_hold_their_part_of_each_in_order() -> None:
    shards = make(8).shard_by_batch_size(2, batch_size=4)
    assert [shard["reward"].tolist() for shard in shards] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert [shard["text"] for shard in shards] == [["t0", "t1", "t4", "t5"], ["t2", "t3", "t6", "t7"]]


@pytest.mark.parametrize(
    ("shards", "batch_size", "said"),
    [
        (3, None, "got batch size 8; must be a multiple of 3 shards"),
        (2, 3, "must divide the 8 samples"),
        (0, None, "both must be >= 1"),
        (4, 2, "got batch size 2; must be a multiple of 4 shards"),
    ],
)
def test_uneven_shards_are_refused(shards: int, batch_size: int | None, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make(8).shard_by_batch_size(shards, batch_size)


def test_repeat_interleave_copies_list_items() -> None:
    batch = BatchedDataDict({"x": torch.tensor([[1], [2]]), "meta": [{"n": 1}, {"n": 2}]})
    repeated = batch.repeat_interleave(2)
    assert repeated["x"].tolist() == [[1], [1], [2], [2]]
    assert repeated["meta"] == [{"n": 1}, {"n": 1}, {"n": 2}, {"n": 2}]
    repeated["meta"][0]["n"] = 9
    assert (repeated["meta"][1]["n"], batch["meta"][0]["n"]) == (1, 1)
    with pytest.raises(ValueError, match="got 0; must be >= 1"):
        batch.repeat_interleave(0)


def test_from_batches_right_pads_each_key_with_its_value() -> None:
    a = BatchedDataDict(
        {"ids": torch.tensor([[1, 2]]), "mask": torch.tensor([[True, True]]), "n": torch.tensor([2]), "t": ["a"]}
    )
    b = BatchedDataDict(
        {
            "ids": torch.tensor([[3, 4, 5]]),
            "mask": torch.ones(1, 3, dtype=torch.bool),
            "n": torch.tensor([3]),
            "t": ["b"],
        }
    )
    joined = BatchedDataDict.from_batches([a, b], pad_value_dict={"ids": 9})
    assert joined["ids"].tolist() == [[1, 2, 9], [3, 4, 5]]
    assert joined["mask"].tolist() == [[True, True, False], [True, True, True]]
    assert joined["mask"].dtype == torch.bool
    assert joined["n"].tolist() == [2, 3]
    assert joined["t"] == ["a", "b"]


def test_from_batches_pads_dimension_one_of_deeper_tensors() -> None:
    a, b = ({"h": torch.ones(1, length, 2)} for length in (1, 3))
    joined = BatchedDataDict.from_batches([a, b])["h"]
    assert joined.shape == (2, 3, 2)
    assert joined[0].tolist() == [[1, 1], [0, 0], [0, 0]]


def test_from_batches_inverts_slicing() -> None:
    batch = make(6)
    joined = BatchedDataDict.from_batches([batch.slice(0, 2), batch.slice(2, 2), batch.slice(2, 6)])
    assert torch.equal(joined["input_ids"], batch["input_ids"])
    assert joined["text"] == batch["text"]


def test_from_batches_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="got no batch"):
        BatchedDataDict.from_batches([])
    with pytest.raises(ValueError, match=r"batch 1 differs from batch 0: lacks \['b'\], adds \['c'\]"):
        BatchedDataDict.from_batches([{"a": [1], "b": [1]}, {"a": [1], "c": [1]}])
    with pytest.raises(TypeError, match="'a' is a tensor in some batches"):
        BatchedDataDict.from_batches([{"a": [1]}, {"a": torch.zeros(1)}])
    with pytest.raises(ValueError, match=r"'a' is torch.float32 \[1\] in one batch and torch.int64 \[1\]"):
        BatchedDataDict.from_batches([{"a": torch.zeros(1)}, {"a": torch.zeros(1, dtype=torch.int64)}])
    with pytest.raises(ValueError, match="only dimension 1 may differ"):
        BatchedDataDict.from_batches([{"a": torch.zeros(1, 2, 3)}, {"a": torch.zeros(1, 2, 4)}])


def test_to_moves_tensors_in_this_batch() -> None:
    batch = make(2)
    assert batch.to("meta") is batch
    assert batch["input_ids"].device.type == "meta"
    assert batch["text"] == ["t0", "t1"]


def test_survives_pickling() -> None:
    copy = pickle.loads(pickle.dumps(make(3)))
    assert isinstance(copy, BatchedDataDict)
    assert copy["reward"].tolist() == [0.0, 1.0, 2.0]
    assert copy.size == 3
