"""What a person sees while a run is going on: a header, one line per step, a live bar, a final summary.

Everything takes the plain metric dictionaries that the logger gets. What was not measured (no draft, no refit) is left
out of the line. On a terminal a live bar stays below the lines; in a pipe or a file the same lines are plain text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from nemo_rl.utils.draft_agreement import evaluated, measured, trained
from nemo_rl.utils.run_summary import RunSummary, TimeSplit, time_split

PLAIN_WIDTH = 110
"""Columns when the output is not a terminal."""


class RunProgress:
    """Prints the course of one run; use as a context manager so that the live bar ends with it."""

    def __init__(
        self,
        *,
        total_steps: int,
        num_speculative_tokens: int | None = None,
        first_step: int = 0,
        console: Console | None = None,
    ) -> None:
        """Prepare the display; nothing is printed yet.

        Args:
            total_steps: Step at which the run ends at the latest.
            num_speculative_tokens: K, so that acceptance lengths are shown against K + 1; None = no draft.
            first_step: Steps already done when the run is resumed.
            console: Where to print; None = standard output.
        """
        console = console or Console(highlight=False)
        if not console.is_terminal:
            console.width = PLAIN_WIDTH
        self._console = console
        self._total = total_steps
        self._ceiling = None if num_speculative_tokens is None else num_speculative_tokens + 1
        self._done = first_step
        self._utf8 = (console.encoding or "").lower().replace("-", "") == "utf8"
        self._bar: Progress | None = None

    # ---------------------------------------------------------------- lifetime

    def start(self) -> None:
        """Show the live bar, on a terminal."""
        if self._bar is not None or not self._console.is_terminal:
            return
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=self._total, completed=self._done)
        self._bar.start()

    def close(self) -> None:
        """Remove the live bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __enter__(self) -> RunProgress:
        """Show the live bar."""
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Remove the live bar."""
        self.close()

    # ---------------------------------------------------------------- output

    def header(self, title: str, facts: Mapping[str, object]) -> None:
        """Print what is about to run.

        Args:
            title: For example the recipe's name.
            facts: Name -> value, e.g. model, draft, K, device, workers; None values are left out.
        """
        shown = {name: value for name, value in facts.items() if value is not None}
        self._console.print(self._panel(_pairs(shown.items()), title=title, style="cyan"))

    def status(self, text: str) -> None:
        """Say on the live bar what is happening now (``generating``, ``training``); silent elsewhere."""
        if self._bar is not None:
            self._bar.update(self._task, description=escape(text))

    def message(self, text: str) -> None:
        """Print one permanent line."""
        self._console.print(Text(text), soft_wrap=True)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the line of a finished step and advance the bar.

        Args:
            step: Number of finished steps.
            metrics: The step's metrics by their full names.
        """
        self._done = step
        line = self._fit(self._step_parts(step, metrics))
        self._console.print(line, soft_wrap=True)
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the line of a validation round.

        Args:
            step: Number of finished steps.
            metrics: Validation metrics, with or without ``validation/``.
        """
        plain = {name.removeprefix("validation/"): value for name, value in metrics.items()}
        parts = [Text(f"validation at step {step}", style="bold")]
        for name, label, form in (
            ("accuracy", "accuracy", ".3f"),
            ("mean_reward", "reward", ".3f"),
            ("mean_response_length", "length", ".1f"),
            ("num_samples", "samples", ".0f"),
        ):
            if name in plain:
                parts.append(_labelled(label, format(plain[name], form), style="magenta"))
        self._console.print(self._fit(parts), soft_wrap=True)

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the line of a measurement of the draft's acceptance.

        Args:
            step: Number of finished steps.
            metrics: Its metrics, without ``eval/``.
        """
        acceptance = evaluated({f"eval/{name}": value for name, value in metrics.items()})
        shown = acceptance.describe(ceiling=self._ceiling) if acceptance.is_known else "nothing was drafted"
        parts = [Text(f"evaluation at step {step}", style="bold"), _labelled("accept", shown, style="magenta")]
        if "num_prompts" in metrics:
            parts.append(_labelled("prompts", f"{metrics['num_prompts']:.0f}", style="magenta"))
        self._console.print(self._fit(parts), soft_wrap=True)

    def samples(self, step: int, samples: Sequence[tuple[str, str, float]]) -> None:
        """Print transcripts.

        Args:
            step: Number of finished steps.
            samples: ``(prompt, response, reward)``.
        """
        for number, (prompt, response, reward) in enumerate(samples, start=1):
            body = Group(Text(prompt, style="dim"), Rule(style="dim", characters=self._mark("─", "-")), Text(response))
            title = f"validation sample {number} at step {step}, reward {reward:.3g}"
            self._console.print(self._panel(body, title=title, style="magenta"))

    def summary(self, summary: RunSummary, *, report_path: str | None = None, draft_path: str | None = None) -> None:
        """Print what the run achieved.

        Args:
            summary: See `nemo_rl.utils.run_summary.summarize`.
            report_path: Where the report is; None = none was written.
            draft_path: Where the draft is; None = the run had none.
        """
        self.close()
        lines: list[tuple[str, object]] = list(summary.lines(arrow=self._mark("→", "->")))
        if draft_path is not None:
            lines.append(("draft", draft_path))
        if report_path is not None:
            lines.append(("report", report_path))
        self._console.print(self._panel(_pairs(lines), title="summary", style="green"))

    # ---------------------------------------------------------------- inside

    def _mark(self, symbol: str, plain: str) -> str:
        return symbol if self._utf8 else plain

    def _panel(self, body: RenderableType, *, title: str, style: str) -> Panel:
        return Panel(body, title=Text(title, style="bold"), title_align="left", border_style=style, padding=(0, 1))

    def _step_parts(self, step: int, metrics: Mapping[str, float]) -> list[Text]:
        width = len(str(self._total))
        parts = [Text(f"step {step:>{width}}/{self._total}", style="bold")]
        if "train/reward" in metrics:
            parts.append(_labelled("reward", f"{metrics['train/reward']:.3f}", style="green"))
        engine, trainer = measured(metrics), trained(metrics)
        if engine.is_known:
            parts.append(_labelled("accept", engine.describe(ceiling=self._ceiling), style="cyan"))
        if trainer.is_known:
            parts.append(_labelled("trainer", trainer.describe(), style="cyan"))
        if "performance/rollout_tokens_per_sec" in metrics:
            parts.append(Text.assemble((f"{metrics['performance/rollout_tokens_per_sec']:>5,.0f}", "cyan"), " tok/s"))
        split = time_split(metrics)
        if split is not None:
            parts.append(_split_text(split))
        if "train/draft_loss" in metrics:
            parts.append(_labelled("draft", f"{metrics['train/draft_loss']:.3f}", style="yellow"))
        if "refit/version" in metrics:
            parts.append(self._refit_text(metrics))
        if metrics.get("train/num_skipped_updates", 0):
            parts.append(Text("update skipped", style="bold red"))
        return parts

    def _refit_text(self, metrics: Mapping[str, float]) -> Text:
        verified = bool(metrics.get("refit/verified"))
        mark = self._mark("✓", "ok") if verified else self._mark("✗", "NOT VERIFIED")
        version = f"v{metrics['refit/version']:.0f} {mark}"
        return _labelled("refit", version, style="green" if verified else "bold red")

    def _fit(self, parts: Iterable[Text]) -> Text:
        """Join parts with two spaces; on a terminal that is too narrow, go on in an indented next line."""
        line, column = Text(), 0
        for part in parts:
            if column and self._console.is_terminal and column + 2 + part.cell_len > self._console.width:
                line.append("\n    ")
                column = 4
            elif column:
                line.append("  ")
                column += 2
            line.append_text(part)
            column += part.cell_len
        return line


def _labelled(label: str, value: str, *, style: str) -> Text:
    return Text.assemble((f"{label} ", "dim"), (value, style))


def _split_text(split: TimeSplit) -> Text:
    text = Text(f"{split.total:>4.1f}s ", style="dim")
    phases = (("gen", split.generation), ("train", split.training), ("refit", split.refit))
    for number, (label, seconds) in enumerate(phase for phase in phases if phase[1] > 0 or split.total <= 0):
        share = 100 * seconds / split.total if split.total > 0 else 0.0
        text.append(" " if number else "(", style="dim")
        text.append(f"{label} ", style="dim")
        text.append(f"{share:2.0f}%")
    return text.append(")", style="dim")


def _pairs(items: Iterable[tuple[str, object]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in items:
        table.add_row(Text(name), Text(str(value)))
    return table
