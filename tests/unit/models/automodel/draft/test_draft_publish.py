"""Building, publishing, exporting and resuming a draft."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_rl.errors import CheckpointError, RefitError
from nemo_rl.models.automodel.draft import publish
from nemo_rl.models.automodel.draft.builders import PolicyWeights, build_draft
from nemo_rl.models.automodel.draft.config import Eagle3DraftConfig
from nemo_rl.models.automodel.draft.eagle3 import Eagle3Runtime
from nemo_rl.models.automodel.draft.models.layers import RopeFrequencies
from nemo_rl.models.automodel.draft.models.llama_eagle import LlamaEagleDraft
from nemo_rl.models.automodel.draft.registry import resolve_spec
from tests.unit.models.automodel.draft.helpers import (
    TARGET_LAYERS,
    VOCAB,
    StubPolicy,
    make_arch,
    make_documents,
    make_runtime,
    make_spec,
    run_step,
)

CFG = Eagle3DraftConfig(enabled=True, ttt_steps=3)
IDS = [5, 2, 19, 20]
POLICY = {
    "num_hidden_layers": TARGET_LAYERS,
    "hidden_size": 12,
    "vocab_size": VOCAB,
    "num_attention_heads": 4,
    "intermediate_size": 20,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "rope_theta": 1e4,
}


def _weights(seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    head = torch.randn(VOCAB, 12, generator=g).to(dtype)
    return PolicyWeights(head, None, torch.rand(12, generator=g).to(dtype) + 0.5)


def _build(spec, *, weights=None, draft_dir=None, seed=0, trust_pickle=False):
    return build_draft(
        spec,
        module_class=LlamaEagleDraft,
        weights=weights or _weights(),
        draft_dir=draft_dir,
        trust_pickle=trust_pickle,
        seed=seed,
    )


# -- builders --------------------------------------------------------------------------------------------------------


def test_a_new_draft_starts_from_the_policys_head_and_norm():
    arch = make_arch(draft_vocab_size=4)
    built = _build(make_spec(arch, ids=IDS))
    assert torch.equal(built.module.lm_head.weight, _weights().head[IDS])
    assert torch.equal(built.module.norm.weight, _weights().final_norm)
    assert torch.equal(built.module.layers[0].hidden_norm.weight, torch.ones(12))
    assert float(built.module.fc.weight.detach().std()) == pytest.approx(0.2, rel=0.2)
    assert built.vocab.ids == tuple(IDS)


def test_initialisation_depends_on_the_seed_alone():
    spec = make_spec(make_arch())
    torch.manual_seed(1)
    one = _build(spec).module.state_dict()
    torch.manual_seed(2)
    torch.rand(3)
    two, other = _build(spec).module.state_dict(), _build(spec, seed=1).module.state_dict()
    assert all(torch.equal(one[k], two[k]) for k in one)
    assert not torch.equal(one["fc.weight"], other["fc.weight"])
    assert not torch.equal(one["layers.0.self_attn.k_proj.weight"], one["layers.0.self_attn.v_proj.weight"]), (
        "tensors of one shape must not be drawn alike"
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_trained_head_is_never_bit_equal_to_the_policys(dtype):
    """The engine shares the policy's head with a draft whose head is equal at load; a refit would overwrite it."""
    serving = getattr(torch, dtype)
    head = _weights(dtype=serving)
    built = _build(make_spec(make_arch(), dtype=dtype), weights=head)
    ours = built.module.lm_head.weight.to(serving)
    assert not torch.equal(ours, head.head)
    assert int((ours != head.head).sum()) == 1
    torch.testing.assert_close(ours, head.head, rtol=1e-2, atol=1e-6)


def test_padded_vocabulary_rows_are_left_out():
    padded = PolicyWeights(torch.cat([_weights().head, torch.full((9, 12), 7.0)]), None, None)
    built = _build(make_spec(make_arch()), weights=padded)
    assert built.module.lm_head.weight.shape == (VOCAB, 12)
    assert torch.equal(built.module.norm.weight, torch.ones(12))


