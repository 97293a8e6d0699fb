"""Whatever line of HTTP/2 fails in either role, the gateway keeps nothing, and serves the next."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from random import Random
from types import CodeType

import pytest
from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError, StreamClosedError

from gateway.http2.session import FlushQueue, Http2Session, StreamHandler
from gateway.protocol.grpc.framing import frame
from gateway.upstream.http2.connection import Http2ServerConnection, ServerStream
from gateway.upstream.http2.connections import DrainedStreams, ServerConnections
from gateway.upstream.http2.endpoint import Http2Endpoint, Http2Exchange
from tests.support.checks.failing_lines import SOURCES, FailingLines, code_of, name_of
from tests.support.checks.nothing_left import transports
from tests.support.compiled import needs_source
from tests.support.gateway import RunningGateway, running_gateway, until
from tests.support.grpc.client import SERVICE
from tests.support.grpc.wire_bytes import field
from tests.support.http2_client import Http2Client, connect_http2
from tests.support.scale import FAILING_RUN, fuzz_seconds
from tests.support.servers.http2_server import Http2Peer, ReceivedStream, http2_script
from tests.support.servers.scripted_server import ScriptedServer

pytestmark = needs_source  # compiled code has no lines

_WATCHED = tuple(f"{SOURCES}/{name}/" for name in ("http2", "upstream/http2", "upstream/grpc"))

_GIVING_BACK = code_of(
    StreamHandler.__init__,
    StreamHandler.give_back,
    StreamHandler.close,
    StreamHandler._count_unsent,
    FlushQueue._run,
    Http2Session.run_guarded,
    Http2Session.abort_after_error,
    Http2Session._count_partial,
    Http2Session._count_unread,
    ServerStream.close,
    ServerStream.release,
    Http2ServerConnection.give_back,
    Http2ServerConnection.connection_lost,
    Http2ServerConnection.drop,
    Http2ServerConnection.shut_down,
    ServerConnections.on_leaving,
    ServerConnections.stop_waiting,
    DrainedStreams._add,
    DrainedStreams.remove,
    Http2Exchange.close,
    Http2Exchange._release,
)
"""They give back what a stream or a connection holds, and run no code over what a peer sent."""

_SECONDS = 5.0
"""How long lines of one scenario fail, one after the other, in a full run."""

_CALL_TIMEOUT = 2.0
_PATIENCE = 5.0
"""Seconds until a client whose call got no response has waited too long."""

_HEAD = [("content-type", "application/grpc")]
_OK = [("grpc-status", "0")]
_OUTPUT = frame(20) + b"r" * 20
_READY = frame(2) + field(1, 1)
_LARGE = 200_000
_REQUEST = field(1, b"m") + field(7, b"r" * 16)
_MESSAGE = frame(len(_REQUEST)) + _REQUEST
_LARGE_REQUEST = field(1, b"m") + field(7, b"r" * _LARGE)
_LARGE_MESSAGE = frame(len(_LARGE_REQUEST)) + _LARGE_REQUEST

_INFER = f"/{SERVICE}/ModelInfer"
_STREAM = f"/{SERVICE}/ModelStreamInfer"


def _is_watched(code: CodeType) -> bool:
    return code.co_filename.startswith(_WATCHED) and code not in _GIVING_BACK


# ------------------------------------------------------------------------- how a server responds


async def _until_over(peer: Http2Peer, stream: ReceivedStream) -> None:
    await peer.until(lambda: stream.ended or stream.reset is not None)


async def _respond(peer: Http2Peer, stream: ReceivedStream) -> None:
    await _until_over(peer, stream)
    output = _READY if stream.path.endswith("/ModelReady") else _OUTPUT
    await peer.respond(stream, output, _HEAD, _OK)


async def _respond_at_length(peer: Http2Peer, stream: ReceivedStream) -> None:
    await _until_over(peer, stream)
    await peer.respond(stream, frame(_LARGE) + b"r" * _LARGE, _HEAD, _OK)


async def _respond_early(peer: Http2Peer, stream: ReceivedStream) -> None:
    await peer.respond(stream, _OUTPUT, _HEAD, _OK)
    await peer.reset(stream, ErrorCodes.NO_ERROR)


async def _respond_with_status_alone(peer: Http2Peer, stream: ReceivedStream) -> None:
    await _until_over(peer, stream)
    await peer.respond(stream, b"", [*_HEAD, ("grpc-status", "5")])


async def _begin(peer: Http2Peer, stream: ReceivedStream) -> None:
    await peer.respond(stream, _OUTPUT, _HEAD, end=False)
    await peer.until(lambda: stream.reset is not None)


async def _reset(peer: Http2Peer, stream: ReceivedStream) -> None:
    await peer.respond(stream, _OUTPUT, _HEAD, end=False)
    await peer.reset(stream, ErrorCodes.INTERNAL_ERROR)


async def _refuse_once(peer: Http2Peer, stream: ReceivedStream) -> None:
    if len(peer.streams) % 2:
        await peer.reset(stream, ErrorCodes.REFUSED_STREAM)
    else:
        await _respond(peer, stream)


async def _go_away(peer: Http2Peer, stream: ReceivedStream) -> None:
    await peer.go_away(stream.id)
    await _respond(peer, stream)


_Play = Callable[[Http2Peer, ReceivedStream], Awaitable[None]]

_PLAYS: dict[str, _Play] = {
    play.__name__: play
    for play in (
        _respond,
        _respond_at_length,
        _respond_early,
        _respond_with_status_alone,
        _begin,
        _reset,
        _refuse_once,
        _go_away,
    )
}


class _Server:
    """Responds as the header ``play`` of each request says, and counts its connections."""

    def __init__(self) -> None:
        self.connections = 0

    async def serve(self, peer: Http2Peer) -> None:
        """Respond on one connection."""
        self.connections += 1
        served = 0
        try:
            with suppress(ProtocolError):
                while True:
                    stream = await peer.stream(served)
                    served += 1
                    name = dict(stream.headers).get("play", _respond.__name__)
                    try:
                        await _PLAYS[name](peer, stream)
                    except StreamClosedError:
                        pass  # it was reset meanwhile
                    except ProtocolError:  # the same, if the next stream has begun
                        if stream.reset is None:
                            raise
        finally:
            self.connections -= 1


# -------------------------------------------------------------------------- what a client does

_Call = Callable[[Http2Client], Awaitable[None]]


def _fields(play: _Play) -> tuple[tuple[str, str], ...]:
    return (*_HEAD, ("te", "trailers"), ("play", play.__name__))


def _ask(target: str, body: bytes, play: _Play, *headers: tuple[str, str]) -> _Call:
    """Wait for the whole response, or the end of the stream or connection."""

    async def call(client: Http2Client) -> None:
        reply = await client.call("POST", target, body, (*_fields(play), *headers))
        assert reply.reset is not None or reply.status in (200, 500, 502, 503, 504)

    return call


def _upload(target: str, play: _Play) -> _Call:
    """Send the start of a request, and end it once the response has."""

    async def call(client: Http2Client) -> None:
        stream = client.send_headers("POST", target, _fields(play))
        await client.send_data(stream, _MESSAGE, end_stream=False)
        reply = await client.response(stream)
        if reply.reset is None:
            with suppress(ProtocolError):  # it was reset meanwhile
                await client.send_data(stream, b"")

    return call


def _give_up(how: str) -> _Call:
    """Cancel a call, or leave, once the response has begun, or it has failed."""

    async def call(client: Http2Client) -> None:
        stream = client.send_headers("POST", _STREAM, _fields(_begin))
        await client.send_data(stream, _MESSAGE, end_stream=False)
        reply = client.replies[stream]
        await client.until(lambda: reply.body or reply.ended or reply.reset is not None)
        if how == "reset":
            with suppress(ProtocolError):
                client.reset_stream(stream)
            client.ping()
            await client.until(lambda: client.pings)
        else:
            client.reset()

    return call


def _ask_over_http(target: str) -> _Call:
    """Send a request without a body that the gateway sends as an RPC."""

    async def call(client: Http2Client) -> None:
        reply = await client.call("GET", target)
        assert reply.reset is not None or reply.status in (200, 500, 502, 503, 504)

    return call


_CALLS: dict[str, _Call] = {
    "unary": _ask(_INFER, _MESSAGE, _respond),
    "unary, large": _ask(_INFER, _LARGE_MESSAGE, _respond_at_length),
    "unary, status alone": _ask(_INFER, _MESSAGE, _respond_with_status_alone),
    "streaming": _ask(_STREAM, _MESSAGE, _respond),
    "streaming, large": _ask(_STREAM, _LARGE_MESSAGE, _respond_at_length),
    "early response": _upload(_STREAM, _respond_early),
    "reset by the client": _give_up("reset"),
    "connection reset by the client": _give_up("leave"),
    "reset by the server": _ask(_INFER, _MESSAGE, _reset),
    "stream refused": _ask(_INFER, _MESSAGE, _refuse_once),
    "GOAWAY of the server": _ask(_STREAM, _MESSAGE, _go_away),
    "timeout": _ask(_INFER, _MESSAGE, _begin, ("grpc-timeout", "50m")),
    "RPC for HTTP": _ask_over_http("/v2/models/m/ready"),
}


async def _call(call: _Call, url: str, lines: FailingLines) -> None:
    """Make one call; it must end in time, whatever way it does."""
    async with asyncio.timeout(_PATIENCE), connect_http2(url) as client:
        # RuntimeError is uvloop's. A stream may be reset while the client still sends on it.
        with lines.watched(), suppress(ConnectionError, RuntimeError, StreamClosedError):
            await call(client)
            client.send_goaway()
            await client.until_closed()


async def _check_next_call(url: str) -> None:
    async with asyncio.timeout(_PATIENCE), connect_http2(url) as client:
        reply = await client.call("POST", _INFER, _MESSAGE, _fields(_respond))
        assert reply.status == 200, reply
        assert dict(reply.trailers).get("grpc-status") == "0", reply
        assert reply.body == _OUTPUT


@asynccontextmanager
async def _running() -> AsyncIterator[tuple[RunningGateway, Callable[[], bool]]]:
    """Run a gateway before a server; the function tells whether it has only known connections."""
    played = _Server()

    def has_known_connections() -> bool:
        (member,) = running.pool.members
        (transport,) = transports(member.endpoint)
        assert isinstance(transport, Http2Endpoint)
        return played.connections == len(transport.connections.sessions)

    async with ScriptedServer(http2_script(played.serve)) as server:
        url = server.url.replace("http:", "grpc:")
        async with running_gateway(
            url, request_timeout=_CALL_TIMEOUT, connect_timeout=_CALL_TIMEOUT, max_requests=10
        ) as running:
            yield running, has_known_connections


@pytest.mark.parametrize("name", _CALLS)
async def test_line_of_http2_that_fails_leaves_nothing(name: str) -> None:
    """Each line fails once; whichever it is, the next call is served, and nothing is counted.

    It fails the first time that it runs in a call, or the time that TENSORGATE_FAILING_RUN says.
    """
    call = _CALLS[name]
    async with _running() as (running, has_known_connections):
        normal = FailingLines(_is_watched)
        for _ in range(3):  # the first one connects
            await _call(call, running.url, normal)
        await running.remains.until_nothing()
        assert len(normal.seen) > 200
        lines = [line for line, runs in normal.seen.items() if runs >= FAILING_RUN]
        Random(name).shuffle(lines)
        end = time.monotonic() + fuzz_seconds(_SECONDS)
        for line in lines:
            if time.monotonic() > end:
                break
            try:
                await _call(call, running.url, FailingLines(_is_watched, line, nth=FAILING_RUN))
                running.remains.forget_faults()
                await _check_next_call(running.url)
                await running.remains.until_nothing()
                await until(has_known_connections)
            except (AssertionError, TimeoutError, ConnectionError) as error:
                error.add_note(f"{name_of(line)} has failed")
                raise
