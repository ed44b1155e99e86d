"""Look at configuration files and keep them short; on top of the loader that the runs use.

  expand          print a file with its parents merged and every value resolved
  minimize        print (or write, --in-place) a file without the keys that its parents give already
  minimize-check  fail when `minimize` would change a file, naming file and key
  compare         list the keys in which two files differ once expanded
  validate        check files against the schema

Example:
  tools/config_cli.py expand examples/configs/recipes/llm/<recipe>.yaml
  tools/config_cli.py minimize-check examples/configs/recipes/llm/*.yaml
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from nemo_rl.algorithms.config import MasterConfig
from nemo_rl.errors import ConfigError, NemoRLError
from nemo_rl.utils.config import (
    REPLACE_MARKER,
    build_master_config,
    load_config,
    load_tree,
    merge,
    parents_of,
    read_yaml,
    to_dict,
)
from nemo_rl.utils.config_schema import complete

EXIT_NOT_MINIMAL = 1

KeyPath = tuple[str, ...]


def expand(path: Path, *, is_resolved: bool) -> dict[str, Any]:
    """Merge a file with its parents and the schema's defaults.

    Args:
        path: The file.
        is_resolved: Replace interpolations by their values, and check the result.

    Returns:
        The whole tree.
    """
    if is_resolved:
        return to_dict(build_master_config(load_config(path)))
    return complete(MasterConfig, load_tree(path))


def redundant_keys(path: Path) -> dict[KeyPath, Any]:
    """Find the keys of a file whose values its parents give already.

    Args:
        path: The file.

    Returns:
        Path of each key -> its value; of a whole redundant mapping only the mapping. Empty without parents.
    """
    own = read_yaml(path)
    parents = parents_of(path, own)
    base: dict[str, Any] = {}
    for parent in parents:
        base = merge(base, load_tree(parent))
    own.pop("defaults", None)
    return dict(_redundant(own, base)) if parents else {}


def minimized_text(path: Path) -> str:
    """Return a file's text without its redundant keys; the rest, comments included, stays as it is written.

    Args:
        path: The file.

    Returns:
        The new text.

    Raises:
        ConfigError: A redundant key is inside a `{...}` mapping, which cannot be cut by lines.
    """
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    doomed: set[int] = set()
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    for keys in redundant_keys(path):
        first, last = _lines_of(root, keys, path=path)
        while first > 0 and _is_comment_on(lines[first - 1], lines[first]):
            first -= 1
        doomed.update(range(first, last))
    return "".join(line for number, line in enumerate(lines) if number not in doomed)


def differences(left: Mapping[str, Any], right: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Compare two expanded trees.

    Args:
        left: One tree.
        right: The other tree.

    Yields:
        Dotted key, value on the left, value on the right; a key that one side lacks has the value `...` there.
    """
    for key in dict.fromkeys([*left, *right]):
        first, second = left.get(key, ...), right.get(key, ...)
        if isinstance(first, Mapping) and isinstance(second, Mapping):
            yield from ((f"{key}.{below}", one, other) for below, one, other in differences(first, second))
        elif first != second:
            yield key, first, second


def _redundant(own: Mapping[str, Any], base: Mapping[str, Any]) -> Iterator[tuple[KeyPath, Any]]:
    if own.get(REPLACE_MARKER):
        return
    for key, value in own.items():
        if key not in base:
            continue
        if isinstance(value, Mapping) and isinstance(base[key], Mapping) and not value.get(REPLACE_MARKER):
            below = list(_redundant(value, base[key]))
            whole = {keys[0] for keys, _ in below if len(keys) == 1}
            if whole >= set(value):
                yield (key,), value
            else:
                yield from (((key, *keys), item) for keys, item in below)
        elif _same(value, base[key]):
            yield (key,), value


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and value == other


