"""Writes the gateway's own log to stderr without ever waiting for its reader."""

from __future__ import annotations

import logging
import os
import select
from collections import deque

MAX_WAITING = 1000
"""Lines that wait while nobody reads; further ones are dropped and counted."""

_STDERR = 2


class StderrHandler(logging.Handler):
    """Logs to stderr; a line that would have to wait is written with one of the next.

    A blocking write would hold the event loop, and so all calls, as long as nobody reads the pipe.
    It needs no thread, so that the supervisor can fork at any time.
    """

    def __init__(self) -> None:
        super().__init__()
        self._waiting: deque[bytes] = deque()
        self._dropped = 0
        self._is_writing = False
        os.register_at_fork(after_in_child=self._forget)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, and those that wait."""
        try:
            self.flush()
            self._add(record)
            self.flush()
        except Exception:
            self.handleError(record)  # the caller must not fail

    def flush(self) -> None:
        """Write the lines that wait, as far as somebody reads them."""
        if self._is_writing:
            return  # a signal handler logs
        self._is_writing = True
        try:
            self._write()
        finally:
            self._is_writing = False

    def _forget(self) -> None:
        """Leave the lines that wait, and those that were dropped, to the parent."""
        self._waiting.clear()
        self._dropped = 0
        self._is_writing = False

    def _write(self) -> None:
        try:
            while self._waiting and _is_writable():
                # A pipe that can be written has room for so much: pipe(7).
                line = self._waiting[0]
                written = os.write(_STDERR, line[: select.PIPE_BUF])
                if written < len(line):
                    self._waiting[0] = line[written:]
                else:
                    self._waiting.popleft()
        except BlockingIOError:
            pass  # another process has made stderr non-blocking
        except OSError:
            self._dropped += len(self._waiting)
            self._waiting.clear()

    def _add(self, record: logging.LogRecord) -> None:
        if len(self._waiting) >= MAX_WAITING:
            self._dropped += 1
            return
        if self._dropped and not self._waiting:
            text = "%d lines of this log were dropped, as stderr could not be written"
            level, dropped = logging.WARNING, self._dropped
            lost = logging.LogRecord("tensorgate", level, "", 0, text, (dropped,), None)
            self._dropped = 0
            self._waiting.append(self._line(lost))
        self._waiting.append(self._line(record))

    def _line(self, record: logging.LogRecord) -> bytes:
        return (self.format(record) + "\n").encode(errors="replace")


def _is_writable() -> bool:
    poll = select.poll()
    poll.register(_STDERR, select.POLLOUT)
    return bool(poll.poll(0))
