"""vLLM's CPU worker with our additions."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker  # isort: skip  (vLLM wants this import first)

from nemo_rl.models.generation.vllm import cpu_generator_fix, cpu_norm_fix, cpu_sampler_fix
from nemo_rl.models.generation.vllm.cpu_linear import keep_linear_weights, use_parameters_directly
from nemo_rl.models.generation.vllm.engine_worker import RefitWorkerMixin


class CpuEngineWorker(RefitWorkerMixin, CPUWorker):
    """Computes from readable parameters, with a correct rejection sampler, correct norms and cut prompts."""

    def load_model(self, **kwargs: Any) -> None:
        """Load both models."""
        cpu_sampler_fix.install()
        cpu_norm_fix.install()
        cpu_generator_fix.install()
        keep_linear_weights()
        super().load_model(**kwargs)

    def after_load(self) -> None:
        """Let embeddings and heads of both models compute with their parameters."""
        use_parameters_directly(self.get_model())
        if (draft := self.get_draft_model()) is not None:
            use_parameters_directly(draft)
