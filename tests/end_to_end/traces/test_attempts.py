"""Each request to a server is a span: retries, mirrored copies, several servers, canaries."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress

import pytest

from tests.end_to_end.traces.conftest import PARENT, SAMPLED, TRACE, Traced, parent_of
from tests.support.addresses import free_address
from tests.support.gateway import RunningGateway, until
from tests.support.http_messages import http_response, message, request
from tests.support.inference_messages import FLOATS, binary_response, infer_json
from tests.support.servers.scripted_server import (
    Connection,
    Script,
    ScriptedServer,
    always_respond,
)
from tests.support.servers.trace_receiver import INTERNAL, ReceivedSpan, TraceReceiver

GET = request("GET", "/v2/models/m", headers=SAMPLED)
INFER = infer_json(headers={**SAMPLED, "tracestate": "a=1"})
RESPONSE = binary_response(FLOATS.tobytes())
ROUND_ROBIN = {"load_balancing": {"policy": "round_robin"}}


async def _close(connection: Connection) -> None:
    await connection.request()


async def _hang(connection: Connection) -> None:
    await connection.request()
    await connection.wait_for_close()


async def test_endpoint_that_refuses_connections_is_a_failed_attempt(
    path: Callable[[bytes], bytes], traced: Traced, receiver: TraceReceiver
) -> None:
    gone = f"http://{free_address()}"
    async with ScriptedServer(always_respond(RESPONSE)) as server:
        async with (
            traced(gone, server.url, upstream=ROUND_ROBIN) as gateway,
            gateway.client() as client,
        ):
            for _ in range(2):
                assert (await client.ask(path(INFER))).status == 200
        sent = [parent_of(each.head)[1] for each in server.requests]
    failed = [each for each in receiver.attempts() if each.error]
    served = [each for each in receiver.attempts() if not each.error]
    assert failed
    for each in failed:
        assert each.attributes["url.full"].startswith(gone)
        assert each.attributes["error.type"] == "unreachable"
        assert gone in each.message
    assert sorted(sent) == sorted(each.span_id for each in served)
    calls = [receiver.call(number) for number in range(2)]
    for call in calls:
        assert (call.trace_id, call.parent_id, call.error) == (TRACE, PARENT, False)
    for attempt in receiver.attempts():
        assert sum(call.holds(attempt) for call in calls) == 1
    retried = [each for each in served if "http.request.resend_count" in each.attributes]
    assert {each.parent_id for each in retried} == {each.parent_id for each in failed}


@pytest.mark.parametrize(
    ("failure", "error_type"),
    [(always_respond(http_response(b"{}", status="503 Busy")), "503"), (_close, "no_response")],
)
async def test_retried_attempt_has_a_span_of_its_own(
    failure: Script,
    error_type: str,
    path: Callable[[bytes], bytes],
    traced: Traced,
    receiver: TraceReceiver,
) -> None:
    route = {"retry_on": [503, "no_response"]}
    async with ScriptedServer(failure) as bad, ScriptedServer(always_respond(RESPONSE)) as good:
        async with (
            traced(bad.url, good.url, upstream=ROUND_ROBIN, route=route) as gateway,
            gateway.client() as client,
        ):
            for _ in range(2):
                assert (await client.ask(path(INFER))).status == 200
        heads = [each.head for server in (bad, good) for each in server.requests]
    attempts = {each.span_id: each for each in receiver.attempts()}
    assert {parent_of(head)[1] for head in heads} == set(attempts)
    assert len(attempts) == len(heads) > 2
    assert all(head.get("tracestate") == "a=1" for head in heads)
    failed = [each for each in attempts.values() if each.error]
    assert {each.attributes["error.type"] for each in failed} == {error_type}
    assert not receiver.call(0).error


def _mirroring(
    traced: Traced, server: ScriptedServer, shadow: ScriptedServer
) -> AbstractAsyncContextManager[RunningGateway]:
    """Run a gateway that sends a copy of each call to a second server."""
    return traced(
        server.url,
        route={"mirror": {"upstream": "shadow", "percent": "100%"}},
        others={"shadow": {"endpoints": [shadow.url], "dialect": "triton"}},
    )


async def test_mirrored_copy_is_below_its_call(
    path: Callable[[bytes], bytes], traced: Traced, receiver: TraceReceiver
) -> None:
    async with (
        ScriptedServer(always_respond(RESPONSE)) as server,
        ScriptedServer(always_respond(RESPONSE)) as shadow,
    ):
        async with _mirroring(traced, server, shadow) as gateway:
            async with gateway.client() as client:
                assert (await client.ask(path(INFER))).status == 200
            await until(lambda: shadow.requests)
            mirror_of_route = gateway.gateway.active_config.router.routes[0].mirror
            assert mirror_of_route is not None
            await until(lambda: not mirror_of_route.in_flight)
        (own,), (copied,) = server.requests, shadow.requests
    mirror = receiver.named("mirror shadow")
    assert mirror.kind == INTERNAL
    assert (mirror.trace_id, mirror.parent_id) == (TRACE, receiver.call().span_id)
    (copy,) = [each for each in receiver.attempts() if mirror.holds(each)]
    assert parent_of(copied.head) == (TRACE, copy.span_id, "01")
    assert copied.head.get("tracestate") == "a=1"
    (sent,) = [each for each in receiver.attempts() if receiver.call().holds(each)]
    assert parent_of(own.head) == (TRACE, sent.span_id, "01")


async def test_mirrored_copy_of_a_call_that_is_not_traced_passes_its_headers(
    path: Callable[[bytes], bytes], traced: Traced, receiver: TraceReceiver
) -> None:
    unsampled = SAMPLED["traceparent"][:-2] + "00"
    async with (
        ScriptedServer(always_respond(RESPONSE)) as server,
        ScriptedServer(always_respond(RESPONSE)) as shadow,
    ):
        async with _mirroring(traced, server, shadow) as gateway:
            async with gateway.client() as client:
                data = infer_json(headers={"traceparent": unsampled})
                assert (await client.ask(path(data))).status == 200
            await until(lambda: shadow.requests)
        assert shadow.requests[0].head.get("traceparent") == unsampled
    assert receiver.spans == []


async def test_spans_name_the_upstream_of_a_canary(
    path: Callable[[bytes], bytes], traced: Traced, receiver: TraceReceiver
) -> None:
    async with (
        ScriptedServer(always_respond(RESPONSE)) as one,
        ScriptedServer(always_respond(RESPONSE)) as two,
    ):
        weights = [{"name": "servers", "weight": 1}, {"name": "canary", "weight": 1}]
        async with (
            traced(
                one.url,
                route={"upstream": weights},
                others={"canary": {"endpoints": [two.url], "dialect": "triton"}},
            ) as gateway,
            gateway.client() as client,
        ):
            for _ in range(20):
                assert (await client.ask(path(INFER))).status == 200
        sent = {
            "servers": {parent_of(each.head)[1] for each in one.requests},
            "canary": {parent_of(each.head)[1] for each in two.requests},
        }
    assert all(sent.values())
    for name, spans in sent.items():
        of_upstream = [
            each.span_id
            for each in receiver.attempts()
            if each.attributes["tensorgate.upstream"] == name
        ]
        assert sorted(of_upstream) == sorted(spans)


async def test_each_server_of_a_scattered_call_has_a_span(
    traced: Traced, receiver: TraceReceiver
) -> None:
    loaded = always_respond(http_response(b"{}"))
    async with ScriptedServer(loaded) as one, ScriptedServer(loaded) as two:
        async with traced(one.url, two.url) as gateway, gateway.client() as client:
            data = request("POST", "/v2/repository/models/m/load", b"{}", SAMPLED)
            assert (await client.ask(data)).status == 200
        parents = {parent_of(each.requests[0].head)[1] for each in (one, two)}
    attempts = receiver.attempts()
    assert {each.span_id for each in attempts} == parents
    assert len(attempts) == 2
    assert all(receiver.call().holds(each) for each in attempts)
    assert not any("http.request.resend_count" in each.attributes for each in attempts)


async def test_call_that_waits_for_a_slot_has_a_span_of_its_queue(
    traced: Traced, receiver: TraceReceiver
) -> None:
    gate = asyncio.Event()

    async def late(connection: Connection) -> None:
        while True:
            await connection.request()
            await gate.wait()
            await connection.send(http_response(b"{}"))

    async with ScriptedServer(late) as server:
        upstream = {"concurrency": {"max_requests": 1, "max_queue": 5}}
        async with (
            traced(server.url, upstream=upstream) as gateway,
            gateway.client() as first,
            gateway.client() as second,
        ):
            await first.send(GET)
            await until(lambda: server.requests)
            await second.send(GET)
            await asyncio.sleep(0.1)
            gate.set()
            for client in (first, second):
                assert (await client.read_response()).status == 200
    queue = max((each for each in receiver.spans if each.name == "queue"), key=_seconds)
    assert _seconds(queue) > 0.08
    (call,) = [each for each in receiver.spans if each.span_id == queue.parent_id]
    (attempt,) = [each for each in receiver.attempts() if each.parent_id == call.span_id]
    assert call.holds(queue)
    assert queue.end <= attempt.start


def _seconds(span: ReceivedSpan) -> float:
    return (span.end - span.start) / 1e9


async def test_client_that_cuts_a_call_off_leaves_its_spans(
    path: Callable[[bytes], bytes], traced: Traced, receiver: TraceReceiver
) -> None:
    async with ScriptedServer(_hang) as server, traced(server.url) as gateway:
        async with gateway.client() as client:
            await client.send(path(GET))
            await until(lambda: server.requests)
        await gateway.until_idle()
    call, (attempt,) = receiver.call(), receiver.attempts()
    assert call.holds(attempt)
    for each in (call, attempt):
        assert each.error
        assert each.attributes["error.type"] == "aborted"
        assert "http.response.status_code" not in each.attributes
    assert call.message == "the client closed the connection"


async def test_server_that_is_too_late_is_told(
    path: Callable[[bytes], bytes], traced: Traced, receiver: TraceReceiver
) -> None:
    async with (
        ScriptedServer(_hang) as server,
        traced(server.url, idle_timeout=0.1) as gateway,
        gateway.client() as client,
    ):
        assert (await client.ask(path(GET))).status == 504
    call, (attempt,) = receiver.call(), receiver.attempts()
    assert call.attributes["http.response.status_code"] == 504
    assert call.attributes["error.type"] == attempt.attributes["error.type"] == "server_timeout"


async def test_response_that_breaks_off_is_an_error(
    traced: Traced, receiver: TraceReceiver
) -> None:
    async def broken(connection: Connection) -> None:
        await connection.request()
        await connection.send(message("HTTP/1.1 200 OK", {"Content-Length": "300000"}, b"x" * 99))
        await asyncio.sleep(0.2)

    async with ScriptedServer(broken) as server, traced(server.url) as gateway:
        async with gateway.client() as client:
            await client.send(GET)
            with suppress(ConnectionResetError):
                await client.rest()
        await gateway.until_idle()
    call, (attempt,) = receiver.call(), receiver.attempts()
    for each in (call, attempt):
        assert each.attributes["http.response.status_code"] == 200
        assert each.attributes["error.type"] == "bad_response"


async def test_call_that_reaches_no_server_has_its_span_alone(
    path: Callable[[bytes], bytes], traced: Traced, receiver: TraceReceiver
) -> None:
    route = {"match": {"model": "n"}}
    async with (
        traced(f"http://{free_address()}", route=route) as gateway,
        gateway.client() as client,
    ):
        assert (await client.ask(path(GET))).status == 404
    (call,) = receiver.spans
    assert call.attributes["http.response.status_code"] == 404
    assert (call.error, call.trace_id) == (False, TRACE)
