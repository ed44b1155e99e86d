"""Metric sinks of a run: JSONL always, TensorBoard by default, Weights & Biases and MLflow by a flag.

    <log_dir>/metrics.jsonl     one object per step: {"step": 3, "metrics": {"train/reward": 0.41, ...}}
    <log_dir>/config.yaml       the resolved configuration
    <log_dir>/tensorboard/      event files
    <log_dir>/previous_NNN/     what an earlier run, which was not resumed, left in the same directory

`read_metrics` is the one reader of the JSONL file; the report and the command-line checks use it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import math
import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import yaml

from nemo_rl.errors import ConfigError
from nemo_rl.utils.directories import make_output_dir
from nemo_rl.utils.system_monitor import SYSTEM_METRICS_FILE, SystemMonitor

if TYPE_CHECKING:
    from nemo_rl.algorithms.config import LoggerConfig

_log = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
CONFIG_FILE = "config.yaml"
TENSORBOARD_DIR = "tensorboard"
REPORT_DIR = "report"
_RUN_IDS_FILE = "tracking_ids.json"
_PACKAGES = {
    "tensorboard_enabled": "tensorboard",
    "wandb_enabled": "wandb",
    "mlflow_enabled": "mlflow",
    "monitor_gpus": "psutil",
    "report": "matplotlib",
}
"""Keys of the `logger` section -> the optional package behind each."""
_TENSORBOARD_ARGUMENTS = {
    "max_queue": "max_queue_size",
    "flush_secs": "flush_secs",
    "filename_suffix": "filename_suffix",
}
"""Keys of `logger.tensorboard` (SummaryWriter's names) -> what the event writer calls them."""
_OUTPUTS_OF_A_RUN = (METRICS_FILE, CONFIG_FILE, TENSORBOARD_DIR, REPORT_DIR, SYSTEM_METRICS_FILE, _RUN_IDS_FILE)

MetricTable = dict[str, dict[int, float]]
"""Metric name -> step -> value; a value that was not finite is NaN."""


class _Backend(Protocol):
    def log_metrics(self, metrics: dict[str, float], *, step: int) -> None: ...

    def log_hyperparams(self, params: dict[str, Any]) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class Logger:
    """Sends the metrics of a run to every enabled backend."""

    def __init__(
        self,
        cfg: LoggerConfig,
        *,
        run_config: Mapping[str, Any],
        resume_step: int | None = None,
    ) -> None:
        """Open the backends.

        Args:
            cfg: The ``logger`` section.
            run_config: The whole resolved configuration as plain data.
            resume_step: Last step of the checkpoint that the run continues from: what was logged for later steps is
                dropped, the run will log it again. None = a new run; files of an earlier one are moved aside.

        Raises:
            ConfigError: The directory cannot be written, or a backend's package is not installed.
        """
        self._log_dir = Path(cfg.log_dir)
        make_output_dir(self._log_dir, key="logger.log_dir")
        _require_packages(cfg)
        if resume_step is None:
            _move_earlier_run_aside(self._log_dir)

        self._jsonl = _JsonlBackend(self._log_dir, resume_step=resume_step)
        self._backends: list[_Backend] = [self._jsonl]
        self._monitor: SystemMonitor | None = None
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.close)
            self._open_backends(cfg, resume_step=resume_step)
            self.log_hyperparams(run_config)
            on_error.pop_all()
        if cfg.monitor_gpus:
            self._monitor = SystemMonitor(
                self._log_dir,
                collection_interval=cfg.gpu_monitoring.collection_interval,
                flush_interval=cfg.gpu_monitoring.flush_interval,
            )
            self._monitor.start()

    def _open_backends(self, cfg: LoggerConfig, *, resume_step: int | None) -> None:
        if cfg.tensorboard_enabled:
            directory = self._log_dir / TENSORBOARD_DIR
            self._backends.append(_TensorboardBackend(cfg.tensorboard, directory=directory, resume_step=resume_step))
        if cfg.wandb_enabled:
            self._backends.append(_WandbBackend(cfg.wandb, log_dir=self._log_dir))
        if cfg.mlflow_enabled:
            self._backends.append(_MlflowBackend(cfg.mlflow, log_dir=self._log_dir))

    @property
    def log_dir(self) -> Path:
        """Directory of the run's logs."""
        return self._log_dir

    @property
    def metrics_path(self) -> Path:
        """The JSONL file."""
        return self._jsonl.path

    def log_metrics(self, metrics: Mapping[str, float], step: int, prefix: str = "") -> None:
        """Record metrics of one step; several calls for one step add up to one row.

        Args:
            metrics: Plain ``int`` or ``float`` values. NaN and infinities are stored as null in the JSONL file.
            step: Step they belong to, >= 0.
            prefix: Put before each name with one slash between; ``train`` and ``train/`` mean the same.

        Raises:
            TypeError: A value of another type, naming the metric.
            ValueError: A step that is not a non-negative integer.
        """
        if type(step) is not int or step < 0:
            raise ValueError(f"step: got {step!r}; must be an integer >= 0")
        start = f"{prefix.rstrip('/')}/" if prefix else ""
        named = {start + name: value for name, value in metrics.items()}
        for name, value in named.items():
            # exact types: numpy.float64 is a float, numpy.bool_ and tensors are worse
            if type(value) not in (int, float):
                raise TypeError(
                    f"metric {name!r} at step {step}: got {type(value).__module__}.{type(value).__qualname__}; must be "
                    "a plain int or float. Convert it where it is computed (.item(), float(...))."
                )
        if self._monitor is not None and self._jsonl.current_step != step:
            named |= self._monitor.take_averages()
        for backend in self._backends:
            backend.log_metrics(named, step=step)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Record the configuration with every backend."""
        plain = dict(params)
        for backend in self._backends:
            backend.log_hyperparams(plain)

    def flush(self) -> None:
        """Put everything on disk, for example right before a checkpoint is finished."""
        for backend in self._backends:
            backend.flush()

    def close(self) -> None:
        """Stop the monitor, flush and close every backend; further calls do nothing."""
        if self._monitor is not None:
            self._monitor.stop()
            self._monitor = None
        for backend in self._backends:
            backend.close()
        self._backends = []

    def __enter__(self) -> Logger:
        """Return the logger itself."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Close the backends."""
        self.close()


