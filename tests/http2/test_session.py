"""Sessions and their streams: time slices, bodies in both directions, and the end of each."""

from __future__ import annotations

import asyncio
import gc
import random
import time
import weakref
from collections.abc import Callable
from itertools import groupby

import pytest

from gateway.http2.connection import Http2Connection
from gateway.http2.errors import ErrorCode, Http2Error
from gateway.http2.events import DataReceived, HeadersReceived, StreamReset
from gateway.http2.flood_limits import MAX_TINY_DATA, TIME_SLICE_WORK
from gateway.http2.frame_reader import FrameReader
from gateway.http2.frames import (
    INITIAL_WINDOW_SIZE,
    MAX_FRAME_SIZE,
    PREFACE,
    SETTINGS_ACK,
    DataFrame,
    Frame,
    RstStreamFrame,
    encode_headers,
    encode_ping,
    encode_rst_stream,
    encode_settings,
    encode_window_update,
)
from gateway.http2.hpack import Encoder
from gateway.http2.session import Http2Session, StreamHandler
from gateway.system.buffers import BufferAccount
from tests.http1.fake_transport import FakeTransport
from tests.http2.raw_peer import POST, data
from tests.support.doubles.clock import Clock
from tests.support.doubles.iterations import iterations
from tests.support.gateway import until

pytestmark = pytest.mark.needs_source  # its sessions have a class of their own

Task = asyncio.Task[bytes | memoryview]
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
        self.reader = FrameReader(2**24 - 1)
        self.frames()

    def request(self, stream_id: int = 1) -> bytes:
        return encode_headers(stream_id, self.encoder.encode(POST), False)

    def on_headers(self, event: HeadersReceived) -> None:
        self.streams.append(StreamHandler(self, event.stream))
        self.log.append(f"{self.name} headers")

    def on_data(self, handler: StreamHandler, event: DataReceived) -> None:
        self.log.append(f"{self.name} data")

    def on_reset(self, handler: StreamHandler, event: StreamReset) -> None:
        handler.fail(event.error)

    def on_failure(self, error: Http2Error) -> None:
        self.errors.append(error)

    def frames(self) -> list[Frame]:
        """Return the frames that were written since the last call."""
        self.flush_output()
        self.reader.feed(b"".join(self.fake.writes))
        self.fake.writes.clear()
        return list(iter(self.reader.next_frame, None))

    def lose(self) -> None:
        """End the connection."""
        for stream in self.streams:
            stream.close()
        self.connection_lost(None)


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
    session = Session(clock=clock.time)
    session.data_received(session.request() + data(1) * (MAX_TINY_DATA + 500))
    calls = session.fake.calls
    await until(lambda: session.log.count(" data") == MAX_TINY_DATA + 500)
    await iterations(50)
    assert calls == ["pause"]
    clock.now += 1
    await until(lambda: calls == ["pause", "resume"])
    assert session.errors == []
    assert session.streams[0].take() == b"x" * (MAX_TINY_DATA + 500)


# ---------------------------------------------------------------------------------- streams


def open_streams(count: int, buffers: BufferAccount | None = None) -> Session:
    """Make a session with so many streams, whose requests are not complete."""
    session = Session(buffers=buffers)
    for number in range(count):
        session.data_received(session.request(2 * number + 1))
    return session


async def test_streams_that_send_much_take_turns() -> None:
    session = open_streams(2)
    session.data_received(
        encode_settings([(INITIAL_WINDOW_SIZE, 2**20), (MAX_FRAME_SIZE, 2**16)])
        + encode_window_update(0, 2**22)
    )
    await asyncio.gather(*(stream.send(bytes(600_000), True) for stream in session.streams))
    frames = [each for each in session.frames() if isinstance(each, DataFrame)]
    turns = [sum(each.size for each in turn) for _, turn in groupby(frames, lambda f: f.stream_id)]
    assert turns == [2**18] * 4 + [600_000 - 2**19] * 2
    assert [each.end_stream for each in frames[-4:]].count(True) == 2


@pytest.mark.parametrize("end", ["reset", "error"])
async def test_sender_of_an_ended_stream_gets_an_error(end: str) -> None:
    session = open_streams(1)
    (stream,) = session.streams
    sending = asyncio.create_task(stream.send(bytes(100_000)))
    await iterations(3)
    if end == "reset":
        session.data_received(encode_rst_stream(1, ErrorCode.CANCEL))
    else:
        stream.fail(OSError("gone"))
    for attempt in (sending, stream.send(b"more")):
        with pytest.raises(ConnectionResetError, match="the stream is closed"):
            await attempt
    assert session.waiting == {}


async def test_errors_of_a_body_come_after_its_data_and_leave_the_response() -> None:
    session = open_streams(1)
    (stream,) = session.streams
    session.data_received(data(1, b"abc"))
    stream.fail_body(OSError("too slow"))
    assert await stream.read() == b"abc"
    with pytest.raises(OSError, match="too slow"):
        await stream.read()
    await stream.send(b"408", True)
    stream.fail(OSError("first"))
    stream.fail(OSError("second"))
    with pytest.raises(OSError, match="too slow"):
        await stream.read()
    with pytest.raises(ConnectionResetError):
        await stream.send(b"late")


