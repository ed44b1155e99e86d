"""WORKAROUND for one defect of vLLM; everything about it is in this file.

Defect: a draft that reads the token behind position t in slot t is fed a known one where a prompt is computed in parts:
behind a part's last position stands the prompt's next token. vLLM's padded batches take the prompt's last token instead
(`SpecDecodeBaseProposer.prepare_next_token_ids_padded`). The draft keeps a wrong key and value in one slot per part, so
its proposals for that request are others than those for the same prompt in one piece. Nothing fails; acceptance falls.
On every device. Measured with vLLM 0.32.0.

Removal condition: delete this file, its call in `engine_worker.py` and its test once `stock_is_defective()` is False
with the pinned vLLM (the test says so). Until then `install` looks at the running vLLM and leaves a correct one alone.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

logger = logging.getLogger(__name__)

STOCK_PREPARE: Any = SpecDecodeBaseProposer.prepare_next_token_ids_padded


class _KnownLengths:
    """The runner's batch, in which the unfinished prompt of a row ends one token behind what has been computed.

    vLLM takes the last token of a row, and the last one up to there is the next one of the prompt.
    """

    def __init__(self, batch: Any, runner: Any) -> None:
        self._batch = batch
        rows = slice(batch.num_reqs)
        is_cut = runner.discard_request_mask.np[rows]
        computed = runner.optimistic_seq_lens_cpu[rows].numpy()
        self.num_tokens_no_spec = np.where(is_cut, computed + 1, batch.num_tokens_no_spec[rows])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)


def _prepare(stock: Any, runner: Any, sampled_token_ids: Any, requests: Any, batch: Any, discard_mask: Any) -> Any:
    return stock(sampled_token_ids, requests, _KnownLengths(batch, runner), discard_mask)


def stock_is_defective() -> bool:
    """Run vLLM's own function on a prompt of ten tokens until it has chosen one, and look at the choice."""
    chosen = np.zeros(1, dtype=np.int32)

    class _ChosenError(Exception):
        pass

    def stop(_: int) -> None:
        raise _ChosenError

    proposer = SimpleNamespace(backup_next_token_ids=SimpleNamespace(np=chosen, copy_to_gpu=stop))
    prompt = SimpleNamespace(get_token_id=lambda index: index)
    batch = SimpleNamespace(num_reqs=1, req_ids=["request"], num_tokens_no_spec=np.array([10]))
    with contextlib.suppress(_ChosenError, TypeError, AttributeError):
        STOCK_PREPARE(proposer, None, {"request": prompt}, batch, None)
    # Nothing of the batch says how much was computed: the last token is the wrong one for any part.
    return int(chosen[0]) == 9


def install(runner: Any) -> bool:
    """Give the model runner's draft the token that is behind a part of a prompt, if the defect is present.

    Args:
        runner: vLLM's model runner, its models loaded.

    Returns:
        True when the replacement is in place; False without a draft model, and where nothing is wrong.
    """
    drafter = getattr(runner, "drafter", None)
    if not isinstance(drafter, SpecDecodeBaseProposer) or not stock_is_defective():
        return False
    if "prepare_next_token_ids_padded" not in vars(drafter):
        stock = drafter.prepare_next_token_ids_padded
        drafter.prepare_next_token_ids_padded = functools.partial(_prepare, stock, runner)
        logger.info("vLLM feeds drafts a wrong token where a prompt is cut; it was replaced.")
    return True
