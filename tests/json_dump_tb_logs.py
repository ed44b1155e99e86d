"""Read the scalars of TensorBoard event files into JSON ``{metric: {step: value}}``.

    python tests/json_dump_tb_logs.py logs/tensorboard --output_path metrics.json

Directories are searched recursively. Event files of one directory are one run: steps that a resumed run has logged
again count once, with the later value.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text
from tensorboard.backend.event_processing import event_accumulator

EVENT_FILES = "*tfevents*"


class ConflictError(Exception):
    """Two runs hold different values of one metric at one step."""


def read_scalars(log_dir: Path, *, error_on_conflicts: bool = False) -> dict[str, dict[int, float]]:
    """Read every event file under a directory.

    Args:
        log_dir: Searched recursively.
        error_on_conflicts: Refuse different values of one metric and step in different directories; otherwise the
            directory that was written to last wins.

    Returns:
        Metric -> step -> value, both sorted.

    Raises:
        FileNotFoundError: No event file.
        ConflictError: See ``error_on_conflicts``.
    """
    newest: dict[Path, float] = {}
    for file in log_dir.rglob(EVENT_FILES):
        newest[file.parent] = max(newest.get(file.parent, 0.0), file.stat().st_mtime)
    if not newest:
        raise FileNotFoundError(f"no TensorBoard event file under {log_dir}")
    merged: dict[str, dict[int, float]] = {}
    for directory in sorted(newest, key=lambda path: (newest[path], path)):
        for name, values in _read_run(directory).items():
            known = merged.setdefault(name, {})
            for step, value in values.items():
                if error_on_conflicts and known.get(step, value) != value:
                    raise ConflictError(f"{name} at step {step}: {known[step]} and, in {directory}, {value}")
                known[step] = value
    return {name: dict(sorted(merged[name].items())) for name in sorted(merged)}


def _read_run(directory: Path) -> dict[str, dict[int, float]]:
    # size 0 = keep every event instead of a sample of them
    accumulator = event_accumulator.EventAccumulator(str(directory), size_guidance={event_accumulator.SCALARS: 0})
    accumulator.Reload()
    return {
        name: {event.step: event.value for event in accumulator.Scalars(name)} for name in accumulator.Tags()["scalars"]
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the command.

    Returns:
        0, or 1 when there is nothing to read or a conflict.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log_dir", type=Path, help="directory with event files")
    parser.add_argument("--output_path", type=Path, help="JSON file to write; without it only the overview is printed")
    parser.add_argument("--error-on-conflicts", action="store_true", help="fail when runs disagree about a value")
    options = parser.parse_args(arguments)
    try:
        metrics = read_scalars(options.log_dir, error_on_conflicts=options.error_on_conflicts)
    except (FileNotFoundError, ConflictError) as err:
        Console(stderr=True, highlight=False).print(Text(str(err), style="red"), soft_wrap=True)
        return 1
    table = Table(title=f"Scalars under {options.log_dir}", title_justify="left")
    for column in ("metric", "steps", "first", "last", "min", "max"):
        table.add_column(column, overflow="fold", justify="left" if column == "metric" else "right")
    for name, values in metrics.items():
        numbers = list(values.values())
        figures = (numbers[0], numbers[-1], min(numbers), max(numbers))
        table.add_row(Text(name), str(len(numbers)), *(f"{figure:.6g}" for figure in figures))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 160  # a log must show names whole
    console.print(table)
    if options.output_path is not None:
        options.output_path.write_text(json.dumps(metrics, indent=1), encoding="utf-8")
        console.print(Text(f"written to {options.output_path}"), soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
