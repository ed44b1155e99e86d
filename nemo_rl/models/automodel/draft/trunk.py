"""The rows that a draft on a causal trunk computes: positions that nothing supervised depends on are left out.

Shape symbols: R rows, S row length, N trunk rows. A slot is a position t of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["TrunkRows", "predicted_tokens"]


@dataclass(frozen=True)
class TrunkRows:
    """Positions up to the last slot of each document that is computed at all, in the order of the flattened rows.

    Attributes:
        source: int64 [N], entry of the flattened [R * S] rows.
        first: int64 [N], first trunk row of the row's document.
        row_of: int64 [R * S], trunk row of each entry, -1 outside.
    """

    source: Tensor
    first: Tensor
    row_of: Tensor

    @classmethod
    def build(cls, doc_ids: Tensor, needed: Tensor) -> TrunkRows:
        """Cut documents behind their last needed slot.

        Worked example, documents 0 0 0 0 1 1 1, slots 1, 2 and 5 needed: rows 0 1 2 4 5, firsts 0 0 0 3 3.

        Args:
            doc_ids: int64 [R, S], -1 on padding; on the CPU.
            needed: bool [R, S], slots that are computed; at least one.
        """
        rows, width = doc_ids.shape
        columns = torch.arange(width)
        # The nearest slot at or after t that is needed; t is in the trunk when that slot is in its document.
        last = torch.where(needed, columns, width).flip(1).cummin(1).values.flip(1)
        after = torch.gather(torch.cat([doc_ids, torch.full((rows, 1), -1)], dim=1), 1, last)
        docs = doc_ids.flatten()
        source = ((doc_ids >= 0) & (after == doc_ids)).flatten().nonzero().squeeze(1)
        row_of = torch.full((rows * width,), -1)
        row_of[source] = torch.arange(source.numel())
        is_first = torch.ones(source.numel(), dtype=torch.bool)
        is_first[1:] = (docs[source[1:]] != docs[source[:-1]]) | (source[1:] // width != source[:-1] // width)
        if int(is_first.sum()) != docs[source].unique().numel():
            raise ValueError("doc_ids: a document must be one run of one row")
        return cls(source, is_first.nonzero().squeeze(1)[is_first.cumsum(0) - 1], row_of)


def predicted_tokens(input_ids: Tensor, doc_ids: Tensor, teacher: Tensor) -> Tensor:
    """The sampled token that each element predicts: the one behind its teacher row; -1 when the document ends there.

    Args:
        input_ids: int64 [R, S].
        doc_ids: int64 [R, S].
        teacher: int64 [E], entry of the flattened rows whose logits are the element's target.

    Returns:
        int64 [E].
    """
    ids, docs = input_ids.flatten(), doc_ids.flatten()
    # The row's end is no neighbour of the next row's first token, whose document differs anyway.
    ids, docs = torch.cat([ids, ids.new_zeros(1)]), torch.cat([docs, docs.new_full((1,), -2)])
    return torch.where(docs[teacher + 1] == docs[teacher], ids[teacher + 1], -1)
