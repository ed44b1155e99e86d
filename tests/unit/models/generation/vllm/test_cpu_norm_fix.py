"""The marked workaround: it is needed, it is right, and it says when it is not needed any more."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm")

from vllm import _custom_ops

from nemo_rl.models.generation.vllm import cpu_norm_fix

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the defect is in the CPU build"),
]


def _plain(states: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> torch.Tensor:
    """The documented meaning in float64."""
    x = states.double()
    scale = torch.ones(x.shape[-1], dtype=torch.float64) if weight is None else weight.double()
    if scale.dim() == 2:
        scale = scale.view(len(scale), *[1] * (x.dim() - 2), -1)
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * scale


@pytest.mark.parametrize("weight_shape", [(32,), (3, 32)], ids=["one", "per_row"])
def test_replacement_has_the_documented_meaning(weight_shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    states, weight = torch.randn(3, 5, 2, 32, generator=generator), torch.randn(weight_shape, generator=generator)
    assert cpu_norm_fix.stock_is_defective()  # also loads the kernels
    out = torch.full_like(states, float("nan"))
    cpu_norm_fix.rms_norm(out, states, weight, 1e-3)
    torch.testing.assert_close(out.double(), _plain(states, weight, 1e-3), atol=1e-6, rtol=1e-5)


def test_stock_function_is_still_defective() -> None:
    """When this fails the pinned vLLM is repaired: delete the workaround and this file."""
    assert cpu_norm_fix.stock_is_defective()


def test_install_replaces_the_function_that_drafts_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_custom_ops, "rms_norm", cpu_norm_fix.STOCK_RMS_NORM)
    assert cpu_norm_fix.install()
    assert cpu_norm_fix.install()
    assert _custom_ops.rms_norm is cpu_norm_fix.rms_norm


def test_a_correct_function_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        cpu_norm_fix, "STOCK_RMS_NORM", lambda out, states, weight, eps: out.copy_(_plain(states, weight, eps))
    )
    monkeypatch.setattr(_custom_ops, "rms_norm", cpu_norm_fix.STOCK_RMS_NORM)
    assert not cpu_norm_fix.install()
    assert _custom_ops.rms_norm is cpu_norm_fix.STOCK_RMS_NORM
