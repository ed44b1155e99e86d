"""Every published layout of autoregressive drafts is read exactly and written back; the publishers' libraries agree.

The libraries are imported by the fixtures of one module, so that one process pays for them once.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from nemo_rl.errors import ConfigError
from nemo_rl.models.automodel.draft.adapters.fields import EXPORT_MARK
from nemo_rl.models.automodel.draft.adapters.names import normalize_names
from nemo_rl.models.automodel.draft.architecture import DraftArchitecture
from nemo_rl.models.automodel.draft.builders import load_tensors
from nemo_rl.models.automodel.draft.registry import DRAFT_ALGORITHMS, adapter_of, algorithm_of, resolve_spec
from nemo_rl.models.automodel.draft.spec import DraftSpec
from tests.unit.models.automodel.draft import published_autoregressive as published
from tests.unit.models.automodel.draft.published_autoregressive import (
    DEPTHS,
    IDS,
    LLAMA3,
    MASK,
    MAX_MODEL_LEN,
    POLICY,
    PUBLISHED,
    VERIFIER,
    VOCAB,
    Published,
    random_tensors,
)
from tests.unit.models.automodel.draft.reference import Document, NaiveEagle3

ALGORITHMS = ("eagle1", "eagle3", "peagle")


def resolve(draft: Published, directory: Path, *, k: int | None = 3, **changes: Any) -> DraftSpec:
    cfg = draft.cfg(directory, **changes)
    return resolve_spec(cfg, policy_config=POLICY, k=k, max_model_len=MAX_MODEL_LEN, dtype="float32")


def read(algo: str, raw: dict[str, Any]) -> DraftArchitecture:
    adapter = adapter_of(algo)
    source = adapter.read_config(json.loads(json.dumps(raw)))
    return adapter.architecture(**source.fields, feature_ids=source.feature_ids or ())


def written(algo: str, arch: DraftArchitecture, layout: str) -> dict[str, Any]:
    adapter = adapter_of(algo)
    if layout == "native":
        return adapter.write_config(arch, dtype="float32")
    return adapter.write_speculators(arch, dtype="float32", k=3, verifier=VERIFIER)


# -- every layout ----------------------------------------------------------------------------------------------------


@pytest.fixture(params=PUBLISHED)
def draft(request: pytest.FixtureRequest) -> Published:
    return PUBLISHED[request.param]()


def test_one_algorithm_recognises_it(draft: Published) -> None:
    assert algorithm_of(draft.config) == draft.algo
    assert adapter_of(draft.algo).read_config(draft.config).publisher == draft.publisher


def test_it_is_read_as_the_draft_that_it_is(draft: Published, tmp_path: Path) -> None:
    spec = resolve(draft, draft.write(tmp_path))
    arch = spec.architecture
    assert dataclasses.replace(arch, extra={}) == draft.architecture
    assert arch.extra == draft.extra
    assert spec.vocab_ids == draft.ids
    tensors = load_tensors(tmp_path, arch, trust_pickle=False)
    assert tensors.keys() - {"embed_tokens.weight", "d2t", "t2d"} == draft.canonical.keys() - {
        "embed_tokens.weight",
        "d2t",
        "t2d",
    }
    wanted = draft.canonical if "t2d" in tensors else {k: v for k, v in draft.canonical.items() if k != "t2d"}
    for name, tensor in wanted.items():
        assert torch.equal(tensors[name], tensor), name


def test_both_layouts_of_an_export_say_the_same(draft: Published, tmp_path: Path) -> None:
    """Unknown fields included; where a source speaks of its layers in a block, a flat layout has that on top."""
    draft.config["foo"] = {"bar": [1, None]}
    arch = resolve(draft, draft.write(tmp_path)).architecture
    assert arch.extra["foo"] == {"bar": [1, None]}
    flat = dict(arch.extra)
    flat = dict(flat.pop("transformer_layer_config", {})) | flat
    raw = written(draft.algo, arch, "native")
    assert algorithm_of(raw) == draft.algo
    assert read(draft.algo, raw) == dataclasses.replace(arch, extra=flat)
    assert EXPORT_MARK in raw
    assert "auto_map" not in raw
    if draft.algo == "eagle1" or (draft.algo == "peagle" and draft.architecture.fc_norm):
        with pytest.raises(ConfigError, match=r"policy.draft.export_layouts: got speculators"):
            written(draft.algo, arch, "speculators")
        return
    raw = written(draft.algo, arch, "speculators")
    assert algorithm_of(raw) == draft.algo
    assert read(draft.algo, raw) == arch


def test_what_an_export_leaves_to_no_reader() -> None:
    """Ids, switches, sizes and positions are in the file even when they are what a reader assumes."""
    for algo, arch in (("eagle3", published.eagle3()), ("peagle", published.peagle())):
        raw = written(algo, arch, "native")
        assert raw["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
        assert raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
        other = written(algo, arch, "speculators")
        layer = other["transformer_layer_config"]
        assert other["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
        assert layer["num_aux_hidden_states"] == raw["num_aux_hidden_states"] == 3
        for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
            assert raw[key] is other[key] is False
        for flat in (raw, layer):
            assert flat["rope_theta"] == flat["rope_parameters"]["rope_theta"] == 1e4
            assert flat["head_dim"] == 8
            assert flat["tie_word_embeddings"] is False
    assert raw["mask_token_id"] == raw["pard_token"] == other["mask_token_id"] == MASK
    assert raw["num_depths"] == other["num_depths"] == DEPTHS
    assert other["speculators_config"]["proposal_methods"] == [{"proposal_type": "greedy", "speculative_tokens": 3}]


# -- what must not be guessed ----------------------------------------------------------------------------------------


def _nested(draft: Published, **changes: Any) -> None:
    draft.config["eagle_config"] = draft.config.get("eagle_config", {}) | changes


REJECTED: dict[str, tuple[str, Any, str]] = {
    "fused_features_off": (
        "modelopt_eagle3",
        lambda d: _nested(d, use_aux_hidden_state=False),
        "eagle_config.use_aux_hidden_state is False",
    ),
    "no_input_norm": (
        "modelopt_eagle3",
        lambda d: _nested(d, use_input_layernorm_in_first_layer=False),
        "eagle_config.use_input_layernorm_in_first_layer is False",
    ),
    "no_final_norm": (
        "modelopt_eagle3",
        lambda d: _nested(d, use_last_layernorm=False),
        "eagle_config.use_last_layernorm is False",
    ),
    "further_heads": (
        "modelopt_eagle3",
        lambda d: _nested(d, parallel_draft_step=3),
        "eagle_config.parallel_draft_step is 3",
    ),
    "mtp_norms": (
        "modelopt_eagle3",
        lambda d: _nested(d, use_mtp_layernorm=True),
        "eagle_config.use_mtp_layernorm is True",
    ),
    "two_lists_of_ids": (
        "modelopt_eagle3",
        lambda d: d.config.update(eagle_aux_hidden_state_layer_ids=[1, 2, 3]),
        r"eagle_aux_hidden_state_layer_ids is \[1, 2, 3\] at top level and \[1, 3, 6\]",
    ),
    "megatron_names": (
        "modelopt_eagle3",
        lambda d: d.tensors.update({"eagle_module.enorm.weight": torch.ones(16)}),
        "eagle_module.enorm.weight has a name of the Megatron layout",
    ),
    "fused_rows": (
        "modelopt_eagle3",
        lambda d: d.tensors.update({"eagle_module.layers.0.self_attn.qkv_proj.weight": torch.ones(32, 32)}),
        "is fused",
    ),
    "unnamed_ids": (
        "automodel_eagle3",
        lambda d: d.settings.clear(),
        "policy.draft.aux_layer_indices: got null, and the draft's publisher never writes",
    ),
    "ids_that_nobody_counts": (
        "angelslim_eagle3",
        lambda d: d.config.update(aux_hidden_states_layer_ids=[1, 3, 6]),
        "policy.draft.aux_layer_indices: got null, .* names layers in aux_hidden_states_layer_ids",
    ),
    "norm_output_of_two_meanings": (
        "specforge_eagle31",
        lambda d: d.settings.clear(),
        "policy.draft.norm_output: got nothing",
    ),
    "no_mask_token": (
        "specforge_peagle",
        lambda d: d.settings.pop("mask_token_id"),
        "policy.draft.mask_token_id: got null",
    ),
    "no_depths": ("specforge_peagle", lambda d: d.settings.pop("num_depths"), "policy.draft.num_depths: got null"),
    "two_mask_tokens": (
        "automodel_peagle",
        lambda d: d.config.update(pard_token=5),
        "different mask tokens: mask_token_id 22, pard_token 5",
    ),
    "another_mask_token_for_the_engine": (
        "speculators_peagle",
        lambda d: d.config["transformer_layer_config"].update(dflash_config={"mask_token_id": 5}),
        "different mask tokens: mask_token_id 22, dflash_config.mask_token_id 5",
    ),
    "fused_features_off_for_the_engine": (
        "speculators_eagle3",
        lambda d: d.config["transformer_layer_config"].update(eagle_config={"use_aux_hidden_state": False}),
        "eagle_config.use_aux_hidden_state is False",
    ),
    "scaled_logits_for_the_engine": (
        "speculators_eagle3",
        lambda d: d.config["transformer_layer_config"].update(logit_scale=0.5),
        "logit_scale is 0.5",
    ),
    "no_block": (
        "speculators_eagle3",
        lambda d: d.config["transformer_layer_config"].update(eagle_config=5),
        "eagle_config 5; must be an object",
    ),
    "bias_with_values": (
        "authors_eagle1",
        lambda d: d.tensors.update({"fc.bias": torch.ones(16)}),
        r"\['fc.bias'\] hold values other than zero",
    ),
    "automodels_eagle1": (
        "authors_eagle1",
        lambda d: d.config.update(architectures=["LlamaEagleDraftModel"]),
        "nemo_automodel, whose EAGLE-1 norms",
    ),
    "specos_eagle1": (
        "authors_eagle1",
        lambda d: d.config.update(architectures=["LlamaForCausalLMEagle1"], model_type="llama_eagle1"),
        "verl-SpeCo, whose EAGLE-1 norms",
    ),
    "arange_table": (
        "speco_eagle3",
        lambda d: d.tensors.update(d2t=torch.arange(VOCAB)),
        "the identity is all zeros, not arange",
    ),
    "no_base": (
        "angelslim_eagle3",
        lambda d: d.config.pop("rope_theta"),
        "neither rope_theta nor rope_parameters.rope_theta",
    ),
    "two_scalings": (
        "specforge_eagle3",
        lambda d: d.config.update(rope_scaling={**LLAMA3, "factor": 2.0}),
        "'factor' is 8.0 and 2.0",
    ),
    "ignored_norms": ("speculators_peagle", lambda d: d.config.update(fc_norm=True), "has fc_norm True; the engine"),
    "windows": (
        "speculators_eagle3",
        lambda d: d.config["transformer_layer_config"].update(layer_types=["sliding_attention"]),
        r"layer_types \['sliding_attention'\]",
    ),
    "unknown_type": (
        "speculators_eagle3",
        lambda d: d.config.update(speculators_model_type="mtp"),
        "speculators_model_type 'mtp'",
    ),
    "no_map": (
        "authors_eagle3",
        lambda d: [d.tensors.pop(name) for name in ("d2t", "t2d")],
        "has no d2t that says which",
    ),
    "other_policy": ("authors_eagle3", lambda d: d.config.update(vocab_size=50), "vocabulary of size 50"),
    "empty_vocabulary": (
        "authors_eagle3",
        lambda d: d.config.update(draft_vocab_size=0),
        "draft_vocab_size 0; must be an integer from 1",
    ),
}


@pytest.mark.parametrize("case", REJECTED)
def test_what_a_file_does_not_say_or_nobody_runs_is_an_error(case: str, tmp_path: Path) -> None:
    layout, change, match = REJECTED[case]
    draft = PUBLISHED[layout]()
    resolve(draft, draft.write(tmp_path / "good"))
    change(draft)
    with pytest.raises(ConfigError, match=match):
        resolve(draft, draft.write(tmp_path / "bad"))


def test_ids_are_taken_from_the_user_where_the_file_counts_them_in_its_own_way(tmp_path: Path) -> None:
    draft = PUBLISHED["angelslim_eagle3"]()
    draft.config["aux_hidden_states_layer_ids"] = [1, 3, 6]
    spec = resolve(draft, draft.write(tmp_path), aux_layer_indices=[0, 2, 5])
    assert spec.architecture.feature_ids == (1, 3, 6)


@pytest.mark.parametrize(
    "raw",
    [
        {},
        {"architectures": ["Eagle3DeepseekV2ForCausalLM"]},
        {"speculators_model_type": "mtp", "architectures": ["LlamaForCausalLMEagle3"]},
        {"architectures": "LlamaForCausalLMEagle3"},
    ],
    ids=["nothing", "another_family", "unknown_type", "no_list"],
)
def test_no_algorithm_recognises_other_files(raw: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="is the draft of no known algorithm"):
        algorithm_of(raw)


# -- any draft -------------------------------------------------------------------------------------------------------

_small = st.integers(1, 6)
_ropes = st.one_of(
    st.builds(lambda theta: {"rope_type": "default", "rope_theta": theta}, st.floats(2.0, 1e7)),
    st.builds(
        lambda f, p: {"rope_type": "linear", "rope_theta": 1e4, "factor": f, "partial_rotary_factor": p},
        st.floats(1.0, 64.0),
        st.sampled_from([0.25, 0.5]),
    ),
    st.builds(lambda low: {**LLAMA3, "rope_theta": 5e5, "low_freq_factor": low}, st.floats(0.5, 3.5)),
    st.builds(
        lambda scale, cut: {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "mscale": scale,
            "truncate": cut,
        },
        st.floats(0.1, 2.0),
        st.booleans(),
    ),
)
_json = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)
_extras = st.dictionaries(st.text("xyz", min_size=1, max_size=3), _json, max_size=2)


@st.composite
def _architectures(draw: st.DrawFn, algo: str) -> DraftArchitecture:
    hidden, vocab = draw(_small) * 4, draw(st.integers(2, 40))
    kv = draw(st.integers(1, 3))
    same = algo == "eagle1"
    fields: dict[str, Any] = {
        "layer_family": "llama" if same else draw(st.sampled_from(["llama", "qwen3"])),
        "hidden_size": hidden,
        "target_hidden_size": hidden if same else draw(_small) * 4,
        "intermediate_size": draw(st.integers(1, 99)),
        "num_hidden_layers": draw(_small),
        "num_attention_heads": kv * draw(st.integers(1, 3)),
        "num_key_value_heads": kv,
        "head_dim": draw(_small) * 8,
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-5])),
        "vocab_size": vocab,
        "draft_vocab_size": vocab if same else draw(st.integers(1, vocab)),
        "rope": draw(_ropes),
        "max_position_embeddings": draw(st.integers(1, 1 << 20)),
        "extra": draw(_extras),
    }
    if not same:
        norms = draw(st.sampled_from([(False, False), (True, False), (False, True)]))
        ids = draw(st.sets(st.integers(1, 60), min_size=1, max_size=5))
        fields |= {"norm_before_fc": norms[0], "fc_norm": norms[1], "norm_before_residual": draw(st.booleans())}
        fields["feature_ids"] = tuple(sorted(ids))
    if algo == "eagle3":
        fields["norm_output"] = draw(st.booleans())
    if algo == "peagle":
        fields |= {"mask_token_id": draw(st.integers(0, vocab - 1)), "num_depths": draw(st.integers(1, 16))}
    adapter = adapter_of(algo)
    return adapter.architecture(**{"feature_ids": ()} | fields)


@pytest.mark.parametrize("algo", ALGORITHMS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_draft_survives_being_written_and_read(algo: str, data: st.DataObject) -> None:
    arch = data.draw(_architectures(algo))
    for layout in adapter_of(algo).layouts:
        if layout == "speculators" and algo == "peagle" and arch.fc_norm:
            continue
        raw = json.loads(json.dumps(written(algo, arch, layout)))
        again = read(algo, raw)
        assert again == arch
        assert written(algo, again, layout) == raw
        assert [a for a in DRAFT_ALGORITHMS if adapter_of(a).claims(raw)] == [algo]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_dialect_of_the_names_is_the_same_draft(data: st.DataObject) -> None:
    arch = data.draw(_architectures(data.draw(st.sampled_from(ALGORITHMS))))
    names = [*arch.trained_shapes(), *arch.frozen_shapes()]
    prefixes = data.draw(st.lists(st.sampled_from(["model.", "module.", "draft.", "eagle_module."]), max_size=3))
    is_old, is_engine = data.draw(st.booleans()), data.draw(st.booleans())

    def rename(name: str) -> str:
        name = name.replace("layers.0.", "midlayer.") if is_old else name
        return "".join(prefixes) + (name.replace("d2t", "draft_id_to_target_id") if is_engine else name)

    result = normalize_names(data.draw(st.permutations([rename(name) for name in names])))
    assert result.canonical == {name: rename(name) for name in names}
    assert not result.dropped


# -- the publishers' libraries ---------------------------------------------------------------------------------------

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3": ("eagle3", {"draft_vocab_size": len(IDS)}),
    "eagle3_norms": ("eagle3", {"norm_before_residual": True, "norm_output": True, "fc_norm": True}),
    "eagle3_qwen3": ("eagle3", {"layer_family": "qwen3", "norm_before_fc": True, "feature_ids": (1, 4)}),
    "eagle3_llama3": ("eagle3", {"rope": {**LLAMA3, "rope_theta": 5e5}, "num_hidden_layers": 2}),
    "eagle3_partial": (
        "eagle3",
        {"rope": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}, "layer_family": "qwen3"},
    ),
    "peagle": ("peagle", {"draft_vocab_size": len(IDS), "norm_before_fc": True}),
    "peagle_yarn": (
        "peagle",
        {
            "feature_ids": (1, 3, 5, 6),
            "norm_before_residual": True,
            "rope": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 16.0,
            },
        },
    ),
}


@pytest.fixture(scope="module")
def speculators() -> SimpleNamespace:
    """vLLM's library of drafts."""
    from speculators import SpeculatorModelConfig
    from speculators.models.eagle3.core import Eagle3DraftModel
    from speculators.models.peagle.core import PEagleDraftModel

    return SimpleNamespace(
        config=SpeculatorModelConfig, models={"eagle3": Eagle3DraftModel, "peagle": PEagleDraftModel}
    )


