"""Our weight-transfer engine: one update carries policy and draft, checked before, applied at once, read back after.

Registered with vLLM's factory and driven through its own calls (`start_weight_update`, `update_weights`,
`finish_weight_update`). One round serves both models, because validating the draft only after the policy was written
would leave half an update behind:

    receive_weights       takes everything in, checks everything, changes nothing
    finish_weight_update  writes policy, then draft; rebuilds what vLLM derives from draft weights; reads all of it back

An exception in the first leaves the engine as it was. An exception in the second means the engine is lost: its owner
must not generate with it again.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from nemo_rl.errors import ConfigError, RefitError
from nemo_rl.models.generation.vllm.cpu_linear import use_parameters_directly
from nemo_rl.models.generation.vllm.draft_ownership import check_no_alias, shared_modules
from nemo_rl.models.generation.vllm.engine_args import TRANSFER_BACKEND
from nemo_rl.models.generation.vllm.readback import ModelTensors
from nemo_rl.models.generation.vllm.update_checks import find_problems, is_float, read_headers
from nemo_rl.weight_sync.checksum import dtype_name, from_numpy, tensor_checksum
from nemo_rl.weight_sync.interfaces import DRAFT_PREFIX, RefitManifest, TensorInfo

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_MODEL_KEY, _DRAFT_KEY = "policy.model_name", "policy.draft"
_NEVER_SENT = re.compile(r"model\.layers\.[1-9]\d*\.hidden_norm\.weight|model\.mask_embedding")
"""Draft parameters that no checkpoint holds. vLLM gives every layer the norm of the fused hidden state, but only layer
0, which fuses, applies it; and it gives a block draft a mask embedding, which is read from a file of its own or not
used."""


@dataclass
class InitInfo(WeightTransferInitInfo):
    """The object store needs no rendezvous. A transport that does (NCCL) puts its address here."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One whole update.

    Attributes:
        version: Grows with each update.
        manifest: What is sent.
        checksums: Wire name to checksum.
        source: What the transport turns into tensors.
        transport: Key of `TRANSPORTS`.
    """

    version: int
    manifest: RefitManifest
    checksums: Mapping[str, str]
    source: Any
    transport: str = "arrays"


def receive_arrays(info: UpdateInfo) -> dict[str, torch.Tensor]:
    """Ray object store: `source` is a dict of numpy arrays, possibly read-only views of shared memory."""
    dtypes = {name: entry.dtype for name, entry in info.manifest.wire_entries().items()}
    return {
        name: from_numpy(array, dtypes[name]) if name in dtypes else torch.as_tensor(array)
        for name, array in info.source.items()
    }


TRANSPORTS: dict[str, Callable[[UpdateInfo], dict[str, torch.Tensor]]] = {"arrays": receive_arrays}
"""How tensors get here. CUDA IPC or NCCL add one function each: it returns all tensors of the update under their wire
names, on the engine's device; checking, applying and reading back stay the same."""


@dataclass(frozen=True)
class VerifyResult:
    """What one rank found when it read the weights back.

    Attributes:
        version: Version that was applied.
        checked: Wire names whose value in the engine is the trainer's.
        unchecked: Wire names that cannot be read back on this rank.
    """

    version: int
    checked: frozenset[str]
    unchecked: frozenset[str]


@dataclass(frozen=True)
class _Draft:
    """The draft that training updates.

    Attributes:
        model: Its module.
        model_config: vLLM's config of it.
        proposer: vLLM's object that calls it and may keep state derived from its weights.
        trained: Export names that every update carries.
        static: Export name to tensor of the directory that no update carries (vocabulary maps, a frozen own head).
    """

    model: nn.Module
    model_config: Any
    proposer: Any
    trained: tuple[str, ...]
    static: dict[str, torch.Tensor]


@dataclass(frozen=True)
class _Staged:
    info: UpdateInfo
    tensors: dict[str, torch.Tensor]


class NemoRLWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """See the module docstring. One per vLLM worker process."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False  # the draft travels in the same round as the policy

    def __init__(self, *args: Any) -> None:
        """Take vLLM's arguments (config, vllm_config, device, model)."""
        super().__init__(*args)
        self.version = -1
        self.last_result = VerifyResult(-1, frozenset(), frozenset())
        self._draft: _Draft | None = None
        self._staged: _Staged | None = None
        self._expected: dict[str, TensorInfo] = {}
        self._is_tied = bool(getattr(self.model_config.hf_config, "tie_word_embeddings", False))

    def attach(
        self,
        *,
        policy_dir: str,
        draft: nn.Module | None,
        draft_config: Any,
        proposer: Any,
        trained: list[str],
        frozen: list[str],
    ) -> None:
        """Learn what the models hold. Called once, after loading and after ownership was settled.

        Args:
            policy_dir: Local directory of the policy.
            draft: The draft that training updates; None without one.
            draft_config: vLLM's model config of the draft.
            proposer: vLLM's object that owns the draft.
            trained: Export names of the tensors that every update carries.
            frozen: Export names of the draft's own tensors that none carries.

        Raises:
            ConfigError: The draft's directory or module does not fit `trained`.
        """
        headers = read_headers(policy_dir, key=_MODEL_KEY)
        names = [name for name, info in headers.items() if is_float(info) and not name.endswith("rotary_emb.inv_freq")]
        self._expected = self._describe(self.model, headers, names)
        if self._is_tied:
            self._expected[_HEAD] = self._expected[_EMBEDDING]
        if draft is None:
            return
        headers = read_headers(draft_config.model, key=_DRAFT_KEY)
        shared = {f"{attribute}.weight" for _, attribute, _ in shared_modules(self.model, draft)}
        absent = sorted(set(trained) - headers.keys())
        if absent:
            raise ConfigError(
                f"{_DRAFT_KEY}: {draft_config.model} lacks tensors that training updates: {absent}. Export the draft "
                "again."
            )
        static = _read_tensors(draft_config.model, sorted(headers.keys() - set(trained) - shared))
        self._draft = _Draft(draft, draft_config, proposer, tuple(trained), static)
        described = self._describe(draft, headers, trained)
        self._expected.update({DRAFT_PREFIX + name: info for name, info in described.items()})
        _check_coverage(self._draft, shared=shared, kept=set(frozen))

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to set up for the object store."""

    def start_weight_update(self) -> None:
        """Begin a round."""
        self._staged = None

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Take in and check a whole update; the engine's weights do not change.

        Raises:
            RefitError: The update must not be applied; the message names every offending tensor.
        """
        if update_info.version <= self.version:
            raise RefitError(
                f"Weight update {update_info.version} was refused: the engine holds version {self.version} and only "
                "takes newer ones. No weight was changed."
            )
        if update_info.manifest.draft and self._draft is None:
            raise RefitError(
                f"Weight update {update_info.version} was refused: it carries {len(update_info.manifest.draft)} draft "
                "tensors, but the engine has no draft that training updates. No weight was changed."
            )
        has_policy = not update_info.manifest.draft_only
        if not has_policy and self.version < 0:
            raise RefitError(
                f"Weight update {update_info.version} was refused: it carries the draft alone, but the engine has had "
                "no update with the policy yet. No weight was changed."
            )
        tensors = TRANSPORTS[update_info.transport](update_info)
        problems = find_problems(
            update_info.manifest.wire_entries(),
            tensors,
            update_info.checksums,
            expected={
                name: info for name, info in self._expected.items() if has_policy or name.startswith(DRAFT_PREFIX)
            },
            optional={_HEAD} if self._is_tied else (),
        )
        if (
            self._is_tied
            and has_policy
            and not problems
            and not torch.equal(tensors.get(_HEAD, tensors[_EMBEDDING]), tensors[_EMBEDDING])
        ):
            problems.append(f"{_HEAD} differs from {_EMBEDDING}, to which the policy's config ties it")
        if problems:
            raise RefitError(
                f"Weight update {update_info.version} was refused: {'; '.join(problems)}. No weight was changed."
            )
        if self._draft is not None:
            check_no_alias(self.model, self._draft.model, owned=self._draft.trained)
        self._staged = _Staged(update_info, tensors)

    def finish_weight_update(self) -> None:
        """Write policy, then draft, rebuild derived state and read everything back.

        Raises:
            RefitError: A tensor in the engine is not the one that was sent. Any exception leaves the engine unusable.
        """
        staged, self._staged = self._staged, None
        if staged is None:
            raise RefitError("finish_weight_update: no update was received in this round.")
        if not staged.info.manifest.draft_only:
            policy = {name: staged.tensors[name] for name in staged.info.manifest.policy}
            if self._is_tied:
                policy.pop(_HEAD, None)  # the head is the embedding
            self._load(self.model, policy, self.model_config)
        if self._draft is not None:
            sent = {name: staged.tensors[DRAFT_PREFIX + name] for name in self._draft.trained}
            held = derived_tensors(self._draft.model)
            with _detached(shared_modules(self.model, self._draft.model)):
                self._load(self._draft.model, {**self._draft.static, **sent}, self._draft.model_config)
            rebuild_derived_state(self._draft.model, self._draft.proposer, sent, held)
        self.last_result = self._verify(staged)
        self.version = staged.info.version

    def discard(self) -> None:
        """Drop a received update without applying it."""
        self._staged = None

    def shutdown(self) -> None:
        """Release what was received."""
        self._staged = None

    def _load(self, model: Any, tensors: Mapping[str, torch.Tensor], model_config: Any) -> None:
        initialize_layerwise_reload(model)
        model.load_weights(iter(tensors.items()))
        finalize_layerwise_reload(model, model_config)
        if self.device.type == "cpu":
            use_parameters_directly(model)

    def _verify(self, staged: _Staged) -> VerifyResult:
        """Compare what the running modules hold with the trainer's checksums."""
        models = [("", self._model_tensors(self.model), staged.info.manifest.policy)]
        if self._draft is not None:
            models.append((DRAFT_PREFIX, self._model_tensors(self._draft.model), staged.info.manifest.draft))
        checked, unchecked, wrong = set(), set(), []
        for prefix, held_tensors, entries in models:
            for name, info in entries.items():
                wire, held = prefix + name, held_tensors.read(name)
                if held is None:
                    unchecked.add(wire)
                    continue
                if held.numel() == staged.tensors[wire].numel():
                    is_equal = tensor_checksum(held.reshape(info.shape)) == staged.info.checksums[wire]
                else:
                    part = held_tensors.expected_part(name, staged.tensors[wire])
                    is_equal = part is not None and torch.equal(held, part.to(held))
                checked.add(wire) if is_equal else wrong.append(wire)
        if wrong:
            raise RefitError(
                f"Weight update {staged.info.version}: after applying it the engine holds other values than were sent "
                f"in {len(wrong)} tensor(s): {', '.join(sorted(wrong)[:8])}."
            )
        return VerifyResult(staged.info.version, frozenset(checked), frozenset(unchecked))

    def _describe(self, model: nn.Module, headers: Mapping[str, TensorInfo], names: list[str]) -> dict[str, TensorInfo]:
        """Shapes from the directory, dtypes as the engine holds them."""
        tensors = ModelTensors(model)
        engine_dtype: Any = self.model_config.dtype  # resolved to a torch.dtype by now
        found = {}
        for name in names:
            held = tensors.read(name)
            found[name] = TensorInfo(headers[name].shape, dtype_name(engine_dtype if held is None else held.dtype))
        return found

    def _model_tensors(self, model: nn.Module) -> ModelTensors:
        return ModelTensors(
            model, tp_rank=get_tensor_model_parallel_rank(), tp_size=get_tensor_model_parallel_world_size()
        )


