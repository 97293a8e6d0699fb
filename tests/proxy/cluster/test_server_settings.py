"""Trace settings and logging, read from several servers."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from gateway.proxy.cluster.scatter_gather import FAILED
from gateway.proxy.cluster.server_settings import DIFFERING
from tests.support.doubles.cluster import (
    A,
    B,
    C,
    D,
    Turn,
    among,
    ask,
    asked,
    says,
    servers,
    unreachable,
)
from tests.support.doubles.streaming import LIMITS, only, route_to

ON = b'{"log_info": true, "log_verbose_level": 1}'
SAME = b'{"log_verbose_level":1,"log_info":true}'
OFF = b'{"log_info": false, "log_verbose_level": 1}'


@pytest.mark.parametrize(
    ("target", "sent"),
    [
        ("/v2/logging?x", "/v2/logging?x"),
        ("/v2/trace", "/v2/trace/setting"),
        ("/v2/models/m/versions/2/trace?x", "/v2/models/m/trace/setting?x"),
    ],
)
async def test_all_are_asked_and_the_first_answers(target: str, sent: str) -> None:
    endpoints = servers(a=says(ON, 200, {"X-A": "1"}), b=says(SAME), c=says(ON))
    routes = among(route_to(*endpoints[:2]), route_to(endpoints[2]))
    headers = {"Accept-Encoding": "gzip", "X-Asked": "1"}
    answer = await ask(routes, "GET", target, b"{}", headers=headers)
    assert (answer.status, answer.body, dict(answer.headers)) == (200, ON, {"X-A": "1"})
    for endpoint in endpoints:
        (request,) = endpoint.requests
        assert (request.method, request.target, request.body) == ("GET", sent, None)
        assert dict(request.headers) == {"X-Asked": "1"}


@pytest.mark.parametrize(
    ("turns", "body", "differing", "failed"),
    [
        ({"a": says(ON), "b": says(OFF), "c": says(SAME)}, ON, B, None),
        ({"a": says(OFF), "b": says(ON), "c": says(SAME)}, OFF, f"{B}, {C}", None),
        ({"a": says(ON), "b": unreachable(B), "c": says(SAME)}, ON, None, B),
        ({"a": unreachable(A), "b": says(OFF), "c": says(ON)}, OFF, C, A),
        ({"a": says(b"no", 404), "b": says(ON), "c": says(b"", 500)}, ON, None, f"{A}, {C}"),
        ({"a": says(b"no JSON"), "b": says(b"no JSON"), "c": says(ON)}, b"no JSON", C, None),
        ({"a": says(ON), "b": says(b"")}, ON, B, None),
    ],
)
async def test_headers_name_who_differs_and_who_fails(
    turns: dict[str, Turn], body: bytes, differing: str | None, failed: str | None
) -> None:
    route = route_to(*servers(**turns))
    answer = await ask(only(route), "GET", "/v2/logging")
    assert (answer.status, answer.body) == (200, body)
    assert answer.headers.get(DIFFERING) == differing
    assert answer.headers.get(FAILED) == failed
    assert sum(route.upstream.pool.outstanding) == 0


async def test_one_that_hangs_is_named() -> None:
    endpoints = servers(a=asyncio.Event(), b=says(ON), c=says(OFF), d=asyncio.Event())
    routes = only(route_to(*endpoints, limits=replace(LIMITS, idle_time=0.2)))
    answer = await ask(routes, "GET", "/v2/trace/setting")
    assert (answer.status, answer.body) == (200, ON)
    assert (answer.headers[DIFFERING], answer.headers[FAILED]) == (C, f"{A}, {D}")


async def test_where_none_answers_the_error_tells_why() -> None:
    routes = only(route_to(*servers(a=unreachable(A), b=says(b'{"error":"no"}', 400))))
    answer = await ask(routes, "GET", "/v2/trace")
    assert answer.status == 502
    assert json.loads(answer.body)["error"] == (
        f"GET /v2/trace failed: cannot connect to {A}: Connection refused; {B} answered 400: no"
    )


async def test_where_all_refuse_alike_the_servers_own_error_is_given() -> None:
    routes = only(route_to(*servers(a=says(b"unknown model", 404), b=says(b"another", 404))))
    answer = await ask(routes, "GET", "/v2/models/m/trace")
    assert (answer.status, answer.body) == (404, b"unknown model")


async def test_one_server_answers_as_it_is() -> None:
    (endpoint,) = servers(a=says(ON))
    headers = {"Accept-Encoding": "gzip"}
    answer = await ask(only(route_to(endpoint)), "GET", "/v2/trace", headers=headers)
    assert (answer.status, answer.body) == (200, ON)
    assert dict(endpoint.requests[0].headers) == headers


@pytest.mark.parametrize("method", ["HEAD", "PUT", "DELETE"])
async def test_other_methods_go_to_one_server(method: str) -> None:
    endpoints = servers(a=says(b""), b=says(b""))
    assert (await ask(only(route_to(*endpoints)), method, "/v2/logging")).status == 200
    assert asked(*endpoints) == [[f"{method} /v2/logging"], []]
