"""Bad input through the real command: one message (key, got, allowed, remedy), exit code 2, nothing started."""

from __future__ import annotations

import importlib.util
import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

from examples import run_draft, run_grpo
from nemo_rl.algorithms.config import Device
from nemo_rl.distributed.device import cuda_obstacle
from nemo_rl.utils.config import build_master_config, load_config
from nemo_rl.utils.preflight import preflight
from nemo_rl.utils.preflight_sizes import batch_problems, layout_problems

ROOT = Path(__file__).resolve().parents[2]
SPEC = "policy.generation.vllm_kwargs.speculative_config"
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB, POSITIONS = 64, 12, 2, 1, 32, 192, 128, 256

POLICY_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "max_position_embeddings": POSITIONS,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}

DRAFT_CONFIG = POLICY_CONFIG | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "draft_vocab_size": VOCAB,
    "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
}


def write_model(directory: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (directory / "tokenizer.json").write_text("{}", encoding="utf-8")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def draft_tensors() -> dict[str, np.ndarray]:
    shapes = {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
        "midlayer.hidden_norm.weight": (HIDDEN,),
        "midlayer.input_layernorm.weight": (HIDDEN,),
        "midlayer.post_attention_layernorm.weight": (HIDDEN,),
        "midlayer.self_attn.q_proj.weight": (HEADS * HEAD_DIM, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        "midlayer.mlp.gate_proj.weight": (MLP, HIDDEN),
        "midlayer.mlp.up_proj.weight": (MLP, HIDDEN),
        "midlayer.mlp.down_proj.weight": (HIDDEN, MLP),
    }
    return {name: np.zeros(shape, dtype=np.float32) for name, shape in shapes.items()}


@dataclass
class Run:
    """Files of a run that would be accepted, and how to start it."""

    root: Path
    overrides: list[str] = field(default_factory=list)

    @property
    def config(self) -> Path:
        return self.root / "run.yaml"

    @property
    def policy(self) -> Path:
        return self.root / "policy"

    @property
    def draft(self) -> Path:
        return self.root / "draft"

    @property
    def checkpoints(self) -> Path:
        return self.root / "results"

    def arguments(self, *overrides: str) -> list[str]:
        return ["--config", str(self.config), *self.overrides, *overrides]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run with a draft directory; every test changes one thing in it."""
    run = Run(tmp_path)
    write_model(run.policy, POLICY_CONFIG, {"model.norm.weight": np.ones(HIDDEN, dtype=np.float32)})
    write_model(run.draft, DRAFT_CONFIG, draft_tensors())
    rows = [json.dumps({"input": f"{i} + {i}", "output": str(2 * i)}) for i in range(8)]
    (tmp_path / "train.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    tree = {
        "defaults": str(ROOT / "examples/configs/grpo_math_1B.yaml"),
        "grpo": {"num_prompts_per_step": 4, "num_generations_per_prompt": 4},
        "policy": {
            "model_name": str(run.policy),
            "train_global_batch_size": 16,
            "max_total_sequence_length": 128,
            "precision": "float32",
            "draft": {"enabled": True, "model_name": str(run.draft)},
            "generation": {"vllm_kwargs": {"speculative_config": {"num_speculative_tokens": 3}}},
        },
        "data": {"dataset_name": "ResponseDataset", "train_data_path": str(tmp_path / "train.jsonl")},
        "checkpointing": {"checkpoint_dir": str(run.checkpoints)},
        "logger": {"log_dir": str(tmp_path / "logs")},
        "cluster": {"device": "cpu"},
    }
    run.config.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return run


def refuse(run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *overrides: str) -> str:
    """Run the command; return its message after checking that it refused before starting anything."""
    # None makes the import fail, so a run that gets past the checks is no refusal but an ImportError.
    monkeypatch.setitem(sys.modules, "nemo_rl.algorithms.grpo_setup", None)
    assert run_grpo.main(run.arguments(*overrides)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert "Traceback" not in err
    assert not (run.root / "logs").exists(), "a refused run leaves nothing behind"
    return err


def refuse_draft_run(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *overrides: str
) -> str:
    """The same for the command that trains the draft alone."""
    monkeypatch.setitem(sys.modules, "nemo_rl.algorithms.draft_run_setup", None)
    assert run_draft.main(run.arguments(*overrides)) == 2
    out, err = capsys.readouterr()
    assert (out, err[:7]) == ("", "error: ")
    assert not (run.root / "logs").exists(), "a refused run leaves nothing behind"
    return err


Refuse = Callable[..., str]


@pytest.fixture
def refused(run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Refuse:
    return lambda *overrides: refuse(run, capsys, monkeypatch, *overrides)


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


def truncate(path: Path, *, by: int) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-by])


def expect(text: str, *parts: str) -> None:
    assert all(part in text for part in parts), text
    assert "problems in" not in text, "one mistake, one message"


# --- the run without a mistake


def test_the_unchanged_run_is_accepted(run: Run) -> None:
    checked = preflight(build_master_config(load_config(run.config)))
    assert checked.device == "cpu"
    assert checked.model_dir == str(run.policy)
    assert checked.policy_config == POLICY_CONFIG
    assert checked.draft_dir == str(run.draft)
    assert checked.draft_spec.architecture.feature_ids == (1, 2, 3)


def test_a_draft_from_scratch_is_accepted(run: Run) -> None:
    checked = preflight(build_master_config(load_config(run.config, ["policy.draft.model_name=null"])))
    assert checked.draft_dir is None
    assert checked.draft_spec.architecture.hidden_size == HIDDEN


def test_checks_leave_nothing_behind(run: Run) -> None:
    before = sorted(run.root.rglob("*"))
    preflight(build_master_config(load_config(run.config)))
    assert sorted(run.root.rglob("*")) == before


# --- settings


def test_misspelt_key(refused: Refuse, run: Run) -> None:
    tree = yaml.safe_load(run.config.read_text(encoding="utf-8"))
    tree["policy"]["draft"]["los_weight"] = 0.5
    run.config.write_text(yaml.safe_dump(tree), encoding="utf-8")
    expect(refused(), "policy.draft.los_weight: got an unknown key", "policy.draft.loss_weight")


def test_misspelt_override(refused: Refuse) -> None:
    expect(refused("grpo.max_num_step=3"), "grpo.max_num_step: got an unknown key", "grpo.max_num_steps")


def test_wrong_type(refused: Refuse) -> None:
    expect(refused("grpo.max_num_steps=many"), "grpo.max_num_steps: got 'many'", "must be an integer")


def test_missing_config_file(refused: Refuse, run: Run) -> None:
    run.config.unlink()
    expect(refused(), "run.yaml'; no such file")


@pytest.mark.parametrize("k", [0, -1, 8])
def test_k_outside_what_the_draft_proposes(refused: Refuse, k: int) -> None:
    expect(
        refused(f"{SPEC}.num_speculative_tokens={k}"),
        f"{SPEC}.num_speculative_tokens: got {k}",
        "from 1 to 7",
        "Set it",
    )


# --- draft algorithms and what they propose with


BLOCK = ["policy.draft.algo=dflash", "policy.draft.model_name=null", "policy.draft.mask_token_id=100"]


@pytest.mark.parametrize(
    ("algo", "key", "owner"),
    [
        ("eagle3", "block_size", "'dflash' or 'dspark' or 'domino'"),
        ("peagle", "ttt_steps", "'eagle3'"),
        ("dflash", "markov_rank", "'dspark'"),
        ("domino", "num_depths", "'peagle'"),
        ("eagle2", "shift_label", "'domino'"),
    ],
)
def test_option_of_another_algorithm(refused: Refuse, run: Run, algo: str, key: str, owner: str) -> None:
    message = f"policy.draft.{key}: got an option of another algo; policy.draft.algo is '{algo}', and {key} belongs to "
    overrides = [f"policy.draft.algo={algo}", "policy.draft.model_name=null"]
    expect(refused(*overrides, f"policy.draft.{key}=3"), message + owner, "Remove the key")
    tree = yaml.safe_load(run.config.read_text(encoding="utf-8"))
    tree["policy"]["draft"][key] = 3
    run.config.write_text(yaml.safe_dump(tree), encoding="utf-8")
    expect(refused(*overrides), message + owner)


@pytest.mark.parametrize("key", ["total_token", "depth", "top_k", "threshold", "tree_choices"])
def test_options_of_a_draft_tree(refused: Refuse, key: str) -> None:
    text = refused("policy.draft.algo=eagle2", "policy.draft.model_name=null", f"policy.draft.{key}=4")
    expect(text, f"policy.draft.{key}: got an option that does not exist here", "no draft tree", "Remove the key")
    text = refused(f"++{SPEC}.{key}=4")
    expect(text, f"{SPEC}.{key}: got 4", "no draft tree", "Remove the key")


def test_speculative_token_tree(refused: Refuse) -> None:
    expect(refused(f"++{SPEC}.speculative_token_tree='[(0,)]'"), f"{SPEC}.speculative_token_tree", "no draft tree")


@pytest.mark.parametrize("k", [1, 3, 5])
def test_k_that_is_not_the_blocks(refused: Refuse, k: int) -> None:
    text = refused(*BLOCK, "policy.draft.block_size=5", f"{SPEC}.num_speculative_tokens={k}")
    expect(text, f"{SPEC}.num_speculative_tokens: got {k}", "4", "policy.draft.block_size" if k < 4 else "from 1 to 4")


def test_k_beyond_the_trained_depths(refused: Refuse) -> None:
    overrides = ["policy.draft.algo=peagle", "policy.draft.model_name=null", "policy.draft.mask_token_id=100"]
    text = refused(*overrides, "policy.draft.num_depths=2")
    expect(text, f"{SPEC}.num_speculative_tokens: got 3", "from 1 to 2")


@pytest.mark.parametrize("algo", ["peagle", "dflash", "dspark", "domino"])
def test_missing_placeholder(refused: Refuse, algo: str) -> None:
    text = refused(f"policy.draft.algo={algo}", "policy.draft.model_name=null")
    expect(text, "policy.draft.mask_token_id: got", "Set it")


def write_tokenizer(directory: Path) -> None:
    content = {
        "model": {"type": "BPE", "vocab": {chr(97 + i): i for i in range(26)}},
        "added_tokens": [{"id": 26, "content": "<|reserved|>", "special": True}],
    }
    (directory / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")


def test_placeholder_that_is_a_token_of_text(refused: Refuse, run: Run) -> None:
    write_tokenizer(run.policy)
    text = refused(*BLOCK, "policy.draft.mask_token_id=3")
    expect(text, "policy.draft.mask_token_id: got 3", "the token 'd'", "never occurs", f"e.g. {VOCAB - 1}")


@pytest.mark.parametrize("token", [26, 27, VOCAB - 1])
def test_placeholder_that_no_text_holds_is_accepted(run: Run, token: int) -> None:
    write_tokenizer(run.policy)
    checked = preflight(build_master_config(load_config(run.config, [*BLOCK, f"policy.draft.mask_token_id={token}"])))
    assert checked.draft_spec.architecture.mask_token_id == token


def test_placeholder_beyond_the_embedding(refused: Refuse) -> None:
    text = refused(*BLOCK, f"policy.draft.mask_token_id={VOCAB}")
    expect(text, f"policy.draft.mask_token_id: got {VOCAB}", f"from 0 to {VOCAB - 1}")


@pytest.mark.parametrize("head", ["gated", "rnn"])
def test_head_that_the_engine_cannot_serve(refused: Refuse, run: Run, head: str) -> None:
    overrides = [*BLOCK, "policy.draft.algo=dspark", f"policy.draft.markov_head_type={head}"]
    expect(refused(*overrides), f"policy.draft.markov_head_type: got {head}", "policy.draft.serve: false")
    trained_only = [*overrides, "policy.draft.serve=false", f"~{SPEC}", "policy.draft.block_size=4"]
    assert preflight(build_master_config(load_config(run.config, trained_only))).draft_spec.serving is None


# --- a draft that is not trained, or not served


def test_static_without_a_draft_to_serve(refused: Refuse) -> None:
    text = refused("policy.draft.static=true", "policy.draft.model_name=null")
    expect(text, "policy.draft.static: got true with policy.draft.model_name: null", "Set policy.draft.model_name")


def test_static_with_training_options(refused: Refuse) -> None:
    text = refused("policy.draft.static=true", "policy.draft.warmup_steps=5", "policy.draft.max_grad_norm=0.5")
    expect(text, "policy.draft.warmup_steps, policy.draft.max_grad_norm", "is not trained", "Remove them")


def test_static_draft_is_accepted(run: Run) -> None:
    spec = preflight(build_master_config(load_config(run.config, ["policy.draft.static=true"]))).draft_spec
    assert spec.is_static
    assert spec.published_names == ()


@pytest.mark.parametrize(
    ("part", "reason"), [("lm_hed", "is no part of this draft"), ("embed_tokens", "is the policy's")]
)
def test_frozen_part_that_the_draft_does_not_have(refused: Refuse, part: str, reason: str) -> None:
    expect(refused(f"policy.draft.freeze=[{part}]"), f"policy.draft.freeze: got '{part}', which {reason}", "lm_head")


def test_everything_frozen(refused: Refuse) -> None:
    expect(refused("policy.draft.freeze=[fc,layers,norm,lm_head]"), "policy.draft.freeze: got", "policy.draft.static")


def test_neither_served_nor_trained(refused: Refuse) -> None:
    text = refused("policy.draft.serve=false", "policy.draft.loss_weight=0", f"~{SPEC}")
    expect(text, "policy.draft.serve: got false with policy.draft.loss_weight: 0", "does nothing")


@pytest.mark.parametrize("off", ["policy.draft.serve=false", "policy.draft.enabled=false"])
def test_k_without_anything_that_proposes(refused: Refuse, off: str) -> None:
    expect(refused(off), f"{SPEC}.method: got nothing", "'ngram'", "remove the block")


@pytest.mark.parametrize("off", ["policy.draft.serve=false", "policy.draft.enabled=false"])
@pytest.mark.parametrize("method", [None, "ngram"])
def test_baselines_beside_or_without_a_draft_are_accepted(run: Run, off: str, method: str | None) -> None:
    overrides = [off, f"~{SPEC}" if method is None else f"++{SPEC}.method={method}"]
    checked = preflight(build_master_config(load_config(run.config, overrides)))
    assert (checked.draft_spec is None) == ("enabled" in off)


# --- speculation without a draft


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        pytest.param([f"++{SPEC}.method=n-gram"], [f"{SPEC}.method: got 'n-gram'", "'ngram'"], id="method"),
        pytest.param(
            [f"++{SPEC}.method=ngram", f"++{SPEC}.prompt_lookup_min=4", f"++{SPEC}.prompt_lookup_max=2"],
            [f"{SPEC}.prompt_lookup_min: got 4", "at most prompt_lookup_max (2)"],
            id="min-above-max",
        ),
        pytest.param(
            [f"++{SPEC}.method=ngram", f"++{SPEC}.prompt_lookup_max=0"],
            [f"{SPEC}.prompt_lookup_max: got 0", ">= 1"],
            id="max-zero",
        ),
        pytest.param([f"++{SPEC}.method=medusa"], [f"{SPEC}.model: got nothing", "directory"], id="no-model"),
        pytest.param([f"++{SPEC}.method=ngram_gpu"], [f"{SPEC}.method: got 'ngram_gpu'", "on CPU"], id="gpu-only"),
    ],
)
def test_baseline_that_the_engine_would_refuse(refused: Refuse, overrides: list[str], parts: list[str]) -> None:
    expect(refused("policy.draft.enabled=false", *overrides), *parts)


@pytest.mark.skipif(importlib.util.find_spec("arctic_inference") is not None, reason="the package is installed")
def test_suffix_without_its_package(refused: Refuse) -> None:
    text = refused("policy.draft.enabled=false", f"++{SPEC}.method=suffix")
    expect(text, f"{SPEC}.method: got 'suffix'", "arctic_inference must be installed", "ngram")


def test_static_speculation_of_another_method(refused: Refuse) -> None:
    expect(refused(f"++{SPEC}.method=ngram"), f"{SPEC}.method: got 'ngram'", "Remove the key")


def test_static_speculation_with_another_model(refused: Refuse) -> None:
    expect(refused(f"++{SPEC}.model=/elsewhere"), f"{SPEC}.model: got '/elsewhere'", "policy.draft.model_name")


def test_speculation_that_is_not_exact(refused: Refuse) -> None:
    expect(refused(f"++{SPEC}.rejection_sample_method=synthetic"), "rejection_sample_method: got 'synthetic'")


def test_global_batch_and_data_parallel_size(refused: Refuse) -> None:
    text = refused("policy.dtensor_cfg.num_workers=3")
    expect(text, "policy.train_global_batch_size: got 16", "data-parallel workers (3)", "Use 18")


def test_global_batch_and_micro_batch(refused: Refuse) -> None:
    text = refused("policy.train_micro_batch_size=3")
    expect(text, "policy.train_global_batch_size: got 16", "1 x 3 = 3", "Use 18")


def test_micro_batch_does_not_matter_when_micro_batches_are_formed_by_tokens(run: Run) -> None:
    overrides = ["policy.train_micro_batch_size=3", "policy.sequence_packing.enabled=true"]
    assert preflight(build_master_config(load_config(run.config, overrides))).device == "cpu"


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("policy.generation.vllm_cfg.tensor_parallel_size=2", "policy.generation.vllm_cfg.tensor_parallel_size: got 2"),
        ("policy.dtensor_cfg.cpu_offload=true", "policy.dtensor_cfg.cpu_offload: got true"),
    ],
)
def test_layout_that_needs_gpus(refused: Refuse, override: str, key: str) -> None:
    expect(refused(override, "policy.dtensor_cfg.num_workers=2"), key, "on CPU", "cluster.device: cuda")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_context_parallelism_is_refused_on_any_device(run: Run, device: Device) -> None:
    # A context-parallel size that the batch, the workers and the cluster would allow.
    overrides = [
        "policy.dtensor_cfg.context_parallel_size=2",
        "policy.dtensor_cfg.num_workers=2",
        "cluster.gpus_per_node=2",
    ]
    cfg = build_master_config(load_config(run.config, overrides))
    (problem,) = layout_problems(cfg, device) + batch_problems(cfg, device)
    assert problem.startswith("policy.dtensor_cfg.context_parallel_size: got 2; must be 1")
    assert "not implemented" in problem


def test_context_parallelism_is_refused_by_the_command(refused: Refuse) -> None:
    expect(refused("policy.dtensor_cfg.context_parallel_size=2"), "context_parallel_size: got 2", "not implemented")


def test_tensor_parallel_size_and_workers(refused: Refuse) -> None:
    expect(refused("policy.dtensor_cfg.tensor_parallel_size=2"), "tensor_parallel_size: got 2", "training workers (1)")


@pytest.mark.skipif(cuda_obstacle() is None, reason="this machine has CUDA")
def test_cuda_without_cuda(refused: Refuse) -> None:
    expect(refused("cluster.device=cuda"), "cluster.device: got 'cuda'", "'cpu' or 'auto'", "Set cluster.device=cpu")


# --- the policy's files


def test_missing_model_directory(refused: Refuse, run: Run) -> None:
    gone = run.root / "gone"
    text = refused(f"policy.model_name={gone}")
    expect(text, f"policy.model_name: got '{gone}'", "no such directory", "Correct the path")


def test_hub_name_while_the_hub_is_switched_off(refused: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    text = refused("policy.model_name=no-such-org/no-such-model")
    expect(text, "policy.model_name: got 'no-such-org/no-such-model'", "HF_HUB_OFFLINE", "Give the path")


def test_sequences_beyond_the_policys_positions(refused: Refuse) -> None:
    text = refused("policy.max_total_sequence_length=300", "policy.generation.vllm_cfg.max_model_len=300")
    assert f"policy.max_total_sequence_length: got 300; must be at most {POSITIONS}" in text
    assert f"policy.generation.vllm_cfg.max_model_len: got 300; must be at most {POSITIONS}" in text


def test_scaled_rope_stretches_the_positions(run: Run) -> None:
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": POSITIONS}
    edit_json(run.policy / "config.json", rope_scaling=scaling)
    overrides = ["policy.max_total_sequence_length=300", "policy.draft.enabled=false", f"~{SPEC}"]
    assert preflight(build_master_config(load_config(run.config, overrides))).draft_spec is None


def test_policy_without_config_json(refused: Refuse, run: Run) -> None:
    (run.policy / "config.json").unlink()
    expect(refused(), f"policy.model_name: got '{run.policy}'", "config.json")


def test_policy_without_tokenizer(refused: Refuse, run: Run) -> None:
    (run.policy / "tokenizer.json").unlink()
    expect(refused(), f"policy.tokenizer.name: got '{run.policy}'", "tokenizer")


def test_policy_without_weights(refused: Refuse, run: Run) -> None:
    (run.policy / "model.safetensors").unlink()
    expect(refused(), f"policy.model_name: got '{run.policy}'", "*.safetensors", "found none")


def test_policy_with_a_missing_shard(refused: Refuse, run: Run) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (run.policy / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    expect(refused(), "model.safetensors.index.json names model-00002-of-00002.safetensors, which is missing")


def rewrite_header(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    data = file.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda file: truncate(file, by=1), id="last-byte"),
        pytest.param(lambda file: file.write_bytes(file.read_bytes()[:20]), id="in-the-header"),
        pytest.param(lambda file: file.write_bytes(b""), id="empty"),
        pytest.param(lambda file: file.write_bytes(file.read_bytes() + b"\0"), id="too-long"),
        pytest.param(lambda file: file.write_bytes(b"\xff" * 8 + file.read_bytes()[8:]), id="header-length"),
        pytest.param(
            lambda file: rewrite_header(file, lambda header: header["model.norm.weight"].update(shape=[HIDDEN + 1])),
            id="shape-and-offsets",
        ),
    ],
)
def test_damaged_policy_weights(refused: Refuse, run: Run, damage: Callable[[Path], Any]) -> None:
    file = run.policy / "model.safetensors"
    damage(file)
    expect(refused(), f"policy.model_name: {file} is not a complete safetensors file", "Copy it again")


# --- the draft's files


def test_missing_draft_directory(refused: Refuse, run: Run) -> None:
    gone = run.root / "gone"
    expect(refused(f"policy.draft.model_name={gone}"), f"policy.draft.model_name: got '{gone}'", "no such directory")


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        pytest.param({"hidden_size": 32, "target_hidden_size": 32}, ["hidden_size", "32", str(HIDDEN)], id="hidden"),
        pytest.param({"vocab_size": 256, "draft_vocab_size": 256}, ["vocab", "256", str(VOCAB)], id="vocab"),
        pytest.param(
            {"eagle_aux_hidden_state_layer_ids": [1, 2, 13]},
            ["aux_layer_indices", "[0, 1, 12]"],
            id="layer-out-of-range",
        ),
        pytest.param(
            {"eagle_aux_hidden_state_layer_ids": [3, 2, 1]}, ["aux_layer_indices", "[2, 1, 0]"], id="layers-unsorted"
        ),
    ],
)
def test_draft_that_does_not_fit_the_policy(
    refused: Refuse, run: Run, changes: dict[str, Any], parts: list[str]
) -> None:
    edit_json(run.draft / "config.json", **changes)
    expect(refused(), "policy.draft.", *parts)


def test_aux_layers_beyond_the_policy(refused: Refuse) -> None:
    text = refused("policy.draft.model_name=null", f"policy.draft.aux_layer_indices=[1,2,{LAYERS}]")
    expect(text, "policy.draft.aux_layer_indices", str(LAYERS))


def test_sequences_beyond_the_drafts_scaled_rope(refused: Refuse, run: Run) -> None:
    edit_json(
        run.draft / "config.json",
        max_position_embeddings=64,
        rope_scaling={"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32},
    )
    expect(refused(), "policy.draft.model_name", "64 positions", "max_model_len is 128")


def test_damaged_draft_weights(refused: Refuse, run: Run) -> None:
    file = run.draft / "model.safetensors"
    truncate(file, by=4)
    expect(refused(), "policy.draft.model_name", str(file))


def test_draft_that_lacks_a_tensor(refused: Refuse, run: Run) -> None:
    file = run.draft / "model.safetensors"
    tensors = load_file(file)
    del tensors["fc.weight"]
    save_file(tensors, file)
    expect(refused(), "policy.draft.model_name", "fc.weight")


# --- prompts


def test_missing_prompts(refused: Refuse, run: Run) -> None:
    (run.root / "train.jsonl").unlink()
    expect(refused(), "data.train_data_path: got", "no such file", "Correct the path")


@pytest.mark.parametrize("content", ["", "\n  \n"], ids=["no-bytes", "blank-lines"])
def test_empty_dataset(refused: Refuse, run: Run, content: str) -> None:
    (run.root / "train.jsonl").write_text(content, encoding="utf-8")
    expect(refused(), "data.train_data_path:", "train.jsonl is empty", "Give a file with rows")


def test_fewer_prompts_than_a_step_needs(refused: Refuse) -> None:
    text = refused("grpo.num_prompts_per_step=16", "policy.train_global_batch_size=64")
    expect(text, "data.train_data_path: got", "with 8 rows", "at least the 16 prompts")


def test_prompts_without_the_named_field(refused: Refuse) -> None:
    expect(refused("data.input_key=question"), "has no field 'question'", "input, output", "data.input_key")


def test_missing_prompt_template(refused: Refuse, run: Run) -> None:
    expect(refused(f"data.prompt_file={run.root}/none.txt"), "data.prompt_file: got", "Correct the path")


# --- output directories and checkpoints


@pytest.mark.parametrize("key", ["logger.log_dir", "checkpointing.checkpoint_dir"])
def test_output_directory_below_a_file(refused: Refuse, run: Run, key: str) -> None:
    where = f"{run.config}/below"
    expect(refused(f"{key}={where}"), f"{key}: got '{where}'", "is not a directory", "Choose another one")


@pytest.mark.parametrize("key", ["logger.log_dir", "checkpointing.checkpoint_dir"])
def test_output_directory_that_cannot_be_written(refused: Refuse, key: str) -> None:
    # No process, not even root's, can make a file in /proc.
    expect(refused(f"{key}=/proc/nemo_rl"), f"{key}: got '/proc/nemo_rl'", "/proc cannot be written", "Choose another")


@pytest.fixture
def checkpoint(run: Run) -> Path:
    """A checkpoint that the unchanged run would continue."""
    step = run.checkpoints / "step_5"
    (step / "draft").mkdir(parents=True)
    spec = preflight(build_master_config(load_config(run.config, ["checkpointing.enabled=false"]))).draft_spec
    info = {"format_version": 1, "algorithm": "grpo", "step": 5, "consumed_samples": 80, "total_valid_tokens": 1}
    (step / "training_info.json").write_text(json.dumps(info), encoding="utf-8")
    (step / "manifest.json").write_text(json.dumps({"format_version": 1, "files": {}}), encoding="utf-8")
    meta = {"format_version": 1, "algo": spec.algo, "spec": spec.architecture.identity()}
    (step / "draft" / "draft_meta.json").write_text(json.dumps(meta), encoding="utf-8")
    save_file({"a": np.zeros(4, dtype=np.float32)}, step / "draft" / "model.safetensors")
    return step


def test_own_checkpoint_is_accepted(run: Run, checkpoint: Path) -> None:
    assert checkpoint.is_dir()
    assert preflight(build_master_config(load_config(run.config))).draft_spec is not None


def test_checkpoint_of_another_training_algorithm(refused: Refuse, checkpoint: Path) -> None:
    edit_json(checkpoint / "training_info.json", algorithm="sft")
    expect(refused(), "checkpointing.checkpoint_dir", "step_5", "'sft'", "'grpo'")


def test_checkpoint_of_another_layout(refused: Refuse, checkpoint: Path) -> None:
    edit_json(checkpoint / "training_info.json", format_version=99)
    expect(refused(), "checkpointing.checkpoint_dir", "step_5", "99", "must be 1")


def test_checkpoint_of_another_draft_algorithm(refused: Refuse, checkpoint: Path) -> None:
    edit_json(checkpoint / "draft" / "draft_meta.json", algo="another")
    expect(
        refused(),
        "policy.draft.algo: got another draft",
        'step_5 holds (algo: "another", this run "eagle3")',
        "checkpointing.checkpoint_dir",
        "policy.draft.restart: true",
    )


def test_checkpoint_of_another_draft_layout(refused: Refuse, checkpoint: Path) -> None:
    edit_json(checkpoint / "draft" / "draft_meta.json", format_version=3)
    expect(refused(), "draft_meta.json: has format_version 3; this program reads 2", "policy.draft.restart: true")


def test_checkpoint_of_a_draft_of_another_shape(refused: Refuse, checkpoint: Path) -> None:
    meta = json.loads((checkpoint / "draft" / "draft_meta.json").read_text(encoding="utf-8"))
    edit_json(checkpoint / "draft" / "draft_meta.json", spec=meta["spec"] | {"intermediate_size": 7, "head_dim": 9})
    expect(
        refused(),
        "policy.draft: got another draft",
        f"intermediate_size: 7, this run {MLP}",
        "head_dim: 9, this run",
        "checkpointing.checkpoint_dir",
        "policy.draft.restart: true",
    )


@pytest.mark.parametrize("change", ["none", "algorithm", "shape", "version", "lost", "damaged"])
def test_a_draft_that_is_started_anew_may_be_any_or_none(run: Run, checkpoint: Path, change: str) -> None:
    """`restart` makes up for a draft that does not fit; a fitting one it replaces once."""
    file = checkpoint / "draft" / "draft_meta.json"
    meta = json.loads(file.read_text(encoding="utf-8"))
    changes = {
        "algorithm": {"algo": "another"},
        "shape": {"spec": meta["spec"] | {"intermediate_size": 7}},
        "version": {"format_version": 3},
    }
    if change in changes:
        edit_json(file, **changes[change])
    elif change == "lost":
        shutil.rmtree(checkpoint / "draft")
    elif change == "damaged":
        truncate(checkpoint / "draft" / "model.safetensors", by=1)

    def restarts(*overrides: str) -> bool:
        return preflight(build_master_config(load_config(run.config, list(overrides)))).restarts_draft

    assert restarts("policy.draft.restart=true")
    if change == "none":
        assert not restarts()
    # The run that wrote the checkpoint had it set: the checkpoint's draft is the one that was started anew.
    (checkpoint / "config.yaml").write_text("policy: {draft: {restart: true}}", encoding="utf-8")
    if change != "damaged":
        assert restarts("policy.draft.restart=true") is (change != "none")


def test_restart_means_nothing_to_a_fresh_run(run: Run) -> None:
    overrides = ["policy.draft.restart=true"]
    assert not preflight(build_master_config(load_config(run.config, overrides))).restarts_draft


def test_an_unknown_layout_for_the_algorithm(refused: Refuse) -> None:
    expect(
        refused("policy.draft.export_layouts=[native,torchscript]"),
        "policy.draft.export_layouts",
        "torchscript",
    )


def test_checkpoint_with_a_draft_for_a_run_without(refused: Refuse, checkpoint: Path) -> None:
    assert checkpoint.is_dir()
    text = refused("policy.draft.enabled=false", f"~{SPEC}")
    expect(text, "policy.draft.enabled: got false", "step_5 holds a draft")


def test_checkpoint_without_a_draft_for_a_run_with_one(refused: Refuse, checkpoint: Path) -> None:
    (checkpoint / "draft" / "draft_meta.json").unlink()
    expect(refused(), "policy.draft.enabled: got true", "step_5 holds no draft")


def test_damaged_checkpoint_weights(refused: Refuse, checkpoint: Path) -> None:
    file = checkpoint / "draft" / "model.safetensors"
    truncate(file, by=1)
    expect(refused(), f"checkpointing.checkpoint_dir: {file} is not a complete safetensors file")


# --- the process


def test_several_mistakes_give_one_message(refused: Refuse, run: Run) -> None:
    text = refused(
        "policy.train_micro_batch_size=3", f"policy.draft.model_name={run.root}/gone", "logger.log_dir=/proc/x"
    )
    assert text.startswith("error: 3 problems in the configuration:\n")
    for key in ("policy.train_global_batch_size", "policy.draft.model_name", "logger.log_dir"):
        assert f"  - {key}: got" in text


@pytest.mark.parametrize("override", ["policy.draft.los_weight=1", "policy.model_name=/no/such/model"])
def test_process_exits_with_2_and_starts_nothing(run: Run, override: str) -> None:
    program = (
        "import sys; from examples import run_grpo; code = run_grpo.main(sys.argv[1:]);"
        "heavy = sorted({'ray', 'torch', 'vllm', 'transformers', 'nemo_automodel'} & set(sys.modules));"
        "print('imported', heavy); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *run.arguments(override)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stdout == "imported []\n"
    assert done.stderr.startswith(f"error: {override.split('=')[0]}: got ")
    assert "Traceback" not in done.stderr


def test_script_itself_exits_with_2(run: Run) -> None:
    command = [sys.executable, str(ROOT / "examples/run_grpo.py"), *run.arguments("grpo.max_num_steps=0")]
    done = subprocess.run(command, cwd=run.root, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: grpo.max_num_steps: got 0; must be > 0.")


def test_unknown_flag_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run_grpo.main(["--confg", "x.yaml"])
    assert caught.value.code == 2
    assert "--confg" in capsys.readouterr().err


# --- the command that trains the draft alone --------------------------------------------------------


def test_a_draft_run_takes_the_configuration_of_a_grpo_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nemo_rl.algorithms.draft_run_setup", None)
    with pytest.raises(ImportError):
        run_draft.main(run.arguments())


DRAFT_RUN_MISTAKES = {
    "nothing to train": (["policy.draft.loss_weight=0"], "policy.draft.loss_weight: got 0", "nothing to train"),
    "no store": (
        ["draft_run.source=rollouts", "rollout_store.dir=nowhere"],
        "rollout_store.dir: got 'nowhere'",
        "must hold recorded rollouts",
    ),
    "too few prompts": (["draft_run.num_prompts_per_step=9"], "with 8 rows", "lower draft_run.num_prompts_per_step"),
    "uneven updates": (
        [
            "policy.draft.train_global_batch_size=8",
            "draft_run.num_prompts_per_step=3",
            "draft_run.num_generations_per_prompt=4",
        ],
        "policy.draft.train_global_batch_size: got 8",
        "(3 x 4 = 12)",
    ),
    "a draft that is not there": (["policy.draft.model_name=nowhere"], "policy.draft.model_name: got 'nowhere'", ""),
}


@pytest.mark.parametrize("case", DRAFT_RUN_MISTAKES)
def test_mistakes_of_a_draft_run(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    overrides, *parts = DRAFT_RUN_MISTAKES[case]
    expect(refuse_draft_run(run, capsys, monkeypatch, *overrides), *parts)
