"""`DraftSpec` -> module: a new draft that starts from the policy, or one loaded from a directory.

Every parameter is NaN until it is set, so that a missed load fails at the first use.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from nemo_rl.errors import CheckpointError
from nemo_rl.models.automodel.draft.adapters.names import check_tensor_shapes, check_zeros, normalize_names
from nemo_rl.models.automodel.draft.architecture import EMBEDDING, HEAD, DraftArchitecture
from nemo_rl.models.automodel.draft.capture import embedding_weight, find_final_norm, full_tensor, head_weight
from nemo_rl.models.automodel.draft.models.layers import DraftModule
from nemo_rl.models.automodel.draft.spec import DraftSpec, read_vocabulary
from nemo_rl.models.automodel.draft.vocab import VocabMap, VocabMapError
from nemo_rl.models.automodel.draft.weight_files import (
    WeightFiles,
    check_dtypes,
    find_weight_files,
    pickle_refusal,
)
from nemo_rl.utils.safe_files import open_regular, shown

__all__ = ["BuiltDraft", "PolicyWeights", "build_draft", "load_tensors", "policy_weights"]


class PolicyWeights(NamedTuple):
    """What a new draft takes over; whole tensors on the CPU.

    Attributes:
        head: float [V, H].
        embedding: float [V, H], or None when it was not asked for.
        final_norm: float [H], or None when the policy's final norm was not found.
    """

    head: Tensor
    embedding: Tensor | None
    final_norm: Tensor | None


class BuiltDraft(NamedTuple):
    """A module with all its parameters set, and what goes with it.

    Attributes:
        module: fp32, on the CPU.
        vocab: which ids it proposes; None = all.
        embedding: float [V, H] of a draft that owns one which it does not train; None = the policy's is used.
    """

    module: nn.Module
    vocab: VocabMap | None
    embedding: Tensor | None


def policy_weights(policy_model: nn.Module, *, with_embedding: bool) -> PolicyWeights:
    """Gather head, final norm and embedding of the policy. Collective when they are sharded.

    Args:
        policy_model: the policy; a tied head is its embedding.
        with_embedding: whether the draft starts from the embedding.
    """

    def whole(tensor: Tensor) -> Tensor:
        return full_tensor(tensor).cpu()

    norm = getattr(find_final_norm(policy_model), "weight", None)
    return PolicyWeights(
        whole(head_weight(policy_model)),
        whole(embedding_weight(policy_model)) if with_embedding else None,
        None if norm is None else whole(norm),
    )


def build_draft(
    spec: DraftSpec,
    *,
    module_class: Callable[[Any], DraftModule],
    weights: PolicyWeights,
    draft_dir: str | None,
    trust_pickle: bool,
    seed: int,
) -> BuiltDraft:
    """Create the draft of a run.

    Args:
        spec: what to build.
        module_class: builds the module of an architecture.
        weights: of the policy.
        draft_dir: weights to load; None = a new draft.
        trust_pickle: allow a pickled checkpoint.
        seed: of the initialisation.
    """
    arch = spec.architecture
    # Before the module: what the files do not agree with is never allocated.
    loaded = None if draft_dir is None else load_tensors(Path(draft_dir), arch, trust_pickle=trust_pickle)
    with torch.device("meta"):
        module = module_class(arch)
    module = module.to_empty(device="cpu")
    for parameter in module.parameters():
        nn.init.constant_(parameter, float("nan"))
    embedding = None
    if draft_dir is None or loaded is None:
        vocab = None if spec.vocab_ids is None else VocabMap(spec.vocab_ids, arch.vocab_size)
        tensors = _new_tensors(module, spec, weights, seed)
    else:
        tensors = loaded
        vocab = _stored_vocab(tensors, arch, draft_dir)
        parameters = {name for name, _ in module.named_parameters()}
        spare = {name: tensors.pop(name) for name in (EMBEDDING, HEAD) if name in tensors and name not in parameters}
        embedding = spare.get(EMBEDDING) if arch.owns_embedding else None
    _take_over(module, tensors, weights, vocab, arch, dtype=spec.dtype)
    _assign(module, tensors, draft_dir)
    return BuiltDraft(module, vocab, embedding)


def _take_over(
    module: nn.Module,
    tensors: dict[str, Tensor],
    weights: PolicyWeights,
    vocab: VocabMap | None,
    arch: DraftArchitecture,
    *,
    dtype: str,
) -> None:
    """Complete the tensors by the policy's head and embedding, where the draft trains its own and has none yet."""
    shapes = {name: p.shape for name, p in module.named_parameters()}
    if HEAD in shapes:
        head = _head_rows(weights, vocab, arch)
        tensors.setdefault(HEAD, head)
        if not arch.has_vocab_map:
            tensors[HEAD] = _distinct_from(tensors[HEAD].float(), head, dtype)
    if EMBEDDING in shapes:
        assert weights.embedding is not None, "a draft that trains an embedding starts from the policy's"
        embedding = weights.embedding[: arch.vocab_size].float()
        tensors[EMBEDDING] = _distinct_from(tensors.get(EMBEDDING, embedding).float(), embedding, dtype)


