"""A published draft as one value: read from a directory of any layout, changed, written in another one.

    read_published    directory -> PublishedDraft          prune       fewer ids
    write_published   PublishedDraft -> directory          with_dtype  another dtype

Tensors have canonical names throughout; the tables d2t and t2d exist as `vocab` only. Imports no runtime.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nemo_rl.errors import CheckpointError, ConfigError
from nemo_rl.models.automodel.draft.adapters.base import DraftAdapter, SourceConfig, Verifier
from nemo_rl.models.automodel.draft.architecture import HEAD, DraftArchitecture
from nemo_rl.models.automodel.draft.builders import load_tensors
from nemo_rl.models.automodel.draft.checkpoint import MAX_SHARD_BYTES, write_draft
from nemo_rl.models.automodel.draft.config import DraftConfigBase
from nemo_rl.models.automodel.draft.metadata import verify_files
from nemo_rl.models.automodel.draft.spec import read_vocabulary, resolve_draft_spec, text_config
from nemo_rl.models.automodel.draft.vocab import VocabMap, VocabMapError, read_either
from nemo_rl.models.automodel.draft.weight_files import find_weight_files, member
from nemo_rl.utils.safe_files import read_json_object

__all__ = [
    "DTYPES",
    "PublishedDraft",
    "Repair",
    "policy_head_rows",
    "prune",
    "read_published",
    "with_dtype",
    "write_published",
]

DTYPES = ("float32", "bfloat16", "float16")
Repair = Literal["no", "auto", "absolute"]
"""What to do with a `d2t` that may hold target ids: nothing, find out, or take it for that."""

_TABLES = ("d2t", "t2d")
_EMBEDDING_SUFFIX = "embed_tokens.weight"


@dataclass(frozen=True)
class PublishedDraft:
    """What a directory holds.

    Attributes:
        adapter: of the algorithm.
        cfg: the settings that answered what the file leaves open.
        policy: config.json of the policy (of its text part), or what the draft itself says of it.
        source: what its config.json says.
        architecture: of the draft.
        tensors: canonical name to CPU tensor: what the draft owns, not the copies of the policy's that some files hold.
        vocab: which ids it proposes; None = all.
        num_speculative_tokens: tokens per step that the file states; None = it does not.
        verifier: the policy that the file states; None = it does not.
    """

    adapter: DraftAdapter[Any, Any]
    cfg: DraftConfigBase
    policy: Mapping[str, Any]
    source: SourceConfig
    architecture: DraftArchitecture
    tensors: Mapping[str, Tensor]
    vocab: VocabMap | None
    num_speculative_tokens: int | None
    verifier: Verifier | None

    @property
    def dtype(self) -> str | None:
        """Dtype of the tensors that the engine keeps in its own; None when they have several."""
        wide = self.architecture.wide_names()
        found = {str(t.dtype).removeprefix("torch.") for name, t in self.tensors.items() if name not in wide}
        return found.pop() if len(found) == 1 else None


# -- reading ---------------------------------------------------------------------------------------------------------


def read_published(
    directory: Path,
    adapter: DraftAdapter[Any, Any],
    cfg: DraftConfigBase,
    *,
    policy_config: Mapping[str, Any] | None,
    repair: Repair = "no",
) -> PublishedDraft:
    """Read a draft directory.

    Args:
        directory: as somebody published it.
        adapter: of the draft's algorithm.
        cfg: `policy.draft`; answers what the file leaves open, and says whether pickles are trusted.
        policy_config: config.json of the policy; None = what the draft says of it is believed.
        repair: what to do with the vocabulary's table.

    Raises:
        ConfigError: another algorithm's draft, an open question, or a draft of another policy.
        CheckpointError: the files are damaged, or do not fit the config.json.
    """
    raw = read_json_object(member(directory, "config.json"))
    # Neither serving nor a particular engine is asked about, and every layer that was trained on may be written.
    cfg = cfg.model_copy(update={"serve": False, "allow_boundary_layers": True, "model_name": str(directory)})
    source = adapter.read_config(raw)
    policy = _stated_policy(adapter, cfg, source) if policy_config is None else text_config(policy_config)
    spec = resolve_draft_spec(
        adapter, cfg, policy_config=policy, draft_config=raw, k=None, max_model_len=1, dtype=DTYPES[0]
    )
    arch = spec.architecture
    verify_files(directory)
    stored = load_tensors(directory, arch, trust_pickle=cfg.trust_pickle, rebuild_t2d=repair == "no")
    tables = {name: stored[name].tolist() for name in _TABLES if name in stored}
    vocab = _vocab(directory, tables, arch) if repair == "no" else _repaired(directory, tables, arch, repair)
    owned = (arch.published_shapes() | arch.frozen_shapes()).keys() - set(_TABLES)
    return PublishedDraft(
        adapter=adapter,
        cfg=cfg,
        policy=policy,
        source=source,
        architecture=arch,
        tensors={name: t for name, t in stored.items() if name in owned},
        vocab=vocab,
        num_speculative_tokens=_stated_tokens(raw),
        verifier=_stated_verifier(raw),
    )


def _stated_policy(adapter: DraftAdapter[Any, Any], cfg: DraftConfigBase, source: SourceConfig) -> dict[str, Any]:
    """The sizes of the policy as far as the draft says them."""
    ids = source.feature_ids
    if ids is None and cfg.aux_layer_indices is not None:
        ids = tuple(i + 1 for i in cfg.aux_layer_indices)
    if ids is None and not adapter.architecture.reads_final_state:
        raise ConfigError(
            "policy.draft.aux_layer_indices: got null, and the draft's config.json does not name the policy's layers "
            "that it reads. Set them (counted from 0), or name the policy, whose depth decides the usual ones."
        )
    stated = source.fields.get("extra", {}).get("num_target_layers")
    return {
        # Nothing depends on the number but the range of the ids.
        "num_hidden_layers": stated if isinstance(stated, int) and stated > 0 else max(ids or (1,)) + 1,
        "hidden_size": source.fields["target_hidden_size"],
        "vocab_size": source.fields["vocab_size"],
    }


def _stated_tokens(raw: Mapping[str, Any]) -> int | None:
    block = raw.get("speculators_config")
    methods = block.get("proposal_methods") if isinstance(block, Mapping) else None
    for method in methods if isinstance(methods, list) else ():
        tokens = method.get("speculative_tokens") if isinstance(method, Mapping) else None
        if isinstance(tokens, int) and tokens > 0:
            return tokens
    return None


def _stated_verifier(raw: Mapping[str, Any]) -> Verifier | None:
    block = raw.get("speculators_config")
    stated = block.get("verifier") if isinstance(block, Mapping) else None
    if not isinstance(stated, Mapping) or not isinstance(stated.get("name_or_path"), str):
        return None
    names = stated.get("architectures")
    return Verifier(stated["name_or_path"], tuple(str(name) for name in names) if isinstance(names, list) else ())


def _vocab(directory: Path, tables: Mapping[str, Sequence[int]], arch: DraftArchitecture) -> VocabMap | None:
    try:
        return read_vocabulary(tables, arch)
    except VocabMapError as err:
        raise CheckpointError(
            f"{directory}: {err}. If d2t holds target ids, repair it (tools/draft_convert.py --repair-d2t)."
        ) from err


def _repaired(
    directory: Path, tables: Mapping[str, Sequence[int]], arch: DraftArchitecture, repair: Repair
) -> VocabMap | None:
    if "d2t" not in tables:
        raise ConfigError(f"--repair-d2t: {directory} has no d2t to repair. Leave the option out.")
    try:
        found = read_either(
            tables["d2t"],
            vocab_size=arch.vocab_size,
            draft_vocab_size=arch.draft_vocab_size,
            t2d=tables.get("t2d"),
            is_absolute=repair == "absolute",
        )
    except VocabMapError as err:
        raise ConfigError(
            f"--repair-d2t: {directory}: {err}. Where the files do not tell, --d2t-is-absolute does; what cannot be "
            "read either way cannot be repaired."
        ) from err
    first = list(found.vocab.ids[:3])
    if found.kind == "offsets":
        raise ConfigError(
            f"--repair-d2t: {directory}: d2t holds offsets, as it must (ids {first} ...); there is nothing to repair. "
            "Leave the option out."
        )
    if arch.has_vocab_map:
        return found.vocab
    if not found.vocab.is_identity:
        raise ConfigError(
            f"--repair-d2t: {directory}: the draft proposes every id, in another order than the policy's (ids {first} "
            "...), which the engine has no place for. Use another draft."
        )
    return None


# -- changing --------------------------------------------------------------------------------------------------------


def prune(
    draft: PublishedDraft, vocab: VocabMap, *, policy_rows: Callable[[Sequence[int]], Tensor] | None = None
) -> PublishedDraft:
    """Keep some of the ids that a draft proposes: the same draft, whose other ids never come up.

    Args:
        draft: what to reduce.
        vocab: the ids to keep, all among the draft's.
        policy_rows: target ids -> float [n, H], rows of the policy's head, for a draft that has none of its own; None =
            such a draft is refused.

    Returns:
        A draft whose logits are the old ones at those ids.

    Raises:
        ConfigError: the algorithm has no reduced vocabulary, the ids do not fit, or rows are missing.
    """
    arch = draft.architecture
    kept = dataclasses.replace(arch, draft_vocab_size=len(vocab.ids))
    everything = VocabMap(tuple(range(arch.vocab_size)), arch.vocab_size)
    try:
        rows = (draft.vocab or everything).rows_of(vocab)
    except VocabMapError as err:
        raise ConfigError(f"--vocab: {err}. Make the file with this draft's policy, for fewer ids.") from err
    if len(rows) == arch.draft_vocab_size:
        raise ConfigError(f"--vocab: got {len(rows)} ids, which the draft has already; must be fewer.")
    if arch.placeholder_id in vocab.ids:
        raise ConfigError(
            f"--vocab: holds {arch.placeholder_id}, the draft's placeholder, which must not be proposed. Make the file "
            f"again with --mask-token-id {arch.placeholder_id}."
        )
    draft.adapter.check(draft.cfg, kept, policy=draft.policy, k=None)
    before, tensors = arch.published_shapes(), dict(draft.tensors)
    for name, shape in kept.published_shapes().items():
        if name == HEAD and name not in tensors:
            tensors[name] = _policy_part(policy_rows, vocab, like=draft)
        elif name in tensors and before[name] != shape:
            tensors[name] = tensors[name][rows].contiguous()
        if name in tensors and tuple(tensors[name].shape) != shape:
            raise ConfigError(f"--vocab: {name} has shape {list(tensors[name].shape)}, {list(shape)} needed.")
    return dataclasses.replace(draft, architecture=kept, tensors=tensors, vocab=vocab)


def _policy_part(
    policy_rows: Callable[[Sequence[int]], Tensor] | None, vocab: VocabMap, *, like: PublishedDraft
) -> Tensor:
    if policy_rows is None:
        raise ConfigError(
            f"--policy: got nothing; a draft of algorithm {like.adapter.algo} without a head of its own needs the "
            "policy's rows of the ids that it keeps. Name the policy's directory."
        )
    return policy_rows(vocab.ids).to(like.tensors["fc.weight"].dtype)


def policy_head_rows(directory: Path, ids: Sequence[int]) -> Tensor:
    """Rows of a policy's head, read from its safetensors; of a tied policy those of its embedding.

    Args:
        directory: of the policy.
        ids: target ids.

    Returns:
        [n, H], dtype as stored.

    Raises:
        CheckpointError: there is no such tensor, or a file cannot be read.
    """
    stored = find_weight_files(directory).tensors
    name = next((n for n in stored if n.endswith(HEAD)), None)
    name = next((n for n in stored if n.endswith(_EMBEDDING_SUFFIX)), None) if name is None else name
    if name is None:
        raise CheckpointError(f"{directory}: has neither {HEAD} nor {_EMBEDDING_SUFFIX} in safetensors.")
    if max(ids) >= stored[name].shape[0]:
        raise CheckpointError(f"{directory}: {name} has {stored[name].shape[0]} rows, row {max(ids)} is asked for.")
    try:
        with safe_open(str(stored[name].file), framework="pt") as file:
            return file.get_tensor(name)[list(ids)]
    except (SafetensorError, OSError) as err:
        raise CheckpointError(f"{stored[name].file}: cannot be read ({err}). Restore the file.") from err


def with_dtype(draft: PublishedDraft, dtype: str) -> PublishedDraft:
    """Cast the weights; what the engine keeps in float32 becomes that.

    Args:
        draft: what to cast.
        dtype: one of `DTYPES`.

    Raises:
        CheckpointError: a value does not fit into it.
    """
    wide = draft.architecture.wide_names()
    tensors = {
        name: t.to(torch.float32 if name in wide else getattr(torch, dtype)) for name, t in draft.tensors.items()
    }
    bad = sorted(name for name, t in tensors.items() if not bool(t.isfinite().all()))
    if bad:
        raise CheckpointError(f"{bad} hold values that {dtype} cannot hold. Choose another dtype.")
    return dataclasses.replace(draft, tensors=tensors)


# -- writing ---------------------------------------------------------------------------------------------------------


def write_published(
    directory: Path,
    draft: PublishedDraft,
    *,
    layout: str,
    dtype: str,
    k: int | None = None,
    verifier: Verifier | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a draft directory.

    Args:
        directory: created if absent.
        draft: what to write.
        layout: one of the adapter's layouts.
        dtype: of its weights, see `with_dtype`.
        k: tokens per step to state; None = as the draft's file did, or as many as it can propose.
        verifier: policy to state; None = as the draft's file did.
        max_shard_bytes: weights beyond it are sharded.

    Raises:
        ConfigError: the algorithm has no such layout, or something that it states is not known.
        CheckpointError: a file cannot be written.
    """
    adapter, arch = draft.adapter, draft.architecture
    if layout not in adapter.layouts:
        raise ConfigError(
            f"--layout: got {layout!r}; a draft of algorithm {adapter.algo} has {list(adapter.layouts)}. Choose one."
        )
    if layout == "native":
        config = adapter.write_config(arch, dtype=dtype)
    else:
        config = adapter.write_speculators(
            arch, dtype=dtype, k=_tokens_per_step(draft, k), verifier=_verifier(draft, verifier)
        )
    tensors = dict(with_dtype(draft, dtype).tensors)
    if draft.vocab is not None:
        tensors["d2t"] = torch.tensor(draft.vocab.d2t, dtype=torch.int64)
        tensors["t2d"] = torch.tensor(draft.vocab.t2d, dtype=torch.bool)
    write_draft(directory, tensors, config=config, max_shard_bytes=max_shard_bytes)


def _tokens_per_step(draft: PublishedDraft, k: int | None) -> int:
    limit = draft.adapter.max_num_speculative_tokens(draft.cfg, draft.architecture)
    found = next((n for n in (k, draft.num_speculative_tokens, limit) if n is not None), None)
    if found is None:
        raise ConfigError("--num-speculative-tokens: got nothing, and the draft does not say. Set it.")
    if limit is not None and k is not None and k > limit:
        raise ConfigError(f"--num-speculative-tokens: got {k}; the draft proposes at most {limit}. Lower it.")
    return found


def _verifier(draft: PublishedDraft, verifier: Verifier | None) -> Verifier:
    found = draft.verifier if verifier is None else verifier
    if found is None:
        raise ConfigError(
            "--policy: got nothing; the speculators layout names the policy, and the draft's file does not. Name the "
            "policy's directory."
        )
    return found
