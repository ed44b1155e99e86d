"""The marked workaround: it is needed, it is right, and it says when it is not needed any more.

`tests/functional/serving/test_live_alignment.py` shows the rest: every draft proposes the same behind a cut prompt.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

from nemo_rl.models.generation.vllm import chunked_prefill_fix

pytestmark = pytest.mark.vllm


class Proposer(SpecDecodeBaseProposer):
    """Chooses as vLLM does, and goes no further."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def prepare_next_token_ids_padded(self, sampled, requests, batch, mask):
        ids = [requests[batch.req_ids[i]][batch.num_tokens_no_spec[i] - 1] for i in range(batch.num_reqs)]
        assert batch.vocab_size == 320
        self.calls.append(ids)
        return ids


def runner() -> SimpleNamespace:
    """Three rows: a prompt of which 4 of 10 tokens are computed, one that is computed whole, a request that decodes."""
    return SimpleNamespace(
        drafter=Proposer(),
        # One row more, of a longer batch before.
        discard_request_mask=SimpleNamespace(np=np.array([True, False, False, True])),
        optimistic_seq_lens_cpu=torch.tensor([4, 10, 15, 0], dtype=torch.int32),
        requests={"cut": range(100, 110), "whole": range(200, 210), "decoding": range(300, 313)},
        input_batch=SimpleNamespace(
            num_reqs=3,
            req_ids=["cut", "whole", "decoding"],
            vocab_size=320,
            num_tokens_no_spec=np.array([10, 10, 13, 7]),
        ),
    )


def prepare(r: SimpleNamespace) -> list[int]:
    return r.drafter.prepare_next_token_ids_padded(None, r.requests, r.input_batch, None)


def test_stock_function_is_still_defective() -> None:
    """When this fails the pinned vLLM is repaired: delete the workaround and this file."""
    assert chunked_prefill_fix.stock_is_defective()


def test_next_token_of_a_cut_prompt_and_nothing_else_changes() -> None:
    r = runner()
    assert prepare(r) == [109, 209, 312]
    assert chunked_prefill_fix.install(r)
    assert chunked_prefill_fix.install(r)
    assert prepare(r) == [104, 209, 312]
    assert len(r.drafter.calls) == 2, "installed once"
    assert r.input_batch.num_tokens_no_spec.tolist() == [10, 10, 13, 7], "the runner's own batch is not touched"


def test_a_correct_function_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def correct(self, sampled, requests, batch, mask, seq_lens):
        raise NotImplementedError

    monkeypatch.setattr(chunked_prefill_fix, "STOCK_PREPARE", correct)
    r = runner()
    assert not chunked_prefill_fix.install(r)
    assert prepare(r) == [109, 209, 312]


@pytest.mark.parametrize("drafter", [None, SimpleNamespace()], ids=["no-speculation", "proposals-without-a-model"])
def test_nothing_to_do_without_a_draft_model(drafter: object) -> None:
    assert not chunked_prefill_fix.install(SimpleNamespace(drafter=drafter))
    assert not chunked_prefill_fix.install(SimpleNamespace())
