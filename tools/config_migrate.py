"""Turn a configuration of NeMo-RL or of verl-SpeCo into a recipe for this program.

  tools/config_migrate.py nemo-rl path/to/recipe.yaml > recipe.yaml
  tools/config_migrate.py verl-speco path/to/config.yaml [key=value ...] > recipe.yaml

The recipe, on standard output, inherits an exemplar and holds what differs from it; it belongs into
examples/configs/recipes/llm/. Standard error lists what was left out, what changed in meaning, and what is left to
decide. Exit status: 0, 1 for keys that no rule knows (--allow-unknown: 0), 2 when the recipe is not valid or a file
cannot be read.

The rules are in tools/migration/. `--table nemo-rl` prints them as docs/migrating.md holds them; a test compares both.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nemo_rl.errors import ConfigError
from tools.migration.engine import Kind, Migration, migrate
from tools.migration.from_nemo_rl import NEMO_RL
from tools.migration.from_verl_speco import VERL_SPECO
from tools.migration.rules import Project

PROJECTS: dict[str, Project] = {project.name: project for project in (NEMO_RL, VERL_SPECO)}

EXIT_UNKNOWN_KEYS = 1
LOG_WIDTH = 200

TITLES: dict[Kind, str] = {
    "left out": "Left out",
    "changed": "Changed in meaning",
    "to decide": "To decide",
    "unknown": "Unknown, left out",
    "nothing": "Left out without loss",
}


def marked(project: Project) -> str:
    """The table of a project between its markers, as docs/migrating.md holds it.

    Args:
        project: whose rules.

    Returns:
        Markdown, without a newline at the end.
    """
    begin = f"<!-- {project.name}: made by tools/config_migrate.py --table {project.name} -->"
    return f"{begin}\n{project.table()}\n<!-- end of {project.name} -->"


def report(result: Migration, console: Console, *, shows_all: bool) -> None:
    """Show what there is to say about a migration.

    Args:
        result: the migration.
        console: where to.
        shows_all: also list the keys that are left out without loss.
    """
    for kind, title in TITLES.items():
        remarks = result.of(kind)
        if not remarks or (kind == "nothing" and not shows_all):
            continue
        table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
        table.add_column(style="cyan", overflow="fold")
        table.add_column(overflow="fold", max_width=40)
        table.add_column(overflow="fold", max_width=LOG_WIDTH)
        for remark in remarks:
            table.add_row(remark.key, Text(remark.value), Text(remark.text))
        console.print(table)
        console.print()
    num_quiet = len(result.of("nothing"))
    if num_quiet and not shows_all:
        console.print(Text(f"{num_quiet} more are switched off or have nothing to set here; --all lists them."))


def _run(options: argparse.Namespace) -> int:
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        console.width = LOG_WIDTH
    project = PROJECTS[options.project]
    result = migrate(project, options.file, options.overrides)
    sys.stdout.write(f"# From {project.title}'s {options.file.name}, by tools/config_migrate.py.\n{result.text()}")
    sys.stdout.flush()
    report(result, console, shows_all=options.all)
    result.check()
    return EXIT_UNKNOWN_KEYS if result.of("unknown") and not options.allow_unknown else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: Command line without the program's name; None takes the process's.

    Returns:
        Exit status: 0, 1 for keys that no rule knows, 2 for a file or a recipe that cannot be used.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("project", nargs="?", choices=PROJECTS, help="whose configuration it is")
    parser.add_argument("file", nargs="?", type=Path, help="its YAML file; the parents that it names must be there")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides, in the keys of that project")
    parser.add_argument("--allow-unknown", action="store_true", help="exit with 0 in spite of unknown keys")
    parser.add_argument("--all", action="store_true", help="also list keys that are left out without loss")
    parser.add_argument("--table", choices=PROJECTS, help="print the table of the rules instead")
    options = parser.parse_intermixed_args(arguments)
    if options.table is not None:
        sys.stdout.write(f"{marked(PROJECTS[options.table])}\n")
        return 0
    if options.project is None or options.file is None:
        parser.error("name a project and a file")
    try:
        return _run(options)
    except ConfigError as err:
        sys.stderr.write(f"error: {err}\n")
        return err.exit_code


if __name__ == "__main__":
    sys.exit(main())
