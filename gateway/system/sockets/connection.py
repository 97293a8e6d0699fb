"""One end of a connection, with backpressure in both directions."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import struct
import sys
import termios
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, cast

from gateway.system.buffers import (
    MAX_PROGRESS,
    MAX_WINDOW,
    NOTHING_RESERVED,
    BodyProgress,
    BufferAccount,
    BufferShare,
    ReservedBytes,
)
from gateway.system.hangups import HangupWatch
from gateway.system.read_buffer import READ_BUFFER
from gateway.system.time_slices import time_slice_queue

MAX_READ_AHEAD: Final = 64 * 1024
"""Bytes read ahead of their message; more of them pause reading. One read may exceed it."""

_DEFERRED: Final = "deferred"
"""The pauser of ``defer_next_read``."""
_DROPPING: Final = "dropping"
"""The pauser of ``defer_next_drop``."""

MAX_COALESCED_WRITE: Final = 64 * 1024
"""Bytes at most that are copied in order to send them in one write."""

_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)
"""SO_LINGER on, with 0 seconds: closing the socket resets the connection."""


class ReadFlow:
    """Pauses and resumes reading for several pausers: it is paused while one of them is left.

    With ``hangups`` it notices a peer that closes during a pause, and aborts the connection.
    """

    def __init__(self, transport: asyncio.Transport, hangups: HangupWatch | None = None) -> None:
        self._transport = transport
        self._hangups = hangups
        self._descriptor = -1
        self._pausers: set[object] = set()
        self._closed = False

    @property
    def paused(self) -> bool:
        """Whether reading is paused."""
        return bool(self._pausers)

    def pause(self, pauser: object, is_short: bool = False) -> None:
        """Read nothing until this pauser, and all others, have resumed.

        During a short pause, a few milliseconds, nobody needs to notice that the peer closes.
        """
        if self._closed:
            return
        if not self._pausers and not self._transport.is_closing():
            self._transport.pause_reading()
        self._pausers.add(pauser)
        if not is_short and self._descriptor < 0:
            self._watch_hangup()

    def close(self) -> None:
        """Drop all pausers: nothing more is read, and streams among them would form cycles."""
        self._closed = True
        self._pausers.clear()
        self._unwatch_hangup()

    def resume(self, pauser: object) -> None:
        """Resume reading, unless there is another pauser."""
        if pauser in self._pausers:
            self._pausers.remove(pauser)
            if not self._pausers:
                self._unwatch_hangup()
                if not self._transport.is_closing():
                    self._transport.resume_reading()

    def _watch_hangup(self) -> None:
        if self._hangups is None or self._transport.is_closing():
            return
        self._descriptor = self._transport.get_extra_info("socket").fileno()
        self._hangups.watch(self._descriptor, self._on_hangup)

    def _unwatch_hangup(self) -> None:
        if self._hangups is not None and self._descriptor >= 0:
            self._hangups.unwatch(self._descriptor, self._on_hangup)
            self._descriptor = -1

    def _on_hangup(self) -> None:
        self._transport.abort()


class UnsentOutput:
    """What waits for a client that has not read what was written before; see ``Body``."""

    def __init__(self, connection: Connection, progress: BodyProgress) -> None:
        self._connection = connection
        self._progress = progress
        self._unread = connection.unread_bytes()
        progress.begin_wait(time.monotonic())

    @property
    def progress(self) -> BodyProgress:
        """Return how fast the client reads."""
        unread = self._connection.unread_bytes()
        if unread < self._unread:
            # Over HTTP/2 all responses that wait take room, each for its share of what is read.
            needed = self.reserved.progress * max(1, len(self._connection.buffers.bodies))
            self._progress.receive(self._unread - unread, min(needed, MAX_PROGRESS))
            self._progress.begin_wait(time.monotonic())
        self._unread = unread
        return self._progress

    @property
    def reserved(self) -> ReservedBytes:
        """Return what the call of the response has reserved."""
        return self._connection.reserved

    def may_pause(self) -> bool:
        """Tell whether its client may pause: not with bytes to read."""
        return False

    def is_reading(self) -> bool:
        """Tell whether the client is the one to wait for; it is."""
        return True

    def fail_body(self, error: Exception) -> None:
        """Drop the connection."""
        self._connection.drop_unread()


def unread_data(transport: asyncio.Transport, exc: Exception | None) -> Iterator[bytes]:
    """Yield what the peer had sent before a write to it failed with ``exc``, within a bound.

    A peer may respond before it has read a whole request, and close (RFC 9112, section 9.6). The
    next write then fails, and the event loop reads nothing more: not even the response, which the
    kernel still has.
    """
    sock = transport.get_extra_info("socket")
    left = MAX_WINDOW if isinstance(exc, OSError) and sock is not None else 0
    while left > 0:
        try:
            data = os.read(sock.fileno(), min(left, MAX_READ_AHEAD))
        except OSError:
            return
        if not data:
            return
        left -= len(data)
        yield data


class Connection(asyncio.BufferedProtocol, ABC):
    """A connection with backpressure: reading pauses, and writers wait for the peer.

    ``buffers`` counts the bytes that it buffers. ``hangups`` notices a peer that closes while
    reading is paused.
    """

    transport: asyncio.Transport
    read_flow: ReadFlow

    def __init__(
        self, buffers: BufferAccount | None = None, hangups: HangupWatch | None = None
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self._time_slices = time_slice_queue()
        self.buffers = BufferShare(buffers or BufferAccount())
        self._hangups = hangups
        self._offered_size = 0
        self._counted_unsent = 0
        self._head_size = 0
        self.closed = False
        self._writable = True
        self._drain_waiter: asyncio.Future[None] | None = None
        self._unsent_output: UnsentOutput | None = None
        self._output_progress: BodyProgress | None = None
        self._write_buffer = b""
        self._read_ahead: bytes | memoryview = b""
        """Bytes that were read before they could be processed."""

    @property
    def reserved(self) -> ReservedBytes:
        """Return what the call has reserved whose response is written."""
        return NOTHING_RESERVED

    @property
    def write_blocked(self) -> bool:
        """Whether a writer must wait in ``drain``, or the connection is closed."""
        return self.closed or not self._writable

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start with this transport."""
        self.transport = cast("asyncio.Transport", transport)
        self.read_flow = ReadFlow(self.transport, self._hangups)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the memory for the next read."""
        space = READ_BUFFER.prepare()
        most = self.buffers.account.read_size
        if most < MAX_WINDOW:
            space = space[:most]
        self._offered_size = len(space)
        return space

    def buffer_updated(self, nbytes: int) -> None:
        """Process the bytes that were read."""
        data = READ_BUFFER.commit(nbytes)
        more_follows = nbytes == self._offered_size
        self.data_received(data)
        if more_follows:
            self.defer_next_read()

    @abstractmethod
    def data_received(self, data: bytes | memoryview) -> None:
        """Process bytes from the peer."""

    def defer_next_read(self) -> None:
        """Read nothing more in this iteration of the event loop.

        If a read fills its buffer, libuv reads again, up to 32 times in a row.
        """
        self.read_flow.pause(_DEFERRED, is_short=True)
        self.loop.call_soon(self.read_flow.resume, _DEFERRED)

    def defer_next_drop(self) -> None:
        """Read what the peer still sends, and nobody wants, in time slices.

        All such connections together read once in an iteration of the event loop.
        """
        self.read_flow.pause(_DROPPING, is_short=True)
        self.await_time_slice(partial(self.read_flow.resume, _DROPPING))

    def await_time_slice(self, step: Callable[[], None]) -> None:
        """Take this step in the next time slice that the connection's client gets."""
        self._time_slices.add(step, self.buffers.client)

    def close_output(self) -> bool:
        """Close the sending side alone once all is sent; False if the connection is gone."""
        try:
            self.transport.write_eof()
        except Exception as error:
            self.transport.abort()
            # uvloop raises RuntimeError if its handle is closed.
            if not isinstance(error, (OSError, RuntimeError)):
                raise
            return False
        return True

    def buffer_read_ahead(self, data: bytes | memoryview) -> None:
        """Buffer data that cannot be processed yet; pause reading if it is too much."""
        if self._read_ahead:
            data = b"".join((self._read_ahead, data))
        if len(data) <= MAX_READ_AHEAD:
            data = bytes(data)  # so that it does not pin a slab
        self._set_read_ahead(data)
        if self._is_read_ahead_full():
            self.read_flow.pause(self)

    def _is_read_ahead_full(self) -> bool:
        """Whether reading must pause; if no memory is left, one byte is enough."""
        size = len(self._read_ahead)
        return size > MAX_READ_AHEAD or (size > 0 and self.buffers.account.free < 0)

    def _set_read_ahead(self, data: bytes | memoryview) -> None:
        self.buffers.change(len(data) - len(self._read_ahead))
        self._read_ahead = data

    def defer_read_ahead(self, data: bytes | memoryview) -> None:
        """Buffer data, and process it in the next time slice."""
        self.buffer_read_ahead(data)
        self.await_time_slice(self.process_read_ahead)

    def process_read_ahead(self) -> None:
        """Process the buffered data as if it came now."""
        kept = self._read_ahead
        self._set_read_ahead(b"")
        if kept:
            self.data_received(kept)
        self._resume_reading()

    def _resume_reading(self) -> None:
        """Resume reading, unless too much is buffered again."""
        if not self._is_read_ahead_full():
            self.read_flow.resume(self)

    def discard_read_ahead(self) -> None:
        """Drop the buffered data."""
        self._set_read_ahead(b"")
        self.read_flow.resume(self)

    def receive_rest(self, exc: Exception | None) -> None:
        """Process what the peer had sent before a write to it failed with ``exc``.

        Over TLS, TlsTransport has done this.
        """
        if self.transport.get_extra_info("ssl_object") is None:
            for data in unread_data(self.transport, exc):
                self.data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Release waiting writers, and stop counting."""
        self.closed = True
        if hasattr(self, "read_flow"):  # else connection_made has failed
            self.read_flow.close()
        self._count_head(0)
        self.resume_writing()

    def pause_writing(self) -> None:
        """Make writers wait; count the unsent bytes until they resume."""
        self._writable = False
        self._count_unsent(self.transport.get_write_buffer_size())
        if self.buffers.stall_error is not None and self._unsent_output is None:
            self._output_progress = self._output_progress or BodyProgress()
            self._unsent_output = UnsentOutput(self, self._output_progress)
            self.buffers.open_stream(self._unsent_output, self._counted_unsent)

    @property
    def output_progress(self) -> BodyProgress | None:
        """Return how fast the peer reads while it has yet to take what was written; else None."""
        output = self._unsent_output
        return None if output is None else output.progress

    def unread_bytes(self) -> int:
        """Return the bytes that the peer's host has not got of what was written."""
        unsent = self.transport.get_write_buffer_size()
        sock = self.transport.get_extra_info("socket")
        try:
            queued = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4))
        except (AttributeError, OSError, ValueError):
            return unsent  # the socket is closed, or counts nothing
        return unsent + int.from_bytes(queued, sys.byteorder)

    def drop_unread(self) -> None:
        """Drop the connection, as its client does not read, and others need the room."""
        self._close_unsent_output()
        self._write_buffer = b""
        self._abort_with_reset()

    def _close_unsent_output(self) -> None:
        output, self._unsent_output = self._unsent_output, None
        if output is not None and self._output_progress is not None:
            self._output_progress.receive(MAX_PROGRESS)  # or else the connection is over
            self.buffers.close_stream(output)

    def _count_head(self, size: int) -> None:
        """Count a partial head, or the large head of a call in progress."""
        self.buffers.change(size - self._head_size)
        self._head_size = size

    def _count_unsent(self, size: int) -> None:
        self.buffers.change(size - self._counted_unsent)
        self._counted_unsent = size

    def resume_writing(self) -> None:
        """Release waiting writers."""
        self._writable = True
        self._count_unsent(0)
        self._close_unsent_output()
        if self._drain_waiter is not None and not self._drain_waiter.done():
            self._drain_waiter.set_result(None)

    def buffer_write(self, data: bytes) -> None:
        """Write small data together with the next write, at the latest in the next iteration."""
        if not self._write_buffer:
            self.loop.call_soon(self.flush)
        self._write_buffer += data
        if len(self._write_buffer) > MAX_COALESCED_WRITE:
            self.flush()

    def write(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Write the buffered data and these pieces in one system call."""
        if self._write_buffer:
            pieces = (self._write_buffer, *pieces)
            self._write_buffer = b""
        size = 0
        for piece in pieces:  # compiled, a fifth of the time of sum(map())
            size += len(piece)
        if size <= MAX_COALESCED_WRITE:
            self.transport.write(b"".join(pieces))
        else:
            self.transport.writelines(pieces)
        if not self._writable:  # as heads and the ends of bodies do not wait for the peer
            self._count_unsent(self.transport.get_write_buffer_size())

    def flush(self) -> None:
        """Write the buffered data."""
        if self._write_buffer and not self.transport.is_closing():
            self.write(())

    def take_back_write(self, start: bytes) -> bool:
        """Drop the buffered data if they begin with ``start``; return whether they did."""
        if not start or not self._write_buffer.startswith(start):
            return False
        self._write_buffer = b""
        return True

    def reset(self) -> None:
        """Reset the connection: for HTTP/1.0 a plain close would look like the end of a body."""
        self._write_buffer = b""
        if not self.transport.is_closing():
            self._abort_with_reset()

    def _abort_with_reset(self) -> None:
        """Reset the connection, even if it is already closing."""
        sock = self.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self.transport.abort()

    async def wait_until_sent(self) -> None:
        """Wait until the kernel has all that was written, so that its memory may change.

        Raises ConnectionResetError if the connection is closed.
        """
        self.flush()
        if self.transport.get_write_buffer_size():
            self.transport.set_write_buffer_limits(0)
            try:
                await self.drain()
            finally:
                if not self.transport.is_closing():  # uvloop raises RuntimeError once it is closed
                    self.transport.set_write_buffer_limits()

    async def drain(self) -> None:
        """Wait until the peer has read most of the written data; for one writer at a time.

        Raises ConnectionResetError if the connection is closed.
        """
        if not self._writable:
            self._drain_waiter = self.loop.create_future()
            await self._drain_waiter
        if self.closed:
            raise ConnectionResetError("the connection is closed")
