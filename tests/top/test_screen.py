"""What is written to a terminal."""

from __future__ import annotations

import pyte
import pytest
from rich.text import Text

from gateway.top.screen import Painter, Screen

COLOURS = {"TERM": "xterm-256color"}


@pytest.mark.parametrize(
    ("environ", "painted"),
    [
        (COLOURS, b"\x1b[1;31ma\x1b[0m"),
        ({**COLOURS, "NO_COLOR": "1"}, b"\x1b[1ma\x1b[0m"),
        ({"TERM": "dumb"}, b"a"),
    ],
)
def test_colours_are_those_that_the_terminal_has(environ: dict[str, str], painted: bytes) -> None:
    assert Painter("utf-8", environ).paint(Text("a", "bold red")) == painted


@pytest.mark.parametrize("environ", [COLOURS, {**COLOURS, "FORCE_COLOR": "1"}])
def test_a_plain_page_has_no_escape_sequences(environ: dict[str, str]) -> None:
    assert Painter("utf-8", environ, plain=True).paint(Text("a", "bold red")) == b"a"


def test_a_terminal_without_unicode_gets_ascii() -> None:
    painter = Painter("ascii", {"TERM": "vt100"}, plain=True)
    assert painter.paint(Text("▁▄█ a…b × é 模")) == b"_-# a~b x ? ?"


def test_markup_and_emoji_names_stay_as_they_are() -> None:
    text = "[bold]x[/] :smile: http://a 123 " + "y" * 300
    assert Painter("utf-8", COLOURS).paint(Text(text)) == text.encode()


def test_only_changed_lines_are_written() -> None:
    written: list[bytes] = []
    screen = Screen(Painter("utf-8", COLOURS), written.append)
    terminal = pyte.Screen(10, 3)
    stream = pyte.ByteStream(terminal)

    def draw(*lines: str, size: tuple[int, int] = (10, 3)) -> bytes:
        written.clear()
        screen.draw([Text(line) for line in lines], size)
        data = b"".join(written)
        stream.feed(data)
        return data

    draw("one", "two", "three")
    assert [line.rstrip() for line in terminal.display] == ["one", "two", "three"]
    assert b"two" not in draw("one!", "two", "3")
    assert [line.rstrip() for line in terminal.display] == ["one!", "two", "3"]
    assert draw("one!", "two", "3") == b""
    assert b"two" in draw("one!", "two", "3", size=(11, 3))
    screen.forget()
    assert b"two" in draw("one!", "two", "3", size=(11, 3))
