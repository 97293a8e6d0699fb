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

from gateway.workers.letters import Letter

CLIENT, OPERATOR, LETTER, STOP = b"+", b"*", b"=", b"."
"""What comes from the parent: a connection of a client, or of an operator, a letter, or word that
there is no more."""
UP, TAKEN, LEAVING = b".", b"+", b"-"
"""What a worker says once it serves, of each connection that it has, and where it is to end before
its parent does; at its end, a number."""

_log = logging.getLogger("tensorgate.workers")

Take = Callable[[socket.socket, bool], None]
"""What takes a connection, and whether it is an operator's."""
Read = Callable[[Letter], None]


class Post:
    """A worker's end of the socket that it shares with its parent.

    ``closed`` holds one number, shared with the parent: the connections that have come to an end.
    Of all workers at a time, one has the ``first`` seat.
    """

    def __init__(self, channel: socket.socket, closed: memoryview, first: bool = True) -> None:
        self.first = first
        self._channel = channel
        self._closed = closed
        self._ending = False

    def is_up(self) -> None:
        """Tell the parent that connections can come."""
        self._say(UP)

    def has_closed(self) -> None:
        """Tell the parent that a connection is over."""
        self._closed[0] += 1

    def has_dropped(self, exchanges: int) -> None:
        """Tell the parent how many exchanges took too long to be finished."""
        self._say(str(exchanges).encode())

    def leave(self) -> None:
        """Ask for no more connections; it is the parent that says when the last has come."""
        self._say(LEAVING)

    async def deliver(self, take: Take, read: Read) -> None:
        """Give each connection that comes to ``take``, each letter to ``read``, until the end."""
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()
        self._channel.setblocking(False)
        number = self._channel.fileno()

        def receive() -> None:
            if not self._receive(take, read):
                loop.remove_reader(number)
                over.set_result(None)

        loop.add_reader(number, receive)
        await over
        if not self._ending:
            _log.error("the parent is gone: stopping")

    def _receive(self, take: Take, read: Read) -> bool:
        """Take what has come; false where nothing can come any more."""
        try:
            data, numbers, _, _ = socket.recv_fds(self._channel, 1, 2)
        except BlockingIOError:
            return True
        except ConnectionError:
            return False
        if data == STOP:
            self._ending = True
        elif data == LETTER:
            self._read(numbers, read)
        elif data:
            self._take(numbers, take, data == OPERATOR)
        return bool(data)

    def _take(self, numbers: Sequence[int], take: Take, is_operator: bool) -> None:
        self._say(TAKEN)
        if numbers:
            take(socket.socket(fileno=numbers[0]), is_operator)
        else:
            self.has_closed()
            _log.error("a connection was lost: too many open files")

    def _read(self, numbers: Sequence[int], read: Read) -> None:
        if len(numbers) == 2:
            read(Letter(*numbers))
            return
        _log.error("a letter of the parent was lost: too many open files")
        for number in numbers:
            os.close(number)

    def _say(self, words: bytes) -> None:
        with suppress(OSError):  # the parent is gone, which is noticed elsewhere
            self._channel.send(words)
