"""Everything that is checked of a weight update before a single weight is touched. Torch only, no vLLM."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from nemo_rl.errors import ConfigError
from nemo_rl.weight_sync.checksum import dtype_name, tensor_checksum
from nemo_rl.weight_sync.interfaces import TensorInfo

_INDEX = "model.safetensors.index.json"
_FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_MAX_NAMES = 8


def read_headers(directory: str | Path, *, key: str) -> dict[str, TensorInfo]:
    """Names, shapes and dtypes of a model directory, from the safetensors headers alone.

    Args:
        directory: Holds `*.safetensors`, or an index that names them.
        key: Configuration key that named the directory, for messages.

    Returns:
        Tensor name to shape and dtype; dtypes other than floating point keep safetensors' spelling (`I64`).

    Raises:
        ConfigError: No safetensors file, or one that cannot be read.
    """
    directory = Path(directory)
    index = directory / _INDEX
    if index.is_file():
        files = sorted({directory / name for name in json.loads(index.read_text())["weight_map"].values()})
    else:
        files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{key}: got {directory}; must hold *.safetensors files. Convert the model to safetensors.")
    found: dict[str, TensorInfo] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as reader:
                for name in reader.keys():  # noqa: SIM118 (not a dict)
                    part = reader.get_slice(name)
                    dtype = part.get_dtype()
                    found[name] = TensorInfo(tuple(part.get_shape()), _FLOATS.get(dtype, dtype))
        except (OSError, SafetensorError) as err:
            raise ConfigError(f"{key}: cannot read {file}: {err}. Copy the file again.") from err
    return found


def is_float(info: TensorInfo) -> bool:
    """Whether a header entry is a floating-point tensor."""
    return info.dtype in _FLOATS.values()


def find_problems(
    manifest: Mapping[str, TensorInfo],
    tensors: Mapping[str, torch.Tensor],
    checksums: Mapping[str, str],
    *,
    expected: Mapping[str, TensorInfo],
    optional: Collection[str] = (),
) -> list[str]:
    """Compare an update with what the engine needs.

    Args:
        manifest: Wire name to shape and dtype, as announced.
        tensors: Wire name to the tensor that arrived.
        checksums: Wire name to checksum, as announced.
        expected: Wire name to what the engine needs.
        optional: Names in `expected` that may be absent.

    Returns:
        One sentence per kind of problem, with tensor names; empty when the update can be applied.
    """
    problems = [
        _sentence("missing", expected.keys() - manifest.keys() - set(optional)),
        _sentence("not known to the engine", manifest.keys() - expected.keys()),
        _sentence("announced but not sent", manifest.keys() - tensors.keys()),
        _sentence("sent but not announced", tensors.keys() - manifest.keys()),
        _sentence("without checksum", manifest.keys() - checksums.keys()),
    ]
    shapes, dtypes, altered, non_finite = [], [], [], []
    for name in sorted(manifest.keys() & expected.keys() & tensors.keys()):
        tensor, want = tensors[name], expected[name]
        shape, dtype = tuple(tensor.shape), dtype_name(tensor.dtype)
        if shape != tuple(want.shape) or tuple(manifest[name].shape) != shape:
            shapes.append(
                f"{name} (got {list(shape)}, announced {list(manifest[name].shape)}, needs {list(want.shape)})"
            )
        elif dtype != want.dtype or manifest[name].dtype != dtype:
            dtypes.append(f"{name} (got {dtype}, announced {manifest[name].dtype}, needs {want.dtype})")
        elif not is_finite(tensor):
            non_finite.append(name)
        elif name in checksums and tensor_checksum(tensor) != checksums[name]:
            altered.append(name)
    problems += [
        _sentence("of the wrong shape", shapes),
        _sentence("of the wrong dtype", dtypes),
        _sentence("not finite", non_finite),
        _sentence("altered on the way (checksum)", altered),
    ]
    return [problem for problem in problems if problem]


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite; one pass, no mask. Any dtype and shape."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    low, high = torch.aminmax(tensor)  # both are NaN if any element is
    return bool(torch.isfinite(low) and torch.isfinite(high))


def _sentence(kind: str, names: Collection[str]) -> str:
    if not names:
        return ""
    listed = sorted(names)
    more = f" and {len(listed) - _MAX_NAMES} more" if len(listed) > _MAX_NAMES else ""
    return f"{len(listed)} tensor(s) {kind}: {', '.join(listed[:_MAX_NAMES])}{more}"
