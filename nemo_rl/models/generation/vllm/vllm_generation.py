"""Driver side of generation: one or more data-parallel vLLM engines that always hold the same weights."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Literal

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.environment import worker_env
from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup
from nemo_rl.errors import NemoRLError, RefitError, WorkerError
from nemo_rl.models.generation.interfaces import (
    GenerationInterface,
    SamplingCheckReport,
    ThroughputComparison,
    UpdateReport,
)
from nemo_rl.models.generation.vllm.engine_args import check_vllm_kwargs
from nemo_rl.models.generation.vllm.spec_metrics import SpecCounters

if TYPE_CHECKING:
    from ray import ObjectRef

    from nemo_rl.algorithms.config import MasterConfig
    from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
    from nemo_rl.weight_sync.interfaces import RefitPayload

WORKER = "nemo_rl.models.generation.vllm.vllm_worker:VllmGenerationWorker"


class VllmGeneration(GenerationInterface):
    """A Ray worker group with one engine per worker."""

    def __init__(
        self, cluster: RayVirtualCluster, config: MasterConfig, *, model_dir: str, device: Literal["cuda", "cpu"]
    ) -> None:
        """Start the worker processes; no engine yet.

        Args:
            cluster: Where the workers go.
            config: The run's configuration.
            model_dir: Directory (or hub id) that the policy starts from.
            device: "cuda" or "cpu".

        Raises:
            ConfigError: `policy.generation.vllm_kwargs` holds an argument that is not the user's to set.
        """
        generation = config.policy.generation
        check_vllm_kwargs(generation.vllm_kwargs)
        num_engines = config.num_generation_engines(device)
        is_single_machine = config.cluster.num_nodes == 1
        self._group = RayWorkerGroup(
            cluster,
            RayWorkerBuilder(
                WORKER,
                generation,
                model_dir=model_dir,
                tokenizer_dir=config.policy.tokenizer.name,
                device=device,
                seed=config.grpo.seed,
            ),
            num_workers=num_engines,
            env_vars=[
                worker_env("generation", device=device, rank=rank, is_single_machine=is_single_machine)
                for rank in range(num_engines)
            ],
            name_prefix="generation",
            bundles_per_worker=(
                generation.vllm_cfg.tensor_parallel_size * generation.vllm_cfg.pipeline_parallel_size
                if device == "cuda"
                else 1
            ),
        )
        self._preloading: list[ObjectRef] = []
        self._poisoned: str | None = None

    def preload(self) -> None:
        """Let the workers import vllm while the driver does something else; returns at once."""
        self._preloading = self._group.run_all_workers_single_data("preload")

    def build(
        self,
        *,
        speculative_config: dict[str, Any] | None = None,
        trained_draft_tensors: tuple[str, ...] = (),
        frozen_draft_tensors: tuple[str, ...] = (),
        draft_extension: str | None = None,
    ) -> None:
        """Start the engines on the weights in the model's directory, as version -1.

        Args:
            speculative_config: As `merge_speculative_config` made it; None decodes without speculation.
            trained_draft_tensors: Export names of the draft tensors that each update carries; empty when no draft is
                trained.
            frozen_draft_tensors: Export names of the draft's own tensors that no update carries; they stay as loaded.
            draft_extension: "module:function" that lets vLLM serve the draft; None when it can by itself.

        Raises:
            ConfigError: The draft's directory does not fit `trained_draft_tensors`.
            RefitError: Policy and draft would share memory that the draft trains.
            WorkerError: An engine did not start.
        """
        preloading, self._preloading = self._preloading, []
        self._collect(preloading)
        self._all(
            "build",
            speculative_config=speculative_config,
            trained_draft_tensors=tuple(trained_draft_tensors),
            frozen_draft_tensors=tuple(frozen_draft_tensors),
            draft_extension=draft_extension,
        )

    def generate(self, data: BatchedDataDict, *, greedy: bool = False) -> BatchedDataDict:
        """See `GenerationInterface.generate`. Rows are dealt to the engines in equal contiguous parts."""
        self._check_usable()
        num_engines, size = self._group.num_workers, data.size
        bounds = [rank * size // num_engines for rank in range(num_engines + 1)]
        refs = [
            self._group.run_rank(rank, "generate", data.slice(start, end), greedy=greedy)
            for rank, (start, end) in enumerate(itertools.pairwise(bounds))
            if end > start
        ]
        return BatchedDataDict.from_batches(self._collect(refs))

    def update_weights(self, payload: RefitPayload) -> UpdateReport:
        """See `GenerationInterface.update_weights`. No engine writes before every engine has accepted."""
        self._check_usable()
        try:
            self._all("stage_weights", payload)
        except RefitError:
            self._all("discard_weights")
            raise
        try:
            reports: list[UpdateReport] = self._all("commit_weights", payload.version)
        except NemoRLError as err:
            self._poisoned = f"weight update {payload.version} failed on an engine: {err}"
            raise
        unchecked = sorted({name for report in reports for name in report.unchecked})
        return UpdateReport(
            version=payload.version,
            num_checked=min(report.num_checked for report in reports),
            unchecked=tuple(unchecked),
        )

    def spec_counters(self) -> SpecCounters:
        """See `GenerationInterface.spec_counters`."""
        return sum(self._all("spec_counters"), SpecCounters())

    def sampling_self_check(self) -> SamplingCheckReport:
        """See `GenerationInterface.sampling_self_check`. Every engine is checked; the worst result is returned."""
        return max(self._all("sampling_self_check"), key=lambda report: abs(report.z))

    def measure_throughput(
        self, data: BatchedDataDict, *, payload: RefitPayload, batch_size: int, repeats: int
    ) -> ThroughputComparison:
        """See `GenerationInterface.measure_throughput`. The first engine is measured while the others are idle."""
        self._check_usable()
        ref = self._group.run_rank(
            0, "measure_throughput", data, payload=payload, batch_size=batch_size, repeats=repeats
        )
        return self._collect([ref])[0]

    def prepare_for_generation(self) -> None:
        """See `GenerationInterface.prepare_for_generation`."""
        self._all("prepare_for_generation")

    def finish_generation(self) -> None:
        """See `GenerationInterface.finish_generation`."""
        self._all("finish_generation")

    def shutdown(self) -> None:
        """Stop the engines and their processes. May be called twice."""
        self._group.shutdown()

    def _check_usable(self) -> None:
        if self._poisoned is not None:
            raise RefitError(
                f"The engines must not be used any more: {self._poisoned}. Restart from the last checkpoint."
            )

    def _all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        return self._collect(self._group.run_all_workers_single_data(method, *args, **kwargs))

    def _collect(self, refs: list[ObjectRef]) -> list[Any]:
        """Wait for workers; one of our own errors is raised as itself, with the remote traceback as its cause."""
        try:
            return self._group.get_all_worker_results(refs)
        except WorkerError as err:
            if isinstance(err.__cause__, NemoRLError):
                raise type(err.__cause__)(str(err.__cause__)) from err
            raise
