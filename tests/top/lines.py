"""Lines as a terminal shows them, and what holds for all of them."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from gateway.top.table import Body

_RAW = re.compile("[\x00-\x1f\x7f-\x9f\u0590-\u08ff\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff]")


def check_lines(lines: Sequence[Text], width: int) -> list[str]:
    """Return lines as they are shown; check that a terminal interprets nothing in them.

    Those that rich has to cut, as they are wider, are those of a very narrow terminal.
    """
    console = Console(file=io.StringIO(), width=width, color_system=None)
    for line in lines:
        assert cell_len(line.plain) <= max(width, 32), line.plain
        assert not _RAW.search(line.plain), line.plain
        assert len(console.render_lines(line, pad=False)) == 1
    return [line.plain.rstrip() for line in lines]


def lines_of(body: Body, width: int) -> list[str]:
    """Return all lines of a panel, without blanks at their ends."""
    return check_lines([*body.heading, *map(body.row, range(len(body.rows)))], width)
