"""The endpoints: below each upstream, with their states and rates; the routes stand above."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.text import Text

from gateway.top import formatting
from gateway.top.document import Document, count, flag, number, numbers, objects, text, texts
from gateway.top.panels.body import ERROR, GOOD, QUIET, STRONG, WARNING, Body
from gateway.top.plain_text import cut, plain, width_of
from gateway.top.sparkline import sparkline
from gateway.top.table import Cell, Column, Layout, line

_CHART = 30
"""Points that the gateway keeps of an endpoint."""
_COLUMNS = (
    Column("Endpoint", 18, 26, 60, middle=True),
    Column("State", 11),
    Column("Since", 8, rank=2),
    Column("Calls", 8, right=True),
    Column("Failed", 8, right=True),
    Column("p50", 8, rank=1, right=True),
    Column("p99", 8, rank=1, right=True),
    Column("Active", 6, rank=2, right=True),
    Column("Calls, 5 min", _CHART, rank=4),
    Column("Sent", 10, rank=5, right=True),
    Column("Received", 10, rank=5, right=True),
    Column("All calls", 9, rank=6, right=True),
    Column("Why", 20, 40, 200, rank=3),
    Column("Models", 20, 20, 60, rank=7),
)
_STATES = {
    "in_use": GOOD,
    "slow": WARNING,
    "drained": WARNING,
    "draining": WARNING,
    "ejected": ERROR,
    "unhealthy": ERROR,
    "unreachable": ERROR,
    "failing": ERROR,
}


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of one kind, and how many endpoints are before them."""

    row: Callable[[int], Text]
    rows: int
    before: int = 0
    has_endpoints: bool = False


def describe(topology: Document, offset: int, width: int, search: str = "") -> Body:
    """Return the rows; ``offset`` is the position of the first endpoint that was read."""
    layout = Layout(_COLUMNS, width)
    upstreams = objects(topology, "upstreams")
    parts: list[_Part] = []
    before, now = 0, number(topology, "time") or 0.0
    for upstream in upstreams:
        fitting = count(upstream, "endpoints_fitting")
        if search and not fitting:
            continue
        parts.append(_Part(_fixed(_upstream(upstream, width)), 1, before))
        skipped = max(0, offset - before)
        rows = _endpoint_rows(objects(upstream, "endpoints"), skipped, layout, now)
        parts.append(_Part(rows, fitting, before, has_endpoints=True))
        before += fitting
    if not search:
        parts += _routes(topology, width, before)
    return _joined(parts, [_summary(upstreams, width), layout.heading()])


def _joined(parts: Sequence[_Part], heading: Sequence[Text]) -> Body:
    starts = [0]
    for part in parts:
        starts.append(starts[-1] + part.rows)

    def at(row: int) -> tuple[_Part, int]:
        # A part without rows begins where the next one does, and so is never the last one there.
        position = bisect_right(starts, row) - 1
        return parts[position], row - starts[position]

    def row_of(row: int) -> Text:
        part, inside = at(row)
        return part.row(inside)

    def endpoint_of(row: int) -> int:
        if not 0 <= row < starts[-1]:
            return 0
        part, inside = at(row)
        return part.before + (inside if part.has_endpoints else 0)

    return Body(heading, starts[-1], row_of, endpoint_of)


def _fixed(text: Text) -> Callable[[int], Text]:
    return lambda _: text


def _endpoint_rows(
    endpoints: Sequence[Document], skipped: int, layout: Layout, now: float
) -> Callable[[int], Text]:
    def row(index: int) -> Text:
        if skipped <= index < skipped + len(endpoints):
            return layout.row(_endpoint(endpoints[index - skipped], now))
        return line((" …", QUIET))  # it is being read

    return row


def _endpoint(endpoint: Document, now: float) -> Sequence[Cell]:
    state = text(endpoint, "state") or "unknown"
    failed = number(endpoint, "failures_per_second")
    busy = number(endpoint, "requests_in_progress")
    chart = sparkline(numbers(endpoint, "recent", "calls_per_second")[-_CHART:])[0]
    return (
        (text(endpoint, "url"), ""),
        (state.replace("_", " "), _STATES.get(state, WARNING)),
        (formatting.short_clock(formatting.unix_time(text(endpoint, "state_since")), now), QUIET),
        (formatting.rate(number(endpoint, "calls_per_second")), ""),
        (formatting.rate(failed), ERROR if failed else ""),
        (formatting.milliseconds(number(endpoint, "p50_ms")), ""),
        (formatting.milliseconds(number(endpoint, "p99_ms")), ""),
        (formatting.count(busy), ""),
        (chart, "cyan"),
        (formatting.size_rate(number(endpoint, "sent_bytes_per_second")), ""),
        (formatting.size_rate(number(endpoint, "received_bytes_per_second")), ""),
        (formatting.number(number(endpoint, "calls_total")), ""),
        (text(endpoint, "state_text"), QUIET),
        (_models(endpoint), ""),
    )


