"""vLLM's CUDA worker with our additions."""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

from nemo_rl.models.generation.vllm.engine_worker import RefitWorkerMixin


class CudaEngineWorker(RefitWorkerMixin, Worker):
    """Nothing to adjust on this device."""
