"""What the training loop may ask of a policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_rl.data.rollout_index import FeatureReport
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl.weight_sync.interfaces import RefitManifest, RefitPayload


class PolicyInterface(ABC):
    """A trainable policy, and the draft that is trained in the same step, if there is one."""

    @abstractmethod
    def get_logprobs(self, data: BatchedDataDict) -> BatchedDataDict:
        """Log-probabilities under the current weights, at the sampling temperature.

        Args:
            data: `input_ids` int64 [B, T], right padded, and `input_lengths` int64 [B].

        Returns:
            `logprobs` fp32 [B, T]: entry t is log p(x_t | x_<t), 0 at t = 0 and on padding.
        """

    @abstractmethod
    def get_reference_policy_logprobs(self, data: BatchedDataDict) -> BatchedDataDict:
        """The same under the reference policy (the initial weights), as `reference_logprobs`."""

    @abstractmethod
    def collect_features(self, data: BatchedDataDict, *, directory: str, stem: str) -> list[FeatureReport]:
        """Write the states that the draft reads of the policy, and the final one, under the current weights.

        Args:
            data: `input_ids` int64 [B, T], right padded, `input_lengths` int64 [B], `sample_index` int64 [B].
            directory: on a disk that all workers share.
            stem: first part of the files' names.

        Returns:
            What each data-parallel rank has written.
        """

    @abstractmethod
    def train(self, data: BatchedDataDict, loss_fn: Callable[..., Any], *, step: int) -> dict[str, Any]:
        """Train on a whole rollout batch, one optimizer step per global batch.

        Args:
            data: keys of a training batch; its size is a multiple of `policy.train_global_batch_size`.
            loss_fn: called per micro-batch; picklable.
            step: the run's step.

        Returns:
            `loss`, `grad_norm`, `lr`, `global_valid_toks`, `global_valid_seqs` (floats), `metrics`
            (name -> (num, den)), `draft` (None when no draft was trained in this step, or a dict of `loss`,
            `grad_norm`, `lr`, `scalars`, `metrics`), `num_skipped_updates`, `num_optimizer_steps` (ints), `timing`
            (name -> seconds).
        """

    @abstractmethod
    def train_draft(self, data: BatchedDataDict, *, step: int) -> dict[str, Any]:
        """Train the draft alone on a step's samples; the policy stays as it is.

        Args:
            data: `input_ids`, `input_lengths`, `token_mask`, `sample_mask` of a training batch; its size is a multiple
                of the samples per update. Random draws are keyed by `sample_index`, where it is there.
            step: the run's step.

        Returns:
            `loss`, `grad_norm`, `lr`, `scalars`, `metrics` like the `draft` of `train`, and `global_valid_toks`,
            `global_valid_seqs`, `num_microbatches`, `timing`.
        """

    @abstractmethod
    def refit_manifest(self) -> RefitManifest:
        """Names, shapes and dtypes of everything that a refit sends."""

    @abstractmethod
    def weights_ref(self, version: int, *, draft_only: bool = False) -> RefitPayload:
        """Gather the current weights of policy and draft for the generation engines.

        Args:
            version: number of the update.
            draft_only: leave out the policy, which the engines hold already.
        """

    @abstractmethod
    def prepare_for_training(self) -> None:
        """Bring weights and optimizer state to where training needs them."""

    @abstractmethod
    def offload_after_refit(self) -> None:
        """Make room on the devices for generation."""

    @abstractmethod
    def save_checkpoint(self, directory: str) -> None:
        """Write `policy/` and `draft/` under the directory of a step."""

    @abstractmethod
    def load_checkpoint(self, directory: str, *, restart_draft: bool = False) -> None:
        """Restore what `save_checkpoint` wrote; the number of workers may differ.

        Args:
            directory: of the step.
            restart_draft: restore the policy only, and build the draft and its optimizer anew beside it.
        """

    @abstractmethod
    def export_draft(self, directory: str, *, layout: str = "native") -> None:
        """Write the live draft.

        Args:
            directory: created if absent.
            layout: `native`, as the generation engine loads it, or another one of `policy.draft.export_layouts`.
        """

    @abstractmethod
    def export_hf(self, directory: str) -> None:
        """Write the policy as transformers and vLLM load it."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the workers."""
