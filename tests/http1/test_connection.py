from __future__ import annotations

import asyncio
import socket

import pytest

from gateway.http1 import connection as connection_module
from gateway.http1 import read_buffer as intake_module
from gateway.http1.connection import (
    MAX_COALESCED_WRITE,
    MAX_READ_AHEAD,
    BodyStream,
    Connection,
    ReadFlow,
)
from gateway.system.buffers import MAX_WINDOW, BufferAccount
from tests.http1.fake_transport import FakeTransport
from tests.support.compiled import needs_source, skip_if_compiled
from tests.support.gateway import until


class _Broken(Exception):  # noqa: N818
    pass


@pytest.fixture
def transport() -> FakeTransport:
    return FakeTransport()


@pytest.fixture
def body(transport: FakeTransport) -> BodyStream:
    return BodyStream(ReadFlow(transport), BufferAccount())


async def _turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def _read_all(body: BodyStream) -> list[bytes]:
    pieces = []
    while piece := await body.read():
        pieces.append(bytes(piece))
    return pieces


# ---------------------------------------------------------------------------------- BodyStream


async def test_pieces_come_in_order(body: BodyStream) -> None:
    for piece in (b"a", b"bc", b"d"):
        body.feed(piece)
    body.end()
    assert await _read_all(body) == [b"a", b"bc", b"d"]


async def test_the_end_stays_the_end(body: BodyStream) -> None:
    assert not body.ended
    body.end()
    assert body.ended
    assert [await body.read() for _ in range(3)] == [b"", b"", b""]


async def test_it_has_ended_before_it_is_read(body: BodyStream) -> None:
    body.feed(b"a")
    body.end()
    assert body.ended
    assert await body.read() == b"a"


async def test_a_reader_waits(body: BodyStream) -> None:
    reading = asyncio.create_task(_read_all(body))
    await _turns()
    body.feed(b"a")
    await _turns()
    body.feed(b"b")
    body.feed(b"c")
    await _turns()
    assert not reading.done()
    body.end()
    assert await reading == [b"a", b"b", b"c"]


async def test_an_error_comes_after_what_came_before(body: BodyStream) -> None:
    body.feed(b"a")
    body.fail(_Broken("broken"))
    assert await body.read() == b"a"
    for _ in range(2):
        with pytest.raises(_Broken, match="broken"):
            await body.read()
    assert not body.ended


async def test_an_error_reaches_a_reader_that_waits(body: BodyStream) -> None:
    reading = asyncio.create_task(body.read())
    await _turns()
    body.fail(_Broken())
    with pytest.raises(_Broken):
        await reading


async def test_the_first_error_counts(body: BodyStream) -> None:
    body.fail(_Broken("first"))
    body.fail(_Broken("second"))
    with pytest.raises(_Broken, match="first"):
        await body.read()


async def test_an_error_behind_the_end_is_none(body: BodyStream) -> None:
    body.feed(b"a")
    body.end()
    body.fail(_Broken())
    assert await _read_all(body) == [b"a"]


async def test_an_end_behind_an_error_is_none(body: BodyStream) -> None:
    body.feed(b"a")
    body.fail(_Broken())
    body.end()
    assert await body.read() == b"a"
    with pytest.raises(_Broken):
        await body.read()