@pytest.mark.parametrize("dialect", ["layers.0.", "midlayer."])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_key_dialects_load_to_equal_weights(tmp_path, dialect, prefix):
    runtime = make_runtime(make_arch(draft_vocab_size=4), CFG, ids=IDS)
    runtime.export(str(tmp_path), StubPolicy())
    tensors = {
        (n if n in ("d2t", "t2d", "lm_head.weight") else prefix + n.replace("layers.0.", dialect)): t
        for n, t in load_file(tmp_path / "model.safetensors").items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    built = _build(runtime.spec, draft_dir=str(tmp_path))
    for name, tensor in runtime.module.state_dict().items():
        assert torch.equal(built.module.state_dict()[name], tensor), name
    assert built.vocab.ids == tuple(IDS)


def test_an_absent_head_is_made_from_the_policy_and_a_copied_embedding_is_ignored(tmp_path):
    runtime = make_runtime(make_arch(draft_vocab_size=4), CFG, ids=IDS)
    runtime.export(str(tmp_path), StubPolicy())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["lm_head.weight"]
    tensors["embed_tokens.weight"] = torch.zeros(VOCAB, 12)
    save_file(tensors, tmp_path / "model.safetensors")
    built = _build(runtime.spec, draft_dir=str(tmp_path))
    assert torch.equal(built.module.lm_head.weight, _weights().head[IDS])
    assert built.embedding is None


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t.pop("fc.weight"), r"1 missing: \['fc.weight'\]"),
        (lambda t: t.update({"layers.0.mlp.extra": torch.zeros(1)}), r"1 unexpected"),
        (lambda t: t.update({"fc.weight": torch.zeros(12, 23)}), r"fc.weight has shape \[12, 23\]"),
        (lambda t: t["norm.weight"].fill_(float("nan")), r"1 tensors hold NaN or infinity: \['norm.weight'\]"),
        (lambda t: t.pop("d2t"), "no d2t that says"),
    ],
    ids=["missing", "extra", "shape", "nan", "d2t"],
)
def test_bad_tensors_stop_the_build(tmp_path, change, match):
    runtime = make_runtime(make_arch(draft_vocab_size=4), CFG, ids=IDS)
    runtime.export(str(tmp_path), StubPolicy())
    tensors = {n: t.clone() for n, t in load_file(tmp_path / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=match) as err:
        _build(runtime.spec, draft_dir=str(tmp_path))
    assert str(tmp_path) in str(err.value)


def test_a_truncated_file_is_named(tmp_path):
    runtime = make_runtime(make_arch(), CFG)
    runtime.export(str(tmp_path), StubPolicy())
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=rf"{file}: is truncated"):
        _build(runtime.spec, draft_dir=str(tmp_path))


def test_a_pickle_is_read_only_when_trusted(tmp_path):
    runtime = make_runtime(make_arch(), CFG)
    torch.save(dict(runtime.module.state_dict()), tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pickle file; set policy\.draft\.trust_pickle"):
        _build(runtime.spec, draft_dir=str(tmp_path))
    built = _build(runtime.spec, draft_dir=str(tmp_path), trust_pickle=True)
    assert torch.equal(built.module.fc.weight, runtime.module.fc.weight)


# -- publishing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [{}, {"fc_norm": True, "num_hidden_layers": 2}, {"norm_before_fc": True, "layer_family": "qwen3"}],
    ids=lambda c: "-".join(c) or "plain",
)
def test_trained_published_and_exported_sets_are_one(tmp_path, changes):
    assert Eagle3Runtime.contract == (True, False)
    runtime = make_runtime(make_arch(**changes), CFG)
    trained = {n for n, p in runtime.module.named_parameters() if p.requires_grad}
    streamed = dict(runtime.stream(StubPolicy()))
    assert trained == set(runtime.manifest()) == set(runtime.spec.trained_names)
    assert {f"draft.{n}" for n in trained} == set(streamed)
    runtime.export(str(tmp_path), StubPolicy())
    assert set(load_file(tmp_path / "model.safetensors")) == trained
    for name, info in runtime.manifest().items():
        assert tuple(streamed[f"draft.{name}"].shape) == info.shape
        assert info.dtype == "float32"
    group = runtime.param_group()
    assert group["name"] == "draft"
    assert len(group["params"]) == len(trained)


def test_every_published_tensor_moves_in_training():
    arch = make_arch(fc_norm=True, num_hidden_layers=2)
    runtime = make_runtime(arch, CFG)
    before = {n: t.clone() for n, t in runtime.stream(StubPolicy())}
    optimizer = torch.optim.SGD(runtime.param_group()["params"], lr=0.1)
    run_step(runtime, make_documents(["0011111"], arch), [[0]])
    optimizer.step()
    for name, tensor in runtime.stream(StubPolicy()):
        assert not torch.equal(tensor, before[name]), name


