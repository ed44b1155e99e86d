"""`--dry-run` of every recipe on stubs of the models it names; broken ones end like a real start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import yaml

from examples import run_grpo
from nemo_rl.utils.config import load_config
from tests.model_stubs import ROOT, STUBS, TINY_POLICIES, make_hub_cache, make_working_directory

RECIPES = sorted((ROOT / "examples" / "configs" / "recipes" / "llm").glob("*.yaml"))
RECIPE_8B = ROOT / "examples/configs/recipes/llm/grpo-qwen3-8b-1n8g-automodel-eagle3.yaml"
RECIPE_30B = ROOT / "examples/configs/recipes/llm/grpo-qwen3-30ba3b-2507-instruct-4n8g-automodel-eagle3.yaml"
K = "policy.generation.vllm_kwargs.speculative_config.num_speculative_tokens"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine that has the config.json of every model, and nothing else of them."""
    make_hub_cache(tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    work = tmp_path / "work"
    work.mkdir()
    make_working_directory(work)
    monkeypatch.chdir(work)
    # None makes an import fail: a dry run must not get as far as to build anything.
    monkeypatch.setitem(sys.modules, "nemo_rl.algorithms.grpo_setup", None)
    return work


def dry_run(capsys: pytest.CaptureFixture[str], config: Path, *overrides: str) -> tuple[int, str, str]:
    status = run_grpo.main(["--dry-run", "--config", str(config), *overrides])
    out, err = capsys.readouterr()
    return status, out, err


def value(out: str, name: str) -> str:
    """The value beside a name, its further lines joined."""
    lines = out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"{name}  "))
    column = len(name) + len(lines[start][len(name) :]) - len(lines[start][len(name) :].lstrip())
    taken = [lines[start][column:].strip()]
    for line in lines[start + 1 :]:
        if not line.strip() or line[:column].strip():
            break
        taken.append(line.strip())
    return " ".join(taken)


def models_of(path: Path) -> set[str]:
    policy = load_config(path)["policy"]
    draft = policy.get("draft", {})
    return {policy["model_name"], *([draft["model_name"]] if draft.get("model_name") else [])}


