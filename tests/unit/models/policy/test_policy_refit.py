"""What a refit sends: exactly the tensors of the checkpoint, under its names, in the engine's precision."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from nemo_rl.weight_sync.checksum import from_numpy, tensor_checksum
from tests.unit.models.policy import scenarios
from tests.unit.models.policy.scenarios import make_config

LAYOUTS = {"single": (1, {}), "dp2": (2, {}), "tp2": (2, {"dtensor_cfg": {"tensor_parallel_size": 2}})}


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_stream_is_the_checkpoint(pools, model_dir, layout):
    world, overrides = LAYOUTS[layout]
    payloads = pools[world].run(scenarios.gather, make_config(model_dir, **overrides))
    assert all(p is None for p in payloads[1:])
    payload = payloads[0]
    with safe_open(Path(model_dir) / "model.safetensors", framework="pt") as header:
        names = set(header.keys())
    assert payload.version == 5
    assert set(payload.tensors) == names == set(payload.manifest.policy)
    assert payload.manifest.draft == {}
    for name, tensor in load_file(Path(model_dir) / "model.safetensors").items():
        assert payload.manifest.policy[name] == (tuple(tensor.shape), "float32")
        assert torch.equal(from_numpy(payload.tensors[name], "float32"), tensor), name
        assert payload.checksums[name] == tensor_checksum(tensor)


def test_engine_precision_is_sent(pools, model_dir):
    config = make_config(model_dir, generation={"vllm_cfg": {"precision": "bfloat16"}})
    payload = pools[1].run(scenarios.gather, config)[0]
    for name, tensor in load_file(Path(model_dir) / "model.safetensors").items():
        assert payload.manifest.policy[name].dtype == "bfloat16"
        assert torch.equal(from_numpy(payload.tensors[name], "bfloat16"), tensor.bfloat16()), name
        assert payload.checksums[name] == tensor_checksum(tensor.bfloat16())


@pytest.mark.parametrize("world", [1, 2])
def test_tied_head_is_sent_under_its_own_name(pools, tied_model_dir, world):
    payload = pools[world].run(scenarios.gather, make_config(tied_model_dir))[0]
    stored = load_file(Path(tied_model_dir) / "model.safetensors")
    assert set(payload.tensors) == {*stored, "lm_head.weight"} == set(payload.manifest.policy)
    head = from_numpy(payload.tensors["lm_head.weight"], "float32")
    assert torch.equal(head, stored["model.embed_tokens.weight"])
