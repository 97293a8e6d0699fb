"""Questions of the admin process to the workers, and their replies.

Each worker's slot has a pair of Unix sockets, made before the first fork. All processes have both
ends, so neither end closes when a process dies: its successor goes on. A question has a deadline,
as a worker may find those that its predecessor did not read.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from typing import Self

_MAX_MESSAGE = 8192
"""Bytes of a question or a reply."""
_MAX_TEXT = 600
"""Characters of a reply; longer ones are cut. JSON takes up to twelve bytes for a character."""
_SENT_MESSAGES = 16
"""Messages that are handled in one time slice of the event loop."""

_log = logging.getLogger("tensorgate.workers")


class Question(StrEnum):
    """What the admin process asks workers."""

    READY = "ready"
    """Whether it is ready: the reply is why not, or empty."""
    PUBLISH = "publish"
    """To publish its status now."""
    CONNECT = "connect"
    """To serve the connection that comes with it as that of a client."""
    CAPTURE = "capture"
    """To serve a call, and send what is captured of it through the socket that comes with it."""


Responder = Callable[[Question, socket.socket | None], Awaitable[str]]
"""Replies to a question; it owns the socket that came with it."""


class ControlSockets:
    """The sockets of all slots, as descriptors.

    Like the memory that processes share, they belong to all who refer to this.
    """

    def __init__(self, slots: int) -> None:
        kind = socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK
        pairs = [socket.socketpair(socket.AF_UNIX, kind) for _ in range(slots)]
        self._descriptors = [(admin.detach(), worker.detach()) for admin, worker in pairs]

    def __del__(self) -> None:
        for pair in self._descriptors:
            for each in pair:
                os.close(each)

    def of_admin(self) -> list[socket.socket]:
        """Return the end of each slot that the admin process uses, for the caller to close."""
        return [socket.socket(fileno=os.dup(admin)) for admin, _ in self._descriptors]

    def of_worker(self, slot: int) -> socket.socket:
        """Return the end that the worker of a slot uses, for the caller to close."""
        return socket.socket(fileno=os.dup(self._descriptors[slot][1]))


class ControlClient:
    """Asks workers, while its context is open."""

    def __init__(self, sockets: ControlSockets) -> None:
        self._all = sockets
        self._sockets: list[socket.socket] = []
        self._replies: dict[int, asyncio.Future[str]] = {}
        # A reply to an admin process that has died must not be taken for one to this.
        self._ids = count(int.from_bytes(os.urandom(6), "big"))

    def __enter__(self) -> Self:
        """Start to receive replies."""
        loop = asyncio.get_running_loop()
        self._sockets = self._all.of_admin()
        for each in self._sockets:
            loop.add_reader(each, self._read, each)
        return self

    def __exit__(self, *_: object) -> None:
        """Give up the questions under way."""
        loop = asyncio.get_running_loop()
        for each in self._sockets:
            loop.remove_reader(each)
            each.close()
        for reply in self._replies.values():
            reply.cancel()

    async def ask(
        self,
        slot: int,
        question: Question,
        max_seconds: float,
        connection: socket.socket | None = None,
    ) -> str:
        """Return the reply of the worker in a slot; a duplicate of ``connection`` goes with it.

        Raises TimeoutError after ``max_seconds``, also if the worker cannot be asked.
        """
        number = next(self._ids)
        reply: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._replies[number] = reply
        message = json.dumps([number, time.monotonic() + max_seconds, question]).encode()
        descriptors = [] if connection is None else [connection.fileno()]
        try:
            async with asyncio.timeout(max_seconds):
                try:
                    socket.send_fds(self._sockets[slot], [message], descriptors)
                except OSError:
                    raise TimeoutError from None  # it has not read what came before
                return await reply
        finally:
            del self._replies[number]

    def _read(self, sock: socket.socket) -> None:
        with suppress(BlockingIOError):
            for _ in range(_SENT_MESSAGES):
                number, text = json.loads(sock.recv(_MAX_MESSAGE))
                reply = self._replies.get(number)
                if reply is not None and not reply.done():
                    reply.set_result(text)


@dataclass(eq=False)
class ControlServer:
    """Replies to the admin process for the worker of a slot, while its context is open."""

    sockets: ControlSockets
    slot: int
    responder: Responder
    tasks: dict[asyncio.Task[None], socket.socket | None] = field(default_factory=dict)
    """Replies under way, each with the connection that the responder does not own yet."""

    def __enter__(self) -> Self:
        """Start to receive questions."""
        self._socket = self.sockets.of_worker(self.slot)
        asyncio.get_running_loop().add_reader(self._socket, self._read)
        return self

    def __exit__(self, *_: object) -> None:
        """Give up the replies under way."""
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        for task in self.tasks:
            task.cancel()

    def _read(self) -> None:
        with suppress(BlockingIOError):
            for _ in range(_SENT_MESSAGES):
                message, descriptors, _, _ = socket.recv_fds(self._socket, _MAX_MESSAGE, 1)
                connection = socket.socket(fileno=descriptors[0]) if descriptors else None
                number, deadline, question = json.loads(message)
                if time.monotonic() < deadline:
                    task = asyncio.create_task(self._reply(number, deadline, question, connection))
                    self.tasks[task] = connection
                    task.add_done_callback(self._end_reply)
                elif connection is not None:
                    connection.close()

    def _end_reply(self, task: asyncio.Task[None]) -> None:
        connection = self.tasks.pop(task)
        if connection is not None:  # it was cancelled before it began
            connection.close()

    async def _reply(
        self, number: int, deadline: float, question: str, connection: socket.socket | None
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks[task] = None
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                text = await self.responder(Question(question), connection)
        except TimeoutError:
            return
        except Exception:
            # An error of our own is logged; the admin process tells that there is no reply.
            _log.exception("a question of the admin process failed: %s", question)
            return
        message = json.dumps([number, text[:_MAX_TEXT]]).encode()
        with suppress(BlockingIOError):
            self._socket.send(message)
