from __future__ import annotations

import base64
import io
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

from nemo_rl.algorithms.config import LoggerConfig
from nemo_rl.utils.logger import Logger, MetricTable, read_metrics
from nemo_rl.utils.report import write_report
from nemo_rl.utils.report_plots import draw_plots
from nemo_rl.utils.run_summary import summarize

DRAFT_PLOTS = {"acceptance_length", "acceptance_per_position", "draft_loss"}
OTHER_PLOTS = {"reward", "time_split", "tokens_per_second"}
VOID_TAGS = {"meta", "img", "link", "br", "hr", "input"}


def step_metrics(step: int, *, with_draft: bool, num_tokens: int = 3) -> dict[str, float]:
    progress = 1.0 - math.exp(-step / 5)
    metrics = {
        "train/reward": 0.35 + 0.6 * progress,
        "performance/rollout_tokens_per_sec": 900.0 + 900.0 * progress,
        "performance/tokens_per_sec": 400.0 + 300.0 * progress,
        "timing/train/total_step_time": 8.0,
        "timing/train/generation": 4.0,
        "timing/train/policy_training": 3.0,
        "timing/train/refit": 0.3,
        "refit/verified": 1.0,
    }
    if step % 5 == 0:
        metrics["validation/accuracy"] = 0.3 + 0.6 * progress
    if with_draft:
        rates = [progress**position for position in range(1, num_tokens + 1)]
        metrics["vllm/spec_acceptance_length"] = 1.0 + sum(rates)
        metrics["train/draft_replayed_acceptance_length"] = 1.1 + sum(rates)
        for position, rate in enumerate(rates):
            metrics[f"vllm/spec_acceptance_rate_pos_{position}"] = rate
            metrics[f"train/draft_replayed_acceptance_{position + 1}"] = rate
            metrics[f"train/draft_loss_depth_{position + 1}"] = 5.0 - 4.0 * progress + position
        metrics["train/draft_loss"] = 9.0 - 7.0 * progress
    return metrics


def metric_table(steps: int, **kwargs: Any) -> MetricTable:
    table: MetricTable = {}
    for step in range(1, steps + 1):
        for name, value in step_metrics(step, **kwargs).items():
            table.setdefault(name, {})[step] = value
    return table


def write_run(log_dir: Path, *, steps: int, with_draft: bool) -> Path:
    config = {"policy": {"model_name": "<b>tiny & co</b>"}}
    with Logger(LoggerConfig(log_dir=str(log_dir), tensorboard_enabled=False), run_config=config) as logger:
        for step in range(1, steps + 1):
            logger.log_metrics(step_metrics(step, with_draft=with_draft), step)
    summary = summarize(read_metrics(logger.metrics_path), num_speculative_tokens=3 if with_draft else None)
    versions = {"torch": "2.13", "<script>": "1 & 2"}
    return write_report(log_dir, run_config=config, summary=summary, versions=versions, title="run <1> & more")


