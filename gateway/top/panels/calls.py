"""The calls that have ended, newest first."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.top import formatting
from gateway.top.document import Document, count, number, objects, text
from gateway.top.panels.body import ERROR, GOOD, QUIET, STRONG, Body, sentence
from gateway.top.table import Cell, Column, Layout

_COLUMNS = (
    Column("Ended at", 12, rank=1),
    Column("Status", 15, 0, 26),
    Column("Model", 12, 0, 40, middle=True),
    Column("Duration", 8, right=True),
    Column("Endpoint, or error", 18, 45, 90, rank=1),
    Column("Operation", 10, 14, rank=2),
    Column("Forms", 14, rank=3),
    Column("Server", 8, rank=4, right=True),
    Column("Request", 8, rank=5, right=True),
    Column("Response", 8, rank=5, right=True),
    Column("Client", 15, rank=6),
    Column("Where the time went", 40, 40, 80, rank=7),
    Column("Request id", 32, 32, 36, rank=8, middle=True),
)


def describe(calls: Document, width: int, *, search: str = "", follows: bool = True) -> Body:
    """Return a row for each call that was read."""
    layout = Layout(_COLUMNS, width)
    wanted, now = search.lower(), number(calls, "time") or 0.0
    read = [each for each in objects(calls, "calls") if _has(each, wanted)]
    kept = count(calls, "kept")
    what = (
        f"{formatting.count(len(read))} of {formatting.plural(kept, 'call')} that the gateway keeps"
    )
    told = f"{'Follows' if follows else 'Paused'}: {what}" + (", with this text" if search else "")
    if not kept:
        told = "No call has ended yet"
    return Body(
        [sentence(told, width, STRONG), layout.heading()],
        len(read),
        lambda row: layout.row(_call(read[row], now)),
    )


def _has(call: Document, wanted: str) -> bool:
    """Tell whether a field has a text; the gateway finds it in the names of fields too."""
    values = (text(call, name) for name in call)
    return not wanted or any(wanted in value.lower() for value in values)


def _call(call: Document, now: float) -> Sequence[Cell]:
    status, grpc = count(call, "status"), number(call, "grpc_status")
    failed = not 0 < status < 400 or bool(grpc)
    said = formatting.call_status(status, None if grpc is None else int(grpc))
    reason = text(call, "reason")
    endpoint = text(call, "endpoint") or _servers(call)
    return (
        (formatting.clock(number(call, "time"), now, exact=True)[-12:], ""),
        (said, ERROR if failed else GOOD),
        (text(call, "model") or "no model", "" if text(call, "model") else QUIET),
        (formatting.milliseconds(number(call, "duration_ms")), ""),
        (reason or endpoint, ERROR if reason else ""),
        (text(call, "operation") or text(call, "method"), ""),
        (formatting.forms(text(call, "client_form"), text(call, "server_form")), ""),
        (formatting.milliseconds(number(call, "server_ms")), ""),
        (formatting.size(number(call, "request_bytes")), ""),
        (formatting.size(number(call, "response_bytes")), ""),
        (text(call, "client"), ""),
        (_phases(call), QUIET),
        (text(call, "request_id"), QUIET),
    )


def _servers(call: Document) -> str:
    """Return where a call went that has no endpoint of its own."""
    if text(call, "answered_by") == "server" and text(call, "upstream"):
        return f"endpoints of {text(call, 'upstream')}"
    return "no server was asked"


def _phases(call: Document) -> str:
    return ", ".join(
        f"{text(each, 'name')} {formatting.milliseconds(number(each, 'duration_ms'))}"
        for each in objects(call, "timeline")
    )
