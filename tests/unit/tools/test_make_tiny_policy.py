from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.make_tiny_policy import main

ROOT = Path(__file__).resolve().parents[3]
QUICK = ["--layers", "1", "--steps", "3", "--threads", "1"]


def listing(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A policy and what was printed when it was made."""
    out = tmp_path_factory.mktemp("made") / "new" / "policy"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["--out", str(out), *QUICK]) == 0
    return out, printed.getvalue()


def test_command_makes_a_policy_that_loads_and_says_how_good_it_is(made: tuple[Path, str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out, printed = made
    record = json.loads((out / "tiny_policy.json").read_text())
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert sum(p.numel() for p in model.parameters()) == record["num_parameters"]
    assert AutoTokenizer.from_pretrained(out).chat_template
    assert record["settings"]["steps"] == 3
    assert record["evaluation"]["num_prompts"] == 128
    assert f"made {out}" in printed
    assert f"reward {record['evaluation']['sampled_reward']:.2f} sampled" in printed
    assert sorted(path.name for path in out.parent.iterdir()) == ["policy"]


def test_same_settings_reuse_the_policy(made: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = made
    before = listing(out)
    assert main(["--out", str(out), *QUICK]) == 0
    assert f"reusing {out}" in capsys.readouterr().out
    assert listing(out) == before


def test_command_reuses_without_importing_torch(made: tuple[Path, str]) -> None:
    command = [
        sys.executable,
        "-X",
        "importtime",
        str(ROOT / "tools" / "make_tiny_policy.py"),
        "--out",
        str(made[0]),
        *QUICK,
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0
    assert f"reusing {made[0]}" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "nemo_rl.data.tiny_policy" in imported
    assert "torch" not in imported


def test_other_settings_or_a_damaged_policy_build_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "policy"
    quick = ["--out", str(out), "--layers", "1", "--threads", "1"]
    assert main([*quick, "--steps", "1"]) == 0
    first = (out / "model.safetensors").read_bytes()
    assert main([*quick, "--steps", "2"]) == 0
    second = (out / "model.safetensors").read_bytes()
    assert second != first
    (out / "config.json").unlink()
    assert main([*quick, "--steps", "2"]) == 0
    assert (out / "config.json").is_file()
    assert (out / "model.safetensors").read_bytes() == second
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]
    assert "reusing" not in capsys.readouterr().out


def test_interrupted_build_leaves_the_old_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nemo_rl.data import tiny_training

    out = tmp_path / "policy"
    quick = ["--out", str(out), "--layers", "1", "--steps", "1", "--threads", "1"]
    assert main(quick) == 0
    before = listing(out)

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tiny_training.json, "dumps", interrupt)  # the last thing before the directory is replaced
    with pytest.raises(KeyboardInterrupt):
        main([*quick, "--seed", "1"])
    assert listing(out) == before
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]


@pytest.mark.parametrize(
    "content", [{"notes.txt": "mine"}, {"tiny_policy.json": "not json", "x": ""}], ids=["other", "cut"]
)
def test_directory_with_other_content_is_refused(
    tmp_path: Path, content: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in content.items():
        (tmp_path / name).write_text(text)
    assert main(["--out", str(tmp_path), *QUICK]) == 2
    assert "--out: got" in capsys.readouterr().err
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == content


def test_file_in_the_way_of_the_parent_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["--out", str(tmp_path / "file" / "policy"), *QUICK]) == 2
    assert "--out: got" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--hidden", "100"], "--hidden: got 100; must be a multiple of 64"),
        (["--layers", "0"], "--layers: got 0"),
        (["--steps", "0"], "--steps: got 0"),
        (["--cot", "1.5"], "--cot: got 1.5"),
        (["--lr", "0"], "--lr: got 0.0"),
        (["--threads", "0"], "--threads: got 0"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_unusable_flag_is_named(
    tmp_path: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--out", str(tmp_path / "policy"), *flags]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "policy").exists()


def test_all_unusable_flags_are_named_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path / "policy"), "--layers", "0", "--cot", "-1"]) == 2
    printed = capsys.readouterr().err
    assert "--layers" in printed
    assert "--cot" in printed
