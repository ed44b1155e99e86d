"""WORKAROUND for one defect of vLLM's CPU build; everything about it is in this file.

Defect: a draft that keeps keys of the policy's hidden states normalises those of all its layers in one call of
`vllm._custom_ops.rms_norm`, with one row of weights per layer. The CPU kernel applies the first row to every layer, so
layers behind the first attend with wrong keys and proposals are worse; CUDA's kernel is right. Measured with vLLM
0.32.0; for another device the same defect was reported as vllm-project/vllm-xpu-kernels#573.

Removal condition: delete this file, its call in `cpu_engine_worker.py` and its test once `stock_is_defective()` is
False with the pinned vLLM (the test says so). Until then `install` looks at the running vLLM and leaves a correct one
alone.
"""

from __future__ import annotations

import logging

import torch
from vllm import _custom_ops
from vllm.platforms import current_platform

logger = logging.getLogger(__name__)

STOCK_RMS_NORM = _custom_ops.rms_norm


def rms_norm(out: torch.Tensor, input: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> None:
    """Write the normalised input to `out`; takes the arguments of vLLM's function.

    Args:
        out: Float, of the input's shape, contiguous.
        input: Float [.., width], or [rows, .., width] with a weight per row.
        weight: Float [width], or [rows, width]: row i is for `input[i]`. None does not scale.
        epsilon: Added to the mean square.
    """
    if weight is None or weight.dim() == 1:
        STOCK_RMS_NORM(out, input, weight, epsilon)
        return
    for out_row, input_row, weight_row in zip(out, input, weight, strict=True):
        STOCK_RMS_NORM(out_row, input_row, weight_row, epsilon)


def stock_is_defective() -> bool:
    """Run vLLM's own function on a small CPU input and look at the result."""
    current_platform.import_kernels()  # an engine's process does it anyway
    out, states = torch.empty(2, 1, 16), torch.ones(2, 1, 16)
    weight = torch.stack([torch.ones(16), torch.full((16,), 2.0)])
    STOCK_RMS_NORM(out, states, weight, 0.0)
    return not torch.allclose(out[:, 0], weight)


def install() -> bool:
    """Replace the function in this process if the defect is present. Calling it again changes nothing.

    Returns:
        True when the replacement is in place.
    """
    if _custom_ops.rms_norm is rms_norm:
        return True
    if not stock_is_defective():
        return False
    _custom_ops.rms_norm = rms_norm
    logger.info("vLLM's CPU rms_norm ignores the rows of a weight; it was replaced.")
    return True
