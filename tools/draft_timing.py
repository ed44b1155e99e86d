"""Draw the timing diagram of each draft algorithm: what happens between two verifications, and in a training step.

.venv/bin/python tools/draft_timing.py        # writes docs/figures/timing-<algo>.svg; a test compares them

What is drawn is in `tools/draft_slots.py`. Coordinates are points, y downwards. Nothing is placed by the extent of a
text, so that the viewer's font moves nothing.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle
from matplotlib.path import Path as Polyline

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nemo_rl.models.automodel.draft.registry import DRAFT_ALGORITHMS
from nemo_rl.utils.report_plots import BLUE, GREEN, ORANGE
from tools.draft_slots import LAST, WORDS, K, Slot, Timing, Words, timing

FIGURES = Path(__file__).resolve().parents[1] / "docs" / "figures"

INK, GREY, FAINT, WHITE = "#1F2933", "#5B6673", "#C5CCD4", "#FFFFFF"
BROWN = "#8A5A00"
"""A darker orange beside Okabe and Ito's colours. Kinds of boxes differ by label, shade or line as well."""
DASHED = (0, (2.5, 1.5))
STYLES: Mapping[str, tuple[str, str, Any]] = {
    "policy": ("#D9EAF6", BLUE, "-"),
    "draft": ("#FDF0D5", "#B87F00", "-"),
    "head": ("#D3EEE5", GREEN, "-"),
    "token": (WHITE, GREY, "-"),
    "placeholder": ("#ECEFF2", GREY, DASHED),
    "proposal": ("#F5BE4A", BROWN, "-"),
    "frame": ("#FAFBFC", FAINT, "-"),
    "ghost": ("none", FAINT, DASHED),
}
"""Face, edge and line of a kind of box."""
CELLS: Mapping[str, tuple[str, str, str]] = {
    "#": (ORANGE, BROWN, "trained"),
    "o": ("#FDF0D5", "#B87F00", "computed, not trained"),
    ".": (WHITE, "#98A3AE", "dropped"),
    "a": (WHITE, INK, "anchor"),
    "A": (ORANGE, INK, "anchor, trained"),
}
"""Face, edge and meaning of a slot in training."""

WIDTH, HEIGHT, LEFT, RIGHT = 520.0, 400.0, 60.0, 508.0
SLOT, SEEN, PLACE, CELL, GAP, CHIP = 30.0, 19.0, 20.0, 5.6, 10.0, 11.0
"""Widths of a slot's column, of one only seen, of a verified place, of a slot in training; between boxes; of a word's
height."""
FEATURE, TOKEN, LAYERS, OUTPUT, PROPOSAL = 54.0, 68.0, 82.0, 96.0, 111.0
PLACES, VERIFY, TEACHER, EMITTED = 143.0, 157.0, 171.0, 192.0
TRAINING, ENGINE, POLICY, DRAFT, LEGEND = 262.0, 289.0, 315.0, 337.0, 382.0
"""Rows from top to bottom: those of the draft and of the policy in serving, and those of the training panel."""


