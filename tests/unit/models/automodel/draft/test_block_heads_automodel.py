"""DSpark and Domino against nemo_automodel's trainers, on batches where both define the same thing.

Where they differ, and why: its Domino supervises labels behind a tool token and leaves out anchors whose block passes
the end of the row (the responses here are one run, the rows are padded); its Domino divides by the local sum of weights
(one micro-batch here); its DSpark accepts position 0 as anchor (it has no feature before it), weighs its diagnostics by
the decay (none here) and pools blocks in tau; both draw anchors from the global generator (all are taken here).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.models.automodel.draft.block_helpers import MASK
from tests.unit.models.automodel.draft.helpers import StepResult, StubPolicy, make_documents, run_step, to_batch
from tests.unit.models.automodel.draft.test_block_heads_reference import domino_runtime, dspark_runtime

UNIFORM = 1e9
"""Decay so slow that every element weighs the same."""


def _qwen3_config(arch: Any, **extra: Any) -> Any:
    from transformers import Qwen3Config

    config = Qwen3Config(
        hidden_size=arch.hidden_size,
        intermediate_size=arch.intermediate_size,
        num_hidden_layers=arch.num_hidden_layers,
        num_attention_heads=arch.num_attention_heads,
        num_key_value_heads=arch.num_key_value_heads,
        head_dim=arch.head_dim,
        vocab_size=arch.vocab_size,
        rms_norm_eps=arch.rms_norm_eps,
        max_position_embeddings=arch.max_position_embeddings,
        rope_theta=arch.rope["rope_theta"],
        attention_bias=False,
        layer_types=["full_attention"] * arch.num_hidden_layers,
    )
    for key, value in extra.items():
        setattr(config, key, value)
    config._attn_implementation = "sdpa"
    return config


def _load(theirs: torch.nn.Module, runtime: Any, **shared: Tensor) -> torch.nn.Module:
    missing, unexpected = theirs.float().load_state_dict(runtime.module.state_dict() | shared, strict=False)
    assert not unexpected
    assert all("rotary" in k for k in missing)
    return theirs


def _rows(docs: Any, arch: Any, *, spare: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, loss mask and features, padded by `spare` columns."""
    batch = to_batch(docs, width=max(len(d.tokens) for d in docs) + spare)
    features = torch.zeros(*batch["input_ids"].shape, arch.feature_size)
    for i, doc in enumerate(docs):
        features[i, : len(doc.tokens)] = doc.features
    return batch["input_ids"], batch["token_mask"], features


def _compare_gradients(ours: StepResult, theirs: torch.nn.Module) -> None:
    named = dict(theirs.named_parameters())
    for name, grad in ours.grads.items():
        torch.testing.assert_close(grad, named[name].grad, rtol=2e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
        assert float(grad.abs().max()) > 0, name


def _sum(metrics: dict[str, tuple[float, float]], family: str, part: int = 0) -> list[float]:
    return [metrics[f"{family}_{j}"][part] for j in range(1, 5)]


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("decay", [4.0, UNIFORM])
def test_dspark_equals_automodels_trainer(kind: str, decay: float) -> None:
    from nemo_automodel.components.speculative.dspark.core import DSparkTrainerModule
    from nemo_automodel.components.speculative.dspark.draft_qwen3 import Qwen3DSparkModel

    runtime = dspark_runtime({"markov_head_type": kind, "num_hidden_layers": 2}, loss_decay=decay)
    arch, policy = runtime.spec.architecture, StubPolicy()
    docs = make_documents(["0011111", "00111", "000110111", "0111111111"], arch)
    finals = [torch.randn(len(d.tokens), arch.hidden_size, generator=torch.Generator().manual_seed(i)) for i, d in
              enumerate(docs)]  # fmt: skip
    for doc, final in zip(docs, finals, strict=True):
        doc.logits = (final @ policy.head.weight.T).detach()
    ours = run_step(runtime, docs, [[0, 1], [2, 3]])

    model = Qwen3DSparkModel(
        _qwen3_config(
            arch,
            block_size=arch.block_size,
            mask_token_id=MASK,
            target_layer_ids=[i - 1 for i in arch.feature_ids],
            num_target_layers=5,
            num_anchors=64,
            markov_rank=arch.markov_rank,
            markov_head_type=kind,
            enable_confidence_head=True,
            confidence_head_with_markov=True,
        )
    )
    own = {"embed_tokens.weight": policy.embed.weight.detach(), "lm_head.weight": policy.head.weight.detach()}
    trainer = DSparkTrainerModule(_load(model, runtime, **own), loss_decay_gamma=decay)
    ids, mask, features = _rows(docs, arch, spare=0)
    last = torch.zeros(*ids.shape, arch.hidden_size)
    for i, final in enumerate(finals):
        last[i, : len(final)] = final
    theirs = trainer(ids, features, mask, last)
    theirs.loss.backward()

    assert float(ours.loss) == pytest.approx(float(theirs.loss.detach()), rel=2e-6)
    _compare_gradients(ours, model)
    assert _sum(ours.metrics, "accept_overlap") == pytest.approx(theirs.accept_rate_per_pos_num.tolist(), rel=1e-5)
    assert _sum(ours.metrics, "accept_overlap", 1) == theirs.accept_rate_per_pos_den.tolist()
    for name in ("ce", "l1", "confidence"):
        num, den = ours.metrics[f"loss_{name}"]
        assert num / den == pytest.approx(float(getattr(theirs, f"{name}_loss")), rel=1e-5)
    if decay == UNIFORM:
        errors = theirs.confidence_abs_error_num, theirs.confidence_bias_num
        assert sum(_sum(ours.metrics, "conf_abs_err")) == pytest.approx(float(errors[0]), rel=1e-5)
        assert sum(_sum(ours.metrics, "conf_bias")) == pytest.approx(float(errors[1]), rel=1e-4)
        prefix = sum(_sum(ours.metrics, "conf_prefix_bias"))
        assert prefix == pytest.approx(float(theirs.confidence_cumprod_bias_num), rel=1e-4)
        blocks = float(theirs.tau_den)
        pooled = 1.0 + sum(_sum(ours.metrics, "prefix_overlap")) / blocks
        assert pooled == pytest.approx(float(theirs.tau_num) / blocks, rel=1e-5)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("shift", "prefix"), [(True, 1), (True, 0), (False, 1), (False, 0)])
