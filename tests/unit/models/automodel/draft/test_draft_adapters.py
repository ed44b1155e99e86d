"""Published layouts: round trips, dialects, and everything that must not be guessed."""

from __future__ import annotations

import copy
import json

import pytest

from nemo_rl.errors import CheckpointError, ConfigError
from nemo_rl.models.automodel.draft.adapters.base import Verifier
from nemo_rl.models.automodel.draft.adapters.eagle3 import Eagle3Adapter
from nemo_rl.models.automodel.draft.adapters.fields import flat_rope
from nemo_rl.models.automodel.draft.adapters.names import check_tensor_shapes, normalize_names
from nemo_rl.models.automodel.draft.architecture import Eagle3Architecture
from tests.unit.models.automodel.draft.helpers import make_arch

ADAPTER = Eagle3Adapter()
VERIFIER = Verifier("p", ("Qwen3ForCausalLM",))
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS = [
    {},
    {"norm_before_residual": True, "norm_output": True, "fc_norm": True},
    {"norm_before_fc": True, "feature_ids": (1, 2, 3, 4)},
    {"draft_vocab_size": 9, "num_hidden_layers": 2, "layer_family": "qwen3"},
    {"rope": LLAMA3},
    {"hidden_size": 8, "extra": {"foo": 1, "nested": {"bar": [2]}}},
]


def _arch(raw) -> Eagle3Architecture:
    source = ADAPTER.read_config(raw)
    return Eagle3Architecture(**source.fields, feature_ids=source.feature_ids)


@pytest.mark.parametrize("changes", VARIANTS, ids=lambda c: "-".join(c) or "plain")
def test_native_config_round_trip(changes):
    arch = make_arch(**changes)
    raw = json.loads(json.dumps(ADAPTER.write_config(arch, dtype="float32")))
    assert _arch(raw) == arch
    assert ADAPTER.write_config(_arch(raw), dtype="float32") == raw
    ids = list(arch.feature_ids)
    assert raw["eagle_aux_hidden_state_layer_ids"] == raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == ids
    assert raw["num_aux_hidden_states"] == len(ids)
    assert raw["rope_theta"] == raw["rope_parameters"]["rope_theta"]
    for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "head_dim", "draft_vocab_size"):
        assert raw[key] == getattr(arch, key)
    assert not ADAPTER.read_config(raw).is_norm_output_ambiguous


@pytest.mark.parametrize("changes", VARIANTS, ids=lambda c: "-".join(c) or "plain")
def test_speculators_config_round_trip(changes):
    arch = make_arch(**changes)
    raw = json.loads(json.dumps(ADAPTER.write_speculators(arch, dtype="float32", k=3, verifier=VERIFIER)))
    assert ADAPTER.read_config(raw).publisher == "speculators"
    assert _arch(raw) == arch


