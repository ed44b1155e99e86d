"""WORKAROUND for one defect of vLLM's CPU build; everything about it is in this file.

Defect: with speculation and temperature > 0 (or top-k, top-p), the V1 rejection sampler spreads each request's value
over its draft tokens with `vllm.v1.sample.rejection_sampler.expand_batch_to_tokens`. On CPU the kernel behind it fills
a temporary instead of the result, so logits are divided by uninitialised memory and samples do not follow the policy.
Greedy decoding is not affected, CUDA is not affected. Measured with vLLM 0.32.0.

Removal condition: delete this file, its call in `cpu_engine_worker.py` and its test once `stock_is_defective()` is
False with the pinned vLLM (the test says so). Until then `install` looks at the running vLLM and leaves a correct one
alone.
"""

from __future__ import annotations

import logging

import torch
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler

from nemo_rl.models.generation.vllm import cpu_kernel_scan_fix

logger = logging.getLogger(__name__)

STOCK_EXPAND = rejection_sampler.expand_batch_to_tokens


def expand_batch_to_tokens(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """Spread one value per request over the request's draft tokens; takes the arguments of vLLM's function.

    Example: x = [a, b, c], cu_num_tokens = [2, 5, 6] -> [a, a, b, b, b, c].

    Args:
        x: Any dtype [requests].
        cu_num_tokens: int [requests], inclusive cumulative number of draft tokens.
        num_tokens: Total, `cu_num_tokens[-1]`.
        replace_from: Value of `x` to replace.
        replace_to: What replaces it.

    Returns:
        Dtype of x, [num_tokens].
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
    replaced = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return replaced.repeat_interleave(counts, output_size=num_tokens)


def stock_is_defective() -> bool:
    """Run vLLM's own function on a small CPU input and look at the result."""
    cpu_kernel_scan_fix.install()  # the next line scans, which fails in a process that has loaded numba
    current_platform.register_triton_kernel_overrides()  # the CPU kernels; an engine's process does it anyway
    counts = torch.tensor([2, 5, 6], dtype=torch.int32)
    # The defect returns whatever the memory holds, which may be the result of an equal call before.
    for first, last in ((0.5, 2.0), (0.25, 3.0), (0.75, 4.0)):
        expected = torch.tensor([first, first, 1.0, 1.0, 1.0, last])
        if not torch.equal(STOCK_EXPAND(torch.tensor([first, 0.0, last]), counts, 6, 0, 1), expected):
            return True
    return False


def install() -> bool:
    """Replace the function in this process if the defect is present. Calling it again changes nothing.

    Returns:
        True when the replacement is in place.
    """
    if rejection_sampler.expand_batch_to_tokens is expand_batch_to_tokens:
        return True
    if not stock_is_defective():
        return False
    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
    logger.info("vLLM's CPU rejection sampler is defective; expand_batch_to_tokens was replaced.")
    return True
