"""Columns in the width of a terminal."""

import pytest
from rich.cells import cell_len

from gateway.top.table import Column, Layout, line

COLUMNS = (
    Column("Name", 6, 10, 20, middle=True),
    Column("Calls", 5, right=True),
    Column("p99", 5, rank=1, right=True),
    Column("Why", 4, 8, 30, rank=2),
)
CELLS = (("a-long-name-of-27-characters", "bold"), ("1/s", ""), ("2 ms", ""), ("because", "red"))


@pytest.mark.parametrize(
    ("width", "heading", "row"),
    [
        (14, " Name    Calls", " a-l…rs    1/s"),
        (18, " Name        Calls", " a-lon…ters    1/s"),
        (25, " Name        Calls    p99", " a-lon…ters    1/s   2 ms"),
        (31, " Name        Calls    p99  Why ", " a-lon…ters    1/s   2 ms  bec…"),
        (39, " Name           Calls    p99  Why      ", " a-long…acters    1/s   2 ms  because  "),
        (5, " Name", " a-…s"),
        (1, " ", " "),
    ],
)
def test_columns_of_a_higher_rank_give_way(width: int, heading: str, row: str) -> None:
    layout = Layout(COLUMNS, width)
    assert (layout.heading().plain, layout.row(CELLS).plain) == (heading, row)


def test_no_line_is_wider_than_the_terminal() -> None:
    for width in range(1, 120):
        layout = Layout(COLUMNS, width)
        cells = [("模型\x1b[2J" * 50, "")] * 4
        assert cell_len(layout.row(cells).plain) == cell_len(layout.heading().plain) <= width


def test_cells_keep_their_styles() -> None:
    spans = Layout(COLUMNS, 60).row(CELLS).spans
    assert [str(span.style) for span in spans] == ["bold", "red"]
    assert line(("a", ""), ("b", "red")).plain == "ab"
