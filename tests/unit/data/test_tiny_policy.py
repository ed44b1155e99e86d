from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from nemo_rl.data.tiny_policy import (
    PHRASES,
    POLICY_FILES,
    RECORD_FILE,
    TinyPolicySettings,
    build_tiny_tokenizer,
    is_up_to_date,
    padded_vocab_size,
    read_record,
)
from tests.tiny_models import write_tiny_policy


@pytest.mark.parametrize("text", ["sun -> nus", "é ∑ 日本 \t\n \u2028", "".join(map(chr, range(1, 256))), " a  b "])
def test_any_text_survives_the_tokenizer(text: str) -> None:
    tokenizer = build_tiny_tokenizer()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert len(ids) == len(text.encode())


def test_phrases_are_single_tokens_and_not_special() -> None:
    tokenizer = build_tiny_tokenizer()
    for phrase in PHRASES:
        ids = tokenizer(phrase, add_special_tokens=False)["input_ids"]
        assert len(ids) == 1, phrase
        assert tokenizer.decode(ids, skip_special_tokens=True) == phrase


def test_vocabulary_size_leaves_room_for_padding_rows() -> None:
    tokenizer = build_tiny_tokenizer()
    assert len(tokenizer) == 256 + 3 + len(PHRASES)
    assert padded_vocab_size(tokenizer) == 320
    assert tokenizer.eos_token_id != tokenizer.pad_token_id


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
def test_written_policy_loads_completely(tmp_path: Path, tie: bool) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    shape = {"hidden": 32, "layers": 3, "heads": 4, "kv": 2, "head_dim": 16, "intermediate": 48}
    path = write_tiny_policy(tmp_path / "policy", tie=tie, **shape)
    model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], return_tensors="pt", return_dict=False)
    logits = model(ids).logits
    assert logits.shape == (1, ids.shape[1], 320)
    assert bool(torch.isfinite(logits).all())
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert float(parameter.detach().std()) > 0.1, name


def test_written_policy_depends_on_the_seed_only(tmp_path: Path) -> None:
    paths = [write_tiny_policy(tmp_path / str(i), layers=1, seed=seed) for i, seed in enumerate((0, 0, 1))]
    first, again, other = ((path / "model.safetensors").read_bytes() for path in paths)
    assert first == again
    assert first != other


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(TinyPolicySettings)])
def test_every_setting_changes_the_fingerprint(name: str) -> None:
    settings = TinyPolicySettings()
    changed = dataclasses.replace(settings, **{name: getattr(settings, name) * 2 + 1})
    assert changed.fingerprint() != settings.fingerprint()
    assert TinyPolicySettings().fingerprint() == settings.fingerprint()


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    for name in POLICY_FILES:
        (tmp_path / name).write_text("{}")
    (tmp_path / RECORD_FILE).write_text(json.dumps({"fingerprint": TinyPolicySettings().fingerprint()}))
    return tmp_path


def test_finished_policy_is_up_to_date_for_its_settings_only(finished: Path) -> None:
    assert is_up_to_date(finished, TinyPolicySettings())
    assert not is_up_to_date(finished, TinyPolicySettings(steps=401))


@pytest.mark.parametrize("name", [*POLICY_FILES, RECORD_FILE])
def test_policy_with_a_missing_file_is_not_up_to_date(finished: Path, name: str) -> None:
    (finished / name).unlink()
    assert not is_up_to_date(finished, TinyPolicySettings())


@pytest.mark.parametrize("text", ["", "{", "[]", "\udcff"], ids=["empty", "cut", "list", "binary"])
def test_unreadable_record_is_none(finished: Path, text: str) -> None:
    (finished / RECORD_FILE).write_bytes(text.encode(errors="surrogateescape"))
    assert read_record(finished) is None
