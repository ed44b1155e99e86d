"""How often each token id occurs in what a draft has to propose: sampled responses, or the answers of a data set."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl.data.datasets import build_sources
from nemo_rl.data.sources import HUB_DATASETS, MISSING, field_of, load_table
from nemo_rl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nemo_rl.data.config import DataConfig

__all__ = ["answer_texts", "count_texts", "count_tokens"]

TEXTS_PER_BATCH = 1024
"""Texts tokenized at once."""


def count_tokens(input_ids: Tensor, mask: Tensor, *, vocab_size: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """Count the supervised tokens. The sum over batches does not depend on how they are cut or spread over ranks.

    Args:
        input_ids: int64, any shape.
        mask: bool or 0/1 of the same shape, True = the token is supervised; what the others hold is not read.
        vocab_size: target ids V.
        group: ranks that hold other tokens; every rank must call, also with nothing to count. None = this rank's alone.

    Returns:
        int64 [V] on the device of `input_ids`, the sum over ranks.

    Raises:
        ValueError: a supervised id is none of the V, on some rank; every rank raises.
    """
    ids = input_ids[mask.bool()]
    # Ids that do not exist share one more bin, so that all ranks see them behind the collective.
    ids = torch.where((ids >= 0) & (ids < vocab_size), ids, vocab_size)
    counts = torch.bincount(ids, minlength=vocab_size + 1)
    if group is not None:
        dist.all_reduce(counts, group=group)
    unknown = int(counts[vocab_size])
    if unknown:
        raise ValueError(f"{unknown} supervised tokens lie outside the vocabulary of {vocab_size}")
    return counts[:vocab_size]


def count_texts(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, *, vocab_size: int) -> Tensor:
    """Count the tokens of texts.

    Args:
        texts: any number.
        tokenizer: of the policy; adds no special tokens.
        vocab_size: target ids V.

    Returns:
        int64 [V].
    """
    total = torch.zeros(vocab_size, dtype=torch.int64)
    remaining = iter(texts)
    while batch := list(islice(remaining, TEXTS_PER_BATCH)):
        rows = tokenizer(batch, add_special_tokens=False)["input_ids"]
        ids = torch.tensor([i for row in rows for i in row], dtype=torch.int64)
        total += count_tokens(ids, torch.ones_like(ids), vocab_size=vocab_size)
    return total


def answer_texts(data: DataConfig, *, seed: int, field: str | None = None) -> Iterator[str]:
    """The expected answers of the training questions.

    Args:
        data: `data`.
        seed: as for `build_datasets`.
        field: field of the rows to read instead, e.g. of written-out solutions; dots go into nested fields. None = the
            answer that responses are compared with.

    Raises:
        ConfigError: the data cannot be read, or have no such field.
    """
    if field is None:
        source, _ = build_sources(data, seed=seed)
        return (str(source[i].metadata["ground_truth"]) for i in range(len(source)))
    known = HUB_DATASETS.get(data.dataset_name)
    if known is None or data.train_data_path is not None:
        if data.dataset_name == "reasoning_gym":
            raise ConfigError(f"--field: got {field!r}; generated questions have no rows with fields. Remove it.")
        named = data.model_copy(update={"dataset_name": "ResponseDataset", "output_key": field})
        if known is not None:
            named = named.model_copy(update={"input_key": known.input_key})
        return answer_texts(named, seed=seed)
    split = data.train_split or known.train_split
    table = load_table(known.path, setting="data.dataset_name", subset=known.subset, split=split, usual=())
    return _texts_of(table, field, origin=known.path)


def _texts_of(table: Iterable[object], field: str, *, origin: str) -> Iterator[str]:
    for row, record in enumerate(table):
        value = field_of(record, field)
        if value is MISSING:
            raise ConfigError(f"--field: got {field!r}; {origin}, row {row}, has no such field. Correct the name.")
        if value is not None:
            yield str(value)
