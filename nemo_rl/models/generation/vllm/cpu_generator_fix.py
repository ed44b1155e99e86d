"""WORKAROUND for one defect of vLLM's CPU build; everything about it is in this file.

Defect: a prompt that does not fit into the scheduler's token budget (`max_num_batched_tokens`) is computed in parts.
What is sampled behind a part that is not the last is thrown away, and the model runner sets the request's generator
back by the number of values that CUDA's draw took. A CPU generator has no such offset, so the engine ends with
"CPU Generator does not use offset" on the first batch in which a seeded request's prompt is cut. Measured with vLLM
0.32.0.

Here the generators' states are kept before the draw and put back after it, so that what a request samples does not
depend on where its prompt was cut.

Removal condition: delete this file, its call in `cpu_engine_worker.py` and its test once `stock_is_defective()` is
False with the pinned vLLM (the test says so). Until then `install` looks at the running vLLM and leaves a correct one
alone.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

logger = logging.getLogger(__name__)

STOCK_SAMPLE = GPUModelRunner._sample
STOCK_BOOKKEEPING = GPUModelRunner._bookkeeping_sync


def _discarded(runner: GPUModelRunner) -> list[int]:
    """Rows of the batch whose sampled token is thrown away and whose request has a seed."""
    rows = np.nonzero(runner.discard_request_mask.np[: runner.input_batch.num_reqs])[0]
    return [int(row) for row in rows if int(row) in runner.input_batch.generators]


def _sample(self: GPUModelRunner, *args: Any, **kwargs: Any) -> Any:
    """Sample as vLLM does; a draw that is thrown away leaves its generator where it was."""
    generators = self.input_batch.generators
    states = {row: generators[row].get_state() for row in _discarded(self)}
    output = STOCK_SAMPLE(self, *args, **kwargs)
    for row, state in states.items():
        generators[row].set_state(state)
    return output


def _bookkeeping_sync(self: GPUModelRunner, *args: Any, **kwargs: Any) -> Any:
    """Do vLLM's bookkeeping without the generators that it would set back: `_sample` has done so."""
    generators = self.input_batch.generators
    hidden = {row: generators.pop(row) for row in _discarded(self)}
    try:
        return STOCK_BOOKKEEPING(self, *args, **kwargs)
    finally:
        generators.update(hidden)


def stock_is_defective() -> bool:
    """Whether vLLM asks generators for an offset, and those of the CPU have none."""
    if "get_offset" not in STOCK_BOOKKEEPING.__code__.co_names:
        return False
    try:
        torch.Generator("cpu").get_offset()
    except RuntimeError:
        return True
    return False


def install() -> bool:
    """Replace both methods in this process if the defect is present. Calling it again changes nothing.

    Returns:
        True when the replacement is in place.
    """
    if GPUModelRunner._sample is _sample:
        return True
    if not stock_is_defective():
        return False
    GPUModelRunner._sample = _sample
    GPUModelRunner._bookkeeping_sync = _bookkeeping_sync
    logger.info("vLLM sets back the generators of cut prompts, which a CPU generator refuses; it was replaced.")
    return True