async def test_trailers_end_a_body_that_is_waited_for() -> None:
    session = open_streams(1)
    (stream,) = session.streams
    reading = asyncio.create_task(stream.read())
    await iterations(2)
    trailers = ((b"grpc-status", b"0"),)
    session.data_received(encode_headers(1, session.encoder.encode(trailers), True))
    assert await reading == b""
    assert stream.trailers == trailers


@pytest.mark.parametrize("is_complete", [False, True])
async def test_closed_stream_gives_back_what_it_holds(is_complete: bool) -> None:
    buffers = BufferAccount()
    session = open_streams(1, buffers)
    (stream,) = session.streams
    session.data_received(data(1, bytes(16_000)) * 3 + data(1, b"x", end=is_complete))
    if is_complete:
        await stream.send(b"all", True)
    stream.close()
    resets = [each for each in session.frames() if isinstance(each, RstStreamFrame)]
    assert [each.error_code for each in resets] == [ErrorCode.CANCEL] * (not is_complete)
    assert (buffers.buffered, buffers.streams, session.handlers) == (0, 0, {})
    assert stream.stream.receive_window.unused == 0


async def test_unexpected_error_aborts_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise KeyError("a mistake")

    session = Session()
    session.run_guarded(fail)
    assert session.fake.calls == ["abort"]
    assert "aborted because of an unexpected error" in caplog.text


async def test_what_woken_readers_send_is_written_once_and_in_the_same_iteration() -> None:
    session, other = open_streams(2), open_streams(1)
    (sink,) = other.streams

    async def relay(stream: StreamHandler) -> None:
        while piece := await stream.read():
            await sink.send(piece)

    relays = [asyncio.create_task(relay(stream)) for stream in session.streams]
    await iterations(2)
    other.fake.writes.clear()
    session.data_received(data(1, b"one") + data(3, b"two"))
    await iterations(1)
    assert len(other.fake.writes) == 1
    assert [each.data for each in other.frames() if isinstance(each, DataFrame)] == [b"one", b"two"]
    session.data_received(data(1, b"", end=True) + data(3, b"", end=True))
    await asyncio.gather(*relays)


@pytest.mark.parametrize("failing", [("write",), ("write", "abort")])
async def test_session_that_cannot_write_does_not_stop_others(
    failing: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object) -> None:
        raise KeyError("a mistake")

    first, broken, last = [open_streams(1) for _ in range(3)]
    for name in failing:
        monkeypatch.setattr(broken.fake, name, fail)
    unexpected: list[dict[str, object]] = []
    broken.loop.set_exception_handler(lambda _, context: unexpected.append(context))
    for session in (first, broken, last):
        await session.streams[0].send(b"data")
    await iterations(2)
    assert first.fake.writes
    assert last.fake.writes
    assert len(unexpected) == len(failing) - 1
    assert "aborted because of an unexpected error" in caplog.text


def test_queue_of_sessions_is_forgotten_with_its_event_loop() -> None:
    async def send() -> weakref.ref[asyncio.AbstractEventLoop]:
        session = open_streams(1)
        await session.streams[0].send(b"data")
        await iterations(1)
        assert session.fake.writes
        session.lose()
        await iterations(1)
        return weakref.ref(asyncio.get_running_loop())

    loop = asyncio.run(send())
    gc.collect()
    assert loop() is None


# ------------------------------------------------------------------------------------ relayed


async def relay(stream: StreamHandler, *steps: Callable[[bytes | memoryview], bool | None]) -> Task:
    """Begin to relay what comes on a stream."""
    relaying = asyncio.create_task(stream.relay(steps))
    await iterations(1)
    return relaying


async def test_pieces_of_one_read_are_relayed_together_and_at_once() -> None:
    buffers = BufferAccount()
    session = open_streams(2, buffers)
    got: list[bytes | memoryview] = []
    relaying = [await relay(stream, got.append) for stream in session.streams]
    session.data_received(data(1, b"one") + data(3, b"three") + data(1, b"two"))
    session.data_received(data(1, b"four"))
    assert got == [b"onetwo", b"three", b"four"]
    assert buffers.buffered == 0
    session.data_received(data(1, b"last", end=True) + data(3, b"", end=True))
    assert [await each for each in relaying] == [b"", b""]
    assert await session.streams[0].read() == b"last"
    assert [await stream.read() for stream in session.streams] == [b"", b""]
    assert session.streams[0].read_bytes == len("onetwofourlast")


async def test_refused_piece_is_returned_and_later_ones_are_read() -> None:
    session = open_streams(1)
    (stream,) = session.streams
    passed: list[bytes | memoryview] = []
    relaying = await relay(stream, lambda piece: piece != b"no", passed.append)
    for piece in (b"yes", b"no", b"later"):
        session.data_received(data(1, piece))
    assert await relaying == b"no"
    assert passed == [b"yes"]
    assert await stream.relay((passed.append,)) == b""  # there is something to read
    assert await stream.read() == b"later"
    relaying = await relay(stream, passed.append)
    session.data_received(data(1, b"again"))
    assert passed == [b"yes", b"again"]
    relaying.cancel()