def test_published_tensors_share_no_memory_and_have_the_serving_dtype():
    runtime = make_runtime(make_arch(), CFG)
    runtime.spec = dataclasses.replace(runtime.spec, dtype="bfloat16")
    for name, tensor in runtime.stream(StubPolicy()):
        assert tensor.dtype == torch.bfloat16
        assert tensor.is_contiguous()
        tensor.zero_()
        assert runtime.module.get_parameter(name.removeprefix("draft.")).abs().sum() > 0
    runtime.spec = dataclasses.replace(runtime.spec, dtype="float32")
    dict(runtime.stream(StubPolicy()))["draft.fc.weight"].zero_()
    assert runtime.module.fc.weight.abs().sum() > 0


def test_a_non_finite_tensor_is_not_published():
    runtime = make_runtime(make_arch(), CFG)
    runtime.module.fc.weight.data[0, 0] = float("inf")
    with pytest.raises(RefitError, match=r"draft.fc.weight: holds NaN or infinity"):
        list(runtime.stream(StubPolicy()))


def test_a_contract_that_lies_is_refused():
    module, spec = make_runtime(make_arch(), CFG).module, make_spec(make_arch())
    with pytest.raises(RefitError, match=r"lm_head.weight: the contract says trained = False"):
        publish.check_contract(module, spec, publish.PublishContract(trains_lm_head=False, trains_embeddings=False))
    module.norm.weight.requires_grad_(False)
    with pytest.raises(RefitError, match=r"differ in \['norm.weight'\]"):
        publish.check_contract(module, spec, Eagle3Runtime.contract)


def test_nothing_of_the_policy_is_a_child_of_the_draft():
    names = {n for n, _ in make_runtime(make_arch(), CFG).module.named_parameters()}
    assert not any("embed" in n for n in names)


# -- export and resume -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ids", [None, IDS], ids=["full", "reduced"])
def test_export_load_export_is_byte_identical(tmp_path, ids, dtype):
    arch = make_arch(extra={"foo": 1}, **({} if ids is None else {"draft_vocab_size": 4}))
    runtime = make_runtime(arch, CFG, ids=ids)
    runtime.spec = dataclasses.replace(runtime.spec, dtype=dtype)
    first, second = tmp_path / "a", tmp_path / "b"
    runtime.export(str(first), StubPolicy())
    cfg = Eagle3DraftConfig(enabled=True, ttt_steps=3, model_name=str(first))
    spec = resolve_spec(cfg, policy_config=POLICY, k=2, max_model_len=64, dtype=dtype)
    assert spec.architecture == arch
    built = _build(spec, draft_dir=str(first))
    again = Eagle3Runtime(cfg, spec, built, device=torch.device("cpu"), dtype=torch.float32, seed=0)
    again.export(str(second), StubPolicy())
    for name in ("config.json", "model.safetensors", "draft_meta.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    tensors = load_file(first / "model.safetensors")
    assert set(tensors) == {*arch.trained_shapes(), *arch.frozen_shapes()}
    assert tensors["fc.weight"].dtype == getattr(torch, dtype)
    if ids is not None:
        assert tensors["d2t"].tolist() == [v - i for i, v in enumerate(ids)]
        assert tensors["t2d"].nonzero().flatten().tolist() == sorted(ids)
    assert not list(first.glob("*.partial"))


def test_a_draft_of_another_width_exports_its_own_embedding(tmp_path):
    arch = make_arch(hidden_size=8)
    runtime = make_runtime(arch, CFG)
    runtime._own_embedding = torch.randn(VOCAB, 8)
    runtime.export(str(tmp_path), StubPolicy())
    spec = resolve_spec(
        Eagle3DraftConfig(enabled=True, ttt_steps=3, model_name=str(tmp_path)),
        policy_config=POLICY,
        k=2,
        max_model_len=64,
        dtype="float32",
    )
    built = _build(spec, draft_dir=str(tmp_path))
    assert torch.equal(built.embedding, runtime._own_embedding)
    other = Eagle3Runtime(CFG, spec, built, device=torch.device("cpu"), dtype=torch.float32, seed=0)
    got = run_step(other, make_documents(["00111"], arch), [[0]])
    assert torch.isfinite(got.loss)
    assert "embed_tokens.weight" not in other.manifest()


def test_state_dict_resumes_bit_identically():
    arch = make_arch(draft_vocab_size=4)
    docs = make_documents(["0011111", "00111"], arch)

    def steps(runtime, optimizer, count):
        for _ in range(count):
            run_step(runtime, docs, [[0, 1]])
            optimizer.step()

    one = make_runtime(arch, CFG, ids=IDS)
    adam = torch.optim.AdamW(one.param_group()["params"], lr=0.01)
    steps(one, adam, 2)
    saved = {k: v.clone() for k, v in one.state_dict().items()}
    saved_adam = copy.deepcopy(adam.state_dict())
    steps(one, adam, 2)

    two = make_runtime(arch, CFG, ids=IDS, seed=9)
    two.load_state_dict(saved)
    adam = torch.optim.AdamW(two.param_group()["params"], lr=0.5)
    adam.load_state_dict(saved_adam)
    steps(two, adam, 2)
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, two.state_dict()[name]), name


