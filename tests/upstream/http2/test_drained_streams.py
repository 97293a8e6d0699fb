from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from h2.errors import ErrorCodes
from h2.settings import SettingCodes

from gateway.upstream.http2.connections import MAX_CONNECTIONS, DrainedStreams
from gateway.upstream.http2.endpoint import Http2Endpoint
from gateway.upstream.transport import UpstreamResponse
from tests.support.gateway import until
from tests.support.servers.http2_server import Http2Peer, ReceivedStream, http2_script
from tests.upstream.calls import call, make_request
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


async def _do_nothing(endpoint: Http2Endpoint, server: _Server) -> None:
    pass


async def _respond(endpoint: Http2Endpoint, server: _Server) -> None:
    server.responds.set()


async def _close(endpoint: Http2Endpoint, server: _Server) -> None:
    await endpoint.close()


@pytest.mark.parametrize(
    ("drained", "happens"),
    [
        (lambda: _drained(max_seconds=0.1), _do_nothing),
        (lambda: _drained(max_bytes=10_000), _respond),
        (_drained, _close),
        (lambda: DrainedStreams(lambda: False), _do_nothing),
    ],
    ids=["too long", "too many bytes", "endpoint is closed", "cancellation is forwarded"],
)
async def test_server_is_told_after_all(
    http2_at: Http2EndpointAt,
    calls: _Calls,
    drained: Callable[[], DrainedStreams],
    happens: Callable[[Http2Endpoint, _Server], Awaitable[None]],
) -> None:
    server, streams = _Server(ends=False), drained()
    async with connected(http2_at, http2_script(server.play), drained=streams) as (_, endpoint):
        endpoint.count_drained_in(calls)
        await _abandon(endpoint, server)
        await happens(endpoint, server)
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
        endpoint.count_drained_in(calls)
        sending = asyncio.create_task(endpoint.send(make_request((b"a",))))
        await seen.wait()
        await _cancel(sending)
        assert calls.count == 1
        ending.set()
        await until(lambda: not drained.streams)
        assert calls.count == 0
