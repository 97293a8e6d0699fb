"""Each request to a server is a span: retries, mirrored copies, several servers, canaries."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest

from tests.end_to_end.traces.conftest import PARENT, SAMPLED, TRACE, Traced, parent_of
from tests.support.addresses import free_address
from tests.support.gateway import RunningGateway, until
from tests.support.http_messages import http_response, request
from tests.support.inference_messages import FLOATS, binary_response, infer_json
from tests.support.servers.scripted_server import Connection, Script, ScriptedServer, always_respond
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


BUSY = always_respond(http_response(b"{}", status="503 Busy"))


@pytest.mark.parametrize(
    ("failure", "error_type"), [(BUSY, "503"), (_close, "no_response"), (None, "unreachable")]
)
async def test_each_attempt_has_a_span_of_its_own(
    failure: Script | None,
    error_type: str,
    path: Callable[[bytes], bytes],
    traced: Traced,
    receiver: TraceReceiver,
) -> None:
    route = {"retry_on": [503, "no_response"]}
    async with (
        ScriptedServer(failure or BUSY) as bad,
        ScriptedServer(always_respond(RESPONSE)) as good,
    ):
        bad_url = bad.url if failure else f"http://{free_address()}"
        async with (
            traced(bad_url, good.url, upstream=ROUND_ROBIN, route=route) as gateway,
            gateway.client() as client,
        ):
            for _ in range(2):
                assert (await client.ask(path(INFER))).status == 200
        heads = [each.head for server in (bad, good) for each in server.requests]
    attempts = receiver.attempts()
    failed = [each for each in attempts if each.error]
    arrived = [each for each in attempts if not each.error or failure]
    assert sorted(parent_of(head)[1] for head in heads) == sorted(each.span_id for each in arrived)
    assert all(head.get("tracestate") == "a=1" for head in heads)
    assert {each.attributes["error.type"] for each in failed} == {error_type}
    assert all(each.attributes["url.full"].startswith(bad_url) for each in failed)
    calls = [receiver.call(number) for number in range(2)]
    for call in calls:
        assert (call.trace_id, call.parent_id, call.error) == (TRACE, PARENT, False)
    for attempt in attempts:
        assert sum(call.holds(attempt) for call in calls) == 1
    retried = [each for each in attempts if "http.request.resend_count" in each.attributes]
    assert {each.parent_id for each in retried} == {each.parent_id for each in failed}


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