def test_resume_refuses_another_vocabulary_or_set_of_tensors():
    arch = make_arch(draft_vocab_size=4)
    state = make_runtime(arch, CFG, ids=IDS).state_dict()
    with pytest.raises(CheckpointError, match="draft vocabulary"):
        make_runtime(arch, CFG, ids=[1, 2, 3, 4]).load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"differ in the tensors \['fc_norm.0.weight'"):
        make_runtime(make_arch(draft_vocab_size=4, fc_norm=True), CFG, ids=IDS).load_state_dict(state)


def test_an_exported_draft_loads_into_a_running_module(tmp_path):
    one, two = make_runtime(make_arch(), CFG), make_runtime(make_arch(), CFG, seed=3)
    one.export(str(tmp_path), StubPolicy())
    two.load_export(str(tmp_path))
    assert torch.equal(one.module.fc.weight, two.module.fc.weight)


def test_an_unwritable_directory_is_named(tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(CheckpointError, match=rf"{blocker}/draft: the draft could not be written"):
        make_runtime(make_arch(), CFG).export(str(blocker / "draft"), StubPolicy())


# -- rope ------------------------------------------------------------------------------------------------------------


def test_rope_frequencies_stay_fp32_and_are_not_saved():
    arch = make_arch(head_dim=64, rope={"rope_type": "default", "rope_theta": 1e6})
    module = LlamaEagleDraft(arch)
    fresh = 1.0 / (1e6 ** (torch.arange(0, 64, 2).float() / 64))
    module.to(torch.bfloat16)
    assert module.rope.inv_freq.dtype == torch.float32
    assert torch.equal(module.rope.inv_freq, fresh)
    assert not any("inv_freq" in k for k in module.state_dict())
    with torch.device("meta"):
        assert torch.equal(LlamaEagleDraft(arch).rope.inv_freq, fresh)


@pytest.mark.parametrize(
    "table",
    [
        {"rope_type": "default", "rope_theta": 1e4},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32},
    ],
    ids=lambda t: t["rope_type"],
)
def test_tables_equal_those_of_the_policys_own_rotary_module(table):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    arch = make_arch(head_dim=16, rope=table, max_position_embeddings=128)
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, head_dim=16, max_position_embeddings=128, rope_parameters=dict(table)
    )
    positions = torch.arange(64)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1, 64, 64), positions[None])
    ours = RopeFrequencies(arch)(positions, torch.float32)
    torch.testing.assert_close(ours[0].squeeze(1), cos[0, :, :8])
    torch.testing.assert_close(ours[1].squeeze(1), sin[0, :, :8])


def test_a_partial_factor_leaves_the_other_channels_alone():
    from nemo_rl.models.automodel.draft.models.layers import rotate

    arch = make_arch(head_dim=16, rope={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5})
    x = torch.randn(3, 2, 16)
    y = rotate(x, *RopeFrequencies(arch)(torch.arange(3), torch.float32))
    assert torch.equal(y[..., 8:], x[..., 8:])
    assert not torch.allclose(y[1:, :, :8], x[1:, :, :8])


def test_the_shared_embedding_is_read_again_each_step():
    arch = make_arch()
    runtime = make_runtime(arch, CFG)
    docs = make_documents(["00111"], arch)
    before = run_step(runtime, docs, [[0]]).loss
    moved = StubPolicy()
    moved.embed.weight.data += 0.5
    from tests.unit.models.automodel.draft.helpers import give_features, to_batch, to_microbatch

    batch = to_batch(docs)
    runtime.begin_global_batch(batch, step=1, dp_group=None, policy_model=moved)
    mb = to_microbatch(batch, [0])
    after = runtime.loss(mb, give_features(runtime, mb, docs)).loss
    assert abs(float(after.detach()) - float(before)) > 1e-3
    assert moved.embed.weight.grad is None
