"""The panels: the overview, the endpoints with the routes, the models, and the calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.text import Text

from gateway.top import formatting
from gateway.top.document import (
    Document,
    by_name,
    count,
    field,
    flag,
    number,
    numbers,
    objects,
    text,
    texts,
)
from gateway.top.formatting import Points, sparkline, squeeze
from gateway.top.plain_text import cut, fit, plain, width_of, wrap
from gateway.top.table import (
    ERROR,
    GOOD,
    QUIET,
    STRONG,
    WARNING,
    Body,
    Cell,
    Column,
    Row,
    Table,
    line,
    numeric,
    rows_of,
    said,
    sentence,
)

_LABEL, _VALUE = 16, 10
_MOST = 17
"""Cells for the highest value, with its word."""
_LEAST_CHART = 8
_ROWS_FOR_CHARTS = {50: 4, 40: 3, 30: 2}
"""The rows of a chart by the height of the terminal."""
_LATE = 5.0
"""Seconds after which a worker's silence is worth a word, as the gateway has it."""
_PROBLEM_LINES = 3


@dataclass(frozen=True, slots=True)
class _Metric:
    label: str
    now: str
    say: Callable[[float | None], str]
    style: str
    share_of_calls: str = ""
    """The curve that is shown as a share of all calls."""
    alarm: str = ""
    """The style of a value above 0."""
    is_percentile: bool = False


_METRICS = (
    _Metric("Calls", "calls_per_second", formatting.rate, "cyan"),
    _Metric("Errors", "error_ratio", formatting.percent, "red", "errors_per_second", ERROR),
    _Metric(
        "4xx",
        "client_error_ratio",
        formatting.percent,
        "yellow",
        "client_errors_per_second",
        WARNING,
    ),
    *(
        _Metric(name, f"{name}_ms", formatting.milliseconds, "blue", is_percentile=True)
        for name in ("p50", "p95", "p99")
    ),
    _Metric("In progress", "requests_in_progress", formatting.count, "magenta"),
)


def describe_overview(
    overview: Document,
    size: tuple[int, int],
    search: str = "",
    events: Sequence[Document] = (),
    room: int = 0,
) -> Body:
    """Return the lines of the overview; ``search`` chooses among its problems and events.

    ``size`` is that of the terminal. The newest events are shown as far as the ``room`` lines that
    there are for all allow.
    """
    width, height = size
    lines = [
        *_metrics(overview, width, height),
        _traffic(overview, width),
        line(),
        *_problems(overview, width, search),
        line(),
        *_workers(overview, width),
        line(),
        *_settings(overview, width),
    ]
    now = number(overview, "time") or 0.0
    return Body((), [*lines, *_journal(events, width, room - len(lines), search, now)])


def _metrics(overview: Document, width: int, height: int) -> list[Text]:
    rows = next((rows for least, rows in _ROWS_FOR_CHARTS.items() if height >= least), 1)
    room = width - 1 - _LABEL - _VALUE - 3
    with_most = room >= _MOST + _LEAST_CHART
    chart_width = max(0, room - (_MOST + 1 if with_most else 1))

    def row(texts: Sequence[str], styles: Sequence[str]) -> Text:
        label, value, chart, most = texts
        shown = (
            f" {fit(label, _LABEL)} ",
            f"{fit(value, _VALUE, right=True)}  ",
            fit(chart, chart_width),
            f" {fit(most, _MOST, right=True)}" if with_most else "",
        )
        return line(*zip(shown, styles, strict=True))

    step = number(overview, "recent", "step_seconds") or 1.0
    end = number(overview, "recent", "end") or 0.0
    lines, title = [], ""
    for metric in _METRICS:
        history = _history(overview, metric)
        points, span = squeeze(history, end, step, chart_width)
        each = f", {formatting.seconds(span * step)} per column" if span * step > 1 else ""
        title = f"The last {formatting.seconds(step * len(history))}{each}" if history else ""
        value, label = number(overview, "now", metric.now), metric.label
        if metric.is_percentile:
            seconds = number(overview, "now", "duration_window_seconds")
            label += f", {formatting.last_seconds(seconds)}"
        highest = max((each for each in points if each is not None), default=None)
        *above, lowest = sparkline(points, rows, 0.01 if metric.share_of_calls else None)
        style = metric.alarm if value else ""
        styles = ("", style or STRONG, metric.style, QUIET)
        lines += [row(("", "", chart, ""), styles) for chart in above]
        lines.append(row((label, metric.say(value), lowest, metric.say(highest)), styles))
    return [row(("All calls", "last 10 s", title, "highest"), [STRONG] * 4), *lines]


