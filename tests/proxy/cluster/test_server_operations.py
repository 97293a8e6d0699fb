"""Loads, settings and metadata of several servers: every endpoint counts."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from gateway.errors import ErrorKind, GatewayError, bad_response
from gateway.protocol.dialects import JSON, KSERVE, OPENVINO, Dialect
from gateway.protocol.tensors import ModelMetadata
from gateway.proxy.admission.concurrency_limit import ConcurrencyLimit
from gateway.proxy.admission.memory_budget import MemoryBudget
from gateway.proxy.cluster.scatter_gather import FAILED_ENDPOINTS
from gateway.proxy.cluster.server_operations import DIFFERING_ENDPOINTS
from gateway.proxy.destination import Destination
from gateway.proxy.router import Route, Router
from gateway.routing.matcher import Match
from gateway.sizes import MAX_MODEL_DOCUMENT
from gateway.upstream.pool.checks import ModelDiscovery, PoolSupervisor
from gateway.upstream.pool.member import Outcome
from tests.support.doubles.cluster import (
    A,
    B,
    C,
    D,
    ServerStep,
    connect_error,
    one_upstream,
    received_requests,
    scripted_response,
    send_request,
    servers,
    upstreams_of,
    weighted_destinations,
)
from tests.support.doubles.streaming import (
    LIMITS,
    ScriptedClientResponse,
    ScriptedEndpoint,
    ScriptedUpstreamResponse,
    make_destination,
    ready,
    single_destination,
)
from tests.support.gateway import until
from tests.support.inference_messages import metadata

LOAD = "/v2/repository/models/m/load"
CHUNKED = {"Transfer-Encoding": "chunked"}
OK = scripted_response(b"")
SHORT = replace(LIMITS, idle_timeout=0.2)


def _error(response: ScriptedClientResponse) -> str:
    fields = json.loads(response.body)
    assert list(fields) == ["error"]
    return str(fields["error"])


# ---------------------------------------------------------------------------------------- endpoints


@pytest.mark.parametrize(
    ("target", "sent"),
    [
        (LOAD, LOAD),
        ("/v2/repository/r/models/m/unload?x=y", "/v2/repository/r/models/m/unload?x=y"),
        ("/v2/logging", "/v2/logging"),
        ("/v2/models/m/versions/1/trace?x", "/v2/models/m/trace/setting?x"),
    ],
)
async def test_every_endpoint_gets_the_load_and_the_first_response_is_returned(
    target: str, sent: str
) -> None:
    first = scripted_response(b"first", 201, {"X-A": "1"})
    cluster = one_upstream(a=first, b=scripted_response(b"second"), c=OK)
    response = await cluster.ask("POST", target, b"{}", headers={"Accept-Encoding": "gzip"})
    assert (response.status, response.body, dict(response.headers)) == (201, b"first", {"X-A": "1"})
    assert cluster.received == [[f"POST {sent}"]] * 3
    assert cluster.log.count_of("server is let go") == 3
    for endpoint in cluster.endpoints:
        assert endpoint.bodies == [b"{}"]
        # Some servers require a Content-Type.
        described = {"Content-Length": "2", "Content-Type": "application/json"}
        assert dict(endpoint.requests[0].headers) == described


async def test_every_upstream_of_a_rule_gets_the_load_and_every_endpoint_once() -> None:
    one, two, three, unused, elsewhere = servers(a=OK, b=OK, c=OK, unused=OK, elsewhere=OK)
    (again,) = servers(a=OK)
    canary = make_destination(two, three, again, name="canary")
    none = make_destination(unused, name="unused")
    route = Route(Match(), (make_destination(one), canary, none, canary), (90, 10, 0, 1))
    router = Router([route, Route(Match(), (make_destination(elsewhere),))], lambda: 0.0)
    assert (await send_request(router, "POST", LOAD)).status == 200
    assert received_requests(one, two, three) == [[f"POST {LOAD}"]] * 3
    assert received_requests(again, unused, elsewhere) == [[]] * 3


async def test_ejected_endpoint_gets_the_load_without_a_trial() -> None:
    cluster = one_upstream(a=(OK, OK), b=(connect_error(B), OK))
    pool = cluster.destinations[0].upstream.pool
    for _ in range(5):
        lease = pool.lease_all()[1]
        lease.acquire()
        lease.release(Outcome.FAILED)
    left_out = pool.members[1].ejection
    assert left_out.ejections == 1
    assert (await cluster.ask("POST", LOAD)).status == 502
    assert pool.members[1].ejection == replace(left_out, failures=6)
    assert (await cluster.ask("POST", LOAD)).status == 200
    assert pool.members[1].ejection.ejections == 0


async def test_endpoints_are_queried_in_parallel_and_each_counts() -> None:
    gates = [asyncio.Event() for _ in range(3)]
    cluster = one_upstream(a=(gates[0], OK), b=(gates[1], OK), c=(gates[2], OK))
    pool = cluster.destinations[0].upstream.pool
    task = asyncio.create_task(cluster.ask("POST", LOAD))
    await until(lambda: all(each.requests for each in cluster.endpoints))
    assert pool.outstanding == [1, 1, 1]
    gates[1].set()
    await until(lambda: pool.outstanding == [1, 0, 1])
    assert not task.done()
    for gate in gates:
        gate.set()
    assert (await task).status == 200


# ---------------------------------------------------------------------------------------- responses


FAILURES: dict[str, tuple[Callable[[], dict[str, Any]], int, str]] = {
    "one hangs within its answer": (
        lambda: {"a": OK, "b": ScriptedUpstreamResponse(200, {}, [b"{", asyncio.Event()])},
        502,
        f"succeeded at {A}; failed: waiting for {B}: nothing moved for 0.2 s (limits.idle_timeout)",
    ),
    "two fail": (
        lambda: {
            "a": scripted_response(b'{"error":"failed to load \'m\',\\n no   backend"}', 400),
            "b": OK,
            "c": bad_response("fell over"),
        },
        502,
        f"succeeded at {B}; failed: "
        f"{A} returned 400: failed to load 'm', no backend; {C}: fell over",
    ),
    "all are down": (
        lambda: {"a": connect_error(A), "b": connect_error(B)},
        503,
        f"failed: cannot connect to {A}: Connection refused; "
        f"cannot connect to {B}: Connection refused",
    ),
    "an endless response": (
        lambda: {"a": OK, "b": scripted_response(b"x" * (MAX_MODEL_DOCUMENT + 1))},
        502,
        f"succeeded at {A}; failed: {B} returned more than {MAX_MODEL_DOCUMENT} bytes",
    ),
    "a long error": (
        lambda: {"a": OK, "b": scripted_response(b"\xff" + b"y" * 500, 500)},
        502,
        f"succeeded at {A}; failed: {B} returned 500: \ufffd{'y' * 199}...",
    ),
}


@pytest.mark.parametrize(("steps", "status", "error"), FAILURES.values(), ids=FAILURES)
async def test_error_names_the_endpoints_that_failed(
    steps: Callable[[], dict[str, Any]], status: int, error: str
) -> None:
    cluster = one_upstream(limits=SHORT, **steps())
    response = await cluster.ask("POST", LOAD + "?token=secret", b"{}")
    assert (response.status, _error(response)) == (status, f"POST {LOAD} {error}")


async def test_endpoints_that_hang_or_fail_are_named_and_count_as_failed() -> None:
    limits = replace(LIMITS, request_timeout=0.2)
    cluster = one_upstream(limits=limits, a=OK, b=asyncio.Event(), c=scripted_response(b"", 500))
    assert _error(await cluster.ask("POST", LOAD)) == (
        f"POST {LOAD} succeeded at {A}; failed: "
        f"waiting for {B}: not done in 0.2 s (limits.request_timeout); {C} returned 500"
    )
    pool = cluster.destinations[0].upstream.pool
    assert [member.ejection.failures for member in pool.members] == [0, 1, 0]
    assert [member.calls.failures for member in pool.members] == [0, 1, 1]


async def test_equal_errors_of_all_servers_pass_to_the_client() -> None:
    error = scripted_response(b"unknown model", 404, {"X-A": "1"})
    response = await one_upstream(a=error, b=scripted_response(b"another", 404)).ask("POST", LOAD)
    assert (response.status, response.body) == (404, b"unknown model")
    assert dict(response.headers) == {"X-A": "1"}


async def test_overload_of_all_endpoints_has_a_retry_after() -> None:
    lack = GatewayError(ErrorKind.EXHAUSTED, "out of local resources", retry_after=1)
    response = await one_upstream(a=lack, b=lack).ask("POST", LOAD)
    assert (response.status, response.headers["Retry-After"]) == (503, "1")
    response = await one_upstream(a=OK, b=lack).ask("POST", LOAD)
    assert (response.status, response.headers.get("Retry-After")) == (502, None)


# ------------------------------------------------------------------------------------------- bodies


@pytest.mark.parametrize(
    ("headers", "body", "sent"),
    [
        ({}, (), None),
        ({"Content-Length": "0"}, (), (b"",)),
        ({}, (b"a", b"b"), (b"ab",)),
        (CHUNKED, (b"a", b"b"), [b"ab"]),
        (CHUNKED, (b"",), []),
    ],
)
async def test_every_endpoint_gets_the_whole_body(
    headers: dict[str, str], body: tuple[bytes, ...], sent: Any
) -> None:
    cluster = one_upstream(a=OK, b=OK)
    await cluster.ask("POST", LOAD, *body, headers=headers)
    for endpoint in cluster.endpoints:
        assert endpoint.requests[0].body == sent
        assert "Transfer-Encoding" not in endpoint.requests[0].headers


@pytest.mark.parametrize("headers", [{}, CHUNKED], ids=["sized", "chunked"])
@pytest.mark.parametrize(
    ("limits", "error"),
    [
        ({"max_buffered_body_bytes": 99}, "larger than 99 bytes (limits.max_buffered_body_bytes)"),
        (
            {"max_buffered_body_bytes": 99, "max_request_bytes": 98},
            "larger than 98 bytes (limits.max_request_bytes)",
        ),
    ],
)
async def test_body_over_the_cap_reaches_no_endpoint(
    headers: dict[str, str], limits: dict[str, int], error: str
) -> None:
    cluster = one_upstream(limits=replace(LIMITS, **limits), a=OK, b=OK)
    response = await cluster.ask("POST", LOAD, bytes(50), bytes(50), headers=headers)
    assert response.status == 413
    assert error in _error(response)
    assert cluster.received == [[], []]


async def test_client_is_expected_while_its_body_is_read() -> None:
    cluster = one_upstream(limits=SHORT, a=OK, b=OK)
    response = await cluster.ask("POST", LOAD, b"{", asyncio.Event(), headers=CHUNKED)
    assert response.status == 408
    assert cluster.received == [[], []]


async def test_single_server_gets_the_body_as_it_arrives() -> None:
    limits = replace(LIMITS, max_buffered_body_bytes=10)
    cluster = one_upstream(limits=limits, a=scripted_response(b"{}", 200, {"X-A": "1"}))
    headers = {**CHUNKED, "Accept-Encoding": "gzip"}
    response = await cluster.ask("POST", LOAD, bytes(50), bytes(50), headers=headers)
    assert (response.status, response.body, dict(response.headers)) == (200, b"{}", {"X-A": "1"})
    (request,) = cluster.endpoints[0].requests
    assert isinstance(request.body, AsyncIterable)
    assert request.headers["Accept-Encoding"] == "gzip"


# --------------------------------------------------------------------------------- slots and memory


def _limited(
    endpoint: ScriptedEndpoint, name: str, own: ConcurrencyLimit, shared: ConcurrencyLimit
) -> Destination:
    destination = make_destination(endpoint, name=name)
    upstream = replace(destination.upstream, concurrency_limit=own)
    return replace(destination, upstream=upstream, concurrency_limits=(own, shared))


@pytest.mark.parametrize("target", [LOAD, "/v2/repository/index"])
async def test_broadcast_takes_one_slot_of_each_upstream(target: str) -> None:
    limits = [ConcurrencyLimit(place, 1, 0, 1.0) for place in ("the gateway", "a", "b")]
    hangs = asyncio.Event()
    endpoints = servers(a=(hangs, scripted_response(b"[]")), b=(hangs, scripted_response(b"[]")))
    router = weighted_destinations(
        _limited(endpoints[0], "b", limits[2], limits[0]),
        _limited(endpoints[1], "a", limits[1], limits[0]),
    )
    task = asyncio.create_task(send_request(router, "POST", target))
    await until(lambda: all(each.requests for each in endpoints))
    assert [limit.active for limit in limits] == [1, 1, 1]
    refused = await send_request(router, "POST", target)
    assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
    assert "a is busy" in _error(refused)
    hangs.set()
    assert (await task).status == 200
    assert [limit.active for limit in limits] == [0, 0, 0]
    assert [len(each.requests) for each in endpoints] == [1, 1]


async def test_broadcast_that_waits_for_an_upstream_takes_no_shared_slot() -> None:
    shared, *own = (ConcurrencyLimit(place, 1, 1, 1.0) for place in ("the gateway", "a", "b"))
    one, two = servers(a=OK, b=OK)
    router = weighted_destinations(
        _limited(one, "a", own[0], shared), _limited(two, "b", own[1], shared)
    )
    assert own[1].try_acquire()
    task = asyncio.create_task(send_request(router, "POST", LOAD))
    await until(lambda: own[1].queued)
    assert (own[0].active, shared.active) == (1, 0)
    own[1].release()
    assert (await task).status == 200
    assert [limit.active for limit in (shared, *own)] == [0, 0, 0]


async def test_buffered_bytes_of_a_broadcast_count() -> None:
    budget = MemoryBudget(100_000)
    endpoints = servers(
        a=(scripted_response(b"x" * 70_000), OK), b=(scripted_response(b"x" * 31_000), OK)
    )
    limits = replace(LIMITS, max_buffered_body_bytes=200_000)
    destination = make_destination(*endpoints, limits=limits)
    router = single_destination(replace(destination, memory_budget=budget))
    response = await send_request(router, "POST", LOAD)
    assert (response.status, budget.total) == (502, 0)
    assert "limits.max_buffered_bytes" in _error(response)
    body = [bytes(60_000)] * 2
    response = await send_request(router, "POST", LOAD, *body, headers=CHUNKED)
    assert (response.status, budget.total) == (503, 0)
    assert received_requests(*endpoints) == [[f"POST {LOAD}"]] * 2


# ---------------------------------------------------------------------------------- model discovery


INDEX = "POST /v2/repository/index"
UNLOAD = "/v2/repository/models/m/unload"


def _has(*models: str) -> ServerStep:
    """Return the index of a server."""
    return scripted_response(
        json.dumps([{"name": model, "state": "READY"} for model in models]).encode()
    )


def _discovering(endpoints: Sequence[ScriptedEndpoint], known: str) -> Destination:
    """Return a route to endpoints with these models, a letter each; ? if they are unknown."""
    destination = make_destination(
        *endpoints, supervisor=PoolSupervisor(model_discovery=ModelDiscovery(60))
    )
    for member, model in zip(destination.upstream.pool.members, known, strict=True):
        member.models = None if model == "?" else ready(*model)
    return destination


@pytest.mark.parametrize("known", ["nmn", "???"])
@pytest.mark.parametrize(
    ("method", "target", "sent"),
    [("POST", UNLOAD, UNLOAD), ("GET", "/v2/models/m/trace", "/v2/models/m/trace/setting")],
)
async def test_unload_goes_to_the_endpoints_that_have_the_model(
    known: str, method: str, target: str, sent: str
) -> None:
    endpoints = servers(a=(_has("n", "m"), OK), b=(_has("m"), OK), c=_has("n"))
    response = await send_request(
        single_destination(_discovering(endpoints, known)), method, target
    )
    assert response.status == 200
    assert received_requests(*endpoints) == [[INDEX, f"{method} {sent}"]] * 2 + [[INDEX]]


async def test_unload_of_an_unknown_model_goes_to_all_endpoints() -> None:
    endpoints = servers(
        a=(_has("n"), scripted_response(b"no", 400)), b=(_has(), scripted_response(b"none", 400))
    )
    response = await send_request(single_destination(_discovering(endpoints, "mm")), "POST", UNLOAD)
    assert (response.status, response.body) == (400, b"no")
    assert received_requests(*endpoints) == [[INDEX, f"POST {UNLOAD}"]] * 2


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (connect_error(B), f"cannot connect to {B}: Connection refused"),
        (asyncio.Event(), f"waiting for {B}: nothing moved for 0.2 s (limits.idle_timeout)"),
    ],
)
async def test_endpoint_whose_models_cannot_be_listed_is_named(step: ServerStep, why: str) -> None:
    endpoints = servers(a=(_has("m"), OK), b=(step, step))
    destination = replace(_discovering(endpoints, "mn"), limits=SHORT)
    response = await send_request(single_destination(destination), "POST", UNLOAD)
    assert response.status == 502
    error = json.loads(response.body)["error"]
    assert error == f"POST {UNLOAD} succeeded at {A}; failed: {why}"
    assert sum(destination.upstream.pool.outstanding) == 0


@pytest.mark.parametrize("step", [scripted_response(b"", 500), scripted_response(b"no index")])
async def test_endpoint_without_a_model_list_gets_the_unload(step: ServerStep) -> None:
    endpoints = servers(a=(_has("m"), OK), b=(step, OK))
    assert (
        await send_request(single_destination(_discovering(endpoints, "mn")), "POST", UNLOAD)
    ).status == 200
    assert received_requests(*endpoints) == [[INDEX, f"POST {UNLOAD}"]] * 2


async def test_load_goes_to_all_endpoints_without_listing_models() -> None:
    endpoints = servers(a=OK, b=OK)
    assert (
        await send_request(single_destination(_discovering(endpoints, "mn")), "POST", LOAD)
    ).status == 200
    assert received_requests(*endpoints) == [[f"POST {LOAD}"]] * 2


# ---------------------------------------------------------------------------------- cached metadata


async def _known(destination: Destination) -> ModelMetadata:
    """Fill the cache with the model, or return what it has."""
    (source,) = servers(source=(scripted_response(metadata(-1)), ScriptedUpstreamResponse(404)))
    return await destination.upstream.metadata.get("m", None, source)


@pytest.mark.parametrize("verb", ["load", "unload"])
@pytest.mark.parametrize("step", [OK, connect_error(B)])
async def test_load_drops_cached_metadata_in_every_upstream(verb: str, step: ServerStep) -> None:
    one, canary = servers(a=OK, b=step)
    router = [make_destination(one), make_destination(canary, name="canary")]
    before = [await _known(destination) for destination in router]
    assert [await _known(destination) for destination in router] == before
    await send_request(weighted_destinations(*router), "POST", f"/v2/repository/r/models/m/{verb}")
    for destination, old in zip(router, before, strict=True):
        assert await _known(destination) is not old


async def test_load_keeps_cached_metadata_of_other_models_and_upstreams() -> None:
    endpoints = servers(a=(OK, OK), b=(OK, OK), c=OK)
    one, two, elsewhere = (make_destination(each) for each in endpoints)
    router = Router([Route(Match(), (one, two), (1, 1)), Route(Match(), (elsewhere,))], lambda: 0.0)
    before = [await _known(destination) for destination in (one, two, elsewhere)]
    await send_request(router, "POST", "/v2/repository/models/m2/load")
    assert [await _known(destination) for destination in (one, two, elsewhere)] == before
    await send_request(router, "POST", LOAD)
    assert await _known(elsewhere) is before[2]


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


DIFFERENCES: dict[str, tuple[Callable[[], dict[str, Any]], bytes, str | None, str | None]] = {
    "the first differs": (
        lambda: {
            "a": scripted_response(OFF),
            "b": scripted_response(ON),
            "c": scripted_response(SAME),
        },
        OFF,
        f"{B}, {C}",
        None,
    ),
    "one fails, one hangs": (
        lambda: {
            "a": connect_error(A),
            "b": scripted_response(OFF),
            "c": scripted_response(ON),
            "d": asyncio.Event(),
        },
        OFF,
        C,
        f"{A}, {D}",
    ),
    "two respond with errors": (
        lambda: {
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
    steps: Callable[[], dict[str, Any]], body: bytes, differing: str | None, failed: str | None
) -> None:
    response = await one_upstream(limits=SHORT, **steps()).ask("GET", "/v2/logging")
    assert (response.status, response.body) == (200, body)
    assert response.headers.get(DIFFERING_ENDPOINTS) == differing
    assert response.headers.get(FAILED_ENDPOINTS) == failed


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
