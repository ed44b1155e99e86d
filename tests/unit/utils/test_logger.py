from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from nemo_rl.algorithms.config import LoggerConfig
from nemo_rl.errors import ConfigError
from nemo_rl.utils.logger import Logger, read_metrics

RUN_CONFIG = {"grpo": {"seed": 42}, "policy": {"model_name": "models/tiny"}, "betas": [0.9, 0.95]}

Opener = Callable[..., Logger]


@pytest.fixture
def open_logger(tmp_path: Path) -> Opener:
    def open_one(*, resume_step: int | None = None, **fields: Any) -> Logger:
        cfg = LoggerConfig(**{"log_dir": str(tmp_path / "logs"), "report": False, **fields})
        return Logger(cfg, run_config=RUN_CONFIG, resume_step=resume_step)

    return open_one


def rows(logger: Logger) -> list[dict[str, Any]]:
    return [json.loads(line) for line in logger.metrics_path.read_text().splitlines()]


def tensorboard_scalars(log_dir: Path) -> dict[str, dict[int, float]]:
    accumulator = EventAccumulator(str(log_dir / "tensorboard"))
    accumulator.Reload()
    return {tag: {e.step: e.value for e in accumulator.Scalars(tag)} for tag in accumulator.Tags()["scalars"]}


def test_one_row_per_step_holds_all_metrics_of_the_step(open_logger: Opener) -> None:
    with open_logger() as logger:
        logger.log_metrics({"reward": 0.5, "count": 3}, 1, prefix="train")
        logger.log_metrics({"generation": 1.25}, 1, prefix="timing/train/")
        logger.log_metrics({"refit/version": 1}, 1)
        logger.log_metrics({"reward": 0.75}, 2, prefix="train")
    assert rows(logger) == [
        {
            "step": 1,
            "metrics": {"train/reward": 0.5, "train/count": 3, "timing/train/generation": 1.25, "refit/version": 1},
        },
        {"step": 2, "metrics": {"train/reward": 0.75}},
    ]


def test_a_row_that_gets_shorter_leaves_no_rest(open_logger: Opener) -> None:
    with open_logger() as logger:
        logger.log_metrics({"a": 0.1234567890123456}, 1)
        logger.log_metrics({"a": 1}, 1)
        logger.log_metrics({"a": 2}, 2)
    assert rows(logger) == [{"step": 1, "metrics": {"a": 1}}, {"step": 2, "metrics": {"a": 2}}]


@pytest.mark.parametrize(
    ("value", "type_name"),
    [
        pytest.param(np.float64(0.5), "numpy.float64", id="numpy float64 is a float subclass"),
        pytest.param(np.int64(1), "numpy.int64", id="numpy int"),
        pytest.param(torch.tensor(0.5), "torch.Tensor", id="tensor"),
        pytest.param(True, "builtins.bool", id="bool"),
        pytest.param("0.5", "builtins.str", id="string"),
        pytest.param(None, "builtins.NoneType", id="none"),
        pytest.param([0.5], "builtins.list", id="list"),
    ],
)
def test_values_other_than_plain_numbers_are_refused_by_name(open_logger: Opener, value: Any, type_name: str) -> None:
    with open_logger() as logger:
        with pytest.raises(TypeError, match=rf"'train/draft_loss' at step 4: got {type_name};"):
            logger.log_metrics({"reward": 0.5, "draft_loss": value}, 4, prefix="train")
        assert rows(logger) == [], "a refused call must log nothing"


@pytest.mark.parametrize("step", [-1, 1.0, True])
def test_steps_other_than_natural_numbers_are_refused(open_logger: Opener, step: Any) -> None:
    with open_logger() as logger, pytest.raises(ValueError, match="step: got"):
        logger.log_metrics({"a": 1.0}, step)


def test_values_that_are_not_finite_are_null_and_read_as_nan(open_logger: Opener) -> None:
    with open_logger() as logger:
        logger.log_metrics({"nan": math.nan, "inf": math.inf, "fine": 1.0}, 1)
    assert rows(logger) == [{"step": 1, "metrics": {"nan": None, "inf": None, "fine": 1.0}}]
    table = read_metrics(logger.metrics_path)
    assert math.isnan(table["nan"][1])
    assert math.isnan(table["inf"][1])
    assert table["fine"] == {1: 1.0}
    assert math.isnan(tensorboard_scalars(logger.log_dir)["nan"][1])


