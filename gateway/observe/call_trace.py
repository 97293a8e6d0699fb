"""The trace of a sampled call: W3C Trace Context, and what the spans of its attempts tell.

https://www.w3.org/TR/trace-context/ is the Recommendation; sections are those of it.
"""

from __future__ import annotations

import os
import re
import time
from asyncio import CancelledError
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from gateway.errors import GatewayError
from gateway.http1.head import HeaderField

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
TRACE_HEADERS: Final = frozenset((TRACEPARENT, TRACESTATE))

MAX_ATTEMPTS: Final = 32
"""Attempts of a call that get spans: a stream may have any number of them."""

# Section 3.2.2: version, trace id, parent id, flags. Only later versions may have more.
_TRACEPARENT: Final = re.compile(
    r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?"
)
_VERSION: Final = "00"
_SAMPLED: Final = 0x01
# Section 3.3.1.3.
_STATE_KEY: Final = (
    r"(?:[a-z][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13})"
)
_STATE_VALUE: Final = r"[ -+\--<>-~]{0,255}[!-+\--<>-~]"
_STATE_MEMBER: Final = re.compile(f"{_STATE_KEY}={_STATE_VALUE}")
_MAX_MEMBERS: Final = 32

ABORTED: Final = "aborted"
"""The kind of the error of an attempt that was cut off, as its client left, for example."""


class AttemptNumbers(Protocol):
    """What the record of a call has of the attempt in progress."""

    upstream: str
    endpoint: str
    sent_at: float
    first_byte_seconds: float
    server_seconds: float
    sent_bytes: int
    received_bytes: int
    grpc_status: int


@dataclass(frozen=True, slots=True)
class TraceParent:
    """The caller's span, as a valid ``traceparent`` names it."""

    trace_id: str
    span_id: str
    is_sampled: bool


def find_trace_parent(headers: Sequence[HeaderField]) -> TraceParent | None:
    """Return the caller's span; None without exactly one ``traceparent`` that is valid."""
    values = [header.value for header in headers if header.lower == TRACEPARENT]
    return parse_traceparent(values[0]) if len(values) == 1 else None


def parse_traceparent(value: str) -> TraceParent | None:
    """Parse the value of a ``traceparent`` header; None if it is invalid."""
    found = _TRACEPARENT.fullmatch(value)
    if found is None or (found[1] == _VERSION and found[5]):
        return None
    return TraceParent(found[2], found[3], bool(int(found[4], 16) & _SAMPLED))


def find_trace_state(headers: Sequence[HeaderField]) -> str:
    """Return the ``tracestate`` of a request, its lines joined; empty if it is invalid."""
    text = ",".join([header.value for header in headers if header.lower == TRACESTATE])
    members = [member.strip(" \t") for member in text.split(",")]
    members = [member for member in members if member]  # section 3.3.1.2 allows empty ones
    is_valid = len(members) <= _MAX_MEMBERS and all(map(_STATE_MEMBER.fullmatch, members))
    return ",".join(members) if is_valid else ""


class AttemptTrace:
    """A request that was sent to a server: what its span tells."""

    def __init__(self, record: AttemptNumbers, method: str, target: str, is_grpc: bool) -> None:
        self.span_id: Final = new_span_id()
        self.upstream: Final = record.upstream
        self.endpoint: Final = record.endpoint
        self.method: Final = method
        self.target: Final = target
        self.is_grpc: Final = is_grpc
        self.started: Final = record.sent_at
        self.seconds = -1.0
        """Until its end; -1 before."""
        self.first_byte_seconds = 0.0
        self.sent_bytes = 0
        self.received_bytes = 0
        self.status = 0
        """The HTTP status of the server; 0 without a response."""
        self.grpc_status = -1
        self.error_type = ""
        self.error = ""


