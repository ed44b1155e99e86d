"""Published block drafts: every layout is one draft, what is refused, both written layouts, the publishers' libraries.

Also: any draft survives being written and read, over the whole space of fields.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.errors import ConfigError
from nemo_rl.models.automodel.draft.adapters.base import LAYOUTS as FILE_LAYOUTS
from nemo_rl.models.automodel.draft.adapters.base import Verifier
from nemo_rl.models.automodel.draft.builders import load_tensors
from nemo_rl.models.automodel.draft.dflash import DFlashRuntime
from nemo_rl.models.automodel.draft.domino import DominoRuntime
from nemo_rl.models.automodel.draft.dspark import DSparkRuntime
from nemo_rl.models.automodel.draft.registry import DRAFT_ALGORITHMS, adapter_of, algorithm_of, resolve_spec
from tests.unit.models.automodel.draft.block_helpers import MASK, make_block_module, one_block
from tests.unit.models.automodel.draft.helpers import TARGET_LAYERS, VOCAB, StubPolicy
from tests.unit.models.automodel.draft.published_block import (
    KINDS,
    LAYOUTS,
    POLICY,
    canonical_arch,
    speculators,
)

BLOCK_ALGOS = tuple(KINDS)
RUNTIMES = {"dflash": DFlashRuntime, "dspark": DSparkRuntime, "domino": DominoRuntime}
VERIFIER = Verifier("org/policy", ("Qwen3ForCausalLM",))


@pytest.fixture(params=LAYOUTS, ids=str)
def published(request: pytest.FixtureRequest) -> Any:
    return LAYOUTS[request.param]()


def resolve(directory: Path | str, algo: str, *, k: int | None, policy: Any = None, **fields: Any) -> Any:
    cfg = DRAFT_ALGORITHMS[algo].config(enabled=True, model_name=str(directory), **fields)
    return resolve_spec(cfg, policy_config=POLICY | (policy or {}), k=k, max_model_len=64, dtype="float32")


def read(algo: str, raw: Any) -> Any:
    adapter = adapter_of(algo)
    source = adapter.read_config(json.loads(json.dumps(raw)))
    return adapter.architecture(**source.fields, feature_ids=source.feature_ids)


def written_speculators(algo: str, arch: Any) -> dict[str, Any]:
    return adapter_of(algo).write_speculators(arch, dtype="float32", k=arch.num_predicted, verifier=VERIFIER)


# -- every layout ----------------------------------------------------------------------------------------------------


def test_the_config_names_one_algorithm(published: Any) -> None:
    assert algorithm_of(published.config) == published.algo


def test_a_layout_loads_as_the_canonical_draft(tmp_path: Path, published: Any) -> None:
    directory = published.write(tmp_path / "d")
    spec = resolve(directory, published.algo, k=published.arch.num_predicted, **published.settings)
    arch = spec.architecture
    assert arch.identity() == published.arch.identity()
    assert arch.extra.get("num_target_layers") == (None if "speculators_config" in published.config else TARGET_LAYERS)
    stored = load_tensors(directory, arch, trust_pickle=False)
    wanted = {name.removeprefix("logit_head."): t for name, t in published.tensors.items()}
    assert stored.keys() == wanted.keys() >= arch.trained_shapes().keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in wanted.items())


def test_a_layout_is_written_back_whole_in_both_forms(published: Any) -> None:
    """Unknown fields survive, those of the nested block too; code to be run does not."""
    spec = read(published.algo, published.config)
    arch = canonical_arch(published.algo, extra=spec.extra, **_changed(published.arch))
    native = adapter_of(published.algo).write_config(arch, dtype="float32")
    assert native["vendor_note"] == published.config["vendor_note"]
    nested = published.config.get("dflash_config", {})
    assert {k: native["dflash_config"].get(k) for k in nested if k.startswith("vendor")} == {
        k: v for k, v in nested.items() if k.startswith("vendor")
    }
    assert "auto_map" not in native
    assert algorithm_of(native) == published.algo
    again = read(published.algo, native)
    assert again.identity() == arch.identity()
    assert adapter_of(published.algo).write_config(again, dtype="float32") == json.loads(json.dumps(native))
    if "speculators" not in adapter_of(published.algo).layouts or arch.causal:
        return
    other = written_speculators(published.algo, arch)
    assert other["vendor_note"] == published.config["vendor_note"]
    assert "auto_map" not in other
    assert algorithm_of(other) == published.algo
    again = read(published.algo, other)
    assert again.identity() == arch.identity()
    assert written_speculators(published.algo, again) == json.loads(json.dumps(other))


def _changed(arch: Any) -> dict[str, Any]:
    return {key: value for key, value in vars(arch).items() if key != "extra"}


def test_layouts_of_each_algorithm() -> None:
    assert {algo: adapter_of(algo).layouts for algo in BLOCK_ALGOS} == {
        "dflash": FILE_LAYOUTS,
        "dspark": FILE_LAYOUTS,
        "domino": ("native",),
    }
    with pytest.raises(ConfigError, match=r"policy.draft.export_layouts: got speculators; .* domino exists in"):
        written_speculators("domino", canonical_arch("domino"))


# -- which algorithm -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "algo"),
    [
        ({"architectures": ["DFlashDraftModel"]}, "dflash"),
        ({"architectures": ["DFlashDraftModel"], "dflash_config": {"projector_type": "domino"}}, "domino"),
        ({"architectures": ["DFlashDraftModel"], "dflash_config": {"projector_type": "dspark"}}, "dspark"),
        ({"architectures": ["DFlashDraftModel"], "projector_type": "dspark", "dflash_config": None}, "dspark"),
        ({"architectures": ["DFlashDraftModel"], "dflash_config": {"projector_type": "other"}}, "dflash"),
        ({"architectures": ["Qwen3DFlashDraftModel"], "dflash_config": {"projector_type": None}}, "dflash"),
        # What cannot be used is recognised all the same.
        ({"architectures": ["Gemma4DSparkModel"], "model_type": "gemma4"}, "dspark"),
        ({"architectures": ["DSparkDraftModel"], "dflash_config": {"projector_type": "domino"}}, "dspark"),
        ({"architectures": ["DFlashDraftModel"], "speculators_model_type": "dspark"}, "dspark"),
        ({"architectures": ["DFlashDraftModel"], "speculators_model_type": None}, "dflash"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_an_algorithm_is_told_from_few_fields(raw: dict[str, Any], algo: str) -> None:
    assert algorithm_of(raw) == algo


@pytest.mark.parametrize(
    "raw",
    [
        {},
        {"architectures": ["DFlash2DraftModel"]},
        {"architectures": ["DFlashDraftModel"], "speculators_model_type": "dflash2"},
        {"architectures": "DFlashDraftModel"},
        {"architectures": [["DFlashDraftModel"]]},
        {"architectures": {"0": "DFlashDraftModel"}, "dflash_config": {"projector_type": "domino"}},
        {"architectures": ["Qwen3ForCausalLM"], "dflash_config": [{"projector_type": "domino"}]},
        {"architectures": [], "speculators_model_type": ["dflash"]},
        {"speculators_model_type": {"dflash": 1}},
    ],
    ids=str,
)
def test_other_files_are_no_block_draft(raw: dict[str, Any]) -> None:
    assert not any(adapter_of(algo).claims(raw) for algo in BLOCK_ALGOS)


# -- what is refused -------------------------------------------------------------------------------------------------


def _config(name: str, nested: dict[str, Any] | None = None, **changes: Any) -> tuple[str, dict[str, Any]]:
    """A layout's config with changes; ... removes a key."""
    base = LAYOUTS[name]()
    raw = {k: v for k, v in {**base.config, **changes}.items() if v is not ...}
    if nested is not None:
        raw["dflash_config"] = {k: v for k, v in {**raw.get("dflash_config", {}), **nested}.items() if v is not ...}
    return base.algo, raw


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (_config("zlab", {"causal": True}, is_causal=False), "causal twice: dflash_config.causal is True, is_causal"),
        (_config("zlab", {"mask_token_id": 3}, mask_token_id=4), "mask_token_id twice"),
        (_config("zlab", {}, pard_token=4), "mask_token_id twice"),
        (_config("zlab", {"mask_token_id": -1}), "mask_token_id -1"),
        (_config("zlab", {"target_layer_ids": [0, 2]}, target_layer_ids=[0, 3]), "target_layer_ids twice"),
        (_config("zlab", eagle_aux_hidden_state_layer_ids=[0, 2]), r"eagle_aux_hidden_state_layer_ids \[0, 2\]"),
        (_config("zlab", {"target_layer_ids": ["0"]}), "target_layer_ids"),
        (_config("zlab", {"target_layer_ids": 5}), "target_layer_ids 5"),
        (_config("zlab", block_size=1 << 13), "block_size 8192"),
        (_config("zlab", block_size=1), "block_size 1"),
        (_config("zlab", eagle_config={"a": 1}), "eagle_config"),
        (_config("zlab", add_swa_attention_sink_bias=True), "add_swa_attention_sink_bias True"),
        (_config("zlab", use_sliding_window=True, layer_types=..., max_window_layers=...), "use_sliding_window true"),
        (_config("zlab", use_sliding_window=True, layer_types=..., max_window_layers=1), "use_sliding_window true"),
        (_config("zlab", layer_types=["full_attention"]), "1 layer_types for num_hidden_layers 2"),
        (_config("zlab", layer_types=["full_attention", {}]), "layer_types"),
        (_config("zlab", layer_types="full_attention"), "layer_types 'full_attention'"),
        (_config("zlab", dflash_config=[1]), "dflash_config"),
        (_config("zlab", {"projector_type": "other"}), "projector_type 'other'"),
        (_config("zlab", {"projector_type": 3}), "projector_type 3"),
        (_config("zlab", num_target_layers=0), "num_target_layers 0"),
        (_config("speco_dflash", num_target_layers=9), "num_target_layers 9 and target_num_hidden_layers 5"),
        (_config("speculators_dflash", sample_from_anchor=True), "sample_from_anchor true"),
        (_config("speculators_dflash", sliding_window_non_causal=1), "sliding_window_non_causal 1"),
        (_config("speculators_dflash", speculators_config={"proposal_methods": {}}), "proposal_methods"),
        (_config("speculators_dflash", speculators_config={"proposal_methods": [3]}), "proposal_methods"),
        (_config("speculators_dflash", speculators_config=[]), "speculators_config"),
        (_config("speculators_dflash", transformer_layer_config=None), "transformer_layer_config"),
        (_config("speculators_dflash", {"output_multiplier": 2.0}), "output_multiplier 2.0"),
        (_config("deepseek", model_type="deepseek_v4"), "model_type 'deepseek_v4'"),
        (_config("deepseek", architectures=["Gemma4DSparkModel"]), "architectures 'Gemma4DSparkModel'"),
        (_config("deepseek", markov_rank=0), "markov_rank 0; a draft without a Markov head"),
        (_config("deepseek", markov_rank=1 << 20), "markov_rank 1048576"),
        (_config("deepseek", markov_head_type="lstm"), "markov_head_type 'lstm'; must be one of"),
        (_config("deepseek", confidence_head_with_markov=...), r"lacks \['confidence_head_with_markov'\]"),
        (_config("deepseek", dspark_bonus_anchor=True, sample_from_anchor=True), "dspark_bonus_anchor True"),
        (_config("specforge_dspark", {"projector_type": "domino"}), "projector_type 'domino'"),
        (_config("specforge_domino", emb_dim=7), "emb_dim twice: emb_dim is 7, dflash_config.emb_dim is 6"),
        (_config("specforge_domino", {"gru_hidden_dim": 1 << 30}), "gru_hidden_dim 1073741824"),
        (_config("specforge_domino", {"shift_label": 1}), "shift_label 1"),
        (_config("specforge_domino", {"pure_draft_prefix_len": -1}), "pure_draft_prefix_len -1"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_config_that_cannot_be_used_names_the_field(config: tuple[str, dict[str, Any]], match: str) -> None:
    algo, raw = config
    with pytest.raises(ConfigError, match=f"policy.draft.model_name.*{match}"):
        read(algo, raw)


@pytest.mark.parametrize(
    ("config", "fields", "match"),
    [
        (_config("deepseek", num_target_layers=9), {}, "made for a policy of 9 layers; this one has 5"),
        (_config("deepseek", vocab_size=24), {}, "vocabulary of size 24"),
        (_config("deepseek", target_hidden_size=24), {}, "features of size 24"),
        (_config("deepseek", target_layer_ids=[-1, 2]), {}, r"aux_layer_indices: got \[-1, 2\]"),
        (_config("deepseek", target_layer_ids=[0, 4]), {}, r"aux_layer_indices: got \[0, 4\]; \[4\] is outside 0..3"),
        (_config("deepseek", target_layer_ids=[2, 0]), {}, "distinct and increasing"),
        (_config("deepseek", markov_head_type="gated"), {}, "markov_head_type: got gated; the engine serves vanilla"),
        (_config("deepseek", mask_token_id=VOCAB), {}, f"mask_token_id: got {VOCAB}"),
        (_config("deepseek", mask_token_id=...), {}, "policy.draft.mask_token_id: got null, and the draft's"),
        (_config("deepseek", mask_token_id=...), {"mask_token_id": 20}, "mask_token_id: got 20, the policy's eos"),
        (_config("speco_dflash"), {}, "policy.draft.block_size: got null, and the draft's config.json does not"),
        (_config("specforge_domino", {"shift_label": ...}), {}, "policy.draft.shift_label: got null, and"),
        (_config("specforge_domino", {"pure_draft_prefix_len": ...}), {}, "pure_draft_prefix_len: got null, and"),
        (_config("specforge_domino", {"pure_draft_prefix_len": 4}), {}, "pure_draft_prefix_len: got 4; must be below"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_draft_that_does_not_fit_the_run_is_refused(
    tmp_path: Path, config: tuple[str, dict[str, Any]], fields: dict[str, Any], match: str
) -> None:
    algo, raw = config
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    with pytest.raises(ConfigError, match=match):
        resolve(tmp_path, algo, k=4, **fields)


@pytest.mark.parametrize("algo", ["dspark", "domino"])
@pytest.mark.parametrize("name", ["mask_hidden", "context_proj.weight", "layers.0.self_attn.qkv_proj.weight"])
def test_tensors_of_other_models_are_refused(tmp_path: Path, algo: str, name: str) -> None:
    base = LAYOUTS[{"dspark": "deepseek", "domino": "specforge_domino"}[algo]]()
    base.tensors[name] = torch.zeros(2)
    with pytest.raises(ConfigError, match=name.split(".")[-2] if "." in name else name):
        resolve(base.write(tmp_path / "d"), algo, k=4)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"causal": True}, "export_layouts: got speculators; the draft has slots that see only earlier ones"),
        ({"target_hidden_size": 16}, "export_layouts: got speculators; the draft has a hidden size of 12"),
        (
            {"rope": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "export_layouts: got speculators; the draft has a partial_rotary_factor",
        ),
    ],
    ids=["causal", "width", "partial_rotary"],
)
@pytest.mark.parametrize("algo", ["dflash", "dspark"])
def test_a_draft_that_the_speculators_layout_cannot_hold(algo: str, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=f"{match}.*Remove it"):
        written_speculators(algo, canonical_arch(algo, **changes))
    with pytest.raises(ConfigError, match="num_speculative_tokens: got 7; a block of 4 slots predicts"):
        adapter_of(algo).write_speculators(canonical_arch(algo), dtype="float32", k=7, verifier=VERIFIER)


# -- the whole space of fields ---------------------------------------------------------------------------------------

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 40), 1 << 40) | st.text("ab.é", max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text("ab", max_size=3), inner, max_size=2),
    max_leaves=4,
)
# No field that means something has such a name.
_EXTRA = st.dictionaries(st.text("xyz", min_size=1, max_size=3), _JSON, max_size=2)
_ROPES = st.sampled_from(
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 8192, "beta_fast": 32.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ]
)
_FIELDS: dict[str, Any] = {
    "hidden_size": st.integers(1, 1 << 14),
    "intermediate_size": st.integers(1, 1 << 16),
    "num_hidden_layers": st.integers(1, 12),
    "num_attention_heads": st.integers(1, 64),
    "num_key_value_heads": st.integers(1, 64),
    "head_dim": st.integers(1, 128).map(lambda n: 2 * n),
    "rms_norm_eps": st.sampled_from([1e-6, 1e-5]),
    "max_position_embeddings": st.integers(1, 1 << 20),
    "block_size": st.integers(2, 64),
    "mask_token_id": st.integers(0, 1 << 20),
}
_HEADS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dspark": {
        "sample_from_anchor": st.booleans(),
        "markov_rank": st.integers(1, 512),
        "markov_head_type": st.sampled_from(["vanilla", "gated", "rnn"]),
        "enable_confidence_head": st.booleans(),
        "confidence_head_with_markov": st.booleans(),
    },
    "domino": {
        "shift_label": st.booleans(),
        "emb_dim": st.integers(1, 1 << 12),
        "gru_hidden_dim": st.integers(1, 1 << 12),
        "pure_draft_prefix_len": st.integers(0, 8),
    },
}


