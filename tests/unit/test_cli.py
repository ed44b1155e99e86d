"""What the command makes of errors: one message on stderr and the documented exit status."""

from __future__ import annotations

import pytest

from nemo_rl import cli
from nemo_rl.errors import CheckpointError, ConfigError, NemoRLError, WorkerError


def worker_error(cause: NemoRLError | None) -> WorkerError:
    error = WorkerError("worker group 'policy': rank 0 of 1 failed in setup: ...\nTraceback ...")
    error.__cause__ = cause
    return error


REFUSED = "policy.optimizer.name: got 'x.Y'; must be the dotted path of a class."


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        pytest.param(ConfigError(REFUSED), 2, f"error: {REFUSED}\n", id="refused-by-the-driver"),
        pytest.param(worker_error(ConfigError(REFUSED)), 2, f"error: {REFUSED}\n", id="refused-by-a-worker"),
        pytest.param(worker_error(CheckpointError("x")), 1, f"error: {worker_error(None)}\n", id="failed-in-a-worker"),
        pytest.param(worker_error(None), 1, f"error: {worker_error(None)}\n", id="worker-died"),
        pytest.param(KeyboardInterrupt(), 130, "interrupted\n", id="ctrl-c"),
    ],
)
def test_errors_end_with_a_message_and_an_exit_status(
    error: BaseException,
    status: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(cli, "_run", fail)
    assert cli.main(["--config", "run.yaml"]) == status
    assert capsys.readouterr().err == message
