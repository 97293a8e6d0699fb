import asyncio
import logging
import os
import socket
from collections.abc import Iterator

import pytest

from gateway.workers.ipc import (
    ADMIN,
    CLIENT,
    CONFIG_UPDATE,
    DRAIN,
    DRAINED,
    EXIT,
    LEAVING,
    RECEIVED,
    STOPPING,
    WorkerChannel,
)
from gateway.workers.letters import ReceivedUpdate
from tests.support.gateway import until

PATIENCE = 5


class _Channel:
    """Both ends of a post."""

    def __init__(self, parent: socket.socket, worker: socket.socket) -> None:
        self.parent = parent
        self.closed = memoryview(bytearray(8)).cast("Q")
        self.post = WorkerChannel(worker, self.closed)
        self.taken: list[socket.socket] = []
        self.operators: list[socket.socket] = []
        self.read: list[ReceivedUpdate] = []

    def give(self, word: bytes = CLIENT) -> None:
        with socket.socket() as connection:
            socket.send_fds(self.parent, [word], [connection.fileno()])

    def take(self, connection: socket.socket, is_operator: bool) -> None:
        self.taken.append(connection)
        if is_operator:
            self.operators.append(connection)

    async def receive(self) -> None:
        async with asyncio.timeout(PATIENCE):
            await self.post.receive(self.take, self.read.append)


@pytest.fixture
def channel() -> Iterator[_Channel]:
    parent, worker = socket.socketpair()
    with parent, worker:
        channel = _Channel(parent, worker)
        yield channel
        for sock in channel.taken:
            sock.close()


async def test_connections_are_taken_as_they_come(
    channel: _Channel, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        channel.give()
    delivery = asyncio.create_task(channel.receive())
    await until(lambda: len(channel.taken) == 2)
    channel.give()
    channel.parent.send(DRAIN)
    channel.parent.shutdown(socket.SHUT_WR)
    await delivery
    assert channel.parent.recv(64) == RECEIVED * 3
    assert len(channel.taken) == 3
    assert len({sock.fileno() for sock in channel.taken}) == 3
    assert not caplog.messages
    assert channel.closed[0] == 0


async def test_connections_of_operators_are_told_apart(channel: _Channel) -> None:
    for word in (CLIENT, ADMIN, CLIENT):
        channel.give(word)
    channel.parent.send(DRAIN)
    channel.parent.shutdown(socket.SHUT_WR)
    await channel.receive()
    assert channel.operators == [channel.taken[1]]


async def test_operators_come_until_the_parent_says_that_it_was_the_last(
    channel: _Channel, caplog: pytest.LogCaptureFixture
) -> None:
    stopping: list[int] = []
    channel.parent.send(STOPPING)
    channel.give()
    channel.parent.send(DRAIN)
    async with asyncio.timeout(PATIENCE):
        await channel.post.receive(
            channel.take, channel.read.append, lambda: stopping.append(len(channel.taken))
        )
    assert stopping == [0]
    ending = asyncio.create_task(channel.post.drained())
    channel.give(ADMIN)
    await until(lambda: len(channel.operators) == 1)
    assert not ending.done()
    channel.parent.send(EXIT)
    await asyncio.wait_for(ending, PATIENCE)
    assert channel.parent.recv(64) == RECEIVED + DRAINED + RECEIVED
    assert not caplog.messages


async def test_one_that_drains_neither_reads_letters_nor_waits_for_a_parent_that_is_gone(
    channel: _Channel, caplog: pytest.LogCaptureFixture
) -> None:
    channel.parent.send(DRAIN)
    await channel.receive()
    ending = asyncio.create_task(channel.post.drained())
    answer, reply = os.pipe()
    memory = os.memfd_create("letter")
    socket.send_fds(channel.parent, [CONFIG_UPDATE], [memory, reply])
    os.close(memory)
    os.close(reply)
    channel.parent.close()
    await asyncio.wait_for(ending, PATIENCE)
    assert os.read(answer, 64) == b""  # whoever waits for an answer sees that none comes
    os.close(answer)
    assert not channel.read
    assert not caplog.messages


async def test_a_parent_that_is_gone_is_missed(
    channel: _Channel, caplog: pytest.LogCaptureFixture
) -> None:
    channel.give()
    channel.parent.close()
    await channel.receive()
    assert len(channel.taken) == 1
    assert caplog.messages == ["the parent is gone: stopping"]
    channel.post.send_dropped(1)  # to nobody, which is no fault


async def test_one_that_leaves_takes_what_still_comes(
    channel: _Channel, caplog: pytest.LogCaptureFixture
) -> None:
    channel.give()
    channel.post.leave()
    channel.give()
    channel.parent.send(DRAIN)
    channel.parent.shutdown(socket.SHUT_WR)
    await channel.receive()
    assert channel.parent.recv(64) == LEAVING + RECEIVED * 2
    assert len(channel.taken) == 2
    assert not caplog.messages
    channel.post.leave()  # a second signal


async def test_a_connection_that_cannot_be_had_counts_as_closed(
    channel: _Channel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    channel.parent.send(CLIENT)  # which is how the kernel leaves it, without a number to spare
    channel.give()
    channel.parent.send(DRAIN)
    channel.parent.shutdown(socket.SHUT_WR)
    await channel.receive()
    assert channel.closed[0] == 1
    assert len(channel.taken) == 1
    assert caplog.messages == ["a connection was lost: too many open files"]


async def test_letters_are_read_in_their_turn(
    channel: _Channel, caplog: pytest.LogCaptureFixture
) -> None:
    answer, reply = os.pipe()
    memory = os.memfd_create("letter")
    os.write(memory, b"content")
    channel.give()
    socket.send_fds(channel.parent, [CONFIG_UPDATE], [memory, reply])
    channel.parent.send(
        CONFIG_UPDATE
    )  # which is how the kernel leaves it, without numbers to spare
    channel.give()
    channel.parent.send(DRAIN)
    channel.parent.shutdown(socket.SHUT_WR)
    os.close(memory)
    os.close(reply)
    await channel.receive()
    assert channel.parent.recv(64) == RECEIVED * 2
    (letter,) = channel.read
    with letter:
        assert letter.content == b"content"
        letter.answer("why not")
    assert os.read(answer, 64) == b"why not"
    assert os.read(answer, 64) == b""
    os.close(answer)
    assert caplog.messages == ["a letter of the parent was lost: too many open files"]


def test_what_it_says(channel: _Channel) -> None:
    channel.post.send_ready()
    channel.post.count_closed()
    channel.post.count_closed()
    channel.post.send_dropped(3)
    assert channel.parent.recv(64) == b".3"
    assert channel.closed[0] == 2
