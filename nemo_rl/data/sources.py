"""Where questions come from: generated reasoning-gym tasks, local JSONL files, Hugging Face data sets.

A source answers `len()` and `source[i]` with a `Question`. Everything that can be wrong with a file is found when the
source is made, before anything heavy starts.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from nemo_rl.errors import ConfigError

if TYPE_CHECKING:
    import datasets

HOLD_OUT_FRACTION = 0.05
"""Share kept for validation of a known data set that has no validation split."""

BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}
"""File endings that the `datasets` library reads, and its names for them."""


@dataclass(frozen=True)
class Question:
    """A question before it is written as a prompt.

    Attributes:
        text: the question.
        metadata: what an environment needs to score an answer; always has `ground_truth` (text).
    """

    text: str
    metadata: dict[str, Any]


class QuestionSource(Protocol):
    """Questions by index."""

    def __len__(self) -> int:
        """Number of questions."""

    def __getitem__(self, index: int) -> Question:
        """Question number `index`."""


class Records(Protocol):
    """Rows by index: a list, or a Hugging Face data set."""

    def __len__(self) -> int:
        """Number of rows."""

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        """Row number `index`."""


class ReasoningGymSource:
    """Questions of one reasoning-gym task; the entry is kept, so that the task itself can score answers to it."""

    def __init__(self, task: str, *, size: int, seed: int, kwargs: Mapping[str, Any]) -> None:
        """Make the task's data set.

        Args:
            task: reasoning-gym's name.
            size: number of questions.
            seed: of the questions.
            kwargs: further settings of the task.

        Raises:
            ConfigError: unknown task, or settings that the task refuses.
        """
        self._task = task
        self._kwargs = dict(kwargs)
        self._dataset = create_task(task, size=size, seed=seed, kwargs=kwargs)

    def __len__(self) -> int:
        """Number of questions."""
        return len(self._dataset)

    def __getitem__(self, index: int) -> Question:
        """Generate question number `index`."""
        entry = self._dataset[index]
        answer = entry["answer"]
        metadata = {
            "ground_truth": answer if isinstance(answer, str) else str(answer),
            "task": self._task,
            "task_kwargs": self._kwargs,
            "entry": entry,
        }
        return Question(entry["question"], metadata)


def create_task(task: str, *, size: int, seed: int, kwargs: Mapping[str, Any]) -> Any:
    """Create a reasoning-gym data set.

    Raises:
        ConfigError: unknown task, or settings that the task refuses.
    """
    import reasoning_gym  # two seconds, and only runs on such tasks need it
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=3)
        hint = f"Did you mean {' or '.join(map(repr, near))}?" if near else f"Known: {', '.join(sorted(DATASETS))}."
        raise ConfigError(f"data.reasoning_gym.task: got {task!r}; must be a reasoning-gym task. {hint}")
    allowed = {f.name for f in dataclasses.fields(DATASETS[task][1]) if f.init} - {"size", "seed"}
    unknown = sorted(set(kwargs) - allowed)
    if unknown:
        raise ConfigError(
            f"data.reasoning_gym.kwargs: got {', '.join(unknown)}; {task} takes {', '.join(sorted(allowed)) or 'none'} "
            "(size and seed have keys of their own). Correct the names."
        )
    try:
        return reasoning_gym.create_dataset(task, size=size, seed=seed, **kwargs)
    except (AssertionError, TypeError, ValueError) as err:
        raise ConfigError(
            f"data.reasoning_gym.kwargs: got {dict(kwargs)!r}; {task} refuses it ({err}). Correct the values."
        ) from err


def whole_text(text: str) -> str:
    """Take a field's text as the final answer."""
    return text


