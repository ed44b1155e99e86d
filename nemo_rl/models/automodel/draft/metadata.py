"""`draft_meta.json`: what a directory that this program wrote holds, and whether it still holds it. No torch.

    format_version   2; 1 lacks layout, optimizer, files and checksum
    algo             draft algorithm
    dtype            of the weights
    layout           of config.json and weights: `native` or `speculators`
    spec             every field of the architecture that decides whether weights fit, and `vocab_ids`
    optimizer        layout of the optimizer's state; null = the draft was not trained
    files            name of every other file -> {bytes, crc32}
    checksum         CRC-32 of all of the above

While a directory is being replaced the file says so instead, and everything refuses the directory. The checksums find
accidents: whoever can change a file can change them, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl.errors import CheckpointError
from nemo_rl.models.automodel.draft.weight_files import member
from nemo_rl.utils.checksums import checksum, checksums
from nemo_rl.utils.safe_files import read_json_object, shown

if TYPE_CHECKING:
    from nemo_rl.models.automodel.draft.spec import DraftSpec
    from nemo_rl.models.policy.config import PolicyConfig

__all__ = [
    "META_FILE",
    "RESTART_HINT",
    "describe",
    "differences",
    "incomplete",
    "is_weight_file",
    "optimizer_layout",
    "read_meta",
    "sealed",
    "verify_files",
]

META_FILE = "draft_meta.json"
FORMAT_VERSION = 2
RESTART_HINT = "set policy.draft.restart: true to start the draft anew while the policy goes on"

_READABLE = (1, FORMAT_VERSION)
_INCOMPLETE = "incomplete"
_MAX_BYTES = 64 << 20
"""The vocabulary is in the file."""
_STATE_OPTIONS = ("amsgrad", "centered", "momentum")
"""Arguments of torch's optimizers that add tensors to their state when they are on."""


def describe(
    spec: DraftSpec,
    *,
    vocab_ids: Sequence[int] | None,
    optimizer: Mapping[str, Any] | None,
    layout: str = "native",
) -> dict[str, Any]:
    """What the file says of a draft, without the files beside it; JSON values.

    Args:
        spec: of the draft.
        vocab_ids: target id of each draft id; None = every id.
        optimizer: what `optimizer_layout` returned.
        layout: of the directory.
    """
    ids = None if vocab_ids is None else list(vocab_ids)
    meta = {
        "format_version": FORMAT_VERSION,
        "algo": spec.algo,
        "dtype": spec.dtype,
        "layout": layout,
        "spec": spec.architecture.identity() | {"vocab_ids": ids},
        "optimizer": optimizer,
    }
    return json.loads(json.dumps(meta))


def optimizer_layout(cfg: PolicyConfig, spec: DraftSpec) -> dict[str, Any] | None:
    """What decides whether a saved optimizer state fits the draft's optimizer; learning rates and the like do not.

    Args:
        cfg: `policy`.
        spec: of the draft.

    Returns:
        Class, parameter names per group and options that add to the state; None for a draft that is not trained.
    """
    if spec.is_static:
        return None
    options, shapes = cfg.draft.optimizer.kwargs, spec.architecture.trained_shapes()
    groups = {"matrices": [n for n in spec.trained_names if len(shapes[n]) >= 2]}
    groups["vectors"] = [n for n in spec.trained_names if len(shapes[n]) < 2]
    return {
        "class": cfg.draft.optimizer.name or cfg.optimizer.name,
        "groups": {name: sorted(names) for name, names in groups.items() if names},
        "state_options": [name for name in _STATE_OPTIONS if options.get(name)],
    }


# -- files -----------------------------------------------------------------------------------------------------------


def is_weight_file(name: str) -> bool:
    """Whether a reader of a draft directory may take a file of this name for weights or their index."""
    return name.endswith((".safetensors", ".safetensors.index.json"))


def incomplete() -> dict[str, Any]:
    """What the file says while the directory is being replaced."""
    return {"format_version": FORMAT_VERSION, _INCOMPLETE: True}


def sealed(meta: Mapping[str, Any], directory: Path, files: Sequence[str]) -> dict[str, Any]:
    """Add sizes and checksums of the files beside it, and its own.

    Args:
        meta: what `describe` returned.
        directory: that the files are in.
        files: their names.
    """
    crcs = checksums(directory, files)
    listed = {name: {"bytes": (directory / name).stat().st_size, "crc32": crcs[name]} for name in sorted(files)}
    whole = dict(meta) | {"files": listed}
    return whole | {"checksum": _own_checksum(whole)}


def _own_checksum(meta: Mapping[str, Any]) -> str:
    plain = {name: value for name, value in meta.items() if name != "checksum"}
    return checksum(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode())


