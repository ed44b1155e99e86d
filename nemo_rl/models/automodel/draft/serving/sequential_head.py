"""A proposer for block drafts whose tokens depend on each other: a head fixes them from left to right.

vLLM's V1 runner runs a block of slots in one pass and takes every slot's most likely token. The proposer here keeps the
pass and then lets the draft's model class correct each slot's logits by the tokens chosen before it. What differs
between drafts is in the model class (`SequentialHead`); drafts without such a head are proposed as vLLM does it.

Shapes: R requests, K proposed tokens, H hidden size, D draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from vllm import ModelRegistry
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.dflash import DFlashProposer
from vllm.v1.worker import gpu_model_runner


class SequentialHead(ABC):
    """What a draft's vLLM model class brings to be proposed by `SequentialProposer`."""

    draft_id_to_target_id: Tensor | None
    """int64 [D], offset from a draft id to its target id; None when the vocabularies are one."""

    @property
    @abstractmethod
    def predicts_from_anchor(self) -> bool:
        """Whether the slot of the last known token predicts the next one.

        True: K slots, [x_n, mask, ..]; slot k gives the token of position n+1+k. False: 1 + K slots; the first predicts
        nothing and each mask gives the token of its own position.
        """

    @abstractmethod
    def start_block(self, hidden: Tensor) -> Any:
        """Begin a block.

        Args:
            hidden: float [R, K, H], the block's outputs, of the predicting slots only.

        Returns:
            What `next_logits` needs; it may change it.
        """

    @abstractmethod
    def next_logits(self, block: Any, ordinal: int, previous: Tensor) -> Tensor:
        """Logits of one more token of each block.

        Args:
            block: As `start_block` returned it.
            ordinal: 1 to K, in this order.
            previous: int64 [R], the target id before it: the last known token for ordinal 1, afterwards the one chosen
                for the ordinal before.

        Returns:
            float [R, D]; the caller may overwrite it.
        """


class _AcceptsStock(type(DFlashProposer)):
    """Lets `isinstance` in the runner accept the stock proposer of an engine that was built before `install`."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, DFlashProposer)


class SequentialProposer(DFlashProposer, metaclass=_AcceptsStock):
    """vLLM's block proposer, and a left-to-right pass over the block if the draft has a `SequentialHead`."""

    def set_inputs_first_pass(
        self,
        target_token_ids: Tensor,
        next_token_ids: Tensor,
        target_positions: Tensor,
        target_hidden_states: Tensor,
        token_indices_to_sample: Tensor | None,
        cad: CommonAttentionMetadata,
        num_rejected_tokens_gpu: Tensor | None,
    ) -> tuple[int, Tensor, CommonAttentionMetadata]:
        """Lay out the block's slots; see vLLM's method. `next_token_ids` (int [R]) are the last known tokens."""
        self._anchors = next_token_ids
        head, k = self._head(), self.num_speculative_tokens
        from_anchor = head is not None and head.predicts_from_anchor
        if from_anchor:
            self.num_speculative_tokens = max(k - 1, 0)  # the number of masks, as the method takes it
        try:
            num_slots, sampled, metadata = super().set_inputs_first_pass(
                target_token_ids=target_token_ids,
                next_token_ids=next_token_ids,
                target_positions=target_positions,
                target_hidden_states=target_hidden_states,
                token_indices_to_sample=token_indices_to_sample,
                cad=cad,
                num_rejected_tokens_gpu=num_rejected_tokens_gpu,
            )
        finally:
            self.num_speculative_tokens = k
        return num_slots, self.arange[:num_slots] if from_anchor else sampled, metadata

    def _sample_draft_tokens(
        self, hidden_states: Tensor, sampling_metadata: SamplingMetadata
    ) -> tuple[Tensor, Tensor | None]:
        """Choose the tokens of all blocks.

        Args:
            hidden_states: float [R * K, H], request by request.
            sampling_metadata: vLLM's, per request.

        Returns:
            int64 [R * K] target ids and, if the verifier needs them, float32 [R * K, V]: the distribution that each was
            drawn from.
        """
        head, k = self._head(), self.num_speculative_tokens
        if head is None:
            return super()._sample_draft_tokens(hidden_states, sampling_metadata)
        block = head.start_block(hidden_states.view(-1, k, hidden_states.shape[-1]))
        columns, offsets = None, head.draft_id_to_target_id
        if offsets is not None:  # the target id of each draft id
            columns = torch.arange(offsets.shape[0], device=offsets.device) + offsets
        previous = self._anchors.long()
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        for ordinal in range(1, k + 1):
            logits = head.next_logits(block, ordinal, previous)
            if columns is not None:
                spread = logits.new_full((logits.shape[0], self._target_vocab_size), -torch.inf)
                logits = spread.index_copy_(1, columns, logits)
            previous, drawn_from = self._sample_from_logits(logits, sampling_metadata)
            tokens.append(previous)
            if drawn_from is not None:
                probs.append(drawn_from)
        return torch.stack(tokens, 1).flatten(), torch.stack(probs, 1).flatten(0, 1) if probs else None

    def _head(self) -> SequentialHead | None:
        model: Any = self.model
        model = model.unwrap() if hasattr(model, "unwrap") else model  # captured as CUDA graphs
        return model if isinstance(model, SequentialHead) else None

    @property
    def _target_vocab_size(self) -> int:
        return self.vllm_config.model_config.get_vocab_size()


def install(models: Mapping[str, type[nn.Module]]) -> None:
    """Let engines that this process builds from now on serve these drafts; repeating it changes nothing.

    Engines with other drafts, built before or later, work as without it. On CUDA all engines of the process that are
    built later use vLLM's V1 runner: the choice is per process, and the proposer belongs to that runner.

    Args:
        models: Architecture name, as in the draft's config.json and as vLLM derives it for the method, to class. Given
            as objects: vLLM would start a process to look at a class that it knows by path only.
    """
    for name, cls in models.items():
        known = ModelRegistry.models.get(name)
        if getattr(known, "model_cls", None) is not cls:
            ModelRegistry.models.pop(name, None)  # registering a known name warns
            ModelRegistry.register_model(name, cls)
    gpu_model_runner.DFlashProposer = SequentialProposer
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
