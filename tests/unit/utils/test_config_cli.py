"""tools/config_cli.py: expand, minimize, minimize-check, compare, validate."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from nemo_rl.utils.config import build_master_config, load_config, load_tree, to_dict
from tools import config_cli

BASE = """\
policy:
  model_name: some/model
  train_micro_batch_size: 2
  optimizer:
    name: torch.optim.AdamW
    kwargs: {lr: 0.001, betas: [0.9, 0.95]}
grpo:
  seed: 1
  reward_shaping:
    enabled: true
logger: {log_dir: logs}
"""

CHILD = """\
# About this file.
defaults: base.yaml
policy:
  # Stays: another value.
  train_micro_batch_size: 4
  optimizer:
    kwargs:
      lr: 0.002 # stays
      # Goes with the line it is about.
      betas: [0.9, 0.95]
grpo:
  reward_shaping:
    enabled: true
  seed: 1
logger:
  log_dir: logs
cluster:
  device: cpu
"""

MINIMAL_CHILD = """\
# About this file.
defaults: base.yaml
policy:
  # Stays: another value.
  train_micro_batch_size: 4
  optimizer:
    kwargs:
      lr: 0.002 # stays
cluster:
  device: cpu
"""


@pytest.fixture
def child(tmp_path: Path) -> Path:
    (tmp_path / "base.yaml").write_text(BASE, encoding="utf-8")
    file = tmp_path / "child.yaml"
    file.write_text(CHILD, encoding="utf-8")
    return file


def test_minimize_removes_what_the_parents_give_and_keeps_the_rest_as_written(
    child: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = load_tree(child)
    assert config_cli.main(["minimize", str(child)]) == 0
    assert capsys.readouterr().out == MINIMAL_CHILD
    assert child.read_text(encoding="utf-8") == CHILD
    assert config_cli.main(["minimize", "--in-place", str(child)]) == 0
    assert child.read_text(encoding="utf-8") == MINIMAL_CHILD
    assert load_tree(child) == before


def test_minimize_check_names_file_and_key(child: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert config_cli.main(["minimize-check", str(child)]) == 1
    err = capsys.readouterr().err
    # Of a wholly redundant section the section is named, of others the key.
    for key in ("policy.optimizer.kwargs.betas", "grpo", "logger"):
        assert f"{child}: {key}: " in err
    config_cli.main(["minimize", "--in-place", str(child)])
    assert config_cli.main(["minimize-check", str(child)]) == 0


def test_values_of_another_type_are_not_redundant(child: Path) -> None:
    child.write_text("defaults: base.yaml\ngrpo: {seed: 1.0}\n", encoding="utf-8")
    assert config_cli.redundant_keys(child) == {}


def test_replaced_mapping_is_not_redundant(child: Path) -> None:
    child.write_text("defaults: base.yaml\nlogger: {_override_: true, log_dir: logs}\n", encoding="utf-8")
    assert config_cli.redundant_keys(child) == {}


def test_file_without_parents_is_minimal(child: Path) -> None:
    assert config_cli.main(["minimize-check", str(child.parent / "base.yaml")]) == 0


def test_key_inside_a_flow_mapping_is_reported_not_cut(child: Path, capsys: pytest.CaptureFixture[str]) -> None:
    child.write_text("defaults: base.yaml\ngrpo: {seed: 1, val_period: 5}\n", encoding="utf-8")
    assert config_cli.main(["minimize", str(child)]) == 2
    assert "grpo.seed: is redundant inside {...}" in capsys.readouterr().err


def test_expand_prints_what_a_run_would_use(child: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert config_cli.main(["expand", str(child)]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed == to_dict(build_master_config(load_config(child)))
    assert printed["policy"]["generation"]["vllm_cfg"]["max_model_len"] == 512


def test_expand_without_resolving_keeps_interpolations(child: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert config_cli.main(["expand", "--no-resolve", str(child)]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["policy"]["generation"]["vllm_cfg"]["max_model_len"] == "${policy.max_total_sequence_length}"


def test_compare_lists_the_keys_that_differ(child: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert config_cli.main(["compare", str(child.parent / "base.yaml"), str(child)]) == 0
    assert (
        capsys.readouterr().out.splitlines()
        == [
            "policy.train_micro_batch_size: 2 -> 4",
            "policy.dynamic_batching.train_mb_tokens: 1024 -> 2048",
            "policy.optimizer.kwargs.lr: 0.001 -> 0.002",
            "policy.sequence_packing.train_mb_tokens: 1024 -> 2048",
            "cluster.device: 'auto' -> 'cpu'",
        ]
        or capsys.readouterr()
    )


def test_validate_names_file_and_key(child: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert config_cli.main(["validate", str(child)]) == 0
    child.write_text("defaults: base.yaml\ngrpo: {sed: 1}\n", encoding="utf-8")
    assert config_cli.main(["validate", str(child.parent / "base.yaml"), str(child)]) == 2
    assert f"{child}: grpo.sed: got an unknown key" in capsys.readouterr().err
