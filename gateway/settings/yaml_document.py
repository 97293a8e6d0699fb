"""YAML text → plain values, with the position of each in the file and ``${NAME}`` replaced.

Plain scalars are typed as YAML 1.2 does, in decimal notation only: ``yes``, ``on``, ``12:30`` and
``2024-01-01`` are text. Keys are always text. No YAML tag is ever constructed. PyYAML's errors
become messages that say what to change, and in which line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from yaml.reader import ReaderError

from gateway.settings.problems import INDENTATION, Problem, UnreadableError
from gateway.settings.values.wording import KeyPath, describe, format_path, spaces

_SEARCHED = 500  # characters of a line that are looked at
_ABOVE = 1000  # lines above an error that are looked at

# PyYAML's words for errors that mostly are of indentation.
_MAY_BE_INDENTATION = re.compile(
    r"mapping values are not|expected <block end>|expected '-'|could not find expected ':'"
    r"|sequence entries are not|character '\\[tx]"
)
# PyYAML's words → our message, and whether it points to the beginning of the construct.
_REWORDED = (
    ("mapping values are not", "a : where none is expected; check indentation and quotes", False),
    ("expected <block end>", "does not fit what is above; check indentation and quotes", False),
    ("could not find expected ':'", "a : is missing behind the key that begins here", True),
    ("cannot start any|alphabetic or num", "text that begins with {sign} needs quotes", True),
    ("expected ',' or", "the bracket is not closed, or lacks a comma", True),
    ("unexpected end of stream", "the quotes are not closed", True),
    ("another document", "a second document begins; a settings file holds one", False),
)
# What operators forget to quote.
_UNQUOTED = (
    (r"[\[{,][^\"']*\$\{", "${...} inside [ ] or { } needs quotes"),
    (r"\[[0-9A-Fa-f]*:[0-9A-Fa-f:]*\]", "an address in [ ] needs quotes"),
)
_KEY = r"(?P<key>[A-Za-z_][\w.-]*)"
_NO_SPACE = re.compile(_KEY + r":(?!//)[^\s].*")
_EQUALS = re.compile(_KEY + r"\s*=.*")

MAX_DEPTH = 32
"""How deep lists and mappings may nest; settings need 5."""

MAX_NODES = 10_000
"""How many keys and values a file may hold; an alias counts as all that it stands for."""

INVALID: Final = object()
"""Stands for a value whose problem is reported already."""

_CONSTANTS = {"~": None, "null": None, "true": True, "false": False}
_TYPED = {
    form: _CONSTANTS[word] for word in _CONSTANTS for form in (word, word.title(), word.upper())
}
# Bounded digit counts keep int() and float() clear of their own limits.
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,17})")
_FLOAT = re.compile(r"[-+]?[0-9]{1,18}\.[0-9]{0,18}")

# ``$${`` comes first: it is how a plain ``${`` is written.
_REFERENCE = re.compile(r"\$\$\{|\$\{(?P<body>[^}]*)\}|\$\{")
_REFERENCE_BODY = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>.*))?", re.DOTALL)


class Position(NamedTuple):
    """Name a position in the file; line and column count from 1."""

    line: int
    column: int


def parse_yaml(text: str, environ: Mapping[str, str]) -> YamlDocument:
    """Return the values of a YAML text, with ``environ`` filled in. Raises UnreadableError."""
    root = _compose(text)
    if root is None or root.value == "":
        raise UnreadableError("the file holds no settings")
    document = YamlDocument(environ)
    document.value = document.read(root, ())
    return document


class _Composer(yaml.BaseLoader):
    """Compose nodes with the guards that PyYAML lacks."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._open: list[str | None] = []  # the anchors of the nodes that are being composed
        self._nodes = 0

    def compose_node(self, parent: Node | None, index: int) -> Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            if event.anchor in self._open:
                raise error_at(event.start_mark, f"*{event.anchor} stands inside what it names")
        elif event.tag is not None:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            raise error_at(event.start_mark, f"the tag {tag} is not supported")
        if len(self._open) == MAX_DEPTH:
            raise error_at(event.start_mark, f"nested deeper than {MAX_DEPTH} levels")
        self._nodes += 1
        if self._nodes > MAX_NODES:  # composing half a million of them takes ten seconds
            raise error_at(event.start_mark, f"more than {MAX_NODES} keys and values")
        self._open.append(event.anchor)
        node = super().compose_node(parent, index)
        self._open.pop()
        return node


