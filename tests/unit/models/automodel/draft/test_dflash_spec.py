"""DFlash in configuration and files: new drafts, published layouts, what is refused, exports that others read."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_rl.errors import ConfigError
from nemo_rl.models.automodel.draft.adapters.dflash import DFlashAdapter
from nemo_rl.models.automodel.draft.config import DFlashDraftConfig
from nemo_rl.models.automodel.draft.registry import build_draft_runtime, resolve_spec
from tests.unit.models.automodel.draft.block_helpers import (
    MASK,
    PERMUTED_IDS,
    make_block_arch,
    make_block_runtime,
    one_block,
)
from tests.unit.models.automodel.draft.helpers import TARGET_LAYERS, VOCAB, StubPolicy, make_documents, run_step

ADAPTER = DFlashAdapter()
POLICY = {
    "num_hidden_layers": TARGET_LAYERS,
    "hidden_size": 12,
    "vocab_size": VOCAB,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 20,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "rope_theta": 1e4,
    "eos_token_id": [20, 21],
    "bos_token_id": 19,
}


def _resolve(*, k=3, policy=None, vocab_ids=None, **settings):
    settings = {"mask_token_id": MASK, "aux_layer_indices": [0, 2], **settings}
    cfg = DFlashDraftConfig(enabled=True, **{key: v for key, v in settings.items() if v is not None})
    return resolve_spec(
        cfg, policy_config=POLICY | (policy or {}), k=k, max_model_len=64, dtype="float32", vocab_ids=vocab_ids
    )


# -- new drafts ------------------------------------------------------------------------------------------------------


def test_a_new_draft():
    spec = _resolve(num_layers=None)
    arch = spec.architecture
    assert (arch.block_size, arch.num_predicted, arch.first_slot, arch.causal) == (4, 3, 1, False)
    assert (arch.num_hidden_layers, arch.layer_family, arch.feature_ids) == (5, "qwen3", (1, 3))
    assert spec.speculative_config(model_dir="/x") == {"method": "dflash", "model": "/x", "num_speculative_tokens": 3}
    assert spec.serving_extension is None
    assert "lm_head.weight" not in spec.published_names
    assert set(spec.published_names) == set(spec.trained_names)
    assert _resolve(block_size=4, causal=True).architecture.causal


def test_default_features_are_those_of_the_specification():
    ids = _resolve(aux_layer_indices=None, policy={"num_hidden_layers": 36}).architecture.feature_ids
    assert ids == (2, 10, 18, 26, 34)
    assert _resolve(aux_layer_indices=None, policy={"num_hidden_layers": 8}).architecture.feature_ids == (2, 3, 4, 5, 6)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"mask_token_id": None}, r"policy.draft.mask_token_id: got null for a new draft"),
        (
            {"mask_token_id": VOCAB},
            rf"policy.draft.mask_token_id: got {VOCAB}; must be an integer from 0 to {VOCAB - 1}",
        ),
        ({"mask_token_id": 21}, r"policy.draft.mask_token_id: got 21, the policy's eos_token_id"),
        ({"mask_token_id": 19}, r"policy.draft.mask_token_id: got 19, the policy's bos_token_id"),
        ({"block_size": 8}, r"num_speculative_tokens: got 3; a block of 8 slots predicts 7.*block_size to 4"),
        ({"block_size": 3}, r"num_speculative_tokens: got 3; a block of 3 slots predicts 2"),
        ({"aux_layer_indices": None}, r"policy.draft.aux_layer_indices: got null; the default is 5 layers"),
        ({"aux_layer_indices": [0, 4]}, r"policy.draft.aux_layer_indices: got \[0, 4\]; \[4\] is outside 0..3"),
        ({"draft_vocab_size": 9}, r"policy.draft.draft_vocab_size: got 9 of 23 for a draft from scratch"),
        ({"serve": False}, r"policy.draft.block_size: got null for a new draft that is not served"),
        ({"freeze": ["lm_head"]}, r"policy.draft.freeze: got 'lm_head', which is the policy's"),
    ],
    ids=lambda v: "-".join(f"{k}_{x}" for k, x in v.items()) if isinstance(v, dict) else "",
)
def test_what_cannot_be_says_which_key(settings, match):
    with pytest.raises(ConfigError, match=match):
        _resolve(**settings)


def test_a_draft_that_is_not_served_needs_no_number_of_tokens():
    spec = _resolve(serve=False, block_size=6, k=None)
    assert spec.speculative_config(model_dir="/x") is None
    assert spec.num_speculative_tokens == 5
    assert spec.published_names == ()


# -- files -----------------------------------------------------------------------------------------------------------


def _native(**changes):
    """As the original authors publish it: some fields nested, no export mark."""
    arch = make_block_arch()
    raw = ADAPTER.write_config(arch, dtype="float32")
    for key in ("nemo_rl_draft", "target_hidden_size", "draft_vocab_size", "rope_parameters"):
        del raw[key]
    raw |= {"num_target_layers": TARGET_LAYERS, "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}}
    raw["dflash_config"] = {"mask_token_id": MASK, "target_layer_ids": [0, 2], **changes.pop("nested", {})}
    raw |= changes
    return {k: v for k, v in raw.items() if v != "absent"}


def _speculators(**changes):
    layer = {k: v for k, v in _native().items() if k not in ("dflash_config", "block_size", "architectures")}
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.5.0",
        "speculators_config": {
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "p", "architectures": ["Qwen3ForCausalLM"]},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": VOCAB,
        "aux_hidden_state_layer_ids": [1, 3],
        "mask_token_id": MASK,
        "block_size": 4,
        **changes,
    }


def _arch(raw):
    source = ADAPTER.read_config(raw)
    return ADAPTER.architecture(**source.fields, feature_ids=source.feature_ids)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"causal": True, "block_size": 16},
        {"draft_vocab_size": 9},
        {"extra": {"foo": 1, "dflash_config": {"bar": 2}}},
    ],
    ids=str,
)
def test_config_round_trip(changes):
    arch = make_block_arch(**changes)
    raw = json.loads(json.dumps(ADAPTER.write_config(arch, dtype="float32")))
    assert _arch(raw) == arch
    assert ADAPTER.read_config(raw).publisher == "nemo_rl"
    assert ADAPTER.write_config(_arch(raw), dtype="float32") == raw
    assert raw["dflash_config"]["target_layer_ids"] == [0, 2]
    assert not {"eagle_config", "is_causal", "mask_hidden", "auto_map", "sample_from_anchor"} & raw.keys()


@pytest.mark.parametrize(
    "raw",
    [
        _native(),
        _native(block_size="absent", nested={"block_size": 4}),
        _native(nested={"block_size": 4, "projector_type": None, "causal": False}),
        _native(architectures=["Qwen3DFlashDraftModel"]),
        _native(is_causal=False),
        _speculators(),
    ],
    ids=["native", "nested_block_size", "both_places", "automodel", "is_causal", "speculators"],
)
def test_published_layouts_are_one_draft(raw):
    arch = _arch(raw)
    assert arch.identity() == make_block_arch().identity()
    assert "auto_map" not in ADAPTER.write_config(arch, dtype="float32")


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        (_native(architectures=["LlamaForCausalLMEagle3"]), "another algorithm"),
        (_native(architectures="absent"), "another algorithm, or no draft"),
        (_native(model_type="llama"), "model_type 'llama'"),
        (_native(nested={"block_size": 8}), "block_size twice: block_size is 4, dflash_config.block_size is 8"),
        (_native(nested={"projector_type": "domino"}), "projector_type 'domino'"),
        (_native(nested={"projector_type": "dspark"}), "projector_type 'dspark'"),
        (_native(nested={"conv_kernel_size": 3}), "conv_kernel_size"),
        (_native(nested={"selector_rank": 3}), "selector_rank"),
        (_native(nested={"use_swa": True}), "use_swa True"),
        (_native(nested={"input_embedding_scale": 8.0}), "input_embedding_scale 8.0"),
        (_native(nested={"output_multiplier": 0.5}), "output_multiplier 0.5"),
        (_native(nested={"final_logit_softcapping": 30.0}), "final_logit_softcapping 30.0"),
        (_native(nested={"use_aux_hidden_state": False}), "use_aux_hidden_state False"),
        (_native(nested={"sample_from_anchor": True}), "sample_from_anchor true"),
        (_native(logit_scale=0.5), "logit_scale 0.5"),
        (_native(is_neox_style=False), "is_neox_style False"),
        (_native(layer_types=["sliding_attention", "full_attention"]), "layer_types"),
        (_native(attention_bias=True), "attention_bias is true"),
        (_native(quantization_config={"bits": 4}), "quantized"),
        (_native(rope_theta="absent"), "neither rope_theta"),
        (_speculators(speculators_model_type="eagle3"), "speculators_model_type 'eagle3'"),
        (_speculators(block_size=8), "proposes 3 tokens from blocks of 8 slots"),
        (_speculators(sample_from_anchor=True), "sample_from_anchor true"),
    ],
    ids=lambda v: "" if isinstance(v, dict) else v.replace(" ", "_"),
)
def test_configs_that_cannot_be_used_name_the_field(raw, match):
    with pytest.raises(ConfigError, match=f"policy.draft.model_name.*{match}"):
        ADAPTER.read_config(raw)


def _write(directory, raw, **tensors):
    """A native directory with the tensors of a tiny draft."""
    module = make_block_runtime(make_block_arch()).module
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(raw))
    save_file({**module.state_dict(), **tensors}, directory / "model.safetensors")
    return module


@pytest.mark.parametrize(
    ("raw", "settings", "match"),
    [
        (_native(), {"k": 2}, "num_speculative_tokens: got 2; a block of 4 slots predicts 3"),
        (_native(), {"k": 5}, "num_speculative_tokens: got 5; a block of 4 slots predicts 3"),
        (_native(), {"block_size": 8}, "policy.draft.block_size: got 8; the draft in policy.draft.model_name has 4"),
        (_native(), {"mask_token_id": 5}, "policy.draft.mask_token_id: got 5; the draft .* has 22"),
        (_native(), {"causal": True}, "policy.draft.causal: got True; the draft .* has False"),
        (
            _native(),
            {"aux_layer_indices": [0, 1]},
            r"aux_layer_indices: got \[0, 1\]; the draft was trained on \[0, 2\]",
        ),
        (_native(num_target_layers=9), {}, "made for a policy of 9 layers; this one has 5"),
        (_native(hidden_size=16), {}, "features of size 16"),
        (_native(vocab_size=99), {}, "vocabulary of size 99"),
        (
            _native(nested={"mask_token_id": 23}),
            {"mask_token_id": None},
            "mask_token_id: got 23; must be an integer from",
        ),
        (_native(nested={"target_layer_ids": None}), {"aux_layer_indices": None}, "has no target_layer_ids"),
        (_native(block_size="absent"), {}, "policy.draft.block_size: got null, and the draft's config.json does not"),
        (_native(nested={"mask_token_id": None}), {"mask_token_id": None}, "policy.draft.mask_token_id: got null"),
        (_speculators(mask_token_id=None), {"mask_token_id": None}, "policy.draft.mask_token_id: got null"),
        (_native(num_hidden_layers=1, layer_types=["full_attention"]), {}, "unexpected.*layers.1"),
        (_native(intermediate_size=24), {}, r"mlp.down_proj.weight has shape \[12, 20\], \[12, 24\] needed"),
    ],
    ids=lambda v: "" if isinstance(v, dict) else v.replace(" ", "_"),
)
def test_drafts_that_do_not_fit_the_run_are_refused(tmp_path, raw, settings, match):
    _write(tmp_path / "d", raw)
    with pytest.raises(ConfigError, match=match):
        _resolve(model_name=str(tmp_path / "d"), **settings)


@pytest.mark.parametrize(
    "name",
    ["mask_hidden", "context_proj.weight", "layers.0.g_proj.weight", "aux_hidden_norms.0.weight", "conv_in.weight",
     "selector_head.weight", "layers.0.self_attn.qkv_proj.weight"],
)  # fmt: skip
def test_tensors_of_other_models_are_refused(tmp_path, name):
    _write(tmp_path / "d", _native(), **{name: torch.zeros(2)})
    with pytest.raises(ConfigError, match=name.split(".")[-2] if "." in name else name):
        _resolve(model_name=str(tmp_path / "d"))


def test_copies_of_the_policys_tensors_are_ignored(tmp_path):
    copies = {"embed_tokens.weight": torch.zeros(VOCAB, 12), "lm_head.weight": torch.zeros(VOCAB, 12)}
    module = _write(tmp_path / "d", _native(), **copies)
    spec = _resolve(model_name=str(tmp_path / "d"), mask_token_id=None, aux_layer_indices=None)
    assert (spec.source, spec.architecture.mask_token_id) == ("directory", MASK)
    cfg = DFlashDraftConfig(enabled=True, model_name=str(tmp_path / "d"))
    runtime = build_draft_runtime(
        cfg, spec, policy_model=StubPolicy(), device="cpu", dtype="float32", draft_dir=str(tmp_path / "d"), seed=0
    )
    loaded = runtime.module.state_dict()
    assert loaded.keys() == module.state_dict().keys()
    assert all(torch.equal(loaded[n], t) for n, t in module.state_dict().items())


# -- exports ---------------------------------------------------------------------------------------------------------


def test_automodel_reads_our_export_to_the_same_states(tmp_path):
    """Config and weights through an independent reader; one block with the engine's layout."""
    from nemo_automodel.components.speculative.dflash.draft_qwen3 import Qwen3DFlashDraftModel
    from transformers import Qwen3Config

    arch = make_block_arch(extra={"num_target_layers": TARGET_LAYERS})
    runtime, policy = make_block_runtime(arch), StubPolicy()
    runtime.export(str(tmp_path), policy)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored.keys() == dict(runtime.module.named_parameters()).keys()
    config = Qwen3Config.from_dict(json.loads((tmp_path / "config.json").read_text()))
    config._attn_implementation = "sdpa"
    theirs = Qwen3DFlashDraftModel(config).float()
    theirs.load_state_dict(stored, strict=False)
    assert (theirs.block_size, theirs.mask_token_id, list(theirs.target_layer_ids)) == (4, MASK, [0, 2])

    block = one_block(runtime.module, policy)
    with torch.no_grad():
        want = theirs(position_ids=block.position_ids, noise_embedding=block.embeddings, target_hidden=block.features)
    torch.testing.assert_close(block.states, want[0, 1:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_reduced_vocabulary_round_trip(tmp_path, dtype):
    """d2t, t2d and the policy's head rows are in the export; the head of a later policy replaces the stored one."""
    cfg = DFlashDraftConfig(enabled=True, mask_token_id=MASK, aux_layer_indices=[0, 2], draft_vocab_size=9)
    kinds = {"policy_config": POLICY, "k": 3, "max_model_len": 64, "dtype": dtype}
    policy = StubPolicy()
    spec = resolve_spec(cfg, **kinds, vocab_ids=PERMUTED_IDS)
    build = {"policy_model": policy, "device": "cpu", "dtype": "float32", "seed": 3}
    runtime = build_draft_runtime(cfg, spec, draft_dir=None, **build)
    runtime.export(str(tmp_path / "a"), policy)
    stored = load_file(tmp_path / "a" / "model.safetensors")
    assert stored.keys() - set(spec.trained_names) == {"lm_head.weight", "d2t", "t2d"}
    assert torch.equal(stored["lm_head.weight"], policy.head.weight[PERMUTED_IDS].to(getattr(torch, dtype)))
    assert (stored["d2t"] + torch.arange(9)).tolist() == PERMUTED_IDS

    with torch.no_grad():
        policy.head.weight.mul_(2)
    again_cfg = DFlashDraftConfig(enabled=True, model_name=str(tmp_path / "a"))
    again_spec = resolve_spec(again_cfg, **kinds)
    assert again_spec.vocab_ids == tuple(PERMUTED_IDS)
    again = build_draft_runtime(again_cfg, again_spec, draft_dir=str(tmp_path / "a"), **build)
    again.export(str(tmp_path / "b"), policy)
    second = load_file(tmp_path / "b" / "model.safetensors")
    assert second.keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(second[name], tensor) is (name != "lm_head.weight"), name
    if dtype == "float32":
        docs = make_documents(["00111111", "0111"], spec.architecture)
        assert float(run_step(again, docs, [[0, 1]]).loss) == pytest.approx(
            float(run_step(runtime, docs, [[0, 1]]).loss)
        )


def test_a_static_draft_sends_nothing_but_a_live_head(tmp_path):
    runtime = make_block_runtime(make_block_arch(draft_vocab_size=9), ids=PERMUTED_IDS)
    runtime.export(str(tmp_path), StubPolicy())
    spec = _resolve(model_name=str(tmp_path), mask_token_id=None, aux_layer_indices=None, static=True)
    assert spec.published_names == ("lm_head.weight",)
