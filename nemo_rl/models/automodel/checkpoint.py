"""Checkpoints of a policy worker: weights, optimizer groups, schedules and random state; and the Hugging Face export.

Layout under the directory of one step::

    policy/weights/     torch.distributed.checkpoint, tensors only: model.*, optim.<group>.*, draft.*, rng.<rank>.*
    policy/state.json   everything that is not a tensor: schedules, learning rates, the layout's name and version
    draft/              the draft as the generation engine loads it, and what a resume checks of it
    draft_<layout>/     the same draft in another layout

Tensors are stored whole in the logical sense (DTensors), so another number of data-parallel ranks can resume. A policy
that is not trained is not stored.

What is read how: `state.json` as JSON; the tensors of `weights/*.distcp` by torch with `weights_only`, which makes
tensors and nothing else; the index `weights/.metadata` is a pickle, read by an unpickler that knows its few classes and
calls nothing else, see `checkpoint_index`. Entries of the index that are no tensors (torch would unpickle them freely)
are never loaded.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from nemo_rl.distributed.collectives import barrier
from nemo_rl.errors import CheckpointError
from nemo_rl.models.automodel.checkpoint_index import IndexedReader
from nemo_rl.models.automodel.setup import (
    OptimizerGroup,
    checkpoint_layout,
    checkpoint_tensors,
    clean_name,
    named_state,
    reshard,
    tied_head_alias,
)
from nemo_rl.utils.checkpoint import draft_dir_name
from nemo_rl.utils.model_files import find_local_model_dir

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from nemo_rl.models.automodel.draft.runtime import _DraftRuntimeBase

FORMAT = "nemo_rl.policy"
FORMAT_VERSION = 1
MAX_SHARD_BYTES = 4 << 30
MAX_RNG_ELEMENTS = 1 << 16
"""No generator has a larger state."""
TOKENIZER_PATTERNS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
)


# -- saving ----------------------------------------------------------------------------------------------------------


def save(
    directory: Path,
    *,
    model: nn.Module,
    groups: list[OptimizerGroup],
    draft: _DraftRuntimeBase | None,
    draft_layouts: Sequence[str] = ("native",),
    draft_optimizer: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint. Collective; the directory is complete when every rank has returned.

    Args:
        directory: of the step; created.
        model: the policy; not stored when no group trains it.
        groups: optimizer groups, `policy` first.
        draft: its weights are saved twice, for resuming and as an engine loads them.
        draft_layouts: layouts of the export; `native` is written in any case.
        draft_optimizer: layout of the draft's optimizer, which a resume compares.
    """
    target = directory / "policy"
    target.mkdir(parents=True, exist_ok=True)
    tensors = {f"model.{name}": t for name, t in _policy_state(model, groups).items()}
    tensors |= {f"draft.{name}": t for name, t in _draft_state(draft).items()}
    for group in groups:
        tensors |= _optimizer_tensors(group)
    tensors |= _rng_tensors()
    try:
        dcp.save(tensors, checkpoint_id=str(target / "weights"))
    except (CheckpointException, OSError) as err:
        raise CheckpointError(f"{target}: the checkpoint could not be written: {err}") from err
    if dist.get_rank() == 0:
        state = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "world_size": dist.get_world_size(),
            "groups": {group.name: _group_state(group) for group in groups},
        }
        (target / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
    if draft is not None:
        reshard(draft.module)
        for layout in dict.fromkeys(("native", *draft_layouts)):
            draft.export(str(directory / draft_dir_name(layout)), model, layout=layout, optimizer=draft_optimizer)
    barrier()


def _policy_state(model: nn.Module, groups: list[OptimizerGroup]) -> dict[str, Tensor]:
    return named_state(model) if any(group.name == "policy" for group in groups) else {}


def _draft_state(draft: _DraftRuntimeBase | None) -> dict[str, Tensor]:
    if draft is None:
        return {}
    reshard(draft.module)
    return {clean_name(name): t for name, t in draft.state_dict().items()}


def _parameter_names(group: OptimizerGroup) -> dict[int, str]:
    reshard(group.module)
    return {id(p): clean_name(name) for name, p in group.module.named_parameters()}


def _optimizer_tensors(group: OptimizerGroup) -> dict[str, Tensor]:
    names = _parameter_names(group)
    out = {}
    for param, state in group.optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                out[f"optim.{group.name}.{names[id(param)]}.{key}"] = value
    return out


def _group_state(group: OptimizerGroup) -> dict[str, Any]:
    rates = [{k: g[k] for k in ("lr", "initial_lr") if k in g} for g in group.optimizer.param_groups]
    return {
        "optimizer": _class_name(group),
        "rates": rates,
        "scheduler": None if group.scheduler is None else scheduler_state(group.scheduler),
    }


def _class_name(group: OptimizerGroup) -> str:
    cls = type(group.optimizer)
    return f"{cls.__module__}.{cls.__qualname__}"


def scheduler_state(scheduler: Any) -> dict[str, Any]:
    """State of a schedule as JSON values.

    Raises:
        CheckpointError: the schedule keeps something that is not a number, string, list or dict.
    """
    state = dict(scheduler.state_dict())
    if "_schedulers" in state:
        state["_schedulers"] = [scheduler_state(s) for s in scheduler._schedulers]
    try:
        return json.loads(json.dumps(state))
    except TypeError as err:
        raise CheckpointError(
            f"{type(scheduler).__name__}: its state cannot be saved ({err}). Use one of torch.optim.lr_scheduler."
        ) from err


def _rng_tensors() -> dict[str, Tensor]:
    """Random state of this rank: torch (CPU, CUDA), numpy and python."""
    prefix = f"rng.{dist.get_rank()}"
    numpy_state = np.random.get_state(legacy=False)
    version, words, next_gauss = random.getstate()
    out = {
        f"{prefix}.torch": torch.get_rng_state(),
        f"{prefix}.numpy_keys": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
        f"{prefix}.numpy_rest": torch.tensor(
            [numpy_state["state"]["pos"], numpy_state["has_gauss"], numpy_state["gauss"]], dtype=torch.float64
        ),
        f"{prefix}.python_words": torch.tensor(words, dtype=torch.int64),
        f"{prefix}.python_rest": torch.tensor(
            [version, next_gauss is not None, next_gauss or 0.0], dtype=torch.float64
        ),
    }
    if torch.cuda.is_available():
        out[f"{prefix}.cuda"] = torch.cuda.get_rng_state()
    return out


# -- loading ---------------------------------------------------------------------------------------------------------


def load(
    directory: Path,
    *,
    model: nn.Module,
    groups: list[OptimizerGroup],
    draft: _DraftRuntimeBase | None,
    draft_optimizer: Mapping[str, Any] | None = None,
    ignore_draft: bool = False,
) -> None:
    """Restore a checkpoint in place. Collective; every rank reads the same files and reaches the same verdict.

    Args:
        directory: of the step.
        model: the policy.
        groups: optimizer groups of this run.
        draft: of this run; None = none, or none that is restored.
        draft_optimizer: layout of the draft's optimizer in this run.
        ignore_draft: leave what the checkpoint holds of a draft unread.

    Raises:
        CheckpointError: the checkpoint is missing, damaged, or of another model, draft or layout.
    """
    target = directory / "policy"
    state = _read_state(target / "state.json")
    if draft is not None:
        draft.check_saved(str(directory / draft_dir_name("native")), optimizer=draft_optimizer)
    stored = _stored_tensors(target / "weights")
    draft_state = _draft_state(draft)
    weights = {f"model.{name}": t for name, t in _policy_state(model, groups).items()}
    weights |= {f"draft.{name}": t for name, t in draft_state.items()}
    _check_same_tensors(target, weights, stored, prefixes=("model.",) if ignore_draft else ("model.", "draft."))
    names = set(state["groups"]) - ({"draft"} if ignore_draft else set())
    if names != {g.name for g in groups}:
        raise CheckpointError(
            f"{target}: got optimizer groups {sorted(names)}; this run has {sorted(g.name for g in groups)}. "
            "Resume with the policy.draft section that the checkpoint was written with."
        )
    optimizer: dict[str, Tensor] = {}
    for group in groups:
        _check_group(group, state["groups"][group.name])
        optimizer |= _optimizer_templates(target, group, stored)
    own_rng = {k: m for k, m in stored.items() if k.startswith(_own_rng())}
    rng = {k: _empty(target, k, m, max_elements=MAX_RNG_ELEMENTS) for k, m in own_rng.items()}
    try:
        dcp.load({**weights, **optimizer, **rng}, storage_reader=IndexedReader(target / "weights"))
    except (CheckpointException, OSError, RuntimeError, ValueError) as err:
        raise CheckpointError(f"{target}: the checkpoint could not be read: {err}") from err
    if draft is not None:
        draft.load_state_dict(draft_state)
    for group in groups:
        _restore_group(group, optimizer, state["groups"][group.name])
    _restore_rng(rng)
    barrier()


def _read_state(path: Path) -> dict[str, Any]:
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise CheckpointError(
            f"{path}: cannot be read ({err}); the checkpoint is incomplete, use an earlier one."
        ) from err
    if state.get("format") != FORMAT or state.get("version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: got format {state.get('format')!r} version {state.get('version')!r}; must be {FORMAT!r} version "
            f"{FORMAT_VERSION}. The checkpoint was written by something else."
        )
    return state


def _stored_tensors(path: Path) -> dict[str, TensorStorageMetadata]:
    index = IndexedReader(path).read_metadata()
    return {k: m for k, m in index.state_dict_metadata.items() if isinstance(m, TensorStorageMetadata)}


def _check_group(group: OptimizerGroup, state: dict[str, Any]) -> None:
    """Refuse the state of another optimizer; a checkpoint that does not name its class passes."""
    stored, own = state.get("optimizer"), _class_name(group)
    sizes = len(state["rates"]), len(group.optimizer.param_groups)
    if stored not in (None, own) or sizes[0] != sizes[1]:
        key = "policy" if group.name == "policy" else f"policy.{group.name}"
        raise CheckpointError(
            f"{key}.optimizer.name: got {own} with {sizes[1]} parameter groups; the checkpoint was written by {stored} "
            f"with {sizes[0]}. Resume with the optimizer that it was written with."
        )


def _check_same_tensors(
    target: Path, wanted: dict[str, Tensor], stored: dict[str, TensorStorageMetadata], *, prefixes: tuple[str, ...]
) -> None:
    have = {k: tuple(m.size) for k, m in stored.items() if k.startswith(prefixes)}
    want = {k: tuple(t.shape) for k, t in wanted.items()}
    if have == want:
        return
    missing, extra = sorted(want.keys() - have.keys()), sorted(have.keys() - want.keys())
    shapes = sorted(f"{k} {have[k]} instead of {want[k]}" for k in want.keys() & have.keys() if want[k] != have[k])
    raise CheckpointError(
        f"{target}: the checkpoint is of another model or draft: missing {missing[:3]}, unexpected {extra[:3]}, shapes "
        f"{shapes[:3]}. Resume with the policy.model_name and policy.draft that it was written with."
    )


def _empty(target: Path, name: str, meta: TensorStorageMetadata, *, max_elements: int) -> Tensor:
    """A whole tensor to read into; nothing is allocated because a file says so."""
    if meta.size.numel() > max_elements:
        raise CheckpointError(
            f"{target}: {name} has {meta.size.numel()} elements; must have at most {max_elements}. The checkpoint is "
            "damaged, use an earlier one."
        )
    return torch.zeros(meta.size, dtype=meta.properties.dtype)


def _optimizer_templates(
    target: Path, group: OptimizerGroup, stored: dict[str, TensorStorageMetadata]
) -> dict[str, Tensor]:
    """Empty tensors for what the checkpoint holds of a group's optimizer, laid out like the parameters."""
    names = _parameter_names(group)
    out = {}
    for param_group in group.optimizer.param_groups:
        for param in param_group["params"]:
            prefix = f"optim.{group.name}.{names[id(param)]}."
            for key, meta in stored.items():
                if key.startswith(prefix) and "." not in key[len(prefix) :]:
                    is_like_param = tuple(meta.size) == tuple(param.shape)
                    out[key] = (
                        torch.zeros_like(param, dtype=meta.properties.dtype).detach()
                        if is_like_param
                        else _empty(target, key, meta, max_elements=param.numel())
                    )
    return out


def _restore_group(group: OptimizerGroup, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    names = _parameter_names(group)
    group.optimizer.state.clear()
    for param_group, rates in zip(group.optimizer.param_groups, state["rates"], strict=True):
        for param in param_group["params"]:
            prefix = f"optim.{group.name}.{names[id(param)]}."
            own = {k[len(prefix) :]: t for k, t in tensors.items() if k.startswith(prefix)}
            if own:
                group.optimizer.state[param] = own
        for key, value in rates.items():
            param_group[key] = value
    if (state["scheduler"] is None) != (group.scheduler is None):
        raise CheckpointError(
            f"optimizer group {group.name}: the checkpoint was written {'without' if group.scheduler else 'with'} a "
            "scheduler. Resume with the scheduler section that it was written with."
        )
    if group.scheduler is not None:
        load_scheduler_state(group.scheduler, state["scheduler"])


def load_scheduler_state(scheduler: Any, state: dict[str, Any]) -> None:
    """Inverse of `scheduler_state`."""
    nested = state.get("_schedulers")
    if nested is None:
        scheduler.load_state_dict(dict(state))
        return
    if len(nested) != len(scheduler._schedulers):
        raise CheckpointError(
            f"scheduler: the checkpoint has {len(nested)} schedules, this run {len(scheduler._schedulers)}. "
            "Resume with the scheduler section that it was written with."
        )
    for child, child_state in zip(scheduler._schedulers, nested, strict=True):
        load_scheduler_state(child, child_state)
    scheduler.__dict__.update({k: v for k, v in state.items() if k != "_schedulers"})


def _own_rng() -> str:
    return f"rng.{dist.get_rank()}."


def _restore_rng(tensors: dict[str, Tensor]) -> None:
    """Set this rank's random state; a rank that did not exist when the checkpoint was written keeps its own."""
    state = {k.removeprefix(_own_rng()): t for k, t in tensors.items()}
    if not state:
        return
    torch.set_rng_state(state["torch"])
    position, has_gauss, gauss = state["numpy_rest"].tolist()
    keys = state["numpy_keys"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, int(position), int(has_gauss), gauss))
    version, has_next, next_gauss = state["python_rest"].tolist()
    words = tuple(state["python_words"].tolist())
    random.setstate((int(version), words, next_gauss if has_next else None))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


# -- Hugging Face export ---------------------------------------------------------------------------------------------


def export_hf(
    directory: Path, *, model: PreTrainedModel, model_name: str, tokenizer_name: str, dtype: torch.dtype
) -> None:
    """Write the policy as a directory that transformers and vLLM load. Collective; rank 0 writes.

    Args:
        directory: created; files in it are replaced.
        model: the policy.
        model_name: the checkpoint that the policy started from, whose configuration files are copied: a directory, or
            a hub name that is in the local cache.
        tokenizer_name: likewise, whose tokenizer files are copied.
        dtype: of the weights.
    """
    from safetensors.torch import save_file

    is_writer = dist.get_rank() == 0
    tied = tied_head_alias(model)
    alias = None if tied is None else tied[0]
    layout = {k: v for k, v in checkpoint_layout(model).items() if k != alias}
    shards = _plan_shards(layout, itemsize=dtype.itemsize)
    file_names = [
        "model.safetensors" if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        for i in range(len(shards))
    ]
    if is_writer:
        directory.mkdir(parents=True, exist_ok=True)
        copy_config(directory, model=model, model_name=model_name, tokenizer_name=tokenizer_name, dtype=dtype)
    pending: dict[str, Tensor] = {}
    number = 0
    for name, tensor in checkpoint_tensors(model, dtype=dtype):
        if not is_writer or name == alias:
            continue
        pending[name] = tensor
        if len(pending) == len(shards[number]):
            save_file(pending, str(directory / file_names[number]), metadata={"format": "pt"})
            pending, number = {}, number + 1
    if is_writer and len(shards) > 1:
        weight_map = {name: file for names, file in zip(shards, file_names, strict=True) for name in names}
        total = sum(int(np.prod(s)) for s in layout.values()) * dtype.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
    barrier()


def _plan_shards(layout: dict[str, tuple[int, ...]], *, itemsize: int) -> list[list[str]]:
    """Cut the tensors, in stream order, into files of at most `MAX_SHARD_BYTES`."""
    shards: list[list[str]] = []
    used = 0
    for name, shape in layout.items():
        size = int(np.prod(shape)) * itemsize
        if not shards or used + size > MAX_SHARD_BYTES:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def copy_config(
    directory: Path, *, model: PreTrainedModel, model_name: str, tokenizer_name: str, dtype: torch.dtype
) -> None:
    """Write what an export has beside weights: config.json, generation_config.json and the tokenizer's files.

    Args:
        directory: of the export.
        model: the policy, whose configuration stands in for a file that is not here.
        model_name: see `export_hf`.
        tokenizer_name: see `export_hf`.
        dtype: of the weights.
    """
    source = find_local_model_dir(model_name, key="policy.model_name")
    (found, *_) = [*_files(source, ("config.json",)), None]
    config = model.config.to_dict() if found is None else json.loads(found.read_text(encoding="utf-8"))
    config = {k: v for k, v in config.items() if k not in ("torch_dtype", "dtype")}
    config["dtype"] = str(dtype).removeprefix("torch.")
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    tokenizer = find_local_model_dir(tokenizer_name, key="policy.tokenizer.name")
    for path in (*_files(source, ("generation_config.json",)), *_files(tokenizer, TOKENIZER_PATTERNS)):
        shutil.copyfile(path, directory / path.name)


def _files(directory: Path | None, patterns: Sequence[str]) -> list[Path]:
    found = [] if directory is None else [path for pattern in patterns for path in directory.glob(pattern)]
    return sorted(path for path in found if path.is_file())
