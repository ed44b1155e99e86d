"""What a rule of a migration is: their keys, ours, how a value is translated, and what is said when it is not.

`from_nemo_rl.py` and `from_verl_speco.py` hold the rules, grouped by rows of the table in docs/migrating.md;
`engine.py` applies them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

Key = tuple[str, ...]
"""Parts of a key; a part of a free-form block may hold dots."""


@dataclass(frozen=True)
class Put:
    """Keys of ours that follow from a key of theirs.

    Attributes:
        values: dotted key of ours to value.
        note: what differs in meaning; empty = nothing.
    """

    values: Mapping[str, Any]
    note: str = ""


@dataclass(frozen=True)
class Drop:
    """The key is left out.

    Attributes:
        reason: why, one sentence.
    """

    reason: str


@dataclass(frozen=True)
class Ask:
    """The key is left out, and the user has to decide what stands in for it.

    Attributes:
        reason: what to decide, and which key of ours it is.
    """

    reason: str


@dataclass(frozen=True)
class Nothing:
    """Leaving the key out loses nothing: it is switched off, or another key says the same."""


NOTHING = Nothing()

Outcome = Put | Drop | Ask | Nothing


@dataclass(frozen=True)
class Source:
    """Their configuration, flattened.

    Attributes:
        values: key to value, interpolations resolved; a leaf is anything but a mapping with keys.
        raw: the same as it is written, for keys whose value is an interpolation.
        unresolved: keys without a value (`???`, or an interpolation that names nothing), with the reason.
    """

    values: Mapping[Key, Any]
    raw: Mapping[Key, str] = field(default_factory=dict)
    unresolved: Mapping[Key, str] = field(default_factory=dict)

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value by its dotted key."""
        return self.values.get(tuple(key.split(".")), default)


@dataclass(frozen=True)
class Entry:
    """One key of theirs, as a translation sees it.

    Attributes:
        key: dotted.
        value: resolved.
        source: the whole configuration.
    """

    key: str
    value: Any
    source: Source

    @property
    def name(self) -> str:
        """Last part of the key."""
        return self.key.rsplit(".", 1)[-1]


@dataclass(frozen=True)
class Rule:
    """What becomes of some keys of theirs. The first rule that matches a key decides.

    Attributes:
        theirs: keys, or patterns of keys (`*` also matches dots).
        ours: keys that the rule can write. Equal to `theirs` = the key keeps its name; a pattern then applies only
            where the schema has that name. Empty without a `read` = the key is left out.
        read: the translation: a value for the first of `ours`, or an outcome; None = the value as it is.
        says: why the key is left out.
        off: values that may be left out without loss.
        live: whether the keys have an effect at all; None = yes.
        quiet: the keys need no word whatever their values.
    """

    theirs: tuple[str, ...]
    ours: tuple[str, ...] = ()
    read: Callable[[Entry], Any] | None = None
    says: str = ""
    off: tuple[Any, ...] = ()
    live: Callable[[Source], bool] | None = None
    quiet: bool = False

    def pattern_of(self, key: str) -> str | None:
        """Return the first of the patterns that matches a dotted key."""
        return next((pattern for pattern in self.theirs if fnmatchcase(key, pattern)), None)

    def outcome(self, entry: Entry) -> Outcome:
        """Say what becomes of one key.

        Args:
            entry: the key; `pattern_of` matches it.

        Returns:
            What is written, or why nothing is.
        """
        if self.quiet or (self.live is not None and not self.live(entry.source)) or is_among(entry.value, self.off):
            return NOTHING
        if self.read is not None:
            found = self.read(entry)
            return found if isinstance(found, Outcome) else Put({self.ours[0]: found})
        if not self.ours:
            return Drop(self.says)
        return Put({entry.key if self.ours == self.theirs else self.ours[0]: entry.value})


@dataclass(frozen=True)
class Row:
    """A row of the table in docs/migrating.md.

    Attributes:
        theirs: the left cell.
        ours: the right cell.
        rules: what the row says, as rules; none for what stands in no configuration file.
    """

    theirs: str
    ours: str
    rules: tuple[Rule, ...] = ()


@dataclass(frozen=True)
class Project:
    """Everything about one project.

    Attributes:
        name: as the command line has it.
        title: as sentences have it.
        rows: the table.
        expected: keys of theirs that every configuration should hold, each with the key of ours that it decides.
        has_defaults_of_hydra: `defaults` is Hydra's list of groups instead of paths of parents.
    """

    name: str
    title: str
    rows: tuple[Row, ...]
    expected: Mapping[str, str]
    has_defaults_of_hydra: bool

    @property
    def rules(self) -> tuple[Rule, ...]:
        """All rules, in the order in which they are tried."""
        return tuple(rule for row in self.rows for rule in row.rules)

    def table(self) -> str:
        """The table in Markdown."""
        lines = [f"| {self.title} | here |", "|---|---|", *(f"| {row.theirs} | {row.ours} |" for row in self.rows)]
        return "\n".join(lines)


def is_among(value: Any, values: Sequence[Any]) -> bool:
    """Tell whether a value is one of several; `1` and `true` are different values."""
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in values)


def same(*keys: str, live: Callable[[Source], bool] | None = None) -> Rule:
    """A rule for keys that have the same name here, as far as the schema has them."""
    return Rule(theirs=keys, ours=keys, live=live)


def moved(theirs: str, ours: str, *, off: tuple[Any, ...] = (), live: Callable[[Source], bool] | None = None) -> Rule:
    """A rule for a key that has another name here."""
    return Rule(theirs=(theirs,), ours=(ours,), off=off, live=live)


def left_out(*theirs: str, says: str, off: tuple[Any, ...] = (), live: Callable[[Source], bool] | None = None) -> Rule:
    """A rule for keys without a counterpart."""
    return Rule(theirs=theirs, says=says, off=off, live=live)


def asked(*theirs: str, says: str, off: tuple[Any, ...] = (), live: Callable[[Source], bool] | None = None) -> Rule:
    """A rule for keys whose counterpart the user has to choose."""
    return Rule(theirs=theirs, read=lambda entry: Ask(says), says=says, off=off, live=live)


def nothing_to_set(*theirs: str) -> Rule:
    """A rule for keys that no one misses."""
    return Rule(theirs=theirs, quiet=True)


def is_on(key: str) -> Callable[[Source], bool]:
    """A switch: whether a key of theirs holds anything but null, false, 0 and the empty text."""
    return lambda source: bool(source.get(key))


def nested(values: Mapping[Key, Any]) -> dict[str, Any]:
    """Build a tree from leaves."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        node = tree
        for part in key[:-1]:
            node = node.setdefault(part, {})
        node[key[-1]] = value
    return tree


def leaves(tree: Mapping[str, Any], above: Key = ()) -> Iterator[tuple[Key, Any]]:
    """List the leaves of a tree: everything but mappings with keys."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, (*above, name))
        else:
            yield (*above, name), value
