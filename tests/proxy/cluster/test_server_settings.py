"""Metadata, trace settings and logging of several servers, which are changed at each of them."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace
from typing import Any

import pytest

from gateway.protocol.dialects import JSON, KSERVE, OPENVINO, Dialect
from gateway.proxy.cluster.scatter_gather import FAILED_ENDPOINTS
from gateway.proxy.cluster.server_operations import DIFFERING_ENDPOINTS
from tests.support.doubles.cluster import (
    A,
    B,
    C,
    D,
    ServerStep,
    connect_error,
    one_upstream,
    scripted_response,
    send_request,
    servers,
    upstreams_of,
    weighted_destinations,
)
from tests.support.doubles.streaming import (
    LIMITS,
    ScriptedClientResponse,
    ScriptedUpstreamResponse,
    make_destination,
)

# ----------------------------------------------------------------------------------------- settings


ON = b'{"log_info": true, "log_verbose_level": 1}'
SAME = b'{"log_verbose_level":1,"log_info":true}'
OFF = b'{"log_info": false, "log_verbose_level": 1}'


@pytest.mark.parametrize(
    ("target", "sent"),
    [
        ("/v2/logging?x", "/v2/logging?x"),
        ("/v2/models/m/versions/2/trace?x?y", "/v2/models/m/trace/setting?x?y"),
    ],
)
async def test_settings_of_the_first_endpoint_are_returned(target: str, sent: str) -> None:
    cluster = one_upstream(a=scripted_response(ON, 200, {"X-A": "1"}), b=scripted_response(SAME))
    headers = {"Accept-Encoding": "gzip", "X-Asked": "1"}
    response = await cluster.ask("GET", target, b"{}", headers=headers)
    assert (response.status, response.body, dict(response.headers)) == (200, ON, {"X-A": "1"})
    for endpoint in cluster.endpoints:
        (request,) = endpoint.requests
        assert (request.method, request.target, request.body) == ("GET", sent, None)
        assert dict(request.headers) == {"X-Asked": "1"}


DIFFERENCES: dict[str, tuple[dict[str, Any], bytes, str | None, str | None]] = {
    "the first differs": (
        {"a": scripted_response(OFF), "b": scripted_response(ON), "c": scripted_response(SAME)},
        OFF,
        f"{B}, {C}",
        None,
    ),
    "one fails, one differs": (
        {"a": connect_error(A), "b": scripted_response(OFF), "c": scripted_response(ON)},
        OFF,
        C,
        A,
    ),
    "two respond with errors": (
        {
            "a": scripted_response(b"no", 404),
            "b": scripted_response(ON),
            "c": scripted_response(b"", 500),
        },
        ON,
        None,
        f"{A}, {C}",
    ),
}


@pytest.mark.parametrize(
    ("steps", "body", "differing", "failed"), DIFFERENCES.values(), ids=DIFFERENCES
)
async def test_headers_name_endpoints_that_differ_and_that_fail(
    steps: dict[str, Any], body: bytes, differing: str | None, failed: str | None
) -> None:
    response = await one_upstream(**steps).ask("GET", "/v2/logging")
    assert (response.status, response.body) == (200, body)
    assert response.headers.get(DIFFERING_ENDPOINTS) == differing
    assert response.headers.get(FAILED_ENDPOINTS) == failed


async def test_header_names_an_endpoint_that_hangs() -> None:
    cluster = one_upstream(
        limits=replace(LIMITS, idle_timeout=0.2),
        a=asyncio.Event(),
        b=scripted_response(ON),
        c=scripted_response(OFF),
        d=asyncio.Event(),
    )
    response = await cluster.ask("GET", "/v2/trace/setting")
    assert (response.status, response.body) == (200, ON)
    assert response.headers[DIFFERING_ENDPOINTS] == C
    assert response.headers[FAILED_ENDPOINTS] == f"{A}, {D}"


async def test_error_tells_why_all_endpoints_failed() -> None:
    cluster = one_upstream(a=connect_error(A), b=scripted_response(b'{"error":"no"}', 400))
    response = await cluster.ask("GET", "/v2/trace")
    assert response.status == 502
    assert json.loads(response.body)["error"] == (
        f"GET /v2/trace failed: cannot connect to {A}: Connection refused; {B} returned 400: no"
    )


@pytest.mark.parametrize("method", ["HEAD", "PUT"])
async def test_other_methods_go_to_one_server(method: str) -> None:
    cluster = one_upstream(a=scripted_response(b""), b=scripted_response(b""))
    assert (await cluster.ask(method, "/v2/logging")).status == 200
    assert cluster.received == [[f"{method} /v2/logging"], []]


async def test_version_that_the_server_ignores_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    cluster = one_upstream(a=(scripted_response(ON), scripted_response(ON)))
    await cluster.ask("GET", "/v2/models/m/trace")
    assert not caplog.messages
    await cluster.ask("GET", "/v2/models/m/versions/7/trace")
    (message,) = caplog.messages
    assert "version 7 of model m" in message
    assert "triton" in message


@pytest.mark.parametrize("dialect", [KSERVE, OPENVINO, JSON], ids=lambda each: each.name)
async def test_server_without_trace_settings_gets_no_request(dialect: Dialect) -> None:
    cluster = one_upstream(dialect=dialect, a=scripted_response(ON))
    response = await cluster.ask("GET", "/v2/models/m/trace/setting")
    assert response.status == 501
    lacking = f"upstream 'servers' ({dialect.name}) lacks the trace extension"
    assert lacking in json.loads(response.body)["error"]
    assert cluster.received == [[]]


@pytest.mark.parametrize(("method", "body"), [("GET", ()), ("POST", (b"{}",))])
async def test_upstreams_without_trace_settings_are_named(
    method: str, body: tuple[bytes, ...]
) -> None:
    """No server is queried: a change would reach only some of them."""
    on = scripted_response(ON)
    cluster = upstreams_of(a=on, b=on, c=on, dialects={"a": KSERVE, "c": JSON})
    response = await cluster.ask(method, "/v2/trace", *body)
    assert response.status == 501
    lacking = "upstream 'a' (kserve) and upstream 'c' (json) lack the trace extension"
    assert json.loads(response.body)["error"] == lacking
    assert cluster.received == [[], [], []]


# ----------------------------------------------------------------------------------------- metadata


_LARGEST = 1024 * 1024


async def _ask(*body: bytes, status: int = 200) -> ScriptedClientResponse:
    """Ask a server that responds like this, whose request has no body."""
    cluster = one_upstream(a=ScriptedUpstreamResponse(status, {"X-Kept": "1"}, body))
    asked = {"Accept-Encoding": "gzip", "X-Asked": "1", "Content-Length": "0"}
    response = await cluster.ask("GET", "/v2?q", headers=asked)
    assert (response.status, response.headers["X-Kept"]) == (status, "1")
    (request,) = cluster.endpoints[0].requests
    assert (request.method, request.target, request.body) == ("GET", "/v2?q", None)
    assert dict(request.headers) == {"X-Asked": "1"}
    return response


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (b'{ "extensions" : ["binary_tensor_data"] }', 200),
        (b"{", 200),
        (b'{"extensions":null}', 200),
        (b"{}", 503),
        (b'{"x":"' + b"x" * _LARGEST + b'"}', 200),
    ],
    ids=["complete", "no JSON", "no list", "an error", "over the cap"],
)
async def test_response_that_is_no_metadata_passes_untouched(text: bytes, status: int) -> None:
    assert (await _ask(text[:_LARGEST], text[_LARGEST:], status=status)).body == text


def _server(*extensions: object, **more: object) -> ServerStep:
    return scripted_response(json.dumps({"name": "n", "extensions": extensions, **more}).encode())


@pytest.mark.parametrize(
    ("steps", "shared"),
    [
        ((_server("a", "b", "c"), _server("c", "a")), ["a", "c", "binary_tensor_data"]),
        ((_server("binary_tensor_data", "a"), _server("a", "x")), ["a", "binary_tensor_data"]),
        ((_server("a"), _server(extensions=None)), ["binary_tensor_data"]),
        ((_server(["a"], {"b": 1}), _server({"b": 1})), [{"b": 1}, "binary_tensor_data"]),
        ((_server("a"), connect_error(B), _server("a")), ["a", "binary_tensor_data"]),
    ],
)
async def test_extensions_are_those_that_all_upstreams_share(
    steps: tuple[ServerStep, ...], shared: list[object]
) -> None:
    first, *others = servers(**dict(zip("abc", steps, strict=False)))
    router = weighted_destinations(make_destination(first), make_destination(*others))
    response = await send_request(router, "GET", "/v2?q", headers={"X-Asked": "1"})
    assert response.status == 200
    assert json.loads(response.body) == {"name": "n", "extensions": shared}
    assert response.headers["Content-Length"] == str(len(response.body))
    assert dict(first.requests[0].headers) == {"X-Asked": "1"}


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (connect_error(B), "cannot connect to upstream 'b': Connection refused"),
        (scripted_response(b'{"error":"starting"}', 400), "upstream 'b' returned 400: starting"),
        (scripted_response(b"[]"), "upstream 'b' sent no valid server metadata"),
    ],
)
async def test_missing_extensions_of_an_upstream_count_as_none(step: ServerStep, why: str) -> None:
    response = await upstreams_of(a=_server("a"), b=step).ask("GET", "/v2")
    assert response.status == 502
    assert why in json.loads(response.body)["error"]
