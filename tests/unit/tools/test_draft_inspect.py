"""draft_inspect: what it says of drafts of every algorithm, and of those that are broken or leave something open."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.models.automodel.draft.draft_directories import (
    LAYOUTS,
    POLICY,
    REDUCED,
    config_of,
    spec_of,
    tensors_of,
    write_draft_directory,
)
from tools.draft_inspect import main

ROOT = Path(__file__).resolve().parents[3]
Run = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def policy(tmp_path: Path) -> str:
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text(json.dumps(POLICY), encoding="utf-8")
    (tmp_path / "policy" / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b": 1}}}', encoding="utf-8")
    return str(tmp_path / "policy")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str | Path) -> tuple[int, dict[str, Any]]:
        code = main([*map(str, arguments), "--json"])
        return code, json.loads(capsys.readouterr().out)

    return call


@pytest.mark.parametrize(("algo", "layout"), LAYOUTS)
def test_a_draft_of_each_algorithm_is_recognised_and_fits(tmp_path, run, policy, algo, layout):
    spec = spec_of(algo)
    directory = write_draft_directory(tmp_path / "draft", spec, layout=layout)
    code, report = run(directory, "--policy", policy)
    assert (code, report["problems"], report["open_questions"], report["fits"]) == (0, [], {}, True)
    assert report["checkpoint"]["algorithm"] == algo
    assert report["checkpoint"]["layout"] == layout
    assert not report["checkpoint"]["is_ours"]
    arch, training = spec.architecture, report["training"]
    assert report["features"]["after_layers"] == list(arch.feature_ids)
    assert report["features"]["layer_outputs"] == [i - 1 for i in arch.feature_ids]
    assert report["vocabulary"]["placeholder"] == arch.placeholder_id
    stored = {name: values.size for name, values in tensors_of(spec).items()}
    assert training["trained"]["parameters"] == sum(stored[name] for name in arch.trained_shapes())
    assert training["published_per_refit"]["bytes"] == 4 * training["published_per_refit"]["parameters"]
    assert report["serving"]["cuda"]["method"] == spec.serving.method
    assert report["checkpoint"]["elements_by_dtype"] == {"F32": sum(stored.values())}
    # Without a policy the same, but for what only a policy can contradict.
    code, alone = run(directory)
    assert code == 0
    assert alone["training"] == training


def test_a_reduced_vocabulary_in_shards(tmp_path, run, policy):
    spec = spec_of("eagle3", is_reduced=True)
    directory = write_draft_directory(tmp_path / "draft", spec, num_shards=2)
    np.savez(directory / "x.npz")
    (directory / "model.safetensors").write_bytes(b"left over")
    code, report = run(directory, "--policy", policy, "freeze=[layers.0.mlp]", "--k", "2")
    assert code == 0
    assert report["vocabulary"] == {"draft": len(REDUCED), "policy": 320, "is_ascending": True, "placeholder": None}
    assert [file["name"] for file in report["checkpoint"]["files"]] == [
        f"model-0000{i}-of-00002.safetensors" for i in (1, 2)
    ]
    assert report["checkpoint"]["ignored_files"] == ["model.safetensors"]
    assert report["training"]["frozen"]["tensors"] == 3
    assert report["serving"]["num_speculative_tokens"] == 2
    code, report = run(directory, "--policy", policy, "static=true")
    assert report["training"]["trained"]["parameters"] == 0
    assert report["training"]["published_per_refit"]["bytes"] == 0


def test_every_problem_is_listed_at_once(tmp_path, run, policy):
    spec = spec_of("eagle3")
    tensors = tensors_of(spec)
    del tensors["fc.weight"]
    config = config_of(spec) | {"vocab_size": 319, "draft_vocab_size": 319, "num_key_value_heads": 2}
    directory = write_draft_directory(tmp_path / "draft", spec, config=config, tensors=tensors)
    (directory / "mask_embedding.pt").write_bytes(b"")
    code, report = run(directory, "--policy", policy, "--k", "9", "--device", "cpu", "freeze=[nothing]")
    assert code == 2
    assert not report["fits"]
    text = "\n".join(report["problems"])
    for part in (
        "mask_embedding.pt: replaces",
        "num_speculative_tokens: got 9; the draft is trained to propose at most 7",
        "policy's vocab_size is 320",
        "head_dim: got 4; the engine's CPU attention",
        "1 missing: ['fc.weight']",
        "k_proj.weight has shape [4, 16], [8, 16] needed",
        "policy.draft.freeze: got 'nothing'",
    ):
        assert part in text
    assert len(report["problems"]) == 6


def test_open_questions_name_their_keys_and_can_be_answered(tmp_path, run, policy):
    spec = spec_of("eagle3")
    config = config_of(spec) | {"norm_output": True}
    directory = write_draft_directory(tmp_path / "draft", spec, config=config)
    code, report = run(directory, "--policy", policy)
    assert (code, report["problems"]) == (2, [])
    assert list(report["open_questions"]) == ["policy.draft.norm_output"]
    assert report["assumed"] == {"policy.draft.norm_output": True}
    assert run(directory, "--policy", policy, "norm_output=true")[0] == 0
    assert run(directory, "--policy", policy, "policy.draft.norm_output=true")[0] == 0
    # A wrong vocabulary is a problem whatever the answer is.
    other = write_draft_directory(tmp_path / "other", spec, config=config | {"vocab_size": 321})
    code, report = run(other, "--policy", policy)
    assert list(report["open_questions"]) == ["policy.draft.norm_output"]
    assert any("vocab_size" in text for text in report["problems"])


def test_several_questions_are_asked_together(tmp_path, run, policy):
    spec = spec_of("dspark")
    config = config_of(spec, "speculators")
    for key in ("aux_hidden_state_layer_ids", "sample_from_anchor"):
        config.pop(key)
    directory = write_draft_directory(tmp_path / "draft", spec, config=config)
    code, report = run(directory, "--policy", policy)
    assert code == 2
    assert sorted(report["open_questions"]) == ["policy.draft.aux_layer_indices", "policy.draft.sample_from_anchor"]
    assert report["problems"] == []
    assert run(directory, "--policy", policy, "aux_layer_indices=[0,2]", "sample_from_anchor=true")[0] == 0


def test_an_algorithm_that_cannot_be_told_is_asked_for(tmp_path, run):
    directory = write_draft_directory(tmp_path / "draft", spec_of("eagle3"), config={"architectures": ["Unknown"]})
    code, report = run(directory)
    assert code == 2
    assert list(report["open_questions"]) == ["policy.draft.algo"]


@pytest.mark.parametrize(
    ("damage", "code", "match"),
    [
        (lambda d: (d / "config.json").write_text("{"), 1, "is not valid JSON"),
        (lambda d: (d / "config.json").unlink(), 1, "config.json: cannot be read"),
        (lambda d: os.truncate(d / "model.safetensors", 500), 1, "is truncated"),
        (lambda d: (d / "model.safetensors").unlink(), 1, "holds no weights"),
        (lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"), 2, "trust_pickle: got false"),
    ],
    ids=["json", "no-config", "cut", "no-weights", "pickle"],
)
def test_damaged_files_are_named_and_the_rest_is_shown(tmp_path, run, damage, code, match):
    directory = write_draft_directory(tmp_path / "draft", spec_of("dflash"))
    damage(directory)
    found, report = run(directory)
    assert found == code
    assert match in "\n".join(report["problems"])
    assert "Traceback" not in json.dumps(report)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["norm_output"], "must be key=value"),
        (["model_name=x"], "must be key=value"),
        (["nor_output=true"], "policy.draft.nor_output: got an unknown key"),
        (["norm_output=3"], "policy.draft.norm_output: got 3; must be true or false"),
        (["algo=eagle9"], "policy.draft.algo: got 'eagle9'"),
        (["--k", "0"], "--k: got 0; must be an integer >= 1"),
        (["--policy", "/no/such/policy"], "--policy: got '/no/such/policy'"),
    ],
)
def test_a_wrong_command_line_is_one_message(tmp_path, capsys, arguments, match):
    directory = write_draft_directory(tmp_path / "draft", spec_of("eagle3"))
    assert main([str(directory), *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert match in err
    assert main([str(tmp_path / "none")]) == 2


def test_people_get_a_table_and_nothing_heavy_is_imported(tmp_path, policy):
    directory = write_draft_directory(tmp_path / "draft", spec_of("peagle"))
    program = (
        "import sys; from tools.draft_inspect import main; code = main(sys.argv[1:]);"
        "sys.stderr.write(str(sorted({'ray', 'torch', 'vllm', 'transformers', 'numpy'} & set(sys.modules))));"
        "sys.exit(code)"
    )
    command = [sys.executable, "-c", program, str(directory), "--policy", policy]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "[]")
    for text in ("peagle", "mask token id", "319", "published per refit", "The draft fits the policy."):
        assert text in done.stdout
