"""The panels that are lists: the endpoints with the routes, the models, and the calls."""

from __future__ import annotations

from collections.abc import Sequence

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
from gateway.top.formatting import sparkline
from gateway.top.plain_text import cut, plain, width_of
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
