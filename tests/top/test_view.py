"""Bytes of terminals as keys, and what these do."""

import pytest

from gateway.top.view import CALLS, ENDPOINTS, MODELS, OVERVIEW, KeyDecoder, View


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        ("q/é".encode(), ["q", "/", "é"]),
        (b"\x1b[A\x1b[B\x1bOC\x1bOD", ["up", "down", "right", "left"]),
        (b"\x1b[1;5A\x1b[5~\x1b[6~", ["up", "page up", "page down"]),
        (b"\x1b[H\x1b[F\x1b[1~\x1b[4~\x1bOH", ["home", "end", "home", "end", "home"]),
        (b"\t\x1b[Z\r\n\x7f\x15", ["tab", "back tab", "enter", "enter", "backspace", "clear"]),
        (b"\x03\x04", ["leave", "leave"]),
        (b"\x1b[200~x\x1b[15~y\x1b[99999;1Rz", ["x", "y", "z"]),
        (b"\x00\x1c\x1bx\xff", ["escape", "x", "\ufffd"]),
    ],
)
def test_keys_of_terminals(data: bytes, keys: list[str]) -> None:
    assert KeyDecoder().feed(data) == keys
    decoder = KeyDecoder()
    assert [key for byte in data for key in decoder.feed(bytes([byte]))] == keys
    assert not decoder.waits


def test_an_escape_character_alone_is_the_key_and_an_unfinished_sequence_is_none() -> None:
    decoder = KeyDecoder()
    for data, keys in ((b"\x1b", ["escape"]), (b"\x1b[1", [])):
        assert decoder.feed(data) == []
        assert decoder.waits
        assert decoder.flush() == keys
        assert not decoder.waits
    assert decoder.feed(b"\x1b[" + b"1" * 1000)[0] == "escape"
    assert not decoder.waits


def _pressed(*keys: str, view: View | None = None) -> View:
    view = view or View()
    for key in keys:
        view.press(key)
    return view


@pytest.mark.parametrize(
    ("keys", "panel"),
    [
        ("9x", OVERVIEW),
        ("43", MODELS),
        (("tab",), ENDPOINTS),
        (("right", "right"), MODELS),
        (("back tab",), CALLS),
        (("left", "tab"), OVERVIEW),
    ],
)
def test_keys_choose_the_panel(keys: tuple[str, ...], panel: str) -> None:
    assert _pressed(*keys).panel == panel


def test_keys_end_the_program_control_c_also_while_a_filter_is_typed() -> None:
    assert _pressed("q").left
    assert _pressed("Q").left
    assert _pressed("/", "leave").left
    assert not _pressed("/", "q").left


@pytest.mark.parametrize(
    ("keys", "top"),
    [
        (("down", "down", "up"), 1),
        (("j", "j", "k"), 1),
        (("up",), 0),
        (("page down",), 20),
        ((" ", "page up"), 0),
        (("end",), 80),
        (("G", "up"), 79),
        (("end", "home"), 0),
        (("end", "g"), 0),
    ],
)
def test_keys_scroll_within_the_rows(keys: tuple[str, ...], top: int) -> None:
    view = View(panel=ENDPOINTS)
    view.limit_scroll(100, 20)
    for key in keys:
        view.press(key)
        view.limit_scroll(100, 20)
    assert view.top == top
    _pressed("3", "down", "2", view=view)
    assert view.top == top  # each panel keeps its place
    view.limit_scroll(5, 20)
    assert view.top == 0  # fewer rows than before scroll back


def test_a_filter_is_typed_for_one_panel() -> None:
    view = _pressed("2", "down", "/", "q", "2", "é", "backspace")
    assert (view.filter, view.edits, view.panel, view.top) == ("q2", True, ENDPOINTS, 0)
    _pressed("enter", "3", view=view)
    assert (view.filter, view.edits) == ("", False)
    _pressed("2", view=view)
    assert view.filter == "q2"
    _pressed("escape", view=view)
    assert view.filter == ""


@pytest.mark.parametrize(
    ("keys", "text", "edits"),
    [
        (("a", "escape"), "", False),
        (("a", "clear"), "", True),
        (("a", "down"), "a", False),
        (("x",) * 300, "x" * 200, True),
    ],
)
def test_keys_edit_a_filter(keys: tuple[str, ...], text: str, edits: bool) -> None:
    view = _pressed("/", *keys)
    assert (view.filter, view.edits) == (text, edits)


def test_calls_stand_still_when_they_are_scrolled_or_paused() -> None:
    view = _pressed("4", "down")
    assert not view.follows
    _pressed("f", view=view)
    assert (view.follows, view.top) == (True, 0)
    assert not _pressed("f", view=view).follows
    assert _pressed("2", "down").follows
