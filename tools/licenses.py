"""Write the list of packages that a run uses, with their licences; a test compares the page with the pinned set.

.venv/bin/python tools/licenses.py > docs/reference/licenses.md
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PINNED = ROOT / "requirements" / "cpu.txt"
HEAD = """\
# Licences of dependencies

What `requirements/cpu.txt` pins, as each package declares it. Made by `tools/licenses.py`. Nothing of these packages
is part of this repository.

| package | version | licence |
|---|---|---|
"""
_CLASSIFIER = "License :: OSI Approved :: "
_FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "COPYING")


def licence(name: str) -> str:
    """What an installed package declares: an SPDX expression, classifiers, its field's first line, or its file's.

    Args:
        name: of the distribution.
    """
    meta = importlib.metadata.metadata(name)
    if "License-Expression" in meta:
        return meta["License-Expression"]
    found = [c.removeprefix(_CLASSIFIER) for c in meta.get_all("Classifier") or [] if c.startswith(_CLASSIFIER)]
    if found:
        return ", ".join(found)
    text = meta["License"] if "License" in meta else _licence_file(name)
    return next((line.strip() for line in text.splitlines() if line.strip()), "not declared")


def _licence_file(name: str) -> str:
    files = importlib.metadata.files(name) or []
    return next((file.read_text() for file in files if file.name in _FILES and ".dist-info" in str(file)), "")


def page() -> str:
    """The page in Markdown."""
    rows = []
    for line in PINNED.read_text(encoding="utf-8").splitlines():
        name, version = re.split("==", line)
        rows.append(f"| {name} | {version} | {licence(name)} |\n")
    return HEAD + "".join(rows)


if __name__ == "__main__":
    sys.stdout.write(page())
