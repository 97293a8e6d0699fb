"""The record of a call: what observers, such as the access log, learn when it has ended."""

from __future__ import annotations

from collections.abc import Callable

from gateway.errors import ErrorKind, GatewayError


class CallRecord:
    """What is known of a call; whoever serves the call fills it in along the way."""

    __slots__ = (
        "attempts",
        "endpoint",
        "error",
        "error_kind",
        "method",
        "request_id",
        "response_bytes",
        "seconds",
        "started",
        "status",
        "target",
        "upstream",
    )

    def __init__(
        self, method: str, target: str, request_id: str = "", started: float = 0.0
    ) -> None:
        self.method = method
        self.target = target
        """The request target as the client sent it."""
        self.request_id = request_id
        """The id by which log and client name the call; may be empty."""
        self.started = started
        """When the call started, on the clock of ``time.perf_counter``."""
        self.seconds = 0.0
        """From the start to the end."""
        self.status = 0
        """The status of the response; 0 if the client got none."""
        self.response_bytes = 0
        """The bytes of the response's body."""
        self.upstream = ""
        """The upstream; several are joined with commas, none is empty."""
        self.endpoint = ""
        """The URL of the endpoint that was used last; empty for none, or for several at once."""
        self.attempts = 0
        """How often the request was sent to an endpoint."""
        self.error = ""
        """Why the gateway refused, failed or aborted the call; empty if it did not."""
        self.error_kind: ErrorKind | None = None

    def set_error(self, error: GatewayError) -> None:
        """Record the error that the client gets, or that aborts the response."""
        self.error = error.message
        self.error_kind = error.kind


CallObserver = Callable[[CallRecord], None]
"""Gets the record of each call that has ended."""
