"""P-EAGLE in configuration and files: new drafts, published layouts, what is refused, exports, what is published."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_rl.errors import CheckpointError, ConfigError, RefitError
from nemo_rl.models.automodel.draft.adapters.eagle3 import Eagle3Adapter
from nemo_rl.models.automodel.draft.adapters.peagle import PEagleAdapter
from nemo_rl.models.automodel.draft.builders import PolicyWeights, build_draft
from nemo_rl.models.automodel.draft.config import PEagleDraftConfig
from nemo_rl.models.automodel.draft.models.peagle import PEagleDraft
from nemo_rl.models.automodel.draft.peagle import PEagleRuntime
from nemo_rl.models.automodel.draft.publish import PublishContract, check_contract
from nemo_rl.models.automodel.draft.registry import resolve_spec
from tests.unit.models.automodel.draft import helpers
from tests.unit.models.automodel.draft.helpers import TARGET_LAYERS, VOCAB, StubPolicy, make_documents, run_step
from tests.unit.models.automodel.draft.peagle_reference import MASK, make_arch, make_runtime
from tests.unit.models.automodel.draft.test_peagle_reference import module_logits

ADAPTER = PEagleAdapter()
IDS = [5, 2, 19, 20]
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
    "eos_token_id": [17, 18],
    "bos_token_id": 16,
    "pad_token_id": 15,
}
DOCUMENTS = ["0011111111", "000111"]


def _resolve(*, k=3, policy=None, **settings):
    settings = {"mask_token_id": MASK, "aux_layer_indices": [0, 2], **settings}
    cfg = PEagleDraftConfig(enabled=True, **{key: v for key, v in settings.items() if v is not None})
    return resolve_spec(cfg, policy_config=POLICY | (policy or {}), k=k, max_model_len=64, dtype="float32")


def _weights(dtype=torch.float32):
    g = torch.Generator().manual_seed(3)
    head, embedding = (torch.randn(VOCAB, 12, generator=g).to(dtype) for _ in range(2))
    return PolicyWeights(head=head, embedding=embedding, final_norm=None)


def _build(spec, *, weights=None, draft_dir=None):
    return build_draft(
        spec,
        module_class=PEagleDraft,
        weights=weights or _weights(),
        draft_dir=draft_dir,
        trust_pickle=False,
        seed=0,
    )


def _rewrite(directory, **changes):
    path = directory / "config.json"
    raw = json.loads(path.read_text()) | changes
    (directory / "draft_meta.json").unlink(missing_ok=True)
    path.write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))


# -- new drafts ------------------------------------------------------------------------------------------------------


def test_a_new_draft():
    spec = _resolve(policy={"num_hidden_layers": 36}, aux_layer_indices=None)
    arch = spec.architecture
    assert (arch.num_hidden_layers, arch.num_depths, arch.mask_token_id) == (4, 8, MASK)
    assert arch.feature_ids == (2, 18, 33)
    assert (arch.norm_before_residual, arch.norm_before_fc, arch.fc_norm, arch.layer_family) == (False,) * 3 + (
        "llama",
    )
    assert spec.speculative_config(model_dir="/x") == {
        "method": "eagle3",
        "model": "/x",
        "num_speculative_tokens": 3,
        "parallel_drafting": True,
    }
    assert {"embed_tokens.weight", "lm_head.weight", "mask_hidden"} < set(spec.published_names)
    assert set(spec.published_names) == set(spec.trained_names)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"mask_token_id": None}, r"policy.draft.mask_token_id: got null for a new draft.*below its vocab_size of 23"),
        ({"mask_token_id": VOCAB}, rf"policy.draft.mask_token_id: got {VOCAB}; must be an integer from 0 to 22"),
        ({"mask_token_id": 18}, r"policy.draft.mask_token_id: got 18, the policy's eos_token_id"),
        ({"mask_token_id": 16}, r"policy.draft.mask_token_id: got 16, the policy's bos_token_id"),
        ({"mask_token_id": 15}, r"policy.draft.mask_token_id: got 15, the policy's pad_token_id"),
        ({"num_depths": 2}, r"num_speculative_tokens: got 3; .* at most 2.*policy.draft.num_depths >= 3"),
        ({"k": 9}, r"num_speculative_tokens: got 9; .* at most 8"),
        ({"fc_norm": True, "norm_before_fc": True}, r"policy.draft.fc_norm: got true beside norm_before_fc"),
    ],
)
def test_what_does_not_fit_names_key_value_and_remedy(changes, match):
    with pytest.raises(ConfigError, match=match):
        _resolve(**changes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_new_draft_owns_a_head_and_an_embedding_that_differ_from_the_policys(dtype):
    """Were they bit-equal, the engine would share the policy's, and a refit would overwrite those."""
    serving = getattr(torch, dtype)
    weights = _weights(serving)
    built = _build(dataclasses.replace(_resolve(), dtype=dtype), weights=weights)
    for name, theirs in (("lm_head.weight", weights.head), ("embed_tokens.weight", weights.embedding)):
        ours = built.module.get_parameter(name)
        assert int((ours.to(serving) != theirs).sum()) == 1, name
        torch.testing.assert_close(ours.to(serving), theirs, rtol=1e-2, atol=1e-6)
    assert built.embedding is None
    assert float(built.module.mask_hidden.detach().std()) == pytest.approx(1.0, rel=0.4)
    assert float(built.module.fc.weight.detach().std()) < 0.05


