"""Collects the bytes of a head until it is complete."""

from __future__ import annotations

from abc import ABC, abstractmethod

from gateway.http1.head import (
    MAX_CACHED_HEAD,
    MAX_HEAD,
    HeadTooLargeError,
    check_field_line,
    check_field_line_start,
    check_request_line_start,
    check_status_line_start,
    parse_request_line,
    parse_status_line,
)

_END = b"\r\n\r\n"

_CHECKED_START = 256
"""Bytes of an incomplete line that are checked. Each read checks them again."""


class HeadReader(ABC):
    """Collects the bytes of a head until it is complete; it rejects garbage before that."""

    def __init__(self) -> None:
        self._received = b""
        self._checked = 0

    @property
    def started(self) -> bool:
        """Whether a part of a head was received."""
        return bool(self._received)

    @property
    def size(self) -> int:
        """The received bytes of a partial head."""
        return len(self._received)

    @property
    def received(self) -> bytes:
        """The bytes of a partial head, which may be malformed."""
        return self._received

    def reset(self) -> None:
        """Drop a partial head."""
        self._received, self._checked = b"", 0

    def feed(self, data: bytes | memoryview) -> tuple[bytes, bytes | memoryview] | None:
        """Add received data; return the complete head and the bytes after it, None before that.

        Raises MalformedError.
        """
        if not self._received:
            # Usually the head is complete. Large data after it is not copied.
            is_small = len(data) <= MAX_CACHED_HEAD
            start = bytes(data if is_small else data[:MAX_CACHED_HEAD])
            end = start.find(_END)
            if end >= 0 and start[0] not in _END:
                end += len(_END)
                return start[:end], start[end:] if is_small else memoryview(data)[end:]
            data = bytes(data).lstrip(b"\r\n")  # RFC 9112, section 2.2
        before = len(self._received)
        received = self._received + data
        end = received.find(_END, max(0, before - len(_END)), MAX_HEAD)
        if end >= 0:
            self.reset()
            end += len(_END)
            return received[:end], received[end:]
        if len(received) >= MAX_HEAD:
            raise HeadTooLargeError
        self._received = received
        self._check(received)
        return None

    def _check(self, received: bytes) -> None:
        """Check the lines that are complete by now, and the start of the next one."""
        while (end := received.find(b"\n", self._checked)) >= 0:
            line = received[self._checked : end]
            if self._checked:
                check_field_line(line)
            else:
                self._check_first_line(line)
            self._checked = end + 1
        start = received[self._checked : self._checked + _CHECKED_START]
        if not start:
            return
        if self._checked:
            check_field_line_start(start)
        else:
            self._check_first_line_start(start)

    @abstractmethod
    def _check_first_line(self, line: bytes) -> None:
        """Check the first line; raises MalformedError."""

    @abstractmethod
    def _check_first_line_start(self, start: bytes) -> None:
        """Check that a first line can begin like this; raises MalformedError."""


class RequestHeadReader(HeadReader):
    """Collects the bytes of a request's head."""

    def _check_first_line(self, line: bytes) -> None:
        parse_request_line(line)

    def _check_first_line_start(self, start: bytes) -> None:
        check_request_line_start(start)


class ResponseHeadReader(HeadReader):
    """Collects the bytes of a response's head."""

    def _check_first_line(self, line: bytes) -> None:
        parse_status_line(line)

    def _check_first_line_start(self, start: bytes) -> None:
        check_status_line_start(start)