@pytest.mark.parametrize("path", RECIPES, ids=[path.stem for path in RECIPES])
def test_recipe(path: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(home.rglob("*"))
    status, out, err = dry_run(capsys, path)
    assert (status, err) == (0, ""), f"{path}: {err}"
    assert "The configuration is valid; nothing was started." in out
    assert "not in the local hub cache" not in out, "every model that a recipe names has a stub"
    has_draft = load_config(path)["policy"].get("draft", {}).get("enabled", False)
    assert ("sent with every refit" in out) == has_draft
    assert float(value(out, "training, together").split()[0]) > 0.0
    assert sorted(home.rglob("*")) == before, "a dry run writes nothing"


def test_every_model_of_a_recipe_has_a_stub() -> None:
    named = set().union(*map(models_of, RECIPES))
    stubs = {path.name.replace("--", "/", 1) for path in STUBS.iterdir() if path.is_dir()}
    assert named == stubs | set(TINY_POLICIES)


def test_what_a_recipe_says(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = dry_run(capsys, RECIPE_30B)
    assert value(out, "policy").startswith("Qwen/Qwen3-30B-A3B-Instruct-2507, 30.53 B parameters, bfloat16")
    assert value(out, "device") == "4 x 8 GPUs"
    assert value(out, "training").startswith("32 ranks = 32 data parallel x 1 tensor parallel; experts over 32")
    assert value(out, "generation") == "8 engines of 4 GPUs, on the devices of training"
    assert value(out, "rollout batch") == "64 prompts x 16 responses = 1024 samples"
    assert value(out, "updates per step") == "2 of 512 samples, 16 per rank"
    assert value(out, "updates per policy update") == "4 of 128 samples"
    assert value(out, "trained") == "13 tensors, 182.98 M numbers: fc, layers, norm, lm_head"
    assert value(out, "the policy's own") == "embed_tokens.weight"
    assert "num_speculative_tokens: 3" in value(out, "served")


def test_a_draft_of_too_few_positions_is_covered_without_a_patched_copy(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published = json.loads(
        (STUBS / "lmsys--SGLang-EAGLE3-Qwen3-30B-A3B-Instruct-2507-SpecForge-Nex" / "config.json").read_text()
    )
    assert published["max_position_embeddings"] == 2048
    _, out, _ = dry_run(capsys, RECIPE_30B)
    # The longest sequence, and the K + 1 positions that the engine has behind it.
    assert value(out, "positions") == f"{8192 + 3 + 1}; the engine's sequences have up to 8192"


def test_what_is_absent_is_left_out_and_said(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = dry_run(capsys, RECIPE_8B)
    said = " ".join(out.split())
    for sentence in (
        "left out: cluster.device: got 'cuda', and on this machine",
        "left out: policy.model_name: Qwen/Qwen3-8B has no weights here; they were not checked.",
        "left out: policy.tokenizer.name: Qwen/Qwen3-8B has no tokenizer here",
        "left out: policy.draft.model_name: RedHatAI/Qwen3-8B-speculator.eagle3 has no weights here",
    ):
        assert sentence in said


def test_a_model_outside_the_cache_is_said(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = dry_run(capsys, RECIPE_8B, "policy.model_name=nobody/no-model")
    said = " ".join(out.split())
    assert status == 0
    assert "left out: policy.model_name: nobody/no-model is not in the local hub cache" in said
    assert "hf download nobody/no-model config.json" in said
    assert "left out: memory:" in said
    assert "RedHatAI/Qwen3-8B-speculator.eagle3, not looked at (see below)" in said
    status, out, _ = dry_run(capsys, RECIPE_8B, "policy.draft.model_name=nobody/no-draft")
    assert status == 0
    assert "left out: policy.draft.model_name: nobody/no-draft is not in the local hub cache" in " ".join(out.split())


def test_weights_that_are_there_are_checked(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = home / "results/models/tiny-qwen3-64x4-spell"
    (policy / "model.safetensors").write_bytes(b"\0" * 20)
    recipe = ROOT / "examples/configs/recipes/llm/grpo-tiny-qwen3-1n0g-automodel-none.yaml"
    status, _, err = dry_run(capsys, recipe)
    assert status == 2
    assert "model.safetensors is not a complete safetensors file" in err


def test_a_checkpoint_is_neither_judged_nor_cleared(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leftover = home / "results/grpo-qwen3-8b-1n8g-automodel-eagle3" / "tmp_step_3"
    leftover.mkdir(parents=True)
    status, out, _ = dry_run(capsys, RECIPE_8B)
    assert status == 0
    assert leftover.is_dir()
    assert "whether the run can continue from the latest one was not checked" in " ".join(out.split())


BROKEN: list[Any] = [
    pytest.param(["grpo.max_num_step=3"], "grpo.max_num_step: got an unknown key", id="unknown-key"),
    pytest.param(["grpo.max_num_steps=0"], "grpo.max_num_steps: got 0", id="out-of-range"),
    pytest.param(["policy.sequence_packing.train_mb_tokens=100"], "train_mb_tokens: got 100", id="conflict"),
    pytest.param(
        ["policy.dtensor_cfg.tensor_parallel_size=3"], "policy.dtensor_cfg.tensor_parallel_size: got 3", id="layout"
    ),
    pytest.param(
        ["policy.train_global_batch_size=4", "policy.draft.train_global_batch_size=4"],
        "policy.train_global_batch_size: got 4; must be a multiple of the number of data-parallel workers (8)",
        id="batch",
    ),
    pytest.param(
        ["policy.dtensor_cfg.expert_parallel_size=8"],
        "policy.dtensor_cfg.expert_parallel_size: got 8; must be 1, there are no experts in",
        id="experts-of-a-dense-model",
    ),
    pytest.param(
        ["policy.max_total_sequence_length=50000", "policy.generation.max_new_tokens=100"],
        "policy.max_total_sequence_length: got 50000; must be at most 40960",
        id="length",
    ),
    pytest.param([f"{K}=8"], f"{K}: got 8", id="k"),
    pytest.param(
        ["policy.draft.model_name=AngelSlim/Qwen3-1.7B_eagle3"],
        "policy.draft.model_name: the draft was made for features of size 2048",
        id="draft-of-another-policy",
    ),
    pytest.param(
        ["policy.draft.model_name=z-lab/Qwen3-8B-DFlash-b16"],
        "policy.draft.model_name: its config.json has architectures ['DFlashDraftModel']",
        id="draft-of-another-algorithm",
    ),
    pytest.param(
        ["policy.draft.aux_layer_indices=[1,2,36]"],
        "policy.draft.aux_layer_indices: got [1, 2, 36]; [36] is outside",
        id="layers-of-the-draft",
    ),
    pytest.param(["policy.model_name=/no/such/model"], "policy.model_name: got '/no/such/model'", id="no-such-model"),
    pytest.param(["policy.draft.model_name=/no/such"], "policy.draft.model_name: got '/no/such'", id="no-such-draft"),
    pytest.param(["data.prompt_file=none.txt"], "data.prompt_file: got 'none.txt'", id="no-prompt-file"),
    pytest.param(["logger.log_dir=/proc/x"], "logger.log_dir: got '/proc/x'", id="not-writable"),
]


@pytest.mark.parametrize(("overrides", "message"), BROKEN)
def test_a_broken_configuration_gives_the_message_of_a_real_start(
    overrides: list[str],
    message: str,
    home: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Everything that a real start needs beside the config.json files: a GPU, weights, a tokenizer.
    monkeypatch.setattr("nemo_rl.distributed.device.cuda_obstacle", lambda: None)
    monkeypatch.setattr("nemo_rl.utils.preflight.check_weights", lambda *_, **__: None)
    monkeypatch.setattr("nemo_rl.models.automodel.draft.registry.find_weight_files", lambda _: None)
    policy = home.parent / "hub" / "models--Qwen--Qwen3-8B" / "snapshots" / ("0" * 40)
    (policy / "tokenizer.json").write_text("{}", encoding="utf-8")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert run_grpo.main(["--config", str(RECIPE_8B), *overrides]) == 2
    real = capsys.readouterr().err
    assert message in real
    assert dry_run(capsys, RECIPE_8B, *overrides) == (2, "", real)


def test_experts_that_do_not_split_evenly(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = dry_run(capsys, RECIPE_30B, "policy.dtensor_cfg.expert_parallel_size=24")
    assert (status, out) == (2, "")
    assert "policy.dtensor_cfg.expert_parallel_size: got 24; must divide the 128 experts of each layer of" in err


def test_unknown_key_in_a_recipe(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = home / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"defaults": str(RECIPE_8B), "policy": {"draft": {"los_weight": 1.0}}}))
    status, out, err = dry_run(capsys, recipe)
    assert (status, out) == (2, "")
    assert err.startswith("error: policy.draft.los_weight: got an unknown key; the nearest valid name is policy.draft.")


def test_a_process_of_its_own_imports_nothing_heavy(tmp_path: Path) -> None:
    make_hub_cache(tmp_path / "hub")
    make_working_directory(tmp_path)
    program = (
        "import sys; from examples import run_grpo; code = run_grpo.main(sys.argv[1:]);"
        "heavy = sorted({'ray', 'torch', 'vllm', 'transformers', 'nemo_automodel'} & set(sys.modules));"
        "print('imported', heavy); sys.exit(code)"
    )
    env = os.environ | {"HF_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program, "--dry-run", "--config", str(RECIPE_30B)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("imported []\n")
    assert "30.53 B parameters" in done.stdout
