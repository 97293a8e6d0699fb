"""An HTTP/1.1 connection, client or server side: how bodies are written to it, and read from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

import numpy as np

from gateway.http1.body import LAST_CHUNK, frame_chunk
from gateway.system.buffers import MAX_WINDOW, NOTHING_RESERVED, BufferShare, ReservedBytes
from gateway.system.sockets.body_stream import BodyStream
from gateway.system.sockets.connection import Connection, ReadFlow

_SMALL_PIECE: Final = 4 * 1024
"""A piece of a body of at most so many bytes is written together with the next one."""

HEAD_COPIES: Final = 5
"""Copies of a head in memory during a call: in lines, joined, in names and values, and as sent."""


class Http1Body(BodyStream):
    """A body on a connection, whose reading pauses while too much of it is buffered."""

    def __init__(
        self,
        read_flow: ReadFlow,
        buffers: BufferShare,
        reserved: ReservedBytes = NOTHING_RESERVED,
        ended: bool = False,
    ) -> None:
        super().__init__(buffers, reserved, ended)
        self._read_flow = read_flow

    def is_reading(self) -> bool:
        """Tell whether the gateway reads what the client sends; see ``Body``."""
        return not self._read_flow.paused

    def _on_full(self) -> None:
        self._read_flow.pause(self)

    def _on_read(self, size: int) -> None:
        if self.buffered_size <= self._buffers.account.window // 2:
            self._read_flow.resume(self)

    def _on_discard(self) -> None:
        self._read_flow.resume(self)


_NOTHING: Final = memoryview(b"")


class BodyMemory(Protocol):
    """Memory that a body is received into; ``view`` is empty once that is over."""

    view: memoryview

    def count(self, size: int) -> None:
        """Count the bytes that it has of the body."""

    def drop(self) -> None:
        """Note that the body is not read any more."""


class BodyBuffer:
    """Memory for a body of ``size`` bytes, so that it can be taken in one piece, uncopied.

    ``reserve`` gets the bytes that have come; those still to come take no room. ``on_drop`` is
    called once, when the body is not read any more; who has a part of it keeps that.
    """

    def __init__(
        self, size: int, reserve: Callable[[int], None], on_drop: Callable[[], None]
    ) -> None:
        self.view = np.empty(size, np.uint8).data
        self._reserve = reserve
        self._on_drop = on_drop

    def count(self, size: int) -> None:
        """Count the bytes that it has of the body."""
        self._reserve(size)

    def drop(self) -> None:
        """Give the memory back."""
        if self.view:
            self.view = memoryview(b"")
            self._reserve(0)
            self._on_drop()


class PlacedBody(Http1Body):
    """A body that is received into one piece of memory: what is read are parts of that.

    The call ends before the memory is somebody else's.
    """

    def __init__(
        self,
        read_flow: ReadFlow,
        buffers: BufferShare,
        reserved: ReservedBytes,
        memory: BodyMemory,
    ) -> None:
        super().__init__(read_flow, buffers, reserved)
        self._memory = memory
        self._received = 0
        self._in_place = _NOTHING

    @property
    def space(self) -> memoryview:
        """Return the memory for what is still to come; empty if it may not be used any more."""
        return self._memory.view[self._received :]

    def receive(self, size: int) -> memoryview:
        """Return the first bytes of ``space``, which were read; ``feed`` does not copy them."""
        self._in_place = self._memory.view[self._received : self._received + size]
        return self._in_place

    def feed(self, data: bytes | memoryview, last: bool = False) -> None:
        """Add the next bytes; see BodyStream."""
        size, memory = len(data), self._memory.view
        if self._discarding or not size or not memory:
            return
        start = self._received
        self._received = end = start + size
        self._memory.count(end)
        if data is not self._in_place:
            memory[start:end] = data
        self._in_place = _NOTHING  # a view of the memory would keep it
        if self._pieces and len(self._pieces[-1]) + size <= MAX_WINDOW:
            start -= len(self._pieces.pop())  # a reader of larger ones would write them at once
        self._pieces.append(memory[start:end])
        self.progress.receive(size, self.reserved.progress)
        self._wake_reader()

    def peek(self) -> bytes | memoryview:
        """Return the memory of a complete body of which nothing was read."""
        return self._memory.view

    def _on_read(self, size: int) -> None:
        if self.ended and not self._pieces:
            self._memory.drop()

    def _drop(self) -> None:
        super()._drop()
        self._memory.drop()

    def _count(self, size: int) -> None:
        """Count nothing: the memory counts what it has."""


class Http1Connection(Connection):
    """A connection that carries one message after the other."""

    def write_body(self, data: bytes | memoryview, chunked: bool) -> None:
        """Write a piece of a body, which must not be empty; a small one is buffered."""
        pieces = frame_chunk(data) if chunked else (data,)
        if len(data) <= _SMALL_PIECE:
            self.buffer_write(b"".join(pieces))
        else:
            self.write(pieces)

    def end_body(self, chunked: bool) -> None:
        """Write the end of a body."""
        if chunked:
            self.buffer_write(LAST_CHUNK)
        self.flush()
