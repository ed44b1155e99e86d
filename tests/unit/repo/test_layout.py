"""Rules of the repository that no single module can keep: names, pins, entry points, the Makefile."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from nemo_rl.utils.config import load_config, load_tree

ROOT = Path(__file__).resolve().parents[3]
DRAFT = ROOT / "nemo_rl" / "models" / "automodel" / "draft"
ALGORITHM_NAMES = re.compile(r"eagle|dflash|dspark|domino", re.IGNORECASE)
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
REQUIREMENTS = (ROOT / "requirements" / "cpu.txt").read_text(encoding="utf-8").splitlines()
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def test_no_draft_algorithm_is_named_outside_the_draft_package() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted((ROOT / "nemo_rl").rglob("*.py"))
        if not path.is_relative_to(DRAFT)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if ALGORITHM_NAMES.search(line)
    ]
    assert found == []


@pytest.mark.parametrize("line", REQUIREMENTS)
def test_cpu_requirement_is_an_exact_pin_of_nothing_for_cuda(line: str) -> None:
    assert re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9_.+!-]+", line)
    assert not re.search(r"nvidia|cuda|cutlass|triton", line, re.IGNORECASE)


def test_cpu_requirements_are_sorted_and_unique() -> None:
    names = [line.split("==")[0].lower() for line in REQUIREMENTS]
    assert len(names) == len(set(names))


@pytest.mark.skipif("torch" not in "".join(REQUIREMENTS), reason="no torch pinned")
def test_installed_torch_has_no_cuda() -> None:
    # Read, not imported: the version file decides which build it is.
    program = "import runpy, sys, importlib.util as u; from pathlib import Path\n"
    program += "p = Path(u.find_spec('torch').origin).parent / 'version.py'\nprint(runpy.run_path(str(p))['cuda'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == "None\n"


def test_extras_and_entry_points() -> None:
    project = PYPROJECT["project"]
    assert set(project["optional-dependencies"]) == {"automodel", "vllm", "cpu", "wandb", "mlflow", "dev"}
    assert set(project["scripts"]) == {"nemo-rl-grpo", "nemo-rl-draft", "nemo-rl-eval"}
    for target in project["scripts"].values():
        module, function = target.split(":")
        assert callable(getattr(__import__(module, fromlist=[function]), function))


def requirement_name(requirement: str) -> str:
    return re.split(r"[<>=!~\[; ]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def test_pinned_set_covers_what_the_package_asks_for() -> None:
    pinned = {line.split("==")[0].lower().replace("_", "-"): line.split("==")[1] for line in REQUIREMENTS}
    project = PYPROJECT["project"]
    asked = [*project["dependencies"]]
    for extra in ("automodel", "cpu", "dev"):
        asked += project["optional-dependencies"][extra]
    missing = [name for name in map(requirement_name, asked) if name not in pinned]
    assert missing == []
    for requirement in asked:
        if "==" in requirement:
            assert pinned[requirement_name(requirement)] == requirement.split("==")[1]


def make_variable(name: str) -> str:
    match = re.search(rf"^{name} :?= (.+)$", MAKEFILE, flags=re.MULTILINE)
    assert match is not None
    return match.group(1)


def test_demo_makes_the_policy_that_its_recipe_trains() -> None:
    recipe = load_config(ROOT / make_variable("DEMO_RECIPE"))
    assert recipe["policy"]["model_name"] == make_variable("DEMO_POLICY")


def test_makefile_and_requirements_name_the_same_torch() -> None:
    pinned = next(line for line in REQUIREMENTS if line.startswith("torch=="))
    assert make_variable("TORCH") == f"{pinned}+cpu"


def test_nothing_is_looked_up_or_reported() -> None:
    for variable in ("HF_HUB_OFFLINE := 1", "RAY_USAGE_STATS_ENABLED := 0", "VLLM_NO_USAGE_STATS := 1"):
        assert f"export {variable}" in MAKEFILE


def test_ci_runs_the_tests_and_the_linters() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "set -euo pipefail" in script
    assert re.search(r"^make test$", script, flags=re.MULTILINE)
    assert re.search(r"^make lint$", script, flags=re.MULTILINE)


def test_pre_commit_runs_what_make_lint_runs() -> None:
    hooks = load_tree(ROOT / ".pre-commit-config.yaml")["repos"][0]["hooks"]
    per_commit = {re.sub(r"^\.venv/bin/(python )?| --force-exclude$", "", hook["entry"]) for hook in hooks}
    recipe = MAKEFILE.split("\nlint: environment\n")[1].split("\n\n")[0]
    whole = {
        re.sub(r"^(\$\(VENV\)/bin/|\$\(PY\) )| (--check )?\.$| \$\(CONFIGS\)$", "", line.strip())
        for line in recipe.splitlines()
    }
    assert per_commit == {line.replace("$(MAKE) --no-print-directory", "make") for line in whole}