def _history(overview: Document, metric: _Metric) -> Points:
    if not metric.share_of_calls:
        return numbers(overview, "recent", metric.now)
    calls = numbers(overview, "recent", "calls_per_second")
    errors = numbers(overview, "recent", metric.share_of_calls)
    return [
        None if all_calls is None else (failed or 0.0) / all_calls if all_calls else 0.0
        for all_calls, failed in zip(calls, errors, strict=False)
    ]


def _traffic(overview: Document, width: int) -> Text:
    now = overview.get("now")
    parts = (
        formatting.plural(number(now, "connections"), "connection"),
        f"received {formatting.size_rate(number(now, 'request_bytes_per_second'))}",
        f"sent {formatting.size_rate(number(now, 'response_bytes_per_second'))}",
        f"buffered {formatting.size(number(now, 'buffered_bytes'))}",
    )
    return sentence(" · ".join(parts), width)


def _problems(overview: Document, width: int, search: str) -> list[Text]:
    problems = objects(overview, "problems")
    if not problems:
        return [sentence("Nothing is wrong.", width, GOOD)]
    wanted, now = search.lower(), number(overview, "time") or 0.0
    fitting = [each for each in problems if wanted in text(each, "text").lower()]
    of = f"{len(fitting)} of " if search else ""
    title = f"{of}{formatting.plural(len(problems), 'problem')}"
    return [
        sentence(title, width, STRONG),
        *(each for problem in fitting for each in _problem(problem, width, now)),
    ]


def _problem(problem: Document, width: int, now: float) -> list[Text]:
    is_error = text(problem, "level") == "error"
    level, style = ("Error", ERROR) if is_error else ("Warning", WARNING)
    told, since = text(problem, "text"), formatting.unix_time(text(problem, "since"))
    if since is not None:
        told = f"since {formatting.clock(since, now)}: {told}"
    parts = wrap(plain(told), max(1, width - 11), _PROBLEM_LINES)
    first = line((f" {level:8}", style), (f" {parts[0]}", ""))
    return [first, *(line((f"{'':10}{part}", "")) for part in parts[1:])]


def _process(worker: Document) -> Cell:
    return f"process {text(worker, 'pid')}", ""


def _state(worker: Document) -> Cell:
    if (number(worker, "seconds_since_update") or 0.0) > _LATE:
        return "does not report", ERROR
    return ("drains", WARNING) if flag(worker, "draining") else ("takes calls", GOOD)


def _last_report(worker: Document) -> Cell:
    return f"{formatting.whole_seconds(number(worker, 'seconds_since_update'))} ago", QUIET


_WORKER_COLUMNS = (
    Column("Worker", _process, 15),
    Column("State", _state, 15),
    numeric("Connections", formatting.count, "connections", rank=1, width=11),
    numeric("In progress", formatting.count, "requests_in_progress", rank=1, width=11),
    numeric("Buffered", formatting.size, "buffered_bytes", rank=2, width=9),
    numeric("Tasks", formatting.count, "tasks", rank=4, width=5),
    Column("Last report", _last_report, 11, rank=3, right=True),
)


