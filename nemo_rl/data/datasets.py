"""Prompts of a run: the configured questions, written with template and chat template, as token ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from nemo_rl.data.loader import PromptLoader
from nemo_rl.data.sources import (
    HOLD_OUT_FRACTION,
    HUB_DATASETS,
    HubDataset,
    QuestionSource,
    ReasoningGymSource,
    RecordSource,
    check_columns,
    load_table,
    read_jsonl,
    whole_text,
)
from nemo_rl.data.tokenizer import render_chat
from nemo_rl.errors import ConfigError

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

    from nemo_rl.data.config import DataConfig
    from nemo_rl.environments.config import EnvConfig

__all__ = ["PromptDataset", "PromptExample", "PromptLoader", "PromptWriter", "build_datasets", "build_sources"]

PLACEHOLDER_PROBE = "\N{SNOWMAN}"
"""Stands for a question when a template is checked."""


@dataclass(frozen=True)
class PromptExample:
    """One prompt.

    Attributes:
        index: place in the data set.
        prompt_ids: token ids, chat template and generation prompt included.
        prompt_text: the text of those ids.
        env_name: environment that scores responses.
        metadata: what that environment needs; always has `ground_truth`.
        too_long: more tokens than `data.max_input_seq_length`: to be dropped and counted.
    """

    index: int
    prompt_ids: list[int]
    prompt_text: str
    env_name: str
    metadata: dict[str, Any]
    too_long: bool


class PromptWriter:
    """Turns a question into a prompt."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, prompt_file: str | None, system_prompt_file: str | None
    ) -> None:
        """Read and check the templates.

        Args:
            tokenizer: with a chat template (`load_tokenizer`).
            prompt_file: text with `{}` where the question goes, other braces doubled; None = the question alone.
            system_prompt_file: text of the system message; None = no such message.

        Raises:
            ConfigError: a file cannot be read, or the template has no place for the question.
        """
        self._tokenizer = tokenizer
        self._template = None if prompt_file is None else _read_text(prompt_file, setting="data.prompt_file")
        system = (
            None if system_prompt_file is None else _read_text(system_prompt_file, setting="data.system_prompt_file")
        )
        self._head = [] if system is None else [{"role": "system", "content": system}]
        if self._template is None:
            return
        try:
            filled = self._template.format(PLACEHOLDER_PROBE)
        except (IndexError, KeyError, ValueError) as err:
            raise ConfigError(
                f"data.prompt_file: {prompt_file} cannot be filled in ({type(err).__name__}: {err}); must have "
                "'{}' for the question and every other brace doubled, as in \\boxed{{}}."
            ) from err
        if PLACEHOLDER_PROBE not in filled:
            raise ConfigError(f"data.prompt_file: {prompt_file} has no '{{}}'; the question would be lost. Add it.")

    def write(self, question: str) -> tuple[str, list[int]]:
        """Return the prompt's text and its token ids."""
        content = question if self._template is None else self._template.format(question)
        messages = [*self._head, {"role": "user", "content": content}]
        text = render_chat(self._tokenizer, messages)
        return text, self._tokenizer(text, add_special_tokens=False)["input_ids"]


class PromptDataset:
    """Prompts by index, written when asked for."""

    def __init__(self, source: QuestionSource, writer: PromptWriter, *, env_name: str, max_input_len: int) -> None:
        """Put a source and a writer together.

        Args:
            source: questions.
            writer: writes prompts.
            env_name: environment that scores responses.
            max_input_len: longest usable prompt, in tokens.
        """
        self._source = source
        self._writer = writer
        self._env_name = env_name
        self._max_input_len = max_input_len

    def __len__(self) -> int:
        """Number of prompts, too long ones included."""
        return len(self._source)

    def __getitem__(self, index: int) -> PromptExample:
        """Write prompt number `index`."""
        if not 0 <= index < len(self):
            raise IndexError(f"prompt {index} of {len(self)}")
        question = self._source[index]
        text, ids = self._writer.write(question.text)
        return PromptExample(index, ids, text, self._env_name, question.metadata, len(ids) > self._max_input_len)

    def __iter__(self) -> Iterator[PromptExample]:
        """Write the prompts in order."""
        return (self[index] for index in range(len(self)))


def build_datasets(
    data: DataConfig, env: EnvConfig, tokenizer: PreTrainedTokenizerBase, *, max_input_len: int, seed: int
) -> tuple[PromptDataset, PromptDataset | None]:
    """Build the training prompts and, where the configuration has them, the validation prompts.

    Args:
        data: `data`.
        env: `env`; its name decides who scores.
        tokenizer: from `load_tokenizer`.
        max_input_len: longest usable prompt, in tokens.
        seed: draws the part that is held out of a known data set without validation split.

    Returns:
        (training prompts, validation prompts or None).

    Raises:
        ConfigError: anything missing, empty or unreadable; names the key, the file and the row.
    """
    if env.name == "reasoning_gym" and data.dataset_name != "reasoning_gym":
        raise ConfigError(
            f"env.name: got 'reasoning_gym' with data.dataset_name {data.dataset_name!r}; this environment scores "
            "generated reasoning-gym questions only. Set data.dataset_name=reasoning_gym or env.name=math."
        )
    writer = PromptWriter(tokenizer, prompt_file=data.prompt_file, system_prompt_file=data.system_prompt_file)
    train, val = build_sources(data, seed=seed)

    def prompts(source: QuestionSource) -> PromptDataset:
        return PromptDataset(source, writer, env_name=env.name, max_input_len=max_input_len)

    return prompts(train), None if val is None else prompts(val)