# -- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [{}, {"fc_norm": True}, {"norm_before_fc": True, "layer_family": "qwen3", "norm_before_residual": True}],
    ids=lambda c: "-".join(c) or "plain",
)
def test_native_config_round_trip(changes):
    arch = make_arch(extra={"foo": 1}, **changes)
    raw = json.loads(json.dumps(ADAPTER.write_config(arch, dtype="bfloat16")))
    assert raw["mask_token_id"] == raw["pard_token"] == MASK
    ids = "eagle_aux_hidden_state_layer_ids"
    assert raw[ids] == raw["eagle_config"][ids] == [1, 3]
    assert (raw["num_aux_hidden_states"], raw["num_depths"], raw["parallel_drafting"]) == (2, 4, True)
    source = ADAPTER.read_config(raw)
    assert source.publisher == "nemo_rl"
    assert ADAPTER.architecture(**source.fields, feature_ids=source.feature_ids) == arch
    with pytest.raises(ConfigError, match=r"proposes in parallel \(P-EAGLE\); policy.draft.algo is eagle3"):
        Eagle3Adapter().read_config(raw)


@pytest.mark.parametrize(
    "key", ["mask_token_id", "pard_token", "ptd_token_id", "dspark_noise_token_id", "dflash_config"]
)
def test_the_mask_token_is_found_where_the_engine_looks(key):
    raw = ADAPTER.write_config(make_arch(), dtype="float32")
    del raw["mask_token_id"], raw["pard_token"]
    raw[key] = {"mask_token_id": 7} if key == "dflash_config" else 7
    assert ADAPTER.read_config(raw).fields["mask_token_id"] == 7
    other = "mask_token_id" if key != "mask_token_id" else "pard_token"
    with pytest.raises(ConfigError, match=rf"names different mask tokens: .*{other} 8"):
        ADAPTER.read_config(raw | {other: 8})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, r"architectures \['LlamaForCausalLM'\]; a peagle draft has one of"),
        (
            {"parallel_drafting": None, "mask_token_id": None, "pard_token": None},
            r"so it is an eagle3 draft; policy.draft.algo is peagle",
        ),
        ({"eagle_config": {"use_aux_hidden_state": False}}, r"eagle_config.use_aux_hidden_state is False"),
        ({"rope_theta": None, "rope_parameters": None}, r"neither rope_theta"),
        ({"num_hidden_layers": None}, r"lacks \['num_hidden_layers'\]"),
    ],
)
def test_configs_that_cannot_be_used_name_the_field(change, match):
    raw = ADAPTER.write_config(make_arch(), dtype="float32") | change
    with pytest.raises(ConfigError, match=match):
        ADAPTER.read_config({k: v for k, v in raw.items() if v is not None})


@pytest.fixture
def stored(tmp_path):
    """A directory that a runtime wrote."""
    make_runtime(make_arch()).export(str(tmp_path), StubPolicy())
    return tmp_path


def test_a_loaded_draft_keeps_its_own_settings_but_the_configuration_chooses_the_depths(stored):
    settings = {"model_name": str(stored), "aux_layer_indices": None, "mask_token_id": None}
    assert _resolve(**settings).architecture == make_arch()
    assert _resolve(**settings, num_depths=6, k=5).architecture == make_arch(num_depths=6)
    with pytest.raises(ConfigError, match=r"num_speculative_tokens: got 5; .* at most 4"):
        _resolve(**settings, k=5)
    with pytest.raises(ConfigError, match=rf"mask_token_id: got 3; the draft in policy.draft.model_name has {MASK}"):
        _resolve(**settings | {"mask_token_id": 3})
    with pytest.raises(ConfigError, match=r"norm_before_residual: got True; .* has False"):
        _resolve(**settings, norm_before_residual=True)


