"""Compose what a terminal shows: the title, the panel, the keys; and the same as a plain page."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from gateway.top import formatting
from gateway.top.document import flag, number, objects, text
from gateway.top.panels import calls, endpoints, models, overview
from gateway.top.panels.body import ERROR, QUIET, STRONG, WARNING, Body, body_of, sentence
from gateway.top.plain_text import fit, plain, width_of, wrap
from gateway.top.poller import RETRY_SECONDS, Reading, Snapshot, Wanted
from gateway.top.table import line
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
        """Return exactly as many lines as the terminal has; none is wider than it is."""
        width, height = size
        title, *state = self.top_lines(snapshot, width, now)
        above = [title, _tabs(view, snapshot, width), *state]
        below = [_footer(view, width)]
        room = max(0, height - len(above) - len(below))
        body = _body(view, snapshot, size, room)
        room = max(0, room - len(body.heading))
        view.limit_scroll(body.count, room)
        shown = range(view.top, min(body.count, view.top + room))
        self._first, self._shown = body.first(view.top), room
        lines = [*above, *body.heading, *map(body.row, shown)][: max(0, height - len(below))]
        if body.count > room > 0:
            below = [_with_position(below[0], view.top + 1, len(shown), body.count, width)]
        lines += [line()] * (height - len(lines) - len(below))
        return [_cropped(each, width) for each in [*lines, *below][:height]]

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
        clock = f"{formatting.clock(now, now)} "
        told = " " + "   ".join(part for part in parts if part)
        room = max(0, width - len(clock) - 1)
        return line((f"{fit(told, room)} {clock}" if room > 20 else fit(told, width), _BAR))

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
            return [sentence(plain(f"Notice: {snapshot.notice}."), width, WARNING)]
        return []


def plain_page(frame: Frame, snapshot: Snapshot, width: int) -> list[Text]:
    """Return all panels below each other, for a file or a pipe."""
    lines = frame.top_lines(snapshot, width, snapshot.read_at)
    for panel in PANELS:
        body = _body(View(panel=panel), snapshot, (width, 0), _ROWS_OF_PAGE)
        rows = range(min(body.count, _CALLS_OF_PAGE) if panel == CALLS else body.count)
        lines += [line(), line((_TITLES[panel].upper(), STRONG))]
        lines += [*body.heading, *map(body.row, rows)]
    return [_cropped(each, width) for each in lines]


def _cropped(text: Text, width: int) -> Text:
    """Cut a line that does not fit, as in a very narrow terminal."""
    if width_of(text.plain) > width:
        text = text.copy()
        text.truncate(width, overflow="crop")
    return text


def _body(view: View, snapshot: Snapshot, size: tuple[int, int], room: int) -> Body:
    """Return the body; ``room`` are the lines that there are for it."""
    width, _ = size
    if snapshot.overview is None:
        return body_of([] if snapshot.failure else [sentence("Reads …", width, QUIET)])
    if view.panel == OVERVIEW:
        journal = snapshot.panels.get(OVERVIEW)
        events = objects(journal.document, "events") if journal else ()
        return overview.describe(snapshot.overview, size, view.filter, events, room)
    reading = snapshot.panels.get(view.panel)
    if reading is None:
        return body_of([sentence("Reads …", width, QUIET)])
    return _panel(view, reading, width)


def _panel(view: View, reading: Reading, width: int) -> Body:
    document, offset = reading.document, reading.wanted.offset
    if view.panel == ENDPOINTS:
        return endpoints.describe(document, offset, width, reading.wanted.search)
    if view.panel == MODELS:
        return models.describe(document, offset, width, reading.wanted.search)
    search = reading.wanted.search
    return calls.describe(document, width, search=search, follows=view.follows)


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
    numbered = list(enumerate(PANELS, 1))
    names: list[tuple[str, str]] = []
    for most in (9, 5, 0):
        names = [
            (f"[{number} {_TITLES[name]}]", STRONG)
            if name == view.panel
            else (f" {number} {_TITLES[name][:most]}".rstrip() + " ", "")
            for number, name in numbered
        ]
        if sum(len(name) for name, _ in names) <= width:
            break
    return names


def _footer(view: View, width: int) -> Text:
    if view.edits:
        hint = "Enter keeps it, Esc shows all"
        typed = plain(view.filter)
        room = max(1, width - 10 - (len(hint) + 2 if width > 60 else 0))
        shown = typed if width_of(typed) <= room else "…" + typed[len(typed) - room + 1 :]
        left = f" Filter: {shown}_"
        return _bar(left, hint if width > 60 else "", width)
    keys = list(_keys(view))
    while len(keys) > 1 and width_of(" " + "  ".join(keys)) > width:
        keys.pop(-2)
    filtered = f'Only with "{plain(view.filter)}" (Esc: all)  ' if view.filter else ""
    return _bar(f" {filtered}" + "  ".join(keys), "", width)


def _keys(view: View) -> Iterator[str]:
    yield "1-4 panel"
    yield "↑↓ PgUp PgDn scroll"
    yield "/ filter"
    if view.panel == CALLS:
        yield "f pause" if view.follows else "f follow"
    yield "q quit"


def _bar(left: str, right: str, width: int) -> Text:
    return line((fit(fit(left, max(0, width - len(right) - 1)) + right, width), _BAR))


def _with_position(footer: Text, first: int, shown: int, total: int, width: int) -> Text:
    """Add to the footer which rows are shown, if there is room."""
    begin, end, of = map(formatting.count, (first, first + shown - 1, total))
    told = f" {begin}-{end} of {of} "
    keys = footer.plain.rstrip()
    if width_of(keys) + len(told) > width:
        return footer
    return _bar(keys, told[:-1], width)
