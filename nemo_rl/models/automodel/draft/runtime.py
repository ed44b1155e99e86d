"""The seam between the training worker and a draft.

Per optimizer step the worker calls `begin_global_batch` once, then per micro-batch `capture` around the policy's
forward and `loss` on its raw logits. Losses are already divided by global counts, so micro-batches and ranks are
summed; where gradients are averaged over ranks the worker multiplies by their number.

Shape symbols: B samples, T their padded length, R rows, S row length, V target ids.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from nemo_rl.errors import CheckpointError
from nemo_rl.models.automodel.draft.builders import BuiltDraft
from nemo_rl.models.automodel.draft.capture import FeatureCapture, embedding_weight, full_tensor
from nemo_rl.models.automodel.draft.checkpoint import load_weights, save_draft
from nemo_rl.models.automodel.draft.config import DraftConfigBase
from nemo_rl.models.automodel.draft.publish import (
    PublishContract,
    check_contract,
    clean_name,
    manifest,
    published_tensors,
)
from nemo_rl.models.automodel.draft.spec import DraftSpec
from nemo_rl.weight_sync.interfaces import DRAFT_PREFIX, TensorInfo

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl.models.automodel.data import Microbatch

__all__ = ["DraftLoss", "Metrics", "_DraftRuntimeBase", "charged_depths"]

Metrics = dict[str, tuple[Tensor, Tensor]]
"""Metric name to (numerator, denominator), scalars; sums over micro-batches and ranks are formed by the caller."""

ConfigT = TypeVar("ConfigT", bound=DraftConfigBase)


class DraftLoss(NamedTuple):
    """One micro-batch's share.

    Attributes:
        loss: fp32 scalar, divided by the global counts; not times `loss_weight`, not times the number of ranks.
        metrics: pairs of this micro-batch.
    """

    loss: Tensor
    metrics: Metrics


def charged_depths(sampled: Tensor, doc_ids: Tensor, *, depths: int, mask_rule: str) -> Tensor:
    """Which (depth, slot) pairs are supervised. The only place that shifts the sampled mask.

    Slot t at depth k reads token x[t+1+k] and predicts x[t+2+k], which stays in the same document. `contiguous`: all of
    x[t+1] .. x[t+2+k] were sampled, i.e. the engine could have drafted from x[t+1] and been right so far. `input`:
    x[t+1+k] was sampled, whatever surrounds it.

    Worked example, `contiguous`, mask 0 0 1 1 1 1 (x0..x5)::

        depth 0: slots 1 2 3    depth 1: slots 1 2    depth 2: slot 1

    Args:
        sampled: bool [R, S], True = the policy sampled the token and its sample is kept.
        doc_ids: int64 [R, S], document of each token, -1 on padding.
        depths: number of depths K.
        mask_rule: `contiguous` or `input`.

    Returns:
        bool [K, R, S].
    """
    rows, width = sampled.shape
    pad = depths + 1
    sampled = torch.cat([sampled, sampled.new_zeros(rows, pad)], dim=1)
    docs = torch.cat([doc_ids, doc_ids.new_full((rows, pad), -1)], dim=1)

    def ahead(shift: int) -> Tensor:
        """Token `shift` places ahead is sampled and belongs to the slot's document: bool [R, S]."""
        same = (docs[:, shift : shift + width] == doc_ids) & (doc_ids >= 0)
        return sampled[:, shift : shift + width] & same

    if mask_rule == "input":
        return torch.stack([ahead(1 + k) for k in range(depths)])
    charged, chain = [], ahead(1)
    for k in range(depths):
        chain = chain & ahead(2 + k)
        charged.append(chain)
    return torch.stack(charged)


