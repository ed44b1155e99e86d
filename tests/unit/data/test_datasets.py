from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from nemo_rl.data import sources
from nemo_rl.data.config import DataConfig, ReasoningGymDataConfig
from nemo_rl.data.datasets import PromptDataset, build_datasets
from nemo_rl.environments.config import EnvConfig
from nemo_rl.errors import ConfigError

SPELLING = ReasoningGymDataConfig(task="spell_backward", size=20, val_size=6, kwargs={"max_word_len": 6})
MATH, GYM = EnvConfig(name="math"), EnvConfig(name="reasoning_gym")


def build(
    tokenizer, env: EnvConfig = MATH, *, max_input_len: int = 64, **data
) -> tuple[PromptDataset, PromptDataset | None]:
    return build_datasets(
        DataConfig(max_input_seq_length=max_input_len, **data), env, tokenizer, max_input_len=max_input_len, seed=1
    )


def build_spelling(tokenizer, **data) -> tuple[PromptDataset, PromptDataset | None]:
    return build(tokenizer, GYM, **{"dataset_name": "reasoning_gym", "reasoning_gym": SPELLING, **data})


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"input": f"{i}+1?", "output": str(i + 1)}) + "\n" for i in range(4)))
    return path


def test_generated_prompt_is_question_in_chat_template(tokenizer) -> None:
    train, val = build_spelling(tokenizer)
    assert (len(train), len(val)) == (20, 6)
    example = train[3]
    question = example.metadata["entry"]["question"]
    assert example.prompt_text == f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(example.prompt_ids) == example.prompt_text
    assert len(example.prompt_ids) <= 18
    assert (example.index, example.env_name, example.too_long) == (3, "reasoning_gym", False)
    assert {e.metadata["ground_truth"] for e in train} != {e.metadata["ground_truth"] for e in val}


def test_no_validation_questions_means_no_validation_set(tokenizer) -> None:
    section = SPELLING.model_copy(update={"val_size": 0})
    assert build_spelling(tokenizer, reasoning_gym=section)[1] is None


def test_over_long_prompts_are_kept_and_flagged(tokenizer) -> None:
    train, _ = build_spelling(tokenizer)
    lengths = [len(example.prompt_ids) for example in train]
    limit = sorted(set(lengths))[1]
    limited, _ = build_spelling(tokenizer, max_input_len=limit)
    assert [example.too_long for example in limited] == [length > limit for length in lengths]
    assert 0 < sum(example.too_long for example in limited) < 20


def test_templates_wrap_the_question(tokenizer, jsonl: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("Solve, answer in \\boxed{{}}: {}\nThink.")
    (tmp_path / "system.txt").write_text("You are brief.")
    train, val = build(
        tokenizer,
        dataset_name="ResponseDataset",
        train_data_path=str(jsonl),
        prompt_file=str(tmp_path / "prompt.txt"),
        system_prompt_file=str(tmp_path / "system.txt"),
        max_input_len=128,
    )
    assert val is None
    assert train[2].prompt_text == (
        "<|im_start|>system\nYou are brief.<|im_end|>\n"
        "<|im_start|>user\nSolve, answer in \\boxed{}: 2+1?\nThink.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert train[2].metadata == {"ground_truth": "3"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no place", "the question would be lost"),
        ("\\boxed{x} {}", "KeyError"),
        ("{} {}", "IndexError"),
        ("{", "ValueError"),
    ],
    ids=["no-place", "single-braces", "two-places", "open-brace"],
)
def test_bad_prompt_template_is_named(tokenizer, tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"data\.prompt_file") as caught:
        build_spelling(tokenizer, prompt_file=str(path))
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("key", ["prompt_file", "system_prompt_file"])
def test_missing_template_file_is_named(tokenizer, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"data\.{key}: got 'nowhere\.txt'"):
        build_spelling(tokenizer, **{key: "nowhere.txt"})


