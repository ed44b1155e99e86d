"""tools/draft_vocab.py: counting, choosing, reporting, checking; what it refuses and with which exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from nemo_rl.algorithms.config import RolloutStoreConfig
from nemo_rl.data import rollout_index
from nemo_rl.data.rollout_store import RolloutWriter
from nemo_rl.data.tokenizer_identity import tokenizer_fingerprint
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.automodel.draft.registry import adapter_of
from nemo_rl.models.automodel.draft.vocab import VocabMap
from nemo_rl.models.automodel.draft.vocab_file import read_vocab_file
from nemo_rl.utils.config import build_master_config, load_config
from nemo_rl.utils.preflight import preflight
from tests.tiny_models import write_tiny_policy
from tests.unit.models.automodel.draft.helpers import make_arch
from tools.draft_vocab import main

VOCAB, NUM_TOKENS, IM_END = 320, 271, 258
ANSWERS = ["abcab", "ab", "zz"]


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory) -> Path:
    return Path(write_tiny_policy(tmp_path_factory.mktemp("policy"), layers=1))


@pytest.fixture(scope="module")
def recipe(policy_dir, tmp_path_factory) -> Path:
    """Expected answers with 11 characters, written-out solutions of another one."""
    directory = tmp_path_factory.mktemp("recipe")
    rows = [{"input": f"q{i}", "output": text, "solution": "yyyy"} for i, text in enumerate(ANSWERS)]
    (directory / "data.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    content = {
        "policy": {"model_name": str(policy_dir), "draft": {"algo": "dflash", "mask_token_id": 319}},
        "data": {"dataset_name": "ResponseDataset", "train_data_path": str(directory / "data.jsonl")},
    }
    path = directory / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.fixture(scope="module")
def rollouts(policy_dir, tmp_path_factory) -> Path:
    """Four times token 65, once 70, of a sample that counts; the other one is masked out."""
    directory = tmp_path_factory.mktemp("store") / "rollouts"
    identity = rollout_index.StoreIdentity(
        vocab_size=VOCAB,
        tokenizer=tokenizer_fingerprint(policy_dir),
        policy="p",
        policy_name="tiny",
        features=None,
    )
    writer = RolloutWriter(
        RolloutStoreConfig(mode="record", dir=str(directory)), identity, run="results/a", resume_step=None
    )
    ids = torch.tensor([[99, 65, 65, 70, 65, 65], [99, 99, 80, 80, 80, 80]])
    mask = torch.tensor([[0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]], dtype=torch.bool)
    batch = {
        "input_ids": ids,
        "input_lengths": torch.tensor([6, 6]),
        "token_mask": mask,
        "sample_mask": torch.tensor([1.0, 0.0]),
        "generation_logprobs": torch.zeros(2, 6),
        "rewards": torch.zeros(2),
        "response_lengths": torch.tensor([5, 4]),
        "truncated": torch.zeros(2, dtype=torch.bool),
        "sample_index": torch.arange(2),
    }
    writer.add(1, BatchedDataDict(batch), versions=frozenset({0}))
    return directory


def build(out: Path, *arguments: str) -> int:
    return main(["build", "--out", str(out), *arguments])


def test_answers_of_the_data_are_counted(recipe, tmp_path, capsys):
    out = tmp_path / "vocab.json"
    assert build(out, "--data", str(recipe), "--size", "8", "--keep", "90,91", "--min-coverage", "0.8") == 0
    file = read_vocab_file(out)
    a, b, c, z = (ord(letter) - 33 for letter in "abcz")
    kept = set(file.always)
    assert {90, 91, IM_END} <= kept
    assert len(file.vocab.ids) == 8
    # Three times a and b, twice z, once c: the size leaves room for the most frequent ones.
    room = 8 - len(kept)
    assert set(file.vocab.ids) == kept | set([a, b, z, c][:room])
    assert file.counted_tokens == 9
    assert file.coverage == pytest.approx(sum([3, 3, 2, 1][:room]) / 9)
    printed = capsys.readouterr().out
    assert "counted 9 tokens, 4 different ones" in printed
    assert f"kept {IM_END}: " in printed


def test_another_field_and_fewer_rows(recipe, tmp_path):
    out = tmp_path / "vocab.json"
    assert build(out, "--data", str(recipe), "--size", "8", "--field", "solution", "--max-samples", "2") == 0
    file = read_vocab_file(out)
    assert (file.counted_tokens, file.coverage) == (8, 1.0)
    assert ord("y") - 33 in file.vocab.ids
    assert "field solution" in file.source


def test_rollouts_are_counted_where_supervised(rollouts, policy_dir, recipe, tmp_path, capsys):
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    assert build(first, "--rollouts", str(rollouts), "--policy", str(policy_dir), "--size", "6") == 0
    assert read_vocab_file(first).counted_tokens == 5
    assert {65, 70} <= set(read_vocab_file(first).vocab.ids)
    assert not {80, 99} & set(read_vocab_file(first).vocab.ids)
    # The recipe names the policy, the tokens are still those of the rollouts.
    assert build(second, "--data", str(recipe), "--rollouts", str(rollouts), "--size", "6") == 0
    assert first.read_bytes() == second.read_bytes()
    capsys.readouterr()
    assert main(["coverage", "--file", str(first), "--data", str(recipe)]) == 0
    assert f"{first}: 6 ids, coverage 0.3333; 1.0000 when it was made" in capsys.readouterr().out
    assert main(["coverage", "--file", str(first)]) == 0
    assert "made from 5 tokens (2 samples of" in capsys.readouterr().out


def test_placeholders_and_padding_are_never_proposed(recipe, tmp_path):
    """The embedding has more rows than the tokenizer tokens, the recipe's draft has a placeholder."""
    out = tmp_path / "vocab.json"
    arguments = ["--data", str(recipe), "--mask-token-id", "60,61"]
    assert build(out, *arguments, "--size", str(NUM_TOKENS - 2)) == 0
    assert set(read_vocab_file(out).vocab.ids) == set(range(NUM_TOKENS)) - {60, 61}
    assert build(out, *arguments, "--size", str(NUM_TOKENS - 1)) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--size", "5"],
            "--size: got 5, and 5 ids cover 0.6667 of the counted tokens, at least 0.95 asked for; 7 ids do",
        ),
        ([], "--size: got nothing, and no recipe sets policy.draft.draft_vocab_size"),
        (["--size", "0"], "must be in, the draft vocabulary holds 0"),
        (["--size", "8", "--keep", "319"], "ids [319] must be in and must not be proposed"),
        (["--size", "8", "--field", "none"], "no field 'none'"),
        (["--size", "8", "policy.draft.none=1"], "policy.draft.none"),
        (["--size", "8", "--policy", "nowhere"], "--policy: got 'nowhere'"),
    ],
    ids=["coverage", "size", "zero", "placeholder", "field", "override", "policy"],
)
def test_what_cannot_be_built_is_said(recipe, tmp_path, capsys, arguments, message):
    assert build(tmp_path / "vocab.json", "--data", str(recipe), *arguments) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_rollouts_of_another_tokenizer_are_refused(rollouts, tmp_path, capsys):
    other = Path(write_tiny_policy(tmp_path / "other", layers=1))
    raw = json.loads((other / "tokenizer.json").read_text())
    raw["added_tokens"] = raw["added_tokens"][:-1]
    (other / "tokenizer.json").write_text(json.dumps(raw))
    assert build(tmp_path / "out.json", "--rollouts", str(rollouts), "--policy", str(other), "--size", "9") == 2
    assert "--rollouts: got" in capsys.readouterr().err
    assert build(tmp_path / "out.json", "--rollouts", str(rollouts), "--size", "9") == 2
    assert "--policy: got nothing; is required without --data" in capsys.readouterr().err
    assert build(tmp_path / "out.json", "--size", "9") == 2
    assert "--data: got nothing, and no --rollouts either" in capsys.readouterr().err


