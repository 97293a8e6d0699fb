"""What a worker has of its parent: connections and letters that come, and a few words back.

One Unix socket holds both. It also tells each side of the other's end, whatever brought that about,
as a process' sockets close with it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress

from gateway.workers.letters import ReceivedUpdate

CLIENT, ADMIN, CONFIG_UPDATE = b"+", b"*", b"="
"""What comes from the parent: a connection of a client or of an operator, or a letter."""
STOPPING, DRAIN, EXIT = b"~", b".", b"!"
"""How the parent stops a worker: the gateway stops, but clients still come; no more clients come;
no more operators come either."""
READY, RECEIVED, LEAVING, DRAINED = b".", b"+", b"-", b"!"
"""What a worker says: it serves; it has a connection; it is to end before its parent does; no call
of a client is under way any more. At its end, it says a number."""

_log = logging.getLogger("tensorgate.workers")

Take = Callable[[socket.socket, bool], None]
"""What takes a connection, and whether it is an operator's."""
Read = Callable[[ReceivedUpdate], None]


def _ignore() -> None:
    """Do nothing."""


class WorkerChannel:
    """A worker's end of the socket that it shares with its parent.

    ``closed`` holds one number, shared with the parent: the connections that have come to an end.
    Of all workers at a time, one has the ``first`` seat.
    """

    def __init__(self, channel: socket.socket, closed: memoryview, first: bool = True) -> None:
        self.first = first
        self._channel = channel
        self._closed = closed
        self._ending = False
        self._stopped = asyncio.Event()
        self._over = asyncio.Event()

    def send_ready(self) -> None:
        """Tell the parent that connections can come."""
        self._say(READY)

    def count_closed(self) -> None:
        """Tell the parent that a connection is over."""
        self._closed[0] += 1

    def send_dropped(self, exchanges: int) -> None:
        """Tell the parent how many exchanges took too long to be finished."""
        self._say(str(exchanges).encode())

    def leave(self) -> None:
        """Ask for no more connections; it is the parent that says when the last has come."""
        self._say(LEAVING)

    async def receive(self, take: Take, read: Read, stopping: Callable[[], None] = _ignore) -> None:
        """Give each connection that comes to ``take``, each letter to ``read``.

        It returns when no more clients come; operators come until ``drained`` returns.
        ``stopping`` is called when the gateway begins to stop.
        """
        loop = asyncio.get_running_loop()
        self._channel.setblocking(False)
        number = self._channel.fileno()

        def receive() -> None:
            if not self._receive(take, read, stopping):
                loop.remove_reader(number)
                self._stopped.set()
                self._over.set()

        loop.add_reader(number, receive)
        await self._stopped.wait()
        if not self._ending:
            _log.error("the parent is gone: stopping")

    async def drained(self) -> None:
        """Tell the parent that no client is served any more; wait for the last operator."""
        self._say(DRAINED)
        await self._over.wait()

    def _receive(self, take: Take, read: Read, stopping: Callable[[], None]) -> bool:
        """Take what has come; false where nothing can come any more."""
        try:
            data, numbers, _, _ = socket.recv_fds(self._channel, 1, 2)
        except BlockingIOError:
            return True
        except ConnectionError:
            return False
        if data == STOPPING:
            stopping()
        elif data == DRAIN:
            self._ending = True
            self._stopped.set()
        elif data == CONFIG_UPDATE:
            self._read(numbers, read)
        elif data in (CLIENT, ADMIN):
            self._take(numbers, take, data == ADMIN)
        return bool(data) and data != EXIT

    def _take(self, numbers: Sequence[int], take: Take, is_operator: bool) -> None:
        self._say(RECEIVED)
        if numbers:
            take(socket.socket(fileno=numbers[0]), is_operator)
        else:
            self.count_closed()
            _log.error("a connection was lost: too many open files")

    def _read(self, numbers: Sequence[int], read: Read) -> None:
        # One that drains goes on with the settings that it has.
        if len(numbers) == 2 and not self._ending:
            read(ReceivedUpdate(*numbers))
            return
        if not self._ending:
            _log.error("a letter of the parent was lost: too many open files")
        for number in numbers:
            os.close(number)

    def _say(self, words: bytes) -> None:
        with suppress(OSError):  # the parent is gone, which is noticed elsewhere
            self._channel.send(words)
