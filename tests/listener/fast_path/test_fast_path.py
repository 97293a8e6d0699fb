"""Calls on the fast path, between real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import pytest

from gateway.errors import bad_response
from gateway.listener.client_call import Continuation
from gateway.listener.connection import ClientConnection, Http1Call
from gateway.observe.call_record import CallRecord
from gateway.proxy.calls import infer as calls_infer
from gateway.proxy.calls.planner import Planner
from gateway.proxy.filters.authentication import KeyGroup
from gateway.proxy.filters.trace_sampling import TraceSampler
from gateway.proxy.router import Route, Router
from gateway.routing.matcher import Match
from tests.listener.fast_path.fast_path_listener import (
    FastPathListener,
    echo_target,
    listening,
    serving,
)
from tests.support.compiled import needs_source
from tests.support.doubles.iterations import iterations
from tests.support.gateway import until
from tests.support.http2_client import connect_http2
from tests.support.http_messages import chunk, http_response, message, request
from tests.support.inference_messages import binary_response, infer_json
from tests.support.raw_client import connect
from tests.support.servers.scripted_server import Connection, ScriptedServer, always_respond

GET = request("GET", "/v2/x")
POST = request("POST", "/v2/x", b"hello")
HEAD = POST[: -len(b"hello")]
CHUNKED = message("HTTP/1.1 200 OK", {"Transfer-Encoding": "chunked"})
INTERIM = message("HTTP/1.1 100 Continue")
"""With this, a server has taken a request up: it is not sent again."""


class _Slow:
    """A server that responds to its first request at once, and to others when it is told to."""

    def __init__(self, *parts: bytes) -> None:
        self.continue_in_task = asyncio.Event()
        self.asked = 0
        self._parts = parts or (http_response(b"done"),)

    async def __call__(self, connection: Connection) -> None:
        await connection.request()
        await connection.send(http_response())
        while True:
            await connection.request()
            self.asked += 1
            await self.continue_in_task.wait()
            for part in self._parts:
                await connection.send(part)
                await asyncio.sleep(0.01)


# ---------------------------------------------------------------------------------- which way


# Other requests, and what client, server and observers see on either path:
# tests/end_to_end/paths.
IS_FAST = {
    "behind an empty line": (b"\r\n" + GET, True),
    "large": (request("POST", "/v2/x", bytes(60_000)), True),
    "half a body": (POST[:-1], False),
    "chunked": (
        message("PUT /v2/x HTTP/1.1", {"Host": "x", "Transfer-Encoding": "chunked"}),
        False,
    ),
    "waits to be told": (request("POST", "/v2/x", b"hello", {"Expect": "100-continue"}), False),
}


@pytest.mark.parametrize(("data", "is_fast"), IS_FAST.values(), ids=IS_FAST)
async def test_request_takes_the_fast_path_if_it_is_complete(
    data: bytes, is_fast: bool, fast_path_requests: list[str]
) -> None:
    records: list[CallRecord] = []
    async with serving(observers=(records.append,)) as (here, client):
        client.send_nowait(data)
        if is_fast:
            assert (await client.read_response()).status == 200
            assert len(here.server.connections) == 1
        else:
            await until(lambda: bool(here.listener.requests) or len(records) == 2)
        assert len(fast_path_requests) == is_fast


async def test_call_of_a_client_that_takes_no_response_yet_takes_the_streaming_path(
    fast_path_requests: list[str],
) -> None:
    async with (
        ScriptedServer() as server,
        listening(server) as here,
        connect_http2(here.url, initial_window_size=0) as client,
    ):
        await client.start("GET", "/v2/x")
        await until(lambda: len(server.requests) == 1)
        assert fast_path_requests == []


async def test_fast_path_connects_to_the_server(fast_path_requests: list[str]) -> None:
    async with ScriptedServer() as server, listening(server) as here, connect(here.url) as client:
        for count in (1, 2):
            assert (await client.ask(GET)).status == 200
            assert fast_path_requests == ["/v2/x"] * count
        assert len(server.connections) == 1


# ---------------------------------------------------------------------------------- in the pipeline


SOME = (
    request("GET", "/v2/0")
    + request("POST", "/v2/1", b"one")
    + request("GET", "/v2/2")
    + request("GET", "/v2/3", b"three")
    + request("PUT", "/v2/4", b"")
)
TOLD = [b"/v2/0 ", b"/v2/1 one", b"/v2/2 ", b"/v2/3 three", b"/v2/4 "]


@pytest.mark.parametrize("bytewise", [True, False])
async def test_pipelined_requests_wait_for_the_call_before_them(
    bytewise: bool, fast_path_requests: list[str]
) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(http_response())
        await connection.request()
        await ahead.wait()
        await connection.send(http_response(b"first"))
        await echo_target(connection)

    ahead = asyncio.Event()
    async with serving(script) as (here, client):
        await client.send(GET)
        await here.until_on_fast_path()
        step = 1 if bytewise else len(SOME)
        for at in range(0, len(SOME), step):
            await client.send(SOME[at : at + step])
            await asyncio.sleep(0)
        await until(lambda: len(here.connection._read_ahead) == len(SOME))
        ahead.set()
        assert (await client.read_response()).body == b"first"
        for told in TOLD:
            assert (await client.read_response()).body == told
        assert fast_path_requests[0] == "/v2/x"
        assert fast_path_requests[-1] == "/v2/4"


async def test_garbage_after_a_request_on_the_fast_path_is_a_400() -> None:
    slow = _Slow()
    async with serving(slow) as (here, client):
        await client.send(GET)
        await here.until_on_fast_path()
        await client.send(b"what?\r\n\r\n")
        await until(lambda: here.connection._read_ahead)
        slow.continue_in_task.set()
        assert (await client.read_response()).body == b"done"
        assert (await client.read_response()).status == 400
        assert await client.rest() == b""


@pytest.mark.parametrize("is_drained", [False, True])
async def test_request_after_the_last_one_is_not_served(
    is_drained: bool, fast_path_requests: list[str]
) -> None:
    slow = _Slow()
    async with serving(slow) as (here, client):
        headers = {} if is_drained else {"Connection": "close"}
        await client.send(request("GET", "/v2/x", headers=headers))
        await here.until_on_fast_path()
        await client.send(GET)
        await until(lambda: here.connection._read_ahead)
        draining = asyncio.create_task(here.listener.drain(60, 0.05)) if is_drained else None
        await until(lambda: here.listener.draining is is_drained)
        slow.continue_in_task.set()
        reply = await client.read_response()
        assert (reply.body, reply.head.get("Connection")) == (b"done", "close")
        assert await client.rest() == b""
        assert len(here.server.requests) == 2
        assert fast_path_requests == ["/v2/x"]
        if draining is not None:
            assert await draining == 0


async def _stays_clogged(connection: ClientConnection) -> bool:
    if connection.write_blocked:
        await iterations(20)  # in which goes out what still can
    return connection.write_blocked


async def test_client_that_does_not_read_is_not_read_from(fast_path_requests: list[str]) -> None:
    size = 60_000

    async def script(connection: Connection) -> None:
        while True:
            received = await connection.request()
            await connection.send(http_response(received.head.target.encode().ljust(size)))

    async with serving(script) as (here, client):
        sent = 0
        while not await _stays_clogged(here.connection):
            await client.send(request("GET", f"/v2/{sent}"))
            sent += 1
            await here.until_asked(1 + sent)
            assert here.connection.unsent < 300_000
            assert sent < 1000
        assert len(fast_path_requests) == sent
        for number in range(sent, sent + 20):
            await client.send(request("GET", f"/v2/{number}"))
        await until(lambda: here.connection._read_ahead)
        assert len(fast_path_requests) == sent
        assert len(here.server.requests) == 1 + sent
        assert here.connection.unsent < 300_000
        sent += 20
        for number in range(sent):
            assert (await client.read_response()).body.rstrip() == f"/v2/{number}".encode()
        assert len(here.server.requests) == 1 + sent


# ---------------------------------------------------------------------------------- who leaves


async def _silent(connection: Connection) -> None:
    """Answer one request."""
    await connection.request()
    await connection.send(http_response())
    await connection.wait_for_close()


async def _left(server: ScriptedServer) -> None:
    async with asyncio.timeout(5):
        await (await server.connection()).left.wait()


async def test_response_above_the_window_of_an_http2_client_is_complete() -> None:
    """The rest of it waits for the client, in several pieces."""
    body = bytes(range(256)) * 800
    records: list[CallRecord] = []
    async with (
        ScriptedServer(always_respond(http_response(body))) as server,
        listening(server, (records.append,)) as here,
        connect_http2(here.url, initial_window_size=1000) as client,
    ):
        for _ in range(2):  # the first call connects to the server
            reply = await client.call("GET", "/v2/x")
            assert (reply.status, reply.body, reply.ended) == (200, body, True)
        await here.until_idle()
        assert [record.response_bytes for record in records] == [len(body)] * 2


@needs_source
async def test_disconnect_of_the_client_at_the_start_of_the_response_ends_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before the task that was to pass it on has run."""
    go_on = Http1Call.continue_in_task

    def and_leave(self: Http1Call, rest: Continuation, over: Callable[[], None]) -> None:
        go_on(self, rest, over)
        assert isinstance(self._call, asyncio.Task)
        self._call.cancel()

    monkeypatch.setattr(Http1Call, "continue_in_task", and_leave)
    slow = _Slow(CHUNKED, chunk(b"one"))
    slow.continue_in_task.set()
    records: list[CallRecord] = []
    async with serving(slow, observers=(records.append,)) as (here, client):
        await client.send(GET)
        await _left(here.server)
        await here.until_idle()
        assert [record.target for record in records] == ["/v2/warm", "/v2/x"]


