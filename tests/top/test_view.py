"""What keys do."""

import pytest

from gateway.top.keys import Key, Pressed
from gateway.top.view import CALLS, ENDPOINTS, MODELS, OVERVIEW, View


def _pressed(*keys: Pressed, view: View | None = None) -> View:
    view = view or View()
    for key in keys:
        view.press(key)
    return view


@pytest.mark.parametrize(
    ("keys", "panel"),
    [
        ("", OVERVIEW),
        ("2", ENDPOINTS),
        ("43", MODELS),
        ((Key.TAB,), ENDPOINTS),
        ((Key.RIGHT, Key.RIGHT), MODELS),
        ((Key.BACK_TAB,), CALLS),
        ((Key.LEFT, Key.TAB), OVERVIEW),
        ("9x", OVERVIEW),
    ],
)
def test_keys_choose_the_panel(keys: tuple[Pressed, ...], panel: str) -> None:
    assert _pressed(*keys).panel == panel


@pytest.mark.parametrize("key", ["q", "Q", Key.LEAVE])
def test_keys_end_the_program(key: Pressed) -> None:
    assert _pressed(key).left


@pytest.mark.parametrize(
    ("keys", "top"),
    [
        ((Key.DOWN, Key.DOWN, Key.UP), 1),
        (("j", "j", "k"), 1),
        ((Key.UP,), 0),
        ((Key.PAGE_DOWN,), 20),
        ((" ", Key.PAGE_UP), 0),
        ((Key.END,), 80),
        (("G", Key.UP), 79),
        ((Key.END, Key.HOME), 0),
        ((Key.END, "g"), 0),
    ],
)
def test_keys_scroll_within_the_rows(keys: tuple[Pressed, ...], top: int) -> None:
    view = View(panel=ENDPOINTS)
    view.limit_scroll(100, 20)
    for key in keys:
        view.press(key)
        view.limit_scroll(100, 20)
    assert view.top == top


def test_each_panel_keeps_its_place() -> None:
    view = _pressed("2", Key.DOWN, Key.DOWN, "3", Key.DOWN, "2")
    assert view.top == 2


def test_fewer_rows_than_before_scroll_back() -> None:
    view = _pressed("2", Key.END)
    view.limit_scroll(5, 20)
    assert view.top == 0


def test_a_filter_is_typed_for_one_panel() -> None:
    view = _pressed("2", "/", "q", "2", "é", Key.BACKSPACE)
    assert (view.filter, view.edits, view.panel) == ("q2", True, ENDPOINTS)
    _pressed(Key.ENTER, "3", view=view)
    assert (view.filter, view.edits) == ("", False)
    _pressed("2", view=view)
    assert view.filter == "q2"
    _pressed(Key.ESCAPE, view=view)
    assert view.filter == ""


@pytest.mark.parametrize(
    ("keys", "text", "edits"),
    [
        (("a", Key.ESCAPE), "", False),
        (("a", Key.CLEAR), "", True),
        (("a", Key.DOWN), "a", False),
        (("x" * 1,) * 300, "x" * 200, True),
    ],
)
def test_keys_edit_a_filter(keys: tuple[Pressed, ...], text: str, edits: bool) -> None:
    view = _pressed("/", *keys)
    assert (view.filter, view.edits) == (text, edits)


def test_control_c_leaves_while_a_filter_is_typed() -> None:
    assert _pressed("/", Key.LEAVE).left


def test_a_new_filter_shows_its_first_row() -> None:
    view = _pressed("2", Key.DOWN, "/", "a")
    assert view.top == 0


def test_calls_stand_still_when_they_are_scrolled_or_paused() -> None:
    view = _pressed("4", Key.DOWN)
    assert not view.follows
    _pressed("f", view=view)
    assert (view.follows, view.top) == (True, 0)
    assert not _pressed("f", view=view).follows
    assert _pressed("2", Key.DOWN).follows