def _compose(text: str) -> Node | None:
    """Return the root node of the one document in the text; None if it holds nothing.

    Aliases are shared nodes, so the tree is never larger than the text. Raises UnreadableError.
    """
    try:
        composer = _Composer(text)
    except ReaderError as error:
        raise _unprintable(text, error.position) from None
    try:
        return composer.get_single_node()
    except yaml.MarkedYAMLError as error:
        raise translate(text, error) from None
    except (ValueError, OverflowError):
        # PyYAML hands escapes such as "\UFFFFFFFF" to chr() and long version numbers to int().
        raise error_at(composer.get_mark(), "not valid YAML: a number out of range") from None


def _unprintable(text: str, offset: int) -> UnreadableError:
    before = text[:offset]
    line, column = before.count("\n") + 1, offset - before.rfind("\n")
    return UnreadableError(f"holds the unprintable character {text[offset]!r}", line, column)


@dataclass(slots=True)
class YamlDocument:
    """Turns nodes into values, and collects where each was written, and the problems.

    A value in a mapping has the position of its key, an item of a list its own. ``unquoted`` has
    what a reference in quotes would be without the quotes. ``empty`` lists the keys without a
    value. ``ends`` has the last line of each value that takes several lines.
    """

    environ: Mapping[str, str]
    value: object = None
    positions: dict[KeyPath, Position] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    unquoted: dict[KeyPath, object] = field(default_factory=dict)
    empty: list[KeyPath] = field(default_factory=list)
    ends: dict[KeyPath, int] = field(default_factory=dict)
    _reported: set[tuple[Position, str]] = field(default_factory=set)
    """Positions with messages: an alias shows the same error again."""
    _seen: int = 0

    def read(self, node: Node, path: KeyPath) -> object:
        """Return the value of a node at a path."""
        self._count(node)
        if len(path) > MAX_DEPTH:  # aliases of aliases can go deeper than the text does
            raise UnreadableError(f"nested deeper than {MAX_DEPTH} levels", _position(node).line)
        match node:
            case MappingNode():
                return self._mapping(node, path)
            case SequenceNode():
                return [self._item(item, (*path, i)) for i, item in enumerate(node.value)]
            case _:
                return self._scalar(node, path)

    def _item(self, node: Node, path: KeyPath) -> object:
        self.positions[path] = _position(node)
        return self.read(node, path)

    def _mapping(self, mapping: MappingNode, path: KeyPath) -> dict[str, object]:
        values: dict[str, object] = {}
        for key, node in self._entries(mapping, path):
            if key.value in values:
                continue  # an entry that is merged in gives way to those before it
            key_path = (*path, key.value)
            self.positions[key_path] = _position(key)
            values[key.value] = self.read(node, key_path)
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
                if not self._is_usable(key, path, own):
                    continue
                if key.value == "<<" and key.style is None:
                    merged += self._merged(node, path)
                else:
                    yield key, node
            todo += reversed(merged)

    def _is_usable(self, key: Node, path: KeyPath, own: dict[str, Position]) -> bool:
        """Check that a key is text, and that its mapping does not hold it yet."""
        position = _position(key)
        if not isinstance(key, ScalarNode):
            self._report(position, path, "a key must be plain text")
            return False
        if not key.value.isprintable():
            self._report(position, path, f"unprintable text in the key {describe(key.value)}")
            return False
        first = own.setdefault(key.value, position)
        if first is not position:
            lines = f"lines {first.line} and {position.line}"
            self._report(position, (*path, key.value), f"given twice, on {lines}")
        return first is position

    def _merged(self, node: Node, path: KeyPath) -> list[MappingNode]:
        nodes = node.value if isinstance(node, SequenceNode) else [node]
        mappings = [each for each in nodes if isinstance(each, MappingNode)]
        if len(mappings) < len(nodes):
            self._report(_position(node), (*path, "<<"), "expected keys and values to merge in")
        return mappings

    def _scalar(self, node: Node, path: KeyPath) -> object:
        written: str = node.value
        try:
            text = expand(written, self.environ)
        except ValueError as error:
            return self._report(_position(node), path, str(error))
        if not text.isprintable():
            return self._report(_position(node), path, f"unprintable text: {describe(text)}")
        if isinstance(node, ScalarNode) and node.style is not None:
            if _is_reference(written) and not isinstance(_typed(text), str):
                self.unquoted[path] = _typed(text)
            return text
        if node.end_mark.line > node.start_mark.line:
            self.ends[path] = node.end_mark.line + 1
        if text:
            return _typed(text)
        if not written:
            self.empty.append(path)
        from_environment = f": {written} is empty" if written else ""
        return self._report(_position(node), path, f"no value is given{from_environment}")

    def _report(self, position: Position, path: KeyPath, message: str) -> object:
        if (position, message) not in self._reported:
            self._reported.add((position, message))
            self.problems.append(Problem(format_path(path), *position, message))
        return INVALID

    def _count(self, node: Node) -> None:
        self._seen += 1
        if self._seen > MAX_NODES:
            message = f"more than {MAX_NODES} keys and values"
            raise UnreadableError(message, _position(node).line)


