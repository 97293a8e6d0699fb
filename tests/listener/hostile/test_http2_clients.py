"""Hostile HTTP/2 clients leave nothing behind, and nobody else waits for them."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest

from gateway.http1.head import RequestHead
from gateway.http2.errors import ErrorCode
from gateway.http2.frames import (
    CONTINUATION,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    SETTINGS,
    encode_goaway,
    encode_ping,
)
from gateway.listener.client_call import RequestHandler
from gateway.listener.http2_connection import Http2Call
from gateway.observe.call_record import CallRecord
from gateway.observe.call_trace import CallTrace
from gateway.proxy.filters.forwarded_headers import Peer
from gateway.proxy.filters.trace_sampling import TraceSampler
from gateway.proxy.interfaces import ClientRequest, ClientResponse
from tests.fuzz.http2.hostile_clients import NEWEST, literal
from tests.http2.frame_bytes import frame
from tests.listener.running_listener import (
    RunningListener,
    echo,
    nothing_left,
    running_listener,
    until_nothing_left,
)
from tests.listener.running_listener import scheme as scheme
from tests.support.gateway import until
from tests.support.http2_client import connect_http2
from tests.support.raw_client import RawClient, connect

START = PREFACE + frame(SETTINGS, 0, 0)

INDEXED = bytes([NEWEST])

REQUEST = (
    literal(b":method", b"POST")
    + literal(b":scheme", b"http")
    + literal(b":authority", b"gateway")
    + literal(b":path", b"/")
)


LARGE_FIELD = literal(b"x", b"x" * 3900, indexed=True)
"""With 17 indexes of it, a header block of 4 KB stands for more than 64 KiB."""


def requests(first: bytes, then: bytes, count: int) -> bytes:
    """Return the HEADERS of requests whose bodies never come."""
    blocks = [first, *[then] * (count - 1)]
    return b"".join(
        frame(HEADERS, END_HEADERS, 2 * number + 1, block) for number, block in enumerate(blocks)
    )


@asynccontextmanager
async def hostile(running: RunningListener) -> AsyncIterator[RawClient]:
    """Connect; the client may end the connection without reading what was sent."""
    with suppress(ssl.SSLError):
        async with connect(running.url) as client:
            yield client


async def wait_forever(_: ClientRequest, __: ClientResponse) -> None:
    await asyncio.Event().wait()


# What a connection holds

ODD_FIELDS = {
    "a field without a name": literal(b"", b"x"),
    "an empty field": literal(b"", b""),
    "a method of any bytes": literal(b":method", b"\xff\x00\r\n"),
    "a name of any bytes": literal(b"\xff\x00\r\n:", b"x"),
}


@pytest.mark.parametrize("odd", ODD_FIELDS.values(), ids=ODD_FIELDS)
@pytest.mark.parametrize("closes", ["at once", "later", "after what breaks the protocol"])
async def test_large_header_lists_with_odd_fields_leave_nothing_behind(
    odd: bytes, closes: str, caplog: pytest.LogCaptureFixture
) -> None:
    records: list[CallRecord] = []
    async with running_listener(echo, records.append) as running, nothing_left(running, caplog):
        async with hostile(running) as client:
            first, then = odd + LARGE_FIELD + INDEXED * 17, odd + INDEXED * 18
            # What breaks the protocol comes in the same packet, before any call has started.
            breaks = closes.startswith("after")
            bad = frame(HEADERS, END_HEADERS, 2, REQUEST) if breaks else b""
            await client.send(START + requests(first, then, 99) + bad)
            if bad:
                await client.rest()
            if closes != "at once":
                await until(lambda: len(records) == 99)
        await until_nothing_left(running)
        assert {record.method for record in records} <= {"-"}


@pytest.mark.needs_source
async def test_connection_gives_all_back_even_if_a_call_cannot_be_cancelled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(call: Http2Call, why: str) -> None:
        raise ValueError("a fault of the gateway")

    go_on = asyncio.Event()

    async def handle(request: ClientRequest, response: ClientResponse) -> None:
        await go_on.wait()

    monkeypatch.setattr(Http2Call, "cancel", fail)
    async with running_listener(handle) as running:
        async with hostile(running) as client:
            await client.send(START + requests(REQUEST, REQUEST, 100))
            await until(lambda: running.listener.requests == 100)
            assert running.listener.buffers.streams == 100
        await until(lambda: not running.listener.connections)
        assert (running.listener.buffers.streams, running.listener.buffers.total) == (0, 0)
        go_on.set()  # the calls go on without their client
        await until(lambda: not running.listener.requests)
        assert (running.listener.buffers.streams, running.listener.buffers.total) == (0, 0)
    assert caplog.text.count("could not be cancelled") == 100


@pytest.mark.needs_source
async def test_request_that_cannot_be_started_ends_no_other_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Sampler(TraceSampler):
        def sample(self, head: RequestHead, peer: Peer, version: str) -> CallTrace | None:
            if "X-Bad" in head.headers:
                raise ValueError("a fault of the sampler")
            return None

    records: list[CallRecord] = []
    async with running_listener(echo, records.append) as running:
        running.listener.trace_sampler = Sampler(1.0, records.append)
        async with connect_http2(running.url) as client:
            streams = [
                client.send_headers("GET", "/", headers, end_stream=True, flush=False)
                for headers in ((), [("x-bad", "1")], ())
            ]
            client.flush()
            replies = [await client.response(stream) for stream in streams]
        assert [reply.status for reply in replies] == [200, 0, 200]
        assert replies[1].reset == ErrorCode.INTERNAL_ERROR
        assert len(records) == 3
        await until_nothing_left(running)
    assert "failed before its call had started" in caplog.text


@pytest.mark.parametrize("after", ["PING", "HEADERS"])
async def test_frames_that_follow_goaway_in_its_packet(
    after: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_listener(echo) as running, nothing_left(running, caplog):
        async with hostile(running) as client:
            more = encode_ping(bytes(8))
            if after == "HEADERS":
                more = frame(HEADERS, END_HEADERS | END_STREAM, 1, REQUEST)
            await client.send(START + encode_goaway(0, ErrorCode.NO_ERROR) + more)
            received = await client.rest()
        assert (b"POST /" in received) == (after == "HEADERS")


# The room for heads

LIMIT = 16 * 2**20
HEADS = LIMIT // 8


@asynccontextmanager
async def limited_listener(handle: RequestHandler = echo) -> AsyncIterator[RunningListener]:
    async with running_listener(handle) as running:
        running.listener.buffers.set_limit(LIMIT)
        yield running


def unfinished(version: str, size: int) -> bytes:
    """Return the beginning of a request whose head does not end."""
    if version == "1.1":
        return b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * size
    pieces = [bytes(16_000)] * (size // 16_000)
    return b"".join(
        [
            START,
            frame(HEADERS, 0, 1, pieces[0]),
            *(frame(CONTINUATION, 0, 1, piece) for piece in pieces[1:]),
        ]
    )


@pytest.mark.parametrize("version", ["1.1", "2"])
async def test_heads_that_do_not_end_have_a_small_share_and_the_largest_go_first(
    version: str, caplog: pytest.LogCaptureFixture
) -> None:
    size = 48_000
    async with (
        limited_listener() as running,
        nothing_left(running, caplog),
        AsyncExitStack() as all_,
    ):
        buffers = running.listener.buffers
        smaller = await all_.enter_async_context(hostile(running))
        await smaller.send(unfinished(version, 16_000))
        await until(lambda: buffers.heads > 15_000)
        for _ in range(2 * HEADS // size):
            client = await all_.enter_async_context(hostile(running))
            await client.send(unfinished(version, size))
            assert buffers.heads <= HEADS
        await until(lambda: buffers.heads > HEADS - size)
        assert buffers.free > 3 * LIMIT // 4
        # Whoever has less than others is served.
        newcomer = await all_.enter_async_context(hostile(running))
        head = b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 8000
        await newcomer.send(head)
        await until(lambda: len(buffers.holders_of_heads) > 2)
        assert (await newcomer.ask(b"\r\n\r\n")).status == 200
        assert buffers.holders_of_heads
        await all_.aclose()


@pytest.mark.parametrize("version", ["1.1", "2"])
async def test_large_heads_of_calls_have_a_small_share_and_who_has_most_is_refused(
    version: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def handle(request: ClientRequest, response: ClientResponse) -> None:
        await (echo if request.target == "/innocent" else wait_forever)(request, response)

    async with limited_listener(handle) as running, nothing_left(running, caplog):
        buffers = running.listener.buffers
        async with AsyncExitStack() as all_:
            for _ in range(100 if version == "1.1" else 10):
                client = await all_.enter_async_context(hostile(running))
                if version == "1.1":
                    await client.send(
                        b"GET / HTTP/1.1\r\nHost: a\r\nX: %b\r\n\r\n"
                        % bytes(60_000).replace(b"\0", b"x")
                    )
                else:
                    first = REQUEST + LARGE_FIELD + INDEXED * 14
                    await client.send(START + requests(first, REQUEST + INDEXED * 15, 100))
                await until(lambda: buffers.heads)
                assert buffers.heads <= HEADS
            await until(lambda: buffers.heads > HEADS // 2)
            # Whoever has less than others is served.
            async with connect_http2(running.url) as innocent:
                reply = await innocent.call("GET", "/innocent", None, [("x", "x" * 4000)])
                assert reply.status == 200
            async with connect(running.url) as innocent_of_1:
                headers = {"X": "x" * 4000}
                assert (await innocent_of_1.call("GET", "/innocent", None, headers)).status == 200
