"""The marked workaround: it is needed, it is right, and it says when it is not needed any more."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.sample import rejection_sampler

from nemo_rl.models.generation.vllm import cpu_sampler_fix

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the defect is in the CPU build"),
]


def _loop(x, cu_num_tokens, replace_from, replace_to):
    """The documented meaning, one token at a time."""
    out, start = [], 0
    for value, end in zip(x.tolist(), cu_num_tokens.tolist(), strict=True):
        out += [replace_to if value == replace_from else value] * (end - start)
        start = end
    return torch.tensor(out, dtype=x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
@pytest.mark.parametrize("counts", [[1], [2, 3, 1], [0, 4, 0, 1], [3, 0]], ids=str)
def test_replacement_has_the_documented_meaning(dtype: torch.dtype, counts: list[int]) -> None:
    x = torch.arange(len(counts)).to(dtype)  # the first value is 0, which is replaced
    cumulative = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    got = cpu_sampler_fix.expand_batch_to_tokens(x, cumulative, sum(counts), 0, 7)
    assert torch.equal(got, _loop(x, cumulative, 0, 7))
    assert got.dtype == dtype


def test_stock_function_is_still_defective() -> None:
    """When this fails the pinned vLLM is repaired: delete the workaround and this file."""
    assert cpu_sampler_fix.stock_is_defective()


def test_install_replaces_the_function_that_the_sampler_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", cpu_sampler_fix.STOCK_EXPAND)
    assert cpu_sampler_fix.install()
    assert cpu_sampler_fix.install()
    assert rejection_sampler.expand_batch_to_tokens is cpu_sampler_fix.expand_batch_to_tokens


def test_a_correct_function_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_sampler_fix, "STOCK_EXPAND", lambda x, cu, n, a=0, b=0: _loop(x, cu, a, b))
    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", cpu_sampler_fix.STOCK_EXPAND)
    assert not cpu_sampler_fix.install()
    assert rejection_sampler.expand_batch_to_tokens is cpu_sampler_fix.STOCK_EXPAND