def _position(node: Node) -> Position:
    return Position(node.start_mark.line + 1, node.start_mark.column + 1)


def _typed(text: str) -> object:
    if text in _TYPED:
        return _TYPED[text]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


def expand(text: str, environ: Mapping[str, str]) -> str:
    """Return the text with each ``${NAME}`` replaced by the environment's value.

    As in a shell, the default of ``${NAME:-default}`` also replaces an empty variable. ``$${``
    gives ``${``. A value from the environment is not searched for references again. Raises
    ValueError with the names of all variables that are neither set nor have a default.
    """
    unset: list[str] = []

    def replace(reference: re.Match[str]) -> str:
        if reference[0] == "$${":
            return "${"
        name, default = _name_and_default(reference)
        value = environ.get(name)
        if default is not None:
            return value or default
        if value is None:
            unset.append(name)
        return value or ""

    expanded = _REFERENCE.sub(replace, text)
    if unset:
        names, verb = ", ".join(dict.fromkeys(unset)), "is" if len(set(unset)) == 1 else "are"
        raise ValueError(f"{names} {verb} not set in the environment, and no default is given")
    return expanded


def _is_reference(text: str) -> bool:
    """Tell whether a text is one reference and nothing else."""
    found = _REFERENCE.fullmatch(text)
    return found is not None and found["body"] is not None


def _name_and_default(reference: re.Match[str]) -> tuple[str, str | None]:
    if reference["body"] is None:
        raise ValueError("a ${ without its }; write $${ for the characters themselves")
    if "${" in reference["body"]:
        raise ValueError("one ${...} cannot stand inside another")
    found = _REFERENCE_BODY.fullmatch(reference["body"])
    if found is None:
        raise ValueError(f"expected ${{NAME}} or ${{NAME:-default}}, got {describe(reference[0])}")
    return found["name"], found["default"]


def translate(text: str, error: yaml.MarkedYAMLError) -> UnreadableError:
    """Return the message and position for an error of PyYAML."""
    lines = [line[:_SEARCHED] for line in text.splitlines()]
    marks = [mark for mark in (error.problem_mark, error.context_mark) if mark is not None]
    # There is no line at the end of the text.
    mark = next((mark for mark in marks if mark.line < len(lines)), marks[0] if marks else None)
    problem = error.problem or "cannot be read"
    line = lines[mark.line] if mark and mark.line < len(lines) else ""
    for pattern, message in _UNQUOTED:
        if re.search(pattern, line):
            return error_at(mark, message)
    if mark and line and _MAY_BE_INDENTATION.search(problem):
        found = _line_error(lines, mark.line, error)
        if found is not None:
            return found
    for pattern, message, at_start in _REWORDED:
        if re.search(pattern, problem):
            shown = (at_start and error.context_mark) or mark
            return error_at(shown, message.format(sign=_sign_at(lines, shown)))
    return error_at(mark, f"not valid YAML: {problem}")


