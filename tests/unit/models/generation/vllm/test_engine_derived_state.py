"""Drafts from whose weights vLLM computes something at load: an update must leave what a fresh engine would compute.

vLLM's own draft update leaves the projected placeholder of a parallel draft stale and breaks a block draft on CPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nemo_rl.models.generation.vllm.vllm_worker import VllmGenerationWorker, release_beside_another
from tests.unit.models.generation.vllm import counting_models as counting
from tests.unit.models.generation.vllm.conftest import Served, generation_config, make_worker, prompts

H, HEADS, KV, HEAD_DIM, INTERMEDIATE = (
    counting.HIDDEN,
    counting.HEADS,
    counting.KV_HEADS,
    counting.HEAD_DIM,
    counting.INTERMEDIATE,
)
DRAFT_VOCAB = 160
MASK_ID = 319
DATA = prompts(6, seed=41)


def _random(generator: torch.Generator) -> Callable[..., torch.Tensor]:
    return lambda *shape: torch.randn(*shape, generator=generator) * shape[-1] ** -0.5


def _write(directory: Path, config: dict, weights: counting.Weights) -> None:
    directory.mkdir(parents=True)
    counting.save(directory, weights)
    (directory / "config.json").write_text(json.dumps(config))


def _sizes(policy_dir: Path) -> dict:
    policy = json.loads((policy_dir / "config.json").read_text())
    return {
        "hidden_size": H,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": HEAD_DIM,
        "vocab_size": policy["vocab_size"],
        "max_position_embeddings": policy["max_position_embeddings"],
        "rms_norm_eps": policy["rms_norm_eps"],
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }


def _parallel_draft(directory: Path, policy_dir: Path, policy: counting.Weights, *, seed: int):
    """One pass over mask slots, reduced vocabulary, an own embedding that starts as the policy's."""
    weights = counting.write_counting_draft(directory.with_name(directory.name + "_base"), policy_dir)
    random = _random(torch.Generator().manual_seed(seed))
    weights = counting.perturbed(weights, seed=seed)
    weights["lm_head.weight"] = random(DRAFT_VOCAB, H)
    weights["embed_tokens.weight"] = policy["model.embed_tokens.weight"].clone()
    weights["mask_hidden"] = random(1, 3 * H)
    static = {"d2t": torch.arange(DRAFT_VOCAB, dtype=torch.int64)}  # offsets: draft id i is target id 2 i
    ids = list(counting.AUX_IDS)
    config = {
        **_sizes(policy_dir),
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": DRAFT_VOCAB,
        "mask_token_id": MASK_ID,
        "num_aux_hidden_states": 3,
        "eagle_aux_hidden_state_layer_ids": ids,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True},
    }
    _write(directory, config, {**weights, **static})
    return weights, {
        "method": "eagle3",
        "model": str(directory),
        "num_speculative_tokens": 3,
        "parallel_drafting": True,
    }


def _block_draft(directory: Path, policy_dir: Path, policy: counting.Weights, *, seed: int):
    """Two layers over a block of slots; its file holds a head and an embedding that nobody trains."""
    random = _random(torch.Generator().manual_seed(seed))
    weights = {"fc.weight": random(H, 2 * H), "hidden_norm.weight": 1 + random(1, H)[0], "norm.weight": torch.ones(H)}
    for i in range(2):
        layer = f"layers.{i}"
        weights |= {
            f"{layer}.self_attn.q_proj.weight": random(HEADS * HEAD_DIM, H),
            f"{layer}.self_attn.k_proj.weight": random(KV * HEAD_DIM, H),
            f"{layer}.self_attn.v_proj.weight": random(KV * HEAD_DIM, H),
            f"{layer}.self_attn.o_proj.weight": random(H, HEADS * HEAD_DIM),
            f"{layer}.self_attn.q_norm.weight": torch.ones(HEAD_DIM),
            f"{layer}.self_attn.k_norm.weight": 1 + 0.1 * random(1, HEAD_DIM)[0],
            f"{layer}.input_layernorm.weight": torch.ones(H),
            f"{layer}.post_attention_layernorm.weight": torch.ones(H),
            f"{layer}.mlp.gate_proj.weight": random(INTERMEDIATE, H),
            f"{layer}.mlp.up_proj.weight": random(INTERMEDIATE, H),
            f"{layer}.mlp.down_proj.weight": random(H, INTERMEDIATE),
        }
    vocab_size = policy["lm_head.weight"].shape[0]
    unused = {"lm_head.weight": random(vocab_size, H), "embed_tokens.weight": random(vocab_size, H)}
    config = {
        **_sizes(policy_dir),
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "block_size": 4,
        "dflash_config": {"mask_token_id": MASK_ID, "target_layer_ids": [0, 2]},
    }
    _write(directory, config, {**weights, **unused})
    return weights, {"method": "dflash", "model": str(directory), "num_speculative_tokens": 3}


