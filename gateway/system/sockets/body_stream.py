"""A body that arrives, whatever carries it."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Final

from gateway.sizes import CONVERT_CHUNK
from gateway.system.buffers import NOTHING_RESERVED, BodyProgress, BufferShare, ReservedBytes

_MIN_PIECE_COST: Final = 64
"""Bytes that each buffered piece counts at least: a piece of one byte takes as much memory."""
_SMALL_PIECE: Final = 16 * 1024
_MAX_JOINED: Final = 64 * 1024 - _SMALL_PIECE
"""A small piece is joined to small ones before it of fewer bytes together: each piece is a step for
its reader, and often a frame to the other side. Frames of HTTP/2 have 16 KiB mostly."""

RelaySteps = tuple[Callable[[bytes | memoryview], bool | None], ...]
"""What each piece of a body passes as it arrives, without a task; False refuses it."""


class RelayedChunks(ABC):
    """The chunks of a body, which may be relayed instead of read."""

    @abstractmethod
    async def relay(self, steps: RelaySteps) -> None:
        """Let each chunk pass these steps as it arrives, until one is refused, which comes next.

        It returns at once where chunks can only be read.
        """


_running_loop: Final = asyncio.get_running_loop
_monotonic: Final = time.monotonic


class BodyStream:
    """Buffers the received part of a body for its one reader.

    It counts in ``buffers`` until it is read to its end, or discarded; one that has ``ended``
    already is empty. Its call has ``reserved``. Subclasses tell the peer how much it may send.
    """

    def __init__(
        self,
        buffers: BufferShare,
        reserved: ReservedBytes = NOTHING_RESERVED,
        ended: bool = False,
    ) -> None:
        self.reserved = reserved
        self.progress = BodyProgress()
        self.ended = ended
        """Whether all of the body was received."""
        self.trailers: tuple[tuple[bytes, bytes], ...] = ()
        """The trailers of the message, if it had any; HTTP/1.1 drops them."""
        self.buffered_size = 0
        """The bytes that wait to be read, as they are counted."""
        self._buffers = buffers
        self._pieces: deque[bytes | memoryview | bytearray] = deque()
        self._open = not ended
        self._discarding = False
        self._reader: asyncio.Future[None] | None = None
        self.read_bytes = 0
        """Bytes that were read."""
        self._error: Exception | None = None
        if not ended:
            buffers.open_stream(self)

    def feed(self, data: bytes | memoryview, last: bool = False) -> None:
        """Add the next bytes; ``last`` says that they are the last, and that ``end`` follows."""
        if self._discarding or not data:
            return
        pieces = self._pieces
        if pieces and len(data) <= _SMALL_PIECE and _takes_more(pieces[-1]):
            piece = pieces.pop()
            self._count(-max(len(piece), _MIN_PIECE_COST))
            joined = piece if isinstance(piece, bytearray) else bytearray(piece)
            joined += data
            pieces.append(joined)
        else:
            if len(data) <= _SMALL_PIECE and not isinstance(data, bytes):
                data = bytes(data)  # a small view would pin a large read buffer
            pieces.append(data)
        self._count(max(len(pieces[-1]), _MIN_PIECE_COST))
        self.progress.receive(len(data), self.reserved.progress)
        if not last and self.is_full:
            self._on_full()
        self._wake_reader()

    def end(self) -> None:
        """Mark the body as complete, unless it failed before."""
        if self._error is None:
            self.ended = True
            self._close_stream()
            self._wake_reader()

    def fail_body(self, error: Exception) -> None:
        """Raise this error in ``read``, after the bytes received before it."""
        if self._error is None and not self.ended:
            self._error = error
            self._close_stream()
            self._wake_reader()

    def may_pause(self) -> bool:
        """Tell whether its client may have nothing to say for a while; see ``Body``."""
        return False

    def is_reading(self) -> bool:
        """Tell whether the gateway reads what the client sends; see ``Body``."""
        return True

    @property
    def is_full(self) -> bool:
        """Whether nothing more should come until some of the body is read."""
        return self.buffered_size > self._buffers.account.window

    async def read(self) -> bytes | memoryview:
        """Return the next piece, empty at the end; raises the error given to ``fail_body``."""
        while not self._pieces:
            if self.ended:
                return b""
            if self._error is not None:
                raise self._error
            await self._begin_wait()
        return self._next_piece()

    async def relay(self, steps: RelaySteps) -> bytes | memoryview:
        """Let each piece pass these steps as it arrives; return the first one that is refused.

        Then ``read`` gives the rest. It is empty at the end, and where pieces can only be read.
        """
        return b""

    def _begin_wait(self) -> asyncio.Future[None]:
        self._on_wait()
        self._reader = _running_loop().create_future()
        self.progress.begin_wait(_monotonic())
        return self._reader

    def _next_piece(self) -> bytes | memoryview:
        piece = self._pieces.popleft()
        size = len(piece)
        self._count(-max(size, _MIN_PIECE_COST))
        self.read_bytes += size
        self._on_read(size)
        if not isinstance(piece, bytearray):
            return piece
        return bytes(piece) if size <= _SMALL_PIECE else memoryview(piece)

    def peek(self) -> bytes | memoryview:
        """Return all that was received of the body, which can still be read.

        A large piece is not copied; a view of a small one would pin a slab that is much larger.
        """
        pieces = self._pieces
        if len(pieces) == 1 and len(pieces[0]) > CONVERT_CHUNK:
            piece = pieces[0]
            return bytes(piece) if isinstance(piece, bytearray) else piece
        return b"".join(pieces)

    def start(self, size: int) -> bytes:
        """Return the first bytes of the first piece that was received, and is not read."""
        return bytes(self._pieces[0][:size]) if self._pieces else b""

    def take(self) -> bytes | memoryview:
        """Return all bytes of a body that has ended, instead of ``read``."""
        data = self.peek()
        self.discard()
        return data

    def discard(self) -> None:
        """Drop the buffered bytes, and those still to come."""
        self._drop()
        self._on_discard()

    def _drop(self) -> None:
        self._discarding = True
        self._close_stream()
        self._pieces.clear()
        self._count(-self.buffered_size)

    def _count(self, size: int) -> None:
        self.buffered_size += size
        self._buffers.change(size)

    def _close_stream(self) -> None:
        """Stop counting this body as a stream: no more bytes come."""
        if self._open:
            self._open = False
            self._buffers.close_stream(self)

    def _wake_reader(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            try:
                reader.set_result(None)
            except asyncio.InvalidStateError:
                return  # its task was cancelled

    def _on_full(self) -> None:
        """Let the peer send no more."""

    def _on_wait(self) -> None:
        """Handle that the reader waits for more."""

    def _on_read(self, size: int) -> None:
        """Handle that a piece of ``size`` bytes is read."""

    def _on_discard(self) -> None:
        """Let the peer send all the rest."""


def _takes_more(piece: bytes | memoryview | bytearray) -> bool:
    """Tell whether a small piece may be joined to this one; a large one was not copied."""
    size = len(piece)
    return size <= _SMALL_PIECE or (size <= _MAX_JOINED and isinstance(piece, bytearray))
