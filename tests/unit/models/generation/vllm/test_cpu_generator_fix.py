"""The marked workaround: it is needed, it is right, and it says when it is not needed any more.

`test_engine_sampling.py` shows the rest: an engine samples the same whether prompts are cut or not.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from nemo_rl.models.generation.vllm import cpu_generator_fix

pytestmark = pytest.mark.vllm


def runner(discarded: list[bool]) -> SimpleNamespace:
    """A batch in which every request has a seed, but the second."""
    generators = {row: torch.Generator().manual_seed(row) for row in range(len(discarded)) if row != 1}
    return SimpleNamespace(
        discard_request_mask=SimpleNamespace(np=np.array([*discarded, True])),  # a row of a longer batch before
        input_batch=SimpleNamespace(num_reqs=len(discarded), generators=generators),
    )


def test_stock_method_is_still_defective() -> None:
    """When this fails the pinned vLLM or torch is repaired: delete the workaround and this file."""
    assert cpu_generator_fix.stock_is_defective()


def test_discarded_draws_leave_their_generators_where_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(self: SimpleNamespace) -> dict[int, float]:
        return {row: float(torch.rand(1, generator=g)) for row, g in self.input_batch.generators.items()}

    monkeypatch.setattr(cpu_generator_fix, "STOCK_SAMPLE", draw)
    batch = runner([True, True, False, True])
    first, second = cpu_generator_fix._sample(batch), cpu_generator_fix._sample(batch)
    assert sorted(first) == [0, 2, 3]
    assert {row for row in first if first[row] == second[row]} == {0, 3}


def test_bookkeeping_sees_no_generator_to_set_back_and_leaves_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: SimpleNamespace) -> None:
        assert set(self.input_batch.generators) == {2}
        raise KeyError("bookkeeping")

    monkeypatch.setattr(cpu_generator_fix, "STOCK_BOOKKEEPING", fail)
    batch = runner([True, True, False, True])
    before = dict(batch.input_batch.generators)
    with pytest.raises(KeyError, match="bookkeeping"):
        cpu_generator_fix._bookkeeping_sync(batch)
    assert batch.input_batch.generators == before


def test_install_replaces_both_methods_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GPUModelRunner, "_sample", cpu_generator_fix.STOCK_SAMPLE)
    monkeypatch.setattr(GPUModelRunner, "_bookkeeping_sync", cpu_generator_fix.STOCK_BOOKKEEPING)
    assert cpu_generator_fix.install()
    assert cpu_generator_fix.install()
    assert GPUModelRunner._sample is cpu_generator_fix._sample
    assert GPUModelRunner._bookkeeping_sync is cpu_generator_fix._bookkeeping_sync


def test_a_correct_method_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_generator_fix, "STOCK_BOOKKEEPING", lambda runner: None)
    monkeypatch.setattr(GPUModelRunner, "_sample", cpu_generator_fix.STOCK_SAMPLE)
    assert not cpu_generator_fix.install()
    assert GPUModelRunner._sample is cpu_generator_fix.STOCK_SAMPLE
