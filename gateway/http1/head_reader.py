"""Collects the bytes of a head until it is complete."""

from __future__ import annotations

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


class HeadReader:
    """Collects the bytes of a head until it is complete; it rejects garbage before that."""

    def __init__(self, is_request: bool) -> None:
        self._is_request = is_request
        self.received = b""
        """The bytes of a partial head, which may be malformed."""
        self._checked = 0

    def reset(self) -> None:
        """Drop a partial head."""
        self.received, self._checked = b"", 0

    def feed(self, data: bytes | memoryview) -> tuple[bytes, bytes | memoryview] | None:
        """Add received data; return the complete head and the bytes after it, None before that.

        Raises MalformedError.
        """
        if not self.received:
            # Usually the head is complete. Large data after it is not copied.
            is_small = len(data) <= MAX_CACHED_HEAD
            start = bytes(data if is_small else data[:MAX_CACHED_HEAD])
            end = start.find(_END)
            if end >= 0 and start[0] not in _END:
                end += len(_END)
                return start[:end], start[end:] if is_small else memoryview(data)[end:]
            data = bytes(data).lstrip(b"\r\n")  # RFC 9112, section 2.2
        before = len(self.received)
        received = self.received + data
        end = received.find(_END, max(0, before - len(_END)), MAX_HEAD)
        if end >= 0:
            self.reset()
            end += len(_END)
            return received[:end], received[end:]
        if len(received) >= MAX_HEAD:
            raise HeadTooLargeError
        self.received = received
        self._check(received)
        return None

    def _check(self, received: bytes) -> None:
        """Check the lines that are complete by now, and the start of the next one."""
        while (end := received.find(b"\n", self._checked)) >= 0:
            line = received[self._checked : end]
            if self._checked:
                check_field_line(line)
            elif self._is_request:
                parse_request_line(line)
            else:
                parse_status_line(line)
            self._checked = end + 1
        start = received[self._checked : self._checked + _CHECKED_START]
        if not start:
            return
        if self._checked:
            check_field_line_start(start)
        elif self._is_request:
            check_request_line_start(start)
        else:
            check_status_line_start(start)