# -- new -------------------------------------------------------------------------------------------------------------


def _new_tensors(module: DraftModule, spec: DraftSpec, weights: PolicyWeights, seed: int) -> dict[str, Tensor]:
    """Tensors of a new draft but for what it takes over from the policy.

    Matrices are drawn by name, so that no draw depends on another; norms are one, biases zero, the final norm is the
    policy's.
    """

    def draw(name: str, shape: torch.Size, std: float) -> Tensor:
        digest = hashlib.sha256(f"{seed}/draft-init/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return torch.empty(shape).normal_(std=std, generator=generator)

    stds = module.initial_std()
    tensors = {}
    for name, parameter in module.named_parameters():
        if name in (EMBEDDING, HEAD):
            continue
        std = stds.get(name, spec.initializer_range)
        if name.endswith(".bias"):
            tensors[name] = torch.zeros(parameter.shape)
        elif parameter.ndim == 1:
            tensors[name] = torch.ones(parameter.shape)
        else:
            tensors[name] = draw(name, parameter.shape, std) if std else torch.zeros(parameter.shape)
    norm = tensors.get("norm.weight")
    if norm is not None and weights.final_norm is not None and weights.final_norm.shape == norm.shape:
        tensors["norm.weight"] = weights.final_norm.float().clone()
    return tensors


def _head_rows(weights: PolicyWeights, vocab: VocabMap | None, arch: DraftArchitecture) -> Tensor:
    """fp32 [D, H_t]: the policy's head rows of the draft's ids; rows that pad the vocabulary are left out."""
    head = weights.head[: arch.vocab_size]
    return (head if vocab is None else head[list(vocab.ids)]).float().clone()


def _distinct_from(head: Tensor, policy_head: Tensor, dtype: str) -> Tensor:
    """Make sure that the draft's head or embedding is not bit-equal to the policy's.

    The engine lets a draft share the policy's module when both are equal at load; training the shared one would then
    overwrite the policy's. The smallest step of the serving dtype in one element keeps them apart.

    Args:
        head: fp32 [D, H] of the draft.
        policy_head: fp32 [D, H_t] of the policy.
        dtype: of the engine.
    """
    serving = getattr(torch, dtype)
    if head.shape != policy_head.shape or not torch.equal(head.to(serving), policy_head.to(serving)):
        return head
    head = head.clone()
    head[0, 0] = torch.nextafter(head[0, 0].to(serving), torch.tensor(float("inf"), dtype=serving)).float()
    return head


# -- from a directory ------------------------------------------------------------------------------------------------


def load_tensors(
    directory: Path, arch: DraftArchitecture, *, trust_pickle: bool, rebuild_t2d: bool = True
) -> dict[str, Tensor]:
    """Read a checkpoint directory under canonical names; the key set must be exact.

    Names, shapes and dtypes of safetensors are checked from their headers, before any tensor is read.

    Args:
        directory: of the checkpoint.
        arch: what its tensors must fit.
        trust_pickle: allow `pytorch_model.bin` and other pickles.
        rebuild_t2d: make an absent `t2d` from `d2t`, which then must hold offsets.

    Returns:
        Canonical name to CPU tensor of the architecture's shape, dtype as stored. A reduced vocabulary has both tables,
        `d2t` int64 or int32 [D] and `t2d` bool or uint8 [V].

    Raises:
        CheckpointError: the files are damaged, hold another draft, or values that are not finite; names file and
            tensors.
    """
    files = find_weight_files(directory)
    stored = _read_pickles(files.pickles, trust_pickle) if files.pickles else files.tensors
    with _naming(directory):
        names = normalize_names(stored)
        found = {name: stored[original] for name, original in names.canonical.items()}
        check_dtypes({name: _dtype_name(t.dtype) for name, t in found.items()})
        check_tensor_shapes({name: tuple(t.shape) for name, t in found.items()}, arch)
    if files.pickles:
        tensors = {name: t.detach().clone() for name, t in found.items() if isinstance(t, Tensor)}
    else:
        tensors = _read_safetensors(files, names.canonical)
    with _naming(directory):
        check_zeros({name: not bool(tensors[name].any()) for name in arch.zero_shapes() if name in tensors})
        _check_values(tensors)
    shapes = arch.published_shapes()
    if "mask_hidden" in tensors and "mask_hidden" in shapes:
        tensors["mask_hidden"] = tensors["mask_hidden"].reshape(shapes["mask_hidden"])
    if rebuild_t2d and arch.has_vocab_map and "d2t" in tensors and "t2d" not in tensors:
        vocab = _stored_vocab({"d2t": tensors["d2t"]}, arch, str(directory))
        tensors["t2d"] = torch.tensor([] if vocab is None else vocab.t2d, dtype=torch.bool)
    return {name: t for name, t in tensors.items() if name not in arch.zero_shapes()}


@contextmanager
def _naming(directory: Path) -> Iterator[None]:
    """Errors about tensors, which know no file, name the directory."""
    try:
        yield
    except CheckpointError as err:
        raise CheckpointError(f"{directory}: {err}") from err


def _check_values(tensors: Mapping[str, Tensor]) -> None:
    bad = sorted(name for name, t in tensors.items() if t.is_floating_point() and not bool(t.isfinite().all()))
    if bad:
        raise CheckpointError(f"{len(bad)} tensors hold NaN or infinity: {bad}. Use another checkpoint.")
    for name, table in tensors.items():
        # A bool is a byte in the file, and any byte but 0 and 1 means something else to every reader.
        if table.dtype == torch.bool and bool((table.view(torch.uint8) > 1).any()):
            raise CheckpointError(f"{name} holds other bytes than 0 and 1. Restore the file.")


def _dtype_name(dtype: Any) -> str:
    """The safetensors name of a torch dtype; a name stays as it is."""
    return _DTYPE_NAMES.get(dtype, str(dtype))


_DTYPE_NAMES: Mapping[Any, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.bool: "BOOL",
    torch.uint8: "U8",
}


def _read_safetensors(files: WeightFiles, canonical: Mapping[str, str]) -> dict[str, Tensor]:
    """The tensors that count, under canonical names."""
    wanted: dict[Path, dict[str, str]] = {}
    for name, original in canonical.items():
        wanted.setdefault(files.tensors[original].file, {})[name] = original
    tensors: dict[str, Tensor] = {}
    for path, names in sorted(wanted.items()):
        try:
            with safe_open(str(path), framework="pt") as file:
                tensors |= {name: file.get_tensor(original) for name, original in names.items()}
        except (SafetensorError, OSError) as err:
            raise CheckpointError(f"{path}: cannot be read ({err}). The file is damaged; restore it.") from err
    return tensors


# -- pickles ---------------------------------------------------------------------------------------------------------


def _read_pickles(paths: Sequence[Path], trust_pickle: bool) -> dict[str, Tensor]:
    """The tensors of allowed pickles, names as stored; they are views of the mapped files."""
    if not trust_pickle:
        raise CheckpointError(pickle_refusal(paths[0]))
    tensors: dict[str, Tensor] = {}
    for path in paths:
        found = _read_pickle(path)
        twice = sorted(found.keys() & tensors.keys())
        if twice:
            raise CheckpointError(f"{path}: holds {shown(twice[:3])}, which an earlier shard holds too. Remove one.")
        tensors |= found
    return tensors


def _read_pickle(path: Path) -> dict[str, Tensor]:
    """The tensors of one pickle. No code of its own is run, and the tensors take no more memory than the file."""
    _check_archive(path)
    try:
        content = torch.load(str(path), map_location="cpu", weights_only=True, mmap=True)
    except Exception as err:  # an unpickler raises whatever the bytes lead it to
        refused = re.search(r"GLOBAL (\S+)", str(err))
        reason = refused.group(0) if refused else (str(err) or type(err).__name__).splitlines()[0]
        raise CheckpointError(
            f"{path}: cannot be read as a table of tensors without running what it holds ({shown(reason)}), which is "
            "never done. Use a checkpoint in safetensors."
        ) from err
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}; must hold a table of tensors.")
    odd = [name for name, value in content.items() if not isinstance(name, str) or not _is_plain(value)]
    if odd:
        raise CheckpointError(
            f"{path}: {len(odd)} entries are no plain tensors, first {shown(odd[:3])}; must be tensors. Save the "
            "module's state_dict alone, in safetensors."
        )
    total, size = sum(tensor.nbytes for tensor in content.values()), path.stat().st_size
    if total > 2 * size:
        raise CheckpointError(f"{path}: its tensors have {total} bytes, the file {size}; they overlap. Save it anew.")
    return content


