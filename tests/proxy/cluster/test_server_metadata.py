import json

import pytest

from tests.support.doubles.cluster import (
    B,
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
    ScriptedClientResponse,
    ScriptedUpstreamResponse,
    make_destination,
)

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


# -------------------------------------------------------------------------------- several upstreams


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
