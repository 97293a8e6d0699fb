"""Lay out lines and columns in the width of a terminal: the least important columns give way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.text import Text

from gateway.top.document import Document, number, text
from gateway.top.plain_text import cut, fit, plain

STRONG = "bold"
QUIET = "dim"
GOOD = "green"
WARNING = "yellow"
ERROR = "bold red"

Cell = tuple[str, str]
"""A text, and its style."""
_GAP = 2
_MOST_ROWS = 100_000


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its title, what a row of a document shows in it, and its least width.

    It grows to ``good`` before columns of a higher rank are shown, and to ``most`` if there is
    still room then.
    """

    title: str
    cell: Callable[[Document], Cell]
    width: int
    good: int = 0
    most: int = 0
    rank: int = 0
    """Columns with a higher rank give way first."""
    right: bool = False
    middle: bool = False
    """Cut texts in the middle."""


def said(name: str, style: str = "") -> Callable[[Document], Cell]:
    """Return what shows a text of a document."""
    return lambda document: (text(document, name), style)


def numeric(
    title: str,
    say: Callable[[float | None], str],
    name: str,
    rank: int = 0,
    width: int = 8,
    alarm: str = "",
) -> Column:
    """Return a column of a number; with ``alarm`` as its style, if that is not 0."""

    def cell(document: Document) -> Cell:
        value = number(document, name)
        return say(value), alarm if value else ""

    return Column(title, cell, width, rank=rank, right=True)


class Table:
    """The columns that a width has room for."""

    def __init__(self, columns: Sequence[Column], width: int) -> None:
        room = max(0, width - 1)  # a blank at the left
        widths: dict[int, int] = {}
        for rank in sorted({column.rank for column in columns}):
            tier = [index for index, column in enumerate(columns) if column.rank == rank]
            for index in tier:
                needed = columns[index].width + (_GAP if widths else 0)
                if widths and needed > room:
                    continue
                widths[index] = min(columns[index].width, room)
                room = max(0, room - needed)
            room = _grow(widths, {index: columns[index].good for index in tier}, room)
        _grow(widths, {index: column.most for index, column in enumerate(columns)}, room)
        self._columns = [(columns[index], widths[index]) for index in sorted(widths)]

    def heading(self) -> Text:
        """Return the titles."""
        return self._line([(column.title, STRONG) for column, _ in self._columns])

    def row(self, document: Document) -> Text:
        """Return what the columns show of a document."""
        return self._line([column.cell(document) for column, _ in self._columns])

    def _line(self, cells: Sequence[Cell]) -> Text:
        parts: list[Cell] = []
        for (column, width), (told, style) in zip(self._columns, cells, strict=True):
            parts.append((" " * (_GAP if parts else 1), ""))
            shown = fit(plain(told), width, right=column.right, middle=column.middle)
            parts.append((shown, style))
        return line(*parts)


def _grow(widths: dict[int, int], goals: Mapping[int, int], room: int) -> int:
    """Widen columns evenly towards their goals; return the room that is left."""
    while room > 0:
        growing = [index for index in widths if widths[index] < goals.get(index, 0)]
        if not growing:
            break
        for index in growing[:room]:
            more = min(max(1, room // len(growing)), goals[index] - widths[index])
            widths[index] += more
            room -= more
    return room


Row = Text | tuple[Table, Document]
"""A line, or what a table shows of a document."""


@dataclass(frozen=True, slots=True)
class Body:
    """The lines of a panel: fixed ones above, and rows that scroll, which are made when seen."""

    heading: Sequence[Text]
    rows: Sequence[Row]
    positions: Sequence[int] = ()
    """The position in the gateway's list of what each row shows; without it, that of the row."""

    def row(self, index: int) -> Text:
        """Return a row."""
        row = self.rows[index]
        return row if isinstance(row, Text) else row[0].row(row[1])


def line(*parts: Cell) -> Text:
    """Return a line of texts with their styles."""
    return Text.assemble(*parts, no_wrap=True, overflow="ignore")


def sentence(told: str, width: int, style: str = "") -> Text:
    """Return a line with a sentence."""
    return line((f" {cut(plain(told), max(0, width - 1))}", style))


def rows_of(table: Table, read: Sequence[Document], offset: int, total: int) -> list[Row]:
    """Return rows for a list of which the part from ``offset`` on was read; dots for the rest."""
    total = min(total, _MOST_ROWS)
    before = min(offset, total)
    rows: list[Row] = [(table, each) for each in read[: total - before]]
    wait = line((" …", QUIET))
    return [*[wait] * before, *rows, *[wait] * (total - before - len(rows))]
