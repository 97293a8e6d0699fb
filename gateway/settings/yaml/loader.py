"""YAML text → plain values, with the place of each in the file and ``${NAME}`` replaced.

Plain scalars are typed as YAML 1.2 does, in decimal notation only: ``yes``, ``on``, ``12:30`` and
``2024-01-01`` are text. Keys are always text.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from gateway.settings.problems import Problem, UnreadableError
from gateway.settings.values.wording import KeyPath, describe, format_path
from gateway.settings.yaml.environment import expand, is_reference
from gateway.settings.yaml.nodes import MAX_DEPTH, MAX_NODES, compose

INVALID: Final = object()
"""Stands for a value whose problem has been told already."""

_WORDS = {"~": None, "null": None, "true": True, "false": False}
_TYPED = {form: _WORDS[word] for word in _WORDS for form in (word, word.title(), word.upper())}
# Bounded digit counts keep int() and float() clear of their own limits.
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,17})")
_FLOAT = re.compile(r"[-+]?[0-9]{1,18}\.[0-9]{0,18}")


@dataclass(frozen=True, slots=True)
class Position:
    """Name a place in the file; line and column count from 1."""

    line: int
    column: int


@dataclass(frozen=True, slots=True)
class YamlDocument:
    """Hold the values of a file, where each was written, and what is wrong with them so far.

    A value in a mapping is placed at its key, an item of a list at itself. ``unquoted`` has what
    the values that are a reference in quotes would be without those. ``empty`` are the keys behind
    which nothing stands; ``ends`` has the last lines of values that take several.
    """

    value: object
    positions: Mapping[KeyPath, Position]
    problems: tuple[Problem, ...]
    unquoted: Mapping[KeyPath, object] = field(default_factory=dict)
    empty: tuple[KeyPath, ...] = ()
    ends: Mapping[KeyPath, int] = field(default_factory=dict)


def parse_yaml(text: str, environ: Mapping[str, str]) -> YamlDocument:
    """Return what the text says, with ``environ`` filled in. Raises UnreadableError."""
    root = compose(text)
    if root is None or root.value == "":
        raise UnreadableError("the file holds no settings")
    walk = _Walk(environ)
    value = walk.value(root, ())
    problems = tuple(walk.problems.values())
    return YamlDocument(
        value, walk.positions, problems, walk.unquoted, tuple(walk.empty), walk.ends
    )


@dataclass(slots=True)
class _Walk:
    environ: Mapping[str, str]
    positions: dict[KeyPath, Position] = field(default_factory=dict)
    # By place and message: an alias shows the same fault again.
    problems: dict[tuple[Position, str], Problem] = field(default_factory=dict)
    unquoted: dict[KeyPath, object] = field(default_factory=dict)
    empty: list[KeyPath] = field(default_factory=list)
    ends: dict[KeyPath, int] = field(default_factory=dict)
    seen: int = 0

    def value(self, node: Node, path: KeyPath) -> object:
        self._count(node)
        if len(path) > MAX_DEPTH:  # aliases of aliases can go deeper than the text does
            place = _place(node)
            raise UnreadableError(f"nested deeper than {MAX_DEPTH} levels", place.line)
        match node:
            case MappingNode():
                return self._mapping(node, path)
            case SequenceNode():
                return [self._item(item, (*path, i)) for i, item in enumerate(node.value)]
            case _:
                return self._scalar(node, path)

    def _item(self, node: Node, path: KeyPath) -> object:
        self.positions[path] = _place(node)
        return self.value(node, path)

    def _mapping(self, mapping: MappingNode, path: KeyPath) -> dict[str, object]:
        values: dict[str, object] = {}
        for key, node in self._entries(mapping, path):
            if key.value in values:
                continue  # an entry that is merged in gives way to those before it
            key_path = (*path, key.value)
            self.positions[key_path] = _place(key)
            values[key.value] = self.value(node, key_path)
        return values

    def _entries(self, root: MappingNode, path: KeyPath) -> Iterator[tuple[ScalarNode, Node]]:
        """Yield the mapping's own entries, then those merged in with ``<<``, in rank order."""
        todo: list[MappingNode] = [root]
        while todo:
            mapping = todo.pop()
            merged: list[MappingNode] = []
            own: dict[str, Position] = {}
            for key, node in mapping.value:
                self._count(key)
                if not self._usable(key, path, own):
                    continue
                if key.value == "<<" and key.style is None:
                    merged += self._merged(node, path)
                else:
                    yield key, node
            todo += reversed(merged)

    def _usable(self, key: Node, path: KeyPath, own: dict[str, Position]) -> bool:
        """Tell whether a key is text that its mapping does not hold yet."""
        place = _place(key)
        if not isinstance(key, ScalarNode):
            self._report(place, path, "a key must be plain text")
            return False
        if not key.value.isprintable():
            self._report(place, path, f"unprintable text in the key {describe(key.value)}")
            return False
        first = own.setdefault(key.value, place)
        if first is not place:
            lines = f"lines {first.line} and {place.line}"
            self._report(place, (*path, key.value), f"given twice, on {lines}")
        return first is place

    def _merged(self, node: Node, path: KeyPath) -> list[MappingNode]:
        nodes = node.value if isinstance(node, SequenceNode) else [node]
        mappings = [each for each in nodes if isinstance(each, MappingNode)]
        if len(mappings) < len(nodes):
            self._report(_place(node), (*path, "<<"), "expected keys and values to merge in")
        return mappings

    def _scalar(self, node: Node, path: KeyPath) -> object:
        written: str = node.value
        try:
            text = expand(written, self.environ)
        except ValueError as error:
            return self._report(_place(node), path, str(error))
        if not text.isprintable():
            return self._report(_place(node), path, f"unprintable text: {describe(text)}")
        if isinstance(node, ScalarNode) and node.style is not None:
            if is_reference(written) and not isinstance(_typed(text), str):
                self.unquoted[path] = _typed(text)
            return text
        if node.end_mark.line > node.start_mark.line:
            self.ends[path] = node.end_mark.line + 1
        if text:
            return _typed(text)
        if not written:
            self.empty.append(path)
        from_environment = f": {written} is empty" if written else ""
        return self._report(_place(node), path, f"no value is given{from_environment}")

    def _report(self, place: Position, path: KeyPath, message: str) -> object:
        problem = Problem(format_path(path), place.line, place.column, message)
        self.problems.setdefault((place, message), problem)
        return INVALID

    def _count(self, node: Node) -> None:
        self.seen += 1
        if self.seen > MAX_NODES:  # an alias counts as all that it stands for
            message = f"more than {MAX_NODES} keys and values"
            raise UnreadableError(message, _place(node).line)


def _place(node: Node) -> Position:
    return Position(node.start_mark.line + 1, node.start_mark.column + 1)


def _typed(text: str) -> object:
    if text in _TYPED:
        return _TYPED[text]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text
