"""Calls of the admin address whose gateway does not do as it should."""

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable

import pytest
from multidict import CIMultiDict

from gateway.admin import own_calls
from gateway.admin.own_calls import CapturedCall, OwnCallError, make_captured_call
from gateway.upstream.transport import UpstreamRequest
from tests.admin.site import ChosenSource
from tests.support.gateway import no_leaks
from tests.support.http_messages import http_response
from tests.support.servers.scripted_server import Connection, Script, never_respond, respond_in_turn

REQUEST = UpstreamRequest("POST", "/x", CIMultiDict(A="b"), [b"some", memoryview(b"body")])
GRPC = UpstreamRequest("POST", "/s/M", CIMultiDict(), [b"body"], is_grpc=True)
OK = http_response(b"[]")
ATTEMPTS = [{"upstream": "u"}]

Sink = Callable[[socket.socket], Awaitable[None]]


async def _deliver(sink: socket.socket) -> None:
    sink.sendall(json.dumps(ATTEMPTS).encode())
    sink.close()


class _Source(ChosenSource):
    """A gateway that plays a script, and does something with the socket for what is captured."""

    def __init__(self, script: Script, deliver: Sink = _deliver) -> None:
        super().__init__()
        self._script = script
        self._deliver = deliver
        self.tasks: list[asyncio.Task[None]] = []

    async def connect_captured(self, skips_conversion: bool) -> tuple[socket.socket, socket.socket]:
        (ours, theirs), (source, sink) = socket.socketpair(), socket.socketpair()
        self.tasks.append(asyncio.create_task(self._serve(theirs, sink)))
        return ours, source

    async def _serve(self, theirs: socket.socket, sink: socket.socket) -> None:
        connection = Connection(*await asyncio.open_connection(sock=theirs))
        try:
            await self._script(connection)
            await self._deliver(sink)
            await connection.wait_for_close()
        except ConnectionError:
            pass
        finally:
            await connection.close()
            sink.close()


async def _make(
    script: Script, deliver: Sink = _deliver, request: UpstreamRequest = REQUEST, most: int = 100
) -> CapturedCall:
    source = _Source(script, deliver)
    async with no_leaks():
        try:
            return await make_captured_call(source, request, most)
        finally:
            await asyncio.gather(*source.tasks)


async def test_call_has_the_response_and_what_was_captured() -> None:
    call = await _make(respond_in_turn(OK))
    assert (call.reply.status, call.reply.body, call.attempts) == (200, b"[]", ATTEMPTS)
    described = call.reply.captured.describe()
    assert described["start"] == "HTTP/1.1 200 OK"
    assert ("Content-Type", "application/json") in described["headers"]
    assert described["size"] == 2


@pytest.mark.parametrize("request_", [REQUEST, GRPC], ids=["HTTP", "gRPC"])
async def test_call_that_gets_no_response_in_time_is_given_up(
    monkeypatch: pytest.MonkeyPatch, request_: UpstreamRequest
) -> None:
    monkeypatch.setattr(own_calls, "_CAPTURED_TIMEOUT", 0.05)
    with pytest.raises(OwnCallError, match=r"no response within 0\.05 s"):
        await _make(never_respond, request=request_)


async def test_gateway_without_workers_is_told() -> None:
    with pytest.raises(OwnCallError, match="no worker responds"):
        await make_captured_call(ChosenSource(), REQUEST, 100)


async def test_call_that_is_cancelled_leaves_nothing_behind() -> None:
    task = asyncio.create_task(_make(never_respond))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def _no_json(sink: socket.socket) -> None:
    sink.sendall(b"[1")
    sink.close()


async def _too_much(sink: socket.socket) -> None:
    sink.setblocking(False)
    await asyncio.get_running_loop().sock_sendall(sink, b"[" + b" " * 100_000 + b"]")
    sink.close()


async def _nothing(sink: socket.socket) -> None:
    sink.close()


async def _hang(sink: socket.socket) -> None:
    pass


@pytest.mark.parametrize("deliver", [_no_json, _too_much, _nothing, _hang])
async def test_response_counts_even_if_nothing_was_captured(
    monkeypatch: pytest.MonkeyPatch, deliver: Sink
) -> None:
    monkeypatch.setattr(own_calls, "_CAPTURE_TIMEOUT", 0.05 if deliver is _hang else 5.0)
    monkeypatch.setattr(own_calls, "_MAX_CAPTURE", 50_000)
    call = await _make(respond_in_turn(OK), deliver)
    assert (call.reply.status, call.attempts) == (200, [])