# ---------------------------------------------------------------------------------- draining


async def test_drain_lets_calls_of_both_paths_finish() -> None:
    slow = _Slow()
    async with (
        ScriptedServer(slow) as server,
        listening(server) as here,
        here.client() as one,
        connect(here.url) as two,
    ):
        await one.send(GET)
        await here.until_on_fast_path()
        await two.send(POST[:-1])
        await until(lambda: len(here.listener._active_calls) == 2)
        draining = asyncio.create_task(here.listener.drain(60, 0.05))
        await until(lambda: here.listener.draining)
        await two.send(POST[-1:])
        assert (await two.read_response()).body == b""
        assert not draining.done()
        slow.continue_in_task.set()
        reply = await one.read_response()
        assert (reply.body, reply.head.get("Connection")) == (b"done", "close")
        assert await one.rest() == b""
        assert await draining == 0


async def test_drain_aborts_a_call_that_takes_too_long() -> None:
    async with serving(_silent) as (here, client):
        await client.send(GET)
        await here.until_on_fast_path()
        async with asyncio.timeout(5):
            assert await here.listener.drain(0.02, 0.02) == 1
        with pytest.raises(ConnectionResetError):
            await client.rest()
        await _left(here.server)
        assert here.outstanding == 0


# ---------------------------------------------------------------------------------- faults


