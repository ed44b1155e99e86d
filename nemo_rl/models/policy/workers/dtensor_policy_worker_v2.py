"""One process of the policy: lifecycle and remote calls. The computation is in `nemo_rl.models.automodel`.

Runs as a Ray actor, as a spawned process, or in the caller's process. Every method below `setup` is collective over the
workers of the group.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl.distributed import rendezvous
from nemo_rl.distributed.device import resolve_device
from nemo_rl.models.automodel import checkpoint
from nemo_rl.models.automodel.data import microbatch_spec
from nemo_rl.models.automodel.setup import (
    OptimizerGroup,
    WeightSnapshot,
    build_model,
    build_optimizer_group,
    build_parallel_context,
    checkpoint_layout,
    checkpoint_tensors,
    reshard,
)
from nemo_rl.models.automodel.train import DraftTraining, PolicyTrainer
from nemo_rl.models.policy.results import BatchResult
from nemo_rl.weight_sync.checksum import tensor_checksum, to_numpy
from nemo_rl.weight_sync.interfaces import RefitManifest, RefitPayload, TensorInfo

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nemo_rl.algorithms.config import MasterConfig
    from nemo_rl.data.rollout_index import FeatureReport
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl.models.automodel.draft.runtime import _DraftRuntimeBase
    from nemo_rl.models.automodel.draft.spec import DraftSpec
    from nemo_rl.models.automodel.recorded_policy import FeatureRecorder, RecordedPolicy

log = logging.getLogger(__name__)

DRAFT_LR = {"scratch": 1e-4, "directory": 1e-5}
"""What `policy.draft.optimizer.kwargs.lr: null` means, by where the draft's weights came from."""