class _Canvas:
    """A white card, so that the picture reads the same on a dark page."""

    def __init__(self) -> None:
        self.figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72), facecolor="none")
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, WIDTH), ylim=(HEIGHT, 0))
        self.axes.axis("off")
        self._round(1, 1, WIDTH - 2, HEIGHT - 2, 8, (WHITE, FAINT, "-"))

    def _round(self, x: float, y: float, w: float, h: float, radius: float, style: tuple[str, str, Any]) -> None:
        face, edge, line = style
        shape = f"round,pad=0,rounding_size={radius}"
        self.axes.add_patch(FancyBboxPatch((x, y), w, h, shape, fc=face, ec=edge, ls=line, lw=0.8, clip_on=False))

    def text(self, x: float, y: float, text: str, *, size: float = 8, ha: str = "center", **style: Any) -> None:
        # Centred on y by the height of a capital, which hardly differs between fonts.
        style = {"color": INK, **style}
        self.axes.text(x, y + 0.36 * size, text, size=size, ha=ha, va="baseline", **style)

    def note(self, x: float, y: float, text: str, ha: str = "left") -> None:
        self.text(x, y, text, size=7.5, ha=ha, color=GREY)

    def box(self, x: float, y: float, w: float, h: float, kind: str, text: str = "") -> None:
        self._round(x, y, w, h, 2, STYLES[kind])
        lines = text.split("\n")
        for i, line in enumerate(lines):
            self.text(x + w / 2, y + h / 2 + (i - (len(lines) - 1) / 2) * 9, line)

    def chip(self, center: float, y: float, text: str, kind: str, *, w: float = 18) -> None:
        if text:
            self.box(center - w / 2, y - CHIP / 2, w, CHIP, kind, text)

    def cell(self, x: float, y: float, symbol: str) -> None:
        face, edge, _ = CELLS[symbol]
        width = 1.2 if edge == INK else 0.6
        side = CELL - 1.4
        self.axes.add_patch(Rectangle((x, y - side / 2), side, side, fc=face, ec=edge, lw=width, clip_on=False))

    def arrow(self, *points: tuple[float, float]) -> None:
        tip = "-|>,head_length=3.2,head_width=1.6"
        look: dict[str, Any] = {"color": GREY, "lw": 0.8, "mutation_scale": 1, "shrinkA": 0, "shrinkB": 0}
        self.axes.add_patch(FancyArrowPatch(path=Polyline(points), arrowstyle=tip, clip_on=False, **look))

    def heading(self, y: float, letter: str, title: str, line: str) -> None:
        self.text(14, y, letter, size=10, ha="left", weight="bold")
        self.text(28, y, title, size=9.5, ha="left", weight="bold")
        self.text(28, y + 13.5, line, ha="left", color=GREY)

    def labels(self, **rows: float) -> None:
        for text, y in rows.items():
            self.note(LEFT - 6, y, text, ha="right")


# -- serving ---------------------------------------------------------------------------------------------------------


def _serving(c: _Canvas, t: Timing, words: Words) -> None:
    c.heading(18, "a", f"Serving: from one verification to the next, K = {K}", words.serving)
    slots = [slot for forward in t.forwards for slot in forward]
    c.labels(feature=FEATURE, token=TOKEN, draft=LAYERS, proposal=PROPOSAL)
    c.labels(**({"output": OUTPUT} if any(slot.output for slot in slots) else {}))
    c.labels(token=PLACES, policy=VERIFY, output=TEACHER, emitted=EMITTED)
    # The end of the verification before.
    c.box(LEFT, PLACES - 10, 26, TEACHER - PLACES + 20, "ghost")
    _place(c, LEFT + 13, f"x{LAST - 1}", LAST - 1)
    c.box(LEFT + 4, VERIFY - CHIP / 2, 18, CHIP, "policy")
    c.chip(LEFT + 13, EMITTED, f"x{LAST}", "policy")
    x = LEFT + 32
    c.arrow((LEFT + 13, PLACES - 10), (LEFT + 13, LAYERS), (x, LAYERS))

    for i, forward in enumerate(t.forwards):
        x = _forward(c, x, t, (*(t.context if i == 0 else ()), *forward), is_fed=i > 0) + GAP
    if t.head:
        x = _head(c, x - 4, t, words.head) + GAP
    c.arrow((x - GAP, PROPOSAL), (x + 14, PROPOSAL), (x + 14, PLACES - 10))
    end = _verification(c, x)

    kinds = {"policy": "of the policy", "draft": "of the draft", "proposal": "proposed"}
    kinds |= {"placeholder": "placeholder"} if any(slot.token == "mask" for slot in slots) else {}
    for i, (kind, text) in enumerate(kinds.items()):
        c.box(LEFT + 44, PLACES - 2 + 13 * i, 12, 8, kind)
        c.note(LEFT + 60, PLACES + 2 + 13 * i, text)
    if RIGHT - end > 60:
        c.arrow((end - 14, PLACES - 10), (end - 14, LAYERS), (end + GAP, LAYERS))
        c.box(end + GAP, FEATURE - 10, RIGHT - end - GAP, PROPOSAL - FEATURE + 20, "ghost", "next cycle")