def _workers(overview: Document, width: int) -> list[Text]:
    table = Table(_WORKER_COLUMNS, width)
    return [table.heading(), *map(table.row, objects(overview, "workers"))]


_EVENT_STYLES = {"error": ERROR, "warning": WARNING}
_EVENT_WORDS = ("event", "subject", "why", "who")


def _event(event: Document) -> Cell:
    return text(event, "event"), _EVENT_STYLES.get(text(event, "level"), "")


def _subject(event: Document) -> Cell:
    return text(event, "subject") or "the gateway", ""


_EVENT_COLUMNS = (
    Column("Event", _event, 22, 0, 30),
    Column("Of", _subject, 18, 30, 60, rank=1, middle=True),
    Column("Why", said("why"), 18, 40, 200, rank=1),
    Column("By", said("who", QUIET), 17, 0, 30, rank=2),
)


def _journal(
    events: Sequence[Document], width: int, room: int, search: str, now: float
) -> list[Text]:
    """Return the last events; nothing without room for one, a blank line and the titles."""

    def time(event: Document) -> Cell:
        return formatting.short_clock(number(event, "time"), now), QUIET

    wanted = search.lower()
    fitting = [
        each for each in events if any(wanted in text(each, name).lower() for name in _EVENT_WORDS)
    ]
    if not (shown := fitting[: max(0, room - 2)]):
        return []
    table = Table((Column("Time", time, 8), *_EVENT_COLUMNS), width)
    return [line(), table.heading(), *map(table.row, shown)]


def _settings(overview: Document, width: int) -> list[Text]:
    settings, now = overview.get("settings"), number(overview, "time") or 0.0
    loaded, started = number(settings, "loaded_at"), number(overview, "started_at")
    facts = [
        (
            "Gateway",
            f"version {text(overview, 'version')}, {text(overview, 'build')}, Python"
            f" {text(overview, 'python')}, started {formatting.clock(started, now)}",
        ),
        ("Settings", f"{text(settings, 'file') or 'no file'}"),
        (
            "",
            f"number {text(settings, 'number')} in use since {formatting.clock(loaded, now)},"
            f" {formatting.plural(count(settings, 'reloads'), 'reload')},"
            f" {formatting.plural(count(settings, 'reload_failures'), 'failed reload')}",
        ),
    ]
    lines = [_fact(label, value, width) for label, value in facts]
    if failure := text(settings, "last_failure"):
        at = formatting.clock(number(settings, "failed_at"), now)
        lines.append(_fact("", f"the reload at {at} failed: {failure}", width, ERROR))
    return lines


def _fact(label: str, value: str, width: int, style: str = "") -> Text:
    shown = fit(plain(value), max(0, width - 11)).rstrip()
    assert width_of(label) <= 9
    return line((f" {label:9} ", STRONG), (shown, style))


_CHART = 30
"""Points that the gateway keeps of an endpoint."""
_STATES = {
    "in_use": GOOD,
    **dict.fromkeys(("ejected", "unhealthy", "unreachable", "failing"), ERROR),
}
"""The styles of states; all others are warnings."""


def describe_endpoints(topology: Document, offset: int, width: int, search: str = "") -> Body:
    """Return the rows; ``offset`` is the position of the first endpoint that was read."""
    now = number(topology, "time") or 0.0

    def since(endpoint: Document) -> Cell:
        at = formatting.unix_time(text(endpoint, "state_since"))
        return formatting.short_clock(at, now), QUIET

    table = Table(
        (*_ENDPOINT_COLUMNS[:2], Column("Since", since, 8, rank=2), *_ENDPOINT_COLUMNS[2:]), width
    )
    upstreams = objects(topology, "upstreams")
    rows: list[Row] = []
    positions: list[int] = []
    before = 0
    for upstream in upstreams:
        fitting = count(upstream, "endpoints_fitting")
        if search and not fitting:
            continue
        read = objects(upstream, "endpoints")
        endpoints = rows_of(table, read, max(0, offset - before), fitting)
        rows += [_upstream(upstream, width), *endpoints]
        positions += [before, *range(before, before + len(endpoints))]
        before += fitting
    routes = objects(topology, "routes")
    if routes and not search:
        of_routes = Table(_ROUTE_COLUMNS, width)
        rows += [line(), of_routes.heading(), *((of_routes, each) for each in routes)]
    positions += [before] * (len(rows) - len(positions))
    return Body([_summary(upstreams, width), table.heading()], rows, positions)


