"""The estimate against published parameter counts, hand-made sums, and how it must move with the settings."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nemo_rl.algorithms.config import MasterConfig
from nemo_rl.models.automodel.draft.registry import resolve_spec
from nemo_rl.utils.config import build_master_config
from nemo_rl.utils.memory_estimate import (
    ModelSizes,
    TrainingMemory,
    draft_memory,
    engine_memory,
    micro_batch_tokens,
    model_sizes,
    training_memory,
)
from tests.model_stubs import STUBS

GIB = 1 << 30


def stub(name: str) -> dict[str, Any]:
    return json.loads((STUBS / name.replace("/", "--") / "config.json").read_text(encoding="utf-8"))


def config(policy: dict[str, Any] | None = None, **cluster: Any) -> MasterConfig:
    tree = {"model_name": "Qwen/Qwen3-8B", "max_total_sequence_length": 1000, "train_micro_batch_size": 2}
    return build_master_config(
        {
            "policy": tree | (policy or {}),
            "cluster": {"device": "cuda", "gpus_per_node": 8} | cluster,
        }
    )


SIZES = ModelSizes(
    num_layers=4, hidden=8, vocab=100, kv_width=4, embedding=1600, layers=4000, experts=8000, layer_elements=50
)


def estimate(policy: dict[str, Any] | None = None, **cluster: Any) -> TrainingMemory:
    return training_memory(config(policy, **cluster), SIZES, device="cuda")


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # What the publisher's weight files sum up to.
        ("Qwen/Qwen3-8B", 8_190_735_360),
        ("Qwen/Qwen3-1.7B", 1_720_574_976),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", 30_532_122_624),
    ],
)
def test_parameters_of_published_models(name: str, parameters: int) -> None:
    sizes = model_sizes(stub(name))
    assert sizes is not None
    assert sizes.parameters == parameters


def test_active_parameters_of_a_mixture() -> None:
    sizes = model_sizes(stub("Qwen/Qwen3-30B-A3B-Instruct-2507"))
    assert sizes is not None
    active = sizes.parameters - sizes.experts + sizes.experts * 8 // 128
    assert 3.2e9 < active < 3.4e9  # "A3B": 3.3 B


def test_qwen2_has_biases_and_no_head_norms() -> None:
    text = stub("Qwen/Qwen3-8B") | {"num_hidden_layers": 1}
    three, two = model_sizes(text), model_sizes(text | {"model_type": "qwen2"})
    assert three is not None
    assert two is not None
    assert two.parameters - three.parameters == (4096 + 2 * 1024) - 2 * 128


def test_layers_without_experts_are_counted_as_such() -> None:
    text = stub("Qwen/Qwen3-30B-A3B-Instruct-2507")
    full, half = model_sizes(text), model_sizes(text | {"decoder_sparse_step": 2})
    plain = model_sizes(text | {"mlp_only_layers": list(range(0, 48, 2))})
    assert full is not None
    assert half is not None
    assert half.experts == full.experts // 2
    assert plain == half


@pytest.mark.parametrize("missing", ["hidden_size", "vocab_size", "num_attention_heads"])
def test_a_config_without_a_size_gives_no_estimate(missing: str) -> None:
    text = stub("Qwen/Qwen3-8B")
    del text[missing]
    assert model_sizes(text) is None


def test_state_is_sixteen_bytes_per_parameter_over_all_workers() -> None:
    got = estimate()
    assert got.weights + got.gradients + got.optimizer == 16 * (13600 // 8)
    assert estimate({"dtensor_cfg": {"cpu_offload": True}}).optimizer == 0
    assert estimate({"dtensor_cfg": {"tensor_parallel_size": 4}}).weights == got.weights


def test_tensor_and_expert_parallel_shrink_what_is_gathered() -> None:
    # Embedding and head, and three layers: 1000 numbers of a layer, 2000 of its experts.
    assert estimate().gathered == (1600 + 3 * (1000 + 2000)) * 2
    assert estimate({"dtensor_cfg": {"expert_parallel_size": 8}}).gathered == (1600 + 3 * (1000 + 250)) * 2
    assert estimate({"dtensor_cfg": {"tensor_parallel_size": 2}}).gathered == (800 + 3 * (500 + 2000)) * 2
    alone = training_memory(config({"precision": "float32"}, gpus_per_node=1), SIZES, device="cuda")
    assert alone.gathered == 0


def test_checkpointing_keeps_inputs_and_one_inside() -> None:
    tokens = 2000
    assert estimate().activations == 4 * tokens * 50 * 2
    checkpointed = estimate({"dtensor_cfg": {"activation_checkpointing": True}})
    assert checkpointed.activations == 4 * tokens * 8 * 2 + tokens * 50 * 2


def test_logits_and_their_chunks() -> None:
    assert estimate().logits == 2000 * 100 * (2 + 4 + 4)
    assert estimate({"logprob_chunk_size": 500}).logits == (2000 * 2 + 500 * 8) * 100


@pytest.mark.parametrize("block", ["sequence_packing", "dynamic_batching"])
def test_tokens_of_a_micro_batch(block: str) -> None:
    assert micro_batch_tokens(config()) == 2000
    assert micro_batch_tokens(config({block: {"enabled": True, "train_mb_tokens": 3000}})) == 3000


def draft_config(draft: dict[str, Any], k: int) -> MasterConfig:
    return config(
        {
            "draft": {"enabled": True} | draft,
            "generation": {"vllm_kwargs": {"speculative_config": {"num_speculative_tokens": k}}},
        }
    )


def resolve(cfg: MasterConfig, k: int) -> Any:
    return resolve_spec(
        cfg.policy.draft,
        policy_config=stub("Qwen/Qwen3-8B"),
        k=k,
        max_model_len=1000,
        dtype="bfloat16",
        needs_weights=False,
    )


def test_a_published_draft_has_the_published_number_of_parameters() -> None:
    directory = STUBS / "lmsys--SGLang-EAGLE3-Qwen3-30B-A3B-Instruct-2507-SpecForge-Nex"
    cfg = draft_config({"model_name": str(directory)}, 3)
    spec = resolve_spec(
        cfg.policy.draft,
        policy_config=stub("Qwen/Qwen3-30B-A3B-Instruct-2507"),
        k=3,
        max_model_len=1000,
        dtype="bfloat16",
        needs_weights=False,
    )
    assert round(draft_memory(cfg, spec, device="cuda").parameters / 1e6) == 183  # its card


def test_draft_state_features_and_freezing() -> None:
    cfg = draft_config({}, 3)
    got = draft_memory(cfg, resolve(cfg, 3), device="cuda")
    assert got.parameters == got.trained
    assert got.state == 16 * got.parameters // 8
    assert got.features == 2000 * 3 * 4096 * 2
    frozen = draft_config({"freeze": ["lm_head"]}, 3)
    part = draft_memory(frozen, resolve(frozen, 3), device="cuda")
    assert got.trained - part.trained == 151936 * 4096
    assert part.state == (4 * part.parameters + 12 * part.trained) // 8


def test_a_static_draft_adds_nothing_to_training() -> None:
    cfg = draft_config({"loss_weight": 0.0}, 3)
    got = draft_memory(cfg, resolve(cfg, 3), device="cuda")
    assert got.total == 0
    assert got.parameters > 0


@pytest.mark.parametrize(
    ("draft", "k", "positions"),
    [
        pytest.param({"ttt_steps": 5}, 3, 5 * 2000, id="eagle3-every-token-at-every-depth"),
        pytest.param({"algo": "eagle1"}, 3, 2000, id="eagle1-every-token"),
        pytest.param(
            {"algo": "peagle", "mask_token_id": 151669, "num_depths": 3, "down_sample_ratio": 0.5, "num_segments": 2},
            3,
            (2000 + 1000 + 500) // 2,
            id="peagle-what-the-drop-leaves",
        ),
        pytest.param(
            {"algo": "dflash", "mask_token_id": 151669, "num_anchors": 10}, 3, 2 * 10 * 4, id="dflash-slots-of-blocks"
        ),
    ],
)
def test_positions_of_a_draft(draft: dict[str, Any], k: int, positions: int) -> None:
    cfg = draft_config(draft | {"num_layers": 1}, k)
    got = draft_memory(cfg, resolve(cfg, k), device="cuda")
    inside = 4 * 4096 + 2 * 4096 + 2 * 1024 + 3 * 12288
    assert got.activations == positions * inside * 2


def test_engine_holds_weights_and_cache() -> None:
    cfg = config({"generation": {"vllm_cfg": {"tensor_parallel_size": 2, "gpu_memory_utilization": 0.5}}})
    sizes = model_sizes(stub("Qwen/Qwen3-8B"))
    assert sizes is not None
    got = engine_memory(cfg, sizes, spec=None, draft_parameters=0, device="cuda")
    assert got.weights == 8_190_735_360
    assert got.kv_bytes_per_token == 2 * 36 * 1024 * 2 // 2
    assert got.sequences(80 * GIB) == (40 * GIB - got.weights) // (1000 * got.kv_bytes_per_token)
    assert got.sequences(10 * GIB) == 0


def test_a_served_draft_takes_its_part_of_the_engine() -> None:
    cfg = draft_config({}, 3)
    spec, sizes = resolve(cfg, 3), model_sizes(stub("Qwen/Qwen3-8B"))
    assert sizes is not None
    with_draft = engine_memory(cfg, sizes, spec=spec, draft_parameters=1000, device="cuda")
    without = engine_memory(cfg, sizes, spec=None, draft_parameters=0, device="cuda")
    assert with_draft.weights - without.weights == 2000
    assert with_draft.kv_bytes_per_token - without.kv_bytes_per_token == 2 * 1024 * 2


def test_engine_on_cpu_has_a_cache_of_its_own_size() -> None:
    cfg = config({"precision": "float32"}, device="cpu")
    sizes = model_sizes(stub("Qwen/Qwen3-8B"))
    assert sizes is not None
    got = engine_memory(cfg, sizes, spec=None, draft_parameters=0, device="cpu")
    assert got.utilization is None
    assert got.cache == 64 << 20