class DTensorPolicyWorkerV2:
    """One rank of the policy. `RANK` and `WORLD_SIZE` come from the environment."""

    def __init__(
        self,
        config: MasterConfig,
        *,
        draft_spec: DraftSpec | None = None,
        draft_dir: str | None = None,
        init_reference_model: bool = False,
        train_policy: bool = True,
    ) -> None:
        """Store the arguments; `init_process_group`, then `setup` do the work.

        Args:
            config: the run's configuration.
            draft_spec: the draft to train; None = none.
            draft_dir: checkpoint that the draft starts from; None = build it from the policy.
            init_reference_model: keep a copy of the initial weights for `get_reference_policy_logprobs`.
            train_policy: False = the policy stays as it is, and has no optimizer; only the draft is trained.
        """
        self._config = config
        self._draft_spec = draft_spec
        self._draft_dir = draft_dir
        self._wants_reference = init_reference_model
        self._trains_policy = train_policy
        self._rank = int(os.environ.get("RANK", "0"))
        self._world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self._is_offloaded = False
        self._recorder: FeatureRecorder | None = None

    # -- lifecycle ---------------------------------------------------------------------------------------------------

    def bind_rendezvous(self) -> tuple[str, int]:
        """On rank 0: start the key-value store of the group on a free port and tell where it is."""
        host = rendezvous.rendezvous_host()
        store = rendezvous.create_store(0, self._world_size, host, 0)
        return host, store.port

    def init_process_group(self, host: str, port: int) -> None:
        """Join the process group over the store that rank 0 started."""
        device = self._device()
        if device.type == "cuda":
            torch.cuda.set_device(device)
        rendezvous.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", self._rank, self._world_size, host, port
        )

    def _device(self) -> torch.device:
        if resolve_device(self._config.cluster.device) == "cpu":
            return torch.device("cpu")
        # An actor usually sees only its own GPU; a process started otherwise sees them all.
        index = 0 if torch.cuda.device_count() == 1 else int(os.environ.get("LOCAL_RANK", "0"))
        return torch.device("cuda", index)

    def setup(self) -> None:
        """Build model, draft, optimizers and the reference weights. The process group must exist."""
        _quiet_libraries()
        cfg = self._config.policy
        self._parallel = parallel = build_parallel_context(cfg, device=self._device())
        # For dropout only; ranks that share samples draw alike.
        torch.manual_seed(self._config.grpo.seed + dist.get_rank(parallel.dp_group))
        model = build_model(cfg, parallel)
        policy_group = self._build_policy_group(model) if self._trains_policy else None
        self._draft = self._build_draft(model)
        self._trainer = PolicyTrainer(
            cfg, parallel, model, policy_group, draft=self._draft_training(), recorded=self._build_recorded(model)
        )
        self._reference = WeightSnapshot(model) if self._wants_reference else None

    def _build_policy_group(self, model: torch.nn.Module) -> OptimizerGroup:
        cfg = self._config.policy
        return build_optimizer_group(
            "policy",
            model,
            optimizer=cfg.optimizer.name,
            kwargs=cfg.optimizer.kwargs,
            schedule=cfg.scheduler,
            max_grad_norm=cfg.max_grad_norm,
        )

    def _build_draft(self, model: torch.nn.Module) -> _DraftRuntimeBase | None:
        if self._draft_spec is None:
            return None
        # Imported here: a policy without a draft does not pay for it.
        from nemo_rl.models.automodel.draft.registry import build_draft_runtime

        cfg = self._config.policy
        runtime = build_draft_runtime(
            cfg.draft,
            self._draft_spec,
            policy_model=model,
            device=self._parallel.device,
            dtype=getattr(torch, cfg.precision),
            draft_dir=self._draft_dir,
            seed=self._config.draft_seed,
        )
        runtime.parallelize(self._parallel.dp_mesh)
        return runtime

    def _build_recorded(self, model: torch.nn.Module) -> RecordedPolicy | None:
        """What stands in for the policy's forward; None = the policy is run."""
        run, store = self._config.draft_run, self._config.rollout_store
        if self._trains_policy or self._draft is None or run.source != "rollouts" or not store.features:
            return None
        # Imported here: only a draft that is trained from recorded states needs them.
        from nemo_rl.data.rollout_store import RolloutReader
        from nemo_rl.models.automodel.recorded_policy import RecordedPolicy

        return RecordedPolicy(
            model,
            RolloutReader(Path(store.dir)),
            feature_ids=self._draft.spec.architecture.feature_ids,
            num_layers=self._draft.spec.num_target_layers,
            dtype=getattr(torch, self._config.policy.precision),
        )

    def _draft_training(self) -> DraftTraining | None:
        """The draft with a new optimizer; None for a static one, which is served and saved as it is."""
        if self._draft is None or self._draft.spec.is_static:
            return None
        group = self._build_draft_group(self._draft)
        return DraftTraining(self._draft, group, self._config.policy.draft.train_every)

    def _build_draft_group(self, draft: _DraftRuntimeBase) -> OptimizerGroup:
        cfg = self._config.policy
        kwargs = {k: v for k, v in cfg.draft.optimizer.kwargs.items() if v is not None}
        return build_optimizer_group(
            "draft",
            draft.module,
            optimizer=cfg.draft.optimizer.name or cfg.optimizer.name,
            kwargs={"lr": DRAFT_LR[draft.spec.source], **kwargs},
            schedule=cfg.draft.scheduler,
            max_grad_norm=cfg.draft.max_grad_norm,
            warmup_steps=cfg.draft.warmup_steps,
        )

    def shutdown(self) -> None:
        """Leave the process group."""
        rendezvous.destroy_process_group()

    # -- log-probabilities and training ------------------------------------------------------------------------------

    def get_logprobs(self, data: BatchedDataDict) -> Tensor:
        """Log-probabilities fp32 [B, T] of this rank's samples under the current weights."""
        self.prepare_for_training()
        return self._trainer.logprobs(data)

    def get_reference_policy_logprobs(self, data: BatchedDataDict) -> Tensor:
        """The same under the initial weights."""
        if self._reference is None:
            raise RuntimeError(
                "get_reference_policy_logprobs: the policy was built without reference weights; build it with "
                "init_reference_model=True (loss_fn.reference_policy_kl_penalty > 0 does)."
            )
        self.prepare_for_training()
        self._reference.swap()
        try:
            return self._trainer.logprobs(data)
        finally:
            self._reference.swap()

    def collect_features(self, data: BatchedDataDict, directory: str, stem: str) -> FeatureReport:
        """Write the states that the draft reads, and the final one, for this rank's samples.

        Args:
            data: `input_ids`, `input_lengths` and `sample_index`, below 0 for samples that only fill up.
            directory: on a disk that all workers share.
            stem: first part of the file's name.
        """
        self.prepare_for_training()
        if self._recorder is None:
            self._recorder = self._build_recorder()
        # Ranks that share samples are neighbours; the first of them writes.
        is_writer = dist.get_rank() % (dist.get_world_size() // self._parallel.dp_size) == 0
        name = f"{stem}_features_{dist.get_rank(self._parallel.dp_group):02d}.safetensors"
        return self._recorder.collect(data, path=Path(directory) / name if is_writer else None)

    def _build_recorder(self) -> FeatureRecorder:
        # Imported here, as the draft is: a run that records nothing does not pay for it.
        from nemo_rl.models.automodel.recorded_policy import FeatureRecorder

        cfg, spec = self._config.policy, self._draft_spec
        assert spec is not None, "features without a draft are a conflict of the configuration"
        return FeatureRecorder(
            model=self._trainer.model,
            forward=self._trainer.forward,
            feature_ids=spec.architecture.feature_ids,
            num_layers=spec.num_target_layers,
            spec=microbatch_spec(cfg, is_training=False),
            parallel=self._parallel,
            dtype=getattr(torch, cfg.precision),
        )

    def train(self, data: BatchedDataDict, loss_fn: Callable[..., Any], step: int) -> list[BatchResult]:
        """Train on this rank's shard: its part of every global batch, one after the other.

        Returns:
            One result per optimizer step.
        """
        self.prepare_for_training()
        part = self._config.policy.train_global_batch_size // self._parallel.dp_size
        results = [
            self._trainer.train_batch(data.slice(start, start + part), loss_fn, step=step)
            for start in range(0, data.size, part)
        ]
        if self._trainer.policy_group is not None:
            self._trainer.policy_group.step_schedule()
        return results

    def train_draft(self, data: BatchedDataDict, step: int) -> list[BatchResult]:
        """Train the draft alone on this rank's shard, beside a policy that stays as it is.

        Returns:
            One result for all updates of the draft.
        """
        self.prepare_for_training()
        return [self._trainer.train_draft(data, step=step, batch_size=self._config.draft_run_batch_size)]

    def _groups(self) -> list[OptimizerGroup]:
        policy, draft = self._trainer.policy_group, self._trainer.draft
        return [*([] if policy is None else [policy]), *([] if draft is None else [draft.group])]

    # -- devices -----------------------------------------------------------------------------------------------------

    def prepare_for_training(self) -> None:
        """Bring weights and optimizer state back to the training device."""
        if self._is_offloaded:
            self._move(self._parallel.device)
            self._is_offloaded = False

    def offload_after_refit(self) -> None:
        """Move weights and optimizer state to host memory, so that a colocated engine can use the GPU."""
        is_resident = self._parallel.device.type == "cuda" and not self._config.policy.dtensor_cfg.cpu_offload
        if is_resident and self._config.policy.generation.colocated.enabled and not self._is_offloaded:
            self._move(torch.device("cpu"))
            self._is_offloaded = True
            torch.cuda.empty_cache()

    def _move(self, device: torch.device) -> None:
        modules: list[torch.nn.Module] = [self._trainer.model, *([] if self._draft is None else [self._draft.module])]
        for module in modules:
            reshard(module)
            module.to(device)
        for group in self._groups():
            for param, state in group.optimizer.state.items():
                for key, value in state.items():
                    # `step` counters live on the CPU unless the optimizer put them beside the parameter.
                    if isinstance(value, Tensor) and value.shape == param.shape:
                        state[key] = value.to(device)

    # -- refit -------------------------------------------------------------------------------------------------------

    def refit_manifest(self) -> RefitManifest:
        """Names, shapes and dtypes that `gather_weights` sends, in the generation engines' precision."""
        precision = self._config.policy.generation.vllm_cfg.precision
        policy = {name: TensorInfo(shape, precision) for name, shape in checkpoint_layout(self._trainer.model).items()}
        return RefitManifest(policy=policy, draft={} if self._draft is None else self._draft.manifest())

    def gather_weights(self, version: int, draft_only: bool = False) -> RefitPayload | None:
        """Gather policy and draft tensor by tensor.

        Args:
            version: stamped on the payload.
            draft_only: leave out the policy, which the engines hold already.

        Returns:
            On rank 0 the payload, its tensors in the Ray object store when there is one; None on other ranks.
        """
        self.prepare_for_training()
        tensors, checksums = {}, {}
        for name, tensor in self._draft_tensors() if draft_only else self._wire_tensors():
            if dist.get_rank() == 0:
                tensors[name] = to_numpy(tensor)
                checksums[name] = tensor_checksum(tensor)
        if dist.get_rank() != 0:
            return None
        manifest = self.refit_manifest()
        if draft_only:
            manifest = RefitManifest(policy={}, draft=manifest.draft, draft_only=True)
        return RefitPayload(version=version, manifest=manifest, checksums=checksums, tensors=_hand_over(tensors))

    def _wire_tensors(self) -> Iterator[tuple[str, Tensor]]:
        dtype = getattr(torch, self._config.policy.generation.vllm_cfg.precision)
        yield from checkpoint_tensors(self._trainer.model, dtype=dtype)
        yield from self._draft_tensors()

    def _draft_tensors(self) -> Iterator[tuple[str, Tensor]]:
        if self._draft is not None:
            reshard(self._draft.module)
            for name, tensor in self._draft.stream(self._trainer.model):
                yield name, tensor.cpu()

    # -- files -------------------------------------------------------------------------------------------------------

    def save_checkpoint(self, directory: str) -> None:
        """Write `policy/` and `draft/` under the directory of a step, and the draft's further layouts."""
        self.prepare_for_training()
        checkpoint.save(
            Path(directory),
            model=self._trainer.model,
            groups=self._groups(),
            draft=self._draft,
            draft_layouts=self._config.policy.draft.export_layouts,
            draft_optimizer=self._draft_optimizer(),
        )

    def load_checkpoint(self, directory: str, restart_draft: bool = False) -> None:
        """Restore what `save_checkpoint` wrote. The reference weights stay the initial ones.

        Args:
            directory: of the step.
            restart_draft: leave the checkpoint's draft alone and build a new one beside the restored policy.
        """
        self.prepare_for_training()
        groups = [g for g in self._groups() if not (restart_draft and g.name == "draft")]
        checkpoint.load(
            Path(directory),
            model=self._trainer.model,
            groups=groups,
            draft=None if restart_draft else self._draft,
            draft_optimizer=self._draft_optimizer(),
            ignore_draft=restart_draft,
        )
        if restart_draft:
            # Again: a new draft starts from the policy's head and norm, and those have just changed.
            self._draft = self._build_draft(self._trainer.model)
            self._trainer.draft = self._draft_training()

    def _draft_optimizer(self) -> dict[str, Any] | None:
        if self._draft is None:
            return None
        from nemo_rl.models.automodel.draft.metadata import optimizer_layout

        return optimizer_layout(self._config.policy, self._draft.spec)

    def export_draft(self, directory: str, layout: str = "native") -> None:
        """Write the live draft in a layout of `policy.draft.export_layouts`."""
        if self._draft is None:
            raise RuntimeError("export_draft: this policy has no draft; set policy.draft.enabled=true.")
        self.prepare_for_training()
        reshard(self._draft.module)
        self._draft.export(directory, self._trainer.model, layout=layout, optimizer=self._draft_optimizer())

    def export_hf(self, directory: str) -> None:
        """Write the policy as transformers and vLLM load it, in the generation precision."""
        self.prepare_for_training()
        cfg = self._config.policy
        checkpoint.export_hf(
            Path(directory),
            model=self._trainer.model,
            model_name=cfg.model_name,
            tokenizer_name=cfg.tokenizer.name,
            dtype=getattr(torch, cfg.generation.vllm_cfg.precision),
        )


def _quiet_libraries() -> None:
    """Silence import-time notices of libraries that say nothing about this run."""
    for name in ("torchao", "torch.utils._pytree", "torch.distributed.tensor._redistribute"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _hand_over(tensors: dict[str, Any]) -> Any:
    """Put the arrays into the Ray object store; without Ray, pass them on as they are."""
    # Imported here: a worker outside Ray does not need it.
    import ray

    return ray.put(tensors) if ray.is_initialized() else tensors
