import asyncio
import socket
from collections.abc import Iterator

import pytest

from gateway.workers import ipc
from gateway.workers.ipc import (
    MAX_TEXT,
    ConnectionKind,
    FromWorker,
    ToWorker,
    WorkerChannel,
    receive,
    send,
)
from tests.support.checks.descriptors import no_descriptors
from tests.support.gateway import until

PATIENCE = 5
RECEIVED = (FromWorker.RECEIVED, "")


class _Ends:
    """Both ends of a channel: the test plays the supervisor, and what the worker serves with."""

    def __init__(self, supervisor: socket.socket, worker: socket.socket) -> None:
        self.supervisor = supervisor
        self.closed = memoryview(bytearray(8)).cast("Q")
        self.channel = WorkerChannel(worker, self.closed)
        self.clients: list[socket.socket] = []
        self.reloads: list[int] = []
        self.stops = self.rooms = 0

    def take(self, connection: socket.socket) -> None:
        self.clients.append(connection)

    def begin_draining(self) -> None:
        self.stops += 1

    def make_room(self) -> bool:
        self.rooms += 1
        return True

    def send_connection(self, kind: ConnectionKind = ToWorker.CLIENT) -> None:
        with socket.socket() as connection:
            send(self.supervisor, kind, descriptor=connection.fileno())

    def drain(self) -> None:
        send(self.supervisor, ToWorker.DRAIN)
        self.supervisor.shutdown(socket.SHUT_WR)

    def replies(self) -> list[tuple[int, str]]:
        """Return all messages of the worker so far."""
        self.supervisor.setblocking(False)
        replies = []
        try:
            while message := receive(self.supervisor):
                replies.append(message[:2])
        except BlockingIOError:
            pass
        return replies

    async def receive(self) -> None:
        """Have the worker handle messages until it drains."""
        async with asyncio.timeout(PATIENCE):
            await self.channel.receive(self, self.reloads.append)


@pytest.fixture
def ends() -> Iterator[_Ends]:
    supervisor, worker = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with supervisor, worker:
        ends = _Ends(supervisor, worker)
        yield ends
        for sock in ends.clients:
            sock.close()


async def test_connections_and_steps_of_reloads_are_received_in_order(
    ends: _Ends, caplog: pytest.LogCaptureFixture
) -> None:
    send(ends.supervisor, ToWorker.STOPPING)
    ends.send_connection(ToWorker.CLIENT)
    ends.send_connection(ToWorker.ADMIN)
    receiving = asyncio.create_task(ends.receive())
    await until(lambda: len(ends.clients) == 2)
    assert ends.stops == 1
    for step in (ToWorker.PREPARE, ToWorker.COMMIT, ToWorker.ABORT):
        send(ends.supervisor, step)
    ends.send_connection()
    ends.drain()
    await receiving
    assert ends.reloads == [ToWorker.PREPARE, ToWorker.COMMIT, ToWorker.ABORT]
    assert ends.replies() == [RECEIVED] * 3
    assert len({sock.fileno() for sock in ends.clients}) == 3
    assert not caplog.messages
    assert ends.closed[0] == 0


async def test_draining_worker_neither_reloads_nor_reports_a_supervisor_that_is_gone(
    ends: _Ends, caplog: pytest.LogCaptureFixture
) -> None:
    send(ends.supervisor, ToWorker.DRAIN)
    await ends.receive()
    send(ends.supervisor, ToWorker.PREPARE)
    ends.supervisor.close()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not ends.reloads
    assert not caplog.messages


async def test_worker_stops_if_the_supervisor_is_gone(
    ends: _Ends, caplog: pytest.LogCaptureFixture
) -> None:
    ends.send_connection()
    ends.channel.send(FromWorker.READY)  # a message that the supervisor leaves unread
    ends.supervisor.close()
    await ends.receive()
    assert len(ends.clients) == 1
    assert caplog.messages == ["the supervisor has died: this worker drains and stops"]
    ends.channel.send(FromWorker.DROPPED, "1")  # to nobody, which is no error


async def test_connection_without_a_descriptor_counts_as_closed(
    ends: _Ends, caplog: pytest.LogCaptureFixture
) -> None:
    # This is how the kernel delivers it to a process with too many open files.
    send(ends.supervisor, ToWorker.CLIENT)
    ends.send_connection()
    ends.drain()
    await ends.receive()
    assert ends.closed[0] == 1
    assert len(ends.clients) == 1
    assert ends.replies() == [RECEIVED] * 2
    assert caplog.messages == ["a client connection was dropped: too many open files"]


async def test_worker_makes_room_before_it_receives_what_needs_a_descriptor(
    ends: _Ends, caplog: pytest.LogCaptureFixture
) -> None:
    ends.send_connection()
    with no_descriptors():
        receiving = asyncio.create_task(ends.receive())
        await until(lambda: ends.rooms)
        assert ends.clients == []
    ends.drain()
    await receiving
    assert len(ends.clients) == 1
    assert not caplog.messages


def test_long_text_is_cut(ends: _Ends) -> None:
    ends.channel.send(FromWorker.RELOAD_DONE, "k" * 10_000)
    assert ends.replies() == [(FromWorker.RELOAD_DONE, "k" * MAX_TEXT)]


async def test_worker_handles_waiting_messages_in_bounded_batches(
    ends: _Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ipc, "MAX_BATCH", 5)
    seen: list[int] = []

    def look() -> None:
        """Note in each time slice how many connections have come."""
        seen.append(len(ends.clients))
        if len(ends.clients) < 12:
            asyncio.get_running_loop().call_soon(look)

    for _ in range(12):
        ends.send_connection()
    ends.drain()
    look()
    await ends.receive()
    assert [count for count in dict.fromkeys(seen) if count] == [5, 10, 12]
