"""Figures of the tiny recipes for the guides: run each to its end, keep what it measured, write tables and curves.

.venv/bin/python tools/recipe_figures.py measure        # runs the recipes one after the other, about 4 minutes each
.venv/bin/python tools/recipe_figures.py read           # the logs of runs that have been made already
.venv/bin/python tools/recipe_figures.py write          # pages and pictures from docs/data/tiny_recipes.json
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import matplotlib as mpl
from matplotlib.figure import Figure

from nemo_rl.models.automodel.draft.registry import DRAFT_ALGORITHMS
from nemo_rl.utils.config import build_master_config, load_config
from nemo_rl.utils.logger import read_metrics
from nemo_rl.utils.report_plots import BLUE, GREEN, ORANGE, PURPLE, VERMILION
from tools.draft_timing import svg

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "docs" / "data" / "tiny_recipes.json"
RECIPE = "examples/configs/recipes/llm/grpo-tiny-qwen3-1n0g-automodel-{}.yaml"
BEGIN, END = "<!-- figures: made by tools/recipe_figures.py -->", "<!-- end of figures -->"
CURVES = ROOT / "docs" / "figures" / "tiny_acceptance.svg"
STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E9ED",
    "lines.linewidth": 1.8,
    "legend.frameon": False,
    "figure.facecolor": "white",
}
LINES = (
    (BLUE, "-"),
    (ORANGE, "-"),
    (GREEN, "-"),
    (VERMILION, "--"),
    (PURPLE, "--"),
    ("#2B333D", "--"),
)
"""Okabe and Ito's colours, and a kind of line for either family."""
LAST = 3
"""Steps at the end that a figure averages over."""


def run(algo: str) -> None:
    """Run a recipe.

    Args:
        algo: draft algorithm.
    """
    subprocess.run([sys.executable, "examples/run_grpo.py", "--config", RECIPE.format(algo)], cwd=ROOT, check=True)


def read(algo: str) -> dict[str, Any]:
    """Summarise the last run of a recipe.

    Args:
        algo: draft algorithm.
    """
    cfg = build_master_config(load_config(ROOT / RECIPE.format(algo)))
    metrics = read_metrics(ROOT / cfg.logger.log_dir / "metrics.jsonl")
    return summarize(metrics, k=cfg.policy.generation.num_speculative_tokens or 0)


def summarize(metrics: Mapping[str, Mapping[int, float]], *, k: int) -> dict[str, Any]:
    """What the guides show of a run.

    Args:
        metrics: name to step to value.
        k: tokens proposed per step.
    """

    def values(name: str) -> list[float]:
        return list(metrics[name].values())

    def last(name: str) -> float:
        return statistics.fmean(values(name)[-LAST:])

    draft_seconds = statistics.median(values("timing/train/draft_s"))
    policy_seconds = statistics.median(values("timing/train/policy_fwd_bwd_s"))
    length, loss = "vllm/spec_acceptance_length", "train/draft_loss"
    return {
        "steps": len(metrics[loss]),
        "k": k,
        "acceptance": [round(value, 2) for value in values(length)],
        "acceptance_first": round(values(length)[0], 2),
        "acceptance_last": round(last(length), 2),
        "positions": [round(100 * last(f"vllm/spec_acceptance_rate_pos_{i}")) for i in range(k)],
        "draft_loss_first": round(values(loss)[0], 3),
        "draft_loss_last": round(last(loss), 3),
        "reward_last": round(last("train/reward"), 3),
        "speedup": round(last("performance/spec_speedup"), 2),
        "draft_to_policy_seconds": round(draft_seconds / policy_seconds, 2),
    }


def table(algo: str, figures: Mapping[str, Any]) -> str:
    """One guide's table in Markdown."""
    f = figures[algo]
    recipe = Path(RECIPE.format(algo)).name
    rows = [
        ("acceptance length", f"{f['acceptance_first']} at step 1, {f['acceptance_last']} of {f['k'] + 1} at the end"),
        ("accepted per position", " / ".join(f"{value} %" for value in f["positions"])),
        ("draft loss", f"{f['draft_loss_first']} at step 1, {f['draft_loss_last']} at the end"),
        ("rollouts, plain to speculative", f"{f['speedup']}x"),
        ("time of the draft's updates", f"{f['draft_to_policy_seconds']} of the policy's forward and backward"),
    ]
    lines = [f"`{recipe}`, {f['steps']} steps on two CPU cores:", "", "| figure | value |", "|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {value} |" for name, value in rows)])


def guide(algo: str) -> Path:
    """The guide of an algorithm."""
    return ROOT / "docs" / "guides" / "drafts" / f"{algo}.md"


def with_table(text: str, body: str) -> str:
    """A page with its figures replaced.

    Args:
        text: the page, with both markers.
        body: the table.
    """
    return re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", f"{BEGIN}\n{body}\n{END}", text, flags=re.DOTALL)


def curves(figures: Mapping[str, Any]) -> Figure:
    """Acceptance length over the steps, one line per algorithm.

    Args:
        figures: algorithm to what `summarize` gave.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 3.4), layout="constrained")
        axes = figure.subplots()
        for algo, (color, line) in zip(DRAFT_ALGORITHMS, LINES, strict=True):
            lengths = figures[algo]["acceptance"]
            axes.plot(range(1, len(lengths) + 1), lengths, color=color, linestyle=line, label=algo)
        most = max(f["k"] for f in figures.values()) + 1
        axes.axhline(most, color="#8A94A0", linewidth=0.8, linestyle=":")
        axes.set(xlabel="step", ylabel="tokens per verification", xlim=(1, None), ylim=(1, most + 0.1))
        axes.legend(loc="lower right", ncols=2)
    return figure


def curves_svg(figures: Mapping[str, Any]) -> str:
    """The curves as SVG."""
    title = "Tokens per verification over thirty steps of the six tiny recipes; all lines start at one and rise."
    return svg(curves(figures), name="tiny_acceptance", title=title)


def write(figures: Mapping[str, Any]) -> None:
    """Write the tables into the guides, and the curves.

    Args:
        figures: algorithm to what `summarize` gave.
    """
    for algo in DRAFT_ALGORITHMS:
        page = guide(algo)
        page.write_text(with_table(page.read_text(encoding="utf-8"), table(algo, figures)), encoding="utf-8")
    CURVES.write_text(curves_svg(figures), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["measure", "read", "write"])
    parser.add_argument("algorithms", nargs="*", help="default: all")
    options = parser.parse_args(arguments)
    algorithms = options.algorithms or list(DRAFT_ALGORITHMS)
    figures = json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else {}
    if options.command == "write":
        write(figures)
        return
    for algo in algorithms:
        if options.command == "measure":
            run(algo)
        figures[algo] = read(algo)
        DATA.write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
