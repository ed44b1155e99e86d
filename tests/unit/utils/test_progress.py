from __future__ import annotations

import io

import pytest
from rich.console import Console

from nemo_rl.utils.progress import RunProgress
from nemo_rl.utils.run_summary import summarize

METRICS = {
    "train/reward": 0.4567,
    "vllm/spec_acceptance_length": 2.871,
    "vllm/spec_acceptance_rate_pos_0": 0.904,
    "vllm/spec_acceptance_rate_pos_1": 0.612,
    "vllm/spec_acceptance_rate_pos_2": 0.355,
    "train/draft_replayed_acceptance_length": 2.868,
    "train/draft_replayed_acceptance_1": 0.903,
    "train/draft_replayed_acceptance_2": 0.611,
    "train/draft_replayed_acceptance_3": 0.354,
    "performance/rollout_tokens_per_sec": 1234.5,
    "timing/train/total_step_time": 10.0,
    "timing/train/generation": 4.5,
    "timing/train/policy_training": 4.0,
    "timing/train/refit": 0.5,
    "train/draft_loss": 1.234,
    "refit/version": 7.0,
    "refit/verified": 1.0,
    "train/num_skipped_updates": 0.0,
}
LINE = (
    "step  7/20  reward 0.457  accept 2.87/4 (90/61/36%)  trainer 2.87 (90/61/35%)  1,234 tok/s  "
    "10.0s (gen 45% train 40% refit  5%)  draft 1.234  refit v7 ✓"
)


class Utf8Buffer(io.StringIO):
    encoding = "utf-8"


class AsciiBuffer(io.StringIO):
    encoding = "ascii"


def plain_output(buffer: io.StringIO | None = None) -> tuple[Console, io.StringIO]:
    buffer = buffer or Utf8Buffer()
    return Console(file=buffer, highlight=False), buffer


def test_step_line_when_piped_is_one_plain_line() -> None:
    console, buffer = plain_output()
    with RunProgress(total_steps=20, num_speculative_tokens=3, console=console) as progress:
        progress.step(7, METRICS)
    assert buffer.getvalue() == LINE + "\n"


def test_what_was_not_measured_is_left_out() -> None:
    console, buffer = plain_output()
    RunProgress(total_steps=5, console=console).step(1, {"train/reward": 0.5})
    assert buffer.getvalue() == "step 1/5  reward 0.500\n"


def test_a_draft_without_a_replay_and_with_one_depth_shows_what_it_knows() -> None:
    console, buffer = plain_output()
    metrics = {"vllm/spec_acceptance_length": 1.8, "vllm/spec_acceptance_rate_pos_0": 0.8}
    RunProgress(total_steps=5, console=console).step(1, metrics | {"train/draft_prefix_greedy_1": 0.79})
    assert buffer.getvalue() == "step 1/5  accept 1.80 (80%)  trainer (79%)\n"


def test_trouble_is_shown() -> None:
    console, buffer = plain_output()
    metrics = {"refit/version": 3.0, "refit/verified": 0.0, "train/num_skipped_updates": 1.0}
    RunProgress(total_steps=5, console=console).step(1, metrics)
    assert buffer.getvalue() == "step 1/5  refit v3 ✗  update skipped\n"


def test_output_that_is_not_utf8_gets_ascii_only() -> None:
    console, buffer = plain_output(AsciiBuffer())
    progress = RunProgress(total_steps=20, num_speculative_tokens=3, console=console)
    progress.header("recipe", {"model": "tiny"})
    progress.step(7, METRICS)
    progress.samples(7, [("question", "answer", 1.0)])
    progress.summary(summarize({"train/reward": {1: 0.1, 2: 0.2}}))
    assert buffer.getvalue().isascii()
    assert "refit v7 ok" in buffer.getvalue()
    assert "0.100 -> 0.150" in buffer.getvalue()


def test_narrow_terminal_breaks_between_parts() -> None:
    buffer = Utf8Buffer()
    console = Console(file=buffer, highlight=False, force_terminal=True, width=80, color_system=None)
    RunProgress(total_steps=20, num_speculative_tokens=3, console=console).step(7, METRICS)
    lines = buffer.getvalue().splitlines()
    assert len(lines) == 2
    assert all(len(line) <= 80 for line in lines)
    assert " ".join(buffer.getvalue().split()) == " ".join(LINE.split())