class CallTrace:
    """What the spans of a sampled call tell beside its record.

    ``parent_id`` is empty where the gateway begins the trace. ``report`` gets the record of a part
    of the call that outlives it, such as a mirrored copy: a CallRecord.
    """

    def __init__(
        self,
        report: Callable[[Any], None],
        trace_id: str = "",
        parent_id: str = "",
        state: str = "",
    ) -> None:
        self.report: Final = report
        self.trace_id: Final = trace_id or new_trace_id()
        self.parent_id: Final = parent_id
        self.state: Final = state
        """The caller's ``tracestate``, which servers get unchanged; empty without a valid one."""
        self.span_id = new_span_id()
        self.attempts: list[AttemptTrace] = []
        self.dropped_attempts = 0
        self.has_parts = False
        """Whether attempts ran at several endpoints at once."""
        self.mirror = ""
        """The upstream of a mirrored copy; empty for a client's call."""
        self.scheme = ""
        self.host = ""
        self.http_version = ""
        self.queued_at = self.admitted_at = 0.0
        """When the call began to wait for slots, and when it had them; 0 if it has no limit."""
        self.preparing_at = self.prepared_at = 0.0
        """When the gateway began to prepare the request, and when it was ready for a server."""
        self.is_streamed = False
        """Whether a task sent the response on as it arrived."""
        self._open: AttemptTrace | None = None

    def part(self) -> CallTrace:
        """Return the trace of a part that runs beside others; its attempts are ``add``ed later."""
        part = CallTrace(self.report, self.trace_id, self.parent_id, self.state)
        part.span_id = self.span_id
        return part

    def copy_for_mirror(self, upstream: str) -> CallTrace:
        """Return the trace of a mirrored copy, whose span is below that of the call."""
        mirror = CallTrace(self.report, self.trace_id, self.span_id, self.state)
        mirror.mirror = upstream
        return mirror

    def add(self, part: CallTrace) -> None:
        """Add the attempts of a part."""
        self.has_parts = True
        room = max(MAX_ATTEMPTS - len(self.attempts), 0)
        self.attempts += part.attempts[:room]
        self.dropped_attempts += part.dropped_attempts + len(part.attempts[room:])

    def set_prepared(self, preparing_at: float, prepared_at: float) -> None:
        """Note when the request was prepared, the first time."""
        if not self.prepared_at:
            self.preparing_at, self.prepared_at = preparing_at, prepared_at

    def set_queued(self, queued_at: float, admitted_at: float) -> None:
        """Note when the call waited for its slots, the first time."""
        if not self.queued_at:
            self.queued_at, self.admitted_at = queued_at, admitted_at

    def begin_attempt(
        self, record: AttemptNumbers, method: str, target: str, is_grpc: bool = False
    ) -> str:
        """Note that the request is sent; return the value of its ``traceparent``."""
        self.end_attempt(record)
        attempt = self._open = AttemptTrace(record, method, target, is_grpc)
        if len(self.attempts) < MAX_ATTEMPTS:
            self.attempts.append(attempt)
        else:
            self.dropped_attempts += 1
        return f"{_VERSION}-{self.trace_id}-{attempt.span_id}-01"

    def set_status(self, status: int) -> None:
        """Note the HTTP status of the server."""
        if self._open is not None:
            self._open.status = status

    def set_grpc_status(self, code: int | None) -> None:
        """Note the status of a gRPC call, which the server has sent."""
        if self._open is not None and self._open.is_grpc and code is not None:
            self._open.grpc_status = code

    def fail_attempt(self, error: BaseException | None) -> None:
        """Note why the last attempt failed, if the server or a cancellation is the reason."""
        if isinstance(error, GatewayError):
            if error.kind.value.upstream_failed or error.kind.value.retryable:
                self.set_failure(error.kind.name.lower(), error.message)
        elif isinstance(error, CancelledError):
            self.set_failure(ABORTED, "")

    def set_failure(self, kind: str, why: str) -> None:
        """Note the first reason for which the last attempt failed."""
        attempt = self._open or (self.attempts[-1] if self.attempts else None)
        if attempt is not None and not attempt.error_type:
            attempt.error_type, attempt.error = kind, why

    def end_attempt(self, record: AttemptNumbers) -> None:
        """Take what the record has of the attempt in progress, if there is one."""
        attempt, self._open = self._open, None
        if attempt is None:
            return
        seconds = record.server_seconds
        attempt.seconds = seconds or time.perf_counter() - attempt.started
        attempt.first_byte_seconds = record.first_byte_seconds
        attempt.sent_bytes, attempt.received_bytes = record.sent_bytes, record.received_bytes
        if attempt.is_grpc and attempt.grpc_status < 0 and attempt.status:
            attempt.grpc_status = record.grpc_status


def new_trace_id() -> str:
    """Return a random trace id."""
    return os.urandom(16).hex()


def new_span_id() -> str:
    """Return a random span id."""
    return os.urandom(8).hex()
