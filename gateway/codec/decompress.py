"""Undoes the content codings gzip and deflate, piece by piece."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

from gateway.errors import ErrorKind, GatewayError, bad_request
from gateway.sizes import CONVERT_CHUNK

if TYPE_CHECKING:
    from zlib import _Decompress

FREE_OUTPUT_BYTES = 1024 * 1024
"""Bytes that may come of a body, however small that is: a tensor of zeros is no attack."""

FREE_MEMBERS = 256
"""Members that a gzip body may have, however small they are."""
MIN_MEMBER_BYTES = 1024
"""Bytes that each further member stands for on average, compressed and decoded bytes added up.

To begin a member costs as much CPU as to decode 1 KiB. The blocks of bgzip hold 64 KiB each.
"""
MAX_MEMBERS_PER_STEP = 64
"""Members that are decoded at a time, at most: about 0.2 ms of work where they are empty."""

_WINDOW = 16 * 1024
"""Bytes that are looked at, at a time."""

_STATE = 48 * 1024
"""Bytes that zlib holds of an open stream: its window of 32 KiB, and its tables."""

_GZIP_MAGIC = b"\x1f\x8b"
_GZIP, _ZLIB, _RAW_DEFLATE = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS
"""How zlib is told what is around the compressed data."""


class Decompressor:
    """Decodes a body of which it is fed chunks, and which is ``gzip`` or ``deflate``.

    Of gzip, members may follow each other (RFC 1952, section 2.2), many if they are not tiny;
    deflate is in the zlib format (RFC 9110, section 8.4.1.2) or, as some clients send it, without.
    What comes of it is at most ``most`` times as large as what has come so far, once it is more
    than ``FREE_OUTPUT_BYTES``.

    The body is looked at in windows that are counted from its start. So how it is split does not
    matter to what is refused, and neither to when.
    """

    def __init__(self, coding: str, max_ratio: int) -> None:
        self.consumed = 0
        """Bytes that were decoded."""
        self.produced = 0
        """Bytes that came of them."""
        self.last = False
        """Whether all of the body has been fed."""
        self._coding = coding
        self._max_ratio = max_ratio
        self._input = bytearray()
        self._window = b""
        self._stream: _Decompress | None = None
        self._stream_count = 0
        self._has_more_output = False

    @property
    def held(self) -> int:
        """Give the bytes that wait to be decoded, and those of zlib's own state."""
        state = 0 if self._stream is None else _STATE
        return len(self._input) + len(self._window) + state

    def feed(self, data: bytes | memoryview, *, last: bool = False) -> None:
        """Take what came next of the body; ``last`` says that it ends there."""
        self._input += data
        self.last = last

    def work(self) -> bytes | None:
        """Decode some of what is there: a piece at most, maybe nothing; None where no more is.

        Raises GatewayError: 400 for what is not of the coding, cut short, followed by something
        else or made of tiny members, 413 for what grows too much.
        """
        if not self._has_more_output and not self._fill_window():
            return None
        pieces = [self._decode(CONVERT_CHUNK)]
        room = CONVERT_CHUNK - len(pieces[0])
        # Tiny members go together: each call costs a turn of the event loop.
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
        """Decode what is looked at up to a member's end, to ``room`` bytes at most."""
        stream = self._stream or self._open_stream()
        try:
            piece = stream.decompress(self._window, room)
        except zlib.error as error:
            why = str(error).rpartition(": ")[2]
            raise bad_request(f"the request's body is not valid {self._coding}: {why}") from None
        rest = stream.unused_data if stream.eof else stream.unconsumed_tail
        self.consumed += len(self._window) - len(rest)
        self.produced += len(piece)
        self._window = rest
        self._stream = None if stream.eof else stream
        # The decoder may have seen more than there was room for.
        self._has_more_output = len(piece) == room and not stream.eof
        self._check_growth()
        return piece

    def _fill_window(self) -> bool:
        """Get something to decode, if it has come; raises GatewayError (400) at an early end."""
        least = 1 if self._stream else len(_GZIP_MAGIC)
        if len(self._window) < least and (self.last or len(self._input) >= _WINDOW):
            self._window += self._input[:_WINDOW]
            del self._input[:_WINDOW]
        if len(self._window) >= least:
            return True
        if self.last and not self._window and (self._stream or not self._stream_count):
            raise bad_request(f"the request's body ends before its {self._coding} data does")
        return self.last and bool(self._window)

    def _open_stream(self) -> _Decompress:
        is_gzip = self._coding == "gzip"
        if self._stream_count and not (is_gzip and self._window.startswith(_GZIP_MAGIC)):
            raise bad_request(f"the request's body goes on after its {self._coding} data")
        self._stream_count += 1
        self._check_members()
        if is_gzip:
            return zlib.decompressobj(_GZIP)
        # RFC 1950, section 2.2: so the zlib format begins, and bare deflate as good as never.
        is_zlib = self._window[0] & 0x0F == zlib.DEFLATED
        return zlib.decompressobj(_ZLIB if is_zlib else _RAW_DEFLATE)

    def _check_members(self) -> None:
        size = self.consumed + self.produced
        if self._stream_count > FREE_MEMBERS + size // MIN_MEMBER_BYTES:
            raise bad_request(
                f"the request's gzip body has too many tiny members: {self._stream_count} in {size} "
                f"bytes, compressed and decoded; at most {FREE_MEMBERS} are taken, and one more "
                f"for each {MIN_MEMBER_BYTES} bytes"
            )

    def _check_growth(self) -> None:
        if self.produced > max(FREE_OUTPUT_BYTES, self._max_ratio * self.consumed):
            raise GatewayError(
                ErrorKind.TOO_LARGE,
                f"the request's {self._coding} body grows to more than {self._max_ratio} times "
                "its size (limits.max_decompression_ratio)",
            )
