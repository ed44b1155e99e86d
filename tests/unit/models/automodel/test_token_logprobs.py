"""Log-probabilities of taken tokens: values and gradients against float64 log_softmax, in chunks and in bf16."""

from __future__ import annotations

import pytest
import torch

from nemo_rl.models.automodel.postprocess import full_logits, token_logprobs

R, S, V = 3, 5, 11


def case(dtype=torch.float32, *, scale=3.0):
    g = torch.Generator().manual_seed(0)
    logits = (torch.randn(R, S, V, generator=g) * scale).to(dtype)
    return logits, torch.randint(0, V, (R, S), generator=g), torch.randn(R, S, generator=g)


def oracle(logits, ids, *, temperature):
    """Token by token in float64."""
    logits = logits.detach().double().requires_grad_()
    out = torch.zeros(R, S, dtype=torch.float64)
    for r in range(R):
        for i in range(1, S):
            out[r, i] = torch.log_softmax(logits[r, i - 1] / temperature, dim=-1)[ids[r, i]]
    return out, logits


@pytest.mark.parametrize("chunk", [None, 1, 4, R * S])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 5e-6), (torch.bfloat16, 1e-2)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients(chunk, dtype, atol, temperature):
    logits, ids, upstream = case(dtype)
    leaf = logits.clone().requires_grad_()
    out = token_logprobs(leaf, ids, temperature=temperature, chunk_size=chunk)
    want, want_leaf = oracle(logits, ids, temperature=temperature)
    # The value is computed in fp32 from the same (rounded) logits; only the gradient is rounded to the logits' dtype.
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=2e-6)
    out.backward(upstream)
    want.backward(upstream.double())
    # fp32: exp(z - logsumexp) is off by |z| roundings, about 3e-6 at the largest logits here.
    rtol = 1e-2 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(leaf.grad.double(), want_leaf.grad, rtol=rtol, atol=atol)
    assert leaf.grad.dtype == dtype
    assert torch.equal(leaf.detach(), logits)  # the division by the temperature is out of place


def test_chunks_are_bit_identical():
    logits, ids, _ = case()
    whole = token_logprobs(logits, ids, temperature=0.7, chunk_size=None)
    for chunk in (1, 2, 7, 100):
        assert torch.equal(token_logprobs(logits, ids, temperature=0.7, chunk_size=chunk), whole)


def test_first_position_is_zero_and_last_logits_are_unused():
    logits, ids, upstream = case()
    leaf = logits.requires_grad_()
    out = token_logprobs(leaf, ids, temperature=1.0, chunk_size=None)
    assert (out[:, 0] == 0).all()
    out.backward(upstream)
    assert (leaf.grad[:, -1] == 0).all()


def test_extreme_logits_stay_finite():
    logits, ids, upstream = case(scale=1e4)
    leaf = logits.requires_grad_()
    out = token_logprobs(leaf, ids, temperature=0.5, chunk_size=2)
    out.backward(upstream)
    assert torch.isfinite(out).all()
    assert torch.isfinite(leaf.grad).all()


def test_full_logits_carry_no_graph():
    logits, _, _ = case()
    assert not full_logits(logits.requires_grad_() * 2).requires_grad