def read_meta(directory: Path) -> dict[str, Any]:
    """Read the file of a directory that this program wrote.

    Args:
        directory: of the draft.

    Raises:
        CheckpointError: there is none, or it is damaged, of another version, or of a directory that is not complete.
    """
    path = directory / META_FILE
    if not path.is_file():
        raise CheckpointError(f"{path}: does not exist; the checkpoint holds no draft of this program.")
    meta = read_json_object(path, max_bytes=_MAX_BYTES)
    version = meta.get("format_version")
    if version not in _READABLE:
        raise CheckpointError(f"{path}: has format_version {shown(version)}; this program reads {FORMAT_VERSION}.")
    if _INCOMPLETE in meta:
        raise CheckpointError(
            f"{directory}: writing the draft was interrupted, so that its files may not belong together. Write it "
            "again, or use an earlier one."
        )
    if version == FORMAT_VERSION or "checksum" in meta:
        stored, own = meta.get("checksum"), _own_checksum(meta)
        if stored != own:
            raise CheckpointError(
                f"{path}: is corrupted: CRC-32 {own}, written {shown(stored)}. Restore the file, or use an earlier "
                "checkpoint."
            )
    if not isinstance(meta.get("spec"), dict) or "algo" not in meta:
        raise CheckpointError(f"{path}: lacks algo or spec. The file is corrupted; use an earlier checkpoint.")
    return meta


def verify_files(directory: Path) -> None:
    """Compare the files of a draft directory with what was written. A directory of another program passes.

    Args:
        directory: of a draft.

    Raises:
        CheckpointError: a file is missing, has other content or was added, or the directory is not complete.
    """
    if not (directory / META_FILE).is_file():
        return
    files = read_meta(directory).get("files")
    if files is None:
        return
    if not isinstance(files, dict) or not all(isinstance(entry, dict) for entry in files.values()):
        raise CheckpointError(f"{directory / META_FILE}: has no table of files. Restore the file.")
    added = sorted(p.name for p in directory.iterdir() if is_weight_file(p.name) and p.name not in files)
    if added:
        raise CheckpointError(
            f"{directory}: holds {added}, which this program did not write and readers would take for weights. "
            f"Remove them, or {META_FILE} if they belong to the draft."
        )
    for name, entry in files.items():
        file = member(directory, name)
        if not file.is_file():
            raise CheckpointError(f"{file}: is missing. Restore it, or use another draft.")
        size, written = file.stat().st_size, entry.get("bytes")
        if size != written:
            raise CheckpointError(f"{file}: has {size} bytes; {shown(written)} were written. {_changed(file)}")
    for name, crc in checksums(directory, files).items():
        file, written = directory / name, files[name].get("crc32")
        if crc != written:
            raise CheckpointError(f"{file}: is corrupted: CRC-32 {crc}, written {shown(written)}. {_changed(file)}")


def _changed(file: Path) -> str:
    return f"Restore the file; if it was changed on purpose, remove {META_FILE}."


# -- comparison ------------------------------------------------------------------------------------------------------


def differences(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """What keeps a stored draft from being continued, one text per field: `field: stored, this run value`.

    A field that one side does not know is left out: an older file says less, and a pickled draft's vocabulary is not
    known before it is read.

    Args:
        stored: what `read_meta` returned.
        wanted: what `describe` returns for this run.
    """
    old, new = _flat(stored), _flat(wanted)
    return [
        f"{name}: {_short(old[name], new[name])}, this run {_short(new[name], old[name])}"
        for name in old
        if name in new and old[name] != new[name]
    ]


def _flat(meta: Mapping[str, Any]) -> dict[str, Any]:
    flat = {"algo": meta["algo"], **meta["spec"]}
    if "optimizer" not in meta:
        return flat
    optimizer = meta["optimizer"]
    if optimizer is None:
        return flat | {"optimizer": None}
    groups = {f"optimizer.groups.{name}": names for name, names in optimizer["groups"].items()}
    return flat | {
        "optimizer": "trained",
        "optimizer.class": optimizer["class"],
        **groups,
        "optimizer.groups": list(groups),
        "optimizer.state_options": optimizer["state_options"],
    }


def _short(value: Any, other: Any) -> str:
    """A value for a message; of a long list what the other one lacks."""
    text = json.dumps(value)
    if len(text) <= 60:
        return text
    if isinstance(value, list) and isinstance(other, list):
        known = set(map(str, other))
        own = [item for item in value if str(item) not in known]
        shown = json.dumps(own[:3])[1:-1] + (", ..." if len(own) > 3 else "")
        return f"{len(value)} entries" + (f", of which only here {shown}" if own else "")
    return f"{text[:57]}..."
