from __future__ import annotations

import asyncio
import socket

import pytest

from gateway.http1.connection import Http1Body, Http1Connection
from gateway.system import read_buffer as read_buffer_module
from gateway.system.buffers import MAX_WINDOW, BufferAccount, BufferShare
from gateway.system.sockets import connection as connection_module
from gateway.system.sockets.connection import MAX_COALESCED_WRITE, MAX_READ_AHEAD, ReadFlow
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


async def test_body_pieces_keep_their_order(body: Http1Body) -> None:
    for piece in (b"a", b"bc", b"d"):
        body.feed(piece)
    body.end()
    assert await _read_all(body) == b"abcd"


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


async def test_ended_body_reads_empty_again_and_again(body: Http1Body) -> None:
    assert not body.ended
    body.end()
    assert body.ended
    assert [await body.read() for _ in range(3)] == [b"", b"", b""]


async def test_body_reader_waits_for_data(body: Http1Body) -> None:
    reading = asyncio.create_task(_read_all(body))
    await iterations(5)
    body.feed(b"a")
    await iterations(5)
    body.feed(b"b")
    body.feed(b"c")
    await iterations(5)
    assert not reading.done()
    body.end()
    assert await reading == b"abc"


async def test_body_error_comes_after_buffered_data(body: Http1Body) -> None:
    body.feed(b"a")
    body.fail_body(_Broken("broken"))
    body.fail_body(_Broken("second"))
    assert await body.read() == b"a"
    for _ in range(2):
        with pytest.raises(_Broken, match="broken"):
            await body.read()
    assert not body.ended


async def test_body_error_reaches_a_waiting_reader(body: Http1Body) -> None:
    reading = asyncio.create_task(body.read())
    await iterations(5)
    body.fail_body(_Broken())
    with pytest.raises(_Broken):
        await reading


async def test_body_error_after_the_end_is_ignored(body: Http1Body) -> None:
    body.feed(b"a")
    body.end()
    assert body.ended
    body.fail_body(_Broken())
    assert await _read_all(body) == b"a"


async def test_body_end_after_an_error_is_ignored(body: Http1Body) -> None:
    body.feed(b"a")
    body.fail_body(_Broken())
    body.end()
    assert await body.read() == b"a"
    with pytest.raises(_Broken):
        await body.read()


