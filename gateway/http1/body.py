"""Decodes the bodies of HTTP/1.1 messages: RFC 9112, sections 6 and 7."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import Final

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from gateway.http1.head import MalformedError

_MIN_OVERHEAD: Final = 64 * 1024
"""Bytes of chunk sizes, extensions and trailers that every chunked body may have."""
_MAX_OVERHEAD_RATIO: Final = 16
"""Bytes of them that a chunked body may have for each of its data bytes."""

_PARSE_SIZE: Final = 16 * 1024
"""Bytes for one call of the parser."""
_MAX_PIECES: Final = 2048
"""A call of ``feed`` stops after so many pieces, and those of one parser call: about 1 ms."""

_MAX_EMPTY_LINES: Final = 64
"""Bytes of empty lines after a body that are dropped with it; HeadReader drops any others."""

_LINE_END: Final = b"\r\n"
_EMPTY_LINE: Final = b"\r\n\r\n"
_CHUNKED_REQUEST: Final = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"


class BodyDecoder(ABC):
    """Separates a body from the bytes after it."""

    ended: bool = False
    """Whether the whole body has been decoded."""
    rest: bytes | memoryview = b""
    """The unconsumed bytes: those after the body, or those that were too many for one call."""

    @abstractmethod
    def feed(self, data: bytes | memoryview) -> bytes | memoryview:
        """Decode received data into bytes of the body, and set ``rest``; raises MalformedError."""


class LengthDecoder(BodyDecoder):
    """Decodes a body of ``length`` bytes."""

    def __init__(self, length: int) -> None:
        self._remaining = length
        self.ended = not length

    def feed(self, data: bytes | memoryview) -> bytes | memoryview:
        """Return the bytes that belong to the body."""
        remaining = self._remaining
        if len(data) > remaining:
            data, self.rest = data[:remaining], data[remaining:]
        self._remaining = remaining - len(data)
        self.ended = not self._remaining
        return data


class UntilCloseDecoder(BodyDecoder):
    """Decodes a body that ends when its sender closes the connection."""

    def feed(self, data: bytes | memoryview) -> bytes | memoryview:
        """Return all of the data."""
        return data


_SIZE_LINE: Final = re.compile(rb"([0-9a-fA-F]{1,8})\r\n(?:\r\n)?")
"""The size of a chunk; behind that of the last one is the end of the body, without trailers."""
_BEGUN_SIZE_LINE: Final = re.compile(rb"[0-9a-fA-F]{0,8}\r?|0{1,8}\r\n\r?")
_MAX_SIZE_LINE: Final = 12
_MIN_LARGE: Final = 1024
"""Bytes of the smallest large chunk."""
_MAX_SMALL: Final = 16
"""Smaller chunks of a body that are cut out as large ones are: for many, the parser is faster."""


class ChunkedDecoder(BodyDecoder):
    """Decodes a chunked body; it drops extensions and trailers.

    Large chunks are not copied. Where many are small, or a line is more than a size, a parser takes
    over.
    """

    def __init__(self) -> None:
        self._parsed = _ParsedBody()
        self._overhead_left = _MIN_OVERHEAD
        self._tail = b""
        self._parser: HttpRequestParser | None = None
        self._line = b""
        """The start of a size line."""
        self._left = 0
        """Bytes of a chunk, with the end of its line, that are still to come."""
        self._small = 0
        """The number of small chunks."""

    def feed(self, data: bytes | memoryview) -> bytes | memoryview:
        """Decode received data; raises MalformedError.

        Tiny chunks cost far more time per byte, so one call may leave some of them in ``rest``.
        """
        data = memoryview(data)
        begin = 0
        found = self._parsed
        while begin < len(data) and len(found.pieces) < _MAX_PIECES and not self.ended:
            if self._parser is not None:
                begin += self._take(bytes(data[begin : begin + _PARSE_SIZE]))
            elif self._left:
                begin += self._cut_out(data[begin : begin + self._left])
            else:
                begin += self._read_size(bytes(data[begin : begin + _MAX_SIZE_LINE]))
        body = found.pieces[0] if len(found.pieces) == 1 else b"".join(found.pieces)
        found.pieces = []
        self._overhead_left -= begin - (1 + _MAX_OVERHEAD_RATIO) * len(body)
        if self._overhead_left < 0 and not self.ended:
            raise MalformedError("more bytes of chunk framing than of data")
        if self.ended:
            # Before a message, empty lines are ignored (RFC 9112, section 2.2).
            after = bytes(data[begin : begin + _MAX_EMPTY_LINES])
            begin += len(after) - len(after.lstrip(b"\r\n"))
        self.rest = data[begin:] or b""  # an empty view would pin its slab
        return body

    def _cut_out(self, data: memoryview) -> int:
        """Take data of a chunk, or the end of its line; return how many bytes."""
        left = self._left - len(_LINE_END)
        if left > 0:
            piece = data[:left]
            self._parsed.pieces.append(piece)
        else:
            piece = data
            if not _LINE_END.startswith(bytes(data), -left):
                raise MalformedError("a chunk is longer than its size")
        self._left -= len(piece)
        return len(piece)

    def _read_size(self, data: bytes) -> int:
        """Read the line before a chunk; return how many bytes of the data belong to it."""
        text = self._line + data
        found = _SIZE_LINE.match(text)
        size = 0 if found is None else int(found[1], 16)
        is_end = found is not None and not size and found[0].endswith(_EMPTY_LINE)
        self._small += 0 < size < _MIN_LARGE
        if found is not None and size and self._small <= _MAX_SMALL:
            self._left = size + len(_LINE_END)
            used = len(found[1]) + len(_LINE_END) - len(self._line)
        elif found is not None and is_end:
            self.ended = True
            used = found.end() - len(self._line)
        elif _BEGUN_SIZE_LINE.fullmatch(text):
            self._line = text
            return len(data)
        else:
            self._begin_parser()
            used = 0
        self._line = b""
        return used

    def _begin_parser(self) -> None:
        # It accepts chunks only after a head with this Transfer-Encoding.
        self._parser = HttpRequestParser(self._parsed)
        self._parser.feed_data(_CHUNKED_REQUEST)
        if self._line:
            self._take(self._line)

    def _take(self, data: bytes) -> int:
        """Parse data up to the end of the body; return the number of bytes parsed.

        The body ends with an empty line. The parser does not say where, and would parse beyond it.
        So each call of the parser ends at an empty line, or at the end of the data.
        """
        text = self._tail + data
        before = len(self._tail)
        self._tail = text[1 - len(_EMPTY_LINE) :]
        begin = end = 0
        while begin < len(data) and not self.ended:
            found = text.find(_EMPTY_LINE, end)
            end = len(text) if found < 0 else found + len(_EMPTY_LINE)
            self._parse(data[begin : end - before])
            begin = end - before
        return begin

    def _parse(self, data: bytes) -> None:
        assert self._parser is not None
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            raise MalformedError(str(error)) from None
        self.ended = self._parsed.ended


class _ParsedBody:
    """The callbacks and results of the parser; it holds no reference back to the parser."""

    def __init__(self) -> None:
        self.pieces: list[bytes | memoryview] = []
        self.ended = False

    def on_body(self, piece: bytes) -> None:
        """Collect a piece of the body."""
        self.pieces.append(piece)

    def on_message_complete(self) -> None:
        """Note the end of the body."""
        self.ended = True


def frame_chunk(data: bytes | memoryview) -> tuple[bytes, bytes | memoryview, bytes]:
    """Return the three parts of a chunk; the data must not be empty."""
    return b"%x\r\n" % len(data), data, b"\r\n"


LAST_CHUNK: Final = b"0\r\n\r\n"