@pytest.fixture(scope="module")
def specforge() -> SimpleNamespace:
    """SGLang's trainer of drafts."""
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
    from specforge.modeling.draft.peagle import PEagleDraftModel

    return SimpleNamespace(eagle3=LlamaForCausalLMEagle3, peagle=PEagleDraftModel)


@pytest.fixture(scope="module")
def engine() -> Any:
    """The engine's reading of the speculators layout."""
    from vllm.transformers_utils.config import patch_rope_parameters
    from vllm.transformers_utils.configs.speculators.base import SpeculatorsConfig

    return SimpleNamespace(config=SpeculatorsConfig, patch=patch_rope_parameters)


def _exported(tmp_path: Path, variant: str, layout: str) -> tuple[str, Any, dict[str, Any]]:
    algo, changes = VARIANTS[variant]
    arch = getattr(published, algo)(**changes)
    raw = written(algo, arch, layout)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return algo, arch, raw


def _model(library: SimpleNamespace, algo: str, directory: Path) -> Any:
    config = library.config.from_pretrained(str(directory))
    # Needs neither a compiler nor a GPU.
    config.transformer_layer_config._attn_implementation = "eager"
    return library.models[algo](config)


def _fill(model: Any, tensors: dict[str, torch.Tensor]) -> None:
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected
    for name, parameter in model.named_parameters():
        if name in missing:
            torch.nn.init.ones_(parameter)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_library_reads_the_config_as_we_mean_it(variant: str, tmp_path: Path, speculators: SimpleNamespace) -> None:
    algo, arch, _raw = _exported(tmp_path, variant, "speculators")
    config = speculators.config.from_pretrained(str(tmp_path))
    assert config.speculators_model_type == algo
    for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "draft_vocab_size", "target_hidden_size"):
        assert getattr(config, key) == getattr(arch, key), key
    assert config.norm_output is getattr(arch, "norm_output", False)
    assert config.embed_requires_grad is (algo == "peagle")
    assert tuple(config.eagle_aux_hidden_state_layer_ids) == arch.feature_ids
    assert getattr(config, "mask_token_id", None) == arch.placeholder_id
    (method,) = config.speculators_config.proposal_methods
    assert (method.proposal_type, method.speculative_tokens) == ("greedy", 3)
    verifier = config.speculators_config.verifier
    assert (verifier.name_or_path, tuple(verifier.architectures)) == VERIFIER
    layer = config.transformer_layer_config
    assert layer.model_type == arch.layer_family
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"):
        assert getattr(layer, key) == getattr(arch, key), key
    for key in ("num_key_value_heads", "rms_norm_eps", "vocab_size", "max_position_embeddings"):
        assert getattr(layer, key) == getattr(arch, key), key
    assert dict(layer.rope_parameters) == dict(arch.rope)
    assert layer.attention_bias is False
    assert set(layer.layer_types or ["full_attention"]) == {"full_attention"} if arch.layer_family == "qwen3" else True


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_library_has_the_tensors_that_we_write(variant: str, tmp_path: Path, speculators: SimpleNamespace) -> None:
    algo, arch, _ = _exported(tmp_path, variant, "speculators")
    model = _model(speculators, algo, tmp_path)
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items() if not name.startswith("verifier_")}
    assert shapes == {"embed_tokens.weight": (VOCAB, 16), **arch.trained_shapes(), **arch.frozen_shapes()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_the_library_saves_is_read_as_it_was(variant: str, tmp_path: Path, speculators: SimpleNamespace) -> None:
    algo, arch, _ = _exported(tmp_path, variant, "speculators")
    ids = IDS if arch.has_vocab_map else None
    tensors = random_tensors(arch, ids)
    model = _model(speculators, algo, tmp_path)
    _fill(model, tensors)
    model.save_pretrained(str(tmp_path / "saved"))
    raw = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert algorithm_of(raw) == algo
    own = Published(algo, "speculators", arch, raw, {}, tensors, ids)
    if algo == "peagle":
        raw.pop("num_depths")
        (tmp_path / "saved" / "config.json").write_text(json.dumps(raw))
        # Its trainer writes the depths as the number of proposed tokens.
        arch = dataclasses.replace(arch, num_depths=3)
    spec = resolve(own, tmp_path / "saved")
    assert dataclasses.replace(spec.architecture, extra={}) == arch
    loaded = load_tensors(tmp_path / "saved", spec.architecture, trust_pickle=False)
    assert all(torch.equal(loaded[name], t) for name, t in tensors.items())
    assert read(algo, written(algo, spec.architecture, "speculators")) == spec.architecture


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_engine_reads_the_config_as_we_mean_it(variant: str, tmp_path: Path, engine: SimpleNamespace) -> None:
    algo, arch, raw = _exported(tmp_path, variant, "speculators")
    config = engine.config.from_pretrained(str(tmp_path))
    engine.patch(config)
    for key in ("norm_before_residual", "norm_before_fc", "draft_vocab_size", "target_hidden_size", "head_dim"):
        assert getattr(config, key) == getattr(arch, key), key
    for key in ("fc_norm", "norm_output"):
        assert getattr(config, key, False) == getattr(arch, key, False), key
    assert config.num_aux_hidden_states == len(arch.feature_ids)
    assert tuple(config.eagle_aux_hidden_state_layer_ids) == arch.feature_ids
    assert dict(config.rope_parameters) == dict(arch.rope)
    assert config.max_position_embeddings == arch.max_position_embeddings
    assert getattr(config, "pard_token", None) == arch.placeholder_id
    options = engine.config.extract_vllm_speculative_config(copy.deepcopy(raw))
    assert options == {"method": "eagle3", "num_speculative_tokens": 3} | (
        {"parallel_drafting": True} if algo == "peagle" else {}
    )


@pytest.mark.parametrize("variant", ["eagle3", "eagle3_norms", "eagle3_qwen3"])
def test_the_library_computes_the_same(variant: str, tmp_path: Path, speculators: SimpleNamespace) -> None:
    """Logits of three depths of its module and of the naive float64 draft with the tensors that we read."""
    algo, arch, _ = _exported(tmp_path, variant, "speculators")
    model = _model(speculators, algo, tmp_path).float().eval()
    tensors = random_tensors(arch, IDS if arch.has_vocab_map else None)
    _fill(model, tensors)
    generator = torch.Generator().manual_seed(5)
    embedding = torch.randn(VOCAB, 16, generator=generator)
    model.embed_tokens.weight.data.copy_(embedding)
    length = 7
    tokens = torch.randint(VOCAB, (length,), generator=generator)
    features = torch.randn(length, arch.feature_size, generator=generator)
    logits: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda _module, _args, output: logits.append(output[0]))
    with torch.no_grad():
        model(
            features[None, :-1],
            tokens[None, 1:],
            document_ids=torch.zeros(1, length - 1, dtype=torch.long),
            position_ids=torch.arange(length - 1)[None],
            ttt_steps=3,
        )
    doc = Document(tokens.tolist(), [True] * length, features, torch.zeros(length, VOCAB))
    naive = NaiveEagle3({name: t for name, t in tensors.items() if name not in ("d2t", "t2d")}, arch)
    wanted = naive.run(doc, embedding, 3)
    assert len(logits) == 3
    for (depth, slot), value in wanted.items():
        torch.testing.assert_close(logits[depth][slot].double(), value.detach(), rtol=1e-5, atol=1e-5)


