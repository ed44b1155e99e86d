"""Lets vLLM look at model classes in this process instead of in a fresh one.

The first time vLLM meets an architecture it starts a process that imports vLLM again, 20 to 30 s on a CPU machine, only
to keep the parent free of CUDA. Our engine lives in a process that loads the model anyway.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torch import nn
from vllm import ModelRegistry
from vllm.model_executor.models.registry import _LazyRegisteredModel

from nemo_rl.models.generation.vllm.engine_args import read_model_config


def register_architectures(model_dirs: Iterable[str | Path]) -> list[str]:
    """Register the classes of these models as objects, under every name that vLLM may look up.

    For a draft vLLM also looks up names that it derives by a prefix or suffix for the method, and the plain name inside
    such a one; both are covered. Directories without a readable config (hub ids) are left to vLLM.

    Args:
        model_dirs: Directories of the policy and of the draft.

    Returns:
        The registered architecture names, sorted.
    """
    names = {name for directory in model_dirs for name in read_model_config(str(directory)).get("architectures") or ()}
    entries = {arch: entry for arch, entry in ModelRegistry.models.items() if isinstance(entry, _LazyRegisteredModel)}
    wanted = sorted(arch for arch in entries if any(arch.endswith(name) or name.startswith(arch) for name in names))
    classes = {arch: entries[arch].load_model_cls() for arch in wanted}
    # Under some names there is only a stand-in that chooses a class for the hardware; that is vLLM's to do.
    models = {arch: cls for arch, cls in classes.items() if issubclass(cls, nn.Module)}
    for arch, cls in models.items():
        ModelRegistry.models.pop(arch)  # registering a known name warns
        ModelRegistry.register_model(arch, cls)
    return list(models)
