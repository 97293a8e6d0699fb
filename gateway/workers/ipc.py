"""The messages between the supervisor and its workers.

Each worker shares one Unix socket of type SOCK_SEQPACKET with the supervisor. A packet is one
message: the first byte is its kind, the rest is text. Descriptors travel with it (SCM_RIGHTS).
Either side sees the end of the stream when the other one is gone, whatever ended it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

from gateway.system.descriptors import exceeds_share_now

MAX_TEXT = 4000
"""Bytes of text in a message; longer text is cut."""

MAX_BATCH = 128
"""Messages that a worker handles in one time slice of its event loop. Open connections are served
before the next batch."""

_FULL_SHARE = 31 / 32
"""Above this share of open descriptors, a worker makes room before it receives more: those of a
message that finds none are lost, and new settings need some."""
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
    """With a descriptor: memory that holds new settings. Make all that they need, but do not use
    it yet. The worker replies RELOAD_DONE, as to COMMIT and ABORT."""
    COMMIT = 4
    """Use the settings that are prepared: each process has prepared them."""
    ABORT = 5
    """With a descriptor: memory that holds why newer settings are not used. Give back what is
    prepared, if anything is."""
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

ReloadStep = Literal[ToWorker.PREPARE, ToWorker.COMMIT, ToWorker.ABORT]


@dataclass(frozen=True, slots=True)
class ReloadMessage:
    """A step of a reload, as a worker receives it.

    ``error`` says why its document could not be received; the reply to it is that error.
    """

    step: ReloadStep
    document: bytes = b""
    error: str = ""


def send(channel: socket.socket, kind: IntEnum, text: str = "", descriptor: int = -1) -> None:
    """Send a message. Raises BlockingIOError if the channel is full, or another OSError."""
    message = bytes([kind]) + text.encode()[:MAX_TEXT]
    if descriptor < 0:
        channel.send(message)
    else:
        socket.send_fds(channel, [message], [descriptor])


def receive(channel: socket.socket) -> tuple[int, str] | None:
    """Return the kind and the text of the next message, or None at the end of the stream.

    Raises BlockingIOError if no message has come yet.
    """
    try:
        message = channel.recv(1 + MAX_TEXT)
    except ConnectionResetError:
        # Linux reports once that the peer left messages unread. Its own come after that.
        message = channel.recv(1 + MAX_TEXT)
    return (message[0], message[1:].decode(errors="replace")) if message else None


def receive_descriptor(channel: socket.socket) -> tuple[int, int] | None:
    """Return the kind and the descriptor of the next message, or None at the end of the stream.

    The descriptor is -1 if there is none, or if this process has too many open. Raises
    BlockingIOError if no message has come yet.
    """
    try:
        message, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
    except ConnectionResetError:  # as above
        message, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
    return (message[0], next(iter(descriptors), -1)) if message else None


def _no_room() -> bool:
    """Make no room."""
    return False


class WorkerChannel:
    """A worker's end of the socket that it shares with the supervisor.

    ``closed_connections`` is one number in shared memory, which the supervisor reads. ``slot`` is
    the number of the worker's position, from 0. The first one logs what all find out alike.
    """

    def __init__(
        self, channel: socket.socket, closed_connections: memoryview, slot: int = 0
    ) -> None:
        self.slot = slot
        self._channel = channel
        self._closed_connections = closed_connections
        self._draining = asyncio.Event()

    def send_ready(self) -> None:
        """Tell the supervisor that connections can come."""
        self._send(FromWorker.READY)

    def send_leaving(self) -> None:
        """Ask the supervisor for no more connections; it replies DRAIN behind the last one."""
        self._send(FromWorker.LEAVING)

    def send_reload_done(self, error: str) -> None:
        """Tell the supervisor that a step of a reload is done; a text says why it failed."""
        self._send(FromWorker.RELOAD_DONE, error)

    def send_dropped(self, calls: int) -> None:
        """Tell the supervisor how many calls were cut at the drain timeout."""
        self._send(FromWorker.DROPPED, str(calls))

    def count_closed(self) -> None:
        """Count a connection that is closed: the supervisor sees the load without a message."""
        self._closed_connections[0] += 1

    async def receive(
        self,
        on_connection: Callable[[socket.socket], None],
        on_reload: Callable[[ReloadMessage], None],
        on_stopping: Callable[[], None],
        make_room: Callable[[], bool] = _no_room,
    ) -> None:
        """Handle messages until DRAIN; ``on_connection`` gets each connection.

        Before descriptors run out, ``make_room`` closes other connections, and returns whether it
        has.
        """
        loop = asyncio.get_running_loop()
        self._channel.setblocking(False)
        descriptor = self._channel.fileno()

        def handle_messages() -> None:
            try:
                for _ in range(MAX_BATCH):
                    if exceeds_share_now(_FULL_SHARE) and make_room():
                        loop.remove_reader(descriptor)
                        loop.call_later(_ROOM_DELAY, begin)
                        return
                    if not self._handle_next(on_connection, on_reload, on_stopping):
                        end()
                        return
            except BlockingIOError:
                pass

        def end() -> None:
            loop.remove_reader(descriptor)
            if not self._draining.is_set():
                _log.error("the supervisor has died: this worker drains and stops")
                self._draining.set()

        def begin() -> None:
            if self._channel.fileno() == descriptor:  # else it was closed meanwhile
                loop.add_reader(descriptor, handle_messages)

        begin()
        await self._draining.wait()

    def _handle_next(
        self,
        on_connection: Callable[[socket.socket], None],
        on_reload: Callable[[ReloadMessage], None],
        on_stopping: Callable[[], None],
    ) -> bool:
        """Handle the next message; return false at the end of the stream.

        Raises BlockingIOError if no message has come yet.
        """
        received = receive_descriptor(self._channel)
        if received is None:
            return False
        kind, descriptor = received
        if kind == ToWorker.STOPPING:
            on_stopping()
        elif kind == ToWorker.DRAIN:
            self._draining.set()
        elif kind in (ToWorker.PREPARE, ToWorker.COMMIT, ToWorker.ABORT):
            message = _read_reload(kind, descriptor)
            if not self._draining.is_set():
                on_reload(message)
        else:
            self._accept(descriptor, on_connection)
        return True

    def _accept(self, descriptor: int, on_connection: Callable[[socket.socket], None]) -> None:
        self._send(FromWorker.RECEIVED)
        if descriptor < 0:
            self.count_closed()
            _log.error("a client connection was dropped: too many open files")
        else:
            on_connection(socket.socket(fileno=descriptor))

    def _send(self, kind: FromWorker, text: str = "") -> None:
        with suppress(OSError):  # the supervisor is gone, which is noticed when receiving
            send(self._channel, kind, text)


def _read_reload(kind: int, descriptor: int) -> ReloadMessage:
    """Read the document of a step of a reload, and close its descriptor."""
    if kind == ToWorker.COMMIT:
        return ReloadMessage(ToWorker.COMMIT)
    step: ReloadStep = ToWorker.PREPARE if kind == ToWorker.PREPARE else ToWorker.ABORT
    if descriptor < 0:
        _log.error("the new settings were not received: too many open files")
        return ReloadMessage(step, error="too many open files")
    try:
        # All workers share the position in this file, so none of them may use it.
        return ReloadMessage(step, os.pread(descriptor, os.fstat(descriptor).st_size, 0))
    except (OSError, MemoryError) as error:
        _log.error("the new settings could not be read: %s", error)
        return ReloadMessage(step, error=f"the new settings could not be read: {error}")
    finally:
        os.close(descriptor)
