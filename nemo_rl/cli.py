"""The command that runs GRPO: parse, load, check, run; exit codes as documented in `nemo_rl.errors`.

Installed as `nemo-rl-grpo`; `examples/run_grpo.py` is the same command with the exemplar as default configuration.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from nemo_rl.errors import ConfigError, NemoRLError, WorkerError

EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143

_NO_TELEMETRY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
}


def main(arguments: Sequence[str] | None = None, *, default_config: Path | None = None) -> int:
    """Run GRPO as the command line says.

    Args:
        arguments: Command line without the program's name; None takes the process's.
        default_config: Configuration when `--config` is not given; None = `--config` is required.

    Returns:
        Exit status: 0, 1 for a failure during the run, 2 for input that cannot be used, 130 after Ctrl-C.
    """
    options = _parse(arguments, default_config=default_config)
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S"
    )
    logging.getLogger("nemo_rl").setLevel(logging.INFO)
    for name, value in _NO_TELEMETRY.items():
        os.environ.setdefault(name, value)
    try:
        with _terminable():
            _run(options.config, options.overrides)
    except NemoRLError as err:
        reported = _reported(err)
        sys.stderr.write(f"error: {reported}\n")
        return reported.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return EXIT_INTERRUPTED
    return 0


def entry_point() -> None:
    """Run the installed command and leave the process with its exit status."""
    sys.exit(main())


def _run(config: Path, overrides: list[str]) -> None:
    # Imported here: `--help` must not wait for the schema, nor a wrong configuration for torch and Ray.
    from nemo_rl.utils.config import build_master_config, load_config
    from nemo_rl.utils.preflight import preflight
    from nemo_rl.utils.preflight_files import is_offline_run

    cfg = build_master_config(load_config(config, overrides))
    if is_offline_run(cfg):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    checked = preflight(cfg)

    from nemo_rl.algorithms.grpo_setup import run

    run(cfg, checked)


def _reported(err: NemoRLError) -> NemoRLError:
    """A configuration that only a worker could refuse ends the command like one that was refused at once."""
    cause = err.__cause__
    return cause if isinstance(err, WorkerError) and isinstance(cause, ConfigError) else err


def _parse(arguments: Sequence[str] | None, *, default_config: Path | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="run_grpo.py" if default_config is not None else "nemo-rl-grpo",
        description="Train a policy with GRPO or DAPO, and a speculative-decoding draft beside it.",
        epilog="Example: %(prog)s --config recipe.yaml grpo.max_num_steps=10 ++policy.generation.vllm_kwargs.seed=1",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        type=Path,
        default=default_config,
        required=default_config is None,
        help="YAML configuration; its `defaults:` name the files it inherits from"
        + (" (default: %(default)s)" if default_config is not None else ""),
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="set a key; ++key=value adds one to a free-form block, ~key deletes one",
    )
    return parser.parse_intermixed_args(arguments)


@contextmanager
def _terminable() -> Generator[None]:
    """Let SIGTERM unwind the stack like Ctrl-C, so that workers are stopped; where signals can be set at all."""

    def leave(_signal: int, _frame: object) -> None:
        sys.exit(EXIT_TERMINATED)

    try:
        previous = signal.signal(signal.SIGTERM, leave)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