def test_tensorboard_and_jsonl_hold_the_same_numbers(open_logger: Opener) -> None:
    with open_logger() as logger:
        for step in (1, 2, 3):
            logger.log_metrics({"reward": step / 8, "tokens": step}, step, prefix="train")
    assert tensorboard_scalars(logger.log_dir) == read_metrics(logger.metrics_path)


def test_tensorboard_can_be_switched_off_and_jsonl_stays(open_logger: Opener) -> None:
    with open_logger(tensorboard_enabled=False) as logger:
        logger.log_metrics({"a": 1}, 0)
    assert not (logger.log_dir / "tensorboard").exists()
    assert read_metrics(logger.metrics_path) == {"a": {0: 1.0}}


def test_the_configuration_is_stored_with_every_backend(open_logger: Opener) -> None:
    with open_logger() as logger:
        pass
    assert yaml.safe_load((logger.log_dir / "config.yaml").read_text()) == RUN_CONFIG
    accumulator = EventAccumulator(str(logger.log_dir / "tensorboard"))
    accumulator.Reload()
    (event,) = accumulator.Tensors("config")
    text = event.tensor_proto.string_val[0].decode()
    assert yaml.safe_load(text.removeprefix("```yaml\n").removesuffix("```")) == RUN_CONFIG


def test_resuming_drops_later_steps_from_jsonl_and_tensorboard(open_logger: Opener) -> None:
    with open_logger() as logger:
        for step in range(1, 6):
            logger.log_metrics({"a": float(step)}, step)
    with open_logger(resume_step=3) as logger:
        assert read_metrics(logger.metrics_path) == {"a": {1: 1.0, 2: 2.0, 3: 3.0}}
        logger.log_metrics({"a": 40.0}, 4)
    assert read_metrics(logger.metrics_path) == {"a": {1: 1.0, 2: 2.0, 3: 3.0, 4: 40.0}}
    assert tensorboard_scalars(logger.log_dir) == {"a": {1: 1.0, 2: 2.0, 3: 3.0, 4: 40.0}}


def test_resuming_keeps_null_and_drops_a_torn_last_line(open_logger: Opener) -> None:
    with open_logger() as logger:
        logger.log_metrics({"a": math.nan}, 1)
    with open(logger.metrics_path, "ab") as file:
        file.write(b'{"step": 2, "metr')
    with open_logger(resume_step=1) as logger:
        assert rows(logger) == [{"step": 1, "metrics": {"a": None}}]


def test_resuming_without_earlier_logs_starts_an_empty_file(open_logger: Opener) -> None:
    with open_logger(resume_step=7) as logger:
        logger.log_metrics({"a": 1.0}, 8)
    assert read_metrics(logger.metrics_path) == {"a": {8: 1.0}}


