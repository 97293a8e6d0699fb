"""Documents of the admin address as the gateway writes them, and lines that a terminal shows."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from gateway.top.table import Body

NOW = 1_800_000_000.0
HOSTILE = (
    "\x1b[2J\x1b]0;title\x07\r\n\t\x00\x7f\x9b31m",
    "\u202egnp.exe \u2066\u200b\u200d\ufeff",
    "שלום مرحبا ١٢٣",
    "x" * 10_240,
    "模型" * 300,
    "e\u0301\u0300 a\u0308\u20dd",
    "👩\u200d🚀 👍🏽 🇫🇷 ☂\ufe0f",
    "\ud800 \U0010ffff \ue000 ᄀ\u1161\u11a8",
    "[bold red]markup[/] :smile:",
)
"""Names that a terminal must not get as they are, or that are hard to align."""

Json = dict[str, Any]


def overview(**more: Any) -> Json:
    """Return an overview with traffic, errors and problems."""
    return {
        "time": NOW,
        "version": "0.1.0",
        "build": "compiled",
        "python": "3.11.7",
        "started_at": NOW - 7384,
        "draining": False,
        "settings": {
            "loaded_at": NOW - 60,
            "file": "/etc/tensorgate.yaml",
            "number": 3,
            "last_failure": None,
            "failed_at": None,
            "reloads": 2,
            "reload_failures": 0,
        },
        "workers": [worker(100), worker(101, draining=True), worker(102, seconds_since_update=9.0)],
        "now": {
            "requests_in_progress": 12,
            "connections": 34,
            "buffered_bytes": 1_500_000,
            "calls_per_second": 1204.0,
            "errors_per_second": 3.7,
            "error_ratio": 0.0031,
            "client_error_ratio": 0.02,
            "duration_window_seconds": 63,
            "p50_ms": 4.21,
            "p95_ms": 12.1,
            "p99_ms": 1480.0,
            "request_bytes_per_second": 1_200_000.0,
            "response_bytes_per_second": 840.0,
        },
        "problems": [
            {"level": "error", "panel": "topology", "text": "no endpoint of dead can be used"},
            {"level": "warning", "panel": "topology", "text": "operators have drained 1 of 2"},
        ],
        "recent": {
            "end": NOW,
            "step_seconds": 1,
            "calls_per_second": [None, *range(299)],
            "errors_per_second": [None, *[0.0] * 299],
            "client_errors_per_second": [None, *[0.0] * 299],
            "p50_ms": [None] * 300,
            "p95_ms": [1.5] * 300,
            "p99_ms": [2.5] * 300,
            "requests_in_progress": [1.0] * 300,
        },
    } | more


def event(**more: Any) -> Json:
    """Return an event of the journal."""
    return {
        "time": NOW - 61,
        "level": "error",
        "event": "endpoint ejected",
        "subject": "http://10.0.0.7:8000 of demo",
        "who": "outlier detection",
        "why": "ejected for 10 s: 5 failures in a row",
    } | more


def worker(pid: int, **more: Any) -> Json:
    """Return a worker of the overview."""
    return {
        "pid": pid,
        "draining": False,
        "connections": 1,
        "requests_in_progress": 2,
        "tasks": 10,
        "buffered_bytes": 0,
        "seconds_since_update": 0.001,
    } | more


def endpoint(url: str, **more: Any) -> Json:
    """Return an endpoint of the topology."""
    return {
        "url": url,
        "requests_in_progress": 3,
        "state": "in_use",
        "state_text": "",
        "state_since": "2027-01-15T07:58:20.000+00:00",
        "calls_total": 1234,
        "calls_per_second": 12.5,
        "failures_per_second": 0.0,
        "p50_ms": 1.5,
        "p99_ms": 20.0,
        "duration_window_seconds": 63,
        "sent_bytes_per_second": 1000.0,
        "received_bytes_per_second": 2000.0,
        "recent": {"step_seconds": 10, "calls_per_second": [1.0, 2.0], "p99_ms": [None, 2.0]},
        "models": None,
        "models_total": None,
    } | more


def upstream(name: str, endpoints: list[Json], **more: Any) -> Json:
    """Return an upstream of the topology."""
    return {
        "name": name,
        "required": True,
        "unreachable_reason": None,
        "dialect": {"name": "triton", "reason": "configured"},
        "inference_protocol": {"name": "http", "reason": "x"},
        "concurrency": None,
        "endpoints_total": len(endpoints),
        "endpoints_fitting": len(endpoints),
        "calls_per_second": 25.0,
        "failures_per_second": 0.5,
        "endpoints": endpoints,
    } | more


def topology(*upstreams: Json, routes: list[Json] | None = None) -> Json:
    """Return a topology."""
    return {"time": NOW, "routes": routes or [], "upstreams": list(upstreams)}


def route(name: str, **more: Any) -> Json:
    """Return a route of the topology."""
    return {
        "name": name,
        "match": "every request",
        "upstreams": [{"name": "demo", "weight": 1}],
        "mirror": None,
        "calls_per_second": 5.0,
        "error_ratio": 0.5,
        "client_error_ratio": 0.25,
        "p99_ms": 30.0,
    } | more


def model(name: str, **more: Any) -> Json:
    """Return a model."""
    return {
        "name": name,
        "ready": [{"upstream": "demo", "endpoints": 1, "of": 2}],
        "calls_per_second": 7.0,
        "error_ratio": 0.0,
        "client_error_ratio": 0.125,
        "duration_window_seconds": 63,
        "p50_ms": 1.0,
        "p95_ms": 2.0,
        "p99_ms": 3.0,
        "forms_per_second": {"json": 6.0, "raw": 1.0, "binary": 0.0},
        "statuses_per_second": {"2xx": 7.0},
    } | more


def call(**more: Any) -> Json:
    """Return a call that has ended."""
    return {
        "time": NOW + 0.25,
        "client": "10.0.0.1",
        "method": "POST",
        "operation": "infer",
        "model": "add",
        "upstream": "demo",
        "endpoint": "http://10.0.0.7:8000",
        "status": 200,
        "answered_by": "server",
        "client_form": "json",
        "server_form": "binary",
        "request_bytes": 134,
        "response_bytes": 1140,
        "duration_ms": 1.335,
        "server_ms": 1.024,
        "request_id": "c18323daf6e182a278546913734b1f42",
        "timeline": [
            {"name": "server", "duration_ms": 1.024},
            {"name": "send", "duration_ms": 0.2},
        ],
    } | more


def calls(*those: Json) -> Json:
    """Return recent calls."""
    return {"time": NOW, "kept": len(those), "calls": list(those)}


RAW = re.compile("[\x00-\x1f\x7f-\x9f\u0590-\u08ff\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff]")


def check_lines(lines: Sequence[Text], width: int) -> list[str]:
    """Return lines as they are shown; check that a terminal interprets nothing in them.

    Those that rich has to cut, as they are wider, are those of a very narrow terminal.
    """
    console = Console(file=io.StringIO(), width=width, color_system=None)
    for line in lines:
        assert cell_len(line.plain) <= max(width, 32), line.plain
        assert not RAW.search(line.plain), line.plain
        assert len(console.render_lines(line, pad=False)) == 1
    return [line.plain.rstrip() for line in lines]


def lines_of(body: Body, width: int) -> list[str]:
    """Return all lines of a panel, without blanks at their ends."""
    return check_lines([*body.heading, *map(body.row, range(len(body.rows)))], width)
