"""The unrolled draft against a naive float64 loop: loss, every gradient, every metric."""

from __future__ import annotations

import pytest
import torch

from nemo_rl.models.automodel.draft.config import Eagle3DraftConfig
from tests.unit.models.automodel.draft.helpers import (
    StubPolicy,
    make_arch,
    make_documents,
    make_runtime,
    naive_of,
    run_step,
)
from tests.unit.models.automodel.draft.reference import naive_eagle3

MASKS = ["0011111", "00111", "000110111", "11"]
"""A plain response, a short one, one with a tool token inside, one that is all response."""

CASES = {
    "default": ({}, {}),
    "norm_output": ({"norm_output": True}, {}),
    "norm_before_residual": ({"norm_before_residual": True}, {}),
    "norm_before_fc": ({"norm_before_fc": True}, {}),
    "fc_norm": ({"fc_norm": True}, {}),
    "qwen3_two_layers": ({"layer_family": "qwen3", "num_hidden_layers": 2}, {}),
    "three_layers_input_rule": ({"num_hidden_layers": 3}, {"mask_rule": "input"}),
    "input_rule": ({}, {"mask_rule": "input"}),
    "reduced_vocab": ({"draft_vocab_size": 9}, {}),
    "reduced_vocab_drop": ({"draft_vocab_size": 9}, {"drop_out_of_vocab": True}),
    "decay_1": ({}, {"ttt_decay": 1.0}),
    "one_depth": ({}, {"ttt_steps": 1}),
    "small_chunks": ({}, {"loss_chunk_size": 3}),
}
PERMUTED_IDS = [17, 3, 9, 21, 0, 12, 5, 8, 20]


@pytest.mark.parametrize("case", CASES, ids=list(CASES))
def test_loss_gradients_and_metrics_equal_the_naive_loop(case):
    arch_changes, cfg_changes = CASES[case]
    arch = make_arch(**arch_changes)
    cfg = Eagle3DraftConfig(enabled=True, **{"ttt_steps": 4, **cfg_changes})
    ids = PERMUTED_IDS if arch.has_vocab_map else None
    runtime = make_runtime(arch, cfg, ids=ids)
    docs = make_documents(MASKS, arch)
    upstream = -1.7

    got = run_step(runtime, docs, [[0, 1, 2, 3]], upstream=upstream)

    naive = naive_of(runtime)
    want = naive_eagle3(
        naive,
        docs,
        StubPolicy().embed.weight.detach(),
        depths=cfg.ttt_steps,
        decay=cfg.ttt_decay,
        rule=cfg.mask_rule,
        ids=ids,
        drop=cfg.drop_out_of_vocab,
        num_proposed=runtime.spec.num_speculative_tokens,
    )
    (want.loss * upstream).backward()
    assert float(got.loss) == pytest.approx(float(want.loss), rel=1e-5)
    for name, w in naive.w.items():
        torch.testing.assert_close(
            got.grads[name].double(), w.grad, rtol=2e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}"
        )
        assert w.grad.abs().max() > 0, name
    for name, (num, den) in want.metrics.items():
        assert got.metrics[name] == (pytest.approx(num, rel=1e-4, abs=1e-5), pytest.approx(den)), name
    assert got.metrics["loss"][0] == pytest.approx(float(got.loss), rel=1e-6)
    assert got.metrics["loss"][1] == pytest.approx(1.0)
    unread = {n for n in got.metrics if n not in want.metrics and got.metrics[n][1] != 0}
    assert unread == {"loss", "documents_without_chain"}
