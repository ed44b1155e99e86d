"""The seam between the training worker and a draft.

Per optimizer step the worker calls `begin_global_batch` once, then per micro-batch `capture` around the policy's
forward and `loss` on its raw logits. Losses are already divided by global counts, so micro-batches and ranks are
summed; where gradients are averaged over ranks the worker multiplies by their number.

Shape symbols: B samples, T their padded length, R rows, S row length, V target ids.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from nemo_rl.errors import CheckpointError
from nemo_rl.models.automodel.draft.acceptance import Metrics
from nemo_rl.models.automodel.draft.adapters.base import DraftAdapter, Verifier
from nemo_rl.models.automodel.draft.builders import BuiltDraft, build_draft, policy_weights
from nemo_rl.models.automodel.draft.capture import FeatureCapture, embedding_weight, full_tensor, head_weight
from nemo_rl.models.automodel.draft.checkpoint import check_meta, load_weights, save_draft
from nemo_rl.models.automodel.draft.config import DraftConfigBase
from nemo_rl.models.automodel.draft.models.layers import DraftModule
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

__all__ = ["DraftLoss", "Metrics", "_DraftRuntimeBase", "charged_depths", "sampled_tokens"]

ConfigT = TypeVar("ConfigT", bound=DraftConfigBase)


class DraftLoss(NamedTuple):
    """One micro-batch's share.

    Attributes:
        loss: fp32 scalar, divided by the global counts; not times `loss_weight`, not times the number of ranks.
        metrics: pairs of this micro-batch.
    """

    loss: Tensor
    metrics: Metrics


def sampled_tokens(data: BatchedDataDict) -> tuple[Tensor, Tensor]:
    """Which tokens of right-padded samples the policy sampled and keeps, and which sample each belongs to; on the CPU.

    Args:
        data: `token_mask` [B, T], `sample_mask` [B], `input_lengths` int64 [B].

    Returns:
        bool [B, T] and int64 [B, T]: row of the sample, -1 on padding.
    """
    kept = data["token_mask"].cpu().bool() & data["sample_mask"].cpu().bool()[:, None]
    is_token = torch.arange(kept.shape[1])[None] < data["input_lengths"].cpu()[:, None]
    return kept & is_token, torch.where(is_token, torch.arange(kept.shape[0])[:, None], -1)


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
        adapter: the algorithm's torch-free half.
        module_class: makes the module of an architecture.
        contract: what the algorithm trains of the tensors that a draft may share with the policy.
        module: the draft; one call runs its whole forward, which is where sharding hooks fire.
        spec: of the draft.
        cfg: `policy.draft`.
    """

    adapter: ClassVar[DraftAdapter[Any, Any]]
    module_class: ClassVar[Callable[[Any], DraftModule]]
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
        self._policy_head: Tensor | None = None
        self._device = device
        self._dtype = dtype
        self._compute_dtype = torch.float32
        self._seed = seed
        self._vocab_ids = None if built.vocab is None else torch.tensor(built.vocab.ids, device=device)
        self._num_updates = 0
        arch = spec.architecture
        self._capture = FeatureCapture(
            arch.feature_ids, num_layers=spec.num_target_layers, with_final_state=arch.reads_final_state
        )
        for name, parameter in self.module.named_parameters():
            parameter.requires_grad_(clean_name(name) not in spec.frozen)
        check_contract(self.module, spec, self.contract)

    @classmethod
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
    ) -> Self:
        """Build the draft beside a policy; see `registry.build_draft_runtime`."""
        built = build_draft(
            spec,
            module_class=cls.module_class,
            weights=policy_weights(policy_model, with_embedding=cls.contract.trains_embeddings),
            draft_dir=draft_dir,
            trust_pickle=cfg.trust_pickle,
            seed=seed,
        )
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        return cls(cfg, spec, built, device=torch.device(device), dtype=dtype, seed=seed)

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
        """The optimizer group of the draft, without frozen parameters; call it after `parallelize`."""
        return {"name": "draft", "params": [p for p in self.module.parameters() if p.requires_grad]}

    # -- one optimizer step ------------------------------------------------------------------------------------------

    def begin_global_batch(
        self, data: BatchedDataDict, *, step: int, dp_group: dist.ProcessGroup | None, policy_model: nn.Module
    ) -> None:
        """Plan the step and agree on its denominators.

        Collective: one all-reduce, and a gather of what the draft reads of the policy's embedding and head, which move
        with every update.

        Args:
            data: this rank's samples: `input_ids` int64 [B, T], `token_mask` [B, T], `sample_mask` [B], `input_lengths`
                int64 [B], `sample_index` int64 [B].
            step: key of random draws.
            dp_group: ranks that hold other samples; None = this rank holds the whole batch.
            policy_model: its embedding and head are read when the draft shares them.
        """
        counts = self._plan(data, step=step).to(self._device)
        if dp_group is not None:
            dist.all_reduce(counts, group=dp_group)
        self._set_denominators(counts)
        self._num_updates += 1
        if not self.spec.architecture.owns_embedding:
            self._policy_embedding = full_tensor(embedding_weight(policy_model))
        if not self.contract.trains_lm_head:
            # A tied head is gathered once.
            is_tied = head_weight(policy_model) is embedding_weight(policy_model)
            gathered = self._policy_embedding if is_tied else None
            head = full_tensor(head_weight(policy_model)) if gathered is None else gathered
            self._policy_head = self._own_rows(head).to(self._compute_dtype)

    def _own_rows(self, head: Tensor) -> Tensor:
        """Rows [D, H] of the draft's ids in the policy's head; rows that pad the vocabulary are no tokens."""
        if self._vocab_ids is None:
            return head[: self.spec.architecture.vocab_size]
        return head.index_select(0, self._vocab_ids)

    @property
    def num_updates(self) -> int:
        """Updates of the draft begun so far, over all runs that this one continues."""
        return self._num_updates

    @property
    def _embedding(self) -> Tensor:
        """The frozen embedding in use, float [V, H]: the draft's own, or the policy's at the start of the update."""
        embedding = self._policy_embedding if self._own_embedding is None else self._own_embedding
        assert embedding is not None, "begin_global_batch reads the policy's embedding before the first loss"
        return embedding

    @property
    def _head(self) -> Tensor:
        """The policy's head rows of the draft's ids at the start of the update, [D, H] in the compute dtype."""
        assert self._policy_head is not None, "begin_global_batch reads the policy's head before the first loss"
        return self._policy_head

    @abstractmethod
    def _plan(self, data: BatchedDataDict, *, step: int) -> Tensor:
        """Plan this rank's samples from masks and lengths.

        Returns:
            This rank's share of the denominators, int64 or float64 [n], to be summed over ranks.
        """

    @abstractmethod
    def _set_denominators(self, counts: Tensor) -> None:
        """Take the sum over all ranks of what `_plan` returned, [n]."""

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

    def zero_loss(self) -> Tensor:
        """A zero that reaches every parameter, through the module's call."""
        return self.module(None).loss

    def _document_metrics(self, documents: int, with_chain: int) -> Metrics:
        """`documents_without_chain`.

        Args:
            documents: of the micro-batch.
            with_chain: of those, how many have something to learn from.
        """
        pair = torch.tensor([documents - with_chain, documents], dtype=torch.float32, device=self._device)
        return {"documents_without_chain": (pair[0], pair[1])}

    # -- publishing and saving ---------------------------------------------------------------------------------------

    def _reshard(self) -> None:
        """Between a forward and its backward the module holds gathered copies in the compute dtype; drop them."""
        if isinstance(self.module, FSDPModule):
            self.module.reshard()

    def manifest(self) -> dict[str, TensorInfo]:
        """Name (no `draft.` prefix) to shape and dtype of what each refit sends."""
        infos = manifest(self.spec)
        return {name: infos[name] for name in self.spec.published_names}

    def stream(self, policy_model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yield (`draft.` name, whole tensor of its serving dtype). Collective; every rank must exhaust it.

        Args:
            policy_model: a draft of a reduced vocabulary sends the rows of its head.
        """
        self._reshard()
        for name, tensor in published_tensors(
            self.module, self.spec, self.spec.published_names, live_head=self._live_head(policy_model)
        ):
            yield DRAFT_PREFIX + name, tensor

    def _live_head(self, policy_model: nn.Module) -> Tensor | None:
        """The policy's present head rows of the draft's ids, float [D, H]; None for a draft that does not send them."""
        if not self.spec.architecture.has_live_head:
            return None
        return self._own_rows(full_tensor(head_weight(policy_model)))

    def export(
        self,
        directory: str,
        policy_model: nn.Module,
        *,
        layout: str = "native",
        optimizer: Mapping[str, Any] | None = None,
    ) -> None:
        """Write a directory that the engine loads unchanged. Collective; rank 0 writes.

        Args:
            directory: created if absent.
            policy_model: as for `stream`; the `speculators` layout names its checkpoint.
            layout: one of the adapter's.
            optimizer: what `metadata.optimizer_layout` returned, when the draft's optimizer is saved elsewhere.
        """
        is_writer = not dist.is_initialized() or dist.get_rank() == 0
        config = self._config_of(layout, policy_model)
        self._reshard()
        tensors = {}
        names = tuple(self.spec.architecture.published_shapes())
        for name, tensor in published_tensors(self.module, self.spec, names, live_head=self._live_head(policy_model)):
            if is_writer:
                tensors[name] = tensor.cpu()
        if is_writer:
            save_draft(
                Path(directory),
                self.spec,
                config=config,
                published=tensors,
                vocab=self._vocab,
                embedding=self._own_embedding,
                layout=layout,
                optimizer=optimizer,
            )

    def _config_of(self, layout: str, policy_model: nn.Module) -> dict[str, Any]:
        """The config.json of an export."""
        arch, dtype = self.spec.architecture, self.spec.dtype
        if layout == "native":
            return self.adapter.write_config(arch, dtype=dtype)
        config: Any = policy_model.config
        verifier = Verifier(config.name_or_path, tuple(config.architectures or ()))
        return self.adapter.write_speculators(arch, dtype=dtype, k=self.spec.num_speculative_tokens, verifier=verifier)

    def check_saved(self, directory: str, *, optimizer: Mapping[str, Any] | None) -> None:
        """Refuse an export that a checkpoint holds when this run's draft or optimizer is another one.

        Args:
            directory: as `export` wrote it.
            optimizer: what `metadata.optimizer_layout` returns for this run.

        Raises:
            CheckpointError: naming every field that differs.
        """
        check_meta(Path(directory), self.spec, self._vocab, optimizer=optimizer, with_optimizer=True)

    def state_dict(self) -> dict[str, Tensor]:
        """fp32 parameters (DTensors when sharded), the vocabulary's offsets and the updates done, for a checkpoint."""
        self._reshard()
        state = {clean_name(name): tensor for name, tensor in self.module.state_dict().items()}
        state["num_updates"] = torch.tensor(self._num_updates)
        if self._vocab is not None:
            state["d2t"] = torch.tensor(self._vocab.d2t, dtype=torch.int64)
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore what `state_dict` returned; another vocabulary or set of names is refused.

        Args:
            state: as `state_dict` returned it.
        """
        state = dict(state)
        num_updates = state.pop("num_updates", None)
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
        if num_updates is not None:
            self._num_updates = int(num_updates)

    def load_export(self, directory: str) -> None:
        """Load weights that `export` wrote (serving dtype) into an unsharded module.

        Args:
            directory: of the export; its metadata must fit this run's draft.
        """
        self.load_state_dict(
            load_weights(Path(directory), self.spec, self._vocab)
            | ({} if self._vocab is None else {"d2t": torch.tensor(self._vocab.d2t)})
        )
