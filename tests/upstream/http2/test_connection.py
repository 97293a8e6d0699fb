from __future__ import annotations

import asyncio
import socket

import pytest
from h2.errors import ErrorCodes
from h2.events import PingReceived
from h2.settings import SettingCodes

from gateway.errors import ErrorKind, GatewayError
from gateway.http2.hpack import HeaderList
from gateway.system.buffers import BufferAccount
from tests.support.gateway import until
from tests.support.servers.http2_server import Http2Peer, answering, http2_script
from tests.support.servers.scripted_server import Script, ScriptedServer
from tests.upstream.endpoints import call, make_request
from tests.upstream.http2.conftest import Http2EndpointAt, connected

MIB = 1024 * 1024


async def _fail(http2_at: Http2EndpointAt, script: Script) -> GatewayError:
    """Return the error of a call to a server."""
    async with connected(http2_at, script, public_name="upstream 'u'") as (_, endpoint):
        with pytest.raises(GatewayError) as raised:
            await call(endpoint, [b"a"])
        error = raised.value
        assert endpoint.url in error.message
        assert endpoint.url not in error.public_message
        error.message = error.message.replace(endpoint.url, "SERVER")
        return error


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize(
    ("code", "name"),
    [(ErrorCodes.NO_ERROR, "NO_ERROR"), (ErrorCodes.CANCEL, "CANCEL"), (77, "error 77")],
)
async def test_reset_stream_fails_its_call(
    http2_at: Http2EndpointAt, code: int, name: str, begins: bool
) -> None:
    async def play(peer: Http2Peer) -> None:
        stream = await peer.request()
        if begins:
            await peer.respond(stream, b"part", end=False)
        await peer.send_frame(3, 0, stream.id, int(code).to_bytes(4))
        await peer.serve_to_end()

    error = await _fail(http2_at, http2_script(play))
    when = "before the end of its response" if begins else "before it responded"
    assert error.message == f"SERVER broke off {when}: the peer reset the stream: {name}"
    assert error.kind is (ErrorKind.BAD_RESPONSE if begins else ErrorKind.NO_RESPONSE)


async def test_goaway_says_why_a_connection_closes(http2_at: Http2EndpointAt) -> None:
    async def play(peer: Http2Peer) -> None:
        stream = await peer.request()
        await peer.go_away(stream.id, ErrorCodes.ENHANCE_YOUR_CALM, b"too_many\npings" + 500 * b"x")

    error = await _fail(http2_at, http2_script(play))
    quoted = ("too_many\\npings" + 500 * "x")[:200] + "..."
    assert error.message == (
        f"SERVER closed the connection before it responded (GOAWAY ENHANCE_YOUR_CALM: {quoted})"
    )
    assert error.public_message == "upstream 'u' closed the connection before it responded"
    assert error.kind is ErrorKind.NO_RESPONSE


async def test_close_at_any_byte_of_a_response_fails_its_call(http2_at: Http2EndpointAt) -> None:
    """HEADERS, DATA and trailers, cut after each of their bytes."""
    sizes: list[int] = []

    def cut(size: int) -> Script:
        async def play(peer: Http2Peer) -> None:
            stream = await peer.request()
            peer.h2.send_headers(stream.id, [(":status", "200"), ("x", "y")])
            peer.h2.send_data(stream.id, b"body")
            peer.h2.send_headers(stream.id, [("t", "1")], end_stream=True)
            data = peer.h2.data_to_send()
            sizes.append(len(data))
            await peer.connection.send(data[:size])
            if size >= len(data):
                await peer.serve_to_end()

        return http2_script(play)

    async with ScriptedServer(cut(10_000)) as server:
        assert (await call(http2_at(server.url))).body == b"body"
    for size in range(sizes[0]):
        error = await _fail(http2_at, cut(size))
        begun = error.message == "SERVER closed the connection before the end of its response"
        assert begun or error.message == "SERVER closed the connection before it responded"
        assert error.kind is (ErrorKind.BAD_RESPONSE if begun else ErrorKind.NO_RESPONSE)


