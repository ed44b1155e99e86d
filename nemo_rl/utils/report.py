"""Writes the report of a run: one HTML file that needs nothing beside it, and its plots as PNG files.

    <log_dir>/report/report.html
    <log_dir>/report/reward.png, acceptance_length.png, ...

A plot whose metrics were not logged (no draft, no validation) is left out.
"""

from __future__ import annotations

import base64
import html
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from nemo_rl.utils.logger import METRICS_FILE, REPORT_DIR, read_metrics
from nemo_rl.utils.run_summary import RunSummary

REPORT_FILE = "report.html"


def write_report(
    log_dir: str | os.PathLike[str],
    *,
    run_config: Mapping[str, Any],
    summary: RunSummary,
    versions: Mapping[str, str],
    title: str = "GRPO run",
) -> Path:
    """Write the report from ``<log_dir>/metrics.jsonl``.

    Args:
        log_dir: The run's log directory.
        run_config: The resolved configuration as plain data.
        summary: See `nemo_rl.utils.run_summary.summarize`.
        versions: Package -> version.
        title: Heading.

    Returns:
        Path of the HTML file.
    """
    # matplotlib costs about a second and is needed once, at the end
    from nemo_rl.utils.report_plots import draw_plots

    log_dir = Path(log_dir)
    metrics = read_metrics(log_dir / METRICS_FILE)
    directory = log_dir / REPORT_DIR
    directory.mkdir(parents=True, exist_ok=True)
    for stale in directory.glob("*.png"):
        stale.unlink()
    figures = []
    for plot in draw_plots(metrics, num_speculative_tokens=summary.num_speculative_tokens):
        buffer = io.BytesIO()
        plot.figure.savefig(buffer, format="png", dpi=160)
        (directory / f"{plot.name}.png").write_bytes(buffer.getvalue())
        figures.append(_figure_html(plot.name, plot.title, plot.caption, buffer.getvalue()))
    page = _PAGE.format(
        title=html.escape(title),
        style=_STYLE,
        tiles=_tiles_html(summary),
        figures="\n".join(figures) or "<p>No metrics were logged.</p>",
        versions=_versions_html(versions),
        config=html.escape(yaml.safe_dump(dict(run_config), sort_keys=False, allow_unicode=True)),
        metrics_file=html.escape(METRICS_FILE),
    )
    path = directory / REPORT_FILE
    path.write_text(page, encoding="utf-8")
    return path


def _tiles_html(summary: RunSummary) -> str:
    tiles = [
        f'<div class="tile"><dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd></div>'
        for name, text in summary.lines(arrow="→")
    ]
    return "\n".join(tiles)


def _figure_html(name: str, title: str, caption: str, png: bytes) -> str:
    data = base64.b64encode(png).decode("ascii")
    return (
        f'<figure id="{html.escape(name)}"><h2>{html.escape(title)}</h2>'
        f'<img src="data:image/png;base64,{data}" alt="{html.escape(f"{title}. {caption}")}">'
        f'<figcaption>{html.escape(caption)} <a href="{html.escape(name)}.png">PNG</a></figcaption></figure>'
    )


def _versions_html(versions: Mapping[str, str]) -> str:
    rows = [
        f'<tr><th scope="row">{html.escape(name)}</th><td>{html.escape(version)}</td></tr>'
        for name, version in versions.items()
    ]
    return "\n".join(rows)


_STYLE = """
:root { color-scheme: light dark; --page: #f4f5f7; --card: #ffffff; --text: #1d2530; --muted: #5b6675; --line: #d9dee5;
  --accent: #0a6ebd; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14181e; --card: #1e242c; --text: #e7ebf0; --muted: #9aa7b6; --line: #343d48; --accent: #6db8f2; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text); font: 16px/1.5 system-ui, "Segoe UI", sans-serif; }
main { max-width: 1320px; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.6rem; margin: 0 0 1.25rem; }
h2 { font-size: 1.05rem; margin: 0 0 .6rem; }
a { color: var(--accent); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(230px, 1fr)); gap: .75rem; margin: 0 0 1.5rem; }
.tile, figure, section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.tile { padding: .7rem 1rem; }
.tile dt { color: var(--muted); font-size: .82rem; }
.tile dd { margin: .1rem 0 0; font-size: 1.08rem; font-weight: 600; font-variant-numeric: tabular-nums;
  overflow-wrap: anywhere; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 560px), 1fr)); gap: 1rem; }
figure { margin: 0; padding: 1rem; }
figure img { width: 100%; height: auto; display: block; border-radius: 6px; background: #ffffff; }
figcaption { color: var(--muted); font-size: .88rem; margin-top: .6rem; }
section { margin-top: 1rem; padding: 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; font-weight: 400; padding: .2rem 1.5rem .2rem 0; }
th { color: var(--muted); }
summary { cursor: pointer; font-weight: 600; }
pre { overflow-x: auto; font-size: .84rem; line-height: 1.45; }
"""

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
<h1>{title}</h1>
<dl class="tiles">
{tiles}
</dl>
<div class="figures">
{figures}
</div>
<section><h2>Versions</h2>
<table><tbody>
{versions}
</tbody></table></section>
<section><details><summary>Configuration</summary>
<pre>{config}</pre></details></section>
<section>All metrics, one JSON object per step: <a href="../{metrics_file}">{metrics_file}</a></section>
</main>
</body>
</html>
"""
