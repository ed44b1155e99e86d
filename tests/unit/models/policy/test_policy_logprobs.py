"""Log-probabilities against transformers, the reference policy, and documents that share a row."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.unit.models.policy import scenarios
from tests.unit.models.policy.scenarios import TEMPERATURE, make_batch, make_config


def transformers_logprobs(model_dir, data):
    """One sample at a time, no padding, log_softmax in float64."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    out = torch.zeros(data["input_ids"].shape)
    for row, n in enumerate(data["input_lengths"].tolist()):
        ids = data["input_ids"][row, :n]
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0].double() / TEMPERATURE
        picked = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        out[row, 1:n] = picked.float()
    return out


PACKED = {"enabled": True, "train_mb_tokens": 56, "logprob_mb_tokens": 56, "sequence_length_round": 8}
DYNAMIC = {"enabled": True, "train_mb_tokens": 40, "logprob_mb_tokens": 40, "sequence_length_round": 8}
LAYOUTS = {
    "single": (1, 1, {}),
    "packed": (1, 1, {"sequence_packing": PACKED}),
    "dp2-dynamic": (2, 1, {"dynamic_batching": DYNAMIC}),
    "tp2": (2, 2, {"dtensor_cfg": {"tensor_parallel_size": 2}, "logprob_chunk_size": 5}),
}


@pytest.fixture(scope="module")
def data():
    return make_batch()


@pytest.fixture(scope="module")
def expected(model_dir, data):
    return transformers_logprobs(model_dir, data)


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_logprobs_equal_transformers(pools, model_dir, data, expected, layout):
    world, tp, overrides = LAYOUTS[layout]
    parts = pools[world].run(scenarios.logprobs, make_config(model_dir, **overrides), data)[::tp]
    got = torch.cat(parts)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    padding = torch.arange(got.shape[1])[None] >= data["input_lengths"][:, None]
    assert (got[padding] == 0).all()
    assert (got[:, 0] == 0).all()


@pytest.mark.parametrize("world", [1, 2])
def test_reference_stays_while_the_policy_moves(pools, model_dir, data, world):
    for out in pools[world].run(scenarios.reference_after_training, make_config(model_dir), data):
        assert torch.equal(out["reference_0"], out["policy_0"])
        assert torch.equal(out["reference_1"], out["reference_0"])
        assert torch.equal(out["reference_2"], out["reference_0"])
        assert (out["policy_1"] - out["policy_0"]).abs().max() > 1e-3
        assert out["restored"].all()


def test_packed_documents_do_not_see_each_other(pools, model_dir, data):
    """Replacing every token of one document leaves the log-probabilities of all others bit-identical."""
    config = make_config(model_dir, sequence_packing=PACKED)
    before = pools[1].run(scenarios.logprobs, config, data)[0]
    for victim in (0, 4):
        changed = data.select_indices(range(data.size))
        n = int(changed["input_lengths"][victim])
        changed["input_ids"] = changed["input_ids"].clone()
        changed["input_ids"][victim, :n] = (changed["input_ids"][victim, :n] + 101) % 256
        after = pools[1].run(scenarios.logprobs, config, changed)[0]
        others = [i for i in range(data.size) if i != victim]
        assert torch.equal(after[others], before[others])
        assert (after[victim] - before[victim]).abs().max() > 0.1


def test_padding_content_does_not_matter(pools, model_dir, data):
    changed = data.select_indices(range(data.size))
    padding = torch.arange(24)[None] >= data["input_lengths"][:, None]
    changed["input_ids"] = torch.where(padding, 77, data["input_ids"])
    before, after = (pools[1].run(scenarios.logprobs, make_config(model_dir), d)[0] for d in (data, changed))
    assert torch.equal(before, after)


def write_family(family, directory) -> str:
    """A random policy of another family, as transformers saves it."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    sizes = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.15,
    }
    torch.manual_seed(0)
    if family == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**sizes, tie_word_embeddings=True))
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)
    model.float().save_pretrained(directory)
    return str(directory)


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_other_families(pools, data, tmp_path, family):
    """Packed log-probabilities and the weight stream of the families that nemo_automodel implements itself."""
    directory = write_family(family, tmp_path / family)
    config = make_config(directory, sequence_packing=PACKED)
    got = pools[1].run(scenarios.logprobs, config, data)[0]
    torch.testing.assert_close(got, transformers_logprobs(directory, data), rtol=1e-5, atol=1e-5)
    payload = pools[1].run(scenarios.gather, config)[0]
    stored = load_file(tmp_path / family / "model.safetensors")
    assert set(payload.tensors) == set(stored) | {"lm_head.weight"}
    assert all(torch.equal(torch.from_numpy(payload.tensors[name]), t) for name, t in stored.items())
