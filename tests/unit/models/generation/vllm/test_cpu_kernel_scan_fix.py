"""The marked workaround: it is needed, it is right, and it says when it is not needed any more."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from nemo_rl.models.generation.vllm import cpu_kernel_scan_fix

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the scan is that of the CPU build"),
]


def test_stock_function_is_still_defective() -> None:
    """When this fails the pinned vLLM is repaired: delete the workaround and this file."""
    assert cpu_kernel_scan_fix.stock_is_defective()
    assert not [name for name in sys.modules if "kernel_scan_probe" in name]


def test_the_real_library_is_the_one_that_the_stock_function_fails_on() -> None:
    import llvmlite.binding  # noqa: F401

    with pytest.raises(AttributeError):
        cpu_kernel_scan_fix.STOCK_REBIND([])
    cpu_kernel_scan_fix.rebind_kernels([])
    assert "llvmlite.binding" in sys.modules


def test_replacement_rebinds_every_holder_of_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, wrapper = object(), object()
    holder: Any = ModuleType("holder_of_a_kernel")
    holder.copied = kernel
    holder.other = 3
    monkeypatch.setitem(sys.modules, holder.__name__, holder)
    cpu_kernel_scan_fix.rebind_kernels([(kernel, wrapper)])
    assert holder.copied is wrapper
    assert holder.other == 3
