"""The last calls of a worker, for the admin address: some of each second, as JSON.

Describing a call takes some 20 µs, so not each one is described. Those that fail, and the slowest
ones, have a ring of their own: a flood of others does not push them out.
"""

from __future__ import annotations

import heapq
import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from gateway.observe.access_log import FIELDS, encode_values, milliseconds
from gateway.observe.call_record import CallRecord

MAX_ORDINARY, MAX_FAILED, MAX_SLOW = 40, 40, 5
"""Calls of each sort that are described in a second: the last ones, and the slowest."""
MAX_LONG: Final = 5
"""Calls with long texts that are described in a second: the first ones, and the first that fail."""
_MAX_TEXT: Final = 300
"""Characters of a text."""
_MAX_HEAD: Final = 8192
"""Bytes of a record's texts that are held until it is described."""
_FIRST_ERROR_STATUS: Final = 400

AppendRecord = Callable[[bytes], object]
"""Appends a description to a ring."""


class RecentCalls:
    """Observes the calls of a worker, and appends descriptions to rings with each ``flush``.

    ``notable`` gets the calls that failed, or took longest; ``ordinary`` gets others. Memory is
    bounded by the number of calls that wait for ``flush``.
    """

    def __init__(self, slot: int, ordinary: AppendRecord, notable: AppendRecord) -> None:
        self._slot = slot
        self._append_ordinary = ordinary
        self._append_notable = notable
        self._number = 0
        self._ordinary: deque[tuple[int, CallRecord]] = deque(maxlen=MAX_ORDINARY)
        self._failed: deque[tuple[int, CallRecord]] = deque(maxlen=MAX_FAILED)
        self._slowest: list[tuple[float, int, CallRecord]] = []
        """A heap; numbers are negative, so that of two that took as long the first stays."""
        self._long_calls = [0, 0]
        """Those described since the last flush: without a failure, and with one."""
        self._started = f"{time.time_ns() // 1_000_000:x}"

    def observe(self, record: CallRecord) -> None:
        """Note a call that has ended."""
        self._number = number = self._number + 1
        has_failed = record.status >= _FIRST_ERROR_STATUS or not record.status or bool(record.error)
        size = len(record.target)
        for header in record.noted:
            size += len(header.value)
        if size > _MAX_HEAD:
            self._describe_long(number, record, has_failed)
        elif has_failed:
            self._failed.append((number, record))
        elif len(self._slowest) < MAX_SLOW:
            heapq.heappush(self._slowest, (record.seconds, -number, record))
        else:
            if record.seconds > self._slowest[0][0]:
                slow = (record.seconds, -number, record)
                _, negative, record = heapq.heapreplace(self._slowest, slow)
                number = -negative
            self._ordinary.append((number, record))

    def flush(self) -> None:
        """Describe the calls since the last time; once a second keeps the cost below 0.3 %."""
        slowest = [(-number, record) for _, number, record in self._slowest]
        notable, ordinary = sorted([*self._failed, *slowest]), sorted(self._ordinary)
        self._failed.clear()
        self._ordinary.clear()
        self._slowest.clear()
        self._long_calls = [0, 0]
        for calls, append in ((notable, self._append_notable), (ordinary, self._append_ordinary)):
            for number, record in calls:
                append(self._encode(number, record))

    def _describe_long(self, number: int, record: CallRecord, has_failed: bool) -> None:
        """Describe a call at once, so that its texts are not held until the next flush."""
        if self._long_calls[has_failed] < MAX_LONG:
            self._long_calls[has_failed] += 1
            append = self._append_notable if has_failed else self._append_ordinary
            append(self._encode(number, record))

    def _encode(self, number: int, record: CallRecord) -> bytes:
        ended_at = time.time() - time.perf_counter() + record.started + record.seconds
        return encode_call(record, f"{self._started}-{self._slot}-{number}", ended_at)


def encode_call(record: CallRecord, call_id: str, ended_at: float) -> bytes:
    """Return what the admin address tells of a call: the fields of the access log, and more.

    ``ended_at`` is in seconds since 1970. Fields without a value are left out.
    """
    values: dict[str, Any] = {"id": call_id, "time": round(ended_at, 3), "worker": os.getpid()}
    for name, read in FIELDS.items():
        value = read(record, _MAX_TEXT)
        if value != "":
            values[name] = value
    for name in ("retries", "request_elements", "response_elements"):
        if number := getattr(record, name):
            values[name] = number
    values["timeline"] = _timeline(record)
    values["other_attempts"] = [
        {
            "upstream": each.upstream,
            "endpoint": each.endpoint,
            "first_byte_ms": milliseconds(each.first_byte_seconds),
            "server_ms": milliseconds(each.server_seconds),
            "sent_bytes": each.sent_bytes,
            "received_bytes": each.received_bytes,
        }
        for each in record.other_attempts
    ]
    return encode_values(values)


def _timeline(record: CallRecord) -> list[dict[str, Any]]:
    """Return the stages of a call, as far as they were measured, in their order."""
    sent = record.sent_at - record.started if record.sent_at else 0.0
    # It is not measured on the fast path, where nothing waits between.
    prepare = record.prepare_seconds if record.prepare_seconds >= 0 else sent
    stages: list[tuple[str, str, float, float]] = [
        ("prepare", "Read and convert the request", 0.0, prepare),
        ("queue", "Wait for a slot", prepare, record.queue_seconds),
    ]
    if record.sent_at:
        server = record.server_seconds
        first_byte = record.first_byte_seconds or server
        begin, end = sent + first_byte, sent + max(server, first_byte)
        rest = record.seconds - end
        stages += [
            ("server", "Send the request and wait for the server", sent, first_byte),
            ("response", "Receive, convert and send the response", begin, server - first_byte),
            ("send", "Send the rest to the client", end, rest),
        ]
    return [
        {
            "name": name,
            "label": label,
            "start_ms": milliseconds(start),
            "duration_ms": milliseconds(duration),
        }
        for name, label, start, duration in stages
        if duration > 0 or name == "server"
    ]
