from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

import pytest

from gateway.http1.connection import Http1Body, Http1Connection
from gateway.http1.deferrals import DEFER_TIMEOUT, BodyDeferrals
from gateway.system import read_buffer as read_buffer_module
from gateway.system.buffers import MAX_WINDOW, BufferAccount, BufferShare
from gateway.system.sockets import connection as connection_module
from gateway.system.sockets.connection import MAX_COALESCED_WRITE, Connection, ReadFlow
from tests.http1.fake_transport import FakeTransport
from tests.support.compiled import needs_source, skip_if_compiled
from tests.support.doubles.iterations import iterations
from tests.support.gateway import until


class _Broken(Exception):  # noqa: N818
    pass


@pytest.fixture
def transport() -> FakeTransport:
    return FakeTransport()


@pytest.fixture
def body(transport: FakeTransport) -> Http1Body:
    return Http1Body(ReadFlow(transport), BufferShare(BufferAccount()))


async def _read_all(body: Http1Body) -> bytes:
    data = b""
    while piece := await body.read():
        data += piece
    return data


# ---------------------------------------------------------------------------------- Http1Body


async def test_body_is_not_read_while_its_connection_pauses(transport: FakeTransport) -> None:
    read_flow = ReadFlow(transport)
    body = Http1Body(read_flow, BufferShare(BufferAccount()))
    assert body.is_reading()
    read_flow.pause("something else")
    assert not body.is_reading()
    read_flow.resume("something else")
    assert body.is_reading()


async def test_body_waits_for_its_client_only_while_somebody_reads_it(body: Http1Body) -> None:
    body.feed(b"a")
    assert not body.progress.is_waited_for
    assert await body.read() == b"a"
    reading = asyncio.create_task(body.read())
    await iterations(5)
    assert body.progress.is_waited_for
    body.feed(b"b")
    assert await reading == b"b"
    assert not body.progress.is_waited_for


async def test_first_error_or_end_of_a_body_comes_after_its_data(body: Http1Body) -> None:
    body.feed(b"a")
    body.fail_body(_Broken("broken"))
    body.fail_body(_Broken("second"))
    body.end()
    assert await body.read() == b"a"
    for _ in range(2):
        with pytest.raises(_Broken, match="broken"):
            await body.read()
    ended = Http1Body(ReadFlow(FakeTransport()), BufferShare(BufferAccount()))
    ended.feed(b"a")
    ended.end()
    ended.fail_body(_Broken())
    assert ended.ended
    assert [await ended.read() for _ in range(3)] == [b"a", b"", b""]


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_error_of_a_body_reaches_its_reader(body: Http1Body, is_cancelled: bool) -> None:
    reading = asyncio.create_task(body.read())
    await iterations(5)
    body.fail_body(_Broken())
    if is_cancelled:
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        reading = asyncio.create_task(body.read())
    with pytest.raises(_Broken):
        await reading


