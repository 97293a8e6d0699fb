"""Questions of the admin process to workers: replies, deadlines, and who owns a connection."""

import asyncio
import gc
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from gateway.workers.control import (
    ControlClient,
    ControlServer,
    ControlSockets,
    Question,
    Responder,
)
from tests.support.gateway import no_leaks, until

PATIENCE = 5.0


async def _say(question: Question, connection: socket.socket | None) -> str:
    assert connection is None
    return f"{question}!"


async def _never(question: Question, connection: socket.socket | None) -> str:
    await asyncio.Event().wait()
    raise AssertionError


def _server(sockets: ControlSockets, responder: Responder = _say, slot: int = 0) -> ControlServer:
    return ControlServer(sockets, slot, responder)


@pytest.fixture
async def sockets() -> AsyncIterator[list[ControlSockets]]:
    """Yield a list with the sockets of two slots, which no other reference keeps."""
    async with no_leaks():
        made = [ControlSockets(2)]
        yield made
        made.clear()
        gc.collect()


Sockets = list[ControlSockets]


@contextmanager
def _connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        other.settimeout(PATIENCE)
        yield one, other


async def _is_closed(other: socket.socket) -> bool:
    """Tell whether nobody has the other end of a connection any more."""
    return await asyncio.to_thread(other.recv, 1) == b""


async def test_each_slot_has_its_worker(sockets: Sockets) -> None:
    def responder(name: str) -> Responder:
        async def respond(question: Question, connection: socket.socket | None) -> str:
            return f"{name}: {question}"

        return respond

    with ExitStack() as stack:
        client = stack.enter_context(ControlClient(sockets[0]))
        for slot in range(2):
            stack.enter_context(_server(sockets[0], responder(f"worker {slot}"), slot))
        for question in Question:
            asked = [client.ask(slot, question, PATIENCE) for slot in (1, 0, 1)]
            replies = await asyncio.gather(*asked)
            assert replies == [f"worker {slot}: {question}" for slot in (1, 0, 1)]


async def test_replies_come_in_any_order(sockets: Sockets) -> None:
    may_reply: dict[str, asyncio.Event] = {each: asyncio.Event() for each in Question}

    async def respond(question: Question, connection: socket.socket | None) -> str:
        await may_reply[question].wait()
        return question

    with ControlClient(sockets[0]) as client, _server(sockets[0], respond):
        asked = [
            asyncio.create_task(client.ask(0, question, PATIENCE))
            for question in (Question.READY, Question.PUBLISH)
        ]
        may_reply[Question.PUBLISH].set()
        assert await asked[1] == "publish"
        assert not asked[0].done()
        may_reply[Question.READY].set()
        assert await asked[0] == "ready"


@pytest.mark.parametrize("character", ["x", "🙂", "\0", "\udcff", '"'], ids=range(5))
async def test_reply_that_is_too_long_is_cut(sockets: Sockets, character: str) -> None:
    text = 10_000 * character

    async def respond(question: Question, connection: socket.socket | None) -> str:
        return text

    with ControlClient(sockets[0]) as client, _server(sockets[0], respond):
        reply = await client.ask(0, Question.READY, PATIENCE)
    assert len(reply) >= 500
    assert text.startswith(reply)


async def test_worker_that_does_not_reply_in_time_gives_up(sockets: Sockets) -> None:
    with ControlClient(sockets[0]) as client, _server(sockets[0], _never) as server:
        with pytest.raises(TimeoutError):
            await client.ask(0, Question.READY, 0.02)
        await until(lambda: not server.tasks)


async def test_late_reply_is_not_taken_for_that_of_the_next_question(sockets: Sockets) -> None:
    with ControlClient(sockets[0]) as client:
        worker = sockets[0].of_worker(0)
        with worker, pytest.raises(TimeoutError):
            await client.ask(0, Question.READY, 0.01)
        with sockets[0].of_worker(0) as worker:
            number = worker.recv(8192).decode().strip("[").split(",")[0]
            worker.send(f'[{number}, "late"]'.encode())
            with _server(sockets[0]):
                assert await client.ask(0, Question.PUBLISH, PATIENCE) == "publish!"


async def test_successor_does_not_reply_to_what_is_past_its_deadline(sockets: Sockets) -> None:
    """Its predecessor died before it read the questions; the connection of one is closed."""
    questions = []

    async def respond(question: Question, connection: socket.socket | None) -> str:
        questions.append(question)
        return ""

    with ControlClient(sockets[0]) as client, _connection() as (connection, other):
        with pytest.raises(TimeoutError):
            await client.ask(0, Question.CONNECT, 0.0, connection)
        connection.close()
        with _server(sockets[0], respond):
            assert await _is_closed(other)
            await client.ask(0, Question.READY, PATIENCE)
    assert questions == [Question.READY]


