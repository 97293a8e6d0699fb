"""The messages between the supervisor and its workers.

Each worker shares one Unix socket of type SOCK_SEQPACKET with the supervisor. A packet is one
message: the first byte is its kind, the rest is text. Descriptors travel with it (SCM_RIGHTS).
Either side sees the end of the stream when the other one is gone, whatever ended it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal, Protocol

from gateway.system.descriptors import exceeds_share_now

MAX_TEXT = 4000
"""Bytes of text in a message; longer text is cut."""

MAX_BATCH = 128
"""Messages that a worker handles in one time slice of its event loop. Open connections are served
before the next batch."""

_FULL_SHARE = 31 / 32
"""Above this share of open descriptors, a worker makes room before it receives more: those of a
message that finds none are lost."""
_ROOM_DELAY = 0.05
"""Seconds in which connections close that had to make room."""

_log = logging.getLogger("tensorgate.workers")


class ToWorker(IntEnum):
    """The messages to a worker, or to the admin process."""

    CLIENT = 1
    """With a descriptor: a client's connection. The worker replies RECEIVED."""
    ADMIN = 2
    """With a descriptor: an operator's connection. The admin process replies RECEIVED."""
    PREPARE = 3
    """New settings are in the memory that all share. Make all that they need, but do not use it
    yet. The worker replies RELOAD_DONE, as to COMMIT and ABORT."""
    COMMIT = 4
    """Use the settings that are prepared: each process has prepared them."""
    ABORT = 5
    """Newer settings are not used. Give back what is prepared, if anything is."""
    STOPPING = 6
    """The gateway is not ready any more, but clients that have begun to connect still come."""
    DRAIN = 7
    """No connection comes any more: finish the calls in progress, and exit."""


class FromWorker(IntEnum):
    """The messages of a worker."""

    READY = 1
    """It can serve connections."""
    RECEIVED = 2
    """It has the oldest of the connections that it has not acknowledged yet."""
    RELOAD_DONE = 3
    """One for each PREPARE, COMMIT and ABORT, in their order. With text: why that failed."""
    LEAVING = 4
    """It got SIGTERM or SIGINT itself. Another worker takes its place."""
    DROPPED = 5
    """With a number as text: the calls that it cut at the drain timeout."""


ConnectionKind = Literal[ToWorker.CLIENT, ToWorker.ADMIN]
"""Who connects to a listening socket: the message that hands such a connection to a process."""

ListeningSockets = Mapping[socket.socket, ConnectionKind]
"""Listening sockets, with who connects there."""

ReloadStep = Literal[ToWorker.PREPARE, ToWorker.COMMIT, ToWorker.ABORT]


def send(channel: socket.socket, kind: IntEnum, text: str = "", descriptor: int = -1) -> None:
    """Send a message. Raises BlockingIOError if the channel is full, or another OSError."""
    message = bytes([kind]) + text.encode()[:MAX_TEXT]
    if descriptor < 0:
        channel.send(message)
    else:
        socket.send_fds(channel, [message], [descriptor])


def receive(channel: socket.socket) -> tuple[int, str, int] | None:
    """Return the next message, or None at the end of the stream: its kind, text and descriptor.

    The descriptor is -1 if there is none, or if this process has too many open. Raises
    BlockingIOError if no message has come yet.
    """
    try:
        message, descriptors, _, _ = socket.recv_fds(channel, 1 + MAX_TEXT, 1)
    except ConnectionResetError:
        # Linux reports once that the peer left messages unread. Its own come after that.
        message, descriptors, _, _ = socket.recv_fds(channel, 1 + MAX_TEXT, 1)
    if not message:
        return None
    return message[0], message[1:].decode(errors="replace"), next(iter(descriptors), -1)


class Receiver(Protocol):
    """What serves the connections that a worker, or the admin process, receives."""

    def take(self, connection: socket.socket) -> None:
        """Serve a connection; this owns it from now on."""

    def begin_draining(self) -> None:
        """Be not ready from now on; clients that have begun to connect still come."""

    def make_room(self) -> bool:
        """Close other connections before descriptors run out; return whether there were any."""


@dataclass(eq=False)
class WorkerChannel:
    """A worker's end of the socket that it shares with the supervisor.

    ``closed_connections`` is one number in shared memory, which the supervisor reads. ``slot`` is
    the number of the worker's position, from 0. The first one logs what all find out alike.
    """

    channel: socket.socket
    closed_connections: memoryview
    slot: int = 0
    _draining: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def send(self, kind: FromWorker, text: str = "") -> None:
        """Send a message to the supervisor; it replies DRAIN to LEAVING, behind the last client."""
        with suppress(OSError):  # it is gone, which is noticed when receiving
            send(self.channel, kind, text)

    def count_closed(self) -> None:
        """Count a connection that is closed: the supervisor sees the load without a message."""
        self.closed_connections[0] += 1

    async def receive(self, receiver: Receiver, on_reload: Callable[[int], None]) -> None:
        """Handle messages until DRAIN; ``on_reload`` gets each ReloadStep."""
        self._receiver, self._on_reload = receiver, on_reload
        self.channel.setblocking(False)
        self._begin(self.channel.fileno())
        await self._draining.wait()

    def _begin(self, descriptor: int) -> None:
        if self.channel.fileno() == descriptor:  # else it was closed meanwhile
            asyncio.get_running_loop().add_reader(descriptor, self._read, descriptor)

    def _read(self, descriptor: int) -> None:
        loop = asyncio.get_running_loop()
        with suppress(BlockingIOError):
            for _ in range(MAX_BATCH):
                if exceeds_share_now(_FULL_SHARE) and self._receiver.make_room():
                    loop.remove_reader(descriptor)
                    loop.call_later(_ROOM_DELAY, self._begin, descriptor)
                    return
                message = receive(self.channel)
                if message is not None:
                    self._handle(*message)
                    continue
                loop.remove_reader(descriptor)
                if not self._draining.is_set():
                    _log.error("the supervisor has died: this worker drains and stops")
                    self._draining.set()
                return

    def _handle(self, kind: int, _: str, descriptor: int) -> None:
        if kind == ToWorker.STOPPING:
            self._receiver.begin_draining()
        elif kind == ToWorker.DRAIN:
            self._draining.set()
        elif kind in (ToWorker.PREPARE, ToWorker.COMMIT, ToWorker.ABORT):
            if not self._draining.is_set():
                self._on_reload(kind)
        else:
            self.send(FromWorker.RECEIVED)
            if descriptor >= 0:
                self._receiver.take(socket.socket(fileno=descriptor))
            else:
                self.count_closed()
                _log.error("a client connection was dropped: too many open files")
