"""Make the tiny warm-started policy that the CPU recipes train.

    python tools/make_tiny_policy.py --out results/tiny-policy

A finished directory with the same settings is used again; any change of the settings builds it anew.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import shutil
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from nemo_rl.data.tiny_policy import TinyPolicySettings, is_up_to_date, read_record
from nemo_rl.errors import ConfigError

DEFAULTS = TinyPolicySettings()
MAX_USEFUL_THREADS = 2
"""The matrices are too small for more."""
EVALUATION_PROMPTS = 128
FREE_BYTES = 64 << 20
"""Room that a policy and its replacement need on the disk."""


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line; a wrong type or an unknown flag exits with 2."""
    threads = min(MAX_USEFUL_THREADS, len(os.sched_getaffinity(0)))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, required=True, help="directory of the policy (the recipe's policy.model_name)"
    )
    parser.add_argument(
        "--hidden", type=int, default=DEFAULTS.hidden, help="residual width, a multiple of 64 (%(default)s)"
    )
    parser.add_argument("--layers", type=int, default=DEFAULTS.layers, help="decoder layers (%(default)s)")
    parser.add_argument("--steps", type=int, default=DEFAULTS.steps, help="training steps (%(default)s)")
    parser.add_argument("--cot", type=float, default=DEFAULTS.cot, help="share of worked demonstrations (%(default)s)")
    parser.add_argument("--lr", type=float, default=DEFAULTS.learning_rate, help="peak learning rate (%(default)s)")
    parser.add_argument("--seed", type=int, default=DEFAULTS.seed, help="of weights, data and draws (%(default)s)")
    parser.add_argument("--threads", type=int, default=threads, help="CPU threads (%(default)s)")
    return parser.parse_args(arguments)


def settings_of(options: argparse.Namespace) -> TinyPolicySettings:
    """Check the flags and turn them into settings.

    Raises:
        ConfigError: naming every flag that cannot be used.
    """
    checks = [
        (options.hidden > 0 and options.hidden % 64 == 0, f"--hidden: got {options.hidden}; must be a multiple of 64"),
        (options.layers >= 1, f"--layers: got {options.layers}; must be >= 1"),
        (options.steps >= 1, f"--steps: got {options.steps}; must be >= 1"),
        (0.0 <= options.cot <= 1.0, f"--cot: got {options.cot}; must be from 0 to 1"),
        (0.0 < options.lr < 1.0, f"--lr: got {options.lr}; must be between 0 and 1"),
        (options.threads >= 1, f"--threads: got {options.threads}; must be >= 1"),
    ]
    wrong = [message for passed, message in checks if not passed]
    if wrong:
        raise ConfigError("\n".join(wrong))
    return dataclasses.replace(
        DEFAULTS,
        hidden=options.hidden,
        layers=options.layers,
        steps=options.steps,
        cot=options.cot,
        learning_rate=options.lr,
        seed=options.seed,
    )


def check_target(directory: Path) -> None:
    """Make the parent directory and refuse to replace anything that is not a tiny policy.

    Raises:
        ConfigError: the directory holds other files, or cannot be written.
    """
    if directory.exists() and read_record(directory) is None and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(
            f"--out: got {directory}; must be absent, empty or an earlier tiny policy, and it holds something else. "
            "Name another directory or remove it yourself."
        )
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(directory.parent).free
    except OSError as err:
        raise ConfigError(
            f"--out: got {directory}; its parent cannot be created ({err}). Name a writable place."
        ) from err
    if not os.access(directory.parent, os.W_OK):
        raise ConfigError(f"--out: got {directory}; {directory.parent} is not writable. Name a writable place.")
    if free < FREE_BYTES:
        raise ConfigError(
            f"--out: got {directory}; {free >> 20} MiB are free, {FREE_BYTES >> 20} MiB are needed. Free some."
        )


def summary(directory: Path, record: dict) -> str:
    """Describe a finished policy in one line."""
    result = record["evaluation"]
    return (
        f"{directory}: {record['num_parameters']:,} parameters, reward {result['sampled_reward']:.2f} sampled / "
        f"{result['greedy_reward']:.2f} greedy, work shown in {result['worked_fraction']:.0%} of the samples "
        f"({record['seconds']:.0f} s)"
    )


def main(arguments: list[str] | None = None) -> int:
    """Build or re-use the policy.

    Args:
        arguments: command line without the program's name; None takes the process's.

    Returns:
        Exit status: 0, or 2 for flags that cannot be used.
    """
    options = parse_arguments(arguments)
    console = Console()
    try:
        settings = settings_of(options)
        record = read_record(options.out)
        if record is not None and is_up_to_date(options.out, settings):
            console.print(f"reusing {summary(options.out, record)}", soft_wrap=True)
            return 0
        check_target(options.out)
    except ConfigError as err:
        Console(stderr=True).print(f"error: {err}", style="red", markup=False, soft_wrap=True)
        return err.exit_code

    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is made here; nothing is looked up on the hub
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)  # they warn on import about kernels that a CPU does not have
    from transformers.utils import logging as transformers_logging

    from nemo_rl.data.tiny_training import build_tiny_policy  # torch: five seconds that a re-used policy does not pay

    transformers_logging.disable_progress_bar()  # of the one weights file, below our own

    columns = (
        TextColumn("warm start"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("train", total=settings.steps, loss=float("nan"))
        record = build_tiny_policy(
            options.out,
            settings,
            threads=options.threads,
            num_prompts=EVALUATION_PROMPTS,
            on_step=lambda step, loss: progress.update(task, completed=step, loss=loss),
        )
    console.print(f"made {summary(options.out, record)}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