def test_the_engine_reads_the_speculators_config_as_we_do():
    """The engine's own translation of the format, where it is installed."""
    configs = pytest.importorskip("vllm.transformers_utils.configs.speculators.base")
    arch = make_arch(norm_output=True, draft_vocab_size=9, feature_ids=(1, 2, 4))
    raw = ADAPTER.write_speculators(arch, dtype="float32", k=3, verifier=VERIFIER)
    engine = configs.SpeculatorsConfig.extract_transformers_pre_trained_config(copy.deepcopy(raw))
    for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "draft_vocab_size", "head_dim"):
        assert engine[key] == getattr(arch, key)
    assert engine["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]
    assert engine["architectures"] == ["Eagle3LlamaForCausalLM"]
    # The engine sizes the projection by this number; the ids alone are not counted.
    assert engine["num_aux_hidden_states"] == 3
    absent = {k: v for k, v in raw.items() if k != "norm_before_residual"}
    engine = configs.SpeculatorsConfig.extract_transformers_pre_trained_config(copy.deepcopy(absent))
    assert engine["norm_before_residual"] is ADAPTER.read_config(absent).fields["norm_before_residual"] is True


def _native(**changes):
    raw = ADAPTER.write_config(make_arch(), dtype="float32")
    del raw["nemo_rl_draft"]
    raw |= changes
    return {k: v for k, v in raw.items() if v != "absent"}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"architectures": ["DFlashDraftModel"]}, r"architectures \['DFlashDraftModel'\].*another algorithm"),
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": "absent"}, "another algorithm"),
        ({"architectures": "absent"}, "architectures None"),
        ({"speculators_model_type": "peagle"}, "speculators_model_type 'peagle'"),
        ({"speculators_model_type": "eagle3"}, "transformer_layer_config"),
        ({"rope_theta": "absent", "rope_parameters": "absent"}, "neither rope_theta nor rope_parameters.rope_theta"),
        ({"rope_theta": 5.0}, r"'rope_theta' is 5.0 and 10000.0"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0}}, "rope_type is 'dynamic'"),
        ({"hidden_size": "absent"}, r"lacks \['hidden_size'\]"),
        ({"rms_norm_eps": None, "vocab_size": None}, r"lacks \['rms_norm_eps', 'vocab_size'\]"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"mlp_bias": True}, "mlp_bias is true"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"parallel_drafting": True}, "P-EAGLE"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is False"),
        ({"eagle_config": {"use_last_layernorm": False}}, "use_last_layernorm is False"),
        ({"eagle_config": {"use_input_layernorm_in_first_layer": False}}, "use_input_layernorm_in_first_layer"),
        ({"eagle_config": {"parallel_draft_step": 4}}, "parallel_draft_step is 4; the engine has no such heads"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "use_mtp_layernorm is True"),
        ({"eagle_config": {"next_layer_regular": False}}, "next_layer_regular is False"),
        ({"eagle_config": [1]}, r"eagle_config \[1\]; must be an object"),
        ({"draft_vocab_size": 0}, "draft_vocab_size 0; must be an integer from 1"),
        ({"hidden_size": -12}, "hidden_size -12; must be an integer from 1"),
        ({"vocab_size": 10**18}, "vocab_size 1000000000000000000; must be an integer from 1"),
        ({"num_hidden_layers": True}, "num_hidden_layers True; must be an integer"),
        ({"num_attention_heads": "4"}, "num_attention_heads '4'; must be an integer"),
        ({"norm_output": "yes"}, "norm_output 'yes'; must be true or false"),
        ({"num_aux_hidden_states": 3}, r"after layers \[1, 3\] and counts .*'num_aux_hidden_states': 3"),
        ({"eagle_aux_hidden_state_layer_ids": [1, "3"]}, "must be a list of integers from 0"),
        ({"is_causal": False}, "is_causal is false"),
        ({"qkv_bias": True}, "qkv_bias is true"),
        ({"logit_scale": 0.5}, "logit_scale is 0.5"),
        ({"layer_types": ["sliding_attention"]}, r"layer_types \['sliding_attention'\]"),
        ({"use_sliding_window": True}, "use_sliding_window true"),
        ({"target_layer_ids": [5, 6]}, "names other layers in target_layer_ids"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}, r"\[1, 3\] at top level and \[1, 2\]"),
        ({"norm_before_fc": True, "eagle_config": {"norm_before_fc": False}}, "norm_before_fc is True at top level"),
    ],
)
def test_configs_that_cannot_be_used_name_the_field(changes, match):
    with pytest.raises(ConfigError, match=f"policy.draft.model_name.*{match}"):
        ADAPTER.read_config(_native(**changes))


@pytest.mark.parametrize(
    ("rope", "match"),
    [
        ({**LLAMA3, "high_freq_factor": None}, r"of type llama3 lacks \['high_freq_factor'\]"),
        ({**LLAMA3, "high_freq_factor": 1.0}, "low_freq_factor 1.0; must be below high_freq_factor"),
        ({**LLAMA3, "factor": "8"}, "factor '8'; must be a finite number"),
        ({**LLAMA3, "factor": -8.0}, "factor -8.0; must be above 0"),
        ({**LLAMA3, "original_max_position_embeddings": 0}, "original_max_position_embeddings 0"),
        ({**LLAMA3, "type": "yarn"}, "rope_type 'llama3' and type 'yarn'"),
        ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}, r"lacks \['original_max_position_embeddings'\]"),
        ({"rope_type": "linear", "rope_theta": 1e4}, r"lacks \['factor'\]"),
        ({"rope_theta": 0.0}, "rope_theta 0.0; must be a number above 1"),
        ({"rope_theta": float("nan")}, "rope_theta nan; must be a finite number"),
        ({"rope_theta": 1e4, "partial_rotary_factor": 1.5}, "partial_rotary_factor 1.5; must be above 0"),
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.4}, "3 channels are rotated"),
        ({"rope_theta": 1e4, "rope_dim": 4}, "'rope_dim' 4 in its RoPE table"),
        ({"sliding_attention": {"rope_theta": 1e4}}, "one for full_attention is needed"),
        ([1], r"rope_parameters \[1\]; must be an object"),
    ],
)
def test_tables_of_positions_that_say_too_little_or_nonsense(rope, match):
    with pytest.raises(ConfigError, match=f"policy.draft.model_name.*{match}"):
        ADAPTER.read_config(_native(rope_theta="absent", rope_parameters=rope))