def test_a_run_proposes_what_was_chosen(recipe, tmp_path, monkeypatch):
    """From counts to the resolved draft of a run: the recipe that the tokens came from, with one key more."""
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "vocab.json"
    assert build(out, "--data", str(recipe), "--size", "9") == 0
    draft = {"enabled": "true", "serve": "false", "block_size": "4", "num_layers": "1", "aux_layer_indices": "[-1]"}
    draft |= {"allow_boundary_layers": "true", "vocab_file": str(out)}
    sizes = ("grpo.num_prompts_per_step=1", "grpo.num_generations_per_prompt=2", "policy.train_global_batch_size=2")
    lengths = ("policy.train_micro_batch_size=1", "policy.max_total_sequence_length=64", "cluster.device=cpu")
    overrides = [*(f"policy.draft.{key}={value}" for key, value in draft.items()), *sizes, *lengths]
    spec = preflight(build_master_config(load_config(recipe, [*overrides, "policy.precision=float32"]))).draft_spec
    assert spec is not None
    assert spec.vocab_ids == read_vocab_file(out).vocab.ids
    assert spec.architecture.draft_vocab_size == 9


# -- check -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def draft(tmp_path) -> Path:
    """A reduced draft whose tables and config the test may change."""
    arch, directory = make_arch(draft_vocab_size=4), tmp_path / "draft"
    directory.mkdir()
    mapping = VocabMap((3, 9, 17, 21), arch.vocab_size)
    tensors = {"lm_head.weight": torch.zeros(4, 12), "d2t": torch.tensor(mapping.d2t), "t2d": torch.tensor(mapping.t2d)}
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(adapter_of("eagle3").write_config(arch, dtype="float32")))
    return directory


