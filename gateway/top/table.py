"""Lay out columns in the width of a terminal: the least important ones give way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.text import Text

from gateway.top.plain_text import fit, plain

Cell = tuple[str, str]
"""A text, and its style."""
HEADING = "bold"
_GAP = 2


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its title and its least width.

    It grows to ``good`` before columns of a higher rank are shown, and to ``most`` if there is
    still room then.
    """

    title: str
    width: int
    good: int = 0
    most: int = 0
    rank: int = 0
    """Columns with a higher rank give way first."""
    right: bool = False
    middle: bool = False
    """Cut texts in the middle."""


class Layout:
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
        self._indexes = sorted(widths)
        self._columns = [(columns[index], widths[index]) for index in self._indexes]

    def heading(self) -> Text:
        """Return the titles."""
        return self._line([(column.title, HEADING) for column, _ in self._columns])

    def row(self, cells: Sequence[Cell]) -> Text:
        """Return a row, from the cells of all columns."""
        return self._line([cells[index] for index in self._indexes])

    def _line(self, cells: Sequence[Cell]) -> Text:
        parts: list[Cell] = [(" ", "")]
        for position, (text, style) in enumerate(cells):
            column, width = self._columns[position]
            if position:
                parts.append((" " * _GAP, ""))
            shown = fit(plain(text), width, right=column.right, middle=column.middle)
            parts.append((shown, style))
        return line(*parts)


def line(*parts: Cell) -> Text:
    """Return a line of texts with their styles."""
    return Text.assemble(*parts, no_wrap=True, overflow="ignore", end="")


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