async def test_the_sender_is_held_back(body: BodyStream, transport: FakeTransport) -> None:
    half = bytes(MAX_WINDOW // 2)
    body.feed(half)
    body.feed(half)
    assert transport.calls == []
    body.feed(b"x")
    assert transport.calls == ["pause"]
    body.feed(half)
    assert transport.calls == ["pause"]


async def test_the_sender_goes_on(body: BodyStream, transport: FakeTransport) -> None:
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
    assert len(await _read_all(body)) == 9
    assert transport.calls == ["pause", "resume"] * 2


async def test_a_sender_of_single_bytes_is_held_back_sooner(
    body: BodyStream, transport: FakeTransport
) -> None:
    count = 0
    while not transport.calls:
        body.feed(b"x")
        count += 1
    # An object of a byte and its place take some 50.
    assert MAX_WINDOW // 100 < count < MAX_WINDOW // 50
    body.end()
    assert len(await _read_all(body)) == count
    assert transport.calls == ["pause", "resume"]


async def test_one_large_piece(body: BodyStream, transport: FakeTransport) -> None:
    body.feed(bytes(MAX_WINDOW + 1))
    assert transport.calls == ["pause"]
    assert len(await body.read()) == MAX_WINDOW + 1
    assert transport.calls == ["pause", "resume"]


async def test_the_last_piece_holds_nobody_back(body: BodyStream, transport: FakeTransport) -> None:
    body.feed(bytes(MAX_WINDOW + 1), last=True)
    body.end()
    assert len(b"".join(await _read_all(body))) == MAX_WINDOW + 1
    assert transport.calls == []


async def test_nothing_is_asked_of_a_closing_transport(
    body: BodyStream, transport: FakeTransport
) -> None:
    transport.closing = True
    body.feed(bytes(MAX_WINDOW + 1))
    await body.read()
    body.feed(bytes(MAX_WINDOW + 1))
    body.discard()
    assert transport.calls == []


async def test_a_transport_that_closes_is_not_resumed(
    body: BodyStream, transport: FakeTransport
) -> None:
    body.feed(bytes(MAX_WINDOW + 1))
    transport.closing = True
    assert len(await body.read()) == MAX_WINDOW + 1
    assert transport.calls == ["pause"]


async def test_what_waits_and_comes_may_be_forgotten(
    body: BodyStream, transport: FakeTransport
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
    assert await _read_all(body) == []


@pytest.mark.parametrize("turns", [0, 1, 5])
async def test_a_cancelled_read_loses_nothing(body: BodyStream, turns: int) -> None:
    reading = asyncio.create_task(body.read())
    await _turns(turns)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    body.feed(b"a")
    body.feed(b"b")
    body.end()
    assert await _read_all(body) == [b"a", b"b"]


async def test_a_read_cancelled_when_its_piece_is_there_loses_nothing(body: BodyStream) -> None:
    reading = asyncio.create_task(body.read())
    await _turns()
    body.feed(b"a")
    reading.cancel()
    body.feed(b"b")
    with pytest.raises(asyncio.CancelledError):
        await reading
    body.end()
    assert await _read_all(body) == [b"a", b"b"]


async def test_a_cancelled_read_does_not_hide_the_error(body: BodyStream) -> None:
    reading = asyncio.create_task(body.read())
    await _turns()
    body.fail(_Broken())
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    with pytest.raises(_Broken):
        await body.read()


# ---------------------------------------------------------------------------------- Reading


def test_the_sender_goes_on_when_nobody_holds_it_back(transport: FakeTransport) -> None:
    reading = ReadFlow(transport)
    reading.release("a")
    assert transport.calls == []
    for holder in ("a", "b", "a"):
        reading.hold(holder)
    assert transport.calls == ["pause"]
    for holder in ("b", "b"):
        reading.release(holder)
    assert transport.calls == ["pause"]
    reading.release("a")
    assert transport.calls == ["pause", "resume"]


# ---------------------------------------------------------------------------------- Connection


class _Deaf(Connection):
    def data_received(self, data: bytes | memoryview) -> None:
        raise AssertionError("nothing is sent here")


@pytest.fixture
async def connection(transport: FakeTransport) -> Connection:
    skip_if_compiled()
    connection = _Deaf()
    connection.connection_made(transport)
    return connection


class _Slow(Connection):
    """Takes so many bytes of what comes, and keeps the rest."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most
        self.taken = b""

    def data_received(self, data: bytes | memoryview) -> None:
        self.taken += data[: self._most]
        self.buffer_read_ahead(data[self._most :])


@needs_source
async def test_much_that_is_kept_holds_the_sender_back(transport: FakeTransport) -> None:
    most = 1000
    data = bytes(range(256)) * (2 * MAX_READ_AHEAD // 256)
    connection = _Slow(most)
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
async def test_what_is_kept_twice_stays_in_order(transport: FakeTransport) -> None:
    connection = _Slow(3)
    connection.connection_made(transport)
    connection.buffer_read_ahead(b"ab")
    connection.buffer_read_ahead(memoryview(b"cde"))
    connection.process_read_ahead()
    connection.buffer_read_ahead(b"f")
    connection.process_read_ahead()
    assert connection.taken == b"abcdef"


@needs_source
async def test_a_sender_that_fills_each_read_lets_others_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size, count = 20 * 1024, 5
    log: list[str] = []

    class Log(Connection):
        def data_received(self, data: bytes | memoryview) -> None:
            assert len(data) == size
            self.loop.call_soon(log.append, "others")
            log.append("read")

    monkeypatch.setattr(intake_module, "_SLAB", size)
    monkeypatch.setattr(intake_module, "LEAST_SPACE", size)
    monkeypatch.setattr(connection_module, "READ_BUFFER", intake_module.ReadBuffer())
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(bytes(size * count))
        _, connection = await loop.create_connection(Log, sock=ours)
        await until(lambda: len(log) == 2 * count)
        connection.transport.abort()
        await _turns()
    assert log == ["read", "others"] * count


async def test_the_transport_is_kept(connection: Connection, transport: FakeTransport) -> None:
    assert connection.transport is transport
    assert not connection.closed
    assert transport.calls == []


async def test_what_is_begun_goes_out_with_what_follows(
    connection: Connection, transport: FakeTransport
) -> None:
    connection.buffer_write(b"head ")
    connection.buffer_write(b"and more ")
    connection.write(memoryview(b"body"))
    await _turns()
    connection.write(b"more body")
    assert transport.writes == [b"head and more body", b"more body"]


@pytest.mark.parametrize("size", [MAX_COALESCED_WRITE, MAX_COALESCED_WRITE + 1])
async def test_much_goes_out_with_what_was_begun(
    connection: Connection, transport: FakeTransport, size: int
) -> None:
    connection.buffer_write(b"head")
    connection.write(bytes(size))
    assert transport.writes == [b"head" + bytes(size)]


async def test_pieces_go_out_with_what_was_begun(
    connection: Connection, transport: FakeTransport
) -> None:
    connection.buffer_write(b"a")
    connection.write(b"b", memoryview(b"c"))
    connection.write(b"d", b"e")
    assert transport.writes == [b"abc", b"de"]


@pytest.mark.parametrize("chunked", [False, True])
async def test_little_of_a_body_goes_with_what_follows(
    connection: Connection, transport: FakeTransport, *, chunked: bool
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
    await _turns()
    assert len(transport.writes) == 3


async def test_the_end_of_a_body_leaves_nothing_behind(
    connection: Connection, transport: FakeTransport
) -> None:
    connection.write_body(b"a", chunked=False)
    connection.end_body(chunked=False)
    assert transport.writes == [b"a"]


async def test_what_is_begun_does_not_wait_for_long(
    connection: Connection, transport: FakeTransport
) -> None:
    connection.buffer_write(b"head")
    assert transport.writes == []
    await _turns(1)
    assert transport.writes == [b"head"]
    connection.buffer_write(b"next")
    connection.flush()
    connection.flush()
    await _turns()
    assert transport.writes == [b"head", b"next"]


async def test_little_by_little_is_not_held_without_end(
    connection: Connection, transport: FakeTransport
) -> None:
    for _ in range(100):
        connection.buffer_write(bytes(1024))
    assert transport.writes == [bytes(MAX_COALESCED_WRITE + 1024)]
    connection.flush()
    assert len(b"".join(transport.writes)) == 100 * 1024


async def test_nothing_is_written_to_a_closing_transport(
    connection: Connection, transport: FakeTransport
) -> None:
    connection.buffer_write(b"head")
    transport.closing = True
    await _turns()
    assert transport.writes == []


@needs_source
async def test_a_reset_forgets_what_was_begun() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Deaf, sock=ours)
        connection.buffer_write(b"head")
        connection.reset()
        await _turns()
        assert theirs.recv(10) == b""


async def _drains_at_once(connection: Connection) -> bool:
    """Tell whether a drain ends without a turn for others."""
    others: list[str] = []
    asyncio.get_running_loop().call_soon(others.append, "other")
    await connection.drain()
    return not others


async def test_drain_does_not_wait_for_nothing(connection: Connection) -> None:
    assert await _drains_at_once(connection)
    connection.pause_writing()
    connection.resume_writing()
    assert await _drains_at_once(connection)


async def test_drain_waits(connection: Connection) -> None:
    for _ in range(3):
        connection.pause_writing()
        draining = asyncio.create_task(connection.drain())
        await _turns()
        assert not draining.done()
        connection.resume_writing()
        await draining


@pytest.mark.parametrize("error", [None, OSError("reset")])
async def test_drain_of_a_lost_connection(connection: Connection, error: OSError | None) -> None:
    connection.connection_lost(error)
    assert connection.closed
    for _ in range(2):
        with pytest.raises(ConnectionResetError):
            await connection.drain()


@pytest.mark.parametrize("error", [None, OSError("reset")])
async def test_a_connection_lost_while_drained(
    connection: Connection, error: OSError | None
) -> None:
    connection.pause_writing()
    draining = asyncio.create_task(connection.drain())
    await _turns()
    connection.connection_lost(error)
    with pytest.raises(ConnectionResetError):
        await draining


async def test_a_connection_lost_right_behind_a_resume(connection: Connection) -> None:
    connection.pause_writing()
    draining = asyncio.create_task(connection.drain())
    await _turns()
    connection.resume_writing()
    connection.connection_lost(None)
    with pytest.raises(ConnectionResetError):
        await draining


async def test_a_paused_connection_that_is_lost_holds_nobody(connection: Connection) -> None:
    connection.pause_writing()
    connection.connection_lost(None)
    with pytest.raises(ConnectionResetError):
        await connection.drain()


@pytest.mark.parametrize("turns", [0, 1, 5])
async def test_a_drain_is_cancelled(connection: Connection, turns: int) -> None:
    connection.pause_writing()
    draining = asyncio.create_task(connection.drain())
    await _turns(turns)
    draining.cancel()
    with pytest.raises(asyncio.CancelledError):
        await draining
    again = asyncio.create_task(connection.drain())
    await _turns()
    assert not again.done()
    connection.resume_writing()
    await again


async def test_a_connection_is_lost_behind_a_cancelled_drain(connection: Connection) -> None:
    connection.pause_writing()
    draining = asyncio.create_task(connection.drain())
    await _turns()
    draining.cancel()
    connection.connection_lost(None)
    with pytest.raises(asyncio.CancelledError):
        await draining
    with pytest.raises(ConnectionResetError):
        await connection.drain()


async def test_who_has_to_wait_can_be_told(connection: Connection) -> None:
    assert not connection.write_blocked
    connection.pause_writing()
    assert connection.write_blocked
    connection.resume_writing()
    assert not connection.write_blocked
    connection.connection_lost(None)
    assert connection.write_blocked


async def test_a_closing_connection_is_not_reset(
    connection: Connection, transport: FakeTransport
) -> None:
    transport.closing = True
    connection.reset()
    assert transport.calls == []


async def _pair() -> tuple[Connection, socket.socket]:
    """Give a connection over TCP and its other end."""
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        _, connection = await loop.create_connection(_Deaf, *listening.getsockname())
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
            await _turns()
            assert not draining.done()
            received = 0
            while received < len(data):
                received += len(await loop.sock_recv(there, 1024 * 1024))
            await draining
        connection.transport.abort()
        await _turns()
        assert connection.closed


@needs_source
async def test_the_other_end_is_told_of_a_reset() -> None:
    connection, there = await _pair()
    with there:
        async with asyncio.timeout(5):
            connection.pause_writing()
            draining = asyncio.create_task(connection.drain())
            await _turns()
            connection.reset()
            with pytest.raises(ConnectionResetError):
                await asyncio.get_running_loop().sock_recv(there, 1)
            with pytest.raises(ConnectionResetError):
                await draining
    assert connection.closed
