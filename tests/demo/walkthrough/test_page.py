import io
import re

import pytest

from gateway.demo.walkthrough.page import WIDTH, Page, milliseconds, summarize_json


def page_text(*, color: bool) -> str:
    out = io.StringIO()
    page = Page(out, color=color)
    page.title("A title", "its side")
    page.row("label", "long " * 100, "good")
    page.details(["one\x1b[31m\ntwo"])
    page.bars("time", {"fast": 0.001, "slow": 0.2})
    return out.getvalue()


def test_page_without_color_has_no_control_characters() -> None:
    assert all(c.isprintable() or c == "\n" for c in page_text(color=False))


def test_color_does_not_change_the_text() -> None:
    coloured = page_text(color=True)
    assert "\x1b[32m" in coloured
    plain = [re.sub(r"\x1b\[[0-9]*m", "", line).rstrip() for line in coloured.splitlines()]
    assert plain == page_text(color=False).splitlines()


def test_lines_fit_the_page() -> None:
    assert max(map(len, page_text(color=False).splitlines())) <= WIDTH


def test_the_longest_time_has_the_longest_bar() -> None:
    fast, slow = page_text(color=False).splitlines()[-2:]
    assert 1 <= fast.count("█") < slow.count("█")


def test_unencodable_characters_become_question_marks() -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    Page(out, color=False).bars("time", {"x": 1.0})
    assert b"1000.0 ms  ???" in raw.getvalue()


@pytest.mark.parametrize(("seconds", "text"), [(0.00004, "0.04 ms"), (0.1234, "123.4 ms")])
def test_milliseconds_are_formatted(seconds: float, text: str) -> None:
    assert milliseconds(seconds) == text


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (
            '{"inputs":[{"name":"x","datatype":"FP32","shape":[2,3],"data":[0.1,1,2,3,4,5]}]}',
            ["x  FP32 [2,3]  data [0.1, 1, 2, … 6 in all]"],
        ),
        (
            '{"outputs":[{"name":"x","datatype":"BYTES","shape":[1],'
            '"parameters":{"binary_data_size":1234}}]}',
            ["x  BYTES [1]  binary_data_size 1,234"],
        ),
        ('{"error":"no"}', ['{"error": "no"}']),
        ("[1]", ["[1]"]),
        ('{"cut":', ['{"cut":']),
        ("", []),
    ],
)
def test_json_is_summarized(text: str, lines: list[str]) -> None:
    assert summarize_json(text) == lines
