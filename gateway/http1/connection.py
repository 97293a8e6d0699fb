"""One end of an HTTP/1.1 connection: both directions with backpressure."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from abc import ABC, abstractmethod
from collections import deque
from typing import Any, cast

from gateway.http1.body import LAST_CHUNK, frame_chunk
from gateway.http1.read_buffer import READ_BUFFER
from gateway.system.buffers import MAX_WINDOW, BufferAccount
from gateway.system.hangups import HangupWatch

_LEAST_PIECE = 64
"""Bytes that a piece counts at least, as it takes as much memory even where it is one byte."""

MAX_READ_AHEAD = 64 * 1024
"""Bytes read before their turn that hold the sender back, if there are more; then a read on top."""

_TURN = "others have their turn"

_LITTLE = 4 * 1024
"""Bytes of a body that rather go out with the next ones, if those are at hand."""
MAX_COALESCED_WRITE = 64 * 1024
"""Bytes at most that are copied to go out with others in one write."""

HEAD_COPIES = 2
"""How often a head is there while its call is under way: as it is, and as it is sent."""

_NO_LINGERING = struct.pack("ii", 1, 0)
"""On, and 0 seconds: a connection that is closed is reset."""


class ReadFlow:
    """Whether a connection is read from: not while anybody holds the sender back.

    If ``hangups`` is given, a peer that closes meanwhile is noticed, and the connection dropped.
    """

    def __init__(self, transport: asyncio.Transport, hangups: HangupWatch | None = None) -> None:
        self._transport = transport
        self._hangups = hangups
        self._descriptor = -1
        self._holders: set[object] = set()
        self._closed = False

    @property
    def paused(self) -> bool:
        """Tell whether anybody holds the sender back."""
        return bool(self._holders)

    def hold(self, holder: object) -> None:
        """Read nothing until this holder, and all others, have released it."""
        if self._closed:
            return
        if not self._holders and not self._transport.is_closing():
            self._transport.pause_reading()
        self._holders.add(holder)
        if holder is not _TURN and self._descriptor < 0:
            self._watch()

    def close(self) -> None:
        """Forget the holders, as nothing more comes: a stream that holds refers to this as well."""
        self._closed = True
        self._holders.clear()
        self._unwatch()

    def release(self, holder: object) -> None:
        """Read on, unless another holds the sender back."""
        if holder in self._holders:
            self._holders.remove(holder)
            if not self._holders:
                self._unwatch()
                if not self._transport.is_closing():
                    self._transport.resume_reading()

    def _watch(self) -> None:
        if self._hangups is None or self._transport.is_closing():
            return
        self._descriptor = self._transport.get_extra_info("socket").fileno()
        self._hangups.watch(self._descriptor, self._peer_is_gone)

    def _unwatch(self) -> None:
        if self._hangups is not None and self._descriptor >= 0:
            self._hangups.unwatch(self._descriptor, self._peer_is_gone)
            self._descriptor = -1

    def _peer_is_gone(self) -> None:
        self._transport.abort()


class BodyStream:
    """What has come of a body and waits for its one reader.

    It counts in ``buffers`` until it was read to its end, or discarded.
    """

    def __init__(self, reading: ReadFlow, buffers: BufferAccount) -> None:
        self._reading = reading
        self._buffers = buffers
        self._open = True
        self._pieces: deque[bytes | memoryview] = deque()
        self._size = 0
        self._discarding = False
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self.ended = False
        """All of it has come."""
        buffers.open_stream()

    def feed(self, data: bytes | memoryview, last: bool = False) -> None:
        """Take the next bytes; ``last`` tells that there are no more, and ``end`` follows."""
        if self._discarding or not data:
            return
        self._pieces.append(data)
        self._count(max(len(data), _LEAST_PIECE))
        if self._size > self._buffers.window and not last:
            self._reading.hold(self)
        self._wake()

    def end(self) -> None:
        """Note that all of it has come, unless it broke off before."""
        if self._error is None:
            self.ended = True
            self._close()
            self._wake()

    def fail(self, error: Exception) -> None:
        """Let the reader have this error, once it has read what came before."""
        if self._error is None and not self.ended:
            self._error = error
            self._close()
            self._wake()

    async def read(self) -> bytes | memoryview:
        """Give the next piece, none at the end; raises the error that broke the body off."""
        while not self._pieces:
            if self.ended:
                return b""
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        piece = self._pieces.popleft()
        self._count(-max(len(piece), _LEAST_PIECE))
        if self._size <= self._buffers.window // 2:
            self._reading.release(self)
        return piece

    def discard(self) -> None:
        """Forget what waits and what still comes."""
        self._discarding = True
        self._close()
        self._pieces.clear()
        self._count(-self._size)
        self._reading.release(self)

    def _count(self, size: int) -> None:
        self._size += size
        self._buffers.change(size)

    def _close(self) -> None:
        """Note that no more comes."""
        if self._open:
            self._open = False
            self._buffers.close_stream()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Connection(asyncio.BufferedProtocol, ABC):
    """A connection that writes as fast as the other end reads.

    ``buffers`` counts what it buffers. A peer that closes while nothing is read is noticed by
    ``hangups``, if given.
    """

    transport: asyncio.Transport
    read_flow: ReadFlow

    def __init__(
        self, buffers: BufferAccount | None = None, hangups: HangupWatch | None = None
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.buffers = buffers or BufferAccount()
        self._hangups = hangups
        self._offered = 0
        self._unsent = 0
        self._head_size = 0
        self.closed = False
        self._writable = True
        self._drained: asyncio.Future[None] | None = None
        self._begun = b""
        self._read_ahead: bytes | memoryview = b""
        """What was read and could not be taken yet."""

    @property
    def write_blocked(self) -> bool:
        """Tell whether a writer has to wait, or need not write any more."""
        return self.closed or not self._writable

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = cast("asyncio.Transport", transport)
        self.read_flow = ReadFlow(self.transport, self._hangups)
        if transport.get_extra_info("ssl_object") is not None:
            # Else a loop reads on where a reader is slow, and uvloop forgets what it then holds
            # when the other end closes.
            cast("Any", transport).set_read_buffer_limits(high=1, low=0)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Give the memory to read into."""
        space = READ_BUFFER.space()
        most = self.buffers.read_size
        if most < MAX_WINDOW:
            space = space[:most]
        self._offered = len(space)
        return space

    def buffer_updated(self, nbytes: int) -> None:
        """Take what was read."""
        data = READ_BUFFER.filled(nbytes)
        more_follows = nbytes == self._offered
        self.data_received(data)
        if more_follows:
            self.defer_next_read()

    @abstractmethod
    def data_received(self, data: bytes | memoryview) -> None:
        """Take what the other end sends."""

    def defer_next_read(self) -> None:
        """Read nothing more before others had their turn.

        libuv would, up to 32 times in a row, where a read fills what it is offered.
        """
        self.read_flow.hold(_TURN)
        self.loop.call_soon(self.read_flow.release, _TURN)

    def buffer_read_ahead(self, data: bytes | memoryview) -> None:
        """Keep, behind what is kept, what cannot be taken yet; much of it holds the sender back."""
        if self._read_ahead:
            data = b"".join((self._read_ahead, data))
        if len(data) <= MAX_READ_AHEAD:
            data = bytes(data)  # so that little does not keep much memory
        self._set_ahead(data)
        if self._is_much_kept():
            self.read_flow.hold(self)

    def _is_much_kept(self) -> bool:
        """Tell whether nothing more is to come; where no memory is left, anything is much."""
        size = len(self._read_ahead)
        return size > MAX_READ_AHEAD or (size > 0 and self.buffers.free < 0)

    def _set_ahead(self, data: bytes | memoryview) -> None:
        self.buffers.change(len(data) - len(self._read_ahead))
        self._read_ahead = data

    def defer_read_ahead(self, data: bytes | memoryview) -> None:
        """Keep what is too much at once, and take it when others have had their turn."""
        self.buffer_read_ahead(data)
        self.loop.call_soon(self.process_read_ahead)

    def process_read_ahead(self) -> None:
        """Take what was kept, as if it came now."""
        kept = self._read_ahead
        self._set_ahead(b"")
        if kept:
            self.data_received(kept)
        self._read_on()

    def _read_on(self) -> None:
        """Hold the sender back no more, unless much is kept again."""
        if not self._is_much_kept():
            self.read_flow.release(self)

    def discard_read_ahead(self) -> None:
        """Drop what was kept."""
        self._set_ahead(b"")
        self.read_flow.release(self)

    def is_clean_eof(self) -> bool:
        """Tell, at the end of what the other end sends, whether it is the other end's own doing.

        Over TLS, anybody on the way can end a connection, but only the other end can say that it
        does (RFC 8446, section 6.1); asyncio does not tell the two apart.
        """
        tls: ssl.SSLObject | None = self.transport.get_extra_info("ssl_object")
        if tls is None:
            return True
        try:
            return not tls.read(1)
        except ssl.SSLZeroReturnError:
            return True
        except ssl.SSLError:
            return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Let go whoever waits to write."""
        self.closed = True
        self.read_flow.close()
        self._count_head(0)
        self.resume_writing()

    def pause_writing(self) -> None:
        """Make writers wait; what waits to be sent counts until they go on."""
        self._writable = False
        self._count_unsent(self.transport.get_write_buffer_size())

    def _count_head(self, size: int) -> None:
        """Count what came of a head that is not whole, or a large one of a call under way."""
        self.buffers.change(size - self._head_size)
        self._head_size = size

    def _count_unsent(self, size: int) -> None:
        self.buffers.change(size - self._unsent)
        self._unsent = size

    def resume_writing(self) -> None:
        """Let writers go on."""
        self._writable = True
        self._count_unsent(0)
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def buffer_write(self, data: bytes) -> None:
        """Write little data together with what follows, or when nothing else is done."""
        if not self._begun:
            self.loop.call_soon(self.flush)
        self._begun += data
        if len(self._begun) > MAX_COALESCED_WRITE:
            self.flush()

    def write(self, *pieces: bytes | memoryview) -> None:
        """Write pieces behind what was begun, all in one call to the system."""
        if self._begun:
            pieces = (self._taken(), *pieces)
        if sum(map(len, pieces)) <= MAX_COALESCED_WRITE:
            self.transport.write(b"".join(pieces))
        else:
            self.transport.writelines(pieces)

    def write_body(self, data: bytes | memoryview, chunked: bool) -> None:
        """Write some of a body, one byte at least; little goes with what follows, if that comes."""
        pieces = frame_chunk(data) if chunked else (data,)
        if len(data) <= _LITTLE:
            self.buffer_write(b"".join(pieces))
        else:
            self.write(*pieces)

    def end_body(self, chunked: bool) -> None:
        """Write what is left of a body that ends here."""
        if chunked:
            self.buffer_write(LAST_CHUNK)
        self.flush()

    def flush(self) -> None:
        """Write what was begun."""
        if self._begun and not self.transport.is_closing():
            self.transport.write(self._taken())

    def _taken(self) -> bytes:
        begun, self._begun = self._begun, b""
        return begun

    def reset(self) -> None:
        """Drop the connection: a plain close would look like a body's end to HTTP/1.0."""
        self._begun = b""
        if not self.transport.is_closing():
            self._reset_now()

    def _reset_now(self) -> None:
        """Drop the connection, even one that is closed once all is sent."""
        sock = self.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGERING)
        self.transport.abort()

    async def drain(self) -> None:
        """Wait until the other end has read most of what was written; for one writer at a time.

        Raises ConnectionResetError where it never will.
        """
        if not self._writable:
            self._drained = self.loop.create_future()
            await self._drained
        if self.closed:
            raise ConnectionResetError("the connection is closed")
