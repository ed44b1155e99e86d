"""The command that evaluates a checkpoint: pass@k, tokens per second and acceptance, with speculation and without.

Installed as `nemo-rl-eval`; `examples/run_eval.py` is the same command with the exemplar as default configuration.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_rl import cli

if TYPE_CHECKING:
    from nemo_rl.algorithms.evaluation import Evaluation

LOG_WIDTH = 120


def main(arguments: Sequence[str] | None = None, *, default_config: Path | None = None) -> int:
    """Run the command.

    Args:
        arguments: Command line without the program's name; None takes the process's.
        default_config: Configuration when `--config` is not given; None = `--config` is required.

    Returns:
        Exit status, see `nemo_rl.cli.main`.
    """
    parser = argparse.ArgumentParser(
        prog="nemo-rl-eval" if default_config is None else "run_eval.py",
        description="Evaluate a policy on the validation prompts of a recipe, with its draft and without.",
        epilog="What counts of a recipe: policy.model_name (a Hugging Face directory, e.g. policy_hf of a checkpoint), "
        "policy.draft (served as it is), policy.generation, data, env, grpo.max_val_samples, grpo.val_*, cluster.",
        allow_abbrev=False,
    )
    cli.add_config_arguments(parser, default_config=default_config)
    parser.add_argument("--only", choices=("plain", "speculative"), help="evaluate one way of decoding (default: both)")
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    options = parser.parse_intermixed_args(arguments)
    return cli.guarded(lambda: _run(options))


def entry_point() -> None:
    """Run the installed `nemo-rl-eval` and leave the process with its exit status."""
    sys.exit(main())


def _run(options: argparse.Namespace) -> None:
    # Imported here: `--help` must not wait for the schema, nor a wrong configuration for torch and Ray.
    from nemo_rl.algorithms.evaluation_config import evaluation_tree, modes_of
    from nemo_rl.utils.config import load_config
    from nemo_rl.utils.preflight import preflight
    from nemo_rl.utils.preflight_files import check_writable

    cfg = cli.validated(evaluation_tree(load_config(options.config, options.overrides)))
    modes = modes_of(cfg, only=options.only)
    if options.output is not None:
        check_writable(options.output.absolute().parent, key="--output")
    checked = preflight(cfg)

    from nemo_rl.algorithms.evaluation import run_evaluation

    results = run_evaluation(cfg, checked, modes=modes, on_status=_say)
    if options.output is not None:
        content = {result.mode: result.metrics for result in results}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    _show(results)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _show(results: list[Evaluation]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = LOG_WIDTH
    for prompt, response, reward in results[0].samples:
        console.print(Text(f"{prompt}{response}\n(reward {reward:g})\n"))
    table = Table(title="Evaluation", title_justify="left")
    table.add_column("metric")
    for result in results:
        table.add_column(result.mode, justify="right")
    names = dict.fromkeys(name for result in results for name in result.metrics)
    for name in names:
        values = [result.metrics.get(name) for result in results]
        table.add_row(name, *("" if value is None else f"{value:,.4g}" for value in values))
    console.print(table)
    if len(results) == 2:
        plain, speculative = (result.metrics["tokens_per_sec"] for result in results)
        console.print(Text(f"speculation: {speculative / plain:.2f} times the tokens per second"))
