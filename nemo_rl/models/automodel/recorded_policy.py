"""The policy's hidden states on disk in place of its forward: recorded in one run, handed to a draft in another.

What is stored per token are the states that the draft reads and the one behind the final norm, which the head consumes,
so that the teacher's logits are the head applied to it. Files: `nemo_rl.data.rollout_store`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from nemo_rl.data.rollout_index import FeatureReport, FeatureRows, StoredFile
from nemo_rl.data.rollout_store import bytes_crc32, write_tensors
from nemo_rl.distributed.collectives import all_reduce_max
from nemo_rl.errors import ConfigError
from nemo_rl.models.automodel.data import (
    Microbatch,
    MicrobatchSpec,
    make_microbatches,
    plan_microbatches,
    samples_to_rows,
)
from nemo_rl.models.automodel.draft.capture import FeatureCapture, full_tensor, head_weight
from nemo_rl.models.automodel.postprocess import full_logits
from nemo_rl.models.automodel.setup import ParallelContext, reshard

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from nemo_rl.data.rollout_store import RolloutReader
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

__all__ = ["FeatureRecorder", "PolicyHead", "RecordedPolicy"]

log = logging.getLogger(__name__)

_NUM_CHECKED_TOKENS = 16
_HEAD_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Of the largest logit: rounding, and the order in which a product of another shape is summed up."""


class PolicyHead:
    """The whole head of a policy as it is now; making one gathers it, on all ranks."""

    def __init__(self, policy: nn.Module, *, dtype: torch.dtype) -> None:
        """Gather.

        Args:
            policy: its head may be sharded.
            dtype: in which it computes.
        """
        head = cast("PreTrainedModel", policy).get_output_embeddings()
        bias = None if head is None else getattr(head, "bias", None)
        self._weight = full_tensor(head_weight(policy)).to(dtype)
        self._bias = None if bias is None else full_tensor(bias).to(dtype)

    def __call__(self, final_state: Tensor) -> Tensor:
        """Logits [..., V] of final states [..., H]; without gradients."""
        if self._weight.device != final_state.device:  # a policy whose parameters rest in host memory
            self._weight = self._weight.to(final_state.device)
            self._bias = None if self._bias is None else self._bias.to(final_state.device)
        return nn.functional.linear(final_state, self._weight, self._bias)


# -- recording -------------------------------------------------------------------------------------------------------


@dataclass
class FeatureRecorder:
    """Runs the policy over samples and writes its states.

    Attributes:
        model: the policy.
        forward: its forward on a micro-batch.
        feature_ids: canonical ids of the states besides the final one, ascending.
        num_layers: decoder layers of the policy.
        spec: grouping of the samples.
        parallel: where this rank stands.
        dtype: of the policy's computation.
    """

    model: nn.Module
    forward: Callable[[Microbatch], Tensor]
    feature_ids: tuple[int, ...]
    num_layers: int
    spec: MicrobatchSpec
    parallel: ParallelContext
    dtype: torch.dtype
    _is_checked: bool = field(default=False, init=False)
    """The logits were found to be the head applied to the final state."""

    @torch.no_grad()
    def collect(self, data: BatchedDataDict, *, path: Path | None) -> FeatureReport:
        """Write the states of this rank's samples under the present weights. Collective; leaves no trace in the model.

        Args:
            data: `input_ids` int64 [B, T], `input_lengths` int64 [B], `sample_index` int64 [B]; an index below 0 marks
                padding, which is run and not written.
            path: of the file; None = another rank of the same samples writes it.

        Raises:
            ConfigError: the logits are not the head applied to the final state, so that they cannot be rebuilt.
            CheckpointError: the file cannot be written.
        """
        capture = FeatureCapture(self.feature_ids, num_layers=self.num_layers, with_final_state=True)
        groups = plan_microbatches([int(n) for n in data["input_lengths"]], self.spec)
        own = torch.tensor(len(groups), device=self.parallel.device)
        num_steps = int(all_reduce_max(own, self.parallel.dp_group))
        states: dict[int, Tensor] = {}
        not_finite: list[int] = []
        was_training = self.model.training
        self.model.eval()
        try:
            batches = make_microbatches(data, groups, self.spec, num_steps=num_steps, device=self.parallel.device)
            for i, mb in enumerate(batches):
                with capture(self.model):
                    logits = self.forward(mb)
                taken = capture.take(mb.input_ids.shape)
                if not self._is_checked:
                    self._check_head(full_logits(logits), taken[-1], mb)
                    self._is_checked = True
                del logits
                if i < len(groups):
                    _keep(torch.stack(taken, dim=2).to(self.dtype), mb, states, not_finite)
        finally:
            self.model.train(was_training)
            reshard(self.model)
        if path is None or not states:
            return FeatureReport(None, {}, tuple(not_finite))
        size = write_tensors(path, {str(index): tensor for index, tensor in states.items()})
        rows = {index: FeatureRows(len(tensor), bytes_crc32(tensor)) for index, tensor in states.items()}
        return FeatureReport(StoredFile(name=path.name, bytes=size), rows, tuple(not_finite))

    def _check_head(self, logits: Tensor, final: Tensor, mb: Microbatch) -> None:
        """Compare the logits of some tokens with the head applied to their final states. Collective."""
        is_token = mb.doc_ids >= 0
        want, state = logits[is_token][:_NUM_CHECKED_TOKENS], final[is_token][:_NUM_CHECKED_TOKENS]
        got = PolicyHead(self.model, dtype=state.dtype)(state)
        error = torch.tensor(1.0)
        if got.shape == want.shape:
            error = (got.float() - want.float()).abs().max() / want.float().abs().max()
        # States that are not finite say nothing about the head; their samples are dropped.
        is_wrong = bool(torch.isfinite(error)) and float(error) > _HEAD_TOLERANCE[state.dtype]
        wrong = torch.tensor(float(is_wrong), device=self.parallel.device)
        if bool(all_reduce_max(wrong, self.parallel.dp_group)):
            raise ConfigError(
                f"rollout_store.features: got true; the logits of {type(self.model).__name__} are not its head applied "
                f"to its final state (relative difference {float(error):.1e}), so training could not rebuild them. Use "
                "features: false, which runs the policy again."
            )


