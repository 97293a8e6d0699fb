"""What a panel shows: fixed lines above, and rows that scroll."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.text import Text

from gateway.top.plain_text import cut, plain
from gateway.top.table import line

STRONG = "bold"
QUIET = "dim"
GOOD = "green"
WARNING = "yellow"
ERROR = "bold red"


@dataclass(frozen=True, slots=True)
class Body:
    """The lines of a panel; rows are made when they are to be seen."""

    heading: Sequence[Text]
    count: int
    row: Callable[[int], Text]
    first: Callable[[int], int] = lambda row: row
    """The position in the gateway's list of what a row shows."""


def body_of(lines: Sequence[Text], heading: Sequence[Text] = ()) -> Body:
    """Return a body of lines that are there already."""
    return Body(heading, len(lines), lines.__getitem__)


def sentence(text: str, width: int, style: str = "") -> Text:
    """Return a line with a sentence."""
    return line((f" {cut(plain(text), max(0, width - 1))}", style))