def test_live_bar_is_below_the_lines_of_a_terminal_and_goes_away() -> None:
    buffer = Utf8Buffer()
    console = Console(file=buffer, highlight=False, force_terminal=True, width=140)
    progress = RunProgress(total_steps=20, num_speculative_tokens=3, console=console)
    with progress:
        progress.status("generating [rollouts]")
        progress.step(7, METRICS)
        progress._bar.refresh()
        assert "7/20" in buffer.getvalue()
        assert "generating [rollouts]" in buffer.getvalue()
        assert progress._bar.tasks[0].completed == 7
    assert progress._bar is None


def test_no_bar_and_no_status_when_piped() -> None:
    console, buffer = plain_output()
    with RunProgress(total_steps=20, console=console) as progress:
        progress.status("generating")
    assert buffer.getvalue() == ""


def test_header_shows_the_facts_that_are_known() -> None:
    console, buffer = plain_output()
    RunProgress(total_steps=20, console=console).header("my [recipe]", {"model": "a [b] c", "draft": None, "K": 3})
    text = buffer.getvalue()
    assert "my [recipe]" in text
    assert "a [b] c" in text
    assert "draft" not in text


def test_validation_line_takes_names_with_or_without_prefix() -> None:
    for prefix in ("", "validation/"):
        console, buffer = plain_output()
        metrics = {f"{prefix}accuracy": 0.75, f"{prefix}mean_reward": 0.8, f"{prefix}num_samples": 128.0}
        RunProgress(total_steps=20, console=console).validation(10, metrics)
        assert buffer.getvalue() == "validation at step 10  accuracy 0.750  reward 0.800  samples 128\n"


def test_lines_of_a_run_that_trains_a_draft_alone() -> None:
    console, buffer = plain_output()
    progress = RunProgress(total_steps=5, num_speculative_tokens=3, console=console)
    rates = {"acceptance_length": 1.9, "acceptance_rate_pos_0": 0.5, "acceptance_rate_pos_1": 0.4, "num_prompts": 64.0}
    progress.evaluation(0, rates)
    progress.evaluation(1, {"num_prompts": 2.0})
    timing = {"timing/train/total_step_time": 2.0, "timing/train/draft_training": 1.5, "timing/train/reading": 0.5}
    progress.step(1, timing | {"train/draft_loss": 1.25})
    assert buffer.getvalue().splitlines() == [
        "evaluation at step 0  accept 1.90/4 (50/40%)  prompts 64",
        "evaluation at step 1  accept nothing was drafted  prompts 2",
        "step 1/5   2.0s (train 75%)  draft 1.250",
    ]


def test_samples_are_printed_literally() -> None:
    console, buffer = plain_output()
    RunProgress(total_steps=20, console=console).samples(10, [("2 [b]+[/b] 2?", "<answer>4</answer>", 1.0)])
    assert "2 [b]+[/b] 2?" in buffer.getvalue()
    assert "<answer>4</answer>" in buffer.getvalue()
    assert "reward 1" in buffer.getvalue()


@pytest.mark.parametrize("path", [None, "/logs/a very long path " + "x" * 120 + "/report.html"])
def test_summary_shows_every_figure_and_the_whole_paths(path: str | None) -> None:
    console, buffer = plain_output()
    metrics = {"train/reward": {1: 0.35, 2: 0.9}, "vllm/spec_acceptance_length": {1: 1.0, 2: 3.5}}
    summary = summarize(metrics, num_speculative_tokens=3, wall_seconds=90.0)
    RunProgress(total_steps=2, console=console).summary(
        summary, report_path=path, draft_path=None if path is None else "/logs/draft"
    )
    text = buffer.getvalue()
    for figure in ("0.350 → 0.625", "1.00 → 2.25 of 4", "0:01:30"):
        assert figure in text
    body = "".join(line.strip("│ \n") for line in text.splitlines())
    assert path is None or path.replace(" ", "") in body.replace(" ", "")
    assert ("/logs/draft" in body) is (path is not None)
