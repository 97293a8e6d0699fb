"""The record of a call: what observers, such as the access log, learn when it has ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from gateway.errors import ErrorKind, GatewayError, describe_error
from gateway.http1.head import HeaderField
from gateway.observe.call_capture import CallCapture
from gateway.observe.call_trace import CallTrace, find_trace_parent
from gateway.system.buffers import ReservedBytes

INFERENCE: Final = ("infer", "generate")
"""The operations that run a model."""


@dataclass(frozen=True, slots=True, eq=False)
class CallLabels:
    """What is known of a call by its head: equal heads share one object."""

    route: str = ""
    """The name of the route; empty if there is none for the call."""
    operation: str = ""
    """The group of operations, as settings name it."""
    model: str = ""
    """The model that the server is asked for; empty if the operation names none."""
    version: str = ""
    """The version of the model, if the call names one."""
    client_form: str = ""
    """The form of an infer request: json, binary, raw or v1; grpc for any call over gRPC."""


NO_LABELS: Final = CallLabels()
"""Of a call that was refused before its route was found."""


class AttemptRecord:
    """What is known of a request that was sent to an endpoint, other than a call's last one."""

    def __init__(self, call: CallRecord) -> None:
        self.upstream: Final = call.upstream
        self.endpoint: Final = call.endpoint
        self.first_byte_seconds: Final = call.first_byte_seconds
        self.server_seconds: Final = call.server_seconds
        self.sent_bytes: Final = call.sent_bytes
        self.received_bytes: Final = call.received_bytes


