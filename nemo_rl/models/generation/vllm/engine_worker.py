"""What our vLLM worker classes add to vLLM's: settled ownership of draft tensors and access to the weight transfer.

vLLM builds the class named by its `worker_cls` argument in every engine process. Its `load_model` is the one place that
runs after the models were loaded and before anything is compiled, profiled or captured.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import snapshot_download
from vllm.config import set_current_vllm_config

from nemo_rl.errors import ConfigError
from nemo_rl.models.generation.vllm import chunked_prefill_fix, weight_transfer
from nemo_rl.models.generation.vllm.draft_extension import install_draft_extension
from nemo_rl.models.generation.vllm.draft_ownership import settle_ownership

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker as _Worker
else:  # the subclasses bring vLLM's worker class of their device
    _Worker = object


class RefitWorkerMixin(_Worker):
    """Put before vLLM's worker class in the bases."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        """Take vLLM's arguments; a draft's extension must be in place before a model runner is made."""
        install_draft_extension(vllm_config.additional_config["nemo_rl"]["draft_extension"])
        super().__init__(vllm_config, *args, **kwargs)

    def load_model(self, **kwargs: Any) -> None:
        """Load both models, settle who owns what, and tell the weight transfer."""
        weight_transfer.register()
        super().load_model(**kwargs)
        chunked_prefill_fix.install(self.model_runner)
        self.after_load()
        config: Any = self.vllm_config
        ours = config.additional_config["nemo_rl"]
        trained, frozen = ours["trained_draft_tensors"], ours["frozen_draft_tensors"]
        draft = self.get_draft_model() if trained or frozen else None
        if trained and draft is None:
            raise ConfigError(
                f"policy.draft: training sends {len(trained)} draft tensors, but the engine runs no draft model. Turn "
                "on speculative decoding with the trained draft, or set policy.draft.enabled to false."
            )
        if draft is not None:
            with set_current_vllm_config(config), torch.device(self.device or "cpu"):
                settle_ownership(self.get_model(), draft, owned=[*trained, *frozen])
        # A draft that no update carries is not the weight transfer's business.
        updated = draft if trained else None
        self._transfer().attach(
            policy_dir=_local_directory(config.model_config.model),
            draft=updated,
            draft_config=config.speculative_config.draft_model_config if updated is not None else None,
            proposer=getattr(self.model_runner, "drafter", None) or getattr(self.model_runner, "speculator", None),
            trained=trained,
            frozen=frozen,
        )

    def after_load(self) -> None:
        """Adjust the loaded models to the device."""

    def discard_weight_update(self) -> None:
        """Leave a round whose update was received but is not to be applied, e.g. because another engine refused it."""
        self._transfer().discard()
        self._weight_update_active = False

    def refit_result(self) -> weight_transfer.VerifyResult:
        """What the last weight update left on this rank."""
        return self._transfer().last_result

    def _transfer(self) -> weight_transfer.NemoRLWeightTransferEngine:
        engine = self.weight_transfer_engine
        assert isinstance(engine, weight_transfer.NemoRLWeightTransferEngine), "the engine's arguments ask for ours"
        return engine


def _local_directory(model: str) -> str:
    """The directory that vLLM loaded `model` from; a hub id is in the hub's cache by then."""
    return model if Path(model).is_dir() else snapshot_download(model, local_files_only=True)
