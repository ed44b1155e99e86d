"""Micro-batches: how one rank's shard of the global batch becomes rows for the model.

Shape symbols: B samples of a micro-batch, T their padded length, R rows, S row length. A row holds one sample, or
several documents when sequences are packed. Nothing here communicates; callers agree on the number of micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from nemo_rl.distributed.batched_data_dict import BatchedDataDict

if TYPE_CHECKING:
    from nemo_rl.models.policy.config import PolicyConfig


@dataclass(frozen=True)
class Microbatch:
    """One forward and backward of the policy.

    Attributes:
        input_ids: int64 [R, S] token rows; a row is one sample, or several when packed.
        position_ids: int64 [R, S]; restart at 0 in every document. Padding continues the count of the document before
            it, so that it makes no document of its own.
        doc_ids: int64 [R, S]; index of the sample inside this micro-batch (0..B-1), -1 on padding.
        sampled_mask: bool [R, S]; True where the policy sampled the token and its sample is kept.
        sample_index: int64 [B]; index of each sample in the global batch, the key of its random draws.
        data: the unpacked samples, right padded [B, T], for the policy loss.
    """

    input_ids: Tensor
    position_ids: Tensor
    doc_ids: Tensor
    sampled_mask: Tensor
    sample_index: Tensor
    data: BatchedDataDict


@dataclass(frozen=True)
class MicrobatchSpec:
    """How samples are grouped.

    Attributes:
        mode: `fixed` = equal sample counts, `dynamic` = equal token counts, `packed` = one row of several documents.
        num_samples: samples of a `fixed` micro-batch.
        max_tokens: tokens, padding included, of a `dynamic` or `packed` micro-batch.
        length_multiple: row lengths are rounded up to a multiple of this.
        algorithm: bin packing of `packed`.
    """

    mode: Literal["fixed", "dynamic", "packed"]
    num_samples: int
    max_tokens: int
    length_multiple: int
    algorithm: str


def microbatch_spec(cfg: PolicyConfig, *, is_training: bool) -> MicrobatchSpec:
    """Read the grouping of training or log-probability passes from `policy`."""
    num_samples = cfg.train_micro_batch_size if is_training else cfg.logprob_batch_size
    multiple = cfg.make_sequence_length_divisible_by
    for mode, section in (("dynamic", cfg.dynamic_batching), ("packed", cfg.sequence_packing)):
        if section.enabled:
            return MicrobatchSpec(
                mode=mode,
                num_samples=num_samples,
                max_tokens=section.train_mb_tokens if is_training else section.logprob_mb_tokens,
                length_multiple=math.lcm(multiple, section.sequence_length_round),
                algorithm=cfg.sequence_packing.algorithm,
            )
    return MicrobatchSpec("fixed", num_samples, 0, multiple, cfg.sequence_packing.algorithm)


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is >= `value`."""
    return -(-value // multiple) * multiple


# -- grouping --------------------------------------------------------------------------------------------------------


def plan_microbatches(lengths: Sequence[int], spec: MicrobatchSpec) -> list[list[int]]:
    """Assign every sample to exactly one micro-batch.

    Args:
        lengths: tokens of each local sample.
        spec: the grouping.

    Returns:
        Local sample indices per micro-batch. A sample longer than `max_tokens` has a micro-batch of its own.
    """
    if spec.mode == "fixed":
        n = spec.num_samples
        return [list(range(i, min(i + n, len(lengths)))) for i in range(0, len(lengths), n)]
    if spec.mode == "packed":
        return pack_bins(lengths, capacity=spec.max_tokens, algorithm=spec.algorithm)
    groups: list[list[int]] = []
    width = 0
    # Longest first: the first sample of a group sets its padded width, and the largest micro-batch fails first.
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if groups and (len(groups[-1]) + 1) * width <= spec.max_tokens:
            groups[-1].append(i)
        else:
            groups.append([i])
            width = round_up(lengths[i], spec.length_multiple)
    return groups


def pack_bins(lengths: Sequence[int], *, capacity: int, algorithm: str) -> list[list[int]]:
    """Distribute documents over rows of `capacity` tokens.

    Args:
        lengths: tokens per document.
        capacity: tokens per row; a longer document gets a row of its own.
        algorithm: `concatenative` (in order), `first_fit_shuffle` (random order, fixed seed), `first_fit_decreasing`,
            or `modified_first_fit_decreasing` (Johnson and Garey 1985).

    Returns:
        Document indices per row.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    if algorithm == "concatenative":
        return _next_fit(range(len(lengths)), lengths, capacity)
    if algorithm == "first_fit_shuffle":
        order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(0)).tolist()
        return _first_fit(order, lengths, capacity, [])
    if algorithm == "first_fit_decreasing":
        return _first_fit(order, lengths, capacity, [])
    return _modified_first_fit_decreasing(order, lengths, capacity)


def _next_fit(order: Sequence[int], lengths: Sequence[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    used = 0
    for i in order:
        if bins and used + lengths[i] <= capacity:
            bins[-1].append(i)
            used += lengths[i]
        else:
            bins.append([i])
            used = lengths[i]
    return bins


def _first_fit(order: Sequence[int], lengths: Sequence[int], capacity: int, bins: list[list[int]]) -> list[list[int]]:
    free = [capacity - sum(lengths[i] for i in b) for b in bins]
    for i in order:
        for b, room in enumerate(free):
            if lengths[i] <= room:
                bins[b].append(i)
                free[b] -= lengths[i]
                break
        else:
            bins.append([i])
            free.append(capacity - lengths[i])
    return bins


def _modified_first_fit_decreasing(order: Sequence[int], lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pair large documents with the small ones that leave the least room, then first fit for the rest.

    Args:
        order: documents, longest first.
        lengths: tokens per document.
        capacity: tokens per row.
    """
    large = [i for i in order if lengths[i] * 2 > capacity]
    rest = [i for i in order if lengths[i] * 2 <= capacity]
    bins = [[i] for i in large]
    free = [capacity - lengths[i] for i in large]
    # A medium document (more than a third) for each large one that has room, from the least full row on.
    for b in range(len(bins)):
        medium = next((i for i in rest if capacity / 3 < lengths[i] <= free[b]), None)
        if medium is not None:
            bins[b].append(medium)
            free[b] -= lengths[medium]
            rest.remove(medium)
    # Two small documents (a sixth to a third) per row that got no medium one, from the emptiest row backwards: the
    # smallest and the largest that fits beside it.
    for b in reversed(range(len(bins))):
        small = [i for i in rest if capacity / 6 < lengths[i] <= capacity / 3]
        if len(bins[b]) > 1 or len(small) < 2 or lengths[small[-1]] + lengths[small[-2]] > free[b]:
            continue
        smallest = small[-1]
        partner = next(i for i in small[:-1] if lengths[i] + lengths[smallest] <= free[b])
        for i in (smallest, partner):
            bins[b].append(i)
            free[b] -= lengths[i]
            rest.remove(i)
    return _first_fit(rest, lengths, capacity, bins)


# -- tensors ---------------------------------------------------------------------------------------------------------


def make_microbatches(
    data: BatchedDataDict,
    groups: Sequence[Sequence[int]],
    spec: MicrobatchSpec,
    *,
    num_steps: int,
    device: torch.device,
) -> Iterator[Microbatch]:
    """Yield the micro-batches of a plan, then zero-weight ones until there are `num_steps`.

    Args:
        data: this rank's samples (CPU), at least one.
        groups: the plan.
        spec: the grouping.
        num_steps: micro-batches that every rank runs.
        device: where the tensors go.
    """
    for group in groups:
        yield make_microbatch(data, group, spec, device=device)
    for _ in range(num_steps - len(groups)):
        yield make_microbatch(zero_weight_sample(data), [0], spec, device=device)


def zero_weight_sample(data: BatchedDataDict) -> BatchedDataDict:
    """The first two tokens of the first sample, masked out: a forward and backward that contributes nothing.

    Args:
        data: samples with `input_ids` [B, T] and any other keys.
    """
    sample = data.select_indices([0]).get_dict()
    width = sample["input_ids"].shape[1]
    out = {k: _resize(v, width=width, new_width=2) for k, v in sample.items()}
    out["input_lengths"] = torch.full_like(out["input_lengths"], min(2, width))
    for key in ("token_mask", "sample_mask"):
        if key in out:
            out[key] = torch.zeros_like(out[key])
    return BatchedDataDict(out)


def make_microbatch(
    data: BatchedDataDict, indices: Sequence[int], spec: MicrobatchSpec, *, device: torch.device
) -> Microbatch:
    """Gather samples into rows.

    Worked example, `packed`, lengths 3 and 2, rows rounded to 4::

        input_ids     a0 a1 a2 b0 b1  0  0  0
        position_ids   0  1  2  0  1  2  3  4
        doc_ids        0  0  0  1  1 -1 -1 -1

    Args:
        data: `input_ids` int64 [N, T], `input_lengths` int64 [N]; `token_mask` [N, T] and `sample_mask` [N] when the
            micro-batch is trained on; other keys with a second axis of length T are trimmed alike.
        indices: samples to take.
        spec: the grouping.
        device: where the tensors go.
    """
    samples = data.select_indices(list(indices)).get_dict()
    width = samples["input_ids"].shape[1]
    lengths = [int(n) for n in samples["input_lengths"]]
    is_packed = spec.mode == "packed"
    new_width = max(lengths) if is_packed else round_up(max(lengths), spec.length_multiple)
    samples = {k: _resize(v, width=width, new_width=new_width) for k, v in samples.items()}
    ids, n = samples["input_ids"], len(lengths)

    columns = torch.arange(new_width)
    is_token = columns[None] < samples["input_lengths"][:, None]
    doc_ids = torch.where(is_token, torch.arange(n)[:, None], -1)
    sampled = torch.zeros_like(is_token)
    if "token_mask" in samples:
        sampled = samples["token_mask"].bool() & samples["sample_mask"].bool()[:, None] & is_token
    rows = {"input_ids": ids, "position_ids": columns.expand(n, -1), "doc_ids": doc_ids, "sampled_mask": sampled}
    if is_packed:
        pad = round_up(sum(lengths), spec.length_multiple) - sum(lengths)
        fill = {"input_ids": 0, "doc_ids": -1, "sampled_mask": False, "position_ids": 0}
        rows = {k: torch.cat([v[is_token], torch.full((pad,), fill[k], dtype=v.dtype)])[None] for k, v in rows.items()}
        if pad:
            rows["position_ids"][0, -pad:] = lengths[-1] + torch.arange(pad)
    index = samples["sample_index"] if "sample_index" in samples else torch.as_tensor(list(indices))
    return Microbatch(
        **{k: v.contiguous().to(device, non_blocking=True) for k, v in rows.items()},
        sample_index=index.to(device),
        data=BatchedDataDict(samples).to(device),
    )


def _resize(value: Any, *, width: int, new_width: int) -> Any:
    """Cut or zero-pad the second axis of a tensor that has `width` columns; leave everything else."""
    if not isinstance(value, Tensor) or value.ndim < 2 or value.shape[1] != width or width == new_width:
        return value
    if new_width < width:
        return value[:, :new_width]
    return torch.cat([value, value.new_zeros(value.shape[0], new_width - width, *value.shape[2:])], dim=1)


def rows_to_samples(values: Tensor, mb: Microbatch) -> Tensor:
    """Bring per-token row values back to samples.

    Args:
        values: float [R, S]; entry i belongs to token `x_i`.
        mb: the micro-batch that the rows came from.

    Returns:
        float [B, T], differentiable; 0 at the first token of each sample and on padding.
    """
    keep = (mb.doc_ids >= 0) & (mb.position_ids > 0)
    out = values.new_zeros(mb.data["input_ids"].shape)
    return out.index_put((mb.doc_ids[keep], mb.position_ids[keep]), values[keep])


def samples_to_rows(values: Sequence[Tensor], mb: Microbatch) -> Tensor:
    """Lay per-token values of samples out as the rows of a micro-batch; documents keep their rows.

    Args:
        values: per sample of the micro-batch, [tokens, ...], alike in dtype and in what comes behind the tokens; on any
            device.
        mb: the micro-batch; a sample has as many tokens in it as values.

    Returns:
        [R, S, ...] on the micro-batch's device; 0 on padding.
    """
    rows = mb.input_ids.new_zeros((*mb.input_ids.shape, *values[0].shape[1:]), dtype=values[0].dtype)
    for i, value in enumerate(values):
        # A document's tokens are in order in its row, so that a mask in row-major order meets them in order.
        rows[mb.doc_ids == i] = value.to(rows.device, non_blocking=True)
    return rows
