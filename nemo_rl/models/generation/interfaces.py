"""What the step loop, validation and the refit may call on the generation side."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl.models.generation.vllm.spec_metrics import SpecCounters
    from nemo_rl.weight_sync.interfaces import RefitPayload


@dataclass(frozen=True)
class UpdateReport:
    """What one weight update left in the engines.

    Attributes:
        version: The version that every engine now holds.
        num_checked: Tensors read back from every engine whose checksum is the trainer's.
        unchecked: Wire names that some engine holds in a form that cannot be read back; normally empty.
    """

    version: int
    num_checked: int
    unchecked: tuple[str, ...]


@dataclass(frozen=True)
class SamplingCheckReport:
    """Result of the check that samples follow the policy's probabilities (see `vllm/sampling_check.py`).

    Attributes:
        num_tokens: Sampled tokens looked at.
        mean_nll: Mean negative log-likelihood in nats, among each position's most likely tokens.
        mean_entropy: The value `mean_nll` has in expectation when sampling is exact.
        z: Their difference in standard errors.
        z_uniformity: Deviation of the samples' ranks from what the probabilities say.
        z_coverage: Deviation of the number of samples among the most likely tokens from its lower bound.
    """

    num_tokens: int
    mean_nll: float
    mean_entropy: float
    z: float
    z_uniformity: float
    z_coverage: float


@dataclass(frozen=True)
class ThroughputComparison:
    """Response tokens per second of the same prompts and weights, median of interleaved repeats.

    Attributes:
        speculative: With speculative decoding.
        plain: One token per forward.
        repeats: Timed runs of each.
    """

    speculative: float
    plain: float
    repeats: int

    @property
    def speedup(self) -> float:
        """`speculative / plain`."""
        return self.speculative / self.plain


class GenerationInterface(ABC):
    """A group of engines that holds one version of the policy and samples from it."""

    @abstractmethod
    def generate(self, data: BatchedDataDict, *, greedy: bool = False) -> BatchedDataDict:
        """Sample one response per row.

        Args:
            data: `input_ids` int64 [B, P] right padded; `input_lengths` int64 [B]; optional `seeds` int64 [B] (the
                sample then depends on seed, prompt and weights, not on its place in the batch); optional
                `stop_strings` list[B] of list[str] or None, added to the configured ones.
            greedy: Take the most likely token instead of sampling.

        Returns:
            `output_ids` int64 [B, T] prompt and response, right padded; `generation_lengths` int64 [B];
            `unpadded_sequence_lengths` int64 [B]; `logprobs` float32 [B, T], the log-probability of each response token
            under the policy at the sampling temperature, 0 on prompt and padding; `finish_reasons` list[B] of "stop" or
            "length"; `weight_versions` int64 [B].
        """

    @abstractmethod
    def update_weights(self, payload: RefitPayload) -> UpdateReport:
        """Replace policy and draft by the payload, both or neither, and verify what the engines then hold.

        Raises:
            RefitError: The update was refused (the engines still serve the old weights) or failed half way (the
                engines then refuse to generate).
        """

    @abstractmethod
    def spec_counters(self) -> SpecCounters:
        """Cumulative acceptance counters of `generate`, summed over the engines."""

    @abstractmethod
    def sampling_self_check(self) -> SamplingCheckReport:
        """Sample, and compare the samples with the engine's own probabilities.

        Raises:
            SamplingCheckError: They do not fit.
        """

    @abstractmethod
    def measure_throughput(
        self, data: BatchedDataDict, *, payload: RefitPayload, batch_size: int, repeats: int
    ) -> ThroughputComparison:
        """Time one engine on the same prompts and weights with and without speculation.

        Args:
            data: As for `generate`.
            payload: The update that the engines hold.
            batch_size: Sequences decoded together.
            repeats: Timed runs of each kind, in turns; the medians are reported.
        """

    @abstractmethod
    def prepare_for_generation(self) -> None:
        """Make the engines ready to sample; the counterpart of `finish_generation`."""

    @abstractmethod
    def finish_generation(self) -> None:
        """Sampling is over for this step; on shared devices the engines give up their memory."""

    @abstractmethod
    def shutdown(self) -> None:
        """Stop the engines. May be called twice."""