def _models(endpoint: Document) -> str:
    names = texts(endpoint, "models")
    total = count(endpoint, "models_total")
    more = f" and {total - len(names)} more" if total > len(names) else ""
    return ", ".join(names) + more


def _upstream(upstream: Document, width: int) -> Text:
    name, reason = plain(text(upstream, "name")), text(upstream, "unreachable_reason")
    parts = [
        formatting.plural(number(upstream, "endpoints_total"), "endpoint"),
        _speaks(upstream),
        f"calls {formatting.rate(number(upstream, 'calls_per_second'))}",
        f"failed {formatting.rate(number(upstream, 'failures_per_second'))}",
    ]
    if limit := number(upstream, "concurrency", "max_requests"):
        active, queued = (
            count(upstream, "concurrency", "active"),
            number(upstream, "concurrency", "queued"),
        )
        parts.append(
            f"{active} of {formatting.count(limit)} slots taken, {formatting.count(queued)} wait"
        )
    if not flag(upstream, "required"):
        parts.append("not required")
    told, style = " · ".join(part for part in parts if part), ""
    if reason:
        told, style = f"cannot be used: {reason}", ERROR
    name = cut(name, max(8, width // 3), middle=True)
    told = cut(f"  {plain(told)}", max(0, width - 1 - width_of(name)))
    return line((f" {name}", STRONG), (told, style))


def _speaks(upstream: Document) -> str:
    dialect = text(upstream, "dialect", "name")
    if not dialect:
        return "dialect not known"
    protocol = formatting.protocol(text(upstream, "inference_protocol", "name"))
    return f"{dialect} over {protocol}" if protocol else dialect


def _summary(upstreams: Sequence[Document], width: int) -> Text:
    total = sum(count(each, "endpoints_total") for each in upstreams)
    fitting = sum(count(each, "endpoints_fitting") for each in upstreams)
    of = "" if fitting == total else f"{formatting.count(fitting)} of "
    endpoints = formatting.plural(total, "endpoint")
    told = f"{of}{endpoints}, {formatting.plural(len(upstreams), 'upstream')}"
    known = (
        number(each, "duration_window_seconds")
        for up in upstreams
        for each in objects(up, "endpoints")
    )
    told += f"; p50 and p99 are of the {formatting.last_seconds(next(known, None))}"
    return line((f" {cut(told, max(0, width - 1))}", STRONG))


_ROUTE_COLUMNS = (
    Column("Route", 10, 12, 30, middle=True),
    Column("Takes", 13, 18, 70),
    Column("Leads to", 13, 18, 60),
    Column("Calls", 8, right=True),
    Column("Errors", 7, right=True),
    Column("4xx", 7, right=True),
    Column("p99", 8, rank=1, right=True),
)


def _routes(topology: Document, width: int, before: int) -> list[_Part]:
    routes = objects(topology, "routes")
    if not routes:
        return []
    layout = Layout(_ROUTE_COLUMNS, width)
    return [
        _Part(_fixed(line()), 1, before),
        _Part(_fixed(layout.heading()), 1, before),
        _Part(lambda row: layout.row(_route(routes[row])), len(routes), before),
    ]


def _route(route: Document) -> Sequence[Cell]:
    upstreams = objects(route, "upstreams")
    names = [
        text(each, "name") + (f" × {text(each, 'weight')}" if len(upstreams) > 1 else "")
        for each in upstreams
    ]
    if mirror := text(route, "mirror", "upstream"):
        names.append(f"{text(route, 'mirror', 'percent')} % copied to {mirror}")
    errors, refused = number(route, "error_ratio"), number(route, "client_error_ratio")
    return (
        (text(route, "name"), ""),
        (text(route, "match"), ""),
        (", ".join(names), ""),
        (formatting.rate(number(route, "calls_per_second")), ""),
        (formatting.percent(errors), ERROR if errors else ""),
        (formatting.percent(refused), WARNING if refused else ""),
        (formatting.milliseconds(number(route, "p99_ms")), ""),
    )