def test_two_tables_that_contradict_each_other_are_refused():
    with pytest.raises(ConfigError, match=r"'factor' is 8.0 and 4.0"):
        ADAPTER.read_config(
            _native(rope_theta="absent", rope_scaling={**LLAMA3, "factor": 4.0}, rope_parameters=LLAMA3)
        )


def test_ids_inside_eagle_config_alone_are_read():
    raw = _native(eagle_aux_hidden_state_layer_ids="absent")
    assert ADAPTER.read_config(raw).feature_ids == (1, 3)
    raw = _native(eagle_aux_hidden_state_layer_ids="absent", eagle_config="absent")
    assert ADAPTER.read_config(raw).feature_ids is None


def test_norm_output_of_a_foreign_native_draft_is_ambiguous():
    assert ADAPTER.read_config(_native(norm_output=True)).is_norm_output_ambiguous
    assert not ADAPTER.read_config(
        _native(norm_output=True, architectures=["LlamaEagle3DraftModel"])
    ).is_norm_output_ambiguous


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"rope_theta": 1e6}, {"rope_type": "default", "rope_theta": 1e6}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, {"rope_type": "default", "rope_theta": 1e6}),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {"rope_type": "default", "mrope_section": [1, 2, 3]}},
            {"rope_type": "default", "rope_theta": 1e4},
        ),
        (
            {"rope_theta": 1e4, "partial_rotary_factor": 0.25},
            {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        ),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                }
            },
            {"rope_type": "default", "rope_theta": 1e6},
        ),
    ],
    ids=["old", "new", "legacy_scaling", "multimodal", "partial", "per_layer_type"],
)
def test_rope_schemas_become_one_flat_table(raw, expected):
    assert flat_rope(raw, key="k") == expected


NAMES = [*sorted(make_arch(draft_vocab_size=9).trained_shapes()), "d2t", "t2d"]


@pytest.mark.parametrize(
    "rename",
    [
        lambda n: n,
        lambda n: n.replace("layers.0.", "midlayer."),
        lambda n: n if n in ("lm_head.weight", "d2t", "t2d") else f"model.{n}",
        lambda n: "eagle_module." + n.replace("layers.0.", "midlayer."),
        lambda n: "draft.module.model." + n,
        lambda n: n.replace("d2t", "draft_id_to_target_id"),
    ],
    ids=["canonical", "midlayer", "model", "eagle_module", "wrapped", "engine_table"],
)
def test_dialects_normalise_to_one_set(rename):
    result = normalize_names([*(rename(n) for n in NAMES), "model.layers.0.self_attn.rotary_emb.inv_freq"])
    assert sorted(result.canonical) == sorted(NAMES)
    assert all(rename(n) == stored for n, stored in result.canonical.items())
    assert len(result.dropped) == 1


def test_two_names_of_one_tensor_are_refused():
    with pytest.raises(CheckpointError, match=r"midlayer.x.weight and layers.0.x.weight are the same one"):
        normalize_names(["midlayer.x.weight", "layers.0.x.weight"])


@pytest.mark.parametrize(
    "name", ["enorm.weight", "decoder.layers.0.mlp.linear_fc1.weight", "layers.0.pre_fc_norm_hidden.weight"]
)
def test_names_of_megatron_are_refused(name):
    with pytest.raises(CheckpointError, match="Export the draft to the Hugging Face layout first"):
        normalize_names([name])


@pytest.mark.parametrize("name", ["layers.0.self_attn.qkv_proj.weight", "midlayer.mlp.gate_up_proj.weight"])
def test_fused_projections_are_refused(name):
    with pytest.raises(CheckpointError, match="is fused"):
        normalize_names([name])


def test_every_difference_of_the_key_set_is_listed():
    arch = make_arch(draft_vocab_size=9)
    good = {**arch.trained_shapes(), **arch.frozen_shapes()}
    check_tensor_shapes(good, arch)
    check_tensor_shapes({**good, "embed_tokens.weight": (23, 12)}, arch)
    check_tensor_shapes({k: v for k, v in good.items() if k not in ("lm_head.weight", "t2d")}, arch)
    bad = {k: v for k, v in good.items() if k not in ("fc.weight", "norm.weight")}
    bad |= {"layers.7.x": (1,), "lm_head.weight": (9, 13)}
    with pytest.raises(CheckpointError) as err:
        check_tensor_shapes(bad, arch)
    text = str(err.value)
    assert "2 missing: ['fc.weight', 'norm.weight']" in text
    assert "1 unexpected: ['layers.7.x']" in text
    assert "lm_head.weight has shape [9, 13], [9, 12] needed" in text
    with pytest.raises(CheckpointError, match="proposes in parallel"):
        check_tensor_shapes({**good, "mask_hidden": (1, 24)}, arch)
