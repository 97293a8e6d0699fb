"""Frames: exactly as large as the terminal, whatever the gateway says; and what keys do."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.top.client import Reading, Snapshot, Wanted
from gateway.top.frame import Frame, plain_page
from gateway.top.view import CALLS, ENDPOINTS, MODELS, OVERVIEW, PANELS, KeyDecoder, View
from tests.top import documents
from tests.top.documents import (
    HOSTILE,
    NOW,
    call,
    calls,
    check_lines,
    endpoint,
    model,
    topology,
    upstream,
)

MANY = topology(upstream("demo", [endpoint(f"http://e{at}:1") for at in range(1000)]))


def _snapshot(**more: Any) -> Snapshot:
    panels = {
        ENDPOINTS: Reading(MANY, Wanted(ENDPOINTS)),
        MODELS: Reading({"total": 1, "models": [model("m")]}, Wanted(MODELS)),
        OVERVIEW: Reading({"events": [documents.event()] * 90}, Wanted()),
        CALLS: Reading(calls(*[call(model=f"m{at}") for at in range(50)]), Wanted(CALLS)),
    }
    return replace(Snapshot(documents.overview(), panels, NOW), **more)


def _lines(
    view: View, snapshot: Snapshot | None = None, size: tuple[int, int] = (80, 24)
) -> list[str]:
    lines = Frame("127.0.0.1:9080", 1.0).compose(view, snapshot or _snapshot(), size, NOW)
    assert len(lines) == size[1]
    return check_lines(lines, size[0])


def test_the_title_tells_which_gateway_it_is() -> None:
    lines = _lines(View())
    title = " Tensorgate top   127.0.0.1:9080   0.1.0   up 2 h 3 min   3 workers"
    assert re.fullmatch(re.escape(title) + r" +\d\d:\d\d:\d\d", lines[0])
    assert re.fullmatch(
        r"\[1 Overview\] 2 Endpoints  3 Models  4 Calls +2 problems, 1 error", lines[1]
    )
    assert lines[-1].startswith(" 1-4 panel  ↑↓ PgUp PgDn scroll  / filter  q quit")


@pytest.mark.parametrize("size", [(80, 24), (40, 10), (20, 5), (2, 2), (1, 1), (300, 4)])
def test_each_panel_fits_each_size(size: tuple[int, int]) -> None:
    for panel in PANELS:
        for filtered, edits in [("", False), ("x", False), ("x", True)]:
            view = View(panel=panel, edits=edits)
            view.filters[panel] = filtered
            _lines(view, size=size)


def test_rows_scroll_and_the_footer_says_where() -> None:
    view = View(panel=ENDPOINTS)
    assert _lines(view)[-1].endswith("1-19 of 1,001")
    view.press("page down")
    lines = _lines(view)
    assert lines[-1].endswith("20-38 of 1,001")
    assert lines[4].startswith(" http://e18:1")
    view.press("end")
    lines = _lines(view)
    assert lines[-1].endswith("983-1,001 of 1,001")
    assert lines[-2].startswith(" http://e999:1")


def test_journal_fills_the_rest_of_the_overview_and_makes_nothing_scroll() -> None:
    for height in (24, 29, 36, 60):
        lines = _lines(View(), size=(80, height))
        events = sum("endpoint ejected" in line for line in lines)
        assert not events or lines[-2]
        assert bool(events) == (height > 24)
        if events:
            assert " of " not in lines[-1]
    # A failure above takes its lines from the journal.
    failing = _snapshot(failure="nothing listens", failing_since=NOW - 12)
    assert len(_lines(View(), failing, size=(80, 60))) == 60


def test_only_the_rows_around_those_that_are_shown_are_wanted() -> None:
    frame, view = Frame("a", 1.0), View(panel=ENDPOINTS)
    assert frame.wanted(View()) == Wanted(OVERVIEW)
    frame.compose(view, _snapshot(), (80, 24), NOW)
    assert frame.wanted(view) == Wanted(ENDPOINTS, offset=0, limit=400)
    view.scroll(555)
    frame.compose(view, _snapshot(), (80, 24), NOW)
    wanted = frame.wanted(view)
    assert (wanted.offset, wanted.limit) == (400, 400)
    view = View(panel=CALLS, follows=False)
    view.filters[CALLS] = "x"
    assert frame.wanted(view) == Wanted(CALLS, "x", follows=False)


def test_a_gateway_that_does_not_answer_is_told_above_what_was_read() -> None:
    failing: dict[str, Any] = {"failure": "nothing listens", "failing_since": NOW - 12}
    lines = _lines(View(), _snapshot(**failing))
    told = " ".join(line.strip() for line in lines[2:4])
    assert told.startswith(
        "Nothing read for 12 s: nothing listens. Tries again every 1 s. Below is"
    )
    assert [line for line in lines if line.startswith(" Calls")]
    alone = _lines(View(), Snapshot(**failing))
    assert alone[2] == " Nothing read for 12 s: nothing listens. Tries again every 1 s."
    assert not any(alone[3:-1])


def test_with_a_long_interval_a_gateway_is_tried_sooner() -> None:
    lines = Frame("a", 3600.0).compose(View(), Snapshot(failure="no"), (80, 24), NOW)
    assert lines[2].plain.endswith("Tries again every 5 s.")


def test_what_is_not_read_yet_drains_or_is_another_gateway_says_so() -> None:
    assert _lines(View(), Snapshot())[2] == " Reads …"
    assert _lines(View(panel=MODELS), _snapshot(panels={}))[2] == " Reads …"
    assert "DRAINS" in _lines(View(), _snapshot(overview=documents.overview(draining=True)))[0]
    for until in (NOW + 1, NOW):
        lines = _lines(View(), _snapshot(notice="version 2 is here", notice_until=until))
        assert (" Notice: version 2 is here." in lines) == (until > NOW)


def test_the_footer_shows_the_filter() -> None:
    view = View(panel=CALLS)
    view.press("/")
    for character in "ab":
        view.press(character)
    assert re.fullmatch(" Filter: ab_ +Enter keeps it, Esc shows all", _lines(view)[-1])
    view.press("enter")
    assert _lines(view)[-1].startswith(' Only with "ab" (Esc: all)  1-4 panel')
    assert "f pause" in _lines(View(panel=CALLS), size=(120, 24))[-1]
    assert "f follow" in _lines(View(panel=CALLS, follows=False), size=(120, 24))[-1]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_texts_do_not_break_the_frame(text: str) -> None:
    several = {"fitting": 1, "unreachable_reason": text, "dialect": {"name": text}}
    names = ("model", "endpoint", "operation", "client_form", "server_form", "client", "request_id")
    panels = {
        ENDPOINTS: topology(
            upstream(text, [endpoint(text, state=text, state_text=text, models=[text])]),
            upstream(text, [], **several),
            routes=[documents.route(text, match=text, upstreams=[{"name": text}])],
        ),
        MODELS: {
            "total": 1,
            "models": [model(text, ready=[{"upstream": text}], forms_per_second={text: 1.0})],
        },
        OVERVIEW: {
            "events": [documents.event(event=text, subject=text, who=text, why=text, level=text)]
        },
        CALLS: calls(
            call(**dict.fromkeys(names, text), timeline=[{"name": text}]),
            call(status=500, reason=text),
        ),
    }
    snapshot = Snapshot(
        documents.overview(
            problems=[{"level": text, "text": text}],
            settings={"file": text, "last_failure": text},
            version=text,
            build=text,
        ),
        {name: Reading(each, Wanted(name)) for name, each in panels.items()},
        notice=text,
        notice_until=NOW + 1,
    )
    for panel in PANELS:
        view = View(panel=panel, edits=True)
        for size in ((300, 60), (80, 24), (40, 10), (1, 1)):
            for read in (snapshot, replace(snapshot, failure=text)):
                frame = Frame(text, 1.0)
                check_lines(frame.compose(view, read, size, NOW), size[0])
                view.filters[panel] = text


def test_a_plain_page_has_all_panels() -> None:
    lines = [line.plain.rstrip() for line in plain_page(Frame("a", 1.0), _snapshot(), 100)]
    for name in ("OVERVIEW", "ENDPOINTS", "MODELS", "CALLS"):
        assert name in lines
    assert len([line for line in lines if line.startswith(" http://e")]) == 1000
    assert len([line for line in lines if "200 OK" in line]) == 20
    assert any("endpoint ejected" in line for line in lines)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


def _mutated(document: Any, draw: st.DrawFn) -> Any:
    """Return a document in which some values are others."""
    if draw(st.integers(0, 9)) == 0:
        return draw(_JSON)
    if isinstance(document, dict):
        return {name: _mutated(each, draw) for name, each in document.items()}
    if isinstance(document, list):
        return [_mutated(each, draw) for each in document[:3]]
    return document


@st.composite
def _snapshots(draw: st.DrawFn) -> Snapshot:
    several = topology(upstream("a", [endpoint("u")]), routes=[documents.route("1")])
    made = {
        ENDPOINTS: several,
        OVERVIEW: {"events": [documents.event()]},
        MODELS: {"total": 1, "models": [model("m")]},
        CALLS: calls(call(), call(status=500, reason="x")),
    }
    panels = {
        name: Reading(_as_object(_mutated(each, draw)), Wanted(name)) for name, each in made.items()
    }
    return Snapshot(_as_object(_mutated(documents.overview(), draw)), panels, NOW)


def _as_object(document: Any) -> Any:
    return document if isinstance(document, dict) else {}


@given(_snapshots())
def test_documents_of_other_versions_are_shown_as_far_as_they_are_understood(
    snapshot: Snapshot,
) -> None:
    for panel in PANELS:
        _lines(View(panel=panel), snapshot, (200, 30))


# Keys


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
