"""The plots of a run's report.

Imports matplotlib, though not pyplot with its global figures: import this module where plots are drawn.

Colours are Okabe and Ito's, and an ordered sub-range of cividis where the order of the lines matters (draft position,
depth): both are told apart with any colour vision and in grey.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from nemo_rl.utils.draft_agreement import evaluated, measured, trained
from nemo_rl.utils.logger import MetricTable
from nemo_rl.utils.run_summary import TimeSplit, finite, step_rows, time_split

BLUE, ORANGE, GREEN, VERMILION, PURPLE, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#6B7480"

_SIZE_INCHES = (7.2, 4.1)
_MANY_STEPS = 60
"""From this many points on, a line is drawn as faint raw values under a moving average, and bars become areas."""

_RC: dict[str, Any] = {
    "font.size": 10.5,
    "axes.titlesize": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#8A94A0",
    "axes.labelcolor": "#2B333D",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E9ED",
    "grid.linewidth": 0.8,
    "xtick.color": "#2B333D",
    "ytick.color": "#2B333D",
    "lines.linewidth": 2.0,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "figure.facecolor": "white",
}


class Plot(NamedTuple):
    """One figure of the report."""

    name: str
    """File stem."""
    title: str
    caption: str
    """What to look for; no markup."""
    figure: Figure


def draw_plots(metrics: MetricTable, *, num_speculative_tokens: int | None) -> Iterator[Plot]:
    """Draw every plot whose metrics were logged.

    Args:
        metrics: What `nemo_rl.utils.logger.read_metrics` returns.
        num_speculative_tokens: K, for the ceiling of the acceptance length; None = no draft.

    Yields:
        The plots in reading order.
    """
    draw: tuple[Callable[[], Plot | None], ...] = (
        lambda: _plot_reward(metrics),
        lambda: _plot_acceptance_length(metrics, num_speculative_tokens=num_speculative_tokens),
        lambda: _plot_acceptance_per_position(metrics),
        lambda: _plot_draft_loss(metrics),
        lambda: _plot_time_split(metrics),
        lambda: _plot_throughput(metrics),
    )
    for draw_one in draw:
        with mpl.rc_context(_RC):
            plot = draw_one()
        if plot is not None:
            yield plot


# ---------------------------------------------------------------- the plots


def _plot_reward(metrics: MetricTable) -> Plot | None:
    train, validation = finite(metrics, "train/reward"), finite(metrics, "validation/accuracy")
    validation_label = "validation, accuracy"
    if not validation:
        validation, validation_label = finite(metrics, "validation/mean_reward"), "validation, mean reward"
    if not train and not validation:
        return None
    figure, axes = _figure("reward")
    if train:
        _line(axes, train, color=BLUE, label="training rollouts, mean reward")
    if validation:
        axes.plot(*_xy(validation), color=VERMILION, marker="D", markersize=6, linestyle="--", label=validation_label)
    values = [*train.values(), *validation.values()]
    if min(values) >= 0.0 and max(values) <= 1.0:
        axes.set_ylim(-0.02, 1.05)
    _legend(axes, ncols=2)
    return Plot(
        "reward", "Reward", "Mean reward of the sampled responses of each step, and of held-out prompts.", figure
    )


def _plot_acceptance_length(metrics: MetricTable, *, num_speculative_tokens: int | None) -> Plot | None:
    engine, held_out = (finite(metrics, name) for name in ("vllm/spec_acceptance_length", "eval/acceptance_length"))
    if not engine and not held_out:
        return None
    trainer = {
        "replayed in training": (ORANGE, "-.", finite(metrics, "train/draft_replayed_acceptance_length")),
        "expected in training": (PURPLE, ":", finite(metrics, "train/draft_expected_acceptance_length")),
    }
    figure, axes = _figure("tokens per verification")
    drawn = [engine, held_out, *(values for _, _, values in trainer.values())]
    top = max(value for values in drawn for value in values.values())
    if num_speculative_tokens is not None:
        ceiling = num_speculative_tokens + 1
        top = max(top, float(ceiling))
        axes.axhline(ceiling, color=GREY, linestyle="--", linewidth=1.4, label=f"ceiling, K + 1 = {ceiling}")
    for label, (color, style, values) in trainer.items():
        if values:
            _line(axes, values, color=color, label=label, style=style)
    if engine:
        _line(axes, engine, color=BLUE, label="measured in rollouts")
    if held_out:
        axes.plot(*_xy(held_out), color=VERMILION, marker="D", markersize=6, linestyle="--", label="evaluation")
    axes.set_ylim(0.9, top + 0.06 * (top - 0.9))
    _legend(axes, ncols=2)
    return Plot(
        "acceptance_length",
        "Acceptance length",
        "Mean number of tokens that one verification by the policy emits: 1 + accepted / drafts. At 1 the draft is of "
        "no use. The training forward replays the same responses, or predicts from every place of them; a gap points "
        "to a misaligned or stale draft.",
        figure,
    )


def _plot_acceptance_per_position(metrics: MetricTable) -> Plot | None:
    # A run that samples nothing itself has measurements of the engine apart from its steps.
    sources = ((r"vllm/spec_acceptance_rate_pos_(\d+)", measured), (r"eval/acceptance_rate_pos_(\d+)", evaluated))
    by_step, engine_of = next(((f, of) for pattern, of in sources if (f := _indexed(metrics, pattern))), ({}, measured))
    if not by_step:
        return None
    both = {step: (engine_of(row).rates, trained(row).rates) for step, row in step_rows(metrics).items()}
    trainer = [{step: values[j] for step, (_, values) in both.items() if j < len(values)} for j in range(len(by_step))]
    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    over_steps, by_position = figure.subplots(1, 2, width_ratios=(3, 2), sharey=True)
    colors = _ordered_colors(len(by_step))
    for color, (position, values), expected in zip(colors, by_step.items(), trainer, strict=True):
        _line(over_steps, values, color=color, label=f"{position + 1}")
        if expected:
            _line(over_steps, expected, color=color, label="_trainer", style=":")  # the underscore: no legend entry
    over_steps.set(xlabel="step", ylabel="share of drafts accepted", ylim=(-0.02, 1.05))
    _set_step_axis(over_steps, num_ticks=6)
    _legend(
        over_steps,
        ncols=min(4, len(by_step)),
        title="draft position" + (" (dotted: trainer)" if any(trainer) else ""),
    )
    _draw_position_curves(by_position, both, num_positions=len(by_step))
    return Plot(
        "acceptance_per_position",
        "Acceptance by draft position",
        "Share of drafts whose tokens were all accepted up to this position; right, against the position. Solid: the "
        "engine; dotted: the training forward with the same draft. First position good and later ones near 0: wrong "
        "positions, mask slots or feedback. All low: wrong features, layer ids, head or norm.",
        figure,
    )


def _draw_position_curves(
    axes: Axes, both: Mapping[int, tuple[Sequence[float], Sequence[float]]], *, num_positions: int
) -> None:
    """Rates over positions at the first, the middle and the last step, and the trainer's at the last that has them.

    Args:
        axes: Where to draw.
        both: Step to rates of engine and trainer; the trainer may know fewer positions, or none.
        num_positions: Positions of the engine.
    """
    steps = [step for step, (engine, _) in both.items() if len(engine) == num_positions]
    if not steps:
        return
    with_trainer = [step for step in steps if both[step][1]]
    last = with_trainer[-1] if with_trainer else steps[-1]
    chosen = sorted({steps[0], steps[len(steps) // 2], last})
    for color, marker, step in zip(_ordered_colors(len(chosen)), "os^", chosen, strict=False):
        axes.plot(_positions(num_positions), both[step][0], color=color, marker=marker, markersize=6, label=f"{step}")
    expected = both[last][1][:num_positions]
    if expected:
        axes.plot(
            _positions(len(expected)),
            expected,
            color=VERMILION,
            linestyle=":",
            marker="x",
            markersize=8,
            label=f"{last}, trainer",
        )
    axes.set(xlabel="draft position", xticks=_positions(num_positions), xlim=(0.7, num_positions + 0.3))
    _legend(axes, ncols=2, title="at step")


def _positions(count: int) -> np.ndarray:
    return np.arange(1, count + 1)


def _plot_draft_loss(metrics: MetricTable) -> Plot | None:
    total = finite(metrics, "train/draft_loss")
    depths = _indexed(metrics, r"train/draft_loss_depth_(\d+)")
    if not total and not depths:
        return None
    figure, axes = _figure("loss per supervised position (nats)")
    for color, (depth, values) in zip(_ordered_colors(len(depths)), depths.items(), strict=True):
        _line(axes, values, color=color, label=f"depth {depth}")
    if not depths:  # beside single depths their weighted sum would only squeeze them together
        _line(axes, total, color=BLUE, label="all depths, weighted")
    if min(min(values.values()) for values in depths.values() or [total]) > 0.0:
        axes.set_ylim(bottom=0.0)
    _legend(axes, ncols=max(1, min(5, len(depths))))
    return Plot(
        "draft_loss",
        "Draft loss by depth",
        "What the draft is trained on, against the policy's distribution; the floor is the policy's own entropy. "
        "Depth: how many of its own outputs the draft has been fed; deeper is harder.",
        figure,
    )


def _plot_time_split(metrics: MetricTable) -> Plot | None:
    splits: dict[int, TimeSplit] = {}
    rows = step_rows(metrics)
    for step in metrics.get("timing/train/total_step_time", {}):
        split = time_split(rows[step])
        if split is not None:
            splits[step] = split
    if not splits:
        return None
    figure, axes = _figure("seconds per step")
    steps = np.array(list(splits))
    layers = (
        ("generation", BLUE, [split.generation for split in splits.values()]),
        ("training", ORANGE, [split.training for split in splits.values()]),
        ("refit", GREEN, [split.refit for split in splits.values()]),
        ("other", "#B8C0C9", [split.other for split in splits.values()]),
    )
    total = sum(split.total for split in splits.values())
    bottom = np.zeros(len(steps))
    for name, color, seconds in layers:
        height = np.array(seconds)
        label = f"{name} ({100 * height.sum() / total:.0f}%)"
        if len(steps) < _MANY_STEPS:
            axes.bar(steps, height, bottom=bottom, width=0.8, color=color, label=label)
        else:
            axes.fill_between(steps, bottom, bottom + height, color=color, label=label, linewidth=0)
        bottom += height
    axes.set_ylim(0.0, bottom.max() * 1.04)
    axes.set_xlim(steps[0] - 0.8, steps[-1] + 0.8)
    _legend(axes, ncols=4)
    return Plot(
        "time_split",
        "Where the time goes",
        "Training = log-probabilities and the update of policy and draft. Shares are of the whole run, without "
        "validation and checkpoints.",
        figure,
    )


def _plot_throughput(metrics: MetricTable) -> Plot | None:
    rollouts = finite(metrics, "performance/rollout_tokens_per_sec")
    overall = finite(metrics, "performance/tokens_per_sec")
    plain = finite(metrics, "performance/plain_tokens_per_sec")
    speculative = finite(metrics, "performance/spec_tokens_per_sec")
    if not rollouts and not overall:
        return None
    figure, axes = _figure("generated tokens per second")
    if rollouts:
        _line(axes, rollouts, color=BLUE, label="rollouts")
    if overall:
        _line(axes, overall, color=PURPLE, label="whole step")
    for values, color, label in ((plain, GREY, "probe, plain decoding"), (speculative, GREEN, "probe, speculative")):
        if len(values) == 1:
            (value,) = values.values()
            axes.axhline(value, color=color, linestyle="--", linewidth=1.6, label=f"{label}: {value:,.0f}")
        elif values:
            axes.plot(*_xy(values), color=color, linestyle="--", marker="s", label=label)
    axes.set_ylim(bottom=0.0)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    _legend(axes, ncols=2)
    return Plot(
        "tokens_per_second",
        "Generation speed",
        "Rollouts: while generating. Whole step: training and refit included. The probes decode one small batch with "
        "the final weights; compare them with each other, not with rollouts of another batch size.",
        figure,
    )


# ---------------------------------------------------------------- pieces


def _figure(ylabel: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel="step", ylabel=ylabel)
    _set_step_axis(axes, num_ticks=10)
    return figure, axes


def _set_step_axis(axes: Axes, *, num_ticks: int) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(nbins=num_ticks, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))


def _line(axes: Axes, values: dict[int, float], *, color: Any, label: str, style: str = "-") -> None:
    x, y = _xy(values)
    if len(x) < _MANY_STEPS:
        axes.plot(x, y, color=color, linestyle=style, marker="o", label=label)
        return
    axes.plot(x, y, color=color, linewidth=0.8, alpha=0.3)
    axes.plot(x, _moving_average(y, window=len(y) // 30), color=color, linestyle=style, label=label)


def _moving_average(y: np.ndarray, *, window: int) -> np.ndarray:
    """Mean over a centred window that is cut off at the ends of the data."""
    half = window // 2
    cumulative = np.concatenate([[0.0], np.cumsum(y)])
    index = np.arange(len(y))
    start, end = np.maximum(index - half, 0), np.minimum(index + half + 1, len(y))
    return (cumulative[end] - cumulative[start]) / (end - start)


def _xy(values: dict[int, float]) -> tuple[np.ndarray, np.ndarray]:
    return np.array(list(values), dtype=float), np.array(list(values.values()), dtype=float)


def _indexed(metrics: MetricTable, pattern: str) -> dict[int, dict[int, float]]:
    """Metrics whose whole name matches and that have finite values, by the index in the pattern's group, ascending."""
    found: dict[int, dict[int, float]] = {}
    for name in metrics:
        match = re.fullmatch(pattern, name)
        values = finite(metrics, name) if match else {}
        if match and values:
            found[int(match.group(1))] = values
    return dict(sorted(found.items()))


def _ordered_colors(count: int) -> list[Any]:
    return [mpl.colormaps["cividis"](x) for x in np.linspace(0.0, 0.85, max(count, 2))][:count]


def _legend(axes: Axes, *, ncols: int, title: str | None = None) -> None:
    """Put the legend above the axes, where it cannot hide a line."""
    axes.legend(
        ncols=ncols,
        title=title,
        loc="lower left",
        bbox_to_anchor=(-0.01, 1.0),
        borderaxespad=0.2,
        handlelength=2.2,
        columnspacing=1.4,
        alignment="left",
    )
