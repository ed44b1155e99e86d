"""What must agree between sections, and what the sections say together."""

from __future__ import annotations

from typing import Any

import pytest

from nemo_rl.algorithms.config import MasterConfig
from nemo_rl.errors import ConfigError
from nemo_rl.utils.config import build_master_config, merge

BASE: dict[str, Any] = {
    "policy": {"model_name": "m", "train_global_batch_size": 32},
    "grpo": {"num_prompts_per_step": 2},
}
SPEC = "policy.generation.vllm_kwargs.speculative_config"


def build(**changes: Any) -> MasterConfig:
    return build_master_config(merge(BASE, nested(changes)))


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        node = tree
        *parents, last = key.split("__")
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = value
    return tree


def draft(spec: Any, **changes: Any) -> dict[str, Any]:
    return {
        "policy__draft": {"enabled": True, **changes},
        "policy__generation__vllm_kwargs": {"speculative_config": spec},
    }


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        pytest.param(
            {"grpo__num_generations_per_prompt": 1, "policy__train_global_batch_size": 2},
            ["grpo.num_generations_per_prompt: got 1", ">= 2", "use_leave_one_out_baseline"],
            id="leave-one-out-of-one",
        ),
        pytest.param(
            {
                "grpo": {
                    "num_generations_per_prompt": 1,
                    "use_leave_one_out_baseline": False,
                    "use_dynamic_sampling": True,
                },
                "policy__train_global_batch_size": 2,
            },
            ["grpo.use_dynamic_sampling: got true", "at least 2 responses"],
            id="dynamic-sampling-of-one",
        ),
        pytest.param(
            {"grpo__stop_at_validation_metric": "accuracy"},
            ["grpo.stop_at_validation_threshold: got null", "set both or neither"],
            id="stop-without-threshold",
        ),
        pytest.param(
            {"grpo__advantage_clip_low": 1.0, "grpo__advantage_clip_high": -1.0},
            ["grpo.advantage_clip_low: got 1.0", "below grpo.advantage_clip_high (-1.0)"],
            id="advantage-clip",
        ),
        pytest.param(
            {"grpo__reward_scaling": {"enabled": True, "source_min": 1.0}},
            ["grpo.reward_scaling.source_min: got 1.0", "below source_max (1.0)"],
            id="reward-range",
        ),
        pytest.param(
            {"grpo__reward_shaping": {"enabled": True, "overlong_buffer_length": 600}},
            ["overlong_buffer_length: got 600", "max_response_length (512)"],
            id="overlong-buffer",
        ),
        pytest.param(
            {"loss_fn__truncated_importance_sampling_ratio": 2.0},
            ["truncated_importance_sampling_ratio: got 2.0", "Switch the correction on"],
            id="truncation-without-correction",
        ),
        pytest.param(
            {"loss_fn__force_on_policy_ratio": True, "policy__train_global_batch_size": 16},
            ["loss_fn.force_on_policy_ratio: got true", "train_global_batch_size: 16", "to 32"],
            id="forced-ratio",
        ),
        pytest.param(
            {"grpo__val_period": 0},
            ["checkpointing.metric_name: got 'val:accuracy'", "never validates"],
            id="metric-never-measured",
        ),
        pytest.param(
            {"policy__dynamic_batching__enabled": True, "policy__sequence_packing__enabled": True},
            ["policy.sequence_packing.enabled: got true", "at most one"],
            id="packing-and-dynamic",
        ),
        pytest.param(
            {"policy__sequence_packing": {"enabled": True, "train_mb_tokens": 100}},
            ["policy.sequence_packing.train_mb_tokens: got 100", ">= policy.max_total_sequence_length (512)"],
            id="packed-row-too-short",
        ),
        pytest.param(
            {"policy__train_global_batch_size": 24},
            ["policy.train_global_batch_size: got 24", "must divide", "(32)"],
            id="rollout-batch-does-not-split",
        ),
        pytest.param(
            {"policy__generation__top_p": 0.9}, ["policy.generation.top_p: got 0.9", "Use top_p: 1.0"], id="top-p"
        ),
        pytest.param(
            {"policy__generation__top_k": 5}, ["policy.generation.top_k: got 5", "Use top_k: null"], id="top-k"
        ),
        pytest.param(
            {"policy__generation__vllm_cfg__max_model_len": 100, "policy__generation__max_new_tokens": 100},
            ["vllm_cfg.max_model_len: got 100", ">= policy.max_total_sequence_length (512)"],
            id="engine-too-short",
        ),
        pytest.param(
            {"policy__generation__colocated__enabled": False, "cluster__gpus_per_node": 8},
            ["policy.generation.colocated.resources.gpus_per_node: got null", "from 1 to 7"],
            id="no-devices-for-generation",
        ),
        pytest.param(
            {"policy__generation__max_new_tokens": 1000},
            ["policy.generation.max_new_tokens: got 1000", "max_model_len (512)"],
            id="response-too-long",
        ),
        pytest.param(
            {"policy__megatron_cfg__enabled": True},
            ["policy.megatron_cfg.enabled: got True", "policy.dtensor_cfg"],
            id="megatron",
        ),
        pytest.param(
            {"policy__dtensor_cfg__enabled": False}, ["policy.dtensor_cfg.enabled: got False"], id="no-dtensor"
        ),
        pytest.param(
            {"data__dataset_name": "reasoning_gym", "env__name": "reasoning_gym"},
            ["data.reasoning_gym: got null", "must name the task"],
            id="task-not-named",
        ),
        pytest.param(
            {"env__name": "reasoning_gym"}, ["env.name: got 'reasoning_gym'", "'OpenMathInstruct-2'"], id="env-and-data"
        ),
        pytest.param(
            {"data__dataset_name": "ResponseDataset"}, ["data.train_data_path: got null", ".jsonl"], id="no-path"
        ),
        pytest.param(
            {"data__max_input_seq_length": 513}, ["data.max_input_seq_length: got 513", "(512)"], id="prompt-too-long"
        ),
        pytest.param(draft(None), [f"{SPEC}.num_speculative_tokens: got nothing", "from 1 to 7"], id="draft-without-k"),
        pytest.param(
            draft({"num_speculative_tokens": 0}), [f"{SPEC}.num_speculative_tokens: got 0", "from 1 to 7"], id="k-zero"
        ),
        pytest.param(
            draft({"num_speculative_tokens": 4}, ttt_steps=3),
            [f"{SPEC}.num_speculative_tokens: got 4", "from 1 to 3"],
            id="k-beyond-the-draft",
        ),
        pytest.param(
            draft({"num_speculative_tokens": True}), ["num_speculative_tokens: got True", "an integer"], id="k-bool"
        ),
        pytest.param(
            draft({"num_speculative_tokens": 3, "method": "ngram"}),
            [f"{SPEC}.method: got 'ngram'", "Remove the key"],
            id="other-method",
        ),
        pytest.param(
            draft({"num_speculative_tokens": 3, "model": "/another/draft"}, model_name="/the/draft"),
            [f"{SPEC}.model: got '/another/draft'", "policy.draft.model_name ('/the/draft')"],
            id="other-model",
        ),
        pytest.param(draft(3), [f"{SPEC}: got 3", "must be a mapping"], id="spec-not-a-mapping"),
        pytest.param(
            draft({"num_speculative_tokens": 0}, algo="eagle1"),
            [f"{SPEC}.num_speculative_tokens: got 0", "an integer >= 1", "Set it, e.g. to 3"],
            id="k-zero-of-a-draft-without-limit",
        ),
        pytest.param(
            draft({"num_speculative_tokens": 8}, algo="dflash", block_size=8),
            [f"{SPEC}.num_speculative_tokens: got 8", "from 1 to 7"],
            id="k-beyond-the-block",
        ),
        pytest.param(
            draft({"num_speculative_tokens": 3, "prompt_lookup_max": 3}),
            [f"{SPEC}.prompt_lookup_max: got 3", "an option of 'ngram'"],
            id="lookup-with-a-draft",
        ),
        pytest.param(
            draft({"num_speculative_tokens": 3, "speculative_token_tree": "[(0,)]"}),
            [f"{SPEC}.speculative_token_tree: got", "no draft tree"],
            id="tree",
        ),
        pytest.param(
            draft({"num_speculative_tokens": 3}, static=True),
            ["policy.draft.static: got true with policy.draft.model_name: null", "Set policy.draft.model_name"],
            id="static-without-draft",
        ),
        pytest.param(
            draft({"num_speculative_tokens": 3}, static=True, model_name="/d", train_every=2, freeze=["lm_head"]),
            ["policy.draft.static: got true with policy.draft.train_every, policy.draft.freeze", "is not trained"],
            id="static-with-training-keys",
        ),
        pytest.param(
            draft(None, serve=False, static=True, model_name="/d"),
            ["policy.draft.serve: got false with policy.draft.static: true", "does nothing"],
            id="static-and-not-served",
        ),
        pytest.param(
            draft(None, serve=False, loss_weight=0.0),
            ["policy.draft.serve: got false with policy.draft.loss_weight: 0", "does nothing"],
            id="neither-served-nor-trained",
        ),
        pytest.param(
            draft({"num_speculative_tokens": 3}, serve=False),
            [f"{SPEC}.method: got nothing", "no draft of policy.draft is served", "remove the block"],
            id="k-of-a-draft-that-is-not-served",
        ),
        pytest.param(
            {"policy__generation__vllm_kwargs": {"speculative_config": {"num_speculative_tokens": 3}}},
            [f"{SPEC}.method: got nothing", "'ngram'", "remove the block"],
            id="k-without-draft",
        ),
        pytest.param(
            {
                "policy__generation__vllm_kwargs": {
                    "speculative_config": {"method": "ngram", "num_speculative_tokens": 0}
                }
            },
            [f"{SPEC}.num_speculative_tokens: got 0", ">= 1"],
            id="static-k-zero",
        ),
        pytest.param(
            {"policy__draft__aux_layer_indices": [2, 1]},
            ["policy.draft.aux_layer_indices: got [2, 1]", "strictly increasing"],
            id="aux-unsorted",
        ),
        pytest.param(
            {"policy__draft__algo": "none-such"}, ["policy.draft.algo: got 'none-such'", "must be one of"], id="algo"
        ),
    ],
)
def test_conflict_names_key_value_allowed_and_remedy(changes: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        build(**changes)
    text = str(caught.value)
    assert all(part in text for part in parts), text
    assert "problems in" not in text, "one mistake, one message"


def test_all_conflicts_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        build(
            policy__generation__top_p=0.5,
            data__max_input_seq_length=9999,
            loss_fn__truncated_importance_sampling_ratio=2.0,
        )
    assert str(caught.value).startswith("3 problems in the configuration:")


def test_draft_is_served_with_the_method_it_needs() -> None:
    cfg = build(**draft({"num_speculative_tokens": 3}))
    assert cfg.policy.draft_enabled
    assert cfg.policy.generation.num_speculative_tokens == 3
    for method in cfg.policy.draft.serving_methods:
        same = build(**draft({"num_speculative_tokens": 3, "method": method}))
        assert same.policy.generation.speculative_config == {"num_speculative_tokens": 3, "method": method}


@pytest.mark.parametrize(
    "spec",
    [None, {"method": "ngram", "num_speculative_tokens": 5}, {"method": "suffix", "num_speculative_tokens": 9}],
    ids=["plain", "ngram", "suffix"],
)
def test_a_draft_that_is_not_served_leaves_speculation_to_the_user(spec: dict[str, Any] | None) -> None:
    """K is then no matter of the draft: neither needed nor bounded by it."""
    cfg = build(**draft(spec, serve=False, ttt_steps=3))
    assert cfg.policy.draft_enabled
    assert not cfg.policy.draft_served
    assert cfg.policy.generation.speculative_config == spec


def test_a_static_draft_needs_no_more_than_its_directory() -> None:
    cfg = build(**draft({"num_speculative_tokens": 3}, static=True, model_name="/d", loss_weight=0.0))
    assert cfg.policy.draft_served


def test_no_speculation_by_default() -> None:
    cfg = build()
    assert cfg.policy.generation.speculative_config is None
    assert cfg.policy.generation.num_speculative_tokens is None
    assert not cfg.policy.draft_enabled


@pytest.mark.parametrize(
    ("changes", "device", "workers", "data_parallel", "engines"),
    [
        pytest.param({}, "cpu", 1, 1, 1, id="cpu"),
        pytest.param({"cluster": {"gpus_per_node": 8}}, "cpu", 1, 1, 1, id="cpu-ignores-gpus"),
        pytest.param({"cluster": {"gpus_per_node": 8, "num_nodes": 2}}, "cuda", 16, 16, 16, id="cuda"),
        pytest.param({"policy__dtensor_cfg__num_workers": 2}, "cpu", 2, 2, 1, id="cpu-two-workers"),
        pytest.param(
            {
                "cluster": {"gpus_per_node": 8},
                "policy__dtensor_cfg": {"tensor_parallel_size": 2, "context_parallel_size": 2},
                "policy__generation__vllm_cfg__tensor_parallel_size": 4,
            },
            "cuda",
            8,
            2,
            2,
            id="model-parallel",
        ),
        pytest.param(
            {
                "cluster": {"gpus_per_node": 8},
                "policy__generation__colocated": {"enabled": False, "resources": {"gpus_per_node": 2}},
            },
            "cuda",
            6,
            6,
            2,
            id="own-gpus",
        ),
        pytest.param(
            {
                "cluster": {"gpus_per_node": 8, "num_nodes": 3},
                "policy__generation__colocated": {"enabled": False, "resources": {"num_nodes": 1}},
            },
            "cuda",
            16,
            16,
            8,
            id="own-nodes",
        ),
        pytest.param({"policy__generation__num_engines": 3}, "cpu", 1, 1, 3, id="engines-given"),
    ],
)
def test_workers_and_engines(changes: dict, device: str, workers: int, data_parallel: int, engines: int) -> None:
    cfg = build(**changes)
    assert cfg.num_policy_workers(device) == workers
    assert cfg.policy_data_parallel_size(device) == data_parallel
    assert cfg.num_generation_engines(device) == engines


def test_draft_seed_follows_the_run_unless_given() -> None:
    assert build(grpo__seed=5).draft_seed == 5
    assert build(grpo__seed=5, policy__draft__seed=0).draft_seed == 0