async def test_error_of_a_step_is_raised_to_the_reader_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    session = open_streams(2)
    first, second = session.streams
    passed: list[bytes | memoryview] = []
    relaying = await relay(first, lambda piece: [][len(piece)])
    other = await relay(second, passed.append)
    session.data_received(data(1, b"a") + data(1, b"b") + data(3, b"c"))
    session.data_received(data(1, b"later"))
    with pytest.raises(IndexError):
        await relaying
    assert passed == [b"c"]
    assert await first.read() == b"later"
    assert session.fake.calls == []
    assert caplog.text == ""
    other.cancel()


async def test_cancelled_reader_gets_nothing_relayed() -> None:
    session = open_streams(1)
    (stream,) = session.streams
    passed: list[bytes | memoryview] = []
    relaying = await relay(stream, passed.append)
    relaying.cancel()
    session.data_received(data(1, b"late"))
    with pytest.raises(asyncio.CancelledError):
        await relaying
    session.data_received(data(1, b"r"))
    assert passed == []
    assert await stream.read() == b"later"


@pytest.mark.parametrize("how", ["reset", "failed", "lost", "broken"])
async def test_end_of_a_stream_ends_its_relay(how: str) -> None:
    buffers = BufferAccount()
    session = open_streams(1, buffers)
    session.fake.close = lambda: None  # type: ignore[method-assign]
    (stream,) = session.streams
    passed: list[bytes | memoryview] = []
    relaying = await relay(stream, passed.append)
    if how == "reset":
        session.data_received(data(1, b"rest") + encode_rst_stream(1, ErrorCode.CANCEL))
    elif how == "failed":
        stream.fail(OSError("gone"))
    else:
        session.data_received(data(1, b"rest") + b"\0" * 9 * (how == "broken"))
        stream.fail(OSError("gone"))
    assert await relaying == b""
    left = [] if how in ("lost", "failed") else [b"rest"]
    assert (passed, [await stream.read() for _ in left]) == ([b"rest"] * (how == "lost"), left)
    with pytest.raises((Http2Error, OSError)):
        await stream.read()
    session.lose()
    assert (buffers.buffered, buffers.streams, session.handlers) == (0, 0, {})
    assert session.relayed == {}


async def test_piece_is_sent_now_only_if_nothing_has_to_wait() -> None:
    session = open_streams(1)
    (stream,) = session.streams
    assert stream.send_now(bytes(65_000))
    assert not stream.send_now(bytes(536))
    assert stream.send_now(bytes(535))
    opened = encode_window_update(0, 10**6) + encode_window_update(1, 10**6)
    session.data_received(opened)
    assert not stream.send_now(bytes(300_000))  # others of the connection have their turn before
    session.pause_writing()
    assert not stream.send_now(b"blocked")
    session.resume_writing()
    assert stream.send_now(b"x")
    await stream.send(b"end", True)
    assert not stream.send_now(b"late")
    sent = b"".join(each.data for each in session.frames() if isinstance(each, DataFrame))
    assert sent == bytes(65_535) + b"xend"
    stream.fail(OSError("gone"))
    assert not stream.send_now(b"late")


async def test_relay_to_a_slow_reader_goes_on_where_it_has_stopped() -> None:
    """What waits is bounded by the windows of both sides, and nothing is lost or exchanged."""
    buffers = BufferAccount()
    session, other = open_streams(1, buffers), open_streams(1)
    (source,), (sink,) = session.streams, other.streams

    async def pass_on() -> None:
        while piece := await source.read():
            await sink.send(piece)
            while refused := await source.relay((sink.send_now,)):
                await sink.send(refused)

    passing = asyncio.create_task(pass_on())
    sent = bytearray()
    got = bytearray()
    chance = random.Random(3)
    while len(sent) < 500_000:
        piece = chance.randbytes(chance.choice([1, 100, 5000, 16_384]))
        if source.stream.receive_window.size >= len(piece) and len(sent) - len(got) < 200_000:
            session.data_received(data(1, piece))
            sent += piece
        else:
            size = chance.choice([1, 999, 70_000])
            other.data_received(encode_window_update(0, size) + encode_window_update(1, size))
        await iterations(chance.choice([0, 0, 1, 3]))
        got += b"".join(each.data for each in other.frames() if isinstance(each, DataFrame))
        assert buffers.buffered <= 1.1 * (len(sent) - len(got)) + 64
    session.data_received(data(1, b"", end=True))
    other.data_received(encode_window_update(0, 10**6) + encode_window_update(1, 10**6))
    await passing
    got += b"".join(each.data for each in other.frames() if isinstance(each, DataFrame))
    assert got == sent
    assert buffers.buffered == 0
