"""Texts of others in a terminal: nothing in them is interpreted, and they fit their column."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text
from wcwidth import wcswidth, wcwidth

from gateway.top.plain_text import cut, fit, plain, width_of, wrap
from gateway.top.run import open_console
from tests.top.documents import HOSTILE, RAW


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("resnet50", "resnet50"),
        ("\x1b[2J\r\n", r"\x1b[2J\x0d\x0a"),
        ("\x9b31m", r"\x9b31m"),
        ("\u202egnp", r"\u202egnp"),
        ("שa", r"\u05e9a"),
        ("模型 é ü", "模型 é ü"),
        ("e\u0301", r"e\u0301"),
        ("👍🏽", r"👍\U0001f3fd"),
        ("🇫🇷", r"\U0001f1eb\U0001f1f7"),
        ("\ud800", r"\ud800"),
        ("a\u00a0b\u3000c", r"a\xa0b\u3000c"),
    ],
)
def test_characters_that_a_terminal_interprets_are_escaped(raw: str, shown: str) -> None:
    assert plain(raw) == shown


@given(st.one_of(st.text(), st.sampled_from(HOSTILE)))
def test_a_plain_text_is_as_wide_as_terminals_have_it(raw: str) -> None:
    shown = plain(raw)
    assert not RAW.search(shown)
    assert plain(shown) == shown
    assert width_of(shown) == wcswidth(shown)


def test_each_character_is_as_wide_as_terminals_have_it() -> None:
    # Newer versions of Unicode have characters that Python does not know: these are escaped.
    characters = filter(lambda each: len(plain(each)) == 1, map(chr, range(0x20400)))
    differing = [each for each in characters if width_of(each) != wcwidth(each)]
    assert [f"{ord(each):x}" for each in differing] == []


@given(st.one_of(st.text(), st.sampled_from(HOSTILE)), st.integers(0, 40), st.booleans())
def test_a_fitted_text_takes_exactly_its_column(raw: str, width: int, middle: bool) -> None:
    shown = plain(raw)
    assert width_of(fit(shown, width, middle=middle)) == width
    assert width_of(fit(shown, width, right=True)) == width


@pytest.mark.parametrize(
    ("text", "width", "middle", "expected"),
    [
        ("http://10.0.0.1:8000", 20, True, "http://10.0.0.1:8000"),
        ("http://10.0.0.1:8000", 11, True, "http:…:8000"),
        ("a sentence", 6, False, "a sen…"),
        ("abc", 1, False, "…"),
        ("abc", 0, True, ""),
        ("模型模型", 4, False, "模…"),
        ("模型模型", 5, True, "模…型"),
    ],
)
def test_a_cut_text_says_so(text: str, width: int, middle: bool, expected: str) -> None:
    assert cut(text, width, middle=middle) == expected


@pytest.mark.parametrize(
    ("text", "width", "most", "lines"),
    [
        ("", 10, 3, [""]),
        ("one two three", 20, 3, ["one two three"]),
        ("one two three", 8, 3, ["one two", "three"]),
        ("one two three four", 8, 2, ["one two", "three f…"]),
        ("x" * 25, 10, 3, ["x" * 10, "x" * 10, "x" * 5]),
        ("模型模", 1, 3, ["…"]),
    ],
)
def test_a_sentence_breaks_at_spaces(text: str, width: int, most: int, lines: list[str]) -> None:
    assert wrap(text, width, most) == lines


@pytest.mark.parametrize(
    ("environ", "plain", "encoding", "painted"),
    [
        ({}, False, "utf-8", b"\x1b[1;31m\xe2\x80\xa6[bold]x[/] :smile: 123\x1b[0m\n"),
        ({"NO_COLOR": "1"}, False, "utf-8", b"\x1b[1m\xe2\x80\xa6[bold]x[/] :smile: 123\x1b[0m\n"),
        ({"FORCE_COLOR": "1"}, True, "utf-8", b"\xe2\x80\xa6[bold]x[/] :smile: 123\n"),
        ({}, True, "ascii", b"~[bold]x[/] :smile: 123\n"),
    ],
)
def test_a_line_has_the_styles_and_the_characters_that_the_terminal_has(
    environ: dict[str, str],
    plain: bool,
    encoding: str,
    painted: bytes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(out, encoding))
    for name, value in {"TERM": "xterm-256color", "COLORTERM": "", **environ}.items():
        monkeypatch.setenv(name, value)
    open_console(plain=plain).print(Text("…[bold]x[/] :smile: 123", "bold red"))
    assert out.getvalue() == painted


def test_own_characters_have_substitutes_on_a_terminal_without_utf_8(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(out, "ascii"))
    open_console(plain=True).print("▁▂▃▄▅▆▇█ … – · → × ↑ ↓ é")
    assert out.getvalue() == b"_.:-=+*# ~ - | > x ^ v ?\n"