def change(directory: Path, **tensors: torch.Tensor | None) -> None:
    stored = load_file(directory / "model.safetensors") | tensors
    save_file({name: t for name, t in stored.items() if t is not None}, directory / "model.safetensors")


def checked(path: Path, capsys, *arguments: str) -> tuple[int, str]:
    status = main(["check", str(path), *arguments])
    return status, capsys.readouterr().out


def test_a_sound_draft_passes(draft, capsys):
    status, text = checked(draft, capsys)
    assert (status, text.splitlines()) == (0, [f"{draft}: note: 4 of 23 ids", f"{draft}: nothing wrong"])
    change(draft, t2d=None, d2t=torch.tensor([9, 2, 15, 18]))
    status, text = checked(draft, capsys)
    assert status == 0
    assert "no t2d; it is rebuilt" in text
    assert "not ascending, which is allowed" in text


def test_every_violation_of_a_draft_is_listed(draft, capsys):
    change(draft, d2t=torch.tensor([3, 9, 17, 21]), **{"lm_head.weight": torch.zeros(5, 12)})
    status, text = checked(draft, capsys)
    assert status == 1
    for line in (
        "lm_head.weight has 5 rows, draft_vocab_size is 4",
        "1 ids lie outside 0..22, first [24]",
        "3 ids are in t2d and not in d2t, first [9, 17, 21]",
        "3 ids are in d2t and not in t2d, first [10, 19, 24]",
    ):
        assert f"{draft}: {line}" in text.splitlines()
    change(draft, d2t=None, **{"lm_head.weight": None})
    assert checked(draft, capsys)[0] == 1


def test_the_whole_vocabulary_needs_the_identity(draft, capsys):
    arch = make_arch()
    (draft / "config.json").write_text(json.dumps(adapter_of("eagle3").write_config(arch, dtype="float32")))
    head = torch.zeros(23, 12)
    change(draft, t2d=None, d2t=torch.zeros(23, dtype=torch.int64), **{"lm_head.weight": head})
    assert checked(draft, capsys)[0] == 0
    change(draft, d2t=torch.tensor([1, -1] + [0] * 21))
    status, text = checked(draft, capsys)
    assert status == 1
    assert "every id is proposed, and d2t is not all zeros" in text


def test_a_vocabulary_file_is_checked(recipe, policy_dir, tmp_path, capsys):
    path = tmp_path / "ids.json"
    assert build(path, "--data", str(recipe), "--size", "9") == 0
    capsys.readouterr()
    assert checked(path, capsys, "--tokenizer", str(policy_dir))[0] == 0
    assert main(["check", str(path), "--tokenizer", str(tmp_path)]) == 2
    assert "was made with tokenizer" in capsys.readouterr().err
    raw = json.loads(path.read_text())
    path.write_text(json.dumps(raw | {"ids": [5, 3, 3, 400]}))
    status, text = checked(path, capsys)
    assert status == 1
    for line in ("ids has 4 entries, draft_vocab_size is 9", "1 ids lie outside", "1 ids occur more", "not ascending"):
        assert line in text


def test_what_is_no_vocabulary_ends_with_two(tmp_path, capsys):
    assert main(["check", str(tmp_path / "none")]) == 2
    assert "there is no such file or directory" in capsys.readouterr().err
    (tmp_path / "other.json").write_text("{}")
    assert main(["check", str(tmp_path / "other.json")]) == 2
    assert "is no vocabulary file" in capsys.readouterr().err
    assert main(["coverage"]) == 2
    with pytest.raises(SystemExit) as stop:
        main(["build", "--size", "x", "--out", "y"])
    assert stop.value.code == 2
