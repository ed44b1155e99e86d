"""The batch type: equally long columns that are sliced, sharded, joined and moved together."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class BatchedDataDict(UserDict):
    """A dict whose values are tensors with the batch first, or lists, all of one length.

    Setting a key checks its length against the other keys, so a column that lost its rows fails where it is set.
    """

    def __setitem__(self, key: str, item: Tensor | list) -> None:
        rows = _num_rows(key, item)
        other = next((name for name in self.data if name != key), None)
        if other is not None and len(self.data[other]) != rows:
            raise ValueError(
                f"BatchedDataDict[{key!r}]: got {rows} rows; {other!r} has {len(self.data[other])}. "
                "Every column of a batch holds one row per sample."
            )
        super().__setitem__(key, item)

    @property
    def size(self) -> int:
        """Number of samples; 0 without keys."""
        return len(next(iter(self.data.values()))) if self.data else 0

    @classmethod
    def from_batches(
        cls, batches: Iterable[Mapping[str, Any]], pad_value_dict: Mapping[str, Any] | None = None
    ) -> BatchedDataDict:
        """Join batches along the samples.

        Args:
            batches: batches with the same keys. Tensors [B, T, ...] may differ in T; each is right padded to the
                longest.
            pad_value_dict: key to the value that pads it; 0 for keys it does not name.

        Returns:
            One batch, samples in the order of ``batches``.
        """
        batches = list(batches)
        if not batches:
            raise ValueError("from_batches: got no batch; needs at least one.")
        keys = list(batches[0])
        for index, batch in enumerate(batches):
            if set(batch) != set(keys):
                missing, extra = sorted(set(keys) - set(batch)), sorted(set(batch) - set(keys))
                raise ValueError(f"from_batches: batch {index} differs from batch 0: lacks {missing}, adds {extra}.")
        pads = pad_value_dict or {}
        return cls({key: _join(key, [batch[key] for batch in batches], pad=pads.get(key, 0)) for key in keys})

    def slice(self, start: int, end: int) -> BatchedDataDict:
        """Rows ``start`` to ``end`` (exclusive, cut at the end of the batch); tensors are views."""
        if not 0 <= start <= end:
            raise IndexError(f"slice: got [{start}, {end}); needs 0 <= start <= end in a batch of {self.size}.")
        return BatchedDataDict({key: column[start:end] for key, column in self.data.items()})

    def select_indices(self, indices: Sequence[int] | Tensor) -> BatchedDataDict:
        """Rows by index, in the order given; a row may repeat.

        Args:
            indices: i64 [N] or a sequence of ints in [0, size).
        """
        rows = torch.as_tensor(indices, dtype=torch.int64).flatten().cpu()
        if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < self.size:
            raise IndexError(f"select_indices: got {rows.tolist()}; the batch has rows 0 to {self.size - 1}.")
        chosen = rows.tolist()
        return BatchedDataDict(
            {
                key: column[rows.to(column.device)] if isinstance(column, Tensor) else [column[row] for row in chosen]
                for key, column in self.data.items()
            }
        )

    def shard_by_batch_size(self, shards: int, batch_size: int | None = None) -> list[BatchedDataDict]:
        """Cut every batch of ``batch_size`` samples into equal contiguous shards.

        Eight samples, 2 shards, batch size 4: ``[0, 1, 4, 5]`` and ``[2, 3, 6, 7]``, so shard ``i`` holds its part of
        the first batch before its part of the second.

        Args:
            shards: number of shards, one per data-parallel rank.
            batch_size: global batch size; None takes all samples as one batch.

        Returns:
            ``shards`` batches of ``size / shards`` samples.
        """
        total = self.size
        batch_size = total if batch_size is None else batch_size
        if shards < 1 or batch_size < 1 or total % batch_size:
            raise ValueError(
                f"shard_by_batch_size: got {shards} shards, batch size {batch_size}; both must be >= 1 and the batch "
                f"size must divide the {total} samples."
            )
        if batch_size % shards:
            raise ValueError(
                f"shard_by_batch_size: got batch size {batch_size}; must be a multiple of {shards} shards."
            )
        part = batch_size // shards
        if batch_size == total:
            return [self.slice(shard * part, (shard + 1) * part) for shard in range(shards)]
        rows = torch.arange(total).view(-1, shards, part)  # [batch, shard, sample]
        return [self.select_indices(rows[:, shard].flatten()) for shard in range(shards)]

    def repeat_interleave(self, num_repeats: int) -> BatchedDataDict:
        """Repeat every row ``num_repeats`` times in place: a, a, b, b. List items are copied."""
        if num_repeats < 1:
            raise ValueError(f"repeat_interleave: got {num_repeats}; must be >= 1.")
        return BatchedDataDict(
            {
                key: column.repeat_interleave(num_repeats, dim=0)
                if isinstance(column, Tensor)
                else [copy.deepcopy(item) for item in column for _ in range(num_repeats)]
                for key, column in self.data.items()
            }
        )

    def to(self, device: str | torch.device) -> BatchedDataDict:
        """Move every tensor to a device, in this batch; returns the batch itself."""
        for key, column in self.data.items():
            if isinstance(column, Tensor):
                self.data[key] = column.to(device)
        return self

    def get_dict(self) -> dict[str, Any]:
        """A plain dict of the columns."""
        return dict(self.data)


def _num_rows(key: str, value: Any) -> int:
    if isinstance(value, Tensor):
        if value.ndim == 0:
            raise ValueError(f"BatchedDataDict[{key!r}]: got a tensor without dimensions; the batch comes first.")
        return len(value)
    if isinstance(value, list):
        return len(value)
    raise TypeError(f"BatchedDataDict[{key!r}]: got {type(value).__name__}; must be a tensor or a list.")


def _join(key: str, columns: list[Any], *, pad: Any) -> Tensor | list:
    """Concatenate one column of several batches, padding dimension 1 of tensors to the longest."""
    if all(isinstance(column, list) for column in columns):
        return [item for column in columns for item in column]
    if not all(isinstance(column, Tensor) for column in columns):
        raise TypeError(f"from_batches: {key!r} is a tensor in some batches and a list in others.")
    first = columns[0]
    for column in columns:
        if column.dtype != first.dtype or column.ndim != first.ndim or column.shape[2:] != first.shape[2:]:
            raise ValueError(
                f"from_batches: {key!r} is {first.dtype} {list(first.shape)} in one batch and {column.dtype} "
                f"{list(column.shape)} in another; only dimension 1 may differ."
            )
    if first.ndim < 2:
        return torch.cat(columns)
    longest = max(column.shape[1] for column in columns)
    return torch.cat([_right_pad(column, length=longest, pad=pad) for column in columns])


def _right_pad(column: Tensor, *, length: int, pad: Any) -> Tensor:
    if column.shape[1] == length:
        return column
    shape = (column.shape[0], length - column.shape[1], *column.shape[2:])
    return torch.cat([column, column.new_full(shape, pad)], dim=1)