async def test_successor_replies_to_what_its_predecessor_did_not_read(sockets: Sockets) -> None:
    with ControlClient(sockets[0]) as client:
        asked = asyncio.create_task(client.ask(0, Question.READY, PATIENCE))
        await asyncio.sleep(0)
        with _server(sockets[0]):
            assert await asked == "ready!"


async def test_restarted_admin_process_ignores_replies_to_its_predecessor(sockets: Sockets) -> None:
    may_reply = asyncio.Event()

    async def respond(question: Question, connection: socket.socket | None) -> str:
        await may_reply.wait()
        return question

    with _server(sockets[0], respond) as server:
        with ControlClient(sockets[0]) as first:
            asked = asyncio.create_task(first.ask(0, Question.PUBLISH, PATIENCE))
            await until(lambda: server.tasks)
        with pytest.raises(asyncio.CancelledError):
            await asked
        may_reply.set()
        await until(lambda: not server.tasks)  # the reply waits in the socket
        with ControlClient(sockets[0]) as second:
            assert await second.ask(0, Question.READY, PATIENCE) == "ready"


async def test_worker_that_reads_nothing_cannot_be_asked_for_ever(sockets: Sockets) -> None:
    """A full socket is as no reply, at once. Then the successor works off what is there."""
    with ControlClient(sockets[0]) as client:
        asked = [asyncio.create_task(client.ask(0, Question.READY, PATIENCE)) for _ in range(2000)]
        await asyncio.sleep(0)
        failed = [task for task in asked if task.done()]
        assert 0 < len(failed) < len(asked)
        assert all(isinstance(task.exception(), TimeoutError) for task in failed)
        with _server(sockets[0]):
            waiting = [task for task in asked if task not in failed]
            assert set(await asyncio.gather(*waiting)) == {"ready!"}


async def test_reply_for_which_there_is_no_room_is_dropped(sockets: Sockets) -> None:
    with _server(sockets[0]) as server, ControlClient(sockets[0]) as client:
        asyncio.get_running_loop().remove_reader(client._sockets[0])
        with pytest.raises(BlockingIOError):  # noqa: PT012  # the socket fills up
            while True:
                server._socket.send(b'[0, ""]')
        with pytest.raises(TimeoutError):
            await client.ask(0, Question.READY, 0.05)
        asyncio.get_running_loop().add_reader(client._sockets[0], client._read, client._sockets[0])
        assert await client.ask(0, Question.READY, PATIENCE) == "ready!"


async def test_failing_responder_is_logged_and_the_next_question_is_replied_to(
    sockets: Sockets, caplog: pytest.LogCaptureFixture
) -> None:
    async def respond(question: Question, connection: socket.socket | None) -> str:
        if question is Question.PUBLISH:
            raise RuntimeError("nonsense")
        return "fine"

    with ControlClient(sockets[0]) as client, _server(sockets[0], respond):
        with pytest.raises(TimeoutError):
            await client.ask(0, Question.PUBLISH, 0.05)
        assert await client.ask(0, Question.READY, PATIENCE) == "fine"
    assert caplog.messages == ["a question of the admin process failed: publish"]
    caplog.clear()  # it refers to the sockets


async def test_cancelled_question_is_forgotten(sockets: Sockets) -> None:
    with ControlClient(sockets[0]) as client, _server(sockets[0], _never) as server:
        asked = asyncio.create_task(client.ask(0, Question.READY, PATIENCE))
        await until(lambda: server.tasks)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert client._replies == {}


async def test_connection_that_is_handed_over_works(sockets: Sockets) -> None:
    async def respond(question: Question, connection: socket.socket | None) -> str:
        assert connection is not None
        connection.send(b"hello")
        connection.close()
        return ""

    with (
        ControlClient(sockets[0]) as client,
        _server(sockets[0], respond),
        _connection() as (connection, other),
    ):
        assert await client.ask(0, Question.CONNECT, PATIENCE, connection) == ""
        connection.send(b" from both")  # a duplicate went with the question
        connection.close()
        assert await asyncio.to_thread(other.recv, 5) == b"hello"
        assert await asyncio.to_thread(other.recv, 10) == b" from both"
        assert await _is_closed(other)


async def test_connection_is_closed_if_the_worker_stops_before_it_is_taken(
    sockets: Sockets,
) -> None:
    with ControlClient(sockets[0]) as client, _server(sockets[0], _never) as server:
        with _connection() as (connection, other):
            asked = asyncio.create_task(client.ask(0, Question.CONNECT, PATIENCE, connection))
            await asyncio.sleep(0)
            connection.close()
            server._read()  # the task that replies has not begun to run
            server.__exit__()
            assert await _is_closed(other)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
        server.__enter__()


def test_sockets_are_closed_with_their_last_user() -> None:
    before = set(os.listdir("/proc/self/fd"))
    made = ControlSockets(3)
    ends = [*made.of_admin(), made.of_worker(2)]
    assert len(set(os.listdir("/proc/self/fd")) - before) == 10
    del made
    for end in ends:
        end.close()
    assert set(os.listdir("/proc/self/fd")) <= before
