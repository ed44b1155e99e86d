"""DSpark and Domino against naive float64 loops: loss, every gradient, every metric."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nemo_rl.models.automodel.draft.architecture import DominoArchitecture, DSparkArchitecture
from nemo_rl.models.automodel.draft.config import DominoDraftConfig, DSparkDraftConfig
from nemo_rl.models.automodel.draft.domino import DominoRuntime
from nemo_rl.models.automodel.draft.dspark import DSparkRuntime
from tests.unit.models.automodel.draft.block_head_reference import naive_domino, naive_dspark
from tests.unit.models.automodel.draft.block_helpers import PERMUTED_IDS, make_block_arch, make_block_runtime
from tests.unit.models.automodel.draft.block_reference import NaiveBlocks
from tests.unit.models.automodel.draft.helpers import StubPolicy, make_documents, run_step

MASKS = ["0011111", "00111", "000110111", "11", "0000"]
"""A plain response, a short one, one with a tool token inside, one that is all response, one without a response."""
UPSTREAM = -1.7
COMMON = {
    "loss",
    "anchors_used",
    "documents_without_chain",
    "coverage",
    "argmax_in_vocab",
    "label_in_vocab",
    "replayed_acceptance_length",
}
FAMILIES = ("loss_depth", "kl", "top1", "hit", "accept_greedy", "accept_overlap", "prefix_hit", "prefix_greedy")
FAMILIES += ("prefix_overlap", "replayed_acceptance")

DSPARK = {
    "vanilla": ({}, {}),
    "gated": ({"markov_head_type": "gated"}, {}),
    "rnn": ({"markov_head_type": "rnn"}, {}),
    "rnn_long_blocks": ({"markov_head_type": "rnn", "block_size": 5}, {"loss_decay": 1.5}),
    "fill_in_gated": ({"sample_from_anchor": False, "markov_head_type": "gated"}, {}),
    "fill_in_rnn": ({"sample_from_anchor": False, "block_size": 5, "markov_head_type": "rnn"}, {}),
    "causal": ({"causal": True}, {}),
    "no_confidence_head": ({"enable_confidence_head": False}, {}),
    "confidence_without_markov": ({"confidence_head_with_markov": False}, {}),
    "confidence_detached_greedy": ({}, {"confidence_detach": True, "confidence_target": "greedy"}),
    "no_distance": ({}, {"l1_loss_weight": 0.0}),
    "only_distance": ({}, {"ce_loss_weight": 0.0, "confidence_loss_weight": 0.5}),
    "reduced_vocab": ({"draft_vocab_size": 9, "markov_head_type": "rnn"}, {}),
    "reduced_vocab_greedy": ({"draft_vocab_size": 9}, {"confidence_target": "greedy"}),
    "two_anchors_small_chunks": ({}, {"num_anchors": 2, "loss_chunk_size": 3}),
}
DOMINO = {
    "shifted": ({}, {}),
    "unshifted": ({"shift_label": False, "block_size": 5}, {}),
    "no_pure_prefix": ({"pure_draft_prefix_len": 0}, {"base_loss_weight": 0.0}),
    "long_pure_prefix": ({"pure_draft_prefix_len": 2, "shift_label": False}, {"base_loss_weight": 1.0}),
    "reduced_vocab": ({"draft_vocab_size": 9}, {}),
    "long_blocks_small_chunks": ({"block_size": 5}, {"loss_chunk_size": 3, "loss_decay": 1.5}),
}


def dspark_runtime(arch_changes: dict[str, Any] | None = None, **settings: Any) -> Any:
    heads = {
        "num_hidden_layers": 1,
        "sample_from_anchor": True,
        "markov_rank": 5,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    arch = make_block_arch(DSparkArchitecture, **heads | (arch_changes or {}))
    ids = PERMUTED_IDS if arch.has_vocab_map else None
    return make_block_runtime(arch, runtime_class=DSparkRuntime, config_class=DSparkDraftConfig, ids=ids, **settings)


def domino_runtime(arch_changes: dict[str, Any] | None = None, **settings: Any) -> Any:
    head = {"num_hidden_layers": 1, "shift_label": True, "emb_dim": 6, "gru_hidden_dim": 7, "pure_draft_prefix_len": 1}
    arch = make_block_arch(DominoArchitecture, **head | (arch_changes or {}))
    ids = PERMUTED_IDS if arch.has_vocab_map else None
    settings = {"base_loss_weight": 0.4, **settings}
    return make_block_runtime(arch, runtime_class=DominoRuntime, config_class=DominoDraftConfig, ids=ids, **settings)


def _compare(runtime: Any, naive_loss: Any, *, unused: tuple[str, ...] = ()) -> None:
    docs = make_documents(MASKS, runtime.spec.architecture)
    got = run_step(runtime, docs, [[0, 1, 2, 3, 4]], upstream=UPSTREAM)
    naive = NaiveBlocks(dict(runtime.module.named_parameters()), runtime.spec.architecture)
    policy = StubPolicy()
    loss, metrics = naive_loss(
        naive,
        docs,
        policy.embed.weight.detach(),
        policy.head.weight.detach(),
        anchors=[runtime._draws[i].anchors.tolist() for i in range(len(docs))],
        decay=runtime.cfg.loss_decay or 4.0,
        ids=None if runtime._vocab_ids is None else runtime._vocab_ids.tolist(),
    )
    (loss * UPSTREAM).backward()
    assert float(got.loss) == pytest.approx(float(loss.detach()), rel=1e-5)
    for name, w in naive.w.items():
        want = torch.zeros_like(w) if w.grad is None else w.grad
        torch.testing.assert_close(
            got.grads[name].double(), want, rtol=2e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}"
        )
        assert bool(want.abs().max() > 0) is not name.startswith(unused), name
    for name, (num, den) in metrics.items():
        assert got.metrics[name] == (pytest.approx(num, rel=1e-4, abs=1e-5), pytest.approx(den)), name
    own = {n for n in got.metrics if n not in COMMON and n.rsplit("_", 1)[0] not in FAMILIES}
    measured = {n for n in own if got.metrics[n][1] != 0}
    assert measured == set(metrics), "computed and not checked, or the reverse"


@pytest.mark.parametrize("case", DSPARK, ids=list(DSPARK))
def test_dspark_equals_the_naive_loop(case: str) -> None:
    changes, settings = DSPARK[case]
    runtime = dspark_runtime(changes, **settings)
    _compare(runtime, lambda *args, **kw: naive_dspark(*args, cfg=runtime.cfg, **kw))


@pytest.mark.parametrize("case", DOMINO, ids=list(DOMINO))
def test_domino_equals_the_naive_loop(case: str) -> None:
    changes, settings = DOMINO[case]
    runtime = domino_runtime(changes, **settings)
    share = runtime.cfg.base_loss_weight
    # With the whole loss on the uncorrected logits nothing trains the correction.
    unused = ("prefix_gru", "embed_proj") if share == 1.0 else ()
    _compare(runtime, lambda *args, **kw: naive_domino(*args, base_share=share, **kw), unused=unused or ("-",))
