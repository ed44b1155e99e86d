"""The commands that train: parse, load, check, run; exit codes as documented in `nemo_rl.errors`.

Installed as `nemo-rl-grpo` and `nemo-rl-draft`; `examples/run_grpo.py` and `examples/run_draft.py` are the same
commands with the exemplar as default configuration.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nemo_rl.errors import ConfigError, NemoRLError, WorkerError

if TYPE_CHECKING:
    from nemo_rl.algorithms.config import MasterConfig

EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143

_NO_TELEMETRY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
}


class Command(NamedTuple):
    """What a command runs."""

    name: str
    """As installed."""
    script: str
    """The script that is the same command."""
    description: str
    example: str
    """An override."""
    algorithm: str
    """What its checkpoints say they are."""
    setup: str
    """Module whose `run(cfg, checked)` does the work."""


GRPO = Command(
    name="nemo-rl-grpo",
    script="run_grpo.py",
    description="Train a policy with GRPO or DAPO, and a speculative-decoding draft beside it.",
    example="grpo.max_num_steps=10",
    algorithm="grpo",
    setup="nemo_rl.algorithms.grpo_setup",
)
DRAFT = Command(
    name="nemo-rl-draft",
    script="run_draft.py",
    description="Train a speculative-decoding draft for a policy that stays as it is.",
    example="draft_run.max_num_steps=10",
    algorithm="draft",
    setup="nemo_rl.algorithms.draft_run_setup",
)


def main(arguments: Sequence[str] | None = None, *, default_config: Path | None = None, command: Command = GRPO) -> int:
    """Run a command as the command line says.

    Args:
        arguments: Command line without the program's name; None takes the process's.
        default_config: Configuration when `--config` is not given; None = `--config` is required.
        command: What to run.

    Returns:
        Exit status: 0, 1 for a failure during the run, 2 for input that cannot be used, 130 after Ctrl-C.
    """
    options = _parse(arguments, default_config=default_config, command=command)
    return guarded(lambda: _run(command, options.config, options.overrides, options.dry_run))


def guarded(action: Callable[[], None]) -> int:
    """Do what a command is for, and turn the way it ends into an exit status.

    Args:
        action: Raises one of our errors when it fails.

    Returns:
        Exit status, see `main`.
    """
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S"
    )
    logging.getLogger("nemo_rl").setLevel(logging.INFO)
    for name, value in _NO_TELEMETRY.items():
        os.environ.setdefault(name, value)
    try:
        with _terminable():
            action()
    except NemoRLError as err:
        reported = _reported(err)
        sys.stderr.write(f"error: {reported}\n")
        return reported.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return EXIT_INTERRUPTED
    return 0


def entry_point() -> None:
    """Run the installed `nemo-rl-grpo` and leave the process with its exit status."""
    sys.exit(main())


def draft_entry_point() -> None:
    """Run the installed `nemo-rl-draft` and leave the process with its exit status."""
    sys.exit(main(command=DRAFT))


def _run(command: Command, config: Path, overrides: list[str], is_dry: bool) -> None:
    # Imported here: `--help` must not wait for the schema, nor a wrong configuration for torch and Ray.
    from nemo_rl.utils.config import load_config
    from nemo_rl.utils.preflight import preflight

    cfg = validated(load_config(config, overrides))
    if is_dry:
        from nemo_rl.utils.dry_run import dry_run, print_dry_run

        print_dry_run(dry_run(cfg, algorithm=command.algorithm))
        return
    checked = preflight(cfg, algorithm=command.algorithm)
    importlib.import_module(command.setup).run(cfg, checked)


def validated(tree: Mapping[str, Any]) -> MasterConfig:
    """Validate a configuration; one that names only local files keeps this process and its workers off the hub.

    Args:
        tree: As `load_config` gives it.

    Raises:
        ConfigError: One message that lists every problem.
    """
    from nemo_rl.utils.config import build_master_config
    from nemo_rl.utils.preflight_files import is_offline_run

    cfg = build_master_config(tree)
    if is_offline_run(cfg):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return cfg


def _reported(err: NemoRLError) -> NemoRLError:
    """A configuration that only a worker could refuse ends the command like one that was refused at once."""
    cause = err.__cause__
    return cause if isinstance(err, WorkerError) and isinstance(cause, ConfigError) else err


def _parse(arguments: Sequence[str] | None, *, default_config: Path | None, command: Command) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=command.script if default_config is not None else command.name,
        description=command.description,
        epilog=f"Example: %(prog)s --config recipe.yaml {command.example} ++policy.generation.vllm_kwargs.seed=1",
        allow_abbrev=False,
    )
    add_config_arguments(parser, default_config=default_config)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check the configuration as a start would, show layout, memory and draft, and start nothing",
    )
    return parser.parse_intermixed_args(arguments)


def add_config_arguments(parser: argparse.ArgumentParser, *, default_config: Path | None) -> None:
    """Let a command take a configuration, `--config` and overrides.

    Args:
        parser: Of the command.
        default_config: Configuration when `--config` is not given; None = `--config` is required.
    """
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