def _keep(rows: Tensor, mb: Microbatch, states: dict[int, Tensor], not_finite: list[int]) -> None:
    """Sort the states of a micro-batch, [R, S, states, size], by sample."""
    for i, index in enumerate(mb.sample_index.tolist()):
        if index < 0:
            continue
        own = rows[mb.doc_ids == i]
        if bool(torch.isfinite(own).all()):
            states[index] = own.cpu().contiguous()
        else:
            not_finite.append(index)


# -- training --------------------------------------------------------------------------------------------------------


class _StoredState(nn.Module):
    """Stands where the policy has a layer, for the hooks of the capture; its output is given."""

    def forward(self, incoming: Tensor | None, outgoing: Tensor | None) -> Tensor | None:
        return outgoing


class _Decoder(nn.Module):
    """The layers and the final norm, found where those of a policy are."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_StoredState() for _ in range(num_layers))
        self.norm = _StoredState()

    def forward(self, states: Mapping[int, Tensor], final: Tensor) -> None:
        for i, layer in enumerate(self.layers):
            layer(states.get(i), states.get(i + 1))
        self.norm(None, final)


class RecordedPolicy(nn.Module):
    """Stands in for the forward of a policy that stays as it is: states from a store, logits from the policy's head.

    `with runtime.capture(recorded): logits = recorded(mb)` is to a draft's runtime what the policy's own forward is.
    """

    def __init__(
        self,
        policy: nn.Module,
        reader: RolloutReader,
        *,
        feature_ids: Sequence[int],
        num_layers: int,
        dtype: torch.dtype,
    ) -> None:
        """Gather the policy's head. Collective.

        Args:
            policy: whose embedding and head the draft sees; its weights must not change any more.
            reader: of a store with features; `mb.sample_index` are the numbers of its samples.
            feature_ids: canonical ids that the draft reads.
            num_layers: decoder layers of the policy.
            dtype: of the policy's computation.

        Raises:
            ConfigError: the store lacks a state that the draft reads.
        """
        super().__init__()
        missing = sorted(set(feature_ids) - set(reader.feature_ids))
        if missing or not reader.has_features:
            raise ConfigError(
                f"rollout_store.features: got true; the store lacks the states after layers {[i - 1 for i in missing]} "
                "that the draft reads. Record it with this draft's settings, or use features: false."
            )
        # In a tuple: as an attribute it would be a submodule, and this module has no parameters of its own.
        self._policy = (cast("PreTrainedModel", policy),)
        self._reader = reader
        self._head = PolicyHead(policy, dtype=dtype)
        self.model = _Decoder(num_layers)
        if len(reader.versions) > 1:
            log.warning(
                "the stored states are of the policy's weight versions %d to %d, the teacher's head is the present "
                "one: exact only if the policy was not trained then. rollout_store.features: false computes both anew",
                reader.versions[0],
                reader.versions[-1],
            )

    def get_input_embeddings(self) -> nn.Module:
        """The policy's embedding."""
        return self._policy[0].get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module | None:
        """The policy's head; None for a policy that has none of its own."""
        return self._policy[0].get_output_embeddings()

    def forward(self, mb: Microbatch) -> Tensor:
        """Logits of a micro-batch from stored states.

        Args:
            mb: its samples come from the store.

        Returns:
            float [R, S, V] in the policy's compute dtype, of the whole vocabulary; on padding those of a zero state.

        Raises:
            CheckpointError: a file of the store is damaged, or the states do not cover the tokens of a sample.
        """
        rows = samples_to_rows(self._states_of(mb), mb)
        *states, final = (state.contiguous() for state in rows.unbind(2))
        self.model(dict(zip(self._reader.feature_ids, states, strict=True)), final)
        return self._head(final)

    def _states_of(self, mb: Microbatch) -> list[Tensor]:
        doc_ids = mb.doc_ids.cpu()
        lengths = doc_ids[doc_ids >= 0].bincount(minlength=mb.sample_index.numel()).tolist()
        is_trained = doc_ids[mb.sampled_mask.cpu()].bincount(minlength=mb.sample_index.numel()).tolist()
        out = []
        for number, length, num_sampled in zip(mb.sample_index.tolist(), lengths, is_trained, strict=True):
            states = self._reader.features(number)
            if len(states) != length:
                # The micro-batches that only keep ranks in step are the beginning of a sample, and teach nothing.
                if num_sampled or length > len(states):
                    raise RuntimeError(
                        f"sample {number}: the micro-batch has {length} tokens, the store has states for "
                        f"{len(states)}; the batch does not come from this store."
                    )
                states = states[:length]
            out.append(states)
        return out