def _llama_config(draft: Published) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**{key: value for key, value in draft.config.items() if key != "transformers_version"})


@pytest.mark.parametrize("layout", ["specforge_eagle3", "specforge_eagle31"])
def test_specforge_saves_what_the_fixture_says_and_computes_the_same(
    layout: str, tmp_path: Path, specforge: SimpleNamespace
) -> None:
    draft = PUBLISHED[layout]()
    model = specforge.eagle3(_llama_config(draft)).float().eval()
    state = model.state_dict()
    assert {name: t.shape for name, t in state.items()} == {name: t.shape for name, t in draft.tensors.items()}
    model.load_state_dict(draft.tensors)
    model.save_pretrained(str(tmp_path))
    raw = json.loads((tmp_path / "config.json").read_text())
    assert algorithm_of(raw) == "eagle3"
    arch = resolve(draft, tmp_path).architecture
    assert dataclasses.replace(arch, extra={}) == draft.architecture
    loaded = load_tensors(tmp_path, arch, trust_pickle=False)
    assert all(torch.equal(loaded[name], t) for name, t in draft.canonical.items())

    generator = torch.Generator().manual_seed(6)
    length = 6
    tokens = torch.randint(VOCAB, (length,), generator=generator)
    features = torch.randn(length, arch.feature_size, generator=generator)
    embedding = torch.randn(VOCAB, 16, generator=generator)
    with torch.no_grad():
        states = model(features[None, :-1], embedding[tokens[1:]][None])
        logits = model.lm_head(states)[0]
    # The naive draft has plain positions only.
    plain = dataclasses.replace(arch, rope={"rope_type": "default", "rope_theta": 5e5})
    naive = NaiveEagle3(dict(draft.canonical), plain)
    doc = Document(tokens.tolist(), [True] * length, features, torch.zeros(length, VOCAB))
    first = naive.run(doc, embedding, 1)[0, 0]
    torch.testing.assert_close(logits[0].double(), first.detach(), rtol=1e-5, atol=1e-5)


