"""YAML text → its node tree: capped, without tags, and with plain words for what is amiss."""

import re
from typing import Any

import yaml
from yaml.nodes import Node
from yaml.reader import ReaderError

from gateway.settings.problems import UnreadableError

MAX_DEPTH = 32
"""How deep lists and mappings may nest; settings need 5."""

MAX_NODES = 10_000
"""How many keys and values a file may hold."""

_SEARCHED = 500  # characters of a line that are looked at for what needs quotes

# PyYAML's words → an operator's, and whether the fault is better shown where its construct begins.
_REWORDED = (
    ("mapping values are not", "a : where none is expected; check indentation and quotes", False),
    ("expected <block end>", "does not fit what is above; check indentation and quotes", False),
    (r"character '\\t'", "a tab before the text; YAML indents with spaces only", False),
    ("cannot start any|alphabetic or num", "text that begins with this sign needs quotes", False),
    ("expected ',' or", "the bracket is not closed, or lacks a comma", True),
    ("unexpected end of stream", "the quotes are not closed", True),
    ("another document", "a second document begins; a settings file holds one", False),
)
# What operators forget to quote, as it stands in the line that YAML then cannot read.
_UNQUOTED = (
    (r"[\[{,][^\"']*\$\{", "${...} inside [ ] or { } needs quotes"),
    (r"\[[0-9A-Fa-f]*:[0-9A-Fa-f:]*\]", "an address in [ ] needs quotes"),
)


class _Composer(yaml.BaseLoader):
    """Compose nodes with the guards that PyYAML lacks; no YAML value is ever constructed."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._open: list[str | None] = []  # the anchors of the nodes that are being composed
        self._nodes = 0

    def compose_node(self, parent: Node | None, index: int) -> Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            if event.anchor in self._open:
                raise _fault(f"*{event.anchor} stands inside what it names", event.start_mark)
        elif event.tag is not None:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            raise _fault(f"the tag {tag} is not supported", event.start_mark)
        if len(self._open) == MAX_DEPTH:
            raise _fault(f"nested deeper than {MAX_DEPTH} levels", event.start_mark)
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise _fault(f"more than {MAX_NODES} keys and values", event.start_mark)
        self._open.append(event.anchor)
        node = super().compose_node(parent, index)
        self._open.pop()
        return node


def compose(text: str) -> Node | None:
    """Return the root node of the one document in the text; None if it holds nothing.

    Aliases are shared nodes, so that the tree is never larger than the text. Raises
    UnreadableError with line and column.
    """
    try:
        composer = _Composer(text)
    except ReaderError as error:
        raise _unprintable(text, error.position) from None
    try:
        return composer.get_single_node()
    except yaml.MarkedYAMLError as error:
        raise _reworded(text, error) from None
    except (ValueError, OverflowError):
        # PyYAML hands escapes such as "\UFFFFFFFF" to chr() and long version numbers to int().
        raise _fault("not valid YAML: a number out of range", composer.get_mark()) from None


def _fault(message: str, mark: Any) -> UnreadableError:
    if mark is None:
        return UnreadableError(message)
    return UnreadableError(message, mark.line + 1, mark.column + 1)


def _reworded(text: str, error: yaml.MarkedYAMLError) -> UnreadableError:
    problem = error.problem or "cannot be read"
    mark = error.problem_mark or error.context_mark
    line = text.splitlines()[mark.line : mark.line + 1] if mark else []
    for pattern, message in _UNQUOTED:
        if line and re.search(pattern, line[0][:_SEARCHED]):
            return _fault(message, mark)
    for pattern, message, at_start in _REWORDED:
        if re.search(pattern, problem):
            return _fault(message, (at_start and error.context_mark) or mark)
    return _fault(f"not valid YAML: {problem}", mark)


def _unprintable(text: str, position: int) -> UnreadableError:
    before = text[:position]
    line, column = before.count("\n") + 1, position - before.rfind("\n")
    return UnreadableError(f"holds the unprintable character {text[position]!r}", line, column)