@pytest.mark.parametrize(
    "step",
    [
        pytest.param("gateway.proxy.calls.planner.to_server", marks=needs_source),
        "gateway.upstream.http.endpoint.HttpEndpoint.try_reserve",
    ],
)
async def test_call_takes_the_streaming_path_after_an_error_on_the_fast_path(
    step: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(step, fails)
    async with serving(echo_target) as (_, client):
        assert (await client.ask(POST)).body == b"/v2/x hello"
    assert "POST /v2/x failed on the fast path" in caplog.text
    assert "ZeroDivisionError" in caplog.text


@needs_source
@pytest.mark.parametrize("path", ["fast path", "relayed in parts", "streaming path"])
async def test_internal_error_has_the_headers_that_its_route_adds(
    path: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fast_path_requests: list[str],
) -> None:
    def fails(*_: object) -> bytes:
        raise ZeroDivisionError

    monkeypatch.setattr(calls_infer, "convert_whole", fails)
    monkeypatch.setattr(calls_infer, "convert_response", fails)
    monkeypatch.setattr(calls_infer, "receive_request", fails)
    whole = binary_response(bytes(4))
    parts = [whole[:-1], whole[-1:]] if path == "relayed in parts" else [whole]
    server_script = _Slow(*parts)
    server_script.continue_in_task.set()
    async with serving(server_script, codings=("gzip",)) as (here, client):
        fast_path_requests.clear()
        size = {"X-Long": "x" * 5000} if path == "streaming path" else {}
        reply = await client.ask(infer_json(headers=size))
        assert (reply.status, reply.head.get("Vary")) == (500, "Accept-Encoding")
        assert reply.head.get("Connection") == "close"
        assert bool(fast_path_requests) is (path != "streaming path")
        await here.until_idle()
    assert "ZeroDivisionError" in caplog.text


async def test_connection_of_the_client_stays_open_after_its_server_failed(
    fast_path_requests: list[str],
) -> None:
    async def once(connection: Connection) -> None:
        await connection.request()
        await connection.send(http_response())
        await connection.request()
        await connection.send(INTERIM)

    async with serving(once, once, echo_target) as (here, client):
        for _ in range(2):
            reply = await client.ask(GET)
            assert (reply.status, reply.head.get("Connection")) == (502, None)
            text = bad_response(
                f"{here.server.url} closed the connection before it responded"
            ).message
            assert reply.error == text
            assert (await client.ask(GET)).status == 200
        assert len(fast_path_requests) == 4


async def test_pipelined_request_that_fails_hurts_no_connection_of_the_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It starts as the response to the one before arrives at the connection of the server."""
    chances = iter((1.0, 1.0))

    def chance() -> float:
        if (number := next(chances, None)) is None:
            raise ZeroDivisionError("a bug")
        return number

    sampler = TraceSampler(0.5, lambda _: None, chance)
    async with ScriptedServer() as server, listening(server, trace_sampler=sampler) as here:
        async with here.client() as client:
            client.send_nowait(GET + GET)
            with suppress(ConnectionResetError):
                await client.rest()
        await until(lambda: not here.listener.connections)
        assert "a bug" in caplog.text
        assert "failed" in caplog.text
        chances = iter((1.0,))
        async with connect(here.url) as innocent:
            assert (await innocent.ask(GET)).status == 200
        assert len(server.connections) == 1


# ---------------------------------------------------------------------- a body that comes later


def _is_deferred(here: FastPathListener) -> bool:
    call = here.connection.call
    return call is not None and call.is_deferred


async def test_body_in_other_writes_takes_the_fast_path(fast_path_requests: list[str]) -> None:
    async with serving(echo_target) as (here, client):
        for pieces in ([b"hello"], [b"he", b"llo"], [b"h", b"e", b"l", b"l", b"o"]):
            await client.send(HEAD)
            await until(lambda: _is_deferred(here))
            await client.send(*pieces)
            assert (await client.read_response()).body == b"/v2/x hello"
        assert fast_path_requests == ["/v2/x"] * 3
        assert here.listener.buffers.total == 0


async def test_late_body_takes_the_streaming_path(fast_path_requests: list[str]) -> None:
    async with serving(echo_target) as (here, client):
        await client.send(HEAD, b"he")
        await until(lambda: here.listener.requests == 1 and not _is_deferred(here))
        await client.send(b"llo")
        assert (await client.read_response()).body == b"/v2/x hello"
        assert fast_path_requests == []
        assert here.listener.deferrals.size == 0


async def test_next_request_behind_a_deferred_body_is_served(fast_path_requests: list[str]) -> None:
    async with serving(echo_target) as (here, client):
        await client.send(HEAD)
        await until(lambda: _is_deferred(here))
        await client.send(b"hello" + request("GET", "/v2/next"))
        assert (await client.read_response()).body == b"/v2/x hello"
        assert (await client.read_response()).body == b"/v2/next "
        assert fast_path_requests == ["/v2/x", "/v2/next"]


@pytest.mark.parametrize("reset", [False, True])
async def test_client_that_leaves_during_the_wait_is_observed(reset: bool) -> None:
    records: list[CallRecord] = []
    async with ScriptedServer(echo_target) as server, listening(server, (records.append,)) as here:
        async with here.client() as client:
            await client.send(HEAD)
            await until(lambda: _is_deferred(here))
            if reset:
                client.reset()
            else:
                await client.close()
            await until(lambda: not here.listener.connections)
        await here.until_idle()
        assert here.listener.deferrals.size == 0
        assert here.listener.buffers.total == 0
        assert (records[-1].status, records[-1].error) == (0, "the client closed the connection")
        assert len(server.requests) == 1


async def test_drain_waits_for_a_deferred_call() -> None:
    async with serving(echo_target) as (here, client):
        await client.send(HEAD)
        await until(lambda: _is_deferred(here))
        drain = asyncio.create_task(here.listener.drain(5))
        await until(lambda: here.listener.draining)
        await client.send(b"hello")
        reply = await client.read_response()
        assert (reply.body, reply.head.get("Connection")) == (b"/v2/x hello", "close")
        assert await drain == 0


@pytest.mark.parametrize(
    "data",
    [
        request("POST", "/v2/x", headers={"Content-Length": "5", "Expect": "100-continue"}),
        request("POST", "/v2/x", headers={"Content-Length": "100000000"}),
        request("POST", "/v2/x", headers={"Content-Length": str(2**20)}),
    ],
    ids=["waits for 100", "too large for the gateway", "too large for the fast path"],
)
async def test_other_calls_do_not_wait(data: bytes) -> None:
    records: list[CallRecord] = []
    async with serving(echo_target, observers=(records.append,)) as (here, client):
        await client.send(data)
        await until(lambda: bool(here.listener.requests) or len(records) == 2)
        assert not _is_deferred(here)


async def test_head_that_was_read_before_a_reload_makes_no_plan_after_it() -> None:
    """Its parser did not know which headers decide now: others would be served by its plan."""
    async with serving(echo_target) as (here, client):
        data = request("POST", "/v2/x", b"hello", {"X-Key": "secret"})
        await client.send(data[:-5])
        await until(lambda: _is_deferred(here))
        group = KeyGroup("people", "X-Key", ["secret"])
        dropped = frozenset(("x-key",))
        route = Route(Match(), (here.destination,), keys=(group,), dropped_headers=dropped)
        router = Router([route])
        listener, fast_path = here.listener, Planner(router)
        listener.reconfigure(fast_path, (), None, listener.idle_timeouts, listener.forwarding)
        await client.send(data[-5:])
        await client.read_response()
        # What the streaming path of this listener still serves is not the point; no plan is.
        assert len(fast_path._plans) == 0
        without_key = listener.head_parser.parse_request(POST[: -len(b"hello")])
        assert fast_path.plan(without_key, "/v2/x") is None
        fast_path.close()
