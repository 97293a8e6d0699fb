"""Compose what a terminal shows: the title, the panel, the keys; and the same as a plain page."""

from __future__ import annotations

from rich.text import Text

from gateway.top import formatting
from gateway.top.client import RETRY_SECONDS, Snapshot, Wanted
from gateway.top.document import flag, number, objects, text
from gateway.top.lists import describe_calls, describe_endpoints, describe_models
from gateway.top.overview import describe_overview
from gateway.top.plain_text import fit, plain, width_of, wrap
from gateway.top.table import ERROR, QUIET, STRONG, WARNING, Body, line, sentence
from gateway.top.view import CALLS, ENDPOINTS, MODELS, OVERVIEW, PANELS, View

_AROUND = 100
"""Rows that are read before and behind those that are shown."""
_TITLES = {name: name.capitalize() for name in PANELS}
_BAR = "reverse"
_MOST_FAILURE_LINES = 3
_CALLS_OF_PAGE = 20
_ROWS_OF_PAGE = 32
"""Of the overview: what is left of them shows the journal."""


class Frame:
    """Composes frames of one gateway."""

    def __init__(self, address: str, interval: float) -> None:
        self._address = plain(address)
        self._interval = interval
        self._first, self._shown = 0, 0
        """The position of the first row in the gateway's list, and how many are shown."""

    def compose(
        self, view: View, snapshot: Snapshot, size: tuple[int, int], now: float
    ) -> list[Text]:
        """Return exactly as many lines as the terminal has; it cuts off what is wider."""
        width, height = size
        title, *state = self.top_lines(snapshot, width, now)
        above = [title, _tabs(view, snapshot, width), *state]
        room = max(0, height - len(above) - 1)
        body = _body(view, snapshot, size, room)
        room = max(0, room - len(body.heading))
        view.limit_scroll(len(body.rows), room)
        shown = range(view.top, min(len(body.rows), view.top + room))
        self._first, self._shown = view.top, room
        if view.top < len(body.positions):
            self._first = body.positions[view.top]
        footer = _footer(view, width)
        if len(body.rows) > room > 0:
            footer = _with_position(footer, shown, len(body.rows), width)
        lines = [*above, *body.heading, *map(body.row, shown), *[line()] * height]
        return [*lines[: height - 1], footer]

    def wanted(self, view: View) -> Wanted:
        """Return what has to be read for the view, as it was composed last."""
        if view.panel in (ENDPOINTS, MODELS):
            offset = max(0, self._first // _AROUND - 1) * _AROUND
            limit = -(-(self._shown + 3 * _AROUND) // _AROUND) * _AROUND
            return Wanted(view.panel, view.filter, offset, limit)
        if view.panel == CALLS:
            return Wanted(CALLS, view.filter, follows=view.follows)
        return Wanted()

    def top_lines(self, snapshot: Snapshot, width: int, now: float) -> list[Text]:
        """Return the title, and what is to be said of the connection."""
        return [self._title(snapshot, width, now), *self._state(snapshot, width, now)]

    def _title(self, snapshot: Snapshot, width: int, now: float) -> Text:
        document = snapshot.overview
        parts = ["Tensorgate top", self._address]
        if document is not None:
            started, at = number(document, "started_at"), number(document, "time")
            parts.append("DRAINS" if flag(document, "draining") else "")
            parts.append(plain(text(document, "version")))
            if started is not None and at is not None:
                parts.append(f"up {formatting.whole_seconds(at - started)}")
            workers = len(objects(document, "workers"))
            parts.append(formatting.plural(workers, "worker") if workers else "")
        told = " " + "   ".join(part for part in parts if part)
        return _bar(told, f"{formatting.clock(now, now)} " if width > 30 else "", width)

    def _state(self, snapshot: Snapshot, width: int, now: float) -> list[Text]:
        """Return why there is nothing new; or that another gateway answers."""
        if snapshot.failure:
            since = formatting.whole_seconds(now - snapshot.failing_since)
            pause = formatting.seconds(min(self._interval, RETRY_SECONDS))
            told = f"Nothing read for {since}: {snapshot.failure}. Tries again every {pause}."
            if snapshot.overview is not None:
                told += f" Below is the state of {formatting.clock(snapshot.read_at, now)}."
            lines = wrap(plain(told), max(1, width - 1), _MOST_FAILURE_LINES)
            return [line((f" {each}", ERROR)) for each in lines]
        if snapshot.notice and now < snapshot.notice_until:
            return [sentence(f"Notice: {snapshot.notice}.", width, WARNING)]
        return []


def plain_page(frame: Frame, snapshot: Snapshot, width: int) -> list[Text]:
    """Return all panels below each other, for a file or a pipe."""
    lines = frame.top_lines(snapshot, width, snapshot.read_at)
    for panel in PANELS:
        body = _body(View(panel=panel), snapshot, (width, 0), _ROWS_OF_PAGE)
        rows = range(len(body.rows))[: _CALLS_OF_PAGE if panel == CALLS else None]
        lines += [line(), line((_TITLES[panel].upper(), STRONG))]
        lines += [*body.heading, *map(body.row, rows)]
    return lines


def _body(view: View, snapshot: Snapshot, size: tuple[int, int], room: int) -> Body:
    """Return the body; ``room`` are the lines that there are for it."""
    width, _ = size
    reading = snapshot.panels.get(view.panel)
    if snapshot.overview is not None and view.panel == OVERVIEW:
        events = objects(reading.document, "events") if reading else ()
        return describe_overview(snapshot.overview, size, view.filter, events, room)
    if snapshot.overview is None or reading is None:
        is_read = snapshot.overview is None and snapshot.failure
        return Body((), [] if is_read else [sentence("Reads …", width, QUIET)])
    document, wanted = reading.document, reading.wanted
    if view.panel == CALLS:
        return describe_calls(document, width, search=wanted.search, follows=view.follows)
    describe = describe_endpoints if view.panel == ENDPOINTS else describe_models
    return describe(document, wanted.offset, width, wanted.search)


def _tabs(view: View, snapshot: Snapshot, width: int) -> Text:
    names = _names(view, width)
    problems = objects(snapshot.overview, "problems")
    errors = sum(text(each, "level") == "error" for each in problems)
    told, style = "", QUIET
    if problems:
        told = formatting.plural(len(problems), "problem")
        told += f", {formatting.plural(errors, 'error')}" if errors else ""
        style = ERROR if errors else WARNING
    elif snapshot.overview is not None:
        told = "no problems"
    room = width - sum(len(name) for name, _ in names) - 1
    return line(*names, (fit(told, room, right=True) if room > len(told) else "", style))


def _names(view: View, width: int) -> list[tuple[str, str]]:
    """Return the names of the panels, shorter ones if there is little room."""
    names: list[tuple[str, str]] = []
    for most in (9, 5, 0):
        names = [
            (f"[{number} {_TITLES[name]}]", STRONG)
            if name == view.panel
            else (f" {number} {_TITLES[name][:most]}".rstrip() + " ", "")
            for number, name in enumerate(PANELS, 1)
        ]
        if sum(len(name) for name, _ in names) <= width:
            break
    return names


def _footer(view: View, width: int) -> Text:
    if view.edits:
        hint = "Enter keeps it, Esc shows all" if width > 60 else ""
        typed = plain(view.filter)
        room = max(1, width - 10 - (len(hint) + 2 if hint else 0))
        shown = typed if width_of(typed) <= room else "…" + typed[len(typed) - room + 1 :]
        return _bar(f" Filter: {shown}_", hint, width)
    keys = ["1-4 panel", "↑↓ PgUp PgDn scroll", "/ filter"]
    if view.panel == CALLS:
        keys.append("f pause" if view.follows else "f follow")
    keys.append("q quit")
    while len(keys) > 1 and width_of(" " + "  ".join(keys)) > width:
        keys.pop(-2)
    filtered = f'Only with "{plain(view.filter)}" (Esc: all)  ' if view.filter else ""
    return _bar(f" {filtered}" + "  ".join(keys), "", width)


def _bar(left: str, right: str, width: int) -> Text:
    return line((fit(fit(left, max(0, width - len(right) - 1)) + right, width), _BAR))


def _with_position(footer: Text, shown: range, total: int, width: int) -> Text:
    """Add to the footer which rows are shown, if there is room."""
    begin, end, of = map(formatting.count, (shown.start + 1, shown.stop, total))
    told = f" {begin}-{end} of {of} "
    keys = footer.plain.rstrip()
    return footer if width_of(keys) + len(told) > width else _bar(keys, told[:-1], width)