@pytest.mark.parametrize(
    ("headers", "why"),
    [([("content-type", "a")], ":status"), ([(":status", "200"), ("Upper", "x")], "'Upper'")],
)
async def test_malformed_response_names_the_server(
    http2_at: Http2EndpointAt, headers: list[tuple[str, str]], why: str
) -> None:
    async def play(peer: Http2Peer) -> None:
        stream = await peer.request()
        block = peer.h2.encoder.encode(headers)
        await peer.send_frame(1, 4, stream.id, block)
        await peer.serve_to_end()

    error = await _fail(http2_at, http2_script(play))
    assert error.kind is ErrorKind.BAD_RESPONSE
    assert error.message.startswith("SERVER sent an invalid HTTP/2 response: malformed headers: ")
    assert why in error.message


async def test_too_large_headers_fail_the_call_only(http2_at: Http2EndpointAt) -> None:
    async def play(peer: Http2Peer) -> None:
        stream = await peer.request()
        headers = [(f"x-{i}", 5000 * "v") for i in range(20)]
        peer.h2.send_headers(stream.id, [(":status", "200"), *headers], end_stream=True)
        await peer.flush()
        await peer.respond(await peer.request(1), b"ok")
        await peer.serve_to_end()

    async with connected(http2_at, http2_script(play)) as (_, endpoint):
        with pytest.raises(GatewayError, match="sent headers of more than") as raised:
            await call(endpoint)
        assert raised.value.kind is ErrorKind.BAD_RESPONSE
        assert (await call(endpoint)).body == b"ok"


async def test_broken_protocol_fails_all_calls(http2_at: Http2EndpointAt) -> None:
    async def play(peer: Http2Peer) -> None:
        await peer.request(1)
        await peer.send_frame(0, 0, 0, b"DATA on stream 0")
        await peer.serve_to_end()

    async with connected(http2_at, http2_script(play), answering(b"ok")) as (_, endpoint):
        calls = [asyncio.create_task(call(endpoint, [b"a"])) for _ in range(2)]
        for error in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(error, GatewayError)
            assert error.kind is ErrorKind.BAD_RESPONSE
            assert error.message.startswith(f"{endpoint.url} broke the HTTP/2 protocol: ")
        assert (await call(endpoint)).body == b"ok"


@pytest.mark.parametrize("last", [0, 1])
async def test_requests_beyond_goaway_are_sent_again_elsewhere(
    http2_at: Http2EndpointAt, last: int
) -> None:
    """Those up to its last stream finish where they are."""

    async def leave(peer: Http2Peer) -> None:
        await peer.request(1)
        await peer.go_away(last)
        for stream in peer.streams:
            if stream.id <= last:
                await peer.respond(stream, b"old")
        await peer.serve_to_end()

    async with connected(http2_at, http2_script(leave), answering(b"new")) as (server, endpoint):
        replies = await asyncio.gather(*(call(endpoint, [b"a"]) for _ in range(2)))
        stayed = (last + 1) // 2
        assert [reply.body for reply in replies] == stayed * [b"old"] + (2 - stayed) * [b"new"]
        assert (await call(endpoint)).body == b"new"
        # The gateway closes the old connection once its streams have ended.
        await server.connections[0].left.wait()


async def test_goaway_on_an_idle_connection_closes_it(http2_at: Http2EndpointAt) -> None:
    async def leave(peer: Http2Peer) -> None:
        await peer.respond(await peer.request())
        await peer.go_away(1)
        await peer.serve_to_end()

    async with connected(http2_at, http2_script(leave)) as (server, endpoint):
        await call(endpoint)
        await server.connections[0].left.wait()
        assert len(endpoint.connections.sessions) == 0


