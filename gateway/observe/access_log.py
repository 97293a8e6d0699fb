"""The access log: one line per call."""

from __future__ import annotations

import time

from gateway.errors import escape_for_log, shorten
from gateway.observe.call_record import CallRecord
from gateway.observe.log_writer import LogWriter

_MILLISECONDS = [f"{number:03}" for number in range(1000)]
_MAX_TARGET = 2000
"""Characters of a target that are logged, so that a line fits into one write to a pipe."""
_MAX_ERROR = 500
"""Characters of an error that are logged."""


class AccessLog:
    """Writes a line for each call that has ended."""

    def __init__(self, writer: LogWriter) -> None:
        self._writer = writer
        self._second = 0
        self._time = ""

    def write(self, record: CallRecord) -> None:
        """Write the line of a call."""
        now = time.time()
        second = int(now)
        if second != self._second:
            self._second = second
            self._time = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        target = _quote(record.target, _MAX_TARGET)
        error = '"' + _quote(record.error, _MAX_ERROR) + '"' if record.error else "-"
        # Without format specifications: with them, mypyc makes a call for each field.
        tenths = int(record.seconds * 10_000 + 0.5)
        line = (
            f'{self._time}.{_MILLISECONDS[int((now - second) * 1000)]}Z "{record.method} {target}"'
            f" {record.status} {record.response_bytes} {tenths // 10}.{tenths % 10}"
            f" {record.request_id or '-'} {record.upstream or '-'} {record.endpoint or '-'}"
            f" {error}\n"
        )
        self._writer.add(line.encode())


def _quote(text: str, limit: int) -> str:
    """Shorten and escape a text that stands between quotation marks."""
    if len(text) > limit:
        text = shorten(text, limit)
    if '"' in text or "\\" in text:
        text = text.replace("\\", r"\\").replace('"', r"\"")
    return escape_for_log(text)