def _forward(c: _Canvas, x: float, t: Timing, slots: Sequence[Slot], *, is_fed: bool) -> float:
    """One forward of the draft, which may be fed the output of the one before; returns where it ends."""
    widths = [SEEN if slot in t.context else SLOT for slot in slots]
    end = x + sum(widths) + 8
    c.box(x, FEATURE - 10, end - x, PROPOSAL - FEATURE + 20, "frame")
    layers = f"{t.layers} layer{'s' if t.layers > 1 else ''}"
    c.box(x + 2.5, LAYERS - CHIP / 2, end - x - 5, CHIP, "draft", layers)
    left = x + 4
    for slot, width in zip(slots, widths, strict=True):
        center, w = left + width / 2, width - 4 if width == SLOT else width - 3
        left += width
        c.chip(center, FEATURE, slot.feature, "placeholder" if slot.feature == "m" else _origin(is_fed), w=w)
        kind = "placeholder" if slot.token == "mask" else "proposal" if "'" in slot.token else "token"
        c.chip(center, TOKEN, slot.token, kind, w=w)
        c.chip(center, OUTPUT, slot.output, "draft", w=w)
        c.chip(center, PROPOSAL, slot.proposal, "proposal", w=w)
        if slot.proposal and not slot.output:
            c.arrow((center, LAYERS + CHIP / 2), (center, PROPOSAL - CHIP / 2))
    if is_fed:
        between = x - GAP / 2
        c.arrow((x - GAP - 6, OUTPUT), (between, OUTPUT), (between, FEATURE), (x + 6, FEATURE))
    return end


def _origin(is_fed: bool) -> str:
    return "draft" if is_fed else "policy"


def _head(c: _Canvas, x: float, t: Timing, name: str) -> float:
    """The steps of a head, each of which reads the tokens before; returns where the last ends."""
    widths = [max(24.0, 4.0 * max(len(line) for line in lines) + 8) for lines, _ in t.head]
    end = x + sum(widths) + 4 * len(widths) + 4
    c.box(x, FEATURE - 10, end - x, PROPOSAL - FEATURE + 20, "frame")
    c.text((x + end) / 2, FEATURE + 2, name)
    left, before = x + 4, None
    for (lines, token), width in zip(t.head, widths, strict=True):
        center = left + width / 2
        if before is not None:
            c.arrow((before + 9, PROPOSAL), (left + 3.5, PROPOSAL), (left + 3.5, OUTPUT + 3))
        c.box(left, LAYERS - 9, width, OUTPUT - LAYERS + 12, "head", "\n".join(lines))
        c.arrow((center, OUTPUT + 3), (center, PROPOSAL - CHIP / 2))
        c.chip(center, PROPOSAL, token, "proposal")
        left, before = left + width + 4, center
    return end


def _verification(c: _Canvas, x: float) -> float:
    """The policy's forward over the proposals, and what may come out of it; returns where it ends."""
    width = (K + 1) * PLACE + 8
    c.box(x, PLACES - 10, width, TEACHER - PLACES + 20, "frame")
    c.box(x + 5, VERIFY - CHIP / 2, width - 10, CHIP, "policy", f"K + 1 = {K + 1} places")
    centers = [x + 4 + (i + 0.5) * PLACE for i in range(K + 1)]
    for accepted, center in enumerate(centers):
        _place(c, center, f"x{LAST + accepted}'" if accepted else f"x{LAST}", LAST + accepted)
        y = EMITTED + 13 * accepted
        c.note(x - 2, y, f"{accepted} accepted", ha="right")
        for i in range(accepted + 1):
            c.chip(centers[i], y, f"x{LAST + 1 + i}", "proposal" if i < accepted else "policy")
    return x + width


def _place(c: _Canvas, center: float, token: str, position: int) -> None:
    c.chip(center, PLACES, token, "proposal" if "'" in token else "token")
    c.chip(center, TEACHER, f"p{position}", "policy")


# -- training --------------------------------------------------------------------------------------------------------


