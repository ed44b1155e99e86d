"""Lets nemo_automodel 0.7 build models on a machine without CUDA.

`NeMoAutoModelForCausalLM.from_pretrained` asks for the current CUDA device unconditionally. On a gloo mesh everything
else in it works on the CPU. Remove this file when nemo_automodel takes the device from the mesh or an argument.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch


class _TorchWithoutCuda:
    """The torch module, except that a CUDA device is the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def device(kind: Any, *_index: Any) -> torch.device:
        """`torch.device`, with `cuda` read as `cpu`."""
        return torch.device("cpu") if str(kind).startswith("cuda") else torch.device(kind)


@contextmanager
def automodel_without_cuda() -> Iterator[None]:
    """Redirect nemo_automodel's device look-ups to the CPU; does nothing where CUDA exists."""
    if torch.cuda.is_available():
        yield
        return
    # Imported here: the module costs seconds, and this file is imported where no model is built.
    from nemo_automodel._transformers import auto_model

    with (
        patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")),
        patch.object(auto_model, "torch", _TorchWithoutCuda()),
    ):
        yield