def test_a_damaged_line_before_the_last_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "metrics": {}}\n{"step": 2\n{"step": 3, "metrics": {}}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2"):
        read_metrics(path)


def test_a_new_run_moves_the_logs_of_an_earlier_one_aside(open_logger: Opener) -> None:
    for reward in (0.1, 0.2, 0.3):
        with open_logger() as logger:
            logger.log_metrics({"a": reward}, 1)
    log_dir = logger.log_dir
    assert read_metrics(log_dir / "metrics.jsonl") == {"a": {1: 0.3}}
    assert read_metrics(log_dir / "previous_001" / "metrics.jsonl") == {"a": {1: 0.1}}
    assert read_metrics(log_dir / "previous_002" / "metrics.jsonl") == {"a": {1: 0.2}}
    assert tensorboard_scalars(log_dir)["a"][1] == pytest.approx(0.3)
    assert (log_dir / "previous_001" / "tensorboard").is_dir()


def test_a_logged_row_survives_sigkill(open_logger: Opener, tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        logger = open_logger(tensorboard_enabled=False)
        logger.log_metrics({"a": 1.0}, 1)
        logger.log_metrics({"b": 2.0}, 1)
        os.kill(os.getpid(), signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert read_metrics(tmp_path / "logs" / "metrics.jsonl") == {"a": {1: 1.0}, "b": {1: 2.0}}


def test_unwritable_directory_is_a_config_error(tmp_path: Path, open_logger: Opener) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"logger\.log_dir: got .*/file/logs.*must be a directory"):
        open_logger(log_dir=str(tmp_path / "file" / "logs"))


@pytest.mark.parametrize(
    ("key", "package"),
    [
        ("wandb_enabled", "wandb"),
        ("mlflow_enabled", "mlflow"),
        ("tensorboard_enabled", "tensorboard"),
        ("monitor_gpus", "psutil"),
        ("report", "matplotlib"),
    ],
)
def test_missing_package_is_a_config_error_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, open_logger: Opener, tmp_path: Path, key: str, package: str
) -> None:
    with open_logger() as logger:
        logger.log_metrics({"a": 1.0}, 1)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"logger\.{key}: got true.*pip install {package}"):
        open_logger(**{key: True})
    assert read_metrics(tmp_path / "logs" / "metrics.jsonl") == {"a": {1: 1.0}}, "earlier logs must stay in place"


def test_unknown_tensorboard_argument_is_a_config_error(open_logger: Opener) -> None:
    with pytest.raises(ConfigError, match=r"logger\.tensorboard\.comment: unknown key; must be one of filename_suffix"):
        open_logger(tensorboard={"comment": "x"})
    with open_logger(tensorboard={"filename_suffix": ".mine"}) as logger:
        logger.log_metrics({"a": 1.0}, 1)
    assert list((logger.log_dir / "tensorboard").glob("*.mine"))


def test_closing_twice_is_fine_and_the_rows_are_there(open_logger: Opener) -> None:
    logger = open_logger()
    logger.log_metrics({"a": 1.0}, 1)
    logger.flush()
    logger.close()
    logger.close()
    assert read_metrics(logger.metrics_path) == {"a": {1: 1.0}}


def test_wandb_run_is_continued_offline(open_logger: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    with open_logger(wandb_enabled=True) as logger:
        logger.log_metrics({"a": 1.0}, 1)
    run_id = json.loads((logger.log_dir / "tracking_ids.json").read_text())["wandb"]
    with open_logger(wandb_enabled=True, resume_step=1) as logger:
        logger.log_metrics({"a": 2.0}, 2)
    assert len(list((logger.log_dir / "wandb").glob(f"offline-run-*-{run_id}"))) >= 1


def test_mlflow_run_is_continued(open_logger: Opener, tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy", reason="a local MLflow store is a database")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    settings = {"experiment_name": "e", "run_name": "r", "tracking_uri": uri}
    for resume_step, step in ((None, 1), (1, 2)):
        with open_logger(mlflow_enabled=True, mlflow=settings, resume_step=resume_step) as logger:
            logger.log_metrics({"train/reward": float(step)}, step)
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    history = client.get_metric_history(run.info.run_id, "train/reward")
    assert [(metric.step, metric.value) for metric in history] == [(1, 1.0), (2, 2.0)]
    assert run.info.status == "FINISHED"


def test_monitor_adds_load_of_the_machine_to_each_step(open_logger: Opener) -> None:
    monitoring = {"collection_interval": 0.02, "flush_interval": 0.02}
    with open_logger(monitor_gpus=True, gpu_monitoring=monitoring) as logger:
        monitor = logger._monitor
        while not monitor._since_step:
            time.sleep(0.01)
        logger.log_metrics({"a": 1.0}, 1)
    (row,) = rows(logger)
    assert 0.0 < row["metrics"]["system/memory_used_gib"] < 1e5
    assert 0.0 <= row["metrics"]["system/cpu_percent"] <= 100.0
    samples = [json.loads(line) for line in (logger.log_dir / "system_metrics.jsonl").read_text().splitlines()]
    assert samples
    assert samples[0]["metrics"].keys() >= {"system/cpu_percent", "system/memory_used_gib"}
    assert not monitor._thread.is_alive()