def read_metrics(path: str | os.PathLike[str]) -> MetricTable:
    """Read a ``metrics.jsonl``.

    Args:
        path: The file. A torn last line, as a killed process can leave it, is ignored.

    Returns:
        Metric name -> step -> value, steps ascending; null becomes NaN.

    Raises:
        ValueError: A line other than the last is not a row of metrics.
    """
    table: MetricTable = {}
    for step, metrics in _read_rows(Path(path)):
        for name, value in metrics.items():
            table.setdefault(name, {})[step] = math.nan if value is None else float(value)
    return {name: dict(sorted(values.items())) for name, values in table.items()}


def _read_rows(path: Path) -> list[tuple[int, dict[str, float | None]]]:
    lines = path.read_bytes().splitlines(keepends=True)
    rows: list[tuple[int, dict[str, float | None]]] = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            rows.append((int(row["step"]), dict(row["metrics"])))
        except (ValueError, KeyError, TypeError) as err:
            if number == len(lines) and not line.endswith(b"\n"):
                break
            raise ValueError(f"{path}:{number}: not a row of metrics") from err
    return rows


def _require_packages(cfg: LoggerConfig) -> None:
    """Check every enabled backend before the first one is opened, so that nothing is left half open."""
    enabled = {
        "tensorboard_enabled": cfg.tensorboard_enabled,
        "wandb_enabled": cfg.wandb_enabled,
        "mlflow_enabled": cfg.mlflow_enabled,
        "monitor_gpus": cfg.monitor_gpus,
        "report": cfg.report,
    }
    for key, package in _PACKAGES.items():
        if enabled[key] and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"logger.{key}: got true, but the package {package!r} is not installed. "
                f"Install it (pip install {package}) or set logger.{key} to false."
            )


def _move_earlier_run_aside(log_dir: Path) -> None:
    """Keep what another run logged here, but out of the way of the new one."""
    found = [log_dir / name for name in _OUTPUTS_OF_A_RUN if (log_dir / name).exists()]
    if not found:
        return
    number = 1
    while (log_dir / f"previous_{number:03d}").exists():
        number += 1
    target = log_dir / f"previous_{number:03d}"
    target.mkdir()
    for path in found:
        path.rename(target / path.name)
    _log.warning("%s holds the logs of an earlier run; they were moved to %s", log_dir, target)