class RecordSource:
    """Questions and answers out of records (rows of a file or of a Hugging Face data set)."""

    def __init__(
        self,
        records: Records,
        *,
        origin: str,
        input_key: str,
        output_key: str,
        row_numbers: Sequence[int] | None,
        answer_of: Callable[[str], str | None],
    ) -> None:
        """Wrap records.

        Args:
            records: rows.
            origin: file or data set, for messages.
            input_key: field of the question; dots go into nested fields (`prompt.0.content`).
            output_key: field of the expected answer, alike.
            row_numbers: number of each row in its origin, for messages; None = its index.
            answer_of: takes the final answer out of the field's text; None where there is none.

        Raises:
            ConfigError: there is no row, or the first lacks a field.
        """
        if len(records) == 0:
            raise ConfigError(f"data: {origin} holds no rows; at least one is needed. Give a file or split with data.")
        self._records = records
        self._origin = origin
        self._input_key = input_key
        self._output_key = output_key
        self._row_numbers = row_numbers
        self._answer_of = answer_of
        _ = self[0]

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._records)

    def __getitem__(self, index: int) -> Question:
        """Read row number `index`.

        Raises:
            ConfigError: a field is missing, empty or of the wrong type.
        """
        record = self._records[index]
        row = index if self._row_numbers is None else self._row_numbers[index]
        text = self._text(record, self._input_key, setting="data.input_key", row=row)
        answer = self._answer_of(self._text(record, self._output_key, setting="data.output_key", row=row))
        if answer is None:
            raise ConfigError(
                f"{self._origin}, row {row}: field {self._output_key!r} holds no final answer. Repair the row."
            )
        return Question(text, {"ground_truth": answer})

    def _text(self, record: Mapping[str, Any], key: str, *, setting: str, row: int) -> str:
        value = field_of(record, key)
        if value is MISSING:
            raise ConfigError(
                f"{self._origin}, row {row}: no field {key!r} ({setting}); the row has "
                f"{', '.join(map(repr, record)) or 'none'}. Set {setting} to one of them or repair the row."
            )
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return str(value)
        if not isinstance(value, str) or not value.strip():
            raise ConfigError(
                f"{self._origin}, row {row}: field {key!r} ({setting}) is {value!r}; must be non-empty text or a "
                "number. Repair or remove the row."
            )
        return value


class _Missing:
    """Type of `MISSING`; None is a value that a field can have."""


MISSING = _Missing()


def field_of(record: Any, key: str) -> Any:
    """Look a field up: by its whole name, else by the parts between dots.

    Returns:
        The value, or `MISSING`.
    """
    if isinstance(record, Mapping) and key in record:
        return record[key]
    value = record
    for part in key.split("."):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, (list, tuple)) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            return MISSING
    return value


def read_jsonl(path: Path, *, input_key: str, output_key: str, answer_of: Callable[[str], str | None]) -> RecordSource:
    """Read a JSONL file and check every row.

    Args:
        path: one JSON object per line; blank lines are skipped.
        input_key: field of the question.
        output_key: field of the expected answer.
        answer_of: takes the final answer out of that field.

    Returns:
        The rows as a source.

    Raises:
        ConfigError: the file cannot be read or is empty, or a row is no object or lacks a field; names file and row.
    """
    records, numbers = [], []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines: JSON text may hold U+2028
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"data: {path} cannot be read as UTF-8 text ({err}). Correct the path or the file.") from err
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as err:
            raise ConfigError(f"{path}, row {number}: is no JSON ({err}). Repair or remove the row.") from err
        if not isinstance(record, dict):
            raise ConfigError(
                f"{path}, row {number}: is a {type(record).__name__}; must be an object. Repair or remove it."
            )
        records.append(record)
        numbers.append(number)
    source = RecordSource(
        records,
        origin=str(path),
        input_key=input_key,
        output_key=output_key,
        row_numbers=numbers,
        answer_of=answer_of,
    )
    for index in range(len(source)):
        _ = source[index]
    return source


@dataclass(frozen=True)
class HubDataset:
    """A known Hugging Face data set: where it is and which fields matter."""

    path: str
    train_split: str
    input_key: str
    output_key: str
    subset: str | None = None
    val_split: str | None = None
    """None: a part of the training split is held out."""
    answer_of: Callable[[str], str | None] = whole_text


