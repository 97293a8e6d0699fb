"""YAML text → its node tree: capped, without tags, and with plain words for what is amiss."""

from typing import Any

import yaml
from yaml.nodes import Node
from yaml.reader import ReaderError

from gateway.settings.problems import UnreadableError
from gateway.settings.yaml.errors import at, translate

MAX_DEPTH = 32
"""How deep lists and mappings may nest; settings need 5."""

MAX_NODES = 10_000
"""How many keys and values a file may hold."""


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
                raise at(event.start_mark, f"*{event.anchor} stands inside what it names")
        elif event.tag is not None:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            raise at(event.start_mark, f"the tag {tag} is not supported")
        if len(self._open) == MAX_DEPTH:
            raise at(event.start_mark, f"nested deeper than {MAX_DEPTH} levels")
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise at(event.start_mark, f"more than {MAX_NODES} keys and values")
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
        raise translate(text, error) from None
    except (ValueError, OverflowError):
        # PyYAML hands escapes such as "\UFFFFFFFF" to chr() and long version numbers to int().
        raise at(composer.get_mark(), "not valid YAML: a number out of range") from None


def _unprintable(text: str, position: int) -> UnreadableError:
    before = text[:position]
    line, column = before.count("\n") + 1, position - before.rfind("\n")
    return UnreadableError(f"holds the unprintable character {text[position]!r}", line, column)
