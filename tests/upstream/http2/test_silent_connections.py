"""Connections whose server is silent, although TCP is alive: new calls go elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest
from h2.events import PingReceived
from h2.settings import SettingCodes

from gateway.system.buffers import BufferAccount
from gateway.upstream.http2.connection import SilenceLimits
from tests.support.gateway import until
from tests.support.servers.http2_server import Http2Peer, answering, http2_script
from tests.support.servers.scripted_server import Script
from tests.upstream.calls import call
from tests.upstream.http2.conftest import Http2EndpointAt, connected

_NEVER = 60.0
_AT_ONCE = SilenceLimits(given_up=0.0, in_progress=_NEVER, ping=_NEVER)


async def _cancelled(work: Awaitable[object]) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await work


async def _hang(peer: Http2Peer) -> None:
    await peer.stream()
    await asyncio.Event().wait()


silent = http2_script(_hang)
"""Reads nothing more once a call has come."""


async def _hang_later(peer: Http2Peer) -> None:
    await peer.respond(await peer.request(), b"first")
    await _hang(peer)


silent_later = http2_script(_hang_later)


async def _acknowledge_pings(peer: Http2Peer) -> None:
    await peer.serve_to_end()


stuck = http2_script(_acknowledge_pings)
"""Reads all, acknowledges PINGs, and answers no call."""

closed_windows = http2_script(
    _acknowledge_pings, {SettingCodes.INITIAL_WINDOW_SIZE: 0}, opens_windows=False
)
"""The same, and lets the gateway send no body."""


@pytest.mark.parametrize("script", [silent, silent_later, stuck, closed_windows])
async def test_call_after_one_that_timed_out_takes_another_connection(
    http2_at: Http2EndpointAt, script: Script
) -> None:
    async with connected(http2_at, script, answering(b"second")) as (server, endpoint):
        if script is silent_later:
            await call(endpoint, [b"a"])
        await _cancelled(call(endpoint, [b"a"]))
        endpoint.after_timeout()
        for _ in range(3):
            assert (await call(endpoint, [b"a"])).body == b"second"
        assert len(server.connections) == 2
        assert len(endpoint.connections.sessions) == 1


async def test_calls_of_a_connection_that_timed_out_finish_there(http2_at: Http2EndpointAt) -> None:
    may_respond = asyncio.Event()

    async def slow(peer: Http2Peer) -> None:
        late, _ = await peer.request(0), await peer.request(1)
        await may_respond.wait()
        await peer.respond(late, b"late")
        await peer.serve_to_end()

    buffers = BufferAccount()
    async with connected(http2_at, http2_script(slow), answering(b"new"), buffers=buffers) as (
        server,
        endpoint,
    ):
        pending = asyncio.create_task(call(endpoint))
        await until(lambda: any(each.handlers for each in endpoint.connections.sessions))
        await _cancelled(call(endpoint))
        endpoint.after_timeout()
        assert (await call(endpoint)).body == b"new"
        may_respond.set()
        assert (await pending).body == b"late"
        await server.connections[0].left.wait()  # it is closed with its last call
        assert len(server.connections) == 2
    await endpoint.close()
    await until(lambda: (buffers.buffered, buffers.streams) == (0, 0))


async def test_timeout_says_nothing_about_connections_that_have_responded_since(
    http2_at: Http2EndpointAt,
) -> None:
    async def first_never(peer: Http2Peer) -> None:
        await peer.request(0)
        for number in (1, 2):
            await peer.respond(await peer.request(number), b"ok")
        await peer.serve_to_end()

    async with connected(http2_at, http2_script(first_never)) as (server, endpoint):
        await _cancelled(call(endpoint))
        await call(endpoint)
        endpoint.after_timeout()  # that of a call over another connection
        await call(endpoint)
        assert len(server.connections) == 1


async def test_call_given_up_has_a_silent_server_pinged_and_others_go_elsewhere(
    http2_at: Http2EndpointAt,
) -> None:
    """Once the server has sent anything, its connection takes calls again."""
    may_read = asyncio.Event()

    async def busy(peer: Http2Peer) -> None:
        late = await peer.request(0)
        await peer.stream(1)
        await may_read.wait()
        await peer.until(lambda: peer.count(PingReceived) == 1)
        await peer.respond(late, b"late")
        for number in range(2, 9):
            await peer.respond(await peer.request(number), b"old")

    async with connected(http2_at, http2_script(busy), answering(b"new"), silence=_AT_ONCE) as (
        server,
        endpoint,
    ):
        pending = asyncio.create_task(call(endpoint, [b"a"]))
        await until(lambda: any(each.handlers for each in endpoint.connections.sessions))
        await _cancelled(call(endpoint, [b"a"]))
        assert (await call(endpoint, [b"a"])).body == b"new"
        may_read.set()
        assert (await pending).body == b"late"
        both = await asyncio.gather(*(call(endpoint, [b"a"]) for _ in range(4)))
        assert {reply.body for reply in both} == {b"old", b"new"}
        assert len(server.connections) == 2


@pytest.mark.parametrize(("script", "given_up"), [(stuck, 2), (closed_windows, 1)])
async def test_connection_is_replaced_whose_server_acknowledges_pings_and_answers_no_call(
    http2_at: Http2EndpointAt, script: Script, given_up: int
) -> None:
    """gRPC servers close connections for more than one PING without a response between them."""
    async with connected(http2_at, script, answering(b"new"), silence=_AT_ONCE) as (
        server,
        endpoint,
    ):
        pending = asyncio.create_task(call(endpoint, [b"a"]))  # it would wait for ever
        await until(lambda: any(each.handlers for each in endpoint.connections.sessions))
        for _ in range(given_up):
            await _cancelled(call(endpoint, [b"a"]))
        assert (await call(endpoint, [b"a"])).body == b"new"
        pending.cancel()
        await asyncio.wait([pending])
        await server.connections[0].left.wait()
        assert len(server.connections) == 2


async def test_connection_of_a_server_that_acknowledges_no_ping_takes_no_calls(
    http2_at: Http2EndpointAt,
) -> None:
    """Calls go elsewhere before any has timed out; what waits there ends by its own limits."""
    limits = SilenceLimits(given_up=_NEVER, in_progress=0.05, ping=0.05)
    async with connected(
        http2_at, silent_later, answering(b"new"), silence=limits, max_connections=1
    ) as (_, endpoint):
        await call(endpoint)
        pending = asyncio.create_task(call(endpoint))
        await until(lambda: not endpoint.connections.sessions)
        assert (await call(endpoint)).body == b"new"
        assert not pending.done()
        pending.cancel()
        await asyncio.wait([pending])


async def test_long_call_costs_its_server_one_ping(http2_at: Http2EndpointAt) -> None:
    peers: list[Http2Peer] = []
    may_respond = asyncio.Event()

    async def slow(peer: Http2Peer) -> None:
        peers.append(peer)
        for number in range(2):
            stream = await peer.request(number)
            reading = asyncio.create_task(peer.serve_to_end())
            await may_respond.wait()
            reading.cancel()
            await asyncio.wait([reading])
            may_respond.clear()
            await peer.respond(stream, b"late")
        await peer.serve_to_end()

    limits = SilenceLimits(in_progress=0.02)
    async with connected(http2_at, http2_script(slow), silence=limits) as (server, endpoint):
        for number in range(1, 3):
            pending = asyncio.create_task(call(endpoint))
            await until(lambda: peers and peers[0].count(PingReceived) == number)  # noqa: B023
            await asyncio.sleep(0.2)  # the time of ten more
            may_respond.set()
            assert (await pending).body == b"late"
            assert peers[0].count(PingReceived) == number
        assert len(server.connections) == 1