def _check_coverage(draft: _Draft, *, shared: set[str], kept: set[str]) -> None:
    """Each draft parameter of the engine must be sent, static or shared; otherwise it would silently stay old."""
    where = draft.model_config.model
    frozen = {name for name, tensor in draft.static.items() if tensor.is_floating_point()}
    if unexplained := sorted(frozen - kept - {_HEAD}):
        raise ConfigError(
            f"{_DRAFT_KEY}: {where} holds tensors that are neither trained, frozen nor shared with the policy: "
            f"{unexplained}. Export the draft again."
        )
    tensors = ModelTensors(draft.model)
    known = {name: tensors.parameter_name(name) for name in (*draft.trained, *frozen, *shared)}
    if None in known.values():
        return  # a loader renames tensors in a way that cannot be followed here
    needed = {name for name in tensors.floating_names() if not _NEVER_SENT.fullmatch(name)}
    if uncovered := sorted(needed - set(known.values())):
        raise ConfigError(
            f"{_DRAFT_KEY}: the engine's draft has parameters that no update would reach: {uncovered}. {where} "
            "does not hold the draft that is trained; export it again."
        )


def derived_tensors(draft: Any) -> dict[str, torch.Tensor]:
    """Tensors that the draft keeps beside its parameters and buffers, by attribute of its inner module."""
    inner: Any = getattr(draft, "model", draft)
    return {name: value for name, value in vars(inner).items() if isinstance(value, torch.Tensor)}


