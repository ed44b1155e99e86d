"""tools/draft_convert.py from the command line; what it does to a draft is in test_draft_convert of the draft."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_rl.models.automodel.draft.registry import adapter_of
from nemo_rl.models.automodel.draft.vocab import VocabMap
from nemo_rl.models.automodel.draft.vocab_file import VocabFile, write_vocab_file
from tests.unit.models.automodel.draft.helpers import make_arch, make_module
from tools.draft_convert import main, shard_bytes

V = 23


@pytest.fixture
def draft(tmp_path) -> Path:
    """An EAGLE-3 draft with the original authors' names, read from `weights` of the test's choice."""
    directory = tmp_path / "draft"
    directory.mkdir()
    arch = make_arch()
    tensors = {name.replace("layers.0", "midlayer"): p.detach() for name, p in make_module(arch).named_parameters()}
    save_file({f"model.{name}": t.contiguous() for name, t in tensors.items()}, directory / "model.safetensors")
    raw = adapter_of("eagle3").write_config(arch, dtype="float32")
    del raw["nemo_rl_draft"]
    (directory / "config.json").write_text(json.dumps(raw))
    return directory


@pytest.fixture
def run(draft, tmp_path, capsys):
    def call(*arguments: str, out: str = "out") -> tuple[int, str]:
        status = main([str(draft), "--out", str(tmp_path / out), *arguments])
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    return call


def test_the_algorithm_is_found_and_names_become_canonical(run, draft, tmp_path):
    status, text = run("--layout", "native")
    assert status == 0, text
    assert "eagle3" in text
    assert "layout native, float32, 23 of 23 ids" in text
    original, written = (load_file(d / "model.safetensors") for d in (draft, tmp_path / "out"))
    assert "layers.0.mlp.up_proj.weight" in written
    assert all(torch.equal(t, written[n[6:].replace("midlayer", "layers.0")]) for n, t in original.items())


def test_layout_dtype_and_shards(run, tmp_path):
    (tmp_path / "policy").mkdir()
    policy = {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 5, "hidden_size": 12, "vocab_size": V}
    (tmp_path / "policy" / "config.json").write_text(json.dumps(policy))
    more = ["--policy", str(tmp_path / "policy"), "--num-speculative-tokens", "2", "--max-shard-size", "1K"]
    status, text = run("--layout", "speculators", "--dtype", "bfloat16", *more)
    assert status == 0, text
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    stated = config["speculators_config"]
    assert stated["verifier"] == {
        "name_or_path": str(tmp_path / "policy"),
        "architectures": ["Qwen3ForCausalLM"],
    }
    assert stated["proposal_methods"][0]["speculative_tokens"] == 2
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 1
    assert main([str(tmp_path / "out"), "--out", str(tmp_path / "back")]) == 0
    assert {t.dtype for t in load_file(tmp_path / "back" / "model.safetensors").values()} == {torch.bfloat16}
    (tmp_path / "policy" / "config.json").write_text(json.dumps(policy | {"vocab_size": V + 1}))
    status, text = run("--policy", str(tmp_path / "policy"), out="other")
    assert status == 2
    assert f"vocabulary of size {V}" in text


def test_a_vocabulary_file_reduces(run, tmp_path):
    vocab = VocabMap((3, 9, 17, 21), V)
    write_vocab_file(tmp_path / "vocab.json", VocabFile(vocab, "fingerprint"))
    status, text = run("--vocab", str(tmp_path / "vocab.json"))
    assert status == 0, text
    assert "4 of 23 ids" in text
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert (torch.arange(4) + stored["d2t"]).tolist() == list(vocab.ids)
    assert main([str(tmp_path / "out"), "--out", str(tmp_path / "again"), "--vocab", str(tmp_path / "vocab.json")]) == 2


def test_a_wrong_table_is_repaired(run, draft, tmp_path):
    stored = load_file(draft / "model.safetensors")
    save_file(stored | {"d2t": torch.arange(V)}, draft / "model.safetensors")
    status, text = run()
    assert status == 1
    assert "--repair-d2t" in text
    assert run("--repair-d2t")[0] == 0
    assert "d2t" not in load_file(tmp_path / "out" / "model.safetensors")
    save_file(stored | {"d2t": torch.zeros(V, dtype=torch.int64)}, draft / "model.safetensors")
    status, text = run("--repair-d2t", out="other")
    assert status == 2
    assert "d2t holds offsets, as it must" in text


def test_a_pickle_is_read_when_it_is_trusted(run, draft, tmp_path):
    torch.save(load_file(draft / "model.safetensors"), draft / "pytorch_model.bin")
    (draft / "model.safetensors").unlink()
    status, text = run()
    assert status == 1
    assert "pickle" in text
    assert not (tmp_path / "out").exists()
    assert run("--trust-pickle")[0] == 0
    assert [p.name for p in sorted((tmp_path / "out").iterdir())] == ["config.json", "model.safetensors"]


def test_settings_answer_open_questions(run, draft):
    raw = json.loads((draft / "config.json").read_text()) | {"norm_output": True}
    (draft / "config.json").write_text(json.dumps(raw))
    status, text = run()
    assert status == 2
    assert "policy.draft.norm_output: got nothing" in text
    assert run("norm_output=true")[0] == 0
    assert run("policy.draft.norm_output=true", out="other")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["norm_ouput=true"], "policy.draft.norm_ouput: got an unknown key"),
        (["num_layers=two"], "policy.draft.num_layers: got 'two'; must be an integer"),
        (["norm_output"], "norm_output: is no setting; must be key=value"),
        (["algo=peagle"], "algo=peagle: is not set this way; must be given as --algo"),
        (["block_size=4"], "policy.draft.block_size: got an option of another algo"),
        (["--algo", "dflash"], "a dflash draft has one of"),
        (["--layout", "speculators"], "--policy: got nothing; the speculators layout names the policy"),
        (["--vocab", "none.json"], "--vocab: got none.json; there is no such file"),
        (["--policy", "none/at/all"], "--policy: got 'none/at/all'"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_what_cannot_be_used_is_said(run, tmp_path, arguments, message):
    status, text = run(*arguments)
    assert status == 2
    assert message in text
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten_by_accident(run, draft, tmp_path):
    assert main([str(draft), "--out", str(draft)]) == 2
    assert main([str(tmp_path / "none"), "--out", str(tmp_path / "out")]) == 2
    assert main([str(draft), "--out", str(draft / "config.json")]) == 2
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    status, text = run()
    assert status == 2
    assert "--overwrite" in text
    assert run("--overwrite")[0] == 0
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(("text", "number"), [("3", 3), ("2k", 2048), ("1G", 1 << 30)])
def test_sizes(text, number):
    assert shard_bytes(text) == number


@pytest.mark.parametrize("text", ["", "G", "0", "-1M", "1.5G", "2T"])
def test_other_sizes_are_refused(text):
    with pytest.raises(SystemExit) as stop:
        main(["draft", "--out", "out", "--max-shard-size", text])
    assert stop.value.code == 2
