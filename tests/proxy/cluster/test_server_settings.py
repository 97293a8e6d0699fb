"""Trace settings and logging, read from several servers."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from gateway.proxy.cluster.scatter_gather import FAILED_ENDPOINTS
from gateway.proxy.cluster.server_settings import DIFFERING_ENDPOINTS
from tests.support.doubles.cluster import (
    A,
    B,
    C,
    D,
    ServerStep,
    connect_error,
    received_requests,
    scripted_response,
    send_request,
    servers,
    weighted_destinations,
)
from tests.support.doubles.streaming import LIMITS, make_destination, single_destination

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
async def test_settings_of_the_first_endpoint_are_returned(target: str, sent: str) -> None:
    endpoints = servers(
        a=scripted_response(ON, 200, {"X-A": "1"}),
        b=scripted_response(SAME),
        c=scripted_response(ON),
    )
    router = weighted_destinations(make_destination(*endpoints[:2]), make_destination(endpoints[2]))
    headers = {"Accept-Encoding": "gzip", "X-Asked": "1"}
    response = await send_request(router, "GET", target, b"{}", headers=headers)
    assert (response.status, response.body, dict(response.headers)) == (200, ON, {"X-A": "1"})
    for endpoint in endpoints:
        (request,) = endpoint.requests
        assert (request.method, request.target, request.body) == ("GET", sent, None)
        assert dict(request.headers) == {"X-Asked": "1"}


@pytest.mark.parametrize(
    ("steps", "body", "differing", "failed"),
    [
        (
            {"a": scripted_response(ON), "b": scripted_response(OFF), "c": scripted_response(SAME)},
            ON,
            B,
            None,
        ),
        (
            {"a": scripted_response(OFF), "b": scripted_response(ON), "c": scripted_response(SAME)},
            OFF,
            f"{B}, {C}",
            None,
        ),
        (
            {"a": scripted_response(ON), "b": connect_error(B), "c": scripted_response(SAME)},
            ON,
            None,
            B,
        ),
        (
            {"a": connect_error(A), "b": scripted_response(OFF), "c": scripted_response(ON)},
            OFF,
            C,
            A,
        ),
        (
            {
                "a": scripted_response(b"no", 404),
                "b": scripted_response(ON),
                "c": scripted_response(b"", 500),
            },
            ON,
            None,
            f"{A}, {C}",
        ),
        (
            {
                "a": scripted_response(b"no JSON"),
                "b": scripted_response(b"no JSON"),
                "c": scripted_response(ON),
            },
            b"no JSON",
            C,
            None,
        ),
        ({"a": scripted_response(ON), "b": scripted_response(b"")}, ON, B, None),
    ],
)
async def test_headers_name_endpoints_that_differ_and_that_fail(
    steps: dict[str, ServerStep], body: bytes, differing: str | None, failed: str | None
) -> None:
    destination = make_destination(*servers(**steps))
    response = await send_request(single_destination(destination), "GET", "/v2/logging")
    assert (response.status, response.body) == (200, body)
    assert response.headers.get(DIFFERING_ENDPOINTS) == differing
    assert response.headers.get(FAILED_ENDPOINTS) == failed
    assert sum(destination.upstream.pool.outstanding) == 0


async def test_header_names_an_endpoint_that_hangs() -> None:
    endpoints = servers(
        a=asyncio.Event(), b=scripted_response(ON), c=scripted_response(OFF), d=asyncio.Event()
    )
    router = single_destination(
        make_destination(*endpoints, limits=replace(LIMITS, idle_timeout=0.2))
    )
    response = await send_request(router, "GET", "/v2/trace/setting")
    assert (response.status, response.body) == (200, ON)
    assert (response.headers[DIFFERING_ENDPOINTS], response.headers[FAILED_ENDPOINTS]) == (
        C,
        f"{A}, {D}",
    )


async def test_error_tells_why_all_endpoints_failed() -> None:
    router = single_destination(
        make_destination(*servers(a=connect_error(A), b=scripted_response(b'{"error":"no"}', 400)))
    )
    response = await send_request(router, "GET", "/v2/trace")
    assert response.status == 502
    assert json.loads(response.body)["error"] == (
        f"GET /v2/trace failed: cannot connect to {A}: Connection refused; {B} returned 400: no"
    )


async def test_equal_errors_of_all_servers_pass_to_the_client() -> None:
    router = single_destination(
        make_destination(
            *servers(
                a=scripted_response(b"unknown model", 404), b=scripted_response(b"another", 404)
            )
        )
    )
    response = await send_request(router, "GET", "/v2/models/m/trace")
    assert (response.status, response.body) == (404, b"unknown model")


async def test_settings_of_one_server_pass_untouched() -> None:
    (endpoint,) = servers(a=scripted_response(ON))
    headers = {"Accept-Encoding": "gzip"}
    response = await send_request(
        single_destination(make_destination(endpoint)), "GET", "/v2/trace", headers=headers
    )
    assert (response.status, response.body) == (200, ON)
    assert dict(endpoint.requests[0].headers) == headers


@pytest.mark.parametrize("method", ["HEAD", "PUT", "DELETE"])
async def test_other_methods_go_to_one_server(method: str) -> None:
    endpoints = servers(a=scripted_response(b""), b=scripted_response(b""))
    assert (
        await send_request(single_destination(make_destination(*endpoints)), method, "/v2/logging")
    ).status == 200
    assert received_requests(*endpoints) == [[f"{method} /v2/logging"], []]