def test_what_a_file_leaves_open_must_be_said(stored):
    settings = {"model_name": str(stored), "aux_layer_indices": None, "mask_token_id": None}
    _rewrite(stored, num_depths=None)
    with pytest.raises(ConfigError, match=r"policy.draft.num_depths: got null, and the draft's config.json does not"):
        _resolve(**settings)
    assert _resolve(**settings, num_depths=5).architecture.num_depths == 5
    _rewrite(stored, mask_token_id=None, pard_token=None)
    with pytest.raises(
        ConfigError, match=r"policy.draft.mask_token_id: got null, and the draft's config.json does not"
    ):
        _resolve(**settings, num_depths=5)
    assert _resolve(**settings | {"mask_token_id": 9}, num_depths=5).architecture.mask_token_id == 9
    _rewrite(stored, mask_token_id=17)
    with pytest.raises(ConfigError, match=r"mask_token_id: got 17, the policy's eos_token_id"):
        _resolve(**settings, num_depths=5)


def test_nemo_automodels_layout_is_read_when_the_layers_are_given(stored):
    """Names under `model.`, another architecture, no feature ids."""
    names = {n: n if n in ("lm_head.weight", "mask_hidden") else f"model.{n}" for n in make_arch().trained_shapes()}
    tensors = load_file(stored / "model.safetensors")
    save_file({names[n]: t for n, t in tensors.items()}, stored / "model.safetensors")
    ids = "eagle_aux_hidden_state_layer_ids"
    _rewrite(stored, architectures=["LlamaEagle3DraftModel"], nemo_rl_draft=None, **{ids: None, "eagle_config": None})
    settings = {"model_name": str(stored), "mask_token_id": None}
    with pytest.raises(ConfigError, match=r"aux_layer_indices: got null, and the draft's publisher never writes"):
        _resolve(**settings, aux_layer_indices=None)
    spec = _resolve(**settings)
    assert spec.architecture == make_arch()
    built = _build(spec, draft_dir=str(stored))
    for name, tensor in tensors.items():
        assert torch.equal(built.module.get_parameter(name), tensor), name


def _speculators(arch, **changes):
    layer = {
        key: getattr(arch, key)
        for key in (
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "rms_norm_eps",
            "vocab_size",
            "max_position_embeddings",
        )
    }
    return {
        "architectures": ["PEagleSpeculator"],
        "speculators_model_type": "peagle",
        "speculators_version": "0.5.0",
        "speculators_config": {"algorithm": "peagle"},
        "transformer_layer_config": layer | {"model_type": "llama", "rope_theta": 1e4},
        "draft_vocab_size": arch.draft_vocab_size,
        "target_hidden_size": arch.target_hidden_size,
        "mask_token_id": MASK,
        "num_depths": 4,
        "eagle_aux_hidden_state_layer_ids": [1, 3],
        **changes,
    }


def test_the_speculators_layout_is_read_as_the_engine_reads_it():
    from vllm.transformers_utils.configs.speculators.algos import update_peagle

    raw = _speculators(make_arch())
    source = ADAPTER.read_config(raw)
    ours = dataclasses.replace(ADAPTER.architecture(**source.fields, feature_ids=source.feature_ids), extra={})
    assert ours == make_arch()
    engine = {"model_type": "llama"}
    update_peagle(raw, engine)
    assert engine["pard_token"] == ours.mask_token_id
    assert engine["eagle_aux_hidden_state_layer_ids"] == list(ours.feature_ids)
    for key in ("norm_before_residual", "norm_before_fc", "draft_vocab_size", "target_hidden_size"):
        assert engine[key] == getattr(ours, key), key
    assert not {"fc_norm", "norm_output"} & engine.keys(), "the engine reads them now: so must the adapter"
    assert ADAPTER.read_config(raw | {"num_depths": None, "para_depths": 6}).fields["num_depths"] == 6


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"fc_norm": True}, r"has fc_norm True; the engine ignores that"),
        ({"norm_output": True}, r"has norm_output True; the engine ignores that"),
        ({"speculators_model_type": "eagle3"}, r"speculators_model_type 'eagle3'; policy.draft.algo is peagle"),
        (
            {"transformer_layer_config": {"model_type": "gpt2"}},
            r"transformer_layer_config of model_type llama or qwen3",
        ),
    ],
)
def test_speculators_files_that_cannot_be_used_name_the_field(change, match):
    with pytest.raises(ConfigError, match=match):
        ADAPTER.read_config(_speculators(make_arch(), **change))


