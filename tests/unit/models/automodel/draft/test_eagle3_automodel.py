"""The unrolled draft against nemo_automodel's trainer module, where both define the same thing."""

from __future__ import annotations

import pytest
import torch

from nemo_rl.models.automodel.draft.config import Eagle3DraftConfig
from tests.unit.models.automodel.draft.helpers import (
    StubPolicy,
    make_arch,
    make_documents,
    make_runtime,
    run_step,
    to_batch,
)

DEPTHS = 5


def _shift(x):
    return torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], dim=1)


@pytest.mark.parametrize(
    "changes", [{}, {"norm_output": True}, {"fc_norm": True}, {"norm_output": True, "fc_norm": True}], ids=str
)
def test_loss_gradients_and_prefix_hits_equal_automodels_trainer(changes):
    from nemo_automodel.components.speculative.eagle.core import Eagle3TrainerModule, simulated_accept_length
    from nemo_automodel.components.speculative.eagle.draft_llama import LlamaEagle3DraftModel
    from transformers import LlamaConfig

    # Automodel reads three features, and its mask rule is `input`.
    arch = make_arch(feature_ids=(1, 2, 4), **changes)
    cfg = Eagle3DraftConfig(enabled=True, ttt_steps=DEPTHS, mask_rule="input", loss_chunk_size=7)
    runtime = make_runtime(arch, cfg)
    docs = make_documents(["0001111111", "011111", "00110111", "1111"], arch)
    ours = run_step(runtime, docs, [[0, 1], [2, 3]])

    config = LlamaConfig(
        hidden_size=arch.hidden_size,
        intermediate_size=arch.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=arch.num_attention_heads,
        num_key_value_heads=arch.num_key_value_heads,
        head_dim=arch.head_dim,
        vocab_size=arch.vocab_size,
        rms_norm_eps=arch.rms_norm_eps,
        max_position_embeddings=arch.max_position_embeddings,
        rope_theta=arch.rope["rope_theta"],
        attention_bias=False,
        mlp_bias=False,
    )
    config.draft_vocab_size = arch.vocab_size
    config.target_hidden_size = arch.target_hidden_size
    config.num_aux_hidden_states = 3
    for key in ("fc_norm", "norm_output"):
        setattr(config, key, getattr(arch, key))
    draft = LlamaEagle3DraftModel(config).float()
    weights = {k if k == "lm_head.weight" else f"model.{k}": v for k, v in runtime.module.state_dict().items()}
    weights["model.embed_tokens.weight"] = StubPolicy().embed.weight.detach()
    missing, unexpected = draft.load_state_dict(weights, strict=False)
    assert not unexpected
    assert all("rotary" in k for k in missing)
    trainer = Eagle3TrainerModule(
        draft,
        selected_token_ids=torch.arange(arch.vocab_size),
        selected_token_mask=torch.ones(arch.vocab_size, dtype=torch.bool),
        ttt_steps=DEPTHS,
    )
    batch = to_batch(docs)
    ids = batch["input_ids"]
    attention = (torch.arange(ids.shape[1])[None] < batch["input_lengths"][:, None]).long()
    features = torch.zeros(*ids.shape, arch.feature_size)
    logits = torch.zeros(*ids.shape, arch.vocab_size)
    for i, doc in enumerate(docs):
        features[i, : len(doc.tokens)] = doc.features
        logits[i, : len(doc.tokens)] = doc.logits
    theirs = trainer(
        input_ids=_shift(ids),
        attention_mask=attention,
        loss_mask=_shift(batch["token_mask"]),
        aux_hidden_states=features,
        target_logits=_shift(logits),
    )
    theirs.loss.backward()

    assert float(ours.loss) == pytest.approx(float(theirs.loss), rel=2e-6)
    named = {k.removeprefix("model."): p for k, p in draft.named_parameters()}
    for name, grad in ours.grads.items():
        torch.testing.assert_close(grad, named[name].grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    hits = torch.tensor([ours.metrics[f"prefix_hit_{j}"][0] for j in range(1, DEPTHS + 1)])
    chains = torch.tensor([ours.metrics[f"prefix_hit_{j}"][1] for j in range(1, DEPTHS + 1)])
    torch.testing.assert_close(hits, theirs.step_prefix_hits.float())
    torch.testing.assert_close(chains, theirs.step_valid.float())
    from nemo_rl.models.automodel.draft import expected_acceptance_length

    expected = float(simulated_accept_length(theirs.step_prefix_hits, theirs.step_valid))
    assert expected_acceptance_length(ours.metrics, "hit") == pytest.approx(expected, rel=1e-6)
