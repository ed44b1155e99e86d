"""EAGLE-1 drafts in configuration and files: what is read, what is refused, what is written."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_rl.errors import CheckpointError, ConfigError
from nemo_rl.models.automodel.draft.adapters.eagle1 import Eagle1Adapter
from nemo_rl.models.automodel.draft.architecture import Eagle1Architecture
from nemo_rl.models.automodel.draft.builders import load_tensors
from nemo_rl.models.automodel.draft.config import Eagle1DraftConfig
from nemo_rl.models.automodel.draft.registry import resolve_spec
from nemo_rl.models.automodel.draft.weight_files import find_weight_files, is_zero
from tests.unit.models.automodel.draft.eagle1_helpers import make_eagle1_arch, make_eagle1_runtime
from tests.unit.models.automodel.draft.helpers import VOCAB, StubPolicy

ADAPTER = Eagle1Adapter()
POLICY = {
    "num_hidden_layers": 5,
    "hidden_size": 12,
    "vocab_size": VOCAB,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 20,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "rope_theta": 1e4,
}


def resolve(*, k: int | None = 3, directory: Path | None = None, **settings: Any) -> Any:
    cfg = Eagle1DraftConfig(enabled=True, model_name=None if directory is None else str(directory), **settings)
    return resolve_spec(cfg, policy_config=POLICY, k=k, max_model_len=64, dtype="float32")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    make_eagle1_runtime(make_eagle1_arch()).export(str(tmp_path), StubPolicy())
    return tmp_path


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    raw = json.loads(path.read_text()) | changes
    (directory / "draft_meta.json").unlink(missing_ok=True)
    path.write_text(json.dumps({k: v for k, v in raw.items() if v != "absent"}))


def add_tensors(directory: Path, **tensors: torch.Tensor) -> None:
    path = directory / "model.safetensors"
    (directory / "draft_meta.json").unlink(missing_ok=True)
    save_file(load_file(path) | {name.replace("__", "."): t for name, t in tensors.items()}, path)


# -- from scratch ----------------------------------------------------------------------------------------------------


def test_a_new_draft() -> None:
    spec = resolve()
    arch = spec.architecture
    assert isinstance(arch, Eagle1Architecture)
    assert (arch.num_hidden_layers, arch.layer_family, arch.feature_ids) == (1, "llama", ())
    shapes = arch.trained_shapes()
    assert shapes["fc.weight"] == (12, 24)
    assert set(shapes) == set(spec.published_names)
    assert not {"norm.weight", "layers.0.input_layernorm.weight", "lm_head.weight", "embed_tokens.weight"} & set(shapes)
    assert "layers.1.input_layernorm.weight" in resolve(num_layers=2).architecture.trained_shapes()
    assert spec.speculative_config(model_dir="d") == {"method": "eagle", "model": "d", "num_speculative_tokens": 3}
    assert spec.describe().startswith("eagle1, 1 layer, hidden size 12")
    assert "the final state" in spec.describe()


def test_any_number_of_tokens_can_be_proposed() -> None:
    assert resolve(k=40).num_speculative_tokens == 40
    assert resolve(k=None, serve=False).num_speculative_tokens == 1


def test_eagle2_is_eagle1_with_a_notice(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        spec = resolve(algo="eagle2")
    assert (spec.algo, spec.architecture) == ("eagle1", resolve().architecture)
    (record,) = caplog.records
    assert record.getMessage().startswith("policy.draft.algo: eagle2 is trained and served as eagle1")


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"draft_vocab_size": 9}, r"draft_vocab_size: got 9; .*proposes all 23 ids"),
        ({"aux_layer_indices": [0, 1]}, r"aux_layer_indices: got \[0, 1\].*final state only"),
        ({"hidden_loss_weight": 0.0, "token_loss_weight": 0.0}, "hidden_loss_weight: got 0 beside"),
        ({"freeze": ["lm_head"]}, "freeze: got 'lm_head', which is the policy's"),
        ({"freeze": ["norm"]}, "freeze: got 'norm', which is no part of this draft"),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, dict) else "",
)
def test_settings_that_the_draft_cannot_have(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        resolve(**settings)


@pytest.mark.parametrize("key", ["ttt_steps", "block_size", "norm_output", "num_draft_tokens", "tree"])
def test_options_of_other_algorithms_and_of_draft_trees_are_unknown(key: str) -> None:
    with pytest.raises(ValueError, match="Extra inputs are not permitted"):
        Eagle1DraftConfig(enabled=True, algo="eagle2", **{key: 3})


# -- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_hidden_layers": 2, "extra": {"foo": 1}},
        {"rope": {"rope_type": "linear", "rope_theta": 5e5, "factor": 8.0}},
    ],
    ids=lambda c: "-".join(c) or "plain",
)
def test_config_round_trip(changes: dict[str, Any]) -> None:
    arch = make_eagle1_arch(**changes)
    raw = json.loads(json.dumps(ADAPTER.write_config(arch, dtype="float32")))
    source = ADAPTER.read_config(raw)
    assert source.publisher == "nemo_rl"
    again = Eagle1Architecture(**source.fields, feature_ids=())
    assert again == arch
    assert ADAPTER.write_config(again, dtype="float32") == raw
    assert (raw["architectures"], raw["model_type"]) == (["LlamaForCausalLM"], "llama")


def test_a_published_draft_loads_with_what_its_authors_write(directory: Path) -> None:
    """Flat names of the original code, a bias of zeros, a copy of the embedding, their config keys."""
    tensors = load_file(directory / "model.safetensors")
    change_config(directory, bias=True, use_cache=True, nemo_rl_draft="absent", draft_vocab_size="absent")
    add_tensors(directory, fc__bias=torch.tensor([0.0, -0.0] * 6), embed_tokens__weight=torch.ones(VOCAB, 12))
    spec = resolve(directory=directory)
    assert spec.architecture == make_eagle1_arch(extra={"use_cache": True})
    loaded = load_tensors(directory, spec.architecture, trust_pickle=False)
    assert loaded.keys() - {"embed_tokens.weight"} == tensors.keys()
    assert all(torch.equal(loaded[n], t) for n, t in tensors.items())
    # The engine takes `bias` for that of the attention.
    assert "bias" not in ADAPTER.write_config(spec.architecture, dtype="float32")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, r"architectures \['LlamaForCausalLMEagle3'\].*algo"),
        ({"architectures": ["LlamaEagleDraftModel"]}, "nemo_automodel, whose EAGLE-1 norms"),
        ({"architectures": ["LlamaForCausalLMEagle1"], "model_type": "llama_eagle1"}, "verl-SpeCo, whose EAGLE-1"),
        ({"nemo_rl_draft": {"algo": "eagle3"}}, "a draft of algorithm 'eagle3'"),
        ({"is_causal": False}, "is_causal is false"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, "model_type 'qwen3'"),
        ({"architectures": "absent"}, "architectures None"),
        ({"speculators_model_type": "eagle3"}, "speculators_model_type 'eagle3'"),
        ({"qkv_bias": True}, "qkv_bias is true"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"logit_scale": 0.5}, "logit_scale is 0.5"),
        ({"hidden_size": 24}, r"hidden_size is 24, target_hidden_size 12"),
        ({"draft_vocab_size": 9}, "draft_vocab_size: got 9"),
        ({"vocab_size": 50}, "vocabulary of size 50"),
        ({"rope_theta": "absent", "rope_parameters": "absent"}, "neither rope_theta"),
    ],
)
def test_configs_that_cannot_be_used_name_the_field(directory: Path, changes: dict[str, Any], match: str) -> None:
    change_config(directory, **changes)
    with pytest.raises(ConfigError, match=match):
        resolve(directory=directory)


@pytest.mark.parametrize(
    ("name", "shape", "match"),
    [
        ("norm__weight", (12,), r"\['norm.weight'\]: the engine's EAGLE-1 has no norm"),
        ("layers__0__input_layernorm__weight", (12,), r"\['layers.0.input_layernorm.weight'\]: the engine's EAGLE-1"),
        ("midlayer__hidden_norm__weight", (12,), r"it is an EAGLE-3 draft. Set policy.draft.algo to eagle3"),
        ("fc__bias", (12,), r"\['fc.bias'\] hold values other than zero"),
        ("fc__bias", (13,), r"fc.bias has shape \[13\], \[12\] needed"),
        ("fc__weight", (12, 36), r"fc.weight has shape \[12, 36\], \[12, 24\] needed"),
        ("lm_head__weight", (VOCAB, 12), r"unexpected: \['lm_head.weight'\]"),
        ("mask_hidden", (1, 12), "policy.draft.algo names another algorithm"),
    ],
)
def test_tensors_that_the_engine_cannot_serve_are_refused(
    directory: Path, name: str, shape: tuple[int, ...], match: str
) -> None:
    add_tensors(directory, **{name: torch.ones(shape)})
    with pytest.raises(ConfigError, match=match):
        resolve(directory=directory)
    with pytest.raises(CheckpointError, match=match):
        load_tensors(directory, make_eagle1_arch(), trust_pickle=False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_zeros_are_told_from_other_values_without_torch(tmp_path: Path, dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).tiny
    save_file(
        {
            "zero": torch.tensor([0.0, -0.0, 0.0], dtype=dtype),
            "tiny": torch.tensor([0.0, tiny, 0.0], dtype=dtype),
            "last": torch.tensor([0.0, 0.0, -1.0], dtype=dtype),
        },
        tmp_path / "model.safetensors",
    )
    stored = find_weight_files(tmp_path).tensors
    assert {name: is_zero(tensor) for name, tensor in stored.items()} == {"zero": True, "tiny": False, "last": False}


def test_an_integer_bias_is_refused(tmp_path: Path) -> None:
    save_file({"fc.bias": torch.zeros(3, dtype=torch.int64)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="has dtype I64; must be one of"):
        is_zero(find_weight_files(tmp_path).tensors["fc.bias"])