def _derived(worker: VllmGenerationWorker) -> dict[str, torch.Tensor]:
    """What vLLM keeps besides the parameters, by name."""
    draft = worker._llm.collective_rpc("get_draft_model")[0]
    proposer = worker._llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.drafter
    holders = {
        "proposer": (proposer, ("parallel_drafting_hidden_state_tensor",)),
        "draft": (draft, ("mask_hidden", "draft_id_to_target_id")),
        "inner": (
            draft.model,
            ("_fused_kv_weight", "_k_norm_weights", "_hidden_norm_weight", "_rope_cos_sin_cache"),
        ),
    }
    return {
        f"{where}.{name}": getattr(holder, name).detach().clone()
        for where, (holder, names) in holders.items()
        for name in names
        if isinstance(getattr(holder, name, None), torch.Tensor)
    }


@pytest.mark.parametrize(
    ("write", "changes"),
    [
        (_parallel_draft, {"proposer.parallel_drafting_hidden_state_tensor", "draft.mask_hidden"}),
        (_block_draft, {"inner._fused_kv_weight", "inner._k_norm_weights", "inner._hidden_norm_weight"}),
    ],
    ids=["parallel", "block"],
)
def test_an_updated_engine_derives_what_a_fresh_one_does(
    served: Served, tmp_path: Path, write: Callable, changes: set[str]
) -> None:
    _, old_spec = write(tmp_path / "old", served.policy_dir, served.policy, seed=1)
    new, new_spec = write(tmp_path / "new", served.policy_dir, served.policy, seed=2)
    if "embed_tokens.weight" in new:
        new = {**new, "embed_tokens.weight": counting.perturbed(new, seed=3)["embed_tokens.weight"]}
        _rewrite(tmp_path / "new", new)
    workers = []
    for spec in (old_spec, new_spec):
        worker = make_worker(served.policy_dir, generation_config())
        worker.build(speculative_config=spec, trained_draft_tensors=tuple(new))
        workers.append(worker)
    updated, fresh = workers
    before, expected = _derived(updated), _derived(fresh)
    report = updated.update_weights(counting.make_payload(0, served.policy, new))
    assert report.num_checked == len(served.policy) + len(new)
    assert report.unchecked == ()
    fresh.update_weights(counting.make_payload(0, served.policy, new))  # the same weights again must change nothing

    after, again = _derived(updated), _derived(fresh)
    assert after.keys() == expected.keys() >= changes
    for name, tensor in expected.items():
        assert torch.equal(after[name], tensor), name
        assert torch.equal(again[name], tensor), name
    assert changes <= {name for name in after if not torch.equal(after[name], before[name])}
    a, b = updated.generate(DATA), fresh.generate(DATA)
    assert torch.equal(a["output_ids"], b["output_ids"])
    assert updated.spec_counters() == fresh.spec_counters()

    policy = updated._llm.collective_rpc("get_model")[0]
    draft = updated._llm.collective_rpc("get_draft_model")[0]
    for name, owner, target in (("lm_head", draft, policy), ("embed_tokens", draft.model, policy.model)):
        assert (getattr(owner, name) is getattr(target, name)) == (f"{name}.weight" not in new), name
    for worker in workers:
        release_beside_another(worker._llm)


def _rewrite(directory: Path, weights: counting.Weights) -> None:
    from safetensors.torch import load_file

    counting.save(directory, {**load_file(str(directory / "model.safetensors")), **weights})
