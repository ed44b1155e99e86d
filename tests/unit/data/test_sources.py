from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_rl.data.sources import (
    MISSING,
    ReasoningGymSource,
    after_hashes,
    check_columns,
    field_of,
    load_table,
    read_jsonl,
    whole_text,
)
from nemo_rl.errors import ConfigError


def read(path: Path):
    return read_jsonl(path, input_key="question", output_key="answer", answer_of=whole_text)


def write_lines(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


GOOD = json.dumps({"question": "1 + 1?", "answer": "2"})


def test_jsonl_rows_become_questions(tmp_path: Path) -> None:
    odd = '{"question": "a\u2028b", "answer": 0.5}'  # a raw line separator inside a JSON string is legal
    source = read(write_lines(tmp_path / "d.jsonl", GOOD, "", odd))
    assert len(source) == 2
    assert (source[0].text, source[0].metadata) == ("1 + 1?", {"ground_truth": "2"})
    assert (source[1].text, source[1].metadata) == ("a\u2028b", {"ground_truth": "0.5"})


@pytest.mark.parametrize(
    ("bad", "parts"),
    [
        ("{", ["row 3", "JSON"]),
        ("[1]", ["row 3", "list", "object"]),
        ('{"question": "x"}', ["row 3", "'answer'", "data.output_key"]),
        ('{"prompt": "x", "answer": "1"}', ["row 3", "'question'", "data.input_key", "'prompt'"]),
        ('{"question": null, "answer": "1"}', ["row 3", "'question'", "None"]),
        ('{"question": "  ", "answer": "1"}', ["row 3", "'question'"]),
        ('{"question": "x", "answer": ["1"]}', ["row 3", "'answer'", "['1']"]),
        ('{"question": "x", "answer": true}', ["row 3", "'answer'", "True"]),
    ],
    ids=["no-json", "no-object", "no-answer", "no-question", "null", "blank", "list", "bool"],
)
def test_bad_jsonl_row_is_named(tmp_path: Path, bad: str, parts: list[str]) -> None:
    path = write_lines(tmp_path / "d.jsonl", GOOD, "", bad)
    with pytest.raises(ConfigError) as caught:
        read(path)
    for part in [str(path), *parts]:
        assert part in str(caught.value)


def test_empty_and_unreadable_files_are_named(tmp_path: Path) -> None:
    empty = write_lines(tmp_path / "empty.jsonl", "", " ")
    with pytest.raises(ConfigError, match=r"empty\.jsonl holds no rows"):
        read(empty)
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary\.jsonl cannot be read as UTF-8"):
        read(binary)


def test_nested_fields_are_found_by_dots() -> None:
    record = {"prompt": [{"content": "q"}], "a.b": 1, "a": {"b": 2}, "empty": None}
    assert field_of(record, "prompt.0.content") == "q"
    assert field_of(record, "a.b") == 1
    assert field_of(record, "empty") is None
    for key in ("prompt.1.content", "prompt.x", "a.c", "nothing", "empty.x"):
        assert field_of(record, key) is MISSING, key


@pytest.mark.parametrize(
    ("text", "answer"),
    [("so 3 #### is\n#### 1,024", "1,024"), ("no mark", None), ("####  ", None)],
)
def test_gsm8k_answer_follows_the_hashes(text: str, answer: str | None) -> None:
    assert after_hashes(text) == answer


def test_reasoning_gym_questions_are_the_tasks_own() -> None:
    import reasoning_gym

    source = ReasoningGymSource("spell_backward", size=5, seed=3, kwargs={"min_word_len": 3, "max_word_len": 4})
    expected = reasoning_gym.create_dataset("spell_backward", size=5, seed=3, min_word_len=3, max_word_len=4)
    assert len(source) == 5
    for i in range(5):
        assert source[i].text == expected[i]["question"]
        assert source[i].metadata["entry"] == expected[i]
        assert source[i].metadata["ground_truth"] == expected[i]["answer"]


@pytest.mark.parametrize(
    ("task", "kwargs", "parts"),
    [
        ("spell_backwards", {}, ["data.reasoning_gym.task", "'spell_backward'"]),
        ("spell_backward", {"max_len": 3}, ["data.reasoning_gym.kwargs", "max_len", "max_word_len"]),
        ("spell_backward", {"seed": 3}, ["data.reasoning_gym.kwargs", "seed"]),
        ("spell_backward", {"min_word_len": 5, "max_word_len": 3}, ["data.reasoning_gym.kwargs", "min_word_len"]),
    ],
    ids=["task", "unknown-setting", "own-key", "refused-value"],
)
def test_bad_reasoning_gym_settings_are_named(task: str, kwargs: dict, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        ReasoningGymSource(task, size=2, seed=0, kwargs=kwargs)
    for part in parts:
        assert part in str(caught.value)


ROWS = {"question": ["a", "b", "c"], "answer": ["1", "2", "3"]}


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    import datasets

    table = datasets.Dataset.from_dict(ROWS)
    table.to_parquet(str(tmp_path / "rows.parquet"))
    table.to_json(str(tmp_path / "rows.json"))
    table.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": table, "test": table.select([2])}).save_to_disk(str(tmp_path / "splits"))
    return tmp_path


@pytest.mark.parametrize("name", ["rows.parquet", "rows.json", "saved", "splits"])
def test_tables_load_from_local_paths(tables: Path, name: str) -> None:
    table = load_table(str(tables / name), setting="data.train_data_path", subset=None, split=None, usual=("train",))
    assert table["question"][:] == ROWS["question"]


def test_split_is_chosen_or_named_when_missing(tables: Path) -> None:
    path = str(tables / "splits")
    test = load_table(path, setting="data.val_data_path", subset=None, split=None, usual=("validation", "test"))
    assert test["question"][:] == ["c"]
    with pytest.raises(ConfigError, match=r"data\.val_data_path: .* has no split 'dev'; it has train, test"):
        load_table(path, setting="data.val_data_path", subset=None, split="dev", usual=())


def test_what_does_not_load_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text("x")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 is not enough")
    for path in (tmp_path / "rows.txt", tmp_path / "broken.parquet", "no-such-owner/no-such-data"):
        with pytest.raises(ConfigError, match=r"data\.train_data_path") as caught:
            load_table(str(path), setting="data.train_data_path", subset=None, split=None, usual=("train",))
        assert str(path) in str(caught.value)


def test_empty_cell_of_a_column_is_named_with_its_row() -> None:
    import datasets

    table = datasets.Dataset.from_dict({"question": ["a", None, "c"], "answer": ["1", "2", None]})
    with pytest.raises(ConfigError, match="hub/name, row 1: field 'question' is empty"):
        check_columns(table, origin="hub/name", keys=("question", "answer"))
    check_columns(table.select([0]), origin="hub/name", keys=("question", "answer", "not-there"))
