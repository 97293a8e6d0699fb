"""The record of a call: what observers, such as the access log, learn when it has ended."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from gateway.errors import ErrorKind, GatewayError

# W3C Trace Context, section 3.2: version, trace id, parent id, flags.
_TRACEPARENT = re.compile(
    rb"^traceparent:[ \t]*[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-([0-9a-f]{2})",
    re.IGNORECASE | re.MULTILINE,
)
_SAMPLED = 0x01
"""The flag of a trace that its caller records."""


class CallLabels:
    """What is known of a call by its head: equal heads share one object."""

    __slots__ = ("client_form", "model", "operation", "route", "version")

    def __init__(
        self,
        route: str = "",
        operation: str = "",
        model: str = "",
        version: str = "",
        client_form: str = "",
    ) -> None:
        self.route: Final = route
        """The name of the route; empty if there is none for the call."""
        self.operation: Final = operation
        """The group of operations, as settings name it."""
        self.model: Final = model
        """The model that the server is asked for; empty if the operation names none."""
        self.version: Final = version
        """The version of the model, if the call names one."""
        self.client_form: Final = client_form
        """The form of an infer request: json, binary, raw or v1; empty for other operations."""


NO_LABELS = CallLabels()
"""Of a call that was refused before its route was found."""


class CallRecord:
    """What is known of a call; whoever serves the call fills it in along the way."""

    __slots__ = (
        "attempts",
        "client",
        "endpoint",
        "error",
        "error_kind",
        "first_byte_seconds",
        "labels",
        "method",
        "passed_lines",
        "received_bytes",
        "request_bytes",
        "request_id",
        "response_bytes",
        "seconds",
        "sent_at",
        "sent_bytes",
        "server_form",
        "server_seconds",
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
        self.client = ""
        """The address of the client; empty over a Unix socket."""
        self.passed_lines = b""
        """Lines of the request's head that pass to the server as they came."""
        self.labels = NO_LABELS
        self.seconds = 0.0
        """From the start to the end."""
        self.status = 0
        """The status of the response; 0 if the client got none."""
        self.request_bytes = 0
        """The bytes of the request's body, as far as they were received."""
        self.response_bytes = 0
        """The bytes of the response's body."""
        self.upstream = ""
        """The upstream; several are joined with commas, none is empty."""
        self.endpoint = ""
        """The URL of the endpoint that was used last; empty for none, or for several at once."""
        self.attempts = 0
        """How often the request was sent to an endpoint."""
        self.server_form = ""
        """The form in which the server got an infer request: json or binary; empty if untouched."""
        self.sent_at = 0.0
        """When the request was sent to an endpoint last, on the clock of ``started``."""
        self.first_byte_seconds = 0.0
        """From then to the head of the response; 0 without a response."""
        self.server_seconds = 0.0
        """From then to the end of the response, or of the attempt."""
        self.sent_bytes = 0
        """The bytes of bodies that were sent to endpoints."""
        self.received_bytes = 0
        """The bytes of bodies that endpoints have sent."""
        self.error = ""
        """Why the gateway refused, failed or aborted the call; empty if it did not."""
        self.error_kind: ErrorKind | None = None

    def set_error(self, error: GatewayError) -> None:
        """Record the error that the client gets, or that aborts the response."""
        self.error = error.message
        self.error_kind = error.kind

    @property
    def is_from_server(self) -> bool:
        """Tell whether the client got a server's response, not one of the gateway's own."""
        return self.attempts > 0 and self.error_kind is None

    @property
    def trace_id(self) -> str:
        """Return the trace id of the client's ``traceparent`` header; empty without a valid one."""
        found = _TRACEPARENT.search(self.passed_lines)
        return found[1].decode().lower() if found else ""

    @property
    def sampled_trace_id(self) -> str:
        """Return the trace id if the client has the call recorded, else an empty text."""
        found = _TRACEPARENT.search(self.passed_lines)
        return found[1].decode().lower() if found and int(found[2], 16) & _SAMPLED else ""


CallObserver = Callable[[CallRecord], None]
"""Gets the record of each call that has ended."""