class Page(HTMLParser):
    """Collects what is on a page and fails on tags that are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open_tags: list[str] = []
        self.images: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open_tags

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        assert len(values) == len(attrs)
        if tag not in VOID_TAGS:
            self.open_tags.append(tag)
        if tag == "img":
            assert values["alt"]
            self.images.append(values["src"])
        if "href" in values:
            self.links.append(values["href"])
        if "id" in values:
            self.ids.append(values["id"])
        assert tag not in ("script", "b")

    def handle_endtag(self, tag: str) -> None:
        assert self.open_tags.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="module")
def draft_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("logs"), steps=12, with_draft=True)


def test_report_of_a_run_with_a_draft_is_whole(draft_report: Path) -> None:
    path = draft_report
    assert path.parts[-2:] == ("report", "report.html")
    source = path.read_text(encoding="utf-8")
    assert source.startswith("<!DOCTYPE html>")
    page = Page(source)
    assert set(page.ids) == DRAFT_PLOTS | OTHER_PLOTS
    assert {png.stem for png in path.parent.glob("*.png")} == DRAFT_PLOTS | OTHER_PLOTS
    for name, image in zip(page.ids, page.images, strict=True):
        data = base64.b64decode(image.removeprefix("data:image/png;base64,"))
        assert data == (path.parent / f"{name}.png").read_bytes()
        Image.open(io.BytesIO(data)).verify()
    text = " ".join(page.text)
    for piece in ("run <1> & more", "<b>tiny & co</b>", "<script>", "1 & 2", "model_name", "12/12", "of 4"):
        assert piece in text
    assert "../metrics.jsonl" in page.links
    for link in page.links:
        assert (path.parent / link).exists(), link


def test_report_needs_nothing_from_the_network(draft_report: Path) -> None:
    source = draft_report.read_text(encoding="utf-8")
    assert not re.search(r"https?://|url\(|@import|<script|<link", source)


def test_without_a_draft_its_plots_are_left_out_and_old_ones_removed(tmp_path: Path) -> None:
    log_dir = tmp_path / "logs"
    path = write_run(log_dir, steps=3, with_draft=False)
    for name in DRAFT_PLOTS:
        path.with_name(f"{name}.png").touch()
    write_report(log_dir, run_config={}, summary=summarize(read_metrics(log_dir / "metrics.jsonl")), versions={})
    assert {png.stem for png in path.parent.glob("*.png")} == OTHER_PLOTS
    assert set(Page(path.read_text(encoding="utf-8")).ids) == OTHER_PLOTS
    assert "acceptance" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "metrics",
    [
        pytest.param({}, id="nothing"),
        pytest.param({"train/reward": {1: math.nan}}, id="only nan"),
        pytest.param({"train/other": {1: 1.0}}, id="other metrics"),
    ],
)
def test_nothing_to_draw_draws_nothing(metrics: MetricTable) -> None:
    assert list(draw_plots(metrics, num_speculative_tokens=3)) == []


@pytest.mark.parametrize(
    ("steps", "num_tokens"), [(1, 1), (2, 7), (20, 3), (400, 7)], ids=["one step", "K=7", "demo", "long run"]
)
def test_no_text_is_cut_off_or_covered(steps: int, num_tokens: int) -> None:
    metrics = metric_table(steps, with_draft=True, num_tokens=num_tokens)
    metrics |= {"performance/plain_tokens_per_sec": {steps: 722.0}, "performance/spec_tokens_per_sec": {steps: 1180.0}}
    for plot in draw_plots(metrics, num_speculative_tokens=num_tokens):
        canvas = FigureCanvasAgg(plot.figure)
        canvas.draw()
        renderer = canvas.get_renderer()
        width, height = plot.figure.bbox.size
        for axes in plot.figure.axes:
            assert axes.get_xlabel()
            legend = axes.get_legend().get_window_extent(renderer)
            assert not legend.overlaps(axes.get_window_extent(renderer)), plot.name
            box = axes.get_tightbbox(renderer)
            assert box.x0 >= -1, plot.name
            assert box.y0 >= -1, plot.name
            assert box.x1 <= width + 1, plot.name
            assert box.y1 <= height + 1, plot.name
            assert axes.get_window_extent(renderer).width > 0.25 * width, plot.name
        assert plot.figure.axes[0].get_ylabel()


def test_acceptance_length_shows_measurement_expectation_and_ceiling() -> None:
    plots = {plot.name: plot for plot in draw_plots(metric_table(8, with_draft=True), num_speculative_tokens=3)}
    (axes,) = plots["acceptance_length"].figure.axes
    lines = {line.get_label(): line.get_ydata() for line in axes.get_lines()}
    assert set(np.asarray(lines["ceiling, K + 1 = 4"])) == {4}
    measured = [step_metrics(step, with_draft=True)["vllm/spec_acceptance_length"] for step in range(1, 9)]
    assert lines["measured in rollouts"].tolist() == measured
    assert len(lines["replayed in training"]) == 8


def test_position_curves_are_those_of_the_first_middle_and_last_step() -> None:
    plots = {plot.name: plot for plot in draw_plots(metric_table(9, with_draft=True), num_speculative_tokens=3)}
    _, axes = plots["acceptance_per_position"].figure.axes
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert set(lines) == {"1", "5", "9", "9, trainer"}
    for step in (1, 5, 9):
        expected = [step_metrics(step, with_draft=True)[f"vllm/spec_acceptance_rate_pos_{i}"] for i in range(3)]
        assert lines[str(step)].get_ydata().tolist() == expected
        assert lines[str(step)].get_xdata().tolist() == [1, 2, 3]


def test_trainer_curves_stand_beside_the_engines_at_every_position() -> None:
    plots = {plot.name: plot for plot in draw_plots(metric_table(9, with_draft=True), num_speculative_tokens=3)}
    over_steps, _ = plots["acceptance_per_position"].figure.axes
    dotted = [line for line in over_steps.get_lines() if line.get_linestyle() == ":"]
    assert len(dotted) == 3
    for position, line in enumerate(dotted, start=1):
        expected = [
            step_metrics(step, with_draft=True)[f"train/draft_replayed_acceptance_{position}"] for step in range(1, 10)
        ]
        assert line.get_ydata().tolist() == expected
    assert over_steps.get_legend().get_title().get_text() == "draft position (dotted: trainer)"
    assert [text.get_text() for text in over_steps.get_legend().get_texts()] == ["1", "2", "3"]


def without_replay(table: MetricTable, *, depths: int) -> MetricTable:
    """A draft whose training cannot follow the engine, but expects something for its first depths."""
    kept = {name: values for name, values in table.items() if "replayed" not in name}
    expected = {f"train/draft_prefix_greedy_{j}": {3: 0.5 / j, 6: 0.6 / j} for j in range(1, depths + 1)}
    if depths == 3:
        expected["train/draft_expected_acceptance_length"] = {3: 1.9, 6: 2.1}
    return kept | expected


@pytest.mark.parametrize("depths", [1, 3])
def test_without_a_replay_the_expectation_is_drawn_as_far_as_it_goes(depths: int) -> None:
    table = without_replay(metric_table(9, with_draft=True), depths=depths)
    plots = {plot.name: plot for plot in draw_plots(table, num_speculative_tokens=3)}
    _, by_position = plots["acceptance_per_position"].figure.axes
    lines = {line.get_label(): line for line in by_position.get_lines()}
    # The last step in which the draft was trained, so that both sides are of one draft.
    assert set(lines) == {"1", "5", "6", "6, trainer"}
    assert lines["6, trainer"].get_ydata().tolist() == [0.6 / j for j in range(1, depths + 1)]
    labels = {line.get_label() for line in plots["acceptance_length"].figure.axes[0].get_lines()}
    assert ("expected in training" in labels) == (depths == 3)
    assert "replayed in training" not in labels


def test_speculation_without_a_trained_draft_shows_the_engine_alone() -> None:
    table = {name: values for name, values in metric_table(5, with_draft=True).items() if "train/draft" not in name}
    plots = {plot.name: plot for plot in draw_plots(table, num_speculative_tokens=3)}
    assert "draft_loss" not in plots
    over_steps, by_position = plots["acceptance_per_position"].figure.axes
    assert over_steps.get_legend().get_title().get_text() == "draft position"
    assert {line.get_label() for line in by_position.get_lines()} == {"1", "3", "5"}


def test_a_run_that_samples_nothing_shows_its_evaluations() -> None:
    table = {name: values for name, values in metric_table(4, with_draft=True).items() if name.startswith("train/dr")}
    table |= {"eval/acceptance_length": {0: 1.0, 4: 2.5}}
    table |= {f"eval/acceptance_rate_pos_{i}": {0: 0.0, 4: 0.5 - 0.1 * i} for i in range(3)}
    plots = {plot.name: plot for plot in draw_plots(table, num_speculative_tokens=3)}
    assert set(plots) == DRAFT_PLOTS
    lines = {line.get_label(): line for line in plots["acceptance_length"].figure.axes[0].get_lines()}
    assert lines["evaluation"].get_ydata().tolist() == [1.0, 2.5]
    assert "measured in rollouts" not in lines
    _, by_position = plots["acceptance_per_position"].figure.axes
    curves = {line.get_label(): line.get_ydata().tolist() for line in by_position.get_lines()}
    assert curves["0"] == [0.0, 0.0, 0.0]
    assert curves["4"] == pytest.approx([0.5, 0.4, 0.3])


def test_time_split_bars_stack_up_to_the_step() -> None:
    plots = {plot.name: plot for plot in draw_plots(metric_table(4, with_draft=False), num_speculative_tokens=None)}
    (axes,) = plots["time_split"].figure.axes
    heights = [[bar.get_height() for bar in container] for container in axes.containers]
    assert np.array(heights).sum(axis=0) == pytest.approx([8.0] * 4)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "generation (50%)",
        "training (38%)",
        "refit (4%)",
        "other (9%)",
    ]


def test_long_lines_are_drawn_under_their_moving_average() -> None:
    metrics = {"train/reward": {step: float(step % 2) for step in range(300)}}
    (plot,) = draw_plots(metrics, num_speculative_tokens=None)
    raw, average = plot.figure.axes[0].get_lines()
    assert set(raw.get_ydata()) == {0.0, 1.0}
    assert np.abs(np.asarray(average.get_ydata()) - 0.5).max() < 0.1