@pytest.mark.parametrize(
    ("env", "data", "message"),
    [
        (MATH, {"dataset_name": "gsm9k"}, r"data\.dataset_name: got 'gsm9k'; must be one of .*gsm8k"),
        (MATH, {"dataset_name": "ResponseDataset"}, r"data\.train_data_path: got null"),
        (
            MATH,
            {"dataset_name": "ResponseDataset", "train_data_path": "no.jsonl"},
            r"data\.train_data_path: got 'no\.jsonl'",
        ),
        (GYM, {"dataset_name": "gsm8k"}, r"env\.name: got 'reasoning_gym' with data\.dataset_name 'gsm8k'"),
        (GYM, {"dataset_name": "reasoning_gym"}, r"data\.reasoning_gym: got null"),
    ],
    ids=["unknown-name", "no-path", "no-file", "wrong-environment", "no-section"],
)
def test_bad_data_configuration_is_named(tokenizer, env: EnvConfig, data: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(tokenizer, env, **data)


def test_jsonl_with_split_is_refused(tokenizer, jsonl: Path) -> None:
    with pytest.raises(ConfigError, match="has no splits"):
        build(tokenizer, dataset_name="ResponseDataset", train_data_path=str(jsonl), train_split="train")


def test_validation_file_is_used(tokenizer, jsonl: Path, tmp_path: Path) -> None:
    other = tmp_path / "val.jsonl"
    other.write_text(json.dumps({"input": "9+9?", "output": "18"}))
    _, val = build(tokenizer, dataset_name="ResponseDataset", train_data_path=str(jsonl), val_data_path=str(other))
    assert [example.metadata["ground_truth"] for example in val] == ["18"]


def save_splits(path: Path, **splits: dict) -> str:
    import datasets

    datasets.DatasetDict({k: datasets.Dataset.from_dict(v) for k, v in splits.items()}).save_to_disk(str(path))
    return str(path)


def test_known_data_set_with_usual_splits(tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_splits(
        tmp_path / "gsm8k",
        train={"question": ["q1", "q2"], "answer": ["work #### 1", "work #### 2"]},
        test={"question": ["q3"], "answer": ["#### 3"]},
    )
    monkeypatch.setitem(sources.HUB_DATASETS, "gsm8k", dataclasses.replace(sources.HUB_DATASETS["gsm8k"], path=path))
    train, val = build(tokenizer, dataset_name="gsm8k")
    assert [e.metadata["ground_truth"] for e in train] == ["1", "2"]
    assert [e.metadata["ground_truth"] for e in val] == ["3"]


def test_known_data_set_without_validation_split_holds_some_out(
    tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "OpenMathInstruct-2"
    rows = {"problem": [f"p{i}" for i in range(40)], "expected_answer": [str(i) for i in range(40)]}
    path = save_splits(tmp_path / "math", train_1M=rows)
    monkeypatch.setitem(sources.HUB_DATASETS, name, dataclasses.replace(sources.HUB_DATASETS[name], path=path))
    train, val = build(tokenizer, dataset_name=name)
    parts = [[e.metadata["ground_truth"] for e in part] for part in (train, val)]
    assert [len(part) for part in parts] == [38, 2]
    assert sorted(parts[0] + parts[1], key=int) == rows["expected_answer"]
    again = build(tokenizer, dataset_name=name)
    assert [e.metadata["ground_truth"] for e in again[1]] == parts[1]


def test_local_copy_of_a_known_data_set_keeps_its_fields(tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "copy.jsonl"
    path.write_text(json.dumps({"prompt": [{"content": "q"}], "reward_model": {"ground_truth": "34"}}))
    train, val = build(tokenizer, dataset_name="DAPOMath17K", train_data_path=str(path))
    assert val is None
    assert train[0].metadata == {"ground_truth": "34"}
    assert "user\nq<|im_end|>" in train[0].prompt_text


def test_index_outside_the_data_is_an_index_error(tokenizer) -> None:
    train, _ = build_spelling(tokenizer)
    for index in (20, -1):
        with pytest.raises(IndexError):
            _ = train[index]
