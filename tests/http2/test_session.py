"""What a session reads in a time slice of the event loop, and what waits for the next one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from gateway.http2.connection import Http2Connection
from gateway.http2.errors import ErrorCode, Http2Error
from gateway.http2.events import DataReceived, HeadersReceived, StreamReset
from gateway.http2.flood_limits import MAX_TINY_DATA, TIME_SLICE_WORK, TINY_FRAME
from gateway.http2.frame_writer import SETTINGS_ACK, encode_headers, encode_ping, encode_settings
from gateway.http2.frames import PREFACE
from gateway.http2.hpack import Encoder
from gateway.http2.session import Http2Session, StreamHandler
from gateway.system.buffers import BufferAccount
from tests.http1.fake_transport import FakeTransport
from tests.http2.raw_peer import POST, data
from tests.http2.test_flood_limits import Clock
from tests.support.doubles.iterations import iterations
from tests.support.gateway import until

pytestmark = pytest.mark.needs_source  # its sessions have a class of their own

OPENING = PREFACE + encode_settings([]) + SETTINGS_ACK


class Session(Http2Session):
    """A server's session over a transport without a socket, which notes what it handles."""

    def __init__(
        self,
        name: str = "",
        log: list[str] | None = None,
        buffers: BufferAccount | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        window = 2**20
        super().__init__(Http2Connection(False, 100, window, window, clock=clock), buffers)
        self.name = name
        self.log = [] if log is None else log
        self.streams: list[StreamHandler] = []
        self.errors: list[Http2Error] = []
        self.fake = FakeTransport()
        self.connection_made(self.fake)
        self.data_received(OPENING)
        self.encoder = Encoder()

    def request(self, stream_id: int = 1) -> bytes:
        return encode_headers(stream_id, self.encoder.encode(POST), False)

    def on_headers(self, event: HeadersReceived) -> None:
        self.streams.append(StreamHandler(self, event.stream))
        self.log.append(f"{self.name} headers")

    def on_data(self, handler: StreamHandler, event: DataReceived) -> None:
        self.log.append(f"{self.name} data")

    def on_reset(self, handler: StreamHandler, event: StreamReset) -> None:
        raise AssertionError

    def on_failure(self, error: Http2Error) -> None:
        self.errors.append(error)

    def lose(self) -> None:
        """End the connection."""
        for stream in self.streams:
            stream.close()
        self.connection_lost(None)


async def test_others_have_their_turn_before_many_frames_are_through() -> None:
    log: list[str] = []
    floods = [Session("flood", log) for _ in range(3)]
    other = Session("other", log)
    count = 4 * TIME_SLICE_WORK
    for flood in floods:
        flood.data_received(flood.request() + data(1) * count)
    # Others' bytes come in the next iterations of the event loop.
    for stream_id in (1, 3, 5):
        before = len(log)
        await iterations(1)
        # However many floods there are, this is for one of them.
        assert len(log) - before <= TIME_SLICE_WORK
        other.data_received(other.request(stream_id))
        assert log[-1] == "other headers"
    await until(lambda: log.count("flood data") == 3 * count)
    assert not any(flood.errors for flood in floods)
    for flood in floods:
        assert flood.streams[0].take() == b"x" * count


async def test_session_reads_nothing_until_its_turn() -> None:
    buffers = BufferAccount()
    session = Session(buffers=buffers)
    flood = encode_ping(b"12345678") * (2 * TIME_SLICE_WORK + 10)
    session.data_received(flood)
    calls = session.fake.calls
    assert calls == ["pause"]
    assert 0 < buffers.buffered < len(flood)
    waiting = buffers.buffered
    await iterations(1)
    assert 0 < buffers.buffered < waiting
    await until(lambda: calls == ["pause", "resume"])
    assert buffers.buffered == 0
    session.data_received(encode_ping(b"12345678") * (TIME_SLICE_WORK // 2))
    assert calls == ["pause", "resume"]


@pytest.mark.parametrize("closing", [False, True])
async def test_closed_connection_drops_what_waits(closing: bool) -> None:
    buffers = BufferAccount()
    session = Session(buffers=buffers)
    session.data_received(session.request() + data(1) * (9 * TIME_SLICE_WORK))
    before = len(session.log)
    session.fake.closing = closing
    if not closing:
        session.lose()
    await iterations(5)
    assert len(session.log) == before
    if closing:
        session.lose()
    assert (buffers.buffered, buffers.streams) == (0, 0)


async def test_ended_connection_reads_on_to_notice_its_end() -> None:
    """A client that broke the protocol may still be sending, which is dropped."""
    buffers = BufferAccount()
    session = Session(buffers=buffers)
    session.fake.close = lambda: None  # type: ignore[method-assign]
    session.data_received(encode_ping(b"12345678") * TIME_SLICE_WORK + b"\0" * 9 + bytes(5000))
    assert session.errors == []
    await until(lambda: session.fake.calls == ["pause", "resume"])
    assert session.errors[0].code is ErrorCode.PROTOCOL_ERROR
    session.data_received(bytes(5000))
    assert buffers.buffered == 0


async def test_stream_that_sends_tiny_frames_too_fast_waits_and_is_not_closed() -> None:
    clock = Clock()
    session = Session(clock=clock)
    session.data_received(session.request() + data(1) * (MAX_TINY_DATA + 500))
    calls = session.fake.calls
    await until(lambda: session.log.count(" data") == MAX_TINY_DATA + 500)
    await asyncio.sleep(0.05)
    assert calls == ["pause"]
    clock.now += 1
    await until(lambda: calls == ["pause", "resume"])
    assert session.errors == []
    assert session.streams[0].take() == b"x" * (MAX_TINY_DATA + 500)


async def test_tiny_pieces_of_a_body_are_joined() -> None:
    buffers = BufferAccount()
    session = Session(buffers=buffers)
    session.data_received(session.request() + b"".join(data(1, b"%d," % i) for i in range(300)))
    (stream,) = session.streams
    expected = b"".join(b"%d," % i for i in range(300))
    assert buffers.buffered == stream.buffered_size == len(expected)
    large = bytes(TINY_FRAME)
    session.data_received(data(1, large) + data(1, b"a") + data(1, b"b"))
    pieces = [await stream.read() for _ in range(2)]
    assert pieces == [expected, large + b"ab"]
    assert {type(piece) for piece in pieces} == {bytes}
    session.data_received(data(1, b"c") + data(1, b"d"))
    assert stream.peek() == b"cd"
    assert stream.take() == b"cd"
    assert buffers.buffered == 0
    # All of it can be sent again.
    assert stream.stream.receive_window.unused == 0


async def test_joined_pieces_have_a_bounded_size() -> None:
    session = Session()
    session.data_received(session.request())
    for _ in range(200):
        session.data_received(data(1, bytes(TINY_FRAME - 1)) * 2)
    (stream,) = session.streams
    left, sizes = 400 * (TINY_FRAME - 1), []
    while left:
        sizes.append(len(await stream.read()))
        left -= sizes[-1]
    assert 16_384 <= max(sizes) < 16_384 + TINY_FRAME
    assert len(sizes) == 7
