import json

import pytest

from gateway.protocol.operations import parse_operation
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.cluster.server_metadata import server_metadata
from gateway.proxy.interfaces import Call
from tests.support.doubles.cluster import (
    B,
    ServerStep,
    connect_error,
    received_requests,
    scripted_response,
    send_request,
    servers,
    weighted_destinations,
)
from tests.support.doubles.streaming import (
    EventLog,
    ScriptedClientResponse,
    ScriptedEndpoint,
    ScriptedRequest,
    ScriptedUpstreamResponse,
    make_destination,
)

_LARGEST = 1024 * 1024


async def _response(
    *body: bytes, status: int = 200
) -> tuple[ScriptedClientResponse, ScriptedEndpoint]:
    log = EventLog()
    headers = {"Content-Length": str(sum(map(len, body))), "X-Kept": "1"}
    endpoint = ScriptedEndpoint(log, ScriptedUpstreamResponse(status, headers, body))
    received_requests = {"Accept-Encoding": "gzip", "X-Asked": "1", "Content-Length": "0"}
    request = ScriptedRequest(log, "GET", "/v2?q", received_requests)
    response = ScriptedClientResponse(log)
    destination = make_destination(endpoint)
    with Deadline(9, 9) as deadline:
        operation = parse_operation("GET", "/v2?q")
        upstreams = (destination.upstream,)
        await server_metadata(Call(request, response, operation, destination, deadline, upstreams))
    assert log[-2:] == ["client has got all", "server is let go"]
    assert response.status == status
    assert response.headers["X-Kept"] == "1"
    assert sum(destination.upstream.pool.outstanding) == 0
    return response, endpoint


@pytest.mark.parametrize(
    ("said", "passed"),
    [
        ({}, ["binary_tensor_data"]),
        ({"extensions": []}, ["binary_tensor_data"]),
        ({"extensions": ["a", "b"]}, ["a", "b", "binary_tensor_data"]),
    ],
)
async def test_binary_extension_is_added(said: dict[str, object], passed: list[str]) -> None:
    text = json.dumps({"name": "n", **said}).encode()
    response, _ = await _response(text[:5], text[5:])
    assert json.loads(response.body) == {"name": "n", "extensions": passed}
    assert response.headers["Content-Length"] == str(len(response.body))


@pytest.mark.parametrize(
    "text",
    [b'{ "extensions" : ["binary_tensor_data"] }', b"{", b"", b"7", b'{"extensions":null}'],
)
async def test_response_that_is_no_metadata_passes_untouched(text: bytes) -> None:
    response, _ = await _response(text)
    assert response.body == text


async def test_metadata_over_the_cap_passes_untouched() -> None:
    text = b'{"x":"' + b"x" * _LARGEST + b'"}'
    response, _ = await _response(text[:_LARGEST], text[_LARGEST:])
    assert response.body == text


async def test_error_response_passes_untouched() -> None:
    response, _ = await _response(b"{}", status=503)
    assert response.body == b"{}"


async def test_server_metadata_request_has_no_body() -> None:
    _, endpoint = await _response(b"{}")
    (request,) = endpoint.requests
    assert (request.method, request.target, request.body) == ("GET", "/v2?q", None)
    assert dict(request.headers) == {"X-Asked": "1"}


# -------------------------------------------------------------------------------- several upstreams


def _server(*extensions: object, **more: object) -> ServerStep:
    return scripted_response(json.dumps({"name": "n", "extensions": extensions, **more}).encode())


@pytest.mark.parametrize(
    ("steps", "shared"),
    [
        ((_server("a", "b", "c"), _server("c", "a")), ["a", "c", "binary_tensor_data"]),
        ((_server("binary_tensor_data", "a"), _server("a", "x")), ["a", "binary_tensor_data"]),
        (
            (_server("binary_tensor_data", "a"), _server("a", "binary_tensor_data")),
            ["binary_tensor_data", "a"],
        ),
        ((_server("a"), scripted_response(b'{"name":"m"}')), ["binary_tensor_data"]),
        ((_server("a"), _server(extensions=None)), ["binary_tensor_data"]),
        ((scripted_response(b'{"name":"n"}'), _server("a")), ["binary_tensor_data"]),
        ((_server(["a"], {"b": 1}), _server({"b": 1})), [{"b": 1}, "binary_tensor_data"]),
        ((_server("a"), connect_error(B), _server("a")), ["a", "binary_tensor_data"]),
    ],
)
async def test_extensions_are_those_that_all_upstreams_share(
    steps: tuple[ServerStep, ...], shared: list[object]
) -> None:
    first, *others = servers(**dict(zip("abc", steps, strict=False)))
    router = weighted_destinations(make_destination(first), make_destination(*others))
    response = await send_request(
        router, "GET", "/v2?q", headers={"Accept-Encoding": "gzip", "X-Asked": "1"}
    )
    assert response.status == 200
    assert json.loads(response.body) == {"name": "n", "extensions": shared}
    assert response.headers["Content-Length"] == str(len(response.body))
    assert received_requests(first) == [["GET /v2?q"]]
    assert dict(first.requests[0].headers) == {"X-Asked": "1"}


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (connect_error(B), "cannot connect to upstream 'b': Connection refused"),
        (scripted_response(b'{"error":"starting"}', 400), "upstream 'two' returned 400: starting"),
        (scripted_response(b"["), "upstream 'two' sent no valid server metadata"),
        (scripted_response(b"[]"), "upstream 'two' sent no valid server metadata"),
    ],
)
async def test_missing_extensions_of_an_upstream_count_as_none(step: ServerStep, why: str) -> None:
    one, two = servers(a=_server("a"), b=step)
    response = await send_request(
        weighted_destinations(make_destination(one, name="one"), make_destination(two, name="two")),
        "GET",
        "/v2",
    )
    assert response.status == 502
    assert why in json.loads(response.body)["error"]


async def test_equal_errors_of_all_upstreams_pass_to_the_client() -> None:
    one, two = servers(a=scripted_response(b"first", 503), b=scripted_response(b"second", 503))
    response = await send_request(
        weighted_destinations(make_destination(one), make_destination(two)), "GET", "/v2"
    )
    assert (response.status, response.body) == (503, b"first")
