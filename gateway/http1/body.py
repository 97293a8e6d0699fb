"""The bodies of HTTP/1.1 messages, cut out of what arrives: RFC 9112, sections 6 and 7."""

from __future__ import annotations

from abc import ABC, abstractmethod

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from gateway.http1.head import MalformedError

_FREE_OVERHEAD = 64 * 1024
"""Bytes of sizes, extensions and trailers that a chunked body may have in any case."""
_OVERHEAD = 16
"""Bytes of them that it may have for each byte of its own."""

_STRETCH = 16 * 1024
"""Bytes that the parser is given at once."""
_MOST_PIECES = 2048
"""Pieces that are taken at once, and those of a stretch more: about a millisecond's work."""

_FEW = 64
"""Bytes of empty lines behind a body that are dropped with it."""

_EMPTY_LINE = b"\r\n\r\n"
_CHUNKED_REQUEST = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"


class BodyDecoder(ABC):
    """Tells the body from what follows it."""

    ended: bool = False
    """The whole body was there."""
    rest: bytes | memoryview = b""
    """What was not taken: what came after the body's end; before that, what is too much at once."""

    @abstractmethod
    def feed(self, data: bytes | memoryview) -> bytes | memoryview:
        """Give the body's bytes in the data, but for the rest; raises MalformedError."""


class LengthDecoder(BodyDecoder):
    """A body of ``length`` bytes."""

    def __init__(self, length: int) -> None:
        self._missing = length
        self.ended = not length

    def feed(self, data: bytes | memoryview) -> bytes | memoryview:
        """Give the body's bytes in the data."""
        missing = self._missing
        if len(data) > missing:
            data, self.rest = data[:missing], data[missing:]
        self._missing = missing - len(data)
        self.ended = not self._missing
        return data


class UntilCloseDecoder(BodyDecoder):
    """A body that lasts until its sender closes."""

    def feed(self, data: bytes | memoryview) -> bytes | memoryview:
        """Give the data."""
        return data


class ChunkedDecoder(BodyDecoder):
    """A chunked body; extensions and trailers are dropped."""

    def __init__(self) -> None:
        self._found = _Found()
        self._overhead_left = _FREE_OVERHEAD
        self._tail = b""
        # The parser takes chunks only behind a head that announces them.
        self._parser = HttpRequestParser(self._found)
        self._parser.feed_data(_CHUNKED_REQUEST)

    def feed(self, data: bytes | memoryview) -> bytes | memoryview:
        """Give the body's bytes in the data, but for the rest; raises MalformedError.

        Tiny chunks take far longer than others for as many bytes, so that there may be a rest.
        """
        data = memoryview(data)
        begin = 0
        found = self._found
        while begin < len(data) and len(found.pieces) < _MOST_PIECES and not self.ended:
            begin += self._take(bytes(data[begin : begin + _STRETCH]))
        body = found.pieces[0] if len(found.pieces) == 1 else b"".join(found.pieces)
        found.pieces = []
        self._overhead_left -= begin - (1 + _OVERHEAD) * len(body)
        if self._overhead_left < 0 and not self.ended:
            raise MalformedError("more bytes around the chunks than in them")
        if self.ended:
            begin += _empty_lines(data[begin:])
        self.rest = data[begin:] or b""  # an empty view would keep the memory that was read into
        return body

    def _take(self, data: bytes) -> int:
        """Parse data up to the body's end; give the size of that.

        The body ends with an empty line, but the parser does not tell with which, and would go on
        beyond it: so it is given what ends with one, or with the data.
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
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            raise MalformedError(str(error)) from None
        self.ended = self._found.ended


class _Found:
    """What the parser of a chunked body found; the parser refers to it, and it to nobody."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.ended = False

    def on_body(self, piece: bytes) -> None:
        """Keep a piece of the body."""
        self.pieces.append(piece)

    def on_message_complete(self) -> None:
        """Note the end of the body."""
        self.ended = True


def _empty_lines(data: memoryview) -> int:
    """Give the size of the empty lines at the start: before a message they are nothing.

    RFC 9112, section 2.2; more than a few are left to who reads that message.
    """
    start = bytes(data[:_FEW])
    return len(start) - len(start.lstrip(b"\r\n"))


def frame_chunk(data: bytes | memoryview) -> tuple[bytes, bytes | memoryview, bytes]:
    """Give what a chunk is written as, its data of one byte at least."""
    return b"%x\r\n" % len(data), data, b"\r\n"


LAST_CHUNK = b"0\r\n\r\n"
