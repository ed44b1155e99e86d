from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from nemo_rl.data.tokenizer import load_tokenizer
from nemo_rl.errors import ConfigError
from nemo_rl.models.policy.config import TokenizerConfig

MESSAGES = [{"role": "user", "content": "hi"}]
OWN = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
INLINE = "{% for m in messages %}[{{ m['content'] }}|{{ style }}]{% endfor %}"


def render(tokenizer) -> str:
    return tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)


@pytest.fixture
def changed_dir(tiny_dir: Path, tmp_path: Path) -> Path:
    out = tmp_path / "tokenizer"
    out.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"):
        shutil.copy(tiny_dir / name, out / name)
    return out


def change(directory: Path, **values: object) -> None:
    path = directory / "tokenizer_config.json"
    content = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


@pytest.mark.parametrize(
    ("template", "kwargs", "expected"),
    [
        (None, None, OWN),
        ("default", None, OWN),
        ("passthrough", None, "hi"),
        (INLINE, {"style": "brief"}, "[hi|brief]"),
    ],
    ids=["null", "default", "passthrough", "inline-with-arguments"],
)
def test_chat_template_choices(tiny_dir: Path, template: str | None, kwargs: dict | None, expected: str) -> None:
    cfg = TokenizerConfig(name=str(tiny_dir), chat_template=template, chat_template_kwargs=kwargs)
    assert render(load_tokenizer(cfg)) == expected


def test_chat_template_from_a_file(tiny_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text("<{{ messages[0]['content'] }}>")
    assert render(load_tokenizer(TokenizerConfig(name=str(tiny_dir), chat_template=str(path)))) == "<hi>"


@pytest.mark.parametrize(
    ("template", "part"),
    [
        ("no/such/file.jinja", "no/such/file.jinja"),
        ("{% for m in messages %}", "fails"),
        ("{{ raise_exception('never') }}", "never"),
        ("{{ 'always this' }}", "always this"),
    ],
    ids=["missing-file", "syntax", "raises", "drops-content"],
)
def test_unusable_template_is_named(tiny_dir: Path, template: str, part: str) -> None:
    with pytest.raises(ConfigError, match=r"policy\.tokenizer\.chat_template: got") as caught:
        load_tokenizer(TokenizerConfig(name=str(tiny_dir), chat_template=template))
    assert part in str(caught.value)


def test_tokenizer_without_template_asks_for_one(changed_dir: Path) -> None:
    (changed_dir / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match=r"chat_template: got None; .* has no chat template"):
        load_tokenizer(TokenizerConfig(name=str(changed_dir)))


@pytest.mark.parametrize("name", ["no-such-owner/no-such-model", "/no/such/directory"])
def test_missing_tokenizer_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=r"policy\.tokenizer\.name: got") as caught:
        load_tokenizer(TokenizerConfig(name=name))
    assert name in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "{}", '{"version": "1.0", "model": {"type": "BPE"'], ids=["empty", "no-model", "cut"]
)
def test_damaged_tokenizer_file_is_named(changed_dir: Path, text: str) -> None:
    (changed_dir / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError, match=r"policy\.tokenizer\.name: got") as caught:
        load_tokenizer(TokenizerConfig(name=str(changed_dir)))
    assert str(changed_dir) in str(caught.value)


def test_padding_falls_back_to_end_of_sequence(changed_dir: Path) -> None:
    change(changed_dir, pad_token=None)
    tokenizer = load_tokenizer(TokenizerConfig(name=str(changed_dir)))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id


def test_tokenizer_without_end_of_sequence_is_refused(changed_dir: Path) -> None:
    change(changed_dir, eos_token=None)
    with pytest.raises(ConfigError, match="no end-of-sequence token"):
        load_tokenizer(TokenizerConfig(name=str(changed_dir)))