def _endpoint_state(endpoint: Document) -> Cell:
    state = text(endpoint, "state") or "unknown"
    return state.replace("_", " "), _STATES.get(state, WARNING)


def _endpoint_chart(endpoint: Document) -> Cell:
    return sparkline(numbers(endpoint, "recent", "calls_per_second")[-_CHART:])[0], "cyan"


def _endpoint_models(endpoint: Document) -> Cell:
    names = texts(endpoint, "models")
    total = count(endpoint, "models_total")
    more = f" and {total - len(names)} more" if total > len(names) else ""
    return ", ".join(names) + more, ""


_ENDPOINT_COLUMNS = (
    Column("Endpoint", said("url"), 18, 26, 60, middle=True),
    Column("State", _endpoint_state, 11),
    numeric("Calls", formatting.rate, "calls_per_second"),
    numeric("Failed", formatting.rate, "failures_per_second", alarm=ERROR),
    numeric("p50", formatting.milliseconds, "p50_ms", rank=1),
    numeric("p99", formatting.milliseconds, "p99_ms", rank=1),
    numeric("Active", formatting.count, "requests_in_progress", rank=2, width=6),
    Column("Calls, 5 min", _endpoint_chart, _CHART, rank=4),
    numeric("Sent", formatting.size_rate, "sent_bytes_per_second", rank=5, width=10),
    numeric("Received", formatting.size_rate, "received_bytes_per_second", rank=5, width=10),
    numeric("All calls", formatting.number, "calls_total", rank=6, width=9),
    Column("Why", said("state_text", QUIET), 20, 40, 200, rank=3),
    Column("Models", _endpoint_models, 20, 20, 60, rank=7),
)