def error_at(mark: Any, message: str, kind: str = "") -> UnreadableError:
    """Return an error at a mark of PyYAML, if there is one."""
    if mark is None:
        return UnreadableError(message)
    return UnreadableError(message, mark.line + 1, mark.column + 1, kind)


def _sign_at(lines: Sequence[str], mark: Any) -> str:
    line = lines[mark.line] if mark and mark.line < len(lines) else ""
    sign = line[mark.column] if mark and mark.column < len(line) else ""
    return sign if sign.isprintable() and sign.strip() else "this sign"


def _line_error(
    lines: Sequence[str], number: int, error: yaml.MarkedYAMLError
) -> UnreadableError | None:
    """Return the error in the indentation of a line, or in a colon above it."""
    line = lines[number]
    lead = line[: len(line) - len(line.lstrip())]
    odd = lead.strip(" ")[:1]
    if odd:
        sign = "a tab" if odd == "\t" else f"U+{ord(odd):04X}"
        message = f"indented with {sign}; YAML indents with spaces only"
        return UnreadableError(message, number + 1, 1, INDENTATION)
    colon = _colon_error(lines, error)
    if colon is not None:
        return UnreadableError(colon[1], colon[0] + 1)
    found = _indentation_error(lines[:number], line)
    return UnreadableError(found, number + 1, len(lead) + 1, INDENTATION) if found else None


def _indentation_error(above: Sequence[str], line: str) -> str | None:
    """Return the message for wrong indentation of a line, if it is wrong."""
    own, levels = len(line) - len(line.lstrip()), _levels(above[-_ABOVE:])
    if not levels or line.startswith("-", own):
        known = [level for level, is_item in levels if is_item or level == own]
        return _unless_one_of(own, known[-1:], "items of one list") if known else None
    if (own, True) in levels and (own, False) not in levels:
        below = next(level for level, is_item in levels if level > own)
        return (
            f"indented by {spaces(own)}, as the - of the item above;"
            f" what belongs to the item is indented by {below}"
        )
    return _unless_one_of(own, [level for level, _ in levels], "keys of one section")


def _unless_one_of(own: int, levels: Sequence[int], what: str) -> str | None:
    """Return the message for an indentation that is none of the open levels."""
    if own in levels:
        return None
    same = f"{what} have the same indentation"
    return f"indented by {spaces(own)}, but the lines above by {levels[-1]}; {same}"


def _levels(lines: Sequence[str]) -> list[tuple[int, bool]]:
    """Return the indentations that are open after some lines, and whether each is that of a -."""
    levels: list[tuple[int, bool]] = []
    for line in lines:
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        indent = len(line) - len(line.lstrip(" "))
        levels = [level for level in levels if level[0] < indent]
        while text.startswith("- "):
            levels.append((indent, True))
            inner = text[2:].lstrip()
            indent, text = indent + len(text) - len(inner), inner
        levels.append((indent, text == "-"))
    return levels


def _colon_error(lines: Sequence[str], error: yaml.MarkedYAMLError) -> tuple[int, str] | None:
    """Return the line that lacks a colon or the space behind it, and the message."""
    problem = error.problem or ""
    start = error.context_mark if "expected ':'" in problem else None
    mark = start or error.problem_mark
    if mark is None or not re.search("mapping values|expected ':'", problem):
        return None
    numbers = [mark.line] if start else range(mark.line - 1, -1, -1)
    for number in numbers:
        text = lines[number].strip()
        if text and not text.startswith("#"):
            found = _colon_message(text)
            return (number, found) if found else None
    return None


def _colon_message(text: str) -> str | None:
    # No value is quoted: it may be an API key.
    if found := _NO_SPACE.fullmatch(text):
        return f"a space is missing behind {found['key']}:"
    if found := _EQUALS.fullmatch(text):
        return f"{found['key']} is followed by =, where YAML has a colon and a space"
    if ":" not in text and re.match(_KEY, text):
        return "a : is missing in this line"
    return None
