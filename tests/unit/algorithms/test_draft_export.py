from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nemo_rl.algorithms.draft_export import export_final_draft
from nemo_rl.utils.config import build_master_config


class Policy:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def export_draft(self, directory: str, *, layout: str) -> None:
        self.calls.append((directory, layout))

    def offload_after_refit(self) -> None:
        self.calls.append("offload")


@pytest.mark.parametrize(
    ("draft", "expected"),
    [
        ({}, []),
        ({"enabled": True}, [("draft", "native")]),
        (
            {"enabled": True, "export_layouts": ["native", "speculators"]},
            [("draft", "native"), ("draft_speculators", "speculators")],
        ),
        # What the engine loads is written in any case.
        (
            {"enabled": True, "export_layouts": ["speculators"]},
            [("draft", "native"), ("draft_speculators", "speculators")],
        ),
    ],
    ids=["none", "native", "both", "other"],
)
def test_the_draft_of_a_finished_run_is_written_in_every_layout(
    tmp_path: Path, draft: dict[str, Any], expected: list[tuple[str, str]]
) -> None:
    policy = {"model_name": "x", "draft": draft | ({"serve": False} if draft else {})}
    cfg = build_master_config({"cluster": {"device": "cpu"}, "policy": policy})
    recorder = Policy()
    where = export_final_draft(recorder, cfg, log_dir=tmp_path)
    calls = [(str(tmp_path / name), layout) for name, layout in expected]
    assert recorder.calls == (calls and [*calls, "offload"])
    assert where == (tmp_path / "draft" if expected else None)
