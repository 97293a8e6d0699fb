"""Broadcasts: every endpoint gets the request, and the response covers all of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterable, Callable
from dataclasses import replace
from typing import Any

import pytest

from gateway.errors import ErrorKind, GatewayError, bad_response
from gateway.proxy.admission.concurrency_limit import ConcurrencyLimit
from gateway.proxy.admission.memory_budget import MemoryBudget
from gateway.proxy.calls.dispatch import handle_request
from gateway.proxy.destination import Destination
from gateway.proxy.router import Route, Router
from gateway.routing.matcher import Match
from gateway.sizes import MAX_MODEL_DOCUMENT
from gateway.upstream.pool.member import Outcome
from tests.support.doubles.cluster import (
    A,
    B,
    C,
    ServerStep,
    connect_error,
    received_requests,
    scripted_response,
    send_request,
    servers,
    weighted_destinations,
)
from tests.support.doubles.streaming import (
    LIMITS,
    EventLog,
    ScriptedClientResponse,
    ScriptedEndpoint,
    ScriptedRequest,
    ScriptedUpstreamResponse,
    make_destination,
    single_destination,
)
from tests.support.gateway import until

LOAD = "/v2/repository/models/m/load"
CHUNKED = {"Transfer-Encoding": "chunked"}
OK = scripted_response(b"")


def _error(response: ScriptedClientResponse) -> str:
    fields = json.loads(response.body)
    assert list(fields) == ["error"]
    return str(fields["error"])


# ---------------------------------------------------------------------------------------- endpoints


@pytest.mark.parametrize(
    ("target", "sent"),
    [
        (LOAD, LOAD),
        ("/v2/repository/models/m/unload?x=y", "/v2/repository/models/m/unload?x=y"),
        ("/v2/repository/r/models/m/load", "/v2/repository/r/models/m/load"),
        ("/v2/logging", "/v2/logging"),
        ("/v2/trace", "/v2/trace/setting"),
        ("/v2/models/m/trace?x", "/v2/models/m/trace/setting?x"),
        ("/v2/models/m/versions/1/trace/setting", "/v2/models/m/trace/setting"),
    ],
)
async def test_every_endpoint_gets_the_load_and_the_first_response_is_returned(
    target: str, sent: str
) -> None:
    endpoints = servers(
        a=scripted_response(b"first", 201, {"X-A": "1"}),
        b=scripted_response(b"second"),
        c=scripted_response(b"third"),
    )
    response = await send_request(
        single_destination(make_destination(*endpoints)),
        "POST",
        target,
        b"{}",
        headers={"Accept-Encoding": "gzip"},
    )
    assert (response.status, response.body, dict(response.headers)) == (201, b"first", {"X-A": "1"})
    assert received_requests(*endpoints) == [[f"POST {sent}"]] * 3
    for endpoint in endpoints:
        assert endpoint.bodies == [b"{}"]
        # Some servers require a Content-Type.
        described = {"Content-Length": "2", "Content-Type": "application/json"}
        assert dict(endpoint.requests[0].headers) == described


async def test_every_upstream_of_a_rule_gets_the_load() -> None:
    one, two, three, unused, elsewhere = servers(a=OK, b=OK, c=OK, unused=OK, elsewhere=OK)
    canary = make_destination(two, three, name="canary")
    none = make_destination(unused, name="unused")
    route = Route(Match(), (make_destination(one), canary, none, canary), (90, 10, 0, 1))
    router = Router([route, Route(Match(), (make_destination(elsewhere),))], lambda: 0.0)
    assert (await send_request(router, "POST", LOAD)).status == 200
    assert received_requests(one, two, three, unused, elsewhere) == [
        *[[f"POST {LOAD}"]] * 3,
        [],
        [],
    ]


async def test_endpoint_in_two_upstreams_gets_the_load_once() -> None:
    endpoints = [*servers(a=OK, b=OK), *servers(b=OK)]
    one, two = make_destination(*endpoints[:2]), make_destination(endpoints[2])
    assert (await send_request(weighted_destinations(one, two), "POST", LOAD)).status == 200
    assert [len(each.requests) for each in endpoints] == [1, 1, 0]


async def test_ejected_endpoint_gets_the_load_without_a_trial() -> None:
    endpoints = servers(a=OK, b=(connect_error(B), OK))
    destination = make_destination(*endpoints)
    pool = destination.upstream.pool
    for _ in range(5):
        lease = pool.lease_all()[1]
        lease.acquire()
        lease.release(Outcome.FAILED)
    left_out = pool.members[1].ejection
    assert left_out.ejections == 1
    endpoints[0]._turns.append(OK)
    assert (await send_request(single_destination(destination), "POST", LOAD)).status == 502
    assert pool.members[1].ejection == replace(left_out, failures=6)
    assert (await send_request(single_destination(destination), "POST", LOAD)).status == 200
    assert pool.members[1].ejection.ejections == 0


async def test_endpoints_are_queried_in_parallel_and_each_counts() -> None:
    concurrency_limits = [asyncio.Event() for _ in range(3)]
    endpoints = servers(
        a=(concurrency_limits[0], OK), b=(concurrency_limits[1], OK), c=(concurrency_limits[2], OK)
    )
    destination = make_destination(*endpoints)
    task = asyncio.create_task(send_request(single_destination(destination), "POST", LOAD))
    await until(lambda: all(each.requests for each in endpoints))
    assert destination.upstream.pool.outstanding == [1, 1, 1]
    concurrency_limits[1].set()
    await until(lambda: destination.upstream.pool.outstanding == [1, 0, 1])
    assert not task.done()
    for concurrency_limit in concurrency_limits:
        concurrency_limit.set()
    assert (await task).status == 200
    assert destination.upstream.pool.outstanding == [0, 0, 0]


async def test_client_disconnect_cancels_all_sub_requests() -> None:
    log = EventLog()
    steps: list[ServerStep] = [
        asyncio.Event(),
        ScriptedUpstreamResponse(200, {}, [asyncio.Event()]),
        OK,
    ]
    endpoints = [
        ScriptedEndpoint(log, step, url=url) for step, url in zip(steps, (A, B, C), strict=True)
    ]
    destination = make_destination(*endpoints)
    before = asyncio.all_tasks()
    task = asyncio.create_task(send_request(single_destination(destination), "POST", LOAD))
    await until(lambda: log.count_of("server answers") == 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asyncio.all_tasks() == before
    assert destination.upstream.pool.outstanding == [0, 0, 0]
    assert log.count_of("server is let go") == 2
    assert all(member.ejection.failures == 0 for member in destination.upstream.pool.members)


# ---------------------------------------------------------------------------------------- responses


SHORT = replace(LIMITS, idle_timeout=0.2)


@pytest.mark.parametrize(
    ("steps", "status", "error"),
    [
        pytest.param(
            lambda: {"a": OK, "b": connect_error(B), "c": OK},
            502,
            f"POST {LOAD} succeeded at {A}, {C}; failed: cannot connect to {B}: Connection refused",
            id="one is down",
        ),
        pytest.param(
            lambda: {"a": asyncio.Event(), "b": OK, "c": OK},
            502,
            f"POST {LOAD} succeeded at {B}, {C}; failed: "
            f"waiting for {A}: nothing moved for 0.2 s (limits.idle_timeout)",
            id="one hangs",
        ),
        pytest.param(
            lambda: {
                "a": OK,
                "b": ScriptedUpstreamResponse(200, {}, [b"{", asyncio.Event()]),
                "c": OK,
            },
            502,
            f"POST {LOAD} succeeded at {A}, {C}; failed: "
            f"waiting for {B}: nothing moved for 0.2 s (limits.idle_timeout)",
            id="one hangs within its answer",
        ),
        pytest.param(
            lambda: {
                "a": scripted_response(b'{"error":"failed to load \'m\',\\n no   backend"}', 400),
                "b": OK,
                "c": bad_response("fell over"),
            },
            502,
            f"POST {LOAD} succeeded at {B}; failed: "
            f"{A} returned 400: failed to load 'm', no backend; {C}: fell over",
            id="two fail",
        ),
        pytest.param(
            lambda: {
                "a": scripted_response(b'{"detail":"no"}', 404),
                "b": scripted_response(b"<p>", 500),
                "c": scripted_response(b"", 302),
            },
            502,
            f"POST {LOAD} failed: {A} returned 404: no; {B} returned 500; {C} returned 302",
            id="all fail in their own ways",
        ),
        pytest.param(
            lambda: {"a": connect_error(A), "b": connect_error(B)},
            503,
            f"POST {LOAD} failed: cannot connect to {A}: Connection refused; "
            f"cannot connect to {B}: Connection refused",
            id="all are down",
        ),
        pytest.param(
            lambda: {"a": connect_error(A), "b": scripted_response(b'{"error":["x"]}', 503)},
            502,
            f"POST {LOAD} failed: cannot connect to {A}: Connection refused; {B} returned 503: x",
            id="one is down, the other says the same of itself",
        ),
        pytest.param(
            lambda: {"a": OK, "b": scripted_response(b"x" * (MAX_MODEL_DOCUMENT + 1))},
            502,
            f"POST {LOAD} succeeded at {A}; failed: {B} returned more than "
            f"{MAX_MODEL_DOCUMENT} bytes",
            id="an endless response",
        ),
        pytest.param(
            lambda: {"a": OK, "b": scripted_response(b"\xff" + b"y" * 500, 500)},
            502,
            f"POST {LOAD} succeeded at {A}; failed: {B} returned 500: \ufffd{'y' * 199}...",
            id="a long error",
        ),
    ],
)
async def test_error_names_the_endpoints_that_failed(
    steps: Callable[[], dict[str, ServerStep]], status: int, error: str
) -> None:
    destination = make_destination(*servers(**steps()), limits=SHORT)
    response = await send_request(
        single_destination(destination), "POST", LOAD + "?token=secret", b"{}"
    )
    assert _error(response) == error
    assert response.status == status
    assert sum(destination.upstream.pool.outstanding) == 0


async def test_error_after_the_request_timeout_names_the_endpoints_that_failed() -> None:
    limits = replace(LIMITS, request_timeout=0.2)
    destination = make_destination(*servers(a=OK, b=asyncio.Event()), limits=limits)
    response = await send_request(single_destination(destination), "POST", LOAD)
    assert response.status == 502
    assert _error(response) == (
        f"POST {LOAD} succeeded at {A}; failed: "
        f"waiting for {B}: not done in 0.2 s (limits.request_timeout)"
    )


async def test_broadcast_is_a_504_if_all_endpoints_hang() -> None:
    destination = make_destination(*servers(a=asyncio.Event(), b=asyncio.Event()), limits=SHORT)
    response = await send_request(single_destination(destination), "POST", LOAD)
    assert response.status == 504
    assert A in _error(response)
    assert B in _error(response)


async def test_endpoint_that_hangs_counts_as_failed() -> None:
    destination = make_destination(*servers(a=OK, b=asyncio.Event()), limits=SHORT)
    await send_request(single_destination(destination), "POST", LOAD)
    assert [member.ejection.failures for member in destination.upstream.pool.members] == [0, 1]


async def test_order_of_endpoints_is_that_of_the_settings() -> None:
    concurrency_limit = asyncio.Event()
    slow, quick = servers(
        a=(concurrency_limit, scripted_response(b"slow", 500)), b=scripted_response(b"quick", 400)
    )
    router = weighted_destinations(
        make_destination(slow, name="one"), make_destination(quick, name="two")
    )
    task = asyncio.create_task(send_request(router, "POST", LOAD))
    await until(lambda: not quick._turns)
    concurrency_limit.set()
    expected = f"POST {LOAD} failed: {A} returned 500: slow; {B} returned 400: quick"
    assert _error(await task) == expected


async def test_equal_errors_of_all_servers_pass_to_the_client() -> None:
    text = b'{"error":"unknown model"}'
    endpoints = servers(
        a=scripted_response(text, 404, {"X-A": "1"}), b=scripted_response(b"another", 404)
    )
    response = await send_request(single_destination(make_destination(*endpoints)), "POST", LOAD)
    assert (response.status, response.body, dict(response.headers)) == (404, text, {"X-A": "1"})


async def test_overload_of_all_endpoints_has_a_retry_after() -> None:
    lack = GatewayError(ErrorKind.EXHAUSTED, "out of local resources", retry_after=1)
    both = make_destination(*servers(a=lack, b=lack))
    response = await send_request(single_destination(both), "POST", LOAD)
    assert (response.status, response.headers["Retry-After"]) == (503, "1")
    one = make_destination(*servers(a=OK, b=lack))
    response = await send_request(single_destination(one), "POST", LOAD)
    assert (response.status, response.headers.get("Retry-After")) == (502, None)


async def test_error_shortens_a_long_path() -> None:
    destination = make_destination(*servers(a=OK, b=connect_error(B)))
    response = await send_request(
        single_destination(destination), "POST", f"/v2/repository/models/{'m' * 500}/load"
    )
    assert _error(response).startswith(f"POST /v2/repository/models/{'m' * 178}... succeeded")


# ------------------------------------------------------------------------------------------- bodies


@pytest.mark.parametrize(
    ("headers", "body", "sent"),
    [
        ({}, (), None),
        ({"Content-Length": "0"}, (), (b"",)),
        ({}, (b"a", b"b"), (b"ab",)),
        (CHUNKED, (b"a", b"b"), [b"ab"]),
        (CHUNKED, (), []),
    ],
)
async def test_every_endpoint_gets_the_whole_body(
    headers: dict[str, str], body: tuple[bytes, ...], sent: Any
) -> None:
    endpoints = servers(a=OK, b=OK)
    request = ScriptedRequest(EventLog(), "POST", LOAD, headers, body)
    if headers is CHUNKED:
        request.content_length = None
    await handle_request(
        request,
        ScriptedClientResponse(EventLog()),
        single_destination(make_destination(*endpoints)),
    )
    for endpoint in endpoints:
        assert endpoint.requests[0].body == sent
        assert "Transfer-Encoding" not in endpoint.requests[0].headers


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(
    ("limits", "error"),
    [
        ({"max_request_bytes": 99}, "larger than 99 bytes (limits.max_request_bytes)"),
        ({"max_buffered_body_bytes": 99}, "larger than 99 bytes (limits.max_buffered_body_bytes)"),
        (
            {"max_buffered_body_bytes": 99, "max_request_bytes": 98},
            "larger than 98 bytes (limits.max_request_bytes)",
        ),
    ],
)
async def test_body_over_the_cap_reaches_no_endpoint(
    chunked: bool, limits: dict[str, int], error: str
) -> None:
    endpoints = servers(a=OK, b=OK)
    destination = make_destination(*endpoints, limits=replace(LIMITS, **limits))
    headers = CHUNKED if chunked else {}
    response = await send_request(
        single_destination(destination), "POST", LOAD, bytes(50), bytes(50), headers=headers
    )
    assert response.status == 413
    assert error in _error(response)
    assert received_requests(*endpoints) == [[], []]


async def test_client_is_expected_while_its_body_is_read() -> None:
    endpoints = servers(a=OK, b=OK)
    destination = make_destination(*endpoints, limits=SHORT)
    response = await send_request(
        single_destination(destination), "POST", LOAD, b"{", asyncio.Event(), headers=CHUNKED
    )
    assert response.status == 408
    assert received_requests(*endpoints) == [[], []]


async def test_single_server_gets_the_body_as_it_arrives() -> None:
    (endpoint,) = servers(a=scripted_response(b"{}", 200, {"X-A": "1"}))
    router = single_destination(
        make_destination(endpoint, limits=replace(LIMITS, max_buffered_body_bytes=10))
    )
    headers = {**CHUNKED, "Accept-Encoding": "gzip"}
    response = await send_request(router, "POST", LOAD, bytes(50), bytes(50), headers=headers)
    assert (response.status, response.body, dict(response.headers)) == (200, b"{}", {"X-A": "1"})
    assert isinstance(endpoint.requests[0].body, AsyncIterable)
    assert endpoint.requests[0].headers["Accept-Encoding"] == "gzip"


# --------------------------------------------------------------------------------- slots and memory


def _with_limits(
    destination: Destination, common: ConcurrencyLimit, own: ConcurrencyLimit
) -> Destination:
    return replace(
        destination,
        upstream=replace(destination.upstream, concurrency_limit=own),
        concurrency_limits=(own, common),
    )


@pytest.mark.parametrize("target", [LOAD, "/v2/repository/index"])
async def test_broadcast_takes_one_slot_of_each_upstream(target: str) -> None:
    concurrency_limits = [ConcurrencyLimit(place, 1, 0, 1.0) for place in ("the gateway", "a", "b")]
    hangs = asyncio.Event()
    endpoints = servers(a=(hangs, scripted_response(b"[]")), b=(hangs, scripted_response(b"[]")))
    one = _with_limits(
        make_destination(endpoints[0], name="b"), concurrency_limits[0], concurrency_limits[2]
    )
    two = _with_limits(
        make_destination(endpoints[1], name="a"), concurrency_limits[0], concurrency_limits[1]
    )
    router = weighted_destinations(one, two)
    task = asyncio.create_task(send_request(router, "POST", target))
    await until(lambda: all(each.requests for each in endpoints))
    assert [concurrency_limit.active for concurrency_limit in concurrency_limits] == [1, 1, 1]
    refused = await send_request(router, "POST", target)
    assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
    assert "a is busy" in _error(refused)
    hangs.set()
    assert (await task).status == 200
    assert [concurrency_limit.active for concurrency_limit in concurrency_limits] == [0, 0, 0]
    assert [len(each.requests) for each in endpoints] == [1, 1]


async def test_broadcast_that_waits_for_an_upstream_takes_no_shared_slot() -> None:
    shared, *own = (ConcurrencyLimit(place, 1, 1, 1.0) for place in ("the gateway", "a", "b"))
    endpoints = servers(a=scripted_response(b"[]"), b=scripted_response(b"[]"))
    router = [
        _with_limits(make_destination(endpoint, name=name), shared, concurrency_limit)
        for endpoint, name, concurrency_limit in zip(endpoints, "ab", own, strict=True)
    ]
    assert own[1].try_acquire()
    task = asyncio.create_task(send_request(weighted_destinations(*router), "POST", LOAD))
    await until(lambda: own[1].queued)
    assert (own[0].active, shared.active) == (1, 0)
    own[1].release()
    assert (await task).status == 200
    assert [concurrency_limit.active for concurrency_limit in (shared, *own)] == [0, 0, 0]


async def test_buffered_bytes_of_a_broadcast_count() -> None:
    destination = make_destination(
        *servers(a=scripted_response(b"x" * 70_000), b=scripted_response(b"x" * 31_000))
    )
    budget = MemoryBudget(100_000)
    response = await send_request(
        single_destination(replace(destination, memory_budget=budget)), "POST", LOAD
    )
    assert response.status == 502
    assert "limits.max_buffered_bytes" in _error(response)
    assert budget.total == 0
    endpoints = servers(a=OK, b=OK)
    destination = make_destination(
        *endpoints, limits=replace(LIMITS, max_buffered_body_bytes=200_000)
    )
    router = single_destination(replace(destination, memory_budget=budget))
    response = await send_request(
        router, "POST", LOAD, bytes(60_000), bytes(60_000), headers=CHUNKED
    )
    assert (response.status, budget.total) == (503, 0)
    assert received_requests(*endpoints) == [[], []]