@st.composite
def _archs(draw: st.DrawFn, algo: str) -> Any:
    fields = {key: draw(value) for key, value in {**_FIELDS, **_HEADS[algo]}.items()}
    vocab = draw(st.integers(1, 1 << 20))
    target = draw(st.sampled_from([fields["hidden_size"], fields["hidden_size"] + 8]))
    rope = draw(_ROPES) | {"rope_theta": draw(st.sampled_from([1e4, 1e6, 1e7]))}
    if draw(st.booleans()):
        rope["partial_rotary_factor"] = 0.5
        fields["head_dim"] *= 2
    extra, nested = draw(_EXTRA), draw(_EXTRA)
    layers = draw(st.none() | st.integers(1, 100))
    extra |= ({"dflash_config": nested} if nested else {}) | ({} if layers is None else {"num_target_layers": layers})
    return KINDS[algo](
        layer_family="qwen3",
        target_hidden_size=target,
        vocab_size=vocab,
        draft_vocab_size=draw(st.integers(1, vocab) | st.just(vocab)),
        feature_ids=tuple(draw(st.lists(st.integers(0, 99), min_size=1, max_size=6, unique=True).map(sorted))),
        rope=rope,
        causal=draw(st.booleans()),
        extra=extra,
        **fields,
    )


@pytest.mark.parametrize("algo", BLOCK_ALGOS)
@settings(derandomize=True, deadline=None, database=None, max_examples=60)
@given(data=st.data())
def test_any_draft_survives_being_written_and_read(algo: str, data: st.DataObject) -> None:
    arch = data.draw(_archs(algo))
    raw = adapter_of(algo).write_config(arch, dtype="bfloat16")
    assert read(algo, raw) == arch
    assert algorithm_of(raw) == algo
    if "speculators" not in adapter_of(algo).layouts:
        return
    is_expressible = not arch.causal and arch.hidden_size == arch.target_hidden_size
    if not is_expressible or "partial_rotary_factor" in arch.rope:
        with pytest.raises(ConfigError, match=r"policy.draft.export_layouts"):
            written_speculators(algo, arch)
        return
    raw = written_speculators(algo, arch)
    assert read(algo, raw) == arch
    assert algorithm_of(raw) == algo


