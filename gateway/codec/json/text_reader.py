"""Reads JSON from left to right while it arrives, in generators that pause for more text."""

from __future__ import annotations

import re
from collections.abc import Generator
from enum import Enum
from typing import NoReturn, TypeVar

import orjson

from gateway.codec.json.parse_cost import check_value_count, estimate_parsed_size
from gateway.codec.structure_scan import scan_values
from gateway.errors import ErrorKind, GatewayError, bad_request
from gateway.protocol.error_vocabulary import REQUEST
from gateway.protocol.json_errors import invalid_json_error, parse_json, quote_bytes
from gateway.sizes import QUOTED_NAME

_T = TypeVar("_T")

_SPACE = re.compile(rb"[ \t\n\r]*+")
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_SCALAR = re.compile(rb'[^ \t\n\r,:"\[\]{}]++')
WINDOW = 128 * 1024
"""Bytes of text that are looked at at once."""
_FIRST_WINDOW = 2 * 1024
"""Bytes first searched for the end of a value: most are short."""


class PauseReason(Enum):
    """Why a reader pauses."""

    NEED_DATA = "more text is needed"
    TIME_SLICE = "it has worked for a while"


Steps = Generator[PauseReason, None, _T]


class JsonTextReader:
    """A cursor in JSON text that arrives in pieces.

    Values that are parsed as a whole have at most ``value_cap`` bytes and ``depth_cap`` levels.
    What is read or refused does not depend on how the text was split.
    """

    def __init__(self, value_cap: int, depth_cap: int) -> None:
        self.depth_cap = depth_cap
        self.ended = False
        """Whether no more text will come."""
        self._value_cap = value_cap
        self._buffer = b""
        self._position = 0
        self._received = 0

    @property
    def offset(self) -> int:
        """Return the offset of the cursor in the whole text."""
        return self._received - self.size

    @property
    def size(self) -> int:
        """Return the bytes available."""
        return len(self._buffer) - self._position

    @property
    def preferred_read_size(self) -> int:
        """Return the size of the next text that would fill a window."""
        return WINDOW - self.size % WINDOW

    @property
    def buffered_bytes(self) -> int:
        """Return the bytes buffered; text that was taken is released by the next ``feed``."""
        return len(self._buffer)

    def feed(self, text: bytes | memoryview, last: bool) -> None:
        """Append the next text; ``last`` marks the end."""
        self._received += len(text)
        self.compact()
        self._buffer += text
        self.ended = last

    def peek(self, size: int = WINDOW) -> bytes:
        """Return the next bytes as far as they are available, without taking them."""
        return self._buffer[self._position : self._position + size]

    def skip(self, size: int) -> None:
        """Take ``size`` bytes."""
        self._position += size

    def take_all(self) -> tuple[bytes, int]:
        """Take everything available; return the buffer and the offset where it begins."""
        taken = self._buffer, self._position
        self._buffer, self._position = b"", 0
        return taken

    def put_back(self, text: bytes, at: int) -> None:
        """Undo ``take_all`` for what was not used of it."""
        self._buffer, self._position = text, at

    def compact(self) -> None:
        """Release text that was taken."""
        self._buffer, self._position = self._buffer[self._position :], 0

    def wait_for_more(self) -> Steps[None]:
        """Pause for more text; raises GatewayError (400) if there will be none."""
        if self.ended and not self._received:
            raise bad_request("the request has no body")
        if self.ended:
            raise bad_request(
                f"the request's JSON ends at byte {self._received}, before it is complete"
            )
        yield PauseReason.NEED_DATA

    def peek_window(self, size: int = WINDOW) -> Steps[bytes]:
        """Wait until ``size`` bytes or the end are available; return them without taking them."""
        while self.size < size and not self.ended:
            yield PauseReason.NEED_DATA
        return self.peek(size)

    def peek_byte(self) -> Steps[bytes]:
        """Return the next byte that is not space, without taking it."""
        while not self.skip_space():
            yield from self.wait_for_more()
        return self.peek(1)

    def expect(self, marks: bytes, wanted: str) -> Steps[bytes]:
        """Take the next byte that is not space, which must be one of ``marks``.

        ``wanted`` describes what is expected. Raises GatewayError (400) for another byte.
        """
        mark = yield from self.peek_byte()
        if mark not in marks:
            yield from self.fail(f"expected {wanted}")
        self._position += 1
        return mark

    def fail(self, why: str) -> Steps[NoReturn]:
        """Raise GatewayError (400) that quotes the text at the cursor."""
        near = quote_bytes((yield from self.peek_window(QUOTED_NAME)))
        raise bad_request(
            f"the request is not valid JSON: {why} at byte {self.offset}, near: {near}"
        )

    def expect_end(self) -> Steps[None]:
        """Take the rest of the text, which must be space."""
        while not (self.ended and not self.size):
            if self.skip_space():
                yield from self.fail("expected the end of the request")
            if not self.ended:
                yield PauseReason.NEED_DATA

    def skip_space(self) -> bool:
        """Take space; return whether anything else is available."""
        space = _SPACE.match(self._buffer, self._position)
        assert space is not None
        self._position = space.end()
        return self._position < len(self._buffer)

    def take_until(self, mark: bytes) -> Steps[tuple[bytes, bool]]:
        """Take text up to a mark, but no more than a window.

        Returns the text, and whether the mark came; then it was taken as well.
        """
        while True:
            end = self._buffer.find(mark, self._position, self._position + WINDOW)
            if end >= 0:
                text, self._position = self._buffer[self._position : end], end + len(mark)
                return text, True
            if self.size >= WINDOW:
                text = self.peek()
                self._position += WINDOW
                return text, False
            yield from self.wait_for_more()

    def take_short_string(self) -> Steps[bytes | None]:
        """Take a string with its quotes; None if it is longer than a window."""
        while (
            match := _STRING.match(self._buffer, self._position, self._position + WINDOW)
        ) is None:
            if self.size >= WINDOW:
                return None
            yield from self.wait_for_more()
        self._position = match.end()
        return match[0]

    def take_string(self) -> Steps[bytes]:
        """Take a string with its quotes; raises GatewayError (400) for one longer than a window."""
        if (yield from self.peek_byte()) != b'"':
            yield from self.fail("expected a name in double quotes")
        text = yield from self.take_short_string()
        if text is None:
            return (yield from self.fail(f"a string is longer than {WINDOW} bytes"))
        return text

    def take_key(self) -> Steps[str]:
        """Take the key of a member, and the colon behind it."""
        raw = yield from self.take_string()
        name = self._parse(raw)
        yield from self.expect(b":", "a colon")
        return str(name)

    def take_scalar(self) -> Steps[bytes]:
        """Take text up to the next space or punctuation: a number or a literal, if it is valid."""
        yield from self.peek_byte()
        while True:
            match = _SCALAR.match(self._buffer, self._position, self._position + WINDOW)
            if match is None:
                yield from self.fail("expected a value")
            elif match.end() < len(self._buffer) or self.ended:
                self._position = match.end()
                return match[0]
            elif self.size >= WINDOW:
                yield from self.fail(f"a value is longer than {WINDOW} bytes")
            yield from self.wait_for_more()

    def take_value(self) -> Steps[tuple[object, int]]:
        """Take and parse a value; return it, and the memory that it needs in bytes.

        Raises GatewayError: 400 for a value that is invalid or too deep, 413 for one over the cap
        or with too many values in it.
        """
        mark = yield from self.peek_byte()
        if mark == b'"':
            raw = yield from self.take_string()
        elif mark in b"[{":
            raw = yield from self._take_container()
        else:
            raw = yield from self.take_scalar()
        check_value_count(raw)
        return self._parse(raw), estimate_parsed_size(raw)

    def _parse(self, raw: bytes) -> object:
        """Parse a value that was just taken."""
        try:
            # With a space behind it, a number that lacks digits does not look cut short.
            return parse_json(raw + b" ")
        except orjson.JSONDecodeError as error:
            raise invalid_json_error(REQUEST, raw, error, before=self.offset - len(raw)) from None

    def _take_container(self) -> Steps[bytes]:
        window_size = _FIRST_WINDOW
        while True:
            text = b""  # release the last window while waiting
            text = yield from self.peek_window(window_size)
            ends, max_depth = scan_values(text)
            if max_depth > self.depth_cap:
                raise bad_request(f"the request's JSON is nested deeper than {self.depth_cap}")
            end = int(ends[0]) if ends.size else len(text)
            if end > self._value_cap:
                raise GatewayError(
                    ErrorKind.TOO_LARGE,
                    f"the request is, without its tensors, larger than {self._value_cap} "
                    "bytes (limits.max_inference_header_bytes)",
                )
            if ends.size:
                self._position += end
                return text[:end]
            if self.ended and end == self.size:
                yield from self.wait_for_more()
            window_size *= 4
