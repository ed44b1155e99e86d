"""DFlash against a naive float64 loop and against nemo_automodel's trainer: loss, every gradient, every metric."""

from __future__ import annotations

import pytest
import torch

from tests.unit.models.automodel.draft.block_helpers import PERMUTED_IDS, make_block_arch, make_block_runtime
from tests.unit.models.automodel.draft.block_reference import NaiveBlocks, candidates, naive_dflash
from tests.unit.models.automodel.draft.helpers import StubPolicy, make_documents, run_step, to_batch

MASKS = ["0011111", "00111", "000110111", "11", "0000"]
"""A plain response, a short one, one with a tool token inside, one that is all response, one without a response."""

CASES = {
    "default": ({}, {}),
    "one_layer": ({"num_hidden_layers": 1}, {}),
    "causal": ({"causal": True}, {}),
    "blocks_of_two": ({"block_size": 2}, {}),
    "long_blocks": ({"block_size": 6}, {"loss_decay": 1.5}),
    "teacher_argmax": ({}, {"label": "teacher_argmax"}),
    "soft": ({}, {"label": "soft"}),
    "reduced_vocab": ({"draft_vocab_size": 9}, {}),
    "reduced_vocab_teacher_argmax": ({"draft_vocab_size": 9}, {"label": "teacher_argmax"}),
    "reduced_vocab_soft": ({"draft_vocab_size": 9}, {"label": "soft"}),
    "two_anchors": ({}, {"num_anchors": 2}),
    "small_chunks": ({}, {"loss_chunk_size": 3}),
}


def _drawn(runtime, docs):
    return [runtime._draws[i].anchors.tolist() for i in range(len(docs))]


@pytest.mark.parametrize("case", CASES, ids=list(CASES))
def test_loss_gradients_and_metrics_equal_the_naive_loop(case):
    arch_changes, settings = CASES[case]
    arch = make_block_arch(**arch_changes)
    ids = PERMUTED_IDS if arch.has_vocab_map else None
    runtime = make_block_runtime(arch, ids=ids, **settings)
    docs = make_documents(MASKS, arch)
    upstream = -1.7

    got = run_step(runtime, docs, [[0, 1, 2, 3, 4]], upstream=upstream)

    anchors = _drawn(runtime, docs)
    for doc, drawn in zip(docs, anchors, strict=True):
        assert set(drawn) <= set(candidates(doc))
        assert len(drawn) == min(len(candidates(doc)), runtime.cfg.num_anchors)
    naive = NaiveBlocks(dict(runtime.module.named_parameters()), arch)
    policy = StubPolicy()
    loss, metrics = naive_dflash(
        naive,
        docs,
        policy.embed.weight.detach(),
        policy.head.weight.detach(),
        anchors=anchors,
        decay=settings.get("loss_decay", 4.0),
        label=runtime.cfg.label,
        ids=ids,
    )
    (loss * upstream).backward()
    assert float(got.loss) == pytest.approx(float(loss.detach()), rel=1e-5)
    for name, w in naive.w.items():
        torch.testing.assert_close(
            got.grads[name].double(), w.grad, rtol=2e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}"
        )
        assert w.grad.abs().max() > 0, name
    for name, (num, den) in metrics.items():
        assert got.metrics[name] == (pytest.approx(num, rel=1e-4, abs=1e-5), pytest.approx(den)), name
    assert got.metrics["loss"] == (pytest.approx(float(got.loss), rel=1e-6), pytest.approx(1.0))
    unread = {n for n in got.metrics if n not in metrics and got.metrics[n][1] != 0}
    assert unread == {"loss"}


AUTOMODEL_MASKS = ["0011111", "00111", "01111111", "0000"]


@pytest.mark.parametrize("changes", [{}, {"block_size": 6}], ids=str)
def test_loss_gradients_and_hits_equal_automodels_trainer(changes):
    """Where both define the same thing. They differ, and the engine sides with ours, in that automodel

    * supervises every sampled token behind an anchor, also across a token that was not sampled (no tool token here);
    * takes anchors whose block fits the row, drawn from the global generator per row (wide rows and all anchors here),
      the last token of a response among them, which predicts nothing;
    * takes position 0 as an anchor, which has no context (prompts here);
    * divides by the weights of the micro-batch (one micro-batch here), and raises without an anchor.
    """
    from nemo_automodel.components.speculative.dflash.core import DFlashTrainerModule
    from nemo_automodel.components.speculative.dflash.draft_qwen3 import Qwen3DFlashDraftModel
    from transformers import Qwen3Config

    arch = make_block_arch(**changes)
    runtime = make_block_runtime(arch, loss_chunk_size=7)
    docs = make_documents(AUTOMODEL_MASKS, arch)
    ours = run_step(runtime, docs, [[0, 1, 2, 3]])

    config = Qwen3Config(
        **{
            key: getattr(arch, key)
            for key in (
                "hidden_size",
                "intermediate_size",
                "num_hidden_layers",
                "num_attention_heads",
                "num_key_value_heads",
                "head_dim",
                "rms_norm_eps",
                "vocab_size",
                "max_position_embeddings",
            )
        },
        rope_parameters=dict(arch.rope),
        attention_bias=False,
        attn_implementation="sdpa",
        dflash_config={"target_layer_ids": [i - 1 for i in arch.feature_ids], "mask_token_id": arch.mask_token_id},
        num_target_layers=5,
        block_size=arch.block_size,
    )
    draft = Qwen3DFlashDraftModel(config).float()
    missing, unexpected = draft.load_state_dict(runtime.module.state_dict(), strict=False)
    assert not unexpected
    assert all("rotary" in name for name in missing)
    policy = StubPolicy()
    trainer = DFlashTrainerModule(
        draft,
        policy.head,
        policy.embed,
        mask_token_id=arch.mask_token_id,
        block_size=arch.block_size,
        attention_backend="sdpa",
        num_anchors=1000,
        loss_decay_gamma=4.0,
    )
    batch = to_batch(docs, width=max(len(d.tokens) for d in docs) + arch.block_size)
    features = torch.zeros(*batch["input_ids"].shape, arch.feature_size)
    for i, doc in enumerate(docs):
        features[i, : len(doc.tokens)] = doc.features
    theirs = trainer(input_ids=batch["input_ids"], hidden_states=features, loss_mask=batch["token_mask"])
    theirs.loss.backward()

    assert float(ours.loss) == pytest.approx(float(theirs.loss.detach()), rel=2e-6)
    named = dict(draft.named_parameters())
    for name, grad in ours.grads.items():
        torch.testing.assert_close(grad, named[name].grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    hits = [ours.metrics[f"hit_{j}"] for j in range(1, arch.block_size)]
    assert sum(num for num, _ in hits) == float(theirs.correct_tokens)
    assert sum(den for _, den in hits) == float(theirs.valid_tokens)