def after_hashes(text: str) -> str | None:
    """Take the final answer out of a GSM8K solution: what follows `####`."""
    _, mark, answer = text.rpartition("####")
    return answer.strip() or None if mark else None


HUB_DATASETS: dict[str, HubDataset] = {
    "OpenMathInstruct-2": HubDataset(
        "nvidia/OpenMathInstruct-2", train_split="train_1M", input_key="problem", output_key="expected_answer"
    ),
    "gsm8k": HubDataset(
        "openai/gsm8k",
        subset="main",
        train_split="train",
        val_split="test",
        input_key="question",
        output_key="answer",
        answer_of=after_hashes,
    ),
    "DAPOMath17K": HubDataset(
        "BytedTsinghua-SIA/DAPO-Math-17k",
        train_split="train",
        input_key="prompt.0.content",
        output_key="reward_model.ground_truth",
    ),
    "DAPOMathAIME2024": HubDataset(
        "BytedTsinghua-SIA/AIME-2024",
        train_split="train",
        input_key="prompt.0.content",
        output_key="reward_model.ground_truth",
    ),
}
"""Data sets that `data.dataset_name` knows by name."""


def load_table(
    path: str, *, setting: str, subset: str | None, split: str | None, usual: Sequence[str]
) -> datasets.Dataset:
    """Load one split with the `datasets` library.

    Args:
        path: file (.json, .parquet, .csv, .arrow), directory (saved by `save_to_disk`, or of data files) or hub name.
        setting: configuration key of the path, for messages.
        subset: configuration name on the hub.
        split: wanted split; None takes the first of `usual` that exists, or the only one.
        usual: names to try in that case.

    Returns:
        The split.

    Raises:
        ConfigError: nothing loads, or there is no such split.
    """
    # Imported here: it brings torch along where that is installed, and generated or JSONL data do not need it.
    import datasets
    import datasets.exceptions

    local = Path(path).expanduser()
    if local.is_file() and local.suffix not in BUILDERS:
        raise ConfigError(f"{setting}: got {path!r}; a file must end in {', '.join(BUILDERS)}. Convert it.")
    try:
        if local.is_file():
            loaded = datasets.load_dataset(BUILDERS[local.suffix], data_files=str(local))
        elif any((local / name).is_file() for name in ("state.json", "dataset_dict.json")):
            loaded = datasets.load_from_disk(str(local))
        elif local.is_dir():
            loaded = datasets.load_dataset(str(local))
        else:
            loaded = datasets.load_dataset(path, subset, split=split)  # a named split alone is much less to download
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as err:
        reason = str(err).splitlines()[0] if str(err) else type(err).__name__
        raise ConfigError(
            f"{setting}: got {path!r} (split {split!r}); must be a data file, a directory with data or a data set on "
            f"the hub, and it does not load ({reason}). Correct it, or download it first and give its path."
        ) from err
    if isinstance(loaded, datasets.Dataset):
        return loaded
    tables = {str(name): table for name, table in loaded.items()}
    only = next(iter(tables)) if len(tables) == 1 else None
    chosen = next((name for name in usual if name in tables), only) if split is None else split
    if chosen not in tables:
        raise ConfigError(
            f"{setting}: {path} has no split {chosen or ' or '.join(usual)!r}; it has {', '.join(tables)}. "
            "Set data.train_split or data.val_split."
        )
    return tables[chosen]


def check_columns(table: datasets.Dataset, *, origin: str, keys: Sequence[str]) -> None:
    """Look for empty cells in whole columns, which is quick even for millions of rows.

    Raises:
        ConfigError: a column has a null; names the row.
    """
    for key in keys:
        if key not in table.column_names:
            continue  # nested, or missing: the row reader says so
        if table.data.column(key).null_count == 0:
            continue
        row = next((i for i, cell in enumerate(table[key]) if cell is None), None)
        if row is not None:
            raise ConfigError(f"{origin}, row {row}: field {key!r} is empty. Remove the row or fill it in.")