def test_specforges_peagle_is_what_the_fixture_says(tmp_path: Path, specforge: SimpleNamespace) -> None:
    draft = PUBLISHED["specforge_peagle"]()
    model = specforge.peagle(_llama_config(draft)).float()
    state = {name: t for name, t in model.state_dict().items() if name not in ("d2t", "t2d")}
    assert {name: t.shape for name, t in state.items()} == {name: t.shape for name, t in draft.tensors.items()}
    model.load_state_dict(draft.tensors, strict=False)
    model.save_pretrained(str(tmp_path))
    arch = resolve(draft, tmp_path).architecture
    assert dataclasses.replace(arch, extra={}) == draft.architecture
    assert "mask_token_id" not in json.loads((tmp_path / "config.json").read_text())


@pytest.mark.parametrize("layout", ["automodel_eagle3", "automodel_peagle"])
def test_what_nemo_automodel_saves_is_read_as_it_was(layout: str, tmp_path: Path) -> None:
    from nemo_automodel.components.speculative.eagle.draft_llama import LlamaEagle3DraftModel
    from transformers import Qwen3Config

    draft = PUBLISHED[layout]()
    config = Qwen3Config(**{key: value for key, value in draft.config.items() if key != "transformers_version"})
    model = LlamaEagle3DraftModel(config).float()
    missing, unexpected = model.load_state_dict(draft.tensors, strict=False)
    assert not unexpected
    assert all("rotary" in name or "embed_tokens" in name for name in missing)
    model.save_pretrained(str(tmp_path))
    assert set(load_file(tmp_path / "model.safetensors")) >= set(draft.tensors)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert algorithm_of(raw) == draft.algo
    assert adapter_of(draft.algo).read_config(raw).publisher == "automodel"
    spec = resolve(draft, tmp_path)
    assert dataclasses.replace(spec.architecture, extra={}) == draft.architecture
    assert spec.vocab_ids == draft.ids
    loaded = load_tensors(tmp_path, spec.architecture, trust_pickle=False)
    assert all(torch.equal(loaded[name], t) for name, t in draft.canonical.items())


def test_another_policys_name_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    draft = next(p() for p in PUBLISHED.values() if p().publisher == "speculators")
    directory = draft.write(tmp_path)
    for policy_name, is_warned in ((VERIFIER.name_or_path, False), ("/models/another-8b", True), (None, False)):
        caplog.clear()
        resolve_spec(
            draft.cfg(directory),
            policy_config=POLICY,
            k=3,
            max_model_len=MAX_MODEL_LEN,
            dtype="float32",
            policy_name=policy_name,
        )
        assert any("another-8b" in record.getMessage() for record in caplog.records) is is_warned
