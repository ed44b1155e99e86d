"""`Policy`: the driver's handle on the training workers. Shards batches over them and folds what they return."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.device import resolve_device
from nemo_rl.distributed.environment import worker_env
from nemo_rl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup
from nemo_rl.errors import ConfigError
from nemo_rl.models.policy.interfaces import PolicyInterface
from nemo_rl.models.policy.results import fold_draft_results, fold_results
from nemo_rl.models.policy.sharding import deal_by_length, policy_sharding

if TYPE_CHECKING:
    from nemo_rl.algorithms.config import MasterConfig
    from nemo_rl.data.rollout_index import FeatureReport
    from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
    from nemo_rl.models.automodel.draft.spec import DraftSpec
    from nemo_rl.weight_sync.interfaces import RefitManifest, RefitPayload

log = logging.getLogger(__name__)

WORKER = "nemo_rl.models.policy.workers.dtensor_policy_worker_v2:DTensorPolicyWorkerV2"


class Policy(PolicyInterface):
    """A policy trained by a Ray worker group."""

    def __init__(
        self,
        cluster: RayVirtualCluster,
        config: MasterConfig,
        *,
        draft_spec: DraftSpec | None,
        draft_dir: str | None,
        init_reference_model: bool,
        train_policy: bool = True,
    ) -> None:
        """Start the workers and wait until they have loaded the model.

        Args:
            cluster: where the workers go.
            config: the run's configuration.
            draft_spec: the draft beside the policy; None = none.
            draft_dir: checkpoint that the draft starts from; None = build it from the policy.
            init_reference_model: keep the initial weights for `get_reference_policy_logprobs`.
            train_policy: False = the policy stays as it is, and has no optimizer; only the draft is trained.

        Raises:
            ConfigError: the layout does not fit the number of workers.
            WorkerError: a worker failed.
        """
        self._config = config
        self._num_draft_tokens = None if draft_spec is None else draft_spec.num_speculative_tokens
        device = resolve_device(config.cluster.device)
        num_workers = config.num_policy_workers(device)
        self._sharding = policy_sharding(config, num_workers=num_workers)
        self._dp_size = self._sharding.get_axis_size("dp")
        self._group = RayWorkerGroup(
            cluster,
            RayWorkerBuilder(
                WORKER,
                config,
                draft_spec=draft_spec,
                draft_dir=draft_dir,
                init_reference_model=init_reference_model,
                train_policy=train_policy,
            ),
            num_workers=num_workers,
            env_vars=worker_env("policy", device=device, is_single_machine=config.cluster.num_nodes == 1),
            name_prefix="policy",
        )
        try:
            self._group.init_process_groups()
            self._run("setup")
        except BaseException:
            self._group.shutdown()
            raise

    # -- dispatch ----------------------------------------------------------------------------------------------------

    def _run(self, method: str, **kwargs: Any) -> list[Any]:
        return self._group.get_all_worker_results(self._group.run_all_workers_single_data(method, **kwargs))

    def _run_sharded(self, method: str, shards: list[BatchedDataDict], **kwargs: Any) -> list[Any]:
        """Call a method with each data-parallel rank's shard; return the first model-parallel rank's results."""
        per_worker = []
        for rank in range(self._sharding.size):
            shard = shards[self._sharding.get_worker_coords(rank)["dp"]]
            per_worker.append({"data": shard, **kwargs})
        results = self._group.get_all_worker_results(self._group.run_all_workers_multiple_data(method, per_worker))
        return [results[rank] for rank in self._sharding.get_ranks_by_coord(cp=0, tp=0)]

    def _logprobs(self, method: str, data: BatchedDataDict) -> torch.Tensor:
        size = data.size
        inputs = BatchedDataDict({key: data[key] for key in ("input_ids", "input_lengths")})
        pad = -size % self._dp_size
        if pad:
            inputs = inputs.select_indices([*range(size), *[size - 1] * pad])
        hands = deal_by_length(inputs["input_lengths"], num_ranks=self._dp_size, batch_size=inputs.size)
        parts = self._run_sharded(method, [inputs.select_indices(hand) for hand in hands])
        out = torch.zeros(inputs["input_ids"].shape, dtype=torch.float32)
        for hand, part in zip(hands, parts, strict=True):
            out[hand] = part
        return out[:size]

    # -- PolicyInterface ---------------------------------------------------------------------------------------------

    def get_logprobs(self, data: BatchedDataDict) -> BatchedDataDict:
        """See `PolicyInterface.get_logprobs`."""
        return BatchedDataDict({"logprobs": self._logprobs("get_logprobs", data)})

    def get_reference_policy_logprobs(self, data: BatchedDataDict) -> BatchedDataDict:
        """See `PolicyInterface.get_reference_policy_logprobs`."""
        return BatchedDataDict({"reference_logprobs": self._logprobs("get_reference_policy_logprobs", data)})

    def collect_features(self, data: BatchedDataDict, *, directory: str, stem: str) -> list[FeatureReport]:
        """See `PolicyInterface.collect_features`."""
        size = data.size
        inputs = BatchedDataDict({key: data[key] for key in ("input_ids", "input_lengths", "sample_index")})
        pad = -size % self._dp_size
        if pad:
            inputs = inputs.select_indices([*range(size), *[size - 1] * pad])
            inputs["sample_index"][size:] = -1
        hands = deal_by_length(inputs["input_lengths"], num_ranks=self._dp_size, batch_size=inputs.size)
        shards = [inputs.select_indices(hand) for hand in hands]
        return self._run_sharded("collect_features", shards, directory=directory, stem=stem)

    def train(self, data: BatchedDataDict, loss_fn: Callable[..., Any], *, step: int) -> dict[str, Any]:
        """See `PolicyInterface.train`."""
        batch_size = self._config.policy.train_global_batch_size
        if data.size == 0 or data.size % batch_size:
            raise ConfigError(
                f"policy.train_global_batch_size: got {batch_size}; must divide the {data.size} samples of a step "
                "(grpo.num_prompts_per_step * grpo.num_generations_per_prompt)."
            )
        shards = self._training_shards(data, unit=self._config.policy.smallest_train_batch_size)
        results = self._run_sharded("train", shards, loss_fn=loss_fn, step=step)
        return fold_results(results, num_draft_tokens=self._num_draft_tokens)

    def train_draft(self, data: BatchedDataDict, *, step: int) -> dict[str, Any]:
        """See `PolicyInterface.train_draft`."""
        unit = self._config.draft_run_batch_size
        if data.size == 0 or data.size % unit:
            raise ConfigError(
                f"policy.draft.train_global_batch_size: got {unit}; must divide the {data.size} samples of a step "
                "(draft_run.num_prompts_per_step * draft_run.num_generations_per_prompt)."
            )
        results = self._run_sharded("train_draft", self._training_shards(data, unit=unit), step=step)
        return fold_draft_results(results, num_draft_tokens=self._num_draft_tokens)

    def _training_shards(self, data: BatchedDataDict, *, unit: int) -> list[BatchedDataDict]:
        """Deal a step's samples to the data-parallel ranks.

        Args:
            data: the step's samples; only tensors are passed on.
            unit: samples of the smallest batch that is stepped on, so that every rank has its part of each.
        """
        columns = {key: value for key, value in data.items() if isinstance(value, torch.Tensor)}
        columns.setdefault("sample_index", torch.arange(data.size))
        batch = BatchedDataDict(columns)
        hands = deal_by_length(batch["input_lengths"], num_ranks=self._dp_size, batch_size=unit)
        return [batch.select_indices(hand) for hand in hands]

    def refit_manifest(self) -> RefitManifest:
        """See `PolicyInterface.refit_manifest`."""
        return self._run("refit_manifest")[0]

    def weights_ref(self, version: int, *, draft_only: bool = False) -> RefitPayload:
        """See `PolicyInterface.weights_ref`."""
        return self._run("gather_weights", version=version, draft_only=draft_only)[0]

    def prepare_for_training(self) -> None:
        """See `PolicyInterface.prepare_for_training`."""
        self._run("prepare_for_training")

    def offload_after_refit(self) -> None:
        """See `PolicyInterface.offload_after_refit`."""
        self._run("offload_after_refit")

    def save_checkpoint(self, directory: str) -> None:
        """See `PolicyInterface.save_checkpoint`."""
        self._run("save_checkpoint", directory=directory)

    def load_checkpoint(self, directory: str, *, restart_draft: bool = False) -> None:
        """See `PolicyInterface.load_checkpoint`."""
        self._run("load_checkpoint", directory=directory, restart_draft=restart_draft)

    def export_draft(self, directory: str, *, layout: str = "native") -> None:
        """See `PolicyInterface.export_draft`."""
        self._run("export_draft", directory=directory, layout=layout)

    def export_hf(self, directory: str) -> None:
        """See `PolicyInterface.export_hf`."""
        self._run("export_hf", directory=directory)

    def shutdown(self) -> None:
        """End the workers."""
        self._group.shutdown()