def rebuild_derived_state(
    draft: Any, proposer: Any, sent: Mapping[str, torch.Tensor], held: Mapping[str, torch.Tensor]
) -> None:
    """Recompute what vLLM computed from draft weights at load; a reload leaves all of it stale.

    Keyed off what the classes have, so that it serves any draft that uses these mechanisms.

    Args:
        draft: The draft, with new parameters.
        proposer: vLLM's object that owns the draft.
        sent: Export name to tensor of this update.
        held: `derived_tensors` from before the reload. They get the new values, because captured CUDA graphs read at
            their addresses.
    """
    buffers = dict(draft.named_buffers())
    for name in buffers.keys() & sent.keys():  # non-persistent buffers are put back to their old value by the reload
        buffers[name].copy_(sent[name].view_as(buffers[name]))
    projected = getattr(proposer, "parallel_drafting_hidden_state_tensor", None)
    if projected is not None and "mask_hidden" in buffers:
        # The input of every mask slot, projected once; depends on the placeholder, the projection and its norms.
        projected.copy_(draft.combine_hidden_states(buffers["mask_hidden"].view(-1)))
    inner: Any = getattr(draft, "model", None)
    if hasattr(inner, "_build_fused_kv_buffers"):  # stacked key/value projections, norms and the rotary table
        inner._build_fused_kv_buffers()
        for name, tensor in held.items():
            setattr(inner, name, tensor.copy_(getattr(inner, name)))


@contextlib.contextmanager
def _detached(shared: list[tuple[nn.Module, str, nn.Module]]) -> Iterator[None]:
    """Take the target's modules out of the draft, so that loading the draft cannot touch them."""
    for owner, attribute, _ in shared:
        delattr(owner, attribute)
    try:
        yield
    finally:
        for owner, attribute, module in shared:
            setattr(owner, attribute, module)


def _read_tensors(directory: str, names: list[str]) -> dict[str, torch.Tensor]:
    """Copies of the named tensors of a model directory."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(Path(directory).glob("*.safetensors")):
        with safe_open(file, framework="pt") as reader:
            found.update({name: reader.get_tensor(name) for name in names if name in reader.keys()})  # noqa: SIM118
    return found


def register() -> None:
    """Make vLLM's factory know this engine. Calling it again changes nothing."""
    if TRANSFER_BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(TRANSFER_BACKEND, NemoRLWeightTransferEngine)