async def test_full_body_window_pauses_reading(body: Http1Body, transport: FakeTransport) -> None:
    half = bytes(MAX_WINDOW // 2)
    body.feed(half)
    body.feed(half)
    assert transport.calls == []
    body.feed(b"x")
    assert transport.calls == ["pause"]
    body.feed(half)
    assert transport.calls == ["pause"]


async def test_half_empty_body_window_resumes_reading(
    body: Http1Body, transport: FakeTransport
) -> None:
    piece = bytes(MAX_WINDOW // 8)
    for _ in range(9):
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
    assert 16_384 <= len(await body.read()) < 16_384 + 256
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


async def test_transport_that_starts_to_close_is_not_resumed(
    body: Http1Body, transport: FakeTransport
) -> None:
    body.feed(bytes(MAX_WINDOW + 1))
    transport.closing = True
    assert len(await body.read()) == MAX_WINDOW + 1  # one large piece
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


@pytest.mark.parametrize("count", [0, 1, 5])
async def test_cancelled_read_loses_nothing(body: Http1Body, count: int) -> None:
    reading = asyncio.create_task(body.read())
    await iterations(count)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    body.feed(b"a")
    body.feed(b"b")
    body.end()
    assert await _read_all(body) == b"ab"


async def test_read_cancelled_after_its_data_came_loses_nothing(body: Http1Body) -> None:
    reading = asyncio.create_task(body.read())
    await iterations(5)
    body.feed(b"a")
    reading.cancel()
    body.feed(b"b")
    with pytest.raises(asyncio.CancelledError):
        await reading
    body.end()
    assert await _read_all(body) == b"ab"


async def test_cancelled_read_does_not_hide_the_error(body: Http1Body) -> None:
    reading = asyncio.create_task(body.read())
    await iterations(5)
    body.fail_body(_Broken())
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    with pytest.raises(_Broken):
        await body.read()


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


class _TakesSome(Http1Connection):
    """Takes so many bytes of each read, and reads the others ahead."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self.taken = b""

    def data_received(self, data: bytes | memoryview) -> None:
        self.taken += data[: self._size]
        self.buffer_read_ahead(data[self._size :])


@needs_source
async def test_large_read_ahead_pauses_reading(transport: FakeTransport) -> None:
    size = 1000
    data = bytes(range(256)) * (2 * MAX_READ_AHEAD // 256)
    connection = _TakesSome(size)
    connection.connection_made(transport)
    connection.data_received(memoryview(data))
    while len(connection.taken) + MAX_READ_AHEAD < len(data):
        assert transport.calls == ["pause"]
        connection.process_read_ahead()
    assert transport.calls == ["pause", "resume"]
    connection.discard_read_ahead()
    taken = connection.taken
    connection.process_read_ahead()
    assert connection.taken == taken == data[: len(taken)]
    assert transport.calls == ["pause", "resume"]


@needs_source
async def test_read_ahead_keeps_its_order(transport: FakeTransport) -> None:
    connection = _TakesSome(3)
    connection.connection_made(transport)
    connection.buffer_read_ahead(b"ab")
    connection.buffer_read_ahead(memoryview(b"cde"))
    connection.process_read_ahead()
    connection.buffer_read_ahead(b"f")
    connection.process_read_ahead()
    assert connection.taken == b"abcdef"


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

    monkeypatch.setattr(read_buffer_module, "_SLAB_SIZE", size)
    monkeypatch.setattr(read_buffer_module, "_MIN_SPACE", size)
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


async def test_connection_stores_its_transport(
    connection: Http1Connection, transport: FakeTransport
) -> None:
    assert connection.transport is transport
    assert not connection.closed
    assert transport.calls == []


async def test_buffered_write_goes_out_with_the_next_one(
    connection: Http1Connection, transport: FakeTransport
) -> None:
    connection.buffer_write(b"head ")
    connection.buffer_write(b"and more ")
    connection.write(memoryview(b"body"))
    await iterations(5)
    connection.write(b"more body")
    assert transport.writes == [b"head and more body", b"more body"]


@pytest.mark.parametrize("size", [MAX_COALESCED_WRITE, MAX_COALESCED_WRITE + 1])
async def test_large_write_goes_out_with_the_buffered_one(
    connection: Http1Connection, transport: FakeTransport, size: int
) -> None:
    connection.buffer_write(b"head")
    connection.write(bytes(size))
    assert transport.writes == [b"head" + bytes(size)]


async def test_pieces_go_out_with_the_buffered_write(
    connection: Http1Connection, transport: FakeTransport
) -> None:
    connection.buffer_write(b"a")
    connection.write(b"b", memoryview(b"c"))
    connection.write(b"d", b"e")
    assert transport.writes == [b"abc", b"de"]


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


async def test_end_of_a_body_flushes_the_buffered_write(
    connection: Http1Connection, transport: FakeTransport
) -> None:
    connection.write_body(b"a", chunked=False)
    connection.end_body(chunked=False)
    assert transport.writes == [b"a"]


async def test_buffered_write_goes_out_in_the_next_iteration(
    connection: Http1Connection, transport: FakeTransport
) -> None:
    connection.buffer_write(b"head")
    assert transport.writes == []
    await iterations(1)
    assert transport.writes == [b"head"]
    connection.buffer_write(b"next")
    connection.flush()
    connection.flush()
    await iterations(5)
    assert transport.writes == [b"head", b"next"]


async def test_large_buffered_write_is_flushed(
    connection: Http1Connection, transport: FakeTransport
) -> None:
    for _ in range(100):
        connection.buffer_write(bytes(1024))
    assert transport.writes == [bytes(MAX_COALESCED_WRITE + 1024)]
    connection.flush()
    assert len(b"".join(transport.writes)) == 100 * 1024


async def test_closing_transport_gets_no_writes(
    connection: Http1Connection, transport: FakeTransport
) -> None:
    connection.buffer_write(b"head")
    transport.closing = True
    await iterations(5)
    assert transport.writes == []


@needs_source
async def test_reset_drops_the_buffered_write() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_ReadsNothing, sock=ours)
        connection.buffer_write(b"head")
        connection.reset()
        await iterations(5)
        assert theirs.recv(10) == b""


async def _drains_at_once(connection: Http1Connection) -> bool:
    """Whether a drain returns before the next iteration of the event loop."""
    others: list[str] = []
    asyncio.get_running_loop().call_soon(others.append, "other")
    await connection.drain()
    return not others


async def test_drain_of_a_writable_connection_returns_at_once(connection: Http1Connection) -> None:
    assert await _drains_at_once(connection)
    connection.pause_writing()
    connection.resume_writing()
    assert await _drains_at_once(connection)


async def test_drain_waits_until_writing_resumes(connection: Http1Connection) -> None:
    for _ in range(3):
        connection.pause_writing()
        draining = asyncio.create_task(connection.drain())
        await iterations(5)
        assert not draining.done()
        connection.resume_writing()
        await draining


@pytest.mark.parametrize("error", [None, OSError("reset")])
async def test_drain_of_a_lost_connection_raises(
    connection: Http1Connection, error: OSError | None
) -> None:
    connection.connection_lost(error)
    assert connection.closed
    for _ in range(2):
        with pytest.raises(ConnectionResetError):
            await connection.drain()


@pytest.mark.parametrize("error", [None, OSError("reset")])
async def test_connection_lost_during_drain_raises(
    connection: Http1Connection, error: OSError | None
) -> None:
    connection.pause_writing()
    draining = asyncio.create_task(connection.drain())
    await iterations(5)
    connection.connection_lost(error)
    with pytest.raises(ConnectionResetError):
        await draining


async def test_connection_lost_right_after_a_resume_raises(connection: Http1Connection) -> None:
    connection.pause_writing()
    draining = asyncio.create_task(connection.drain())
    await iterations(5)
    connection.resume_writing()
    connection.connection_lost(None)
    with pytest.raises(ConnectionResetError):
        await draining


async def test_drain_of_a_lost_paused_connection_raises(connection: Http1Connection) -> None:
    connection.pause_writing()
    connection.connection_lost(None)
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


async def test_connection_lost_after_a_cancelled_drain_raises(connection: Http1Connection) -> None:
    connection.pause_writing()
    draining = asyncio.create_task(connection.drain())
    await iterations(5)
    draining.cancel()
    connection.connection_lost(None)
    with pytest.raises(asyncio.CancelledError):
        await draining
    with pytest.raises(ConnectionResetError):
        await connection.drain()


async def test_write_blocked_while_paused_or_closed(connection: Http1Connection) -> None:
    assert not connection.write_blocked
    connection.pause_writing()
    assert connection.write_blocked
    connection.resume_writing()
    assert not connection.write_blocked
    connection.connection_lost(None)
    assert connection.write_blocked


async def test_closing_connection_is_not_reset(
    connection: Http1Connection, transport: FakeTransport
) -> None:
    transport.closing = True
    connection.reset()
    assert transport.calls == []


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
async def test_peer_sees_a_reset() -> None:
    connection, there = await _pair()
    with there:
        async with asyncio.timeout(5):
            connection.pause_writing()
            draining = asyncio.create_task(connection.drain())
            await iterations(5)
            connection.reset()
            with pytest.raises(ConnectionResetError):
                await asyncio.get_running_loop().sock_recv(there, 1)
            with pytest.raises(ConnectionResetError):
                await draining
    assert connection.closed