def _is_plain(value: object) -> bool:
    """Whether a value is a dense tensor, all of whose elements lie in its storage."""
    return (
        type(value) in (Tensor, nn.Parameter)
        and isinstance(value, Tensor)
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and not value.is_quantized
        and value.nbytes <= value.untyped_storage().nbytes()
    )


def _check_archive(path: Path) -> None:
    """A pickle of torch 1.6 or later is an archive of uncompressed parts, so it holds no more than its own size."""
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            parts = archive.infolist()
            size = os.fstat(file.fileno()).st_size
    except OSError as err:
        raise CheckpointError(f"{path}: cannot be read ({err.strerror}).") from err
    except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error) as err:
        raise CheckpointError(
            f"{path}: is damaged, or older than torch 1.6 ({err}). Save it anew with a current torch, in safetensors."
        ) from err
    if any(part.compress_type != zipfile.ZIP_STORED for part in parts) or sum(p.file_size for p in parts) > size:
        raise CheckpointError(f"{path}: is compressed; torch does not write such files. Save it anew, in safetensors.")


def _stored_vocab(tensors: dict[str, Tensor], arch: DraftArchitecture, directory: str) -> VocabMap | None:
    tables = {name: tensors.pop(name).tolist() for name in ("d2t", "t2d") if name in tensors}
    try:
        return read_vocabulary(tables, arch)
    except VocabMapError as err:
        raise CheckpointError(f"{directory}: {err}.") from err


def _assign(module: nn.Module, tensors: Mapping[str, Tensor], draft_dir: str | None) -> None:
    parameters = dict(module.named_parameters())
    if parameters.keys() != tensors.keys():
        differing = sorted(parameters.keys() ^ tensors.keys())
        raise CheckpointError(f"{draft_dir or 'new draft'}: tensors and module differ in {differing}.")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
    unset = sorted(name for name, p in parameters.items() if not bool(p.isfinite().all()))
    if unset:
        raise CheckpointError(f"{draft_dir or 'new draft'}: {unset} hold NaN or infinity.")