# -- the publishers' libraries ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def spec_library() -> Any:
    """The speculators library."""
    from speculators.config import SpeculatorModelConfig
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
    from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig

    models = {"dflash": DFlashDraftModel, "dspark": DSparkDraftModel}
    configs = {"dflash": DFlashSpeculatorConfig, "dspark": DSparkSpeculatorConfig}
    return SimpleNamespace(read=SpeculatorModelConfig.from_dict, models=models, configs=configs)


@pytest.fixture(scope="module")
def forge_library() -> Any:
    """SpecForge."""
    from specforge.modeling.draft.dflash import DFlashDraftModel
    from specforge.modeling.draft.domino import DominoDraftModel
    from specforge.modeling.draft.dspark import DSparkDraftModel

    return {"dflash": DFlashDraftModel, "dspark": DSparkDraftModel, "domino": DominoDraftModel}


VARIANTS = {
    "dflash": ("dflash", {}),
    "dflash_reduced": ("dflash", {"draft_vocab_size": 9}),
    "dflash_yarn": (
        "dflash",
        {
            "rope": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "dspark": ("dspark", {}),
    "dspark_bonus_anchor": ("dspark", {"sample_from_anchor": False, "block_size": 5}),
    "dspark_gated": ("dspark", {"markov_head_type": "gated", "confidence_head_with_markov": False}),
    "dspark_rnn_reduced": ("dspark", {"markov_head_type": "rnn", "draft_vocab_size": 9}),
    "dspark_no_confidence": ("dspark", {"enable_confidence_head": False, "confidence_head_with_markov": False}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_speculators_library_reads_what_is_written(spec_library: Any, name: str) -> None:
    """Its config class has our fields; its module consists of our tensors, but for what it takes from the policy."""
    algo, changes = VARIANTS[name]
    arch = canonical_arch(algo, **changes)
    raw = json.loads(json.dumps(written_speculators(algo, arch)))
    config = spec_library.read(raw)
    assert type(config) is spec_library.configs[algo]
    classes = [c for c in type(config).__mro__ if c.__module__.startswith("speculators.")]
    fields = {key for c in classes for key in inspect.get_annotations(c)} & type(config).model_fields.keys()
    assert fields >= {"block_size", "sliding_window_non_causal", "speculators_version"}
    assert fields <= raw.keys(), "a field is left to its default"
    for key in fields - {"transformer_layer_config", "speculators_config"}:
        assert getattr(config, key) == raw[key], key
    layer = config.transformer_layer_config
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "head_dim", "rms_norm_eps", "vocab_size"):
        assert getattr(layer, key) == getattr(arch, key), key
    assert {k: v for k, v in layer.rope_parameters.items() if v is not None} == dict(arch.rope)
    assert layer.layer_types == ["full_attention"] * arch.num_hidden_layers
    assert config.speculators_config.verifier.name_or_path == "org/policy"
    assert config.speculators_config.proposal_methods[0].speculative_tokens == arch.num_predicted

    layer._attn_implementation = "eager"
    theirs = {n: tuple(t.shape) for n, t in spec_library.models[algo](config).state_dict().items()}
    own = arch.published_shapes() | arch.frozen_shapes()
    policys = {"embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight"}
    assert {n: s for n, s in theirs.items() if n in own} == own
    assert theirs.keys() - own.keys() <= policys


@pytest.mark.parametrize("algo", ["dflash", "dspark"])
@pytest.mark.parametrize("reduced", [False, True], ids=["full", "reduced"])
def test_what_the_speculators_library_writes_is_read(spec_library: Any, algo: str, reduced: bool) -> None:
    """Its own serialisation, which leaves out what its base class has as default."""
    arch = canonical_arch(algo, draft_vocab_size=9 if reduced else VOCAB)
    config = spec_library.read(json.loads(json.dumps(speculators(algo, draft_vocab_size=arch.draft_vocab_size).config)))
    raw = json.loads(config.to_json_string())
    assert algorithm_of(raw) == algo
    assert read(algo, raw).identity() == arch.identity()


@pytest.mark.parametrize("algo", BLOCK_ALGOS)
def test_specforge_computes_the_same_states(forge_library: Any, algo: str) -> None:
    """Its module takes our tensors under our names, and one block has the same states."""
    from transformers import Qwen3Config

    arch = canonical_arch(algo, extra={"num_target_layers": TARGET_LAYERS})
    raw = adapter_of(algo).write_config(arch, dtype="float32")
    if algo == "dspark":
        # It looks for everything in the nested block.
        heads = {key: raw[key] for key in raw.keys() & {f for f in vars(arch) if "markov" in f or "confidence" in f}}
        raw["dflash_config"] |= heads
    config = Qwen3Config.from_dict(json.loads(json.dumps(raw)))
    config._attn_implementation = "sdpa"
    theirs = forge_library[algo](config).float().eval()
    module, policy = make_block_module(RUNTIMES[algo], arch), StubPolicy()
    theirs.load_state_dict(dict(module.named_parameters()), strict=True)
    assert (theirs.block_size, theirs.mask_token_id, list(theirs.target_layer_ids)) == (4, MASK, [0, 2])
    block = one_block(module, policy)
    with torch.no_grad():
        want = theirs(position_ids=block.position_ids, noise_embedding=block.embeddings, target_hidden=block.features)
    first = arch.first_slot
    torch.testing.assert_close(block.states, want[0, first:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_engine_translates_the_speculators_layout_to_the_native_one(name: str) -> None:
    """Every field that the engine's models read has the value that the native layout gives them."""
    from vllm.transformers_utils.configs.speculators.base import SpeculatorsConfig

    algo, changes = VARIANTS[name]
    arch = canonical_arch(algo, **changes)
    native = adapter_of(algo).write_config(arch, dtype="float32")
    raw = json.loads(json.dumps(written_speculators(algo, arch)))
    assert SpeculatorsConfig.extract_vllm_speculative_config(raw) == {
        "method": algo,
        "num_speculative_tokens": arch.num_predicted,
    }
    config = SpeculatorsConfig(**SpeculatorsConfig.extract_transformers_pre_trained_config(raw))
    ours_only = {"dflash_config", "torch_dtype", "model_type", "nemo_rl_draft", "block_size"}
    for key in native.keys() - ours_only:
        assert getattr(config, key) == native[key], key
    assert config.eagle_aux_hidden_state_layer_ids == list(arch.feature_ids)
    if algo == "dflash":
        nested = {**native["dflash_config"], "sample_from_anchor": False}
        del nested["block_size"]
        assert config.dflash_config == nested
    else:
        assert config.block_size == arch.block_size
        assert config.dspark_bonus_anchor is not arch.sample_from_anchor
        assert not hasattr(config, "dflash_config")
