"""WORKAROUND for one defect of vLLM's CPU build; everything about it is in this file.

Defect: at each engine start vLLM looks through the objects of all loaded modules for kernels to replace and takes
`vars()` of each for a dict. llvmlite's library handle answers with something else. N-gram lookup imports numba, and
with it llvmlite, so after that the next engine of the process (that of the throughput probe) does not start. Measured
with vLLM 0.32.0 and llvmlite 0.47.0.

Removal condition: delete this file, its call in `vllm_worker.py` and its test once `stock_is_defective()` is
False with the pinned vLLM (the test says so). Until then `install` looks at the running vLLM and leaves a correct one
alone.
"""

from __future__ import annotations

import logging
import sys
from types import ModuleType
from typing import Any

from vllm.triton_utils import dispatcher

logger = logging.getLogger(__name__)

STOCK_REBIND = dispatcher._rebind_kernels
_HIDDEN_PACKAGE = "llvmlite"
"""Holds no kernel of vLLM."""


class _Handle:
    """Answers any attribute with a value of its own, as llvmlite's handle does."""

    __slots__ = ()

    def __getattr__(self, name: str) -> object:
        return object()


def rebind_kernels(overrides: list[tuple[Any, Any]]) -> None:
    """Rebind kernels as vLLM's function does, with the package hidden from it; takes the same arguments."""
    hidden = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == _HIDDEN_PACKAGE}
    for name in hidden:
        del sys.modules[name]
    try:
        STOCK_REBIND(overrides)
    finally:
        sys.modules.update(hidden)


def stock_is_defective() -> bool:
    """Let vLLM's own function meet such a handle, with nothing to replace."""
    probe = ModuleType("nemo_rl_kernel_scan_probe")
    vars(probe)["handle"] = _Handle()
    sys.modules[probe.__name__] = probe
    try:
        STOCK_REBIND([])
    except AttributeError:
        return True
    finally:
        del sys.modules[probe.__name__]
    return False


def install() -> bool:
    """Replace the function in this process if the defect is present. Calling it again changes nothing.

    Returns:
        True when the replacement is in place.
    """
    if dispatcher._rebind_kernels is rebind_kernels:
        return True
    if not stock_is_defective():
        return False
    dispatcher._rebind_kernels = rebind_kernels
    logger.info("vLLM's scan for kernels fails on llvmlite's library handle; the package is hidden from it.")
    return True