# -- tensors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [None, IDS], ids=["full", "reduced"])
def test_a_loaded_export_computes_the_same(tmp_path, ids):
    arch = make_arch(**({} if ids is None else {"draft_vocab_size": 4}))
    runtime = make_runtime(arch, ids=ids)
    runtime.export(str(tmp_path), StubPolicy())
    assert set(load_file(tmp_path / "model.safetensors")) == {*arch.trained_shapes(), *(("d2t", "t2d") if ids else ())}
    settings = {"model_name": str(tmp_path), "aux_layer_indices": None, "mask_token_id": None}
    spec = _resolve(**settings)
    assert spec.architecture == arch
    built = _build(spec, draft_dir=str(tmp_path))
    again = PEagleRuntime(runtime.cfg, spec, built, device=torch.device("cpu"), dtype=torch.float32, seed=0)
    docs = make_documents(DOCUMENTS, arch)
    before, after = module_logits(runtime, docs), module_logits(again, docs)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[e], after[e]) for e in before)


def test_what_a_checkpoint_lacks_comes_from_the_policy_but_the_placeholder(stored):
    tensors = load_file(stored / "model.safetensors")
    del tensors["lm_head.weight"], tensors["embed_tokens.weight"]
    (stored / "draft_meta.json").unlink()
    save_file(tensors, stored / "model.safetensors")
    weights = _weights()
    spec = _resolve(model_name=str(stored), aux_layer_indices=None, mask_token_id=None)
    built = _build(spec, draft_dir=str(stored), weights=weights)
    for name, theirs in (("lm_head.weight", weights.head), ("embed_tokens.weight", weights.embedding)):
        assert int((built.module.get_parameter(name) != theirs).sum()) == 1, name
    save_file({n: t for n, t in tensors.items() if n != "mask_hidden"}, stored / "model.safetensors")
    with pytest.raises(ConfigError, match=r"1 missing: \['mask_hidden'\]"):
        _resolve(model_name=str(stored), aux_layer_indices=None, mask_token_id=None)
    with pytest.raises(CheckpointError, match=r"1 missing: \['mask_hidden'\]"):
        _build(spec, draft_dir=str(stored))


# -- publishing ------------------------------------------------------------------------------------------------------


def test_everything_is_trained_published_and_moves():
    arch = make_arch(fc_norm=True)
    runtime = make_runtime(arch)
    assert runtime.contract == (True, True)
    before = {n: t.clone() for n, t in runtime.stream(StubPolicy())}
    assert before.keys() == {f"draft.{n}" for n, _ in runtime.module.named_parameters()}
    assert tuple(before["draft.mask_hidden"].shape) == (1, 1, arch.feature_size)
    optimizer = torch.optim.SGD(runtime.param_group()["params"], lr=0.1)
    run_step(runtime, make_documents(DOCUMENTS, arch), [[0, 1]])
    optimizer.step()
    for name, tensor in runtime.stream(StubPolicy()):
        assert not torch.equal(tensor, before[name]), name
    moved = dict(runtime.stream(StubPolicy()))["draft.embed_tokens.weight"][MASK]
    assert not torch.equal(moved, before["draft.embed_tokens.weight"][MASK]), "the mask token's row"


@pytest.mark.parametrize("part", ["embed_tokens", "lm_head", "mask_hidden"])
def test_a_frozen_part_stays_and_is_not_sent_again(tmp_path, part):
    arch = make_arch()
    spec = _resolve(num_layers=2, num_depths=4, freeze=(part,))
    assert [n for n in spec.frozen if n.split(".")[0] == part] == list(spec.frozen) != []
    cfg = PEagleDraftConfig(enabled=True, freeze=(part,))
    runtime = PEagleRuntime(cfg, spec, _build(spec), device=torch.device("cpu"), dtype=torch.float32, seed=0)
    name = spec.frozen[0]
    before = runtime.module.get_parameter(name).clone()
    group = runtime.param_group()["params"]
    docs = make_documents(DOCUMENTS, arch)
    batch = helpers.to_batch(docs)
    runtime.begin_global_batch(batch, step=0, dp_group=None, policy_model=StubPolicy())
    mb = helpers.to_microbatch(batch, [0, 1])
    runtime.loss(mb, helpers.give_features(runtime, mb, docs)).loss.backward()
    assert all(p.grad is not None for p in group)
    torch.optim.SGD(group, lr=0.1).step()
    assert torch.equal(runtime.module.get_parameter(name), before)
    assert name not in runtime.manifest()
    assert {n for n, _ in runtime.stream(StubPolicy())} == {f"draft.{n}" for n in runtime.manifest()}
    runtime.export(str(tmp_path), StubPolicy())
    assert name in load_file(tmp_path / "model.safetensors")


def test_a_contract_that_forgets_the_embedding_is_refused():
    runtime = make_runtime(make_arch())
    with pytest.raises(RefitError, match=r"embed_tokens.weight: the contract says trained = False"):
        check_contract(runtime.module, runtime.spec, PublishContract(trains_lm_head=True, trains_embeddings=False))