@dataclass(frozen=True)
class _Fields:
    """Which fields of a record hold the question and the answer."""

    input_key: str
    output_key: str
    answer_of: Callable[[str], str | None]

    def source(self, table: datasets.Dataset, *, origin: str) -> RecordSource:
        check_columns(table, origin=origin, keys=(self.input_key, self.output_key))
        return RecordSource(
            table,
            origin=origin,
            input_key=self.input_key,
            output_key=self.output_key,
            row_numbers=None,
            answer_of=self.answer_of,
        )


def build_sources(data: DataConfig, *, seed: int) -> tuple[QuestionSource, QuestionSource | None]:
    """Build the questions behind the training and, where the configuration has them, the validation prompts.

    Args:
        data: `data`.
        seed: draws the part that is held out of a known data set without validation split.

    Returns:
        (training questions, validation questions or None).

    Raises:
        ConfigError: anything missing, empty or unreadable; names the key, the file and the row.
    """
    if data.dataset_name == "reasoning_gym":
        return _reasoning_gym_sources(data)
    if data.dataset_name == "ResponseDataset":
        return _file_sources(data, _Fields(data.input_key, data.output_key, whole_text))
    known = HUB_DATASETS.get(data.dataset_name)
    if known is None:
        names = ", ".join(["reasoning_gym", "ResponseDataset", *HUB_DATASETS])
        raise ConfigError(
            f"data.dataset_name: got {data.dataset_name!r}; must be one of {names}. For other data use "
            "ResponseDataset with data.train_data_path, data.input_key and data.output_key."
        )
    fields = _Fields(known.input_key, known.output_key, known.answer_of)
    if data.train_data_path is not None:
        return _file_sources(data, fields)  # a copy of the known data set
    return _hub_sources(data, known, fields, seed=seed)


def _reasoning_gym_sources(data: DataConfig) -> tuple[QuestionSource, QuestionSource | None]:
    task = data.reasoning_gym
    if task is None:
        raise ConfigError(
            "data.reasoning_gym: got null; data.dataset_name=reasoning_gym needs this section. Set at least "
            "data.reasoning_gym.task."
        )
    train = ReasoningGymSource(task.task, size=task.size, seed=task.seed, kwargs=task.kwargs)
    if task.val_size == 0:
        return train, None
    return train, ReasoningGymSource(task.task, size=task.val_size, seed=task.val_seed, kwargs=task.kwargs)


def _file_sources(data: DataConfig, fields: _Fields) -> tuple[QuestionSource, QuestionSource | None]:
    path = data.train_data_path
    if path is None:
        raise ConfigError(
            f"data.train_data_path: got null; data.dataset_name={data.dataset_name} needs a .jsonl file, a directory "
            "with data or a data set on the hub."
        )
    train = _file_source(path, fields, setting="data.train_data_path", split=data.train_split, usual=("train",))
    if data.val_data_path is not None:
        usual = ("validation", "test")
        val = _file_source(data.val_data_path, fields, setting="data.val_data_path", split=data.val_split, usual=usual)
        return train, val
    if data.val_split is not None:
        return train, _file_source(path, fields, setting="data.train_data_path", split=data.val_split, usual=())
    return train, None


def _file_source(path: str, fields: _Fields, *, setting: str, split: str | None, usual: Sequence[str]) -> RecordSource:
    local = Path(path).expanduser()
    if local.suffix != ".jsonl":
        return fields.source(load_table(path, setting=setting, subset=None, split=split, usual=usual), origin=path)
    if not local.is_file():
        raise ConfigError(f"{setting}: got {path!r}; there is no such file. Correct the path.")
    if split is not None:
        raise ConfigError(
            f"{setting}: got {path!r} with split {split!r}; a .jsonl file has no splits. Set data.train_split and "
            "data.val_split to null."
        )
    return read_jsonl(local, input_key=fields.input_key, output_key=fields.output_key, answer_of=fields.answer_of)


def _hub_sources(
    data: DataConfig, known: HubDataset, fields: _Fields, *, seed: int
) -> tuple[QuestionSource, QuestionSource | None]:
    setting = "data.dataset_name"
    split = data.train_split or known.train_split
    train = load_table(known.path, setting=setting, subset=known.subset, split=split, usual=())
    val_split = data.val_split or known.val_split
    if data.val_data_path is not None:
        usual = ("validation", "test")
        val = _file_source(data.val_data_path, fields, setting="data.val_data_path", split=data.val_split, usual=usual)
        return fields.source(train, origin=known.path), val
    if val_split is not None:
        val = load_table(known.path, setting=setting, subset=known.subset, split=val_split, usual=())
        return fields.source(train, origin=known.path), fields.source(val, origin=known.path)
    # A decorator of the library hides that the result is no single table.
    parts = cast("datasets.DatasetDict", train.train_test_split(test_size=HOLD_OUT_FRACTION, seed=seed))
    return (
        fields.source(parts["train"], origin=f"{known.path} (part kept for training)"),
        fields.source(parts["test"], origin=f"{known.path} (part held out)"),
    )


def _read_text(path: str, *, setting: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"{setting}: got {path!r}; must be a readable text file ({err}). Correct the path.") from err
