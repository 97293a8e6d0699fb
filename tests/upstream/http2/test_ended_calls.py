"""Calls that are given up, or end in any other way: what the server learns, and nothing is left."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator

import pytest
from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes

from gateway.errors import ErrorKind, GatewayError
from gateway.system.buffers import BufferAccount
from gateway.upstream.http2.connections import MAX_CONNECTIONS, DrainedStreams
from gateway.upstream.http2.endpoint import Http2Endpoint
from gateway.upstream.transport import UpstreamResponse
from tests.support.gateway import until
from tests.support.scale import scaled
from tests.support.servers.http2_server import Http2Peer, Play, ReceivedStream, http2_script
from tests.upstream.endpoints import call, make_request
from tests.upstream.http2.conftest import Http2EndpointAt, connected


class _Calls:
    """Counts the calls that are drained."""

    def __init__(self) -> None:
        self.count = 0

    def count_call(self) -> None:
        self.count += 1

    def uncount_call(self) -> None:
        self.count -= 1


class _Server:
    """Responds to the first call when a test says so."""

    def __init__(self, *, ends: bool = True) -> None:
        self.responds = asyncio.Event()
        self.first: ReceivedStream | None = None
        self._ends = ends

    async def play(self, peer: Http2Peer) -> None:
        self.first = await peer.stream()
        answering = asyncio.create_task(self._answer(peer))
        try:
            await peer.serve_to_end()
        finally:
            answering.cancel()

    async def _answer(self, peer: Http2Peer) -> None:
        await self.responds.wait()
        assert self.first is not None
        await peer.respond(self.first, b"a" * 50_000, end=self._ends)


async def _abandon(endpoint: Http2Endpoint, server: _Server) -> None:
    """Send a request, and give it up before the response."""
    sending = asyncio.create_task(endpoint.send(make_request((b"abc",))))
    await until(lambda: server.first is not None)
    await _cancel(sending)


async def _cancel(*tasks: asyncio.Task[UpstreamResponse]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


@pytest.fixture
def calls() -> _Calls:
    return _Calls()


def _drained(**limits: float) -> DrainedStreams:
    return DrainedStreams(lambda: True, **limits)  # type: ignore[arg-type]


async def _half(began: asyncio.Event) -> AsyncIterator[bytes]:
    yield b"ab"
    began.set()
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("limits", "responds"), [({"max_seconds": 0.1}, False), ({"max_bytes": 10_000}, True)]
)
async def test_server_is_told_after_some_time_or_bytes(
    http2_at: Http2EndpointAt, calls: _Calls, limits: dict[str, float], responds: bool
) -> None:
    server, streams = _Server(ends=False), _drained(**limits)
    async with connected(http2_at, http2_script(server.play), drained=streams) as (_, endpoint):
        streams.counters.append(calls)
        await _abandon(endpoint, server)
        if responds:
            server.responds.set()
        await until(lambda: server.first is not None and server.first.reset is not None)
        assert server.first is not None
        assert server.first.reset == ErrorCodes.CANCEL
        assert (len(streams.streams), calls.count) == (0, 0)


async def test_half_of_the_streams_that_a_server_allows_are_drained(
    http2_at: Http2EndpointAt,
) -> None:
    peers: list[Http2Peer] = []

    async def hang(peer: Http2Peer) -> None:
        peers.append(peer)
        await peer.serve_to_end()

    settings = {SettingCodes.MAX_CONCURRENT_STREAMS: 1}
    drained = _drained()
    async with connected(http2_at, http2_script(hang, settings), drained=drained) as (_, endpoint):
        for number in range(MAX_CONNECTIONS):
            sending = asyncio.create_task(endpoint.send(make_request((b"a",))))
            await until(lambda: sum(len(peer.streams) for peer in peers) > number)  # noqa: B023
            await _cancel(sending)
        assert len(drained.streams) == MAX_CONNECTIONS // 2


async def test_request_that_is_open_after_its_response_is_ended(http2_at: Http2EndpointAt) -> None:
    streams: list[ReceivedStream] = []

    async def respond_early(peer: Http2Peer) -> None:
        streams.append(await peer.stream())
        await peer.respond(streams[0], b"ok")
        await peer.serve_to_end()

    async with connected(http2_at, http2_script(respond_early), drained=_drained()) as (
        _,
        endpoint,
    ):
        assert (await call(endpoint, _half(asyncio.Event()))).body == b"ok"
        await until(lambda: streams[0].ended)
        assert streams[0].reset is None


@pytest.mark.parametrize("ends", ["resets", "leaves"])
async def test_drained_call_ends_with_its_server(
    http2_at: Http2EndpointAt, calls: _Calls, ends: str
) -> None:
    ending = asyncio.Event()

    async def play(peer: Http2Peer) -> None:
        stream = await peer.request()
        seen.set()
        await ending.wait()
        if ends == "resets":
            await peer.reset(stream, ErrorCodes.INTERNAL_ERROR)
            await peer.serve_to_end()

    seen = asyncio.Event()
    drained = _drained()
    async with connected(http2_at, http2_script(play), drained=drained) as (_, endpoint):
        drained.counters.append(calls)
        sending = asyncio.create_task(endpoint.send(make_request((b"a",))))
        await seen.wait()
        await _cancel(sending)
        assert calls.count == 1
        ending.set()
        await until(lambda: not drained.streams)
        assert calls.count == 0


BODY = bytes(range(256)) * 400


class _LeftError(Exception):
    """A client that left while it sent its body."""


async def _answer(peer: Http2Peer, stream: ReceivedStream, dice: random.Random) -> bool:
    """Do something with a stream; return whether the connection goes on."""
    match dice.randrange(8):
        case 0:
            await peer.reset(stream, dice.choice([ErrorCodes.REFUSED_STREAM, ErrorCodes.CANCEL]))
        case 1:
            await peer.respond(stream, b"part", end=False)
            await peer.reset(stream, ErrorCodes.INTERNAL_ERROR)
        case 2:
            await peer.go_away(max(0, stream.id - dice.choice([0, 2, 4])))
            await peer.respond(stream, BODY)
        case 3 if dice.random() < 0.3:
            return False
        case _:
            await peer.respond(stream, BODY, trailers=[("grpc-status", "0")])
    return True


async def _end_of(peer: Http2Peer, stream: ReceivedStream) -> None:
    await peer.until(lambda: stream.ended or stream.reset is not None)


def _server(dice: random.Random) -> Play:
    async def play(peer: Http2Peer) -> None:
        number = 0
        try:
            while True:
                stream = await peer.stream(number)
                if dice.random() < 0.7:
                    await _end_of(peer, stream)
                number += 1
                if stream.reset is None and not await _answer(peer, stream, dice):
                    return
        except ProtocolError:
            pass  # the client has reset the stream meanwhile

    return play


async def _call(endpoint: Http2Endpoint, dice: random.Random) -> str:
    """Make a call, and end it in one of many ways."""

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(dice.randrange(4)):
            yield bytes(dice.choice([1, 1000, 100_000]))
            await asyncio.sleep(0)
        if dice.random() < 0.1:
            raise _LeftError

    body = dice.choice([None, [b"x"], [bytes(300_000)], pieces()])
    try:
        async with asyncio.timeout(dice.choice([0.001, 0.01, 2, 2, 2, 2])):
            response = await endpoint.send(make_request(body))
            try:
                while await response.read():
                    if dice.random() < 0.02:
                        return "left"
            finally:
                response.close()
            return "complete"
    except TimeoutError:
        return "cancelled"
    except _LeftError:
        return "client left"
    except GatewayError as error:
        return error.kind.name if endpoint.url in error.message else error.message


@pytest.mark.parametrize("seed", range(3))
async def test_nothing_is_left_of_calls_that_end_anyhow(
    http2_at: Http2EndpointAt, seed: int
) -> None:
    dice = random.Random(seed)
    buffers = BufferAccount()
    settings = {SettingCodes.MAX_CONCURRENT_STREAMS: 5, SettingCodes.INITIAL_WINDOW_SIZE: 20_000}
    async with connected(
        http2_at, http2_script(_server(dice), settings), buffers=buffers, max_connections=4
    ) as (_, endpoint):
        ends = Counter[str]()

        async def load() -> None:
            for _ in range(max(6, scaled(25))):
                ends[await _call(endpoint, dice)] += 1

        async with asyncio.timeout(60):
            await asyncio.gather(*(load() for _ in range(20)))
        assert not endpoint.connections.waiting
        assert not any(session.handlers for session in endpoint.connections.sessions)
        await endpoint.close()
        await until(lambda: not endpoint.connections.sessions)
        await until(lambda: (buffers.buffered, buffers.streams) == (0, 0))
    assert ends["complete"] > 20
    assert set(ends) >= {"cancelled", "NO_RESPONSE", "BAD_RESPONSE"}
    allowed = {kind.name for kind in (ErrorKind.NO_RESPONSE, ErrorKind.BAD_RESPONSE)}
    allowed |= {"REFUSED", "complete", "left", "cancelled", "client left"}
    assert set(ends) <= allowed, ends