class _DraftRuntimeBase(ABC, Generic[ConfigT]):
    """What every draft algorithm gives to the worker.

    Attributes:
        contract: what the algorithm trains of the tensors that a draft may share with the policy.
        module: the draft; one call runs its whole forward, which is where sharding hooks fire.
        spec: of the draft.
        cfg: `policy.draft`.
    """

    contract: ClassVar[PublishContract]

    def __init__(
        self, cfg: ConfigT, spec: DraftSpec, built: BuiltDraft, *, device: torch.device, dtype: torch.dtype, seed: int
    ) -> None:
        """Take over a built draft.

        Args:
            cfg: `policy.draft`.
            spec: of the draft.
            built: module, vocabulary and own embedding.
            device: where it lives.
            dtype: of its computations once `parallelize` was called; parameters stay fp32.
            seed: of random draws.
        """
        self.cfg = cfg
        self.spec = spec
        self.module: nn.Module = built.module.to(device)
        self._vocab = built.vocab
        self._own_embedding = None if built.embedding is None else built.embedding.to(device)
        self._policy_embedding: Tensor | None = None
        self._device = device
        self._dtype = dtype
        self._compute_dtype = torch.float32
        self._seed = seed
        self._vocab_ids = None if built.vocab is None else torch.tensor(built.vocab.ids, device=device)
        self._capture = FeatureCapture(spec.architecture.feature_ids, num_layers=spec.num_target_layers)
        check_contract(self.module, spec, self.contract)

    @classmethod
    @abstractmethod
    def build(
        cls,
        cfg: ConfigT,
        spec: DraftSpec,
        *,
        policy_model: nn.Module,
        device: torch.device | str,
        dtype: torch.dtype | str,
        draft_dir: str | None,
        seed: int,
    ) -> _DraftRuntimeBase:
        """Build the draft beside a policy; see `registry.build_draft_runtime`."""

    # -- setup -------------------------------------------------------------------------------------------------------

    def parallelize(self, mesh: DeviceMesh) -> None:
        """Shard the module's parameters over a data-parallel mesh, computing in the runtime's dtype, reducing in fp32.

        Args:
            mesh: one-dimensional.
        """
        half = None if self._dtype == torch.float32 else self._dtype
        self._compute_dtype = self._dtype
        fully_shard(
            self.module,
            mesh=mesh,
            mp_policy=MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32, cast_forward_inputs=False),
        )

    def param_group(self) -> dict[str, Any]:
        """The optimizer group of the draft; call it after `parallelize`."""
        return {"name": "draft", "params": [p for p in self.module.parameters() if p.requires_grad]}

    # -- one optimizer step ------------------------------------------------------------------------------------------

    def begin_global_batch(
        self, data: BatchedDataDict, *, step: int, dp_group: dist.ProcessGroup | None, policy_model: nn.Module
    ) -> None:
        """Plan the step and agree on its denominators. Collective: one all-reduce, and a gather of the embedding.

        Args:
            data: this rank's samples: `token_mask` [B, T], `sample_mask` [B], `input_lengths` int64 [B], `sample_index`
                int64 [B].
            step: key of random draws.
            dp_group: ranks that hold other samples; None = this rank holds the whole batch.
            policy_model: its embedding is read when the draft shares it.
        """
        counts = self._plan(data, step=step).to(self._device)
        if dp_group is not None:
            dist.all_reduce(counts, group=dp_group)
        self._set_denominators(counts)
        if self._own_embedding is None:
            # The policy's embedding moves with every update.
            self._policy_embedding = full_tensor(embedding_weight(policy_model))

    @property
    def _embedding(self) -> Tensor:
        """The embedding in use, float [V, H]: the draft's own, or the policy's at the start of the global batch."""
        embedding = self._policy_embedding if self._own_embedding is None else self._own_embedding
        assert embedding is not None, "begin_global_batch reads the policy's embedding before the first loss"
        return embedding

    @abstractmethod
    def _plan(self, data: BatchedDataDict, *, step: int) -> Tensor:
        """Plan this rank's samples from masks and lengths; return its counts, int64 [n], to be summed over ranks."""

    @abstractmethod
    def _set_denominators(self, counts: Tensor) -> None:
        """Take the counts of all ranks, int64 [n]."""

    def capture(self, policy_model: nn.Module) -> AbstractContextManager[None]:
        """Context around one forward of the policy whose hidden states the next `loss` reads."""
        return self._capture(policy_model)

    @abstractmethod
    def loss(self, mb: Microbatch, policy_logits: Tensor) -> DraftLoss:
        """Draft loss of a micro-batch. Every rank calls it equally often, also for micro-batches without supervision.

        Args:
            mb: the micro-batch that the captured forward ran.
            policy_logits: float [R, S, V], raw: before temperature and filters. Not differentiated.
        """

    @abstractmethod
    def zero_loss(self) -> Tensor:
        """A zero that reaches every parameter, through the module's call."""

    # -- publishing and saving ---------------------------------------------------------------------------------------

    def _reshard(self) -> None:
        """Between a forward and its backward the module holds gathered copies in the compute dtype; drop them."""
        if isinstance(self.module, FSDPModule):
            self.module.reshard()

    def manifest(self) -> dict[str, TensorInfo]:
        """Name (no `draft.` prefix) to shape and dtype of what each refit sends."""
        return manifest(self.spec)

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (`draft.` name, whole tensor of the serving dtype). Collective; every rank must exhaust it."""
        self._reshard()
        for name, tensor in published_tensors(self.module, self.spec):
            yield DRAFT_PREFIX + name, tensor

    def export(self, directory: str) -> None:
        """Write a directory that the engine loads unchanged. Collective; rank 0 writes.

        Args:
            directory: created if absent.
        """
        is_writer = not dist.is_initialized() or dist.get_rank() == 0
        self._reshard()
        tensors = {}
        for name, tensor in published_tensors(self.module, self.spec):
            if is_writer:
                tensors[name] = tensor.cpu()
        if is_writer:
            save_draft(Path(directory), self.spec, trained=tensors, vocab=self._vocab, embedding=self._own_embedding)

    def state_dict(self) -> dict[str, Tensor]:
        """fp32 parameters (DTensors when sharded) and the vocabulary's offsets, for a checkpoint."""
        self._reshard()
        state = {clean_name(name): tensor for name, tensor in self.module.state_dict().items()}
        if self._vocab is not None:
            state["d2t"] = torch.tensor(self._vocab.d2t, dtype=torch.int64)
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore what `state_dict` returned; another vocabulary or set of names is refused.

        Args:
            state: as `state_dict` returned it.
        """
        state = dict(state)
        d2t = state.pop("d2t", None)
        stored = None if d2t is None else d2t.tolist()
        if stored != (None if self._vocab is None else self._vocab.d2t):
            raise CheckpointError("the checkpoint's draft vocabulary (d2t) is not the one of this run's draft.")
        self._reshard()
        own = self.module.state_dict()
        by_clean_name = {clean_name(name): name for name in own}
        if by_clean_name.keys() != state.keys():
            differing = sorted(by_clean_name.keys() ^ state.keys())
            raise CheckpointError(f"the checkpoint's draft and this run's differ in the tensors {differing}.")
        self.module.load_state_dict({by_clean_name[name]: tensor for name, tensor in state.items()})

    def load_export(self, directory: str) -> None:
        """Load weights that `export` wrote (serving dtype) into an unsharded module.

        Args:
            directory: of the export; its metadata must fit this run's draft.
        """
        self.load_state_dict(
            load_weights(Path(directory), self.spec, self._vocab)
            | ({} if self._vocab is None else {"d2t": torch.tensor(self._vocab.d2t)})
        )