async def test_body_above_its_window_pauses_reading_until_half_of_it_is_read(
    body: Http1Body, transport: FakeTransport
) -> None:
    piece = bytes(MAX_WINDOW // 8)
    for number in range(9):
        assert transport.calls == [], number
        body.feed(piece)
    assert transport.calls == ["pause"]
    for _ in range(4):
        await body.read()
    assert transport.calls == ["pause"]
    await body.read()
    assert transport.calls == ["pause", "resume"]
    await body.read()
    assert transport.calls == ["pause", "resume"]
    for _ in range(6):
        body.feed(piece)
    assert transport.calls == ["pause", "resume", "pause"]
    body.end()
    assert len(await _read_all(body)) == 9 * len(piece)
    assert transport.calls == ["pause", "resume"] * 2


async def test_tiny_pieces_are_joined_and_cost_no_more_than_their_bytes(
    body: Http1Body, transport: FakeTransport
) -> None:
    count = 0
    while not transport.calls:
        body.feed(b"x")
        count += 1
    assert MAX_WINDOW * 0.99 < count <= MAX_WINDOW + 1
    assert 48 * 1024 < len(await body.read()) <= 64 * 1024
    body.end()
    assert len(await _read_all(body)) < count
    assert transport.calls == ["pause", "resume"]


async def test_last_piece_of_a_body_does_not_pause_reading(
    body: Http1Body, transport: FakeTransport
) -> None:
    body.feed(bytes(MAX_WINDOW + 1), last=True)
    body.end()
    assert len(await _read_all(body)) == MAX_WINDOW + 1
    assert transport.calls == []


async def test_closing_transport_is_neither_paused_nor_resumed(
    body: Http1Body, transport: FakeTransport
) -> None:
    transport.closing = True
    body.feed(bytes(MAX_WINDOW + 1))
    await body.read()
    body.feed(bytes(MAX_WINDOW + 1))
    body.discard()
    assert transport.calls == []
    transport.closing = False
    late = Http1Body(ReadFlow(transport), BufferShare(BufferAccount()))
    late.feed(bytes(MAX_WINDOW + 1))
    transport.closing = True
    assert len(await late.read()) == MAX_WINDOW + 1  # one large piece
    assert transport.calls == ["pause"]


async def test_discarded_body_drops_buffered_and_later_data(
    body: Http1Body, transport: FakeTransport
) -> None:
    body.feed(b"a")
    body.feed(bytes(MAX_WINDOW))
    body.discard()
    assert transport.calls == ["pause", "resume"]
    for _ in range(3):
        body.feed(bytes(MAX_WINDOW))
    body.discard()
    assert transport.calls == ["pause", "resume"]
    body.end()
    assert await _read_all(body) == b""


@pytest.mark.parametrize("before", [b"", b"a"])
@pytest.mark.parametrize("count", [0, 1, 5])
async def test_cancelled_read_loses_nothing(body: Http1Body, count: int, before: bytes) -> None:
    reading = asyncio.create_task(body.read())
    await iterations(count)
    if before:
        body.feed(before)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    if not before:
        body.feed(b"a")
    body.feed(b"b")
    body.end()
    assert await _read_all(body) == b"ab"


# ---------------------------------------------------------------------------------- ReadFlow


def test_reading_resumes_after_the_last_pauser(transport: FakeTransport) -> None:
    reading = ReadFlow(transport)
    reading.resume("a")
    assert transport.calls == []
    for pauser in ("a", "b", "a"):
        reading.pause(pauser)
    assert transport.calls == ["pause"]
    for pauser in ("b", "b"):
        reading.resume(pauser)
    assert transport.calls == ["pause"]
    reading.resume("a")
    assert transport.calls == ["pause", "resume"]


# ---------------------------------------------------------------------------------- Connection


class _ReadsNothing(Http1Connection):
    def data_received(self, data: bytes | memoryview) -> None:
        raise AssertionError("the peer sends nothing in these tests")


@pytest.fixture
async def connection(transport: FakeTransport) -> Http1Connection:
    skip_if_compiled()
    connection = _ReadsNothing()
    connection.connection_made(transport)
    return connection


@needs_source
async def test_sender_that_fills_each_read_does_not_starve_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size, count = 20 * 1024, 5
    log: list[str] = []

    class Log(Http1Connection):
        def data_received(self, data: bytes | memoryview) -> None:
            assert len(data) == size
            self.loop.call_soon(log.append, "others")
            log.append("read")

    monkeypatch.setattr(read_buffer_module, "SLAB_SIZE", size)
    monkeypatch.setattr(read_buffer_module, "MIN_SPACE", size)
    monkeypatch.setattr(connection_module, "READ_BUFFER", read_buffer_module.ReadBuffer())
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(bytes(size * count))
        _, connection = await loop.create_connection(Log, sock=ours)
        await until(lambda: len(log) == 2 * count)
        connection.transport.abort()
        await iterations(5)
    assert log == ["read", "others"] * count


async def test_buffered_write_goes_out_with_the_next_one_or_in_the_next_iteration(
    connection: Http1Connection, transport: FakeTransport
) -> None:
    connection.buffer_write(b"head ")
    connection.buffer_write(b"and more ")
    connection.write((memoryview(b"body"), b" in pieces"))
    await iterations(5)
    for size in (MAX_COALESCED_WRITE, MAX_COALESCED_WRITE + 1):
        connection.buffer_write(b"head")
        connection.write((bytes(size),))
    connection.buffer_write(b"late")
    large = [b"head" + bytes(MAX_COALESCED_WRITE), b"head" + bytes(MAX_COALESCED_WRITE + 1)]
    assert transport.writes == [b"head and more body in pieces", *large]
    await iterations(1)
    assert transport.writes.pop() == b"late"
    transport.writes.clear()
    connection.buffer_write(b"next")
    connection.flush()
    connection.flush()
    await iterations(5)
    for _ in range(100):
        connection.buffer_write(bytes(1024))
    assert transport.writes == [b"next", bytes(MAX_COALESCED_WRITE + 1024)]
    transport.closing = True
    connection.flush()
    await iterations(5)
    connection.reset()
    assert (len(transport.writes), transport.calls) == (2, [])


@pytest.mark.parametrize("chunked", [False, True])
async def test_small_body_piece_goes_out_with_the_next_one(
    connection: Http1Connection, transport: FakeTransport, *, chunked: bool
) -> None:
    much = bytes(MAX_COALESCED_WRITE)
    written: list[bytes | memoryview] = [b"head "]
    connection.buffer_write(b"head ")
    for data in (b"a", memoryview(b"b"), much, b",", much, b"c"):
        connection.write_body(data, chunked)
        written += (b"%x\r\n" % len(data), data, b"\r\n") if chunked else (data,)
    connection.end_body(chunked)
    written += [b"0\r\n\r\n"] * chunked
    assert b"".join(transport.writes) == b"".join(written)
    assert len(transport.writes) == 3
    await iterations(5)
    assert len(transport.writes) == 3


@pytest.mark.parametrize("before", ["nothing", "pause", "drain", "resume", "cancel"])
async def test_drain_of_a_lost_connection_raises(connection: Http1Connection, before: str) -> None:
    if before != "nothing":
        connection.pause_writing()
    draining = None
    if before in ("drain", "resume", "cancel"):
        draining = asyncio.create_task(connection.drain())
        await iterations(5)
    if before == "resume":
        connection.resume_writing()
    if before == "cancel" and draining is not None:
        draining.cancel()
    connection.connection_lost(OSError("reset") if before == "drain" else None)
    assert connection.closed
    assert connection.write_blocked
    if draining is not None:
        with pytest.raises(asyncio.CancelledError if before == "cancel" else ConnectionResetError):
            await draining
    with pytest.raises(ConnectionResetError):
        await connection.drain()


@pytest.mark.parametrize("count", [0, 1, 5])
async def test_cancelled_drain_can_be_repeated(connection: Http1Connection, count: int) -> None:
    connection.pause_writing()
    draining = asyncio.create_task(connection.drain())
    await iterations(count)
    draining.cancel()
    with pytest.raises(asyncio.CancelledError):
        await draining
    again = asyncio.create_task(connection.drain())
    await iterations(5)
    assert not again.done()
    connection.resume_writing()
    await again


async def _pair() -> tuple[Http1Connection, socket.socket]:
    """Make a connection over TCP; return it and the peer's socket."""
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        _, connection = await loop.create_connection(_ReadsNothing, *listening.getsockname())
        there, _ = listening.accept()
    there.setblocking(False)
    return connection, there


@needs_source
async def test_drain_waits_for_a_real_reader() -> None:
    connection, there = await _pair()
    loop = asyncio.get_running_loop()
    data = bytes(16 * 1024 * 1024)
    with there:
        async with asyncio.timeout(5):
            connection.transport.write(data)
            draining = asyncio.create_task(connection.drain())
            await iterations(5)
            assert not draining.done()
            received = 0
            while received < len(data):
                received += len(await loop.sock_recv(there, 1024 * 1024))
            await draining
        connection.transport.abort()
        await iterations(5)
        assert connection.closed


@needs_source
async def test_peer_sees_a_reset_and_nothing_that_was_buffered() -> None:
    connection, there = await _pair()
    with there:
        async with asyncio.timeout(5):
            connection.pause_writing()
            draining = asyncio.create_task(connection.drain())
            await iterations(5)
            connection.buffer_write(b"head")
            connection.reset()
            with pytest.raises(ConnectionResetError):
                await asyncio.get_running_loop().sock_recv(there, 1)
            with pytest.raises(ConnectionResetError):
                await draining
    assert connection.closed


# ---------------------------------------------------------------------------------- BodyDeferrals

SMALL = 128 * 1024


class _Entry:
    def __init__(self) -> None:
        self.timed_out = asyncio.Event()

    def on_timeout(self) -> None:
        self.timed_out.set()


@pytest.mark.parametrize(
    ("length", "is_large"), [(0, False), (SMALL, False), (None, False), (SMALL + 1, True)]
)
async def test_only_large_bodies_are_given_up_early(length: int | None, is_large: bool) -> None:
    deferrals, entry, large = BodyDeferrals(), _Entry(), _Entry()
    deferrals.add(entry, length)
    deferrals.add(large, 10 * SMALL)  # due after the entry if that is large, too
    async with asyncio.timeout(5):
        await large.timed_out.wait()
    assert entry.timed_out.is_set() is is_large
    async with asyncio.timeout(5 + DEFER_TIMEOUT):
        await entry.timed_out.wait()
    assert deferrals.size == 0
    deferrals.close()


class _Waiting(Connection):
    """A connection whose writer is cancelled when it is lost, as a call is."""

    writer: asyncio.Task[None] | None = None

    def data_received(self, data: bytes | memoryview) -> None:
        raise AssertionError

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.writer is not None:
            self.writer.cancel()


@needs_source
@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_wait_until_all_is_sent_ends_with_the_connection(is_cancelled: bool) -> None:
    ours, peer = socket.socketpair()
    ours.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            ours.send(bytes(4096))
    loop, connection = asyncio.get_running_loop(), _Waiting()
    await loop.create_connection(lambda: connection, sock=ours)
    connection.write((bytes(40_000),))
    waiting = asyncio.create_task(connection.wait_until_sent())
    await iterations(5)
    assert not waiting.done()
    connection.writer = waiting if is_cancelled else None
    peer.close()
    with pytest.raises(asyncio.CancelledError if is_cancelled else ConnectionResetError):
        await waiting