def _training(c: _Canvas, t: Timing, words: Words) -> None:
    c.heading(TRAINING, "b", "Training: one step, whose rollouts are cycles as above", words.training)
    c.labels(engine=ENGINE + 10, policy=POLICY + 8, draft=DRAFT + 18)
    c.box(LEFT, ENGINE, 80, 20, "frame")
    c.text(LEFT + 40, ENGINE + 7, "rollouts, weights v")
    for i in range(8):
        c.box(LEFT + 3 + 9.3 * i, ENGINE + 12.5, 8.6, 4.5, _origin(i % 2 == 0))
    x = LEFT + 84
    c.box(x, POLICY, 44, 16, "policy", "forward")
    c.box(x + 48, POLICY, 44, 16, "policy", "backward")
    c.arrow((x + 12, POLICY + 16), (x + 12, DRAFT + 18), (x + 108, DRAFT + 18))
    c.note(x + 18, DRAFT + 11, f"kept: {t.feature} and p")
    x += 108
    for k, rows in enumerate(t.passes):
        width = max(len(row) for row in rows) * CELL + 8
        c.box(x, DRAFT, width, 36, "frame")
        c.text(x + width / 2, DRAFT + 7, f"{t.rows} {k}" if len(t.passes) > 1 else f"{len(rows)} {t.rows}", size=7.5)
        for j, row in enumerate(rows):
            for i, symbol in enumerate(row.rstrip()):
                if symbol != " ":
                    c.cell(x + 4.7 + i * CELL, DRAFT + 23 + (j - (len(rows) - 1) / 2) * 7, symbol)
        x += width + 4
    if words.head:
        c.box(x, DRAFT, 44, 36, "head", words.head.replace(" ", "\n"))
        x += 48
    c.box(x, DRAFT, 44, 36, "draft", "backward")
    c.box(x + 48, DRAFT, 34, 36, "draft", "update")
    c.box(x + 48, POLICY, 34, 16, "policy", "update")
    x += 86
    c.box(x, ENGINE, 32, DRAFT + 36 - ENGINE, "frame", "refit\nv + 1")
    if RIGHT - x > 76:
        c.box(x + 36, ENGINE, RIGHT - x - 36, 20, "ghost", "next step")
    c.note(LEFT, LEGEND, "slots:")
    x = LEFT + 28
    for symbol, (_, _, meaning) in CELLS.items():
        if any(symbol in row for rows in t.passes for row in rows):
            c.cell(x, LEGEND, symbol)
            c.note(x + 7, LEGEND, meaning)
            x += 16 + 4.1 * len(meaning)


# -- files -----------------------------------------------------------------------------------------------------------


def figure(algo: str) -> Figure:
    """Draw the diagram of an algorithm.

    Args:
        algo: draft algorithm.
    """
    c, t, words = _Canvas(), timing(algo), WORDS[algo]
    _serving(c, t, words)
    _training(c, t, words)
    c.arrow((LEFT, HEIGHT - 9), (RIGHT, HEIGHT - 9))
    c.note(RIGHT, LEGEND, "time; widths are schematic, not measured", ha="right")
    return c.figure


def svg(drawn: Figure, *, name: str, title: str) -> str:
    """A figure as SVG, the same bytes on every call.

    Args:
        drawn: the figure.
        name: no other figure of a page has it.
        title: what it shows, for those who cannot see it.
    """
    # No date, no version, no random ids.
    metadata = {"Date": None, "Creator": None, "Format": None, "Type": None, "Title": title}
    out = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        FigureCanvasSVG(drawn).print_svg(out, metadata=metadata)
    # Text is in the viewer's font, whichever this machine has. Rotations by nothing are a fifth of the file.
    text = re.sub(r' font-family: [^;]*;| transform="rotate\(-0 [^"]*"', "", out.getvalue())
    return text.replace("*{", "*{font-family: sans-serif; ", 1)


def timing_svg(algo: str) -> str:
    """The diagram of an algorithm as SVG.

    Args:
        algo: draft algorithm.
    """
    return svg(figure(algo), name=algo, title=WORDS[algo].alt)


def main() -> None:
    """Write all diagrams."""
    for algo in DRAFT_ALGORITHMS:
        (FIGURES / f"timing-{algo}.svg").write_text(timing_svg(algo), encoding="utf-8")


if __name__ == "__main__":
    main()
