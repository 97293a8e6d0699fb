"""Over HTTP/2, clients may go on with requests whose response is complete, within bounds."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from gateway.errors import bad_request
from gateway.http2.errors import ErrorCode
from gateway.http2.flood_limits import MAX_CONTROL_FRAMES, MAX_RESETS
from gateway.http2.frames import DATA, PADDED, encode_data_header
from gateway.http2.session import CONNECTION_WINDOW, STREAM_WINDOW
from gateway.listener.connection_host import IdleTimeouts
from gateway.listener.http2_connection import MAX_LINGER_BYTES, MAX_STREAMS, Http2ClientConnection
from gateway.observe.call_record import CallRecord
from gateway.proxy.interfaces import ClientRequest, ClientResponse
from tests.http2.frame_bytes import frame
from tests.listener.running_listener import RunningListener, echo, nothing_left, running_listener
from tests.listener.running_listener import scheme as scheme
from tests.support.gateway import until
from tests.support.http2_client import Headers, Http2Client, Http2Reply, connect_http2
from tests.support.raw_client import TIMEOUT


async def refuse(client: ClientRequest, response: ClientResponse) -> None:
    """Respond before the body has come, but for GET."""
    if client.method == "GET":
        await echo(client, response)
    else:
        raise bad_request("not looked at")


@asynccontextmanager
async def refusing_listener(
    caplog: pytest.LogCaptureFixture,
    linger_timeout: float = 60.0,
    keep_alive_timeout: float = 60.0,
    records: list[CallRecord] | None = None,
) -> AsyncIterator[RunningListener]:
    """Run a listener, which must keep nothing of its clients."""
    observers = () if records is None else (records.append,)
    async with running_listener(refuse, *observers) as running:
        running.listener.idle_timeouts = IdleTimeouts(
            linger_timeout=linger_timeout, keep_alive_timeout=keep_alive_timeout
        )
        async with nothing_left(running, caplog):
            yield running


async def begin(
    client: Http2Client, method: str = "POST", headers: Headers = ()
) -> tuple[int, Http2Reply]:
    """Send the head of a request, and read its response."""
    stream = client.send_headers(method, "/", headers)
    reply = await client.response(stream)
    assert (reply.ended, reply.reset) == (True, None)
    return stream, reply


def open_streams(running: RunningListener) -> int:
    """Return how many streams are open."""
    connections = running.listener._connections
    return sum(
        len(each.http2.streams) for each in connections if isinstance(each, Http2ClientConnection)
    )


async def until_ended(running: RunningListener) -> None:
    await until(lambda: not open_streams(running))


@pytest.mark.parametrize(
    ("method", "headers", "size"),
    [
        ("POST", [], 0),
        ("POST", [], CONNECTION_WINDOW + 3_000_000),
        ("HEAD", [], 75),
        ("POST", [("x", "x" * 4000)] * 20, 75),
    ],
    ids=["nothing", "more than a window", "HEAD", "a head that is too large"],
)
@pytest.mark.parametrize("has_trailers", [False, True])
async def test_client_ends_its_request_after_the_response(
    method: str, headers: Headers, size: int, has_trailers: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with refusing_listener(caplog) as running, connect_http2(running.url) as client:
        stream, reply = await begin(client, method, headers)
        assert reply.status == (431 if headers else 400)
        if has_trailers:  # also after a GOAWAY of the client
            client.send_goaway()
            client.ping()
            await client.until(lambda: client.pings)
        # Its windows open again, or it could not send all of this.
        async with asyncio.timeout(TIMEOUT):
            await client.send_data(stream, bytes(size), end_stream=not has_trailers)
        if has_trailers:
            client.h2.send_headers(stream, [("x-checksum", "1")], end_stream=True)
            client.flush()
            await client.until_closed()
        else:
            await until_ended(running)
            assert (await client.call("GET", "/")).status == 200
        assert reply.reset is None


async def test_request_that_goes_on_holds_no_call_and_no_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    records: list[CallRecord] = []
    async with (
        refusing_listener(caplog, records=records) as running,
        connect_http2(running.url) as client,
    ):
        for count in range(1, MAX_STREAMS + 1):
            stream, _ = await begin(client)
            await client.send_data(stream, bytes(STREAM_WINDOW // 2), end_stream=False)
            assert len(records) == count
        listener, buffers = running.listener, running.listener.buffers
        assert (listener.requests, listener._active_calls) == (0, {})
        assert (buffers.streams, buffers.total, buffers.heads) == (0, 0, 0)
        assert open_streams(running) == MAX_STREAMS


async def test_request_that_does_not_end_is_reset_without_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with (
        refusing_listener(caplog, linger_timeout=0.05) as running,
        connect_http2(running.url) as client,
    ):
        replies = [(await begin(client))[1] for _ in range(3)]
        await client.until(lambda: all(each.reset is not None for each in replies))
        assert {each.reset for each in replies} == {ErrorCode.NO_ERROR}
        assert not open_streams(running)
        # What was on its way is ignored.
        client.write(frame(DATA, 0, 1, b"late"))
        assert (await client.call("GET", "/")).status == 200


async def test_requests_that_go_on_may_send_a_bounded_size(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with refusing_listener(caplog) as running, connect_http2(running.url) as client:
        first, reply = await begin(client)
        await client.send_data(first, bytes(MAX_LINGER_BYTES // 2), end_stream=False)
        second, reply_of_second = await begin(client)
        await client.send_data(second, bytes(MAX_LINGER_BYTES // 2), end_stream=False)
        assert (await client.call("GET", "/")).status == 200
        assert (reply.reset, reply_of_second.reset) == (None, None)
        await client.send_data(second, b"x", end_stream=False)
        await client.until(lambda: reply_of_second.reset == ErrorCode.NO_ERROR)
        # What has ended counts no more.
        third, reply_of_third = await begin(client)
        await client.send_data(third, bytes(1_000_000))
        await client.send_data(first, b"")
        await until_ended(running)
        assert (reply.reset, reply_of_third.reset) == (None, None)


async def test_requests_that_go_on_count_as_concurrent_streams(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with refusing_listener(caplog) as running, connect_http2(running.url) as client:
        streams = [(await begin(client))[0] for _ in range(MAX_STREAMS)]
        client.h2.remote_settings.max_concurrent_streams = 1000
        client.h2.remote_settings.acknowledge()
        more = [client.send_headers("POST", "/") for _ in range(900)]
        await client.until(lambda: all(client.replies[each].reset is not None for each in more))
        assert {client.replies[each].reset for each in more} == {ErrorCode.REFUSED_STREAM}
        assert open_streams(running) == MAX_STREAMS
        await client.send_data(streams[7], b"")
        assert (await client.call("GET", "/")).status == 200


async def test_resets_after_responses_are_no_flood(caplog: pytest.LogCaptureFixture) -> None:
    """Go and grpcio end each request like this that got its response early."""
    async with refusing_listener(caplog) as running, connect_http2(running.url) as client:
        for _ in range(2 * MAX_RESETS // MAX_STREAMS + 1):
            streams = [client.send_headers("POST", "/", flush=False) for _ in range(MAX_STREAMS)]
            client.flush()
            for stream in streams:
                assert (await client.response(stream)).status == 400
                client.reset_stream(stream, ErrorCode.NO_ERROR)
        assert (await client.call("GET", "/")).status == 200
        assert not open_streams(running)


async def test_connection_is_not_idle_while_a_request_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with (
        refusing_listener(caplog, keep_alive_timeout=0.02) as running,
        connect_http2(running.url) as client,
    ):
        stream, _ = await begin(client)
        await asyncio.sleep(0.2)  # twenty checks for idle connections
        await client.send_data(stream, b"body")
        await client.until_closed()
        assert client.goaways == [(stream, ErrorCode.NO_ERROR, b"idle for too long")]


@pytest.mark.parametrize("ends", [False, True])
async def test_drain_gives_the_grace_to_requests_that_go_on(
    ends: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_listener(refuse) as running, connect_http2(running.url) as client:
        running.listener.idle_timeouts = IdleTimeouts(linger_timeout=60.0)
        replies = []
        for _ in range(MAX_STREAMS):
            stream, reply = await begin(client)
            replies.append(reply)
        draining = asyncio.create_task(running.listener.drain(60, 60 if ends else 0.05))
        if ends:
            await client.until(lambda: client.goaways)
            for stream in client.replies:
                await client.send_data(stream, b"rest")
            await until_ended(running)
            assert {each.reset for each in replies} == {None}
            await client.close()
        else:
            await client.until_closed()
            assert {each.reset for each in replies} == {ErrorCode.NO_ERROR}
        async with asyncio.timeout(5):
            assert await draining == 0


# Hostile clients


@pytest.mark.parametrize("flood", ["empty DATA", "padding", "a wrong length"])
async def test_flood_on_a_lingering_stream_closes_the_connection_and_a_wrong_length_the_stream(
    flood: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with refusing_listener(caplog) as running, connect_http2(running.url) as client:
        wrong = flood == "a wrong length"
        stream, reply = await begin(client, headers=[("content-length", "4")] if wrong else [])
        if wrong:
            client.write(frame(DATA, 0, stream, b"12345"))
            await client.until(lambda: reply.reset == ErrorCode.PROTOCOL_ERROR)
            assert not open_streams(running)
            assert (await client.call("GET", "/")).status == 200
            return
        padding = frame(DATA, PADDED, stream, bytes([255]) + bytes(255))
        each = frame(DATA, 0, stream) if flood == "empty DATA" else padding
        client.write(each * (2 * MAX_CONTROL_FRAMES))
        await client.until_closed()
        assert client.goaways[0][1] == ErrorCode.ENHANCE_YOUR_CALM


async def test_client_that_ignores_windows_stays_within_the_bounded_size(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with refusing_listener(caplog) as running, connect_http2(running.url) as client:
        stream, reply = await begin(client)
        piece = encode_data_header(stream, STREAM_WINDOW, False) + bytes(STREAM_WINDOW)
        for _ in range(MAX_LINGER_BYTES // STREAM_WINDOW + 1):
            client.write(piece)
            await client._writer.drain()
        await client.until(lambda: reply.reset == ErrorCode.NO_ERROR)
        assert (await client.call("GET", "/")).status == 200


@pytest.mark.parametrize("leaves", ["at once", "with a frame"])
async def test_connection_that_is_lost_ends_its_lingering_streams(
    leaves: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with refusing_listener(caplog) as running:
        for _ in range(3):
            with suppress(ssl.SSLError):
                async with connect_http2(running.url) as client:
                    for _number in range(MAX_STREAMS):
                        await begin(client)
                    if leaves == "with a frame":
                        client.write(encode_data_header(1, 1000, False) + b"x")
                    client.reset()
