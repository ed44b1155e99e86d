"""What recipes, scripts and suite lists must agree in. Each rule returns messages that name the file and the key."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from nemo_rl.algorithms.config import MasterConfig
from nemo_rl.errors import ConfigError
from nemo_rl.utils.config import build_master_config, load_tree
from tools import config_cli

RECIPES = "examples/configs/recipes/llm"
SCRIPTS = "tests/test_suites/llm"
FUNCTIONAL = "tests/functional"
BUDGETS = {"functional": 0, "nightly": 80, "release": 320}
"""List -> GPU hours that its scripts may ask for together."""

NAME = re.compile(
    r"(?P<algo>grpo|dapo)-(?P<model>[a-z0-9.]+(-[a-z0-9.]+)*)-(?P<nodes>\d+)n(?P<gpus>\d+)g-automodel-(?P<draft>[a-z0-9]+)"
    r"(-[a-z0-9.]+)*"
)
CONFIG_KEYS = ("NUM_NODES", "GPUS_PER_NODE", "STEPS_PER_RUN", "MAX_STEPS", "NUM_RUNS", "NUM_MINUTES")
NUM_RUNS = "$(((MAX_STEPS + STEPS_PER_RUN - 1) / STEPS_PER_RUN))"


class Script(NamedTuple):
    """The configuration block of a script."""

    num_nodes: int
    gpus_per_node: int
    steps_per_run: int
    max_steps: int
    num_minutes: int

    @property
    def num_runs(self) -> int:
        return -(-self.max_steps // self.steps_per_run)

    @property
    def gpu_hours(self) -> float:
        return self.num_nodes * self.gpus_per_node * self.num_runs * self.num_minutes / 60


def recipes(root: Path) -> dict[str, Path]:
    """Stem -> recipe."""
    return {path.stem: path for path in sorted((root / RECIPES).glob("*.yaml"))}


def scripts(root: Path) -> list[str]:
    """Every script, relative to the root."""
    found = [*(root / SCRIPTS).glob("*.sh"), *(root / FUNCTIONAL).glob("*_*.sh")]
    return sorted(str(path.relative_to(root)) for path in found)


def lines_of(root: Path, suite: str) -> list[str]:
    """Scripts that a list names."""
    text = (root / "tests/test_suites" / f"{suite}.txt").read_text(encoding="utf-8")
    return [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]


def recipes_of(root: Path, script: str) -> set[str]:
    """Recipes that a script runs: that of its name, or those it names."""
    path = root / script
    if path.parent == root / SCRIPTS:
        return {path.stem}
    return set(re.findall(r"^run_recipe ([a-z0-9.-]+)", path.read_text(encoding="utf-8"), flags=re.MULTILINE))


def read_script(path: Path) -> tuple[Script | None, list[str]]:
    """The configuration block, or what is wrong with it."""
    block = re.search(r"BEGIN CONFIG =+\n(.*?)\n# =+ END CONFIG", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    if block is None:
        return None, [f"{path}: has no configuration block (BEGIN CONFIG ... END CONFIG)."]
    values = dict(line.split("=", 1) for line in block[1].splitlines() if "=" in line)
    wrong = [f"{path}: {key}: is missing." for key in CONFIG_KEYS if key not in values]
    wrong += [f"{path}: {key}: is not read by anything. Remove it." for key in values if key not in CONFIG_KEYS]
    if values.get("NUM_RUNS", NUM_RUNS) != NUM_RUNS:
        wrong.append(f"{path}: NUM_RUNS: got {values['NUM_RUNS']}; must be {NUM_RUNS}.")
    numbers = {key: values[key] for key in CONFIG_KEYS if key in values and key != "NUM_RUNS"}
    wrong += [f"{path}: {key}: got {value}; must be a number." for key, value in numbers.items() if not value.isdigit()]
    if wrong:
        return None, wrong
    return Script(*(int(values[key]) for key in CONFIG_KEYS if key != "NUM_RUNS")), []


def load(path: Path) -> tuple[MasterConfig | None, list[str]]:
    """The validated recipe, or what is wrong with it."""
    try:
        return _validated(json.dumps(load_tree(path))), []
    except ConfigError as err:
        return None, [f"{path}: {err}"]


@functools.cache
def _validated(tree: str) -> MasterConfig:
    """By content, for a recipe is asked about more than once."""
    return build_master_config(json.loads(tree))


def recipe_problems(path: Path) -> list[str]:
    """Name, minimality, and what the name says about the content."""
    problems = [
        f"{path}: {'.'.join(keys)}: {value!r} is what the file inherits. Remove it."
        for keys, value in config_cli.redundant_keys(path).items()
    ]
    cfg, wrong = load(path)
    problems += wrong
    name = NAME.fullmatch(path.stem)
    if name is None:
        return [*problems, f"{path}: name: must be <algo>-<model>-<nodes>n<gpus>g-automodel-<draft>[-modifier]."]
    if cfg is None:
        return problems
    for key, got, expected in _named_values(path.stem, name, cfg):
        if got != expected:
            problems.append(f"{path}: {key}: got {got!r}; the name says {expected!r}.")
    return problems


def _named_values(stem: str, name: re.Match[str], cfg: MasterConfig) -> list[tuple[str, Any, Any]]:
    user = cfg.policy.generation.speculative_config
    draft = cfg.policy.draft.algo if cfg.policy.draft_enabled else "none" if user is None else user.get("method")
    on_gpus = name["gpus"] != "0"
    values = [
        ("grpo.use_dynamic_sampling", cfg.grpo.use_dynamic_sampling, name["algo"] == "dapo"),
        ("policy.draft.algo", draft, name["draft"]),
        ("cluster.device", cfg.cluster.device, "cuda" if on_gpus else "cpu"),
        ("cluster.num_nodes", cfg.cluster.num_nodes, int(name["nodes"])),
        ("checkpointing.checkpoint_dir", cfg.checkpointing.checkpoint_dir, f"results/{stem}"),
        ("logger.log_dir", cfg.logger.log_dir, f"logs/{stem}"),
    ]
    return values + ([("cluster.gpus_per_node", cfg.cluster.gpus_per_node, int(name["gpus"]))] if on_gpus else [])


def coverage_problems(root: Path) -> list[str]:
    """Every recipe has a script, every script a recipe and exactly one line."""
    known, found = recipes(root), scripts(root)
    covered: set[str] = set().union(*(recipes_of(root, script) for script in found))
    problems = [
        f"{path}: has no script. Add {SCRIPTS}/{stem}.sh, or a {FUNCTIONAL}/*.sh that runs it."
        for stem, path in known.items()
        if stem not in covered
    ]
    for script in found:
        used = recipes_of(root, script)
        problems += [
            f"{root / script}: there is no recipe {RECIPES}/{stem}.yaml." for stem in sorted(used - set(known))
        ]
        if not used:
            problems.append(f"{root / script}: runs no recipe.")
    listed = {suite: lines_of(root, suite) for suite in BUDGETS}
    for script in found:
        where = [suite for suite, lines in listed.items() for line in lines if line == script]
        if not where:
            problems.append(f"{root / script}: is in no list. Add a line to one of tests/test_suites/*.txt.")
        if len(where) > 1:
            problems.append(f"{root / script}: has {len(where)} lines ({', '.join(where)}); must have one.")
    problems += [
        f"{root / 'tests/test_suites'}/{suite}.txt: {line}: there is no such script."
        for suite, lines in listed.items()
        for line in lines
        if line not in found
    ]
    return problems


def machine_problems(root: Path) -> list[str]:
    """A script asks for the machines of its recipe; a list stays within its hours."""
    problems: list[str] = []
    hours = dict.fromkeys(BUDGETS, 0.0)
    suite_of = {line: suite for suite in BUDGETS for line in lines_of(root, suite)}
    for path in sorted((root / SCRIPTS).glob("*.sh")):
        script, wrong = read_script(path)
        problems += wrong
        recipe = recipes(root).get(path.stem)
        cfg = None if recipe is None else load(recipe)[0]
        if script is None or cfg is None:
            continue
        gpus = cfg.cluster.gpus_per_node if cfg.cluster.device == "cuda" else 0
        for key, got, name, expected in (
            ("NUM_NODES", script.num_nodes, "cluster.num_nodes", cfg.cluster.num_nodes),
            ("GPUS_PER_NODE", script.gpus_per_node, "cluster.gpus_per_node", gpus),
        ):
            if got != expected:
                problems.append(f"{path}: {key}: got {got}; {name} of {recipe} is {expected}.")
        if (suite := suite_of.get(str(path.relative_to(root)))) is not None:
            hours[suite] += script.gpu_hours
    problems += [
        f"{root / 'tests/test_suites'}/{suite}.txt: its scripts ask for {hours[suite]:.0f} GPU hours; must be at most "
        f"{budget}. Shorten a script (MAX_STEPS, NUM_MINUTES), or move one to another list."
        for suite, budget in BUDGETS.items()
        if hours[suite] > budget
    ]
    return problems


def all_problems(root: Path) -> list[str]:
    """Every rule."""
    found = [problem for path in recipes(root).values() for problem in recipe_problems(path)]
    return found + coverage_problems(root) + machine_problems(root)
