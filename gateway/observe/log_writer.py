"""Writes lines to a file or to stderr, in batches and from a thread of its own."""

from __future__ import annotations

import logging
import os
import select
import stat
import threading
import time
from collections.abc import Callable

FLUSH_INTERVAL = 1.0
"""Seconds after which a line is written at the latest."""
FLUSH_SIZE = 64 * 1024
"""Bytes of lines that are written without waiting for the end of the interval."""
MAX_BUFFERED = 4 * 2**20
"""Bytes of lines that may wait to be written; lines beyond them are dropped and counted."""

_STDERR = 2
_MAX_FILE_WRITE = FLUSH_SIZE
_MAX_PIPE_WRITE = select.PIPE_BUF
"""Bytes that are not mixed with those of other writers of a pipe: pipe(7)."""
PATH_CHECK_INTERVAL = 0.9 * FLUSH_INTERVAL
"""Seconds between two looks at the path; less than the other, so that no flush misses its look."""
_CLOSE_TIMEOUT = 3.0
"""Seconds for the last lines to be written."""
REPORT_INTERVAL = 10.0
"""Seconds between two reports of failures and dropped lines."""

_log = logging.getLogger("tensorgate.access")


class LogWriter:
    """Appends lines to the file at ``path``, or to stderr without one; ``add`` never waits.

    A thread does the writing: a file has no non-blocking writes, and O_NONBLOCK on stderr would
    hold for all processes that share it. Lines wait while the file cannot be written, or while
    nobody reads the pipe. A file that was renamed or removed is opened anew.

    Several processes may write to the same file or pipe. Each write is of whole lines, and short
    enough for the kernel to append it as a whole. ``on_dropped`` is called with the number of lines
    that were dropped, each time.
    """

    def __init__(
        self, path: str | None = None, on_dropped: Callable[[int], None] = lambda _: None
    ) -> None:
        self.path = path
        self.dropped = 0
        """Lines that were dropped."""
        self._on_dropped = on_dropped
        # Only the caller of ``add`` appends, and only the thread removes. Each is one operation
        # under the interpreter's lock, so that no other lock is needed.
        self._buffer = bytearray()
        self._descriptor = -1
        self._is_file = False
        self._ends_within_line = False
        self._must_reopen = False
        self._check_path_at = 0.0
        self._error = ""
        self._reported_error = ""
        self._reported_dropped = 0
        self._report_at = 0.0
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._writing_thread = threading.Thread(target=self._run, name="access log", daemon=True)
        self._writing_thread.start()

    def add(self, line: bytes) -> None:
        """Add a line, which ends with a line break."""
        buffer = self._buffer
        if len(buffer) >= MAX_BUFFERED:
            self._drop(1)
            return
        buffer += line
        if len(buffer) >= FLUSH_SIZE and not self._wake.is_set():
            self._wake.set()

    def reopen(self) -> None:
        """Open the file anew, as after a rotation; lines that wait go to the new one."""
        self._must_reopen = True
        self._wake.set()

    def close(self) -> None:
        """Write the lines that wait, and drop them if that takes too long; add none after it."""
        self._closed.set()
        self._wake.set()
        self._writing_thread.join(_CLOSE_TIMEOUT)

    def _drop(self, lines: int) -> None:
        self.dropped += lines
        self._on_dropped(lines)

    def _run(self) -> None:
        while not self._closed.is_set():
            self._wake.clear()
            self._flush()
            self._report()
            # A full buffer wakes the thread, but after a failure that would be again and again.
            (self._closed if self._error else self._wake).wait(FLUSH_INTERVAL)
        self._flush()
        self._drop(self._buffer.count(b"\n"))
        self._report_at = 0.0
        self._report()
        if self.path is not None and self._descriptor >= 0:
            os.close(self._descriptor)

    def _flush(self) -> None:
        """Write the lines that wait."""
        try:
            self._open()
            unwritten = len(self._buffer)  # not those that come meanwhile: they wait for the next
            while unwritten > 0:
                if self._must_reopen:
                    self._open()
                unwritten -= self._write()
        except OSError as error:
            self._error = error.strerror or str(error)
        except Exception as error:  # an error of our own, which must not end the thread
            self._error = f"{type(error).__name__}: {error}"
        else:
            self._error = ""

    def _open(self) -> None:
        """Open the file if it is not open, or not at its path any more."""
        if self.path is None:
            self._set_descriptor(_STDERR)
            return
        if self._descriptor >= 0 and not self._must_reopen:
            now = time.monotonic()
            if now < self._check_path_at:
                return
            if _is_at(self.path, self._descriptor):
                self._check_path_at = now + PATH_CHECK_INTERVAL
                return
        # O_NONBLOCK changes nothing for a file. A FIFO without a reader would block the thread.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        self._must_reopen = False  # first: what is asked for meanwhile must not be lost
        before, opened = self._descriptor, os.open(self.path, flags, 0o644)
        self._ends_within_line = False
        self._set_descriptor(opened)
        if before >= 0:
            os.close(before)

    def _set_descriptor(self, descriptor: int) -> None:
        if self._descriptor != descriptor:
            self._descriptor = descriptor
            self._is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)

    def _write(self) -> int:
        """Write some of the lines, and remove them from the buffer; return their size."""
        if self._is_file:
            lines = self._buffer[:_MAX_FILE_WRITE]
        else:
            self._wait_for_reader()
            lines = self._buffer[:_MAX_PIPE_WRITE]
        if not (size := lines.rfind(b"\n") + 1):
            size = self._buffer.index(b"\n") + 1
            lines = self._buffer[:size]
        # On a full disk a write may end within a line, and another process may write next. So that
        # line ends there, and is written again as a whole. After a failure it may be the line of
        # another process.
        begin = b"\n" if self._ends_within_line else b""
        self._ends_within_line = self._is_file
        written = os.write(self._descriptor, begin + lines[:size]) - len(begin)
        whole = lines.rfind(b"\n", 0, written) + 1
        self._ends_within_line = written > whole
        del self._buffer[:whole]
        return whole

    def _wait_for_reader(self) -> None:
        """Wait until there is room in a pipe; raises OSError if nobody reads."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        if not poll.poll(FLUSH_INTERVAL * 1000):
            raise TimeoutError("nobody reads it")

    def _report(self) -> None:
        """Log failures and dropped lines, at a limited rate."""
        dropped = self.dropped - self._reported_dropped
        if self._error == self._reported_error and not dropped:
            return
        # What cannot be written to stderr cannot be reported there either.
        if time.monotonic() < self._report_at or (self._error and self.path is None):
            return
        name = self.path or "on stderr"
        if self._error:
            _log.error("access log %s: %s; %d lines dropped so far", name, self._error, dropped)
        else:
            state = "works again" if self._reported_error else "is too slow"
            _log.warning("access log %s %s; %d lines were dropped", name, state, dropped)
            self._reported_dropped += dropped
        self._reported_error = self._error
        self._report_at = time.monotonic() + REPORT_INTERVAL


def _is_at(path: str, descriptor: int) -> bool:
    """Tell whether an open file is still the one at a path."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
