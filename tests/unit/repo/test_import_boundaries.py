"""What may be imported without paying for torch, ray, vllm or nemo_automodel; each in a fresh interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "nemo_rl"
HEAVY = ("torch", "ray", "vllm", "nemo_automodel", "transformers", "datasets", "reasoning_gym", "matplotlib")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def heavy_after_importing(modules: list[str]) -> dict[str, list[str]]:
    """Import modules one after the other in a new interpreter; return what heavy library each one brought."""
    program = (
        "import importlib, json, sys\n"
        f"heavy, found = {HEAVY!r}, {{}}\n"
        "for name in json.loads(sys.argv[1]):\n"
        "    before = set(sys.modules)\n"
        "    importlib.import_module(name)\n"
        "    found[name] = [lib for lib in heavy if lib in sys.modules and lib not in before]\n"
        "print(json.dumps(found))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(modules)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return {name: libraries for name, libraries in json.loads(done.stdout).items() if libraries}


def test_the_detector_sees_a_heavy_import() -> None:
    assert "matplotlib" in heavy_after_importing(["matplotlib"])["matplotlib"]


def test_every_package_is_light() -> None:
    packages = sorted(module_name(path) for path in PACKAGE.rglob("__init__.py"))
    assert len(packages) > 10
    assert heavy_after_importing(packages) == {}


def test_every_schema_is_light() -> None:
    schemas = sorted(module_name(path) for path in PACKAGE.rglob("config.py"))
    assert "nemo_rl.models.automodel.draft.config" in schemas
    assert heavy_after_importing(schemas) == {}


def test_what_runs_before_the_workers_is_light() -> None:
    modules = [
        "nemo_rl.cli",
        "nemo_rl.errors",
        "nemo_rl.algorithms.evaluation_config",
        "nemo_rl.distributed.device",
        "nemo_rl.models.automodel.draft.registry",
        "nemo_rl.models.automodel.draft.spec",
        "nemo_rl.utils.config",
        "nemo_rl.utils.dry_run",
        "nemo_rl.utils.memory_estimate",
        "nemo_rl.utils.preflight",
        "nemo_rl.weight_sync.interfaces",
        "examples.run_eval",
        "examples.run_draft",
        "examples.run_grpo",
        "tools.config_cli",
        "tools.config_migrate",
        "tools.draft_convert",
        "tools.draft_vocab",
    ]
    assert heavy_after_importing(modules) == {}


def test_help_needs_no_schema() -> None:
    program = (
        "import sys\nfrom examples import run_grpo\n"
        "try:\n    run_grpo.main(['--help'])\nexcept SystemExit as stop:\n    assert stop.code == 0\n"
        "print('pydantic' in sys.modules, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stderr == "False\n"
    assert "--config" in done.stdout


def test_every_directory_with_modules_is_a_package() -> None:
    directories = {path.parent for path in PACKAGE.rglob("*.py")}
    assert sorted(str(path) for path in directories if not (path / "__init__.py").is_file()) == []
