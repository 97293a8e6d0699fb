"""Decompresses gzip and deflate bodies piece by piece."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gateway.errors import GatewayError
from gateway.protocol.error_vocabulary import REQUEST, ErrorVocabulary
from gateway.sizes import CONVERT_CHUNK

if TYPE_CHECKING:
    from zlib import _Decompress

FREE_OUTPUT_BYTES = 1024 * 1024
"""Output that any body may have, however small it is: a tensor of zeros is no attack."""

FREE_MEMBERS = 256
"""Members that any gzip body may have, however small they are."""
MIN_MEMBER_BYTES = 1024
"""For each further member, a body must have this size, compressed and decompressed together.

To open a member costs as much CPU as to decompress 1 KiB. The blocks of bgzip hold 64 KiB each.
"""
MAX_MEMBERS_PER_STEP = 64
"""The most members decompressed in one step: about 0.2 ms if they are empty."""

_WINDOW = 16 * 1024
"""Compressed bytes that one step reads."""

_STATE = 48 * 1024
"""Memory of zlib for an open stream: its window of 32 KiB, and its tables."""

_GZIP_MAGIC = b"\x1f\x8b"
_GZIP, _ZLIB, _RAW_DEFLATE = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS
"""The formats of a stream as zlib's ``wbits``."""


@dataclass(slots=True)
class Decompressor:
    """Decompresses a body of content coding ``gzip`` or ``deflate`` that arrives in chunks.

    A gzip body may have several members (RFC 1952, section 2.2). Deflate is the zlib format (RFC
    9110, section 8.4.1.2); some clients send raw deflate, which is accepted too.

    Beyond ``FREE_OUTPUT_BYTES``, the output may be at most ``max_ratio`` times as large as the
    input so far.

    The input is read in windows counted from its start. So errors do not depend on how the body was
    split. They are those of ``words``, and name it by ``body``.
    """

    coding: str
    max_ratio: int
    words: ErrorVocabulary = REQUEST
    body: str = "the request's body"
    consumed: int = field(default=0, init=False)
    """Compressed bytes read so far."""
    produced: int = field(default=0, init=False)
    """Decompressed bytes so far."""
    last: bool = field(default=False, init=False)
    """Whether the whole body was fed."""
    _input: bytearray = field(default_factory=bytearray, init=False)
    _window: bytes = field(default=b"", init=False)
    _stream: _Decompress | None = field(default=None, init=False)
    _stream_count: int = field(default=0, init=False)
    _has_more_output: bool = field(default=False, init=False)

    @property
    def buffered_bytes(self) -> int:
        """Return the bytes that wait to be decompressed, and zlib's own state."""
        state = 0 if self._stream is None else _STATE
        return len(self._input) + len(self._window) + state

    def feed(self, data: bytes | memoryview, *, last: bool = False) -> None:
        """Take the next compressed bytes; ``last`` marks the end of the body."""
        self._input += data
        self.last = last

    def step(self) -> bytes | None:
        """Decompress one piece, possibly an empty one; return None if more input is needed.

        Raises GatewayError: 400 for a body that is invalid, truncated, followed by other bytes or
        made of tiny members; 413 for one that exceeds the ratio; 502 for a response.
        """
        if not self._has_more_output and not self._fill_window():
            return None
        pieces = [self._decode(CONVERT_CHUNK)]
        room = CONVERT_CHUNK - len(pieces[0])
        # Join the output of tiny members, as each step costs a time slice of the event loop.
        while (
            self._stream is None
            and room
            and len(pieces) < MAX_MEMBERS_PER_STEP
            and self._fill_window()
        ):
            pieces.append(self._decode(room))
            room -= len(pieces[-1])
        return b"".join(pieces)

    def _decode(self, room: int) -> bytes:
        """Decompress up to ``room`` bytes of the window, up to the end of a member."""
        stream = self._stream or self._open_stream()
        try:
            piece = stream.decompress(self._window, room)
        except zlib.error as error:
            why = str(error).rpartition(": ")[2]
            raise self._malformed(f"is not valid {self.coding}: {why}") from None
        rest = stream.unused_data if stream.eof else stream.unconsumed_tail
        self.consumed += len(self._window) - len(rest)
        self.produced += len(piece)
        self._window = rest
        self._stream = None if stream.eof else stream
        # zlib may hold output for which there was no room.
        self._has_more_output = len(piece) == room and not stream.eof
        if self.produced > max(FREE_OUTPUT_BYTES, self.max_ratio * self.consumed):
            raise GatewayError(
                self.words.too_large,
                f"{self.body} is {self.coding}, and grows to more than {self.max_ratio} times "
                "its size (limits.max_decompression_ratio)",
            )
        return piece

    def _fill_window(self) -> bool:
        """Move input into the window; raises GatewayError (400) if the body ends too early."""
        least = 1 if self._stream else len(_GZIP_MAGIC)
        if len(self._window) < least and (self.last or len(self._input) >= _WINDOW):
            self._window += self._input[:_WINDOW]
            del self._input[:_WINDOW]
        if len(self._window) >= least:
            return True
        if self.last and not self._window and (self._stream or not self._stream_count):
            raise self._malformed(f"ends before its {self.coding} data does")
        return self.last and bool(self._window)

    def _open_stream(self) -> _Decompress:
        is_gzip = self.coding == "gzip"
        if self._stream_count and not (is_gzip and self._window.startswith(_GZIP_MAGIC)):
            raise self._malformed(f"has data after its {self.coding} data")
        self._stream_count += 1
        size = self.consumed + self.produced
        if self._stream_count > FREE_MEMBERS + size // MIN_MEMBER_BYTES:
            raise self._malformed(
                "has too many tiny members: "
                f"{self._stream_count} in {size} bytes, compressed and decompressed; "
                f"at most {FREE_MEMBERS} are taken, and one more for each {MIN_MEMBER_BYTES} bytes"
            )
        if is_gzip:
            return zlib.decompressobj(_GZIP)
        # RFC 1950, section 2.2: the zlib format begins so; raw deflate practically never does.
        is_zlib = self._window[0] & 0x0F == zlib.DEFLATED
        return zlib.decompressobj(_ZLIB if is_zlib else _RAW_DEFLATE)

    def _malformed(self, what: str) -> GatewayError:
        return self.words.malformed(f"{self.body} {what}")
