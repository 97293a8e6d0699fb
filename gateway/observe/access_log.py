"""The access log: one line per call, as text, as JSON, or by a template."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from itertools import accumulate
from random import random
from select import PIPE_BUF
from typing import Any, Final

import orjson

from gateway.errors import escape_for_log, replace_surrogates, shorten
from gateway.observe.call_record import CallRecord
from gateway.observe.log_writer import LogWriter

_MILLISECONDS: Final = [f"{number:03}" for number in range(1000)]
_MAX_TEXT, _MIN_TEXT = 500, 10
"""Characters of a text that are logged; the fewest are for texts that grow much when escaped."""
_TARGET_FACTOR: Final = 4
"""How many times longer a target may be."""
_MAX_LINE: Final = PIPE_BUF - 1
"""Bytes of a line: what several workers write to a pipe at the same time is not mixed."""
_FIRST_ERROR_STATUS: Final = 400

LineFormat = Callable[[CallRecord, str, int], str]
"""Writes the line of a call, without its end; from the time, and the most characters of a text."""


def reason_of(record: CallRecord) -> str:
    """Return why a call failed; empty for one that did not."""
    if record.error:
        return record.error
    if record.status >= _FIRST_ERROR_STATUS and (record.server_error or record.is_from_server):
        return f"the server returned {record.server_error or record.status}"
    return ""


def _answered_by(record: CallRecord) -> str:
    if not record.status:
        return ""
    return "server" if record.is_from_server else "gateway"


def milliseconds(seconds: float) -> float:
    """Return a time as the log shows it."""
    return round(seconds * 1000, 3)


FIELDS: Mapping[str, Callable[[CallRecord, int], str | int | float]] = {
    "client": lambda record, _: record.client,
    "method": lambda record, _: record.method,
    "target": lambda record, most: shorten(record.target, _TARGET_FACTOR * most),
    "operation": lambda record, _: record.labels.operation,
    "route": lambda record, _: record.labels.route,
    "model": lambda record, most: shorten(record.labels.model, most),
    "version": lambda record, most: shorten(record.labels.version, most),
    "upstream": lambda record, _: record.upstream,
    "endpoint": lambda record, _: record.endpoint,
    "attempts": lambda record, _: record.attempts,
    "status": lambda record, _: record.status,
    "grpc_status": lambda record, _: record.grpc_status if record.grpc_status >= 0 else "",
    "answered_by": lambda record, _: _answered_by(record),
    "error_kind": lambda record, _: record.error_kind.name.lower() if record.error_kind else "",
    "reason": lambda record, most: shorten(reason_of(record), most),
    "client_form": lambda record, _: record.labels.client_form,
    "server_form": lambda record, _: record.server_form,
    "request_bytes": lambda record, _: record.request_bytes,
    "response_bytes": lambda record, _: record.response_bytes,
    "sent_bytes": lambda record, _: record.total_sent_bytes,
    "received_bytes": lambda record, _: record.total_received_bytes,
    "duration_ms": lambda record, _: milliseconds(record.seconds),
    "server_ms": lambda record, _: milliseconds(record.server_seconds),
    "first_byte_ms": lambda record, _: milliseconds(record.first_byte_seconds),
    "request_id": lambda record, _: record.request_id,
    "trace_id": lambda record, _: record.trace_id,
}
"""What a line of JSON or of a template may show of a call, beside its time; texts are cut."""

_FIELD: Final = re.compile(r"\{([^{}]*)\}")


def write_text(record: CallRecord, at: str, most: int) -> str:
    """Write a call as a short line of text."""
    target, endpoint = record.target, record.endpoint
    if len(target) > _TARGET_FACTOR * most:
        target = shorten(target, _TARGET_FACTOR * most)
    if '"' in target or "\\" in target:  # its characters are those that a head may have
        target = _quote(target)
    if " " in endpoint:  # that of an address of a host name has one
        endpoint = endpoint.replace(" ", r"\x20")
    error = "-"
    if record.error or record.status >= _FIRST_ERROR_STATUS:
        reason = reason_of(record)
        error = '"' + _quote(shorten(reason, most)) + '"' if reason else "-"
    # Without format specifications: with them, mypyc makes a call for each field.
    tenths = int(record.seconds * 10_000 + 0.5)
    return (
        f'{at} "{record.method} {target}"'
        f" {record.status} {record.response_bytes} {tenths // 10}.{tenths % 10}"
        f" {record.request_id or '-'} {record.upstream or '-'} {endpoint or '-'}"
        f" {error}"
    )


def write_json(record: CallRecord, at: str, most: int) -> str:
    """Write a call as a JSON object with all fields; those without a value are left out."""
    values: dict[str, Any] = {"time": at}
    for name, read in FIELDS.items():
        value = read(record, most)
        if value != "":
            values[name] = value
    return encode_values(values).decode()


def encode_values(values: dict[str, Any]) -> bytes:
    """Encode values of a call as JSON; what clients send in them need not have been UTF-8."""
    try:
        return orjson.dumps(values)
    except orjson.JSONEncodeError:  # a surrogate
        for name, value in values.items():
            if isinstance(value, str):
                values[name] = replace_surrogates(value)
        return orjson.dumps(values)


class TemplateFormat:
    """Writes calls by a template: ``{status}`` is the field of that name, ``{time}`` the time.

    A text without a value is ``-``. Spaces, quotation marks, backslashes and control characters of
    values are escaped, but in quotation marks spaces are not. The template must name known fields
    only.
    """

    def __init__(self, template: str) -> None:
        parts = _FIELD.split(template)
        self._literals: Final = parts[::2]
        self._names: Final = parts[1::2]
        quotes = list(accumulate(literal.count('"') for literal in self._literals[:-1]))
        self._are_quoted: Final = [count % 2 == 1 for count in quotes]

    def __call__(self, record: CallRecord, at: str, most: int) -> str:
        """Write the line of a call."""
        line = [self._literals[0]]
        fields = zip(self._names, self._are_quoted, self._literals[1:], strict=True)
        for name, is_quoted, literal in fields:
            value = at if name == "time" else FIELDS[name](record, most)
            if isinstance(value, str):
                value = _quote(value) or "-"
                if not is_quoted:
                    value = value.replace(" ", r"\x20")
            line.append(str(value))
            line.append(literal)
        return "".join(line)


class AccessLog:
    """Writes a line for each call that has ended.

    Of calls that succeed, only the share ``sample`` is written. Those that fail, and those that
    take ``slow`` seconds or more, always are.
    """

    def __init__(
        self,
        writer: LogWriter,
        line_format: LineFormat = write_text,
        sample: float = 1.0,
        slow: float | None = None,
    ) -> None:
        self._writer = writer
        self._format = line_format
        self._sample = sample
        self._slow = slow
        self._second = 0
        self._time = ""

    def write(self, record: CallRecord) -> None:
        """Write the line of a call, if it is to be written."""
        if self._sample < 1.0 and not self._is_notable(record) and random() >= self._sample:  # noqa: S311  # nothing secret
            return
        now = time.time()
        second = int(now)
        if second != self._second:
            self._second = second
            self._time = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        at = f"{self._time}.{_MILLISECONDS[int((now - second) * 1000)]}Z"
        most = _MAX_TEXT
        line = _encode(self._format(record, at, most))
        while len(line) > _MAX_LINE and most > _MIN_TEXT:
            most //= 2
            line = _encode(self._format(record, at, most))
        self._writer.add(line + b"\n")

    def _is_notable(self, record: CallRecord) -> bool:
        failed = not 0 < record.status < _FIRST_ERROR_STATUS or bool(record.error)
        return failed or (self._slow is not None and record.seconds >= self._slow)


def _encode(line: str) -> bytes:
    try:
        return line.encode()
    except UnicodeEncodeError:
        return line.encode(errors="replace")


def _quote(text: str) -> str:
    """Escape a text that stands between quotation marks."""
    if '"' in text or "\\" in text:
        text = text.replace("\\", r"\\").replace('"', r"\"")
    return escape_for_log(text)
