"""The lines of a panel as text, and what holds for those of every panel."""

from __future__ import annotations

import re

from rich.cells import cell_len
from rich.text import Text

from gateway.top.panels.body import Body

_RAW = re.compile("[\x00-\x1f\x7f-\x9f\u0590-\u08ff\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff]")


def lines_of(body: Body) -> list[str]:
    """Return all lines of a panel, without blanks at their ends."""
    lines = [*body.heading, *map(body.row, range(body.count))]
    return [line.plain.rstrip() for line in lines]


def check_lines(lines: list[Text], width: int) -> None:
    """Check that nothing is wider than the terminal, or would be interpreted by it."""
    for line in lines:
        assert cell_len(line.plain) <= width, line.plain
        assert not _RAW.search(line.plain), line.plain


def check_body(body: Body, width: int) -> None:
    """Check all lines of a panel."""
    check_lines([*body.heading, *map(body.row, range(body.count))], width)
