"""What keys do."""

import pytest

from gateway.top.view import CALLS, ENDPOINTS, MODELS, OVERVIEW, View


def _pressed(*keys: str, view: View | None = None) -> View:
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
        (("tab",), ENDPOINTS),
        (("right", "right"), MODELS),
        (("back tab",), CALLS),
        (("left", "tab"), OVERVIEW),
        ("9x", OVERVIEW),
    ],
)
def test_keys_choose_the_panel(keys: tuple[str, ...], panel: str) -> None:
    assert _pressed(*keys).panel == panel


@pytest.mark.parametrize("key", ["q", "Q", "leave"])
def test_keys_end_the_program(key: str) -> None:
    assert _pressed(key).left


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


def test_each_panel_keeps_its_place() -> None:
    view = _pressed("2", "down", "down", "3", "down", "2")
    assert view.top == 2


def test_fewer_rows_than_before_scroll_back() -> None:
    view = _pressed("2", "end")
    view.limit_scroll(5, 20)
    assert view.top == 0


def test_a_filter_is_typed_for_one_panel() -> None:
    view = _pressed("2", "/", "q", "2", "é", "backspace")
    assert (view.filter, view.edits, view.panel) == ("q2", True, ENDPOINTS)
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
        (("x" * 1,) * 300, "x" * 200, True),
    ],
)
def test_keys_edit_a_filter(keys: tuple[str, ...], text: str, edits: bool) -> None:
    view = _pressed("/", *keys)
    assert (view.filter, view.edits) == (text, edits)


def test_control_c_leaves_while_a_filter_is_typed() -> None:
    assert _pressed("/", "leave").left


def test_a_new_filter_shows_its_first_row() -> None:
    view = _pressed("2", "down", "/", "a")
    assert view.top == 0


def test_calls_stand_still_when_they_are_scrolled_or_paused() -> None:
    view = _pressed("4", "down")
    assert not view.follows
    _pressed("f", view=view)
    assert (view.follows, view.top) == (True, 0)
    assert not _pressed("f", view=view).follows
    assert _pressed("2", "down").follows