def test_domino_equals_automodels_trainer(shift: bool, prefix: int, share: float) -> None:
    from nemo_automodel.components.speculative.dflash.domino_core import DominoTrainerModule
    from nemo_automodel.components.speculative.dflash.draft_qwen3 import Qwen3DFlashDraftModel

    changes = {"shift_label": shift, "pure_draft_prefix_len": prefix, "num_hidden_layers": 2}
    runtime = domino_runtime(changes, loss_decay=3.0, base_loss_weight=share)
    arch, policy = runtime.spec.architecture, StubPolicy()
    docs = make_documents(["0011111", "00111", "0111111111"], arch)
    ours = run_step(runtime, docs, [[0, 1, 2]])

    projector = {
        "projector_type": "domino",
        "shift_label": shift,
        "pure_draft_prefix_len": prefix,
        "emb_dim": arch.emb_dim,
        "gru_hidden_dim": arch.gru_hidden_dim,
    }
    block = {
        "block_size": arch.block_size,
        "mask_token_id": MASK,
        "target_layer_ids": [i - 1 for i in arch.feature_ids],
    }
    model = Qwen3DFlashDraftModel(_qwen3_config(arch, num_target_layers=5, dflash_config=block | projector))
    trainer = DominoTrainerModule(
        _load(model, runtime),
        policy.head,
        policy.embed,
        mask_token_id=MASK,
        block_size=arch.block_size,
        attention_backend="sdpa",
        loss_decay_gamma=3.0,
        shift_label=shift,
    )
    ids, mask, features = _rows(docs, arch, spare=arch.block_size)
    theirs = trainer(ids, features, mask, lambda_base=share)
    theirs.loss.backward()

    assert float(ours.loss) == pytest.approx(float(theirs.loss.detach()), rel=2e-6)
    named = dict(model.named_parameters())
    for name, grad in ours.grads.items():
        want = torch.zeros_like(grad) if named[name].grad is None else named[name].grad
        torch.testing.assert_close(grad, want, rtol=2e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    for name in ("base", "final"):
        num, den = ours.metrics[f"loss_{name}"]
        assert num / den == pytest.approx(float(getattr(theirs, f"{name}_loss")), rel=1e-5)
    k = arch.num_predicted
    assert sum(ours.metrics[f"hit_{j}"][0] for j in range(1, k + 1)) == float(theirs.correct_tokens)
    assert sum(ours.metrics[f"hit_{j}"][1] for j in range(1, k + 1)) == float(theirs.valid_tokens)
