"""The panels in a terminal, and their columns."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from rich.cells import cell_len

from gateway.top.lists import describe_calls, describe_endpoints, describe_models
from gateway.top.overview import describe_overview
from gateway.top.table import Column, Table, said
from tests.top import documents
from tests.top.documents import (
    NOW,
    call,
    calls,
    endpoint,
    lines_of,
    model,
    route,
    topology,
    upstream,
)

COLUMNS = (
    Column("Name", said("name", "bold"), 6, 10, 20, middle=True),
    Column("Calls", said("calls"), 5, right=True),
    Column("p99", said("p99"), 5, rank=1, right=True),
    Column("Why", said("why", "red"), 4, 8, 30, rank=2),
)
ROW = {"name": "a-long-name-of-27-characters", "calls": "1/s", "p99": "2 ms", "why": "because"}


@pytest.mark.parametrize(
    ("width", "heading", "row"),
    [
        (14, " Name    Calls", " a-l…rs    1/s"),
        (18, " Name        Calls", " a-lon…ters    1/s"),
        (25, " Name        Calls    p99", " a-lon…ters    1/s   2 ms"),
        (31, " Name        Calls    p99  Why ", " a-lon…ters    1/s   2 ms  bec…"),
        (39, " Name           Calls    p99  Why      ", " a-long…acters    1/s   2 ms  because  "),
        (5, " Name", " a-…s"),
        (1, " ", " "),
    ],
)
def test_columns_of_a_higher_rank_give_way(width: int, heading: str, row: str) -> None:
    table = Table(COLUMNS, width)
    assert (table.heading().plain, table.row(ROW).plain) == (heading, row)


def test_a_row_is_never_wider_than_the_terminal_and_keeps_its_styles() -> None:
    for width in range(1, 120):
        table = Table(COLUMNS, width)
        row = table.row(dict.fromkeys(ROW, "模型\x1b[2J" * 50))
        assert cell_len(row.plain) == cell_len(table.heading().plain) <= width
    assert [str(span.style) for span in row.spans] == ["bold", "red"]


def _calls(*those: documents.Json, width: int = 80, **more: Any) -> list[str]:
    return lines_of(describe_calls(calls(*those), width, **more), width)


FAILED = {"status": 503, "reason": "cannot connect to http://a:1", "endpoint": ""}


def test_calls_have_status_words_and_reasons() -> None:
    at = time.strftime("%H:%M:%S", time.localtime(NOW))
    assert _calls(call(), call(**FAILED), call(status=0)) == [
        " Follows: 3 of 3 calls that the gateway keeps",
        " Ended at      Status           Model         Duration  Endpoint, or error",
        f" {at}.250  200 OK           add            1.33 ms  http://10.0.0.7:8000",
        f" {at}.250  503 Unavailable  add            1.33 ms  cannot connect to http:…",
        f" {at}.250  aborted          add            1.33 ms  http://10.0.0.7:8000",
    ]
    line = _calls(call(), width=300)[2]
    for text in ("JSON → binary", "134 B", "1.14 kB", "10.0.0.1", "server 1.02 ms, send 0.2 ms"):
        assert text in line
    assert "no model" in _calls(call(model=""))[2]


@pytest.mark.parametrize(
    ("fields", "style"),
    [({}, "green"), ({"status": 404}, "bold red"), ({"grpc_status": 14}, "bold red")],
)
def test_failed_calls_stand_out(fields: documents.Json, style: str) -> None:
    spans = describe_calls(calls(call(**fields)), 80).row(0).spans
    assert str(spans[0].style) == style


def test_calls_without_an_endpoint_say_where_they_went() -> None:
    several = call(endpoint="", upstream="demo")
    lines = _calls(several, call(endpoint="", answered_by="gateway"), width=120)
    assert "endpoints of demo" in lines[2]
    assert "no server was asked" in lines[3]


def test_the_title_tells_whether_calls_are_followed() -> None:
    assert _calls(call(), search="ADD", follows=False)[0] == (
        " Paused: 1 of 1 call that the gateway keeps, with this text"
    )
    assert _calls()[0] == " No call has ended yet"
    some = describe_calls({"kept": 9, "calls": [call()]}, 80)
    assert lines_of(some, 80)[0] == " Follows: 1 of 9 calls that the gateway keeps"


def _endpoints(document: documents.Json, width: int = 80, search: str = "") -> list[str]:
    return lines_of(describe_endpoints(document, 0, width, search), width)


def test_endpoints_stand_below_their_upstream_and_above_the_routes() -> None:
    those = [
        endpoint(f"http://10.0.0.{at}:8000", state=state, state_text="because")
        for at, state in enumerate(["in_use", "ejected"])
    ]
    assert _endpoints(topology(upstream("demo", those), routes=[route("2")])) == [
        " 2 endpoints, 1 upstream; p50 and p99 are of the last minute",
        " Endpoint                    State           Calls    Failed       p50       p99",
        " demo  2 endpoints · triton over HTTP · calls 25/s · failed 0.5/s",
        " http://10.0.0.0:8000        in use         12.5/s       0/s    1.5 ms     20 ms",
        " http://10.0.0.1:8000        ejected        12.5/s       0/s    1.5 ms     20 ms",
        "",
        " Route         Takes               Leads to              Calls   Errors      4xx",
        " 2             every request       demo                    5/s     50 %     25 %",
    ]


def test_a_wide_terminal_shows_why_charts_bytes_and_models() -> None:
    why = "ejected for 5 s: 3 failures in a row"
    old = {"state_since": "2027-01-13T07:58:20.000+00:00", "models": ["a", "b"], "models_total": 12}
    those = [endpoint("http://a:1", state="ejected", state_text=why), endpoint("b", **old)]
    _, _, _, first, second = _endpoints(topology(upstream("demo", those)), 300)
    assert why in first
    assert re.search(r"ejected +\d\d:58:20 ", first)
    assert "▄█" in first
    assert "1 kB/s" in first
    assert re.search(r"in use +27-01-1\d", second)
    assert second.endswith("a, b and 10 more")


def test_an_upstream_says_what_is_wrong_with_it() -> None:
    dead = upstream("dead", [], unreachable_reason="cannot connect", required=False)
    limited = upstream(
        "limited",
        [],
        required=False,
        dialect={"name": None, "reason": "x"},
        concurrency={"active": 3, "queued": 2, "max_requests": 7},
    )
    assert _endpoints(topology(dead, limited), 160)[2:] == [
        " dead  cannot be used: cannot connect",
        " limited  0 endpoints · dialect not known · calls 25/s · failed 0.5/s"
        " · 3 of 7 slots taken, 2 wait · not required",
    ]


def test_endpoints_that_are_not_read_yet_are_dots() -> None:
    first = upstream("first", [], endpoints_total=500, endpoints_fitting=500)
    first["endpoints"] = [endpoint(f"http://e{at}:1") for at in range(400, 500)]
    second = upstream("second", [endpoint("http://last:1")])
    body = describe_endpoints(topology(first, second, routes=[route("1")]), 400, 80)
    assert len(body.rows) == 1 + 500 + 1 + 1 + 3
    starts = {
        1: " …",
        400: " …",
        401: " http://e400:1",
        500: " http://e499:1",
        501: " second",
        502: " http://last:1",
    }
    for row, start in starts.items():
        assert body.row(row).plain.startswith(start)
    assert [body.positions[row] for row in (0, 1, 401, 501, 502, 505)] == [0, 0, 400, 500, 500, 501]
    endless = upstream("endless", [], endpoints_fitting=10**20)
    assert len(describe_endpoints(topology(endless), 0, 80).rows) == 100_001


def test_a_filter_leaves_out_routes_and_empty_upstreams() -> None:
    none = upstream("none", [], endpoints_total=3)
    some = upstream("some", [endpoint("http://a:1")], endpoints_total=5)
    lines = _endpoints(topology(none, some, routes=[route("1")]), 80, "a")
    assert lines[0] == " 1 of 8 endpoints, 2 upstreams; p50 and p99 are of the last minute"
    assert [line.split()[0] for line in lines[2:]] == ["some", "http://a:1"]


def test_routes_name_weights_mirrors_and_4xx() -> None:
    weights = [{"name": "blue", "weight": 9}, {"name": "green", "weight": 1}]
    mirror = {"upstream": "shadow", "percent": 7.0}
    document = topology(routes=[route("canary", upstreams=weights, mirror=mirror)])
    heading, row = _endpoints(document, 200)[-2:]
    assert "blue × 9, green × 1, 7 % copied to shadow" in row
    assert re.search("Calls +Errors +4xx +p99$", heading)
    assert re.search("5/s +50 % +25 % +30 ms$", row)


def _models(*models: documents.Json, width: int = 80, search: str = "", **more: Any) -> list[str]:
    document = {"total": len(models), "models": list(models), **more}
    return lines_of(describe_models(document, 0, width, search), width)


def test_models_have_rates_and_times() -> None:
    assert _models(model("resnet50"), {"name": "silent", "ready": []}) == [
        " 2 models; percentiles are of the last minute",
        " Model                 Ready         Calls   Errors      4xx       p50       p99",
        " resnet50              1 of 2          7/s      0 %   12.5 %      1 ms      3 ms",
        " silent                not known         –        –        –         –         –",
    ]
    line = _models(model("m"), width=200)[2]
    for text in ("2xx 7/s", "JSON 6/s, raw bytes 1/s", "demo (1 of 2)"):
        assert text in line
    assert _models()[0] == " No model is known to be ready, and none was called"
    assert _models(search="x")[0] == " 0 models with this text; percentiles are of the last minute"


def test_calls_of_no_model_with_numbers_of_its_own_have_rows() -> None:
    """So the rates of all rows add up to those of all calls."""
    others = {"calls_per_second": 50.0, "error_ratio": 1.0, "client_error_ratio": 0.0}
    (line,) = _models(model("m"), others=others, no_model={})[3:]
    assert line.split() == ["other", "models", "50/s", "100", "%", "0", "%", "–", "–"]
    assert len(_models(model("m"), search="m", others=others)) == 3


def test_a_model_that_only_fails_says_why() -> None:
    failure = {"time": 1.0, "status": 503, "reason": "cannot connect"}
    failing = {"name": "bad", "ready": [], "last_failure": failure}
    line = _models(failing, width=260)[2]
    assert line.startswith(" bad ")
    assert " all fail " in line
    assert line.endswith(" the last one failed with 503: cannot connect")
    assert "all fail" not in _models(model("once", last_failure=failure))[2]


def _overview(width: int = 80, height: int = 24, search: str = "", **more: Any) -> list[str]:
    document = documents.overview(**more)
    return lines_of(describe_overview(document, (width, height), search), width)


def test_numbers_stand_beside_their_charts() -> None:
    lines = _overview()
    heading = "All calls last 10 s The last 5 min, 10 s per column highest"
    assert " ".join(lines[0].split()) == heading
    assert lines[1].startswith(" Calls               1,204/s  ▂▂▂▂▂▂▂▂▂▃▃▃▃▄▄▄▄")
    assert lines[1].endswith("█              298/s")
    assert lines[2].split()[:3] == ["Errors", "0.31", "%"]
    assert lines[3].split()[:3] == ["4xx", "2", "%"]
    assert lines[4].split() == ["p50,", "last", "minute", "4.21", "ms", "–"]
    assert lines[6].split()[:5] == ["p99,", "last", "minute", "1.48", "s"]
    assert lines[7].split()[:3] == ["In", "progress", "12"]
    assert lines[8] == " 34 connections · received 1.2 MB/s · sent 840 B/s · buffered 1.5 MB"


@pytest.mark.parametrize(("height", "rows"), [(24, 1), (30, 2), (40, 3), (60, 4)])
def test_charts_use_the_height(height: int, rows: int) -> None:
    labels = [line.split("  ")[0].strip() for line in _overview(200, height)]
    assert labels.index("Errors") - labels.index("Calls") == rows


def test_problems_are_sentences_that_break_into_lines() -> None:
    long = {"level": "warning", "text": "word " * 30, "since": "2027-01-15T07:58:20.000+00:00"}
    lines = _overview(60, problems=[*documents.overview()["problems"][:1], long])
    at = lines.index(" 2 problems")
    assert lines[at + 1] == " Error    no endpoint of dead can be used"
    assert re.match(r" Warning  since \d\d:58:20: word word", lines[at + 2])
    assert lines[at + 3].startswith(" " * 10 + "word")
    assert " Nothing is wrong." in _overview(problems=[])


def test_workers_have_their_states_in_words() -> None:
    lines = _overview(120)
    at = next(number for number, line in enumerate(lines) if line.startswith(" Worker"))
    state = lines[at].index("State")
    states = [line[state:].partition("  ")[0] for line in lines[at + 1 : at + 4]]
    assert states == ["takes calls", "drains", "does not report"]
    assert lines[at + 3].endswith("9 s ago")


def test_a_failed_reload_and_the_age_of_percentiles_are_told() -> None:
    settings = {**documents.overview()["settings"], "last_failure": "nonsense: unknown key"}
    now = {**documents.overview()["now"], "duration_window_seconds": 7}
    lines = _overview(settings=settings, now=now)
    assert [line for line in lines if "failed: nonsense: unknown key" in line]
    assert lines[4].startswith(" p50, last 7 s ")
    new = _overview(recent=None, now={}, workers=[], settings=None)
    assert new[1].split() == ["Calls", "–", "–"]


_EVENTS = [
    documents.event(),
    documents.event(
        event="settings reloaded", level="info", subject="", who="SIGHUP", why="weight: 1 → 2"
    ),
    documents.event(event="process restarted", level="info", subject="process 7", who="supervisor"),
]


def _with_events(room: int, width: int = 160, search: str = "") -> list[str]:
    body = describe_overview(documents.overview(), (width, 24), search, _EVENTS, room)
    return lines_of(body, width)


def test_last_events_are_shown_as_far_as_there_is_room() -> None:
    least = len(_overview())
    assert len(_with_events(0)) == len(_with_events(least + 2)) == least
    one = _with_events(least + 3)
    assert one[least:-1] == ["", one[-2]]
    assert one[-2].split() == ["Time", "Event", "Of", "Why", "By"]
    assert "endpoint ejected" in one[-1]
    assert "http://10.0.0.7:8000 of demo" in one[-1]
    lines = _with_events(least + 50)
    assert len(lines) == least + 5
    assert "the gateway" in lines[-2]
    assert lines[-2].endswith("SIGHUP")
    assert any("endpoint ejected" in line for line in _with_events(100, width=34))


def test_a_filter_chooses_problems_and_events() -> None:
    lines = _with_events(100, search="SIGHUP")
    assert " 0 of 2 problems" in lines
    assert lines[-2].split()[0] == "Time"
    assert "settings reloaded" in lines[-1]
    assert " 1 of 2 problems" in _overview(search="DRAINED")
