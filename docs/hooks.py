"""Links from a page to files of the repository that are no pages: shown as their path, and checked to exist."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_CODE = ROOT / "docs" / "examples" / "medusa_draft.py"
_PART = re.compile(r"^# part (\d) of medusa_draft\.py$", re.MULTILINE)
_LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>\.\./[^)#\s]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Replace links that leave the documentation; one whose file is missing stays, and mkdocs refuses it.

    Args:
        markdown: the page.
        page: where it lies.
    """

    def replace(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page.file.src_uri), match["target"]))
        if target.startswith("docs/") or not (ROOT / target).exists():
            return match[0]
        text = match["text"]
        return f"`{target}`" if text.strip("`") in (target, posixpath.basename(target)) else f"{text} (`{target}`)"

    return _LINK.sub(replace, _PART.sub(lambda match: _part(int(match[1])), markdown))


def _part(number: int) -> str:
    """A part of the example draft, which the pages quote instead of repeating it."""
    parts = re.split(r"^# \d\. .*\n", _CODE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return parts[number].strip()