class CallRecord:
    """What is known of a call; whoever serves the call fills it in along the way."""

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
        self.reserved = ReservedBytes()
        """What the call has reserved, and for which client."""
        self.noted: Sequence[HeaderField] = ()
        """The headers of the request that are read from each head, such as ``traceparent``."""
        self.trace: CallTrace | None = None
        """What the spans of the call tell, if it is traced."""
        self.capture: CallCapture | None = None
        """Gets the messages between the gateway and servers, if an operator wants to see them."""
        self.labels = NO_LABELS
        self.seconds = 0.0
        """From the start to the end."""
        self.status = 0
        """The status of the response, 0 if the client got none.

        For gRPC it is the HTTP status that stands for ``grpc_status``.
        """
        self.grpc_status = -1
        """The status of a gRPC call; -1 for other calls."""
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
        self.other_attempts: tuple[AttemptRecord, ...] = ()
        """Attempts before the last one, or at several endpoints at once."""
        self.retries = 0
        """How often the request was sent to another endpoint because one failed."""
        self.server_form = ""
        """The form in which the server got an infer request: json or binary; empty if untouched."""
        self.request_elements = 0
        """The elements of tensors that were converted for the server."""
        self.response_elements = 0
        """The elements of tensors that were converted for the client."""
        self.prepare_seconds = -1.0
        """Until the request was ready for a server, without waiting for the client; -1 before."""
        self.queue_seconds = 0.0
        """From then until the call had its slots."""
        self.sent_at = 0.0
        """When the last attempt began, on the clock of ``started``; 0 if nothing was sent."""
        self.first_byte_seconds = 0.0
        """From then to the head of the response; 0 without a response."""
        self.server_seconds = 0.0
        """From then to the end of the response, or of the attempt."""
        self.sent_bytes = 0
        """The bytes of the body that were sent in the last attempt."""
        self.received_bytes = 0
        """The bytes of the body that were received in the last attempt; 0 if it is retried."""
        self.lanes: tuple[tuple[str, str, str, str, str], ...] = ()
        """How inputs and outputs went, where an endpoint has shared memory; see ``add_lane``."""
        self.answered_by_server = False
        """The client got a server's response although the call has an error, or no attempt."""
        self.error = ""
        """Why the gateway refused, failed or aborted the call; empty if it did not."""
        self.error_kind: ErrorKind | None = None
        self.server_error = ""
        """The status and the message of the error that a server returned last; empty for none."""

    @property
    def waits_for_inference(self) -> bool:
        """Tell whether a model was asked to infer, and nothing of its response has come yet."""
        return (
            self.sent_at > 0.0
            and self.server_seconds == self.first_byte_seconds == 0.0
            and self.labels.operation in INFERENCE
        )

    def set_endpoint(self, upstream: str, endpoint: str) -> None:
        """Record where the call goes; what is measured from now on is of this endpoint."""
        if self.sent_at:
            self.other_attempts = (*self.other_attempts, AttemptRecord(self))
            self.forget_attempt()
        self.upstream = upstream
        self.endpoint = endpoint
        self.server_error = ""

    def begin_attempt(self, now: float) -> None:
        """Record that the request is sent to the endpoint."""
        self.attempts += 1
        self.sent_at = now

    def forget_attempt(self) -> None:
        """Forget what was measured of an attempt, as if nothing had been sent."""
        if self.trace is not None:
            self.trace.end_attempt(self)
        self.sent_at = self.first_byte_seconds = self.server_seconds = 0.0
        self.sent_bytes = self.received_bytes = 0

    def add_lane(self, tensors: str, reason: str) -> None:
        """Record how ``inputs`` or ``outputs`` go to the endpoint: in shared memory, or why not.

        ``reason`` is one of those that ``families.SHARED_MEMORY_CALLS`` names, or empty.
        """
        lane = "socket" if reason else "shared_memory"
        self.lanes = (*self.lanes, (self.upstream, self.endpoint, tensors, lane, reason))

    def part(self) -> CallRecord:
        """Return the record of a part of the call; ``add_parts`` adds it."""
        part = CallRecord(self.method, self.target)
        part.reserved = self.reserved
        part.capture = self.capture
        if self.trace is not None:
            part.trace = self.trace.part()
        return part

    def add_parts(self, parts: Sequence[CallRecord]) -> None:
        """Add the attempts of parts that ran at the same time, each at servers of its own."""
        sent = [part for part in parts if part.sent_at]
        for part in parts:
            if self.trace is not None and part.trace is not None:
                part.trace.end_attempt(part)
                self.trace.add(part.trace)
            self.attempts += part.attempts
            self.retries += part.retries
            self.other_attempts += part.other_attempts
            self.server_error = self.server_error or part.server_error
        if len(parts) == 1:
            for part in sent:
                self.sent_at = part.sent_at
                self.sent_bytes, self.received_bytes = part.sent_bytes, part.received_bytes
            self.endpoint = parts[0].endpoint
        else:
            self.other_attempts += tuple(map(AttemptRecord, sent))
            self.endpoint = ""
        for part in sent:
            self.first_byte_seconds = max(self.first_byte_seconds, part.first_byte_seconds)
            self.server_seconds = max(self.server_seconds, part.server_seconds)

    @property
    def total_sent_bytes(self) -> int:
        """Return the bytes of bodies that were sent to endpoints, in all attempts."""
        return self.sent_bytes + sum([each.sent_bytes for each in self.other_attempts])

    @property
    def total_received_bytes(self) -> int:
        """Return the bytes of bodies that were received from endpoints, in all attempts."""
        return self.received_bytes + sum([each.received_bytes for each in self.other_attempts])

    def set_error(self, error: GatewayError) -> None:
        """Record the error that the client gets."""
        self.error = error.message
        self.error_kind = error.kind

    def set_abort(self, error: GatewayError) -> None:
        """Record the error that breaks off a response that the client has got a part of."""
        self.answered_by_server = self.is_from_server
        self.set_error(error)

    def set_passed_error(self, status: int, message: str) -> None:
        """Record that the client gets the error of a server that was asked for metadata."""
        self.answered_by_server = True
        returned = f"the server returned {status} to the request for the model's metadata"
        self.error = describe_error(returned, message)

    @property
    def is_from_server(self) -> bool:
        """Tell whether the client got a server's response, not one of the gateway's own."""
        return self.answered_by_server or (self.attempts > 0 and self.error_kind is None)

    @property
    def trace_id(self) -> str:
        """Return the trace id of the call, or of its client's ``traceparent``; empty for none."""
        if self.trace is not None:
            return self.trace.trace_id
        parent = find_trace_parent(self.noted)
        return "" if parent is None else parent.trace_id

    @property
    def sampled_trace_id(self) -> str:
        """Return the trace id if the gateway or the client has the call recorded, else nothing."""
        if self.trace is not None:
            return self.trace.trace_id
        parent = find_trace_parent(self.noted)
        return "" if parent is None or not parent.is_sampled else parent.trace_id


CallObserver = Callable[[CallRecord], None]
"""Gets the record of each call that has ended."""