def _upstream(upstream: Document, width: int) -> Text:
    name, reason = plain(text(upstream, "name")), text(upstream, "unreachable_reason")
    parts = [
        formatting.plural(number(upstream, "endpoints_total"), "endpoint"),
        _speaks(upstream),
        f"calls {formatting.rate(number(upstream, 'calls_per_second'))}",
        f"failed {formatting.rate(number(upstream, 'failures_per_second'))}",
    ]
    if limit := number(upstream, "concurrency", "max_requests"):
        active = count(upstream, "concurrency", "active")
        queued = formatting.count(number(upstream, "concurrency", "queued"))
        parts.append(f"{active} of {formatting.count(limit)} slots taken, {queued} wait")
    if not flag(upstream, "required"):
        parts.append("not required")
    told, style = (f"cannot be used: {reason}", ERROR) if reason else (" · ".join(parts), "")
    name = cut(name, max(8, width // 3), middle=True)
    told = cut(f"  {plain(told)}", max(0, width - 1 - width_of(name)))
    return line((f" {name}", STRONG), (told, style))


def _speaks(upstream: Document) -> str:
    dialect = text(upstream, "dialect", "name")
    if not dialect:
        return "dialect not known"
    protocol = text(upstream, "inference_protocol", "name")
    protocol = formatting.PROTOCOLS.get(protocol, protocol)
    return f"{dialect} over {protocol}" if protocol else dialect


def _summary(upstreams: Sequence[Document], width: int) -> Text:
    total = sum(count(each, "endpoints_total") for each in upstreams)
    fitting = sum(count(each, "endpoints_fitting") for each in upstreams)
    told = "" if fitting == total else f"{formatting.count(fitting)} of "
    told += f"{formatting.plural(total, 'endpoint')},"
    told += f" {formatting.plural(len(upstreams), 'upstream')}"
    endpoints = (each for upstream in upstreams for each in objects(upstream, "endpoints"))
    known = next((number(each, "duration_window_seconds") for each in endpoints), None)
    told += f"; p50 and p99 are of the {formatting.last_seconds(known)}"
    return sentence(told, width, STRONG)


def _leads_to(route: Document) -> Cell:
    upstreams = objects(route, "upstreams")
    names = [
        text(each, "name") + (f" × {text(each, 'weight')}" if len(upstreams) > 1 else "")
        for each in upstreams
    ]
    if mirror := text(route, "mirror", "upstream"):
        names.append(f"{text(route, 'mirror', 'percent')} % copied to {mirror}")
    return ", ".join(names), ""


_ROUTE_COLUMNS = (
    Column("Route", said("name"), 10, 12, 30, middle=True),
    Column("Takes", said("match"), 13, 18, 70),
    Column("Leads to", _leads_to, 13, 18, 60),
    numeric("Calls", formatting.rate, "calls_per_second"),
    numeric("Errors", formatting.percent, "error_ratio", width=7, alarm=ERROR),
    numeric("4xx", formatting.percent, "client_error_ratio", width=7, alarm=WARNING),
    numeric("p99", formatting.milliseconds, "p99_ms", rank=1),
)

_OTHERS = {"others": "other models", "no_model": "no model"}


def describe_models(models: Document, offset: int, width: int, search: str = "") -> Body:
    """Return the rows; ``offset`` is the position of the first model that was read.

    Calls that are of no model with numbers of its own have rows below, so that all add up.
    """
    table = Table(_MODEL_COLUMNS, width)
    read, total = objects(models, "models"), count(models, "total")
    told = formatting.plural(total, "model") + (" with this text" if search else "")
    known = next((number(each, "duration_window_seconds") for each in read), None)
    told += f"; percentiles are of the {formatting.last_seconds(known)}"
    if not total and not search:
        told = "No model is known to be ready, and none was called"
    rows = rows_of(table, read, offset, total)
    for key, title in _OTHERS.items():
        calls = field(models, key)
        if isinstance(calls, dict) and number(calls, "calls_per_second") and not search:
            rows.append((table, {**calls, "title": title}))
    return Body([sentence(told, width, STRONG), table.heading()], rows)


def _model_name(model: Document) -> Cell:
    return (text(model, "title"), QUIET) if "title" in model else (text(model, "name"), "")


def _all_fail(model: Document) -> bool:
    return bool(field(model, "last_failure")) and number(model, "calls_per_second") is None


def _model_ready(model: Document) -> Cell:
    """Return on how many endpoints a model is ready."""
    if "title" in model:
        return "", ""
    if _all_fail(model):
        return "all fail", ERROR
    if not (ready := objects(model, "ready")):
        return "not known", QUIET
    endpoints = sum(count(each, "endpoints") for each in ready)
    return f"{endpoints} of {sum(count(each, 'of') for each in ready)}", ""


def _ready_at(model: Document) -> Cell:
    """Return where a model is ready, or why its calls fail."""
    if _all_fail(model):
        failure = field(model, "last_failure")
        told, reason = (
            f"the last one failed with {count(failure, 'status')}",
            text(failure, "reason"),
        )
        return f"{told}: {reason}" if reason else told, ERROR
    places = (
        f"{text(each, 'upstream')} ({count(each, 'endpoints')} of {count(each, 'of')})"
        for each in objects(model, "ready")
    )
    return ", ".join(places), ""


def _model_statuses(model: Document) -> Cell:
    return formatting.rates(by_name(model, "statuses_per_second")), ""


def _model_forms(model: Document) -> Cell:
    return formatting.rates(by_name(model, "forms_per_second"), formatting.form), ""


_MODEL_COLUMNS = (
    Column("Model", _model_name, 12, 19, 60, middle=True),
    Column("Ready", _model_ready, 9),
    numeric("Calls", formatting.rate, "calls_per_second"),
    numeric("Errors", formatting.percent, "error_ratio", rank=1, width=7, alarm=ERROR),
    numeric("4xx", formatting.percent, "client_error_ratio", rank=2, width=7, alarm=WARNING),
    numeric("p50", formatting.milliseconds, "p50_ms", rank=1),
    numeric("p95", formatting.milliseconds, "p95_ms", rank=2),
    numeric("p99", formatting.milliseconds, "p99_ms", rank=1),
    Column("Statuses", _model_statuses, 18, 28, 40, rank=3),
    Column("Forms", _model_forms, 20, 26, 40, rank=4),
    Column("Ready at", _ready_at, 20, 30, 60, rank=5),
)


def describe_calls(calls: Document, width: int, *, search: str = "", follows: bool = True) -> Body:
    """Return a row for each call that was read."""
    now = number(calls, "time") or 0.0

    def ended_at(call: Document) -> Cell:
        return formatting.clock(number(call, "time"), now, exact=True)[-12:], ""

    table = Table((Column("Ended at", ended_at, 12, rank=1), *_CALL_COLUMNS), width)
    kept, read = count(calls, "kept"), objects(calls, "calls")
    told = f"{'Follows' if follows else 'Paused'}: {formatting.count(len(read))} of"
    told += f" {formatting.plural(kept, 'call')} that the gateway keeps"
    told += ", with this text" if search else ""
    heading = sentence(told if kept else "No call has ended yet", width, STRONG)
    return Body([heading, table.heading()], [(table, each) for each in read])


def _call_status(call: Document) -> Cell:
    status, grpc = count(call, "status"), number(call, "grpc_status")
    failed = not 0 < status < 400 or bool(grpc)
    told = formatting.call_status(status, None if grpc is None else int(grpc))
    return told, ERROR if failed else GOOD


def _call_model(call: Document) -> Cell:
    model = text(call, "model")
    return (model, "") if model else ("no model", QUIET)


def _went_to(call: Document) -> Cell:
    """Return the error; or else where the call went, which may have no endpoint of its own."""
    if reason := text(call, "reason"):
        return reason, ERROR
    if endpoint := text(call, "endpoint"):
        return endpoint, ""
    if text(call, "answered_by") == "server" and text(call, "upstream"):
        return f"endpoints of {text(call, 'upstream')}", ""
    return "no server was asked", ""


def _operation(call: Document) -> Cell:
    return text(call, "operation") or text(call, "method"), ""


def _call_forms(call: Document) -> Cell:
    return formatting.forms(text(call, "client_form"), text(call, "server_form")), ""


def _phases(call: Document) -> Cell:
    phases = (
        f"{text(each, 'name')} {formatting.milliseconds(number(each, 'duration_ms'))}"
        for each in objects(call, "timeline")
    )
    return ", ".join(phases), QUIET


_CALL_COLUMNS = (
    Column("Status", _call_status, 15, 0, 26),
    Column("Model", _call_model, 12, 0, 40, middle=True),
    numeric("Duration", formatting.milliseconds, "duration_ms"),
    Column("Endpoint, or error", _went_to, 18, 45, 90, rank=1),
    Column("Operation", _operation, 10, 14, rank=2),
    Column("Forms", _call_forms, 14, rank=3),
    numeric("Server", formatting.milliseconds, "server_ms", rank=4),
    numeric("Request", formatting.size, "request_bytes", rank=5),
    numeric("Response", formatting.size, "response_bytes", rank=5),
    Column("Client", said("client"), 15, rank=6),
    Column("Where the time went", _phases, 40, 40, 80, rank=7),
    Column("Request id", said("request_id", QUIET), 32, 32, 36, rank=8, middle=True),
)