class _JsonlBackend:
    """One line per step. The line of the current step is rewritten in place when more metrics of that step arrive."""

    def __init__(self, log_dir: Path, *, resume_step: int | None) -> None:
        self.path = log_dir / METRICS_FILE
        self.current_step: int | None = None
        self._config_path = log_dir / CONFIG_FILE
        self._metrics: dict[str, float | None] = {}
        self._line_start = 0
        if resume_step is not None and self.path.exists():
            self._drop_rows_after(resume_step)
        # unbuffered: a row survives the death of this process as soon as log_metrics has returned
        self._file = open(self.path, "r+b" if self.path.exists() else "w+b", buffering=0)  # noqa: SIM115 (kept open)
        self._end = self._file.seek(0, os.SEEK_END)

    def _drop_rows_after(self, step: int) -> None:
        rows = [row for row in _read_rows(self.path) if row[0] <= step]
        replacement = self.path.with_name(self.path.name + ".tmp")
        with open(replacement, "wb") as file:
            file.writelines(_encode_row(row_step, metrics) for row_step, metrics in rows)
            file.flush()
            os.fsync(file.fileno())
        replacement.replace(self.path)

    def log_metrics(self, metrics: dict[str, float], *, step: int) -> None:
        if step != self.current_step:
            self.current_step, self._metrics, self._line_start = step, {}, self._end
        self._metrics.update({name: value if math.isfinite(value) else None for name, value in metrics.items()})
        line = _encode_row(step, self._metrics)
        self._file.seek(self._line_start)
        written = 0
        while written < len(line):  # an unbuffered write may be partial
            written += self._file.write(line[written:])
        self._end = self._line_start + len(line)
        self._file.truncate(self._end)

    def log_hyperparams(self, params: dict[str, Any]) -> None:
        self._config_path.write_text(yaml.safe_dump(params, sort_keys=False, allow_unicode=True), encoding="utf-8")

    def flush(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self.flush()
        self._file.close()


def _encode_row(step: int, metrics: Mapping[str, float | None]) -> bytes:
    return json.dumps({"step": step, "metrics": dict(metrics)}, allow_nan=False).encode() + b"\n"


class _TensorboardBackend:
    """Scalars through TensorBoard's own event writer, which unlike torch.utils.tensorboard needs no torch."""

    def __init__(self, cfg: Mapping[str, Any], *, directory: Path, resume_step: int | None) -> None:
        unknown = sorted(set(cfg) - _TENSORBOARD_ARGUMENTS.keys())
        if unknown:
            raise ConfigError(
                f"logger.tensorboard.{unknown[0]}: unknown key; must be one of "
                f"{', '.join(sorted(_TENSORBOARD_ARGUMENTS))}. Remove it; the files always go to logger.log_dir."
            )
        # heavy optional package: not loaded when the backend is off
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary, self._metadata = Event, Summary, SummaryMetadata
        self._tensor, self._tensor_shape = TensorProto, TensorShapeProto
        arguments = {_TENSORBOARD_ARGUMENTS[name]: value for name, value in cfg.items()}
        self._writer = EventFileWriter(str(directory), **arguments)
        if resume_step is not None:
            # TensorBoard hides earlier events from this step on when it meets the restart mark
            purge_step = resume_step + 1
            self._add(Event(step=purge_step, file_version="brain.Event:2"))
            self._add(Event(step=purge_step, session_log=SessionLog(status=SessionLog.START)))

    def _add(self, event: Any) -> None:
        event.wall_time = time.time()
        self._writer.add_event(event)

    def log_metrics(self, metrics: dict[str, float], *, step: int) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add(self._event(step=step, summary=self._summary(value=values)))

    def log_hyperparams(self, params: dict[str, Any]) -> None:
        text = "```yaml\n" + yaml.safe_dump(params, sort_keys=False, allow_unicode=True) + "```"
        metadata = self._metadata(plugin_data=self._metadata.PluginData(plugin_name="text"))
        shape = self._tensor_shape(dim=[self._tensor_shape.Dim(size=1)])
        tensor = self._tensor(dtype="DT_STRING", string_val=[text.encode()], tensor_shape=shape)
        value = self._summary.Value(tag="config", metadata=metadata, tensor=tensor)
        self._add(self._event(step=0, summary=self._summary(value=[value])))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _WandbBackend:
    """Weights & Biases. The run's id is kept beside the logs so that a resumed run goes on in the same one."""

    def __init__(self, cfg: Any, *, log_dir: Path) -> None:
        import wandb  # optional package

        ids = _read_run_ids(log_dir)
        run_id = ids.get("wandb") or uuid.uuid4().hex
        arguments = {"project": cfg.project, "name": cfg.name, "id": run_id, "resume": "allow", "dir": str(log_dir)}
        try:
            self._run = wandb.init(**arguments, settings={"silent": True})
        except wandb.errors.Error as err:
            raise ConfigError(
                f"logger.wandb_enabled: got true, but no W&B run could be opened ({err}). Log in (wandb login), set "
                "WANDB_MODE=offline, or set logger.wandb_enabled to false."
            ) from err
        _write_run_ids(log_dir, ids | {"wandb": run_id})
        # An own step axis: W&B's internal step cannot go back, which a resumed run must.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log_metrics(self, metrics: dict[str, float], *, step: int) -> None:
        self._run.log({**metrics, "step": step})

    def log_hyperparams(self, params: dict[str, Any]) -> None:
        self._run.config.update(params, allow_val_change=True)

    def flush(self) -> None:
        """Nothing to do: W&B's own process writes."""

    def close(self) -> None:
        self._run.finish()


class _MlflowBackend:
    """MLflow through its client object; the module-wide active run is left alone."""

    def __init__(self, cfg: Any, *, log_dir: Path) -> None:
        from mlflow.entities import Metric  # optional package
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        try:
            self._client = MlflowClient(tracking_uri=cfg.tracking_uri)
            self._run_id = self._open_run(cfg, log_dir=log_dir)
        except MlflowException as err:
            raise ConfigError(
                f"logger.mlflow.tracking_uri: got {cfg.tracking_uri!r}, but no MLflow run could be opened there "
                f"({err}). Name a server (http://...) or a database (sqlite:////path/mlflow.db, which needs the whole "
                "mlflow package), or set logger.mlflow_enabled to false."
            ) from err

    def _open_run(self, cfg: Any, *, log_dir: Path) -> str:
        ids = _read_run_ids(log_dir)
        if "mlflow" in ids:
            self._client.update_run(ids["mlflow"], status="RUNNING")
            return ids["mlflow"]
        experiment = self._client.get_experiment_by_name(cfg.experiment_name)
        if experiment is None:
            experiment_id = self._client.create_experiment(cfg.experiment_name)
        else:
            experiment_id = experiment.experiment_id
        run_id = str(self._client.create_run(experiment_id, run_name=cfg.run_name).info.run_id)
        _write_run_ids(log_dir, ids | {"mlflow": run_id})
        return run_id

    def log_metrics(self, metrics: dict[str, float], *, step: int) -> None:
        now_ms = int(time.time() * 1000)
        batch = [self._metric(name, float(value), now_ms, step) for name, value in metrics.items()]
        for start in range(0, len(batch), 1000):  # the server refuses more in one call
            self._client.log_batch(self._run_id, metrics=batch[start : start + 1000])

    def log_hyperparams(self, params: dict[str, Any]) -> None:
        # as an artifact: MLflow parameters are flat, short and can never change, a resumed run's may
        self._client.log_dict(self._run_id, params, CONFIG_FILE)

    def flush(self) -> None:
        """Nothing to do: every call is written at once."""

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def _read_run_ids(log_dir: Path) -> dict[str, str]:
    with contextlib.suppress(FileNotFoundError):
        return dict(json.loads((log_dir / _RUN_IDS_FILE).read_text(encoding="utf-8")))
    return {}


def _write_run_ids(log_dir: Path, ids: Mapping[str, str]) -> None:
    (log_dir / _RUN_IDS_FILE).write_text(json.dumps(dict(ids)), encoding="utf-8")
