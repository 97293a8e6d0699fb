"""The endpoints in a terminal."""

import re

import pytest

from gateway.top.panels.endpoints import describe
from tests.top import documents
from tests.top.documents import endpoint, route, topology, upstream
from tests.top.panels.lines import check_body, lines_of


def test_endpoints_stand_below_their_upstream_and_above_the_routes() -> None:
    states = ["in_use", "ejected"]
    those = [
        endpoint(f"http://10.0.0.{at}:8000", state=state, state_text="because")
        for at, state in enumerate(states)
    ]
    lines = lines_of(describe(topology(upstream("demo", those), routes=[route("2")]), 0, 80))
    assert lines == [
        " 2 endpoints, 1 upstream; p50 and p99 are of the last minute",
        " Endpoint                    State           Calls    Failed       p50       p99",
        " demo  2 endpoints · triton over HTTP · calls 25/s · failed 0.5/s",
        " http://10.0.0.0:8000        in use         12.5/s       0/s    1.5 ms     20 ms",
        " http://10.0.0.1:8000        ejected        12.5/s       0/s    1.5 ms     20 ms",
        "",
        " Route         Takes               Leads to              Calls   Errors      4xx",
        " 2             every request       demo                    5/s     50 %     25 %",
    ]


def test_a_wide_terminal_shows_why_charts_and_bytes() -> None:
    one = endpoint("http://a:1", state="ejected", state_text="ejected for 5 s: 3 failures in a row")
    lines = lines_of(describe(topology(upstream("demo", [one])), 0, 200))
    assert "ejected for 5 s: 3 failures in a row" in lines[3]
    assert re.search(r"ejected +\d\d:58:20 ", lines[3])
    assert "▄█" in lines[3]
    assert "1 kB/s" in lines[3]


def test_an_upstream_says_what_is_wrong_with_it() -> None:
    dead = upstream("dead", [], unreachable_reason="cannot connect", required=False)
    limited = upstream(
        "limited",
        [],
        required=False,
        dialect={"name": None, "reason": "x"},
        concurrency={"active": 3, "queued": 2, "max_requests": 7},
    )
    lines = lines_of(describe(topology(dead, limited), 0, 160))
    assert lines[2] == " dead  cannot be used: cannot connect"
    assert lines[3] == (
        " limited  0 endpoints · dialect not known · calls 25/s · failed 0.5/s"
        " · 3 of 7 slots taken, 2 wait · not required"
    )


def test_rows_that_are_not_read_yet_are_dots() -> None:
    first = upstream("first", [], endpoints_total=500, endpoints_fitting=500)
    names = [endpoint(f"http://e{at}:1") for at in range(400, 500)]
    first["endpoints"] = names
    second = upstream("second", [endpoint("http://last:1")])
    body = describe(topology(first, second), 400, 80)
    assert body.count == 1 + 500 + 1 + 1
    assert body.row(1).plain == body.row(400).plain == " …"
    assert body.row(401).plain.startswith(" http://e400:1")
    assert body.row(500).plain.startswith(" http://e499:1")
    assert body.row(501).plain.startswith(" second")
    assert body.row(502).plain.startswith(" http://last:1")
    assert [body.first(row) for row in (0, 1, 401, 501, 502, 503)] == [0, 0, 400, 500, 500, 0]


def test_a_filter_leaves_out_routes_and_empty_upstreams() -> None:
    none = upstream("none", [], endpoints_total=3)
    some = upstream("some", [endpoint("http://a:1")], endpoints_total=5)
    lines = lines_of(describe(topology(none, some, routes=[route("1")]), 0, 80, "a"))
    assert lines[0] == " 1 of 8 endpoints, 2 upstreams; p50 and p99 are of the last minute"
    assert [line.split()[0] for line in lines[2:]] == ["some", "http://a:1"]


def test_routes_name_weights_and_mirrors() -> None:
    weights = [{"name": "blue", "weight": 9}, {"name": "green", "weight": 1}]
    mirror = {"upstream": "shadow", "percent": 7.0}
    document = topology(routes=[route("canary", upstreams=weights, mirror=mirror)])
    assert "blue × 9, green × 1, 7 % copied to shadow" in lines_of(describe(document, 0, 200))[-1]


def test_route_has_its_4xx_beside_its_errors() -> None:
    document = topology(routes=[route("r", client_error_ratio=0.31)])
    for width in (80, 200):
        heading, row = lines_of(describe(document, 0, width))[-2:]
        assert re.search("Calls +Errors +4xx", heading)
        assert re.search("5/s +50 % +31 %", row)
    assert heading.endswith("p99")
    assert row.endswith("30 ms")


def test_state_of_another_day_has_its_date() -> None:
    since = "2027-01-13T07:58:20.000+00:00"
    (*_, row) = lines_of(
        describe(topology(upstream("u", [endpoint("a", state_since=since)])), 0, 120)
    )
    assert re.search(r"in use +27-01-1\d", row)


def test_the_models_of_an_endpoint_are_named() -> None:
    one = endpoint("http://a:1", models=["a", "b"], models_total=12)
    lines = lines_of(describe(topology(upstream("demo", [one])), 0, 300))
    assert lines[3].endswith("a, b and 10 more")


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("text", documents.HOSTILE)
def test_hostile_texts_do_not_break_the_layout(text: str, width: int) -> None:
    one = endpoint(text, state=text, state_text=text, models=[text])
    upstreams = [upstream(text, [one]), upstream(text, [one], unreachable_reason=text)]
    routes = [route(text, match=text, upstreams=[{"name": text}])]
    check_body(describe(topology(*upstreams, routes=routes), 0, width), width)
