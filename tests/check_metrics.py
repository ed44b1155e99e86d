"""Check the metrics of a run by expressions; exit status 1 when one of them does not hold.

    python tests/check_metrics.py logs/metrics.jsonl \
        'min(data["train/reward"]) > 0.1' \
        'mean(data["timing/train/total_step_time"], -6, -1) < 1' \
        'last(data["vllm/spec_acceptance_length"]) >= 3.0 and last(data["refit/verified"]) == 1'

The file is a run's ``metrics.jsonl``, or JSON ``{metric: {step: value}}`` as ``json_dump_tb_logs.py`` writes it.
``data`` holds the metrics. A value that is not a finite number fails every check that reads it.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import difflib
import json
import math
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nemo_rl.utils.logger import read_metrics

Series = Mapping[Any, float]
"""Step -> value; steps may be strings, as JSON has them."""


class CheckError(Exception):
    """A check that cannot be evaluated."""


class Outcome(NamedTuple):
    """Result of one check."""

    passed: bool
    value: str
    """Left sides of the comparisons."""
    message: str
    """Why it could not be evaluated; empty otherwise."""


# ---------------------------------------------------------------- functions of the expressions


def min(series: Series) -> float:
    """Smallest value."""
    return builtins.min(_values(series))


def max(series: Series) -> float:
    """Largest value."""
    return builtins.max(_values(series))


def mean(series: Series, range_start: int = 1, range_end: int = 0, ignore_top_p: float = 0.0) -> float:
    """Mean over a range of steps.

    Args:
        series: Step -> value.
        range_start: First step, counted from 1; a negative number counts back from one after the last step.
        range_end: Step after the last one; 0 = to the end, a negative number counts back from one after the last step.
        ignore_top_p: Share of the largest values to leave out, 0 to 1.
    """
    if not 0.0 <= ignore_top_p <= 1.0:
        raise CheckError(f"ignore_top_p must be between 0 and 1, got {ignore_top_p}")
    values = sorted(_range(series, range_start, range_end))
    return statistics.fmean(values[: builtins.max(1, int(len(values) * (1.0 - ignore_top_p)))])


def median(series: Series, range_start: int = 1, range_end: int = 0) -> float:
    """Median over a range of steps; the range is that of `mean`."""
    return statistics.median(_range(series, range_start, range_end))


def first(series: Series) -> float:
    """Value at the lowest step."""
    return _values(series)[0]


def last(series: Series) -> float:
    """Value at the highest step."""
    return _values(series)[-1]


def ratio_above(series: Series, threshold: float) -> float:
    """Share of values >= threshold."""
    values = _values(series)
    return sum(value >= threshold for value in values) / len(values)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function for function in (min, max, mean, median, first, last, ratio_above, abs, len)
}


def _by_step(series: Series) -> dict[int, float]:
    if not isinstance(series, Mapping) or not series:
        raise CheckError("expected a metric with at least one value")
    if not all(str(step).lstrip("-").isdigit() for step in series):
        raise CheckError("expected one metric, step -> value; got a table of others")
    values = {int(step): value for step, value in series.items()}
    for step, value in values.items():
        if value is None or not math.isfinite(value):
            raise CheckError(f"the value at step {step} is not a finite number")
    return dict(sorted(values.items()))


def _values(series: Series) -> list[float]:
    return list(_by_step(series).values())


def _range(series: Series, start: int, end: int) -> list[float]:
    values = _by_step(series)
    after_last = builtins.max(values) + 1
    start = start + after_last if start < 0 else start
    end = end + after_last if end <= 0 else end
    chosen = [value for step, value in values.items() if start <= step < end]
    if not chosen:
        raise CheckError(
            f"no value in steps {start} to {end - 1}; steps are {builtins.min(values)} to {after_last - 1}"
        )
    return chosen


# ---------------------------------------------------------------- evaluation


class _Metrics(dict[str, Any]):
    """Metrics by name; a name that is not there is an error that suggests others."""

    def __missing__(self, name: object) -> Any:
        near = difflib.get_close_matches(str(name), self, n=3)
        hint = f"; near it: {', '.join(near)}" if near else ""
        raise CheckError(f"no metric {name!r}{hint}")


_ALLOWED_NODES = (
    ast.Expression,
    ast.BoolOp,
    ast.And,
    ast.Or,
    ast.UnaryOp,
    ast.Not,
    ast.USub,
    ast.BinOp,
    ast.Add,
    ast.Sub,
    ast.Mult,
    ast.Div,
    ast.Compare,
    ast.Lt,
    ast.LtE,
    ast.Gt,
    ast.GtE,
    ast.Eq,
    ast.NotEq,
    ast.In,
    ast.NotIn,
    ast.Call,
    ast.keyword,
    ast.Subscript,
    ast.Name,
    ast.Load,
    ast.Constant,
)


def evaluate_check(data: Mapping[str, Any], check: str) -> Outcome:
    """Evaluate one expression.

    Args:
        data: Metrics by name.
        check: Comparisons of functions of ``data["..."]``; nothing but arithmetic, comparisons and `FUNCTIONS`.

    Returns:
        Not passed, with a message, when the expression cannot be evaluated or is not a comparison.
    """
    names = {"__builtins__": {}, "data": _Metrics(data), **FUNCTIONS}
    try:
        tree = ast.parse(check.strip(), mode="eval")
        _require_plain(tree)
        passed = eval(compile(tree, "<check>", "eval"), names)
        value = ", ".join(_show(left, names) for left in _left_sides(tree.body))
    except (CheckError, ArithmeticError, SyntaxError, TypeError, ValueError, KeyError) as err:
        return Outcome(False, "", f"{type(err).__name__}: {err}" if not isinstance(err, CheckError) else str(err))
    if not isinstance(passed, bool):
        return Outcome(False, str(passed), "not a comparison")
    return Outcome(passed, value, "")


def _require_plain(tree: ast.AST) -> None:
    for node in ast.walk(tree):
        if not isinstance(node, _ALLOWED_NODES):
            raise CheckError(f"{type(node).__name__} is not allowed in a check")
        if isinstance(node, ast.Name) and node.id != "data" and node.id not in FUNCTIONS:
            raise CheckError(f"unknown name {node.id!r}; known: data, {', '.join(FUNCTIONS)}")


def _left_sides(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BoolOp):
        return [side for value in node.values for side in _left_sides(value)]
    if isinstance(node, ast.UnaryOp):
        return _left_sides(node.operand)
    return [node.left] if isinstance(node, ast.Compare) else []


def _show(node: ast.expr, names: dict[str, Any]) -> str:
    value = eval(compile(ast.Expression(node), "<check>", "eval"), names)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def load(path: Path) -> dict[str, Any]:
    """Read ``metrics.jsonl`` or a JSON object of metrics."""
    if path.suffix == ".jsonl":
        return dict(read_metrics(path))
    data = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(data, dict):
        raise ValueError(f"{path}: not a JSON object")
    return data


def main(arguments: list[str] | None = None) -> int:
    """Run the command.

    Returns:
        0 when every check holds, 1 when one does not, 2 when the file cannot be read.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="metrics.jsonl or JSON")
    parser.add_argument("checks", nargs="+", help="expressions")
    options = parser.parse_args(arguments)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200  # a log must show expressions whole
    try:
        data = load(options.file)
    except (OSError, ValueError) as err:
        Console(stderr=True, highlight=False).print(Text(f"{options.file}: {err}", style="red"), soft_wrap=True)
        return 2

    table = Table(title=f"Checks of {options.file}", title_justify="left")
    for column in ("", "check", "value", "problem"):
        table.add_column(column, overflow="fold")
    outcomes = [evaluate_check(data, check) for check in options.checks]
    for check, outcome in zip(options.checks, outcomes, strict=True):
        status = Text("PASS", style="green") if outcome.passed else Text("FAIL", style="bold red")
        table.add_row(status, Text(check), Text(outcome.value), Text(outcome.message))
    console.print(table)
    return 0 if all(outcome.passed for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