def _lines_of(root: yaml.Node, keys: KeyPath, *, path: Path) -> tuple[int, int]:
    node = root
    for depth, key in enumerate(keys):
        assert isinstance(node, yaml.MappingNode), "a redundant key lies in a mapping"
        if node.flow_style:
            raise ConfigError(f"{path}: {'.'.join(keys)}: is redundant inside {{...}}. Remove it by hand.")
        key_node, value_node = next(pair for pair in node.value if pair[0].value == key)
        if depth == len(keys) - 1:
            return key_node.start_mark.line, _end_line(value_node)
        node = value_node
    raise AssertionError("a redundant key has a path")


def _end_line(node: yaml.Node) -> int:
    """Return the line after a node; block collections end where their last item does, not where the next key begins."""
    if isinstance(node, yaml.MappingNode) and node.value and not node.flow_style:
        return _end_line(node.value[-1][1])
    if isinstance(node, yaml.SequenceNode) and node.value and not node.flow_style:
        return _end_line(node.value[-1])
    is_block_scalar = isinstance(node, yaml.ScalarNode) and node.style in ("|", ">")
    return node.end_mark.line + (0 if is_block_scalar else 1)


def _is_comment_on(line: str, below: str) -> bool:
    return line.strip().startswith("#") and _indent(line) == _indent(below)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _dump(tree: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(tree), sort_keys=False, allow_unicode=True)


def _run_expand(options: argparse.Namespace) -> int:
    text = _dump(expand(options.file, is_resolved=not options.no_resolve))
    if options.in_place:
        options.file.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
    return 0


def _run_minimize(options: argparse.Namespace) -> int:
    for path in options.files:
        text = minimized_text(path)
        if options.in_place:
            path.write_text(text, encoding="utf-8")
        else:
            sys.stdout.write(text)
    return 0


def _run_minimize_check(options: argparse.Namespace) -> int:
    is_minimal = True
    for path in options.files:
        for keys, value in redundant_keys(path).items():
            is_minimal = False
            sys.stderr.write(f"{path}: {'.'.join(keys)}: {value!r} is what the file inherits. Remove it.\n")
    if is_minimal:
        return 0
    sys.stderr.write("Run tools/config_cli.py minimize --in-place on these files.\n")
    return EXIT_NOT_MINIMAL


def _run_compare(options: argparse.Namespace) -> int:
    trees = [expand(path, is_resolved=not options.no_resolve) for path in (options.left, options.right)]
    for key, left, right in differences(*trees):
        sys.stdout.write(f"{key}: {_show(left)} -> {_show(right)}\n")
    return 0


def _run_validate(options: argparse.Namespace) -> int:
    status = 0
    for path in options.files:
        try:
            build_master_config(load_config(path))
        except ConfigError as err:
            sys.stderr.write(f"{path}: {err}\n")
            status = err.exit_code
    return status


def _show(value: Any) -> str:
    return "(absent)" if value is ... else repr(value)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: Command line without the program's name; None takes the process's.

    Returns:
        Exit status: 0, 1 when a file is not minimal, 2 for files that cannot be used.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="command")

    def add(name: str, run: Any, summary: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=summary, description=summary)
        command.set_defaults(run=run)
        return command

    command = add("expand", _run_expand, "print a file with its parents merged and every value resolved")
    command.add_argument("file", type=Path)
    command.add_argument("--no-resolve", action="store_true", help="keep ${...} as it is written")
    command.add_argument("--in-place", action="store_true", help="write the file instead of printing")
    command = add("minimize", _run_minimize, "remove the keys that a file's parents give already")
    command.add_argument("files", type=Path, nargs="+")
    command.add_argument("--in-place", action="store_true", help="write the files instead of printing")
    command = add("minimize-check", _run_minimize_check, "fail when `minimize` would change a file")
    command.add_argument("files", type=Path, nargs="+")
    command = add("compare", _run_compare, "list the keys in which two files differ once expanded")
    command.add_argument("left", type=Path)
    command.add_argument("right", type=Path)
    command.add_argument("--no-resolve", action="store_true", help="compare ${...} as it is written")
    command = add("validate", _run_validate, "check files against the schema")
    command.add_argument("files", type=Path, nargs="+")
    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except NemoRLError as err:
        sys.stderr.write(f"error: {err}\n")
        return err.exit_code


if __name__ == "__main__":
    sys.exit(main())
