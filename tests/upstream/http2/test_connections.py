"""Connections get streams, more beside them, and a successor if their server is silent."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable

import pytest
from h2.events import PingReceived, SettingsAcknowledged
from h2.settings import SettingCodes

from gateway.errors import ErrorKind, GatewayError
from gateway.system.buffers import BufferAccount
from gateway.upstream.http2.connection import Http2ServerConnection, SilenceLimits
from gateway.upstream.http2.endpoint import Http2Endpoint
from tests.support.doubles.iterations import iterations
from tests.support.gateway import until
from tests.support.servers.http2_server import Http2Peer, answering, http2_script
from tests.support.servers.scripted_server import Connection, Script
from tests.upstream.endpoints import call, make_request, read_reply
from tests.upstream.http2.conftest import Http2EndpointAt, connected


def _gated(gate: asyncio.Event, limit: int, seen: list[Http2Peer]) -> Script:
    """Make the script of a server that answers once the gate is open; it allows few streams."""

    async def play(peer: Http2Peer) -> None:
        seen.append(peer)
        opened = asyncio.create_task(gate.wait())
        answered = 0
        while not gate.is_set():
            reading = asyncio.create_task(peer.receive())
            await asyncio.wait((reading, opened), return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
            else:
                reading.result()
        while True:
            while answered < len(peer.streams):
                if not peer.streams[answered].reset:
                    await peer.respond(peer.streams[answered], b"ok")
                answered += 1
            await peer.receive()

    return http2_script(play, {SettingCodes.MAX_CONCURRENT_STREAMS: limit})


def _streams(peers: list[Http2Peer]) -> list[int]:
    return [len(peer.streams) for peer in peers]


async def test_calls_go_to_the_connection_with_the_fewest_streams(
    http2_at: Http2EndpointAt,
) -> None:
    gate, peers = asyncio.Event(), list[Http2Peer]()
    async with connected(http2_at, _gated(gate, 4, peers)) as (_, endpoint):
        calls = [asyncio.create_task(call(endpoint)) for _ in range(5)]
        await until(lambda: sum(_streams(peers)) == 5)
        for each in calls[1:4]:
            each.cancel()  # one is left on each connection
        await asyncio.wait(calls[1:4])
        calls += [asyncio.create_task(call(endpoint)) for _ in range(4)]
        await until(lambda: sum(_streams(peers)) == 9)
        open_streams = [len(session.http2.streams) for session in endpoint.connections.sessions]
        assert open_streams == [3, 3]
        gate.set()
        await asyncio.gather(*calls[:1], *calls[4:])


async def test_calls_wait_in_order_once_there_are_enough_connections(
    http2_at: Http2EndpointAt,
) -> None:
    order: list[int] = []

    async def numbered(endpoint: Http2Endpoint, number: int) -> None:
        await call(endpoint, target=f"/{number}")
        order.append(number)

    settings = {SettingCodes.MAX_CONCURRENT_STREAMS: 1}
    async with connected(http2_at, answering(b"ok", settings=settings), max_connections=1) as (
        server,
        endpoint,
    ):
        await asyncio.gather(*(numbered(endpoint, number) for number in range(20)))
        assert len(server.connections) == 1
    assert order == list(range(20))


async def test_cancelled_wait_gives_its_place_to_the_next(http2_at: Http2EndpointAt) -> None:
    gate, peers = asyncio.Event(), list[Http2Peer]()
    async with connected(http2_at, _gated(gate, 1, peers), max_connections=1) as (_, endpoint):
        calls = [asyncio.create_task(call(endpoint)) for _ in range(4)]
        await until(lambda: _streams(peers) == [1])
        assert len(endpoint.connections.waiting) == 3
        calls[1].cancel()
        calls[2].cancel()
        await asyncio.wait(calls[1:3])
        assert len(endpoint.connections.waiting) == 1
        gate.set()
        await asyncio.gather(calls[0], calls[3])
        assert _streams(peers) == [2]


async def test_stream_of_a_slow_reader_is_free_once_its_response_has_come(
    http2_at: Http2EndpointAt,
) -> None:
    settings = {SettingCodes.MAX_CONCURRENT_STREAMS: 1}
    async with connected(
        http2_at, answering(b"ok", [("t", "1")], settings=settings), max_connections=1
    ) as (_, endpoint):
        unread = await endpoint.send(make_request())
        assert (await call(endpoint)).body == b"ok"
        assert (await read_reply(unread)).trailers == (("t", "1"),)


async def test_server_that_allows_more_streams_later_gets_them(http2_at: Http2EndpointAt) -> None:

    async def play(peer: Http2Peer) -> None:
        first = await peer.request()
        peer.h2.update_settings({SettingCodes.MAX_CONCURRENT_STREAMS: 2})
        await peer.flush()
        await peer.respond(await peer.request(1), b"second")
        await peer.respond(first, b"first")
        await peer.serve_to_end()

    settings = {SettingCodes.MAX_CONCURRENT_STREAMS: 1}
    async with connected(http2_at, http2_script(play, settings), max_connections=1) as (
        _,
        endpoint,
    ):
        replies = await asyncio.gather(call(endpoint), call(endpoint))
    assert [reply.body for reply in replies] == [b"first", b"second"]


async def test_failed_connect_fails_all_that_wait_for_it(http2_at: Http2EndpointAt) -> None:
    async def leave(connection: Connection) -> None:
        await connection.reader.read(10)

    async with connected(http2_at, leave) as (server, endpoint):
        errors = await asyncio.gather(*(call(endpoint) for _ in range(5)), return_exceptions=True)
        kinds = Counter(error.kind for error in errors if isinstance(error, GatewayError))
        assert kinds == {ErrorKind.UNREACHABLE: 5}
        assert len({id(error) for error in errors}) == 5
        assert len(server.connections) == 1


async def test_failed_connect_fails_no_request_that_can_wait_for_a_stream(
    http2_at: Http2EndpointAt,
) -> None:
    gate, refused, peers = asyncio.Event(), asyncio.Event(), list[Http2Peer]()

    async def refuse() -> Http2ServerConnection:
        refused.set()
        raise GatewayError(ErrorKind.UNREACHABLE, "refused")

    async with connected(http2_at, _gated(gate, 1, peers)) as (_, endpoint):
        first = asyncio.create_task(call(endpoint))
        await until(lambda: _streams(peers) == [1])
        endpoint.connections._connect = refuse
        second = asyncio.create_task(call(endpoint))
        await refused.wait()
        await iterations(3)
        gate.set()
        assert [(await each).body for each in (first, second)] == [b"ok", b"ok"]
        assert _streams(peers) == [2]


async def test_connection_is_closed_once_it_is_idle_for_its_time(http2_at: Http2EndpointAt) -> None:
    may_respond = asyncio.Event()

    async def play(peer: Http2Peer) -> None:
        await peer.respond(await peer.request())
        second = await peer.request(1)
        await may_respond.wait()
        await peer.respond(second, b"ok")
        await peer.serve_to_end()

    async with connected(http2_at, http2_script(play), answering(b"new"), idle_timeout=0.02) as (
        server,
        endpoint,
    ):
        await call(endpoint)
        pending = asyncio.create_task(call(endpoint))
        await asyncio.sleep(0.1)
        assert len(endpoint.connections.sessions) == 1
        may_respond.set()
        assert (await pending).body == b"ok"
        assert len(server.connections) == 1
        await until(lambda: len(endpoint.connections.sessions) == 0)
        await server.connections[0].left.wait()
        assert (await call(endpoint)).body == b"new"


@pytest.mark.parametrize("connects", [False, True])
async def test_close_lets_calls_finish_and_then_closes_their_connection(
    http2_at: Http2EndpointAt, connects: bool
) -> None:
    gate, peers = asyncio.Event(), list[Http2Peer]()
    async with connected(http2_at, _gated(gate, 100, peers)) as (_, endpoint):
        pending = asyncio.create_task(call(endpoint))
        if connects:
            await asyncio.sleep(0)
        else:
            await until(lambda: _streams(peers) == [1])
        await endpoint.close()
        gate.set()
        assert (await pending).body == b"ok"
        await until(lambda: len(endpoint.connections.sessions) == 0)


async def test_server_that_says_goodbye_as_it_begins_is_connected_to_once(
    http2_at: Http2EndpointAt,
) -> None:
    settings, goaway = (bytes(3) + bytes([kind, 0]) + bytes(4) for kind in (4, 7))
    goaway = b"\0\0\x08" + goaway[3:] + bytes(8)

    async def leave(connection: Connection) -> None:
        await connection.send(settings + goaway)
        await connection.wait_for_close()

    async with connected(http2_at, leave) as (server, endpoint):
        with pytest.raises(GatewayError, match="closed the connection before it took") as raised:
            await call(endpoint)
        assert raised.value.kind is ErrorKind.UNREACHABLE
        assert raised.value.message.endswith("(GOAWAY NO_ERROR)")
        assert len(server.connections) == 1
        await server.connections[0].left.wait()
        assert len(endpoint.connections.sessions) == 0


NO_STREAMS = {SettingCodes.MAX_CONCURRENT_STREAMS: 0}


async def test_server_that_allows_no_streams_gets_one_connection_and_calls_an_error(
    http2_at: Http2EndpointAt,
) -> None:
    async with connected(
        http2_at, http2_script(Http2Peer.serve_to_end, NO_STREAMS), connect_timeout=0.2
    ) as (server, endpoint):
        async with asyncio.timeout(5):
            errors = await asyncio.gather(
                *[call(endpoint) for _ in range(5)], return_exceptions=True
            )
        assert {str(error).partition(": ")[2] for error in errors} == {
            "it allows no requests (its SETTINGS_MAX_CONCURRENT_STREAMS is 0)"
        }
        kinds = Counter(error.kind for error in errors if isinstance(error, GatewayError))
        assert kinds == {ErrorKind.UNREACHABLE: 5}
        assert len(server.connections) == 1
        await server.connections[0].left.wait()


async def test_calls_leave_a_connection_whose_server_allows_no_more_streams(
    http2_at: Http2EndpointAt,
) -> None:
    peers: list[Http2Peer] = []
    changed = asyncio.Event()

    async def play(peer: Http2Peer) -> None:
        peers.append(peer)
        first = await peer.request()
        if len(peers) == 1:
            peer.h2.update_settings({SettingCodes.MAX_CONCURRENT_STREAMS: 0})
            await peer.flush()
            await peer.until(lambda: any(isinstance(e, SettingsAcknowledged) for e in peer.events))
            changed.set()
        await peer.respond(first, b"ok")
        await peer.serve_to_end()

    async with connected(http2_at, http2_script(play)) as (server, endpoint):
        early = asyncio.create_task(call(endpoint))
        await changed.wait()
        assert (await call(endpoint)).body == b"ok"
        assert (await early).body == b"ok"
        assert _streams(peers) == [1, 1]
        await server.connections[0].left.wait()
        assert len(server.connections) == 2


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


@pytest.mark.parametrize("script", [silent, closed_windows])
async def test_call_after_one_that_timed_out_takes_another_connection(
    http2_at: Http2EndpointAt, script: Script
) -> None:
    async with connected(http2_at, script, answering(b"second")) as (server, endpoint):
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