async def test_slow_reader_stops_neither_other_streams_nor_takes_memory(
    http2_at: Http2EndpointAt,
) -> None:
    body = bytes(8 * MIB)

    async def play(peer: Http2Peer) -> None:
        slow = await peer.request(0)
        fast = await peer.request(1)
        peer.h2.send_headers(slow.id, [(":status", "200")])
        while (size := peer.h2.local_flow_control_window(slow.id)) > 0:
            peer.h2.send_data(slow.id, bytes(min(size, 16_384)))
        await peer.flush()
        await peer.respond(fast, body)
        peer.h2.end_stream(slow.id)
        await peer.flush()
        await peer.serve_to_end()

    buffers = BufferAccount()
    async with connected(http2_at, http2_script(play), buffers=buffers) as (server, endpoint):
        waiting = asyncio.create_task(endpoint.send(make_request([b"slow"])))
        await until(lambda: len(endpoint.connections.sessions) == 1)
        assert len((await call(endpoint, [b"fast"])).body) == len(body)
        response = await waiting
        assert buffers.buffered < MIB
        response.close()
        assert len(server.connections) == 1
    await endpoint.close()
    await until(lambda: (buffers.buffered, buffers.streams) == (0, 0))


async def test_large_bodies_share_a_connection_fairly(http2_at: Http2EndpointAt) -> None:
    """While the socket is full, the streams take turns."""
    size = 8 * MIB
    shares: list[int] = []

    async def play(peer: Http2Peer) -> None:
        await peer.stream(2)
        await peer.until(lambda: any(stream.ended for stream in peer.streams))
        shares.extend(len(stream.body) for stream in peer.streams)
        for number in range(3):
            await peer.respond(await peer.request(number))
        await peer.serve_to_end()

    settings = {SettingCodes.INITIAL_WINDOW_SIZE: 2**31 - 1}
    async with connected(http2_at, http2_script(play, settings)) as (_, endpoint):
        await asyncio.gather(*(call(endpoint, [bytes(size)]) for _ in range(3)))
    assert min(shares) > size * 0.8


async def test_connection_sends_no_pings_and_lets_the_kernel_watch_the_server(
    http2_at: Http2EndpointAt,
) -> None:
    """gRPC servers close connections that ping more than once in five minutes."""
    peers: list[Http2Peer] = []

    async def play(peer: Http2Peer) -> None:
        peers.append(peer)
        for number in range(3):
            await peer.respond(await peer.request(number))
        await peer.serve_to_end()

    async with connected(http2_at, http2_script(play)) as (_, endpoint):
        for _ in range(3):
            await call(endpoint)
        (session,) = endpoint.connections.sessions
        sock = session.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 20_000
    assert peers[0].count(PingReceived) == 0


class _BrokenReceiver:
    """A user of a stream that fails as it is told of an error."""

    def on_headers(self, headers: HeaderList) -> None:
        raise NotImplementedError

    def on_data(self, size: int) -> None:
        raise NotImplementedError

    def on_end(self) -> None:
        raise NotImplementedError

    def on_error(self, error: Exception) -> None:
        raise RuntimeError("a bug")


@pytest.mark.parametrize("breaks_protocol", [False, True])
async def test_bug_in_a_user_of_a_stream_leaves_all_others_their_error(
    http2_at: Http2EndpointAt, breaks_protocol: bool
) -> None:
    faults: list[object] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: faults.append(context.get("exception"))
    )

    async def play(peer: Http2Peer) -> None:
        await peer.respond(await peer.request(0))
        await peer.request(2)
        if breaks_protocol:
            await peer.send_frame(0, 0, 0, b"DATA on stream 0")
            await peer.serve_to_end()

    buffers = BufferAccount()
    async with connected(http2_at, http2_script(play), answering(b"ok"), buffers=buffers) as (
        server,
        endpoint,
    ):
        await call(endpoint)
        (session,) = endpoint.connections.sessions
        broken = session.open_stream(_BrokenReceiver())
        broken.send_headers(endpoint.request_fields(make_request()), end_stream=True)
        with pytest.raises(GatewayError):
            await call(endpoint)
        broken.close()
        assert (await call(endpoint)).body == b"ok"
        assert len(server.connections) == 2
    assert faults
    assert {type(fault) for fault in faults} == {RuntimeError}
    await endpoint.close()
    await until(lambda: (buffers.buffered, buffers.streams) == (0, 0))
