"""One attempt of a call: a request that is sent to an endpoint, and what is told of it."""

from __future__ import annotations

import time
from typing import Final, Self

from gateway.errors import ErrorKind, GatewayError
from gateway.observe.call_record import CallRecord
from gateway.upstream.pool.member import Outcome
from gateway.upstream.pool.pool import Lease
from gateway.upstream.transport import UpstreamResponse


class Attempt:
    """Holds the lease of an endpoint for a call, and tells record and trace of the attempt.

    ``hold`` takes the lease, ``begin`` is the moment of the send, and ``end`` gives the lease back.
    What happens between is told by ``record_head``, ``fail``, ``repeat`` and ``close``.
    """

    def __init__(self, upstream: str, lease: Lease, record: CallRecord) -> None:
        self.endpoint: Final = lease.endpoint
        self.lease: Final = lease
        self.record: Final = record
        self._upstream: Final = upstream
        self._is_held = False

    def hold(self) -> None:
        """Take the lease; ``end`` gives it back."""
        self.lease.acquire()
        self._is_held = True
        self.record.set_endpoint(self._upstream, self.endpoint.url)

    def begin(self, method: str, target: str, is_grpc: bool) -> str:
        """Record that the request is sent; return its ``traceparent``, empty without a trace."""
        record = self.record
        record.begin_attempt(time.perf_counter())
        trace = record.trace
        return "" if trace is None else trace.begin_attempt(record, method, target, is_grpc)

    def record_head(self, status: int, head_delay: float) -> None:
        """Record that the head of a response has come, ``head_delay`` seconds ago."""
        record = self.record
        record.server_seconds = time.perf_counter() - record.sent_at
        record.first_byte_seconds = record.server_seconds - head_delay
        if record.trace is not None:
            record.trace.set_status(status)

    def fail(self, error: BaseException | None) -> tuple[Outcome, str]:
        """Record an error; return what it says of the endpoint, and its text; None is a success.

        Nothing counts as sent if there was no connection.
        """
        record = self.record
        if record.trace is not None:
            record.trace.fail_attempt(error)
        if isinstance(error, GatewayError) and error.kind is ErrorKind.UNREACHABLE:
            record.forget_attempt()
        return self.lease.classify_error(error)

    def repeat(self, outcome: Outcome, why: str) -> None:
        """Record that the call goes on at another endpoint, and why."""
        record = self.record
        record.retries += 1
        record.received_bytes = 0
        if record.trace is not None:
            record.trace.set_failure(outcome.value, why)

    def close(self, response: UpstreamResponse) -> None:
        """Close a response that was read as it came, and record its end."""
        response.close()
        record = self.record
        record.server_error = record.server_error or response.error
        record.server_seconds = time.perf_counter() - record.sent_at
        record.received_bytes = response.received_bytes
        if record.trace is not None:
            record.trace.is_streamed = True
            record.trace.set_grpc_status(response.grpc_status)

    def end(self, outcome: Outcome, why: str = "") -> None:
        """Give the lease back, once, with what the attempt says of the endpoint."""
        if not self._is_held:
            return
        self._is_held = False
        record = self.record
        if record.sent_at and not record.server_seconds:
            record.server_seconds = time.perf_counter() - record.sent_at
        self.lease.release(outcome, why)

    def __enter__(self) -> Self:
        """Take the lease."""
        self.hold()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Give the lease back."""
        self.end_with(error)

    def end_with(self, error: BaseException | None) -> None:
        """Give the lease back after an error, or after a success if it is None."""
        outcome, why = Outcome.UNKNOWN, ""
        try:
            outcome, why = self.fail(error)
        finally:
            self.end(outcome, why)
