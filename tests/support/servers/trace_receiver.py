"""A receiver of traces: OTLP over HTTP and over gRPC, decoded with OpenTelemetry's own messages."""

from __future__ import annotations

import json
import threading
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    add_TraceServiceServicer_to_server,
)

SERVER, CLIENT, INTERNAL = 2, 3, 1
ERROR = 2


@dataclass(frozen=True)
class ReceivedSpan:
    """A span, with its attributes as a dictionary."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    kind: int
    start: int
    end: int
    state: str
    flags: int
    attributes: dict[str, Any]
    error: bool
    message: str
    resource: dict[str, Any]

    @property
    def service(self) -> str:
        """Return the name of the service."""
        return str(self.resource["service.name"])

    def holds(self, other: ReceivedSpan) -> bool:
        """Tell whether another span is below this one, in the same trace and within its time."""
        return (
            other.parent_id == self.span_id
            and other.trace_id == self.trace_id
            and self.start <= other.start <= other.end <= self.end
        )


@dataclass
class TraceReceiver:
    """What a receiver got, and how it answers: with ``status`` after ``delay`` seconds."""

    protocol: str = "http"
    endpoint: str = ""
    status: int = 200
    delay: float = 0.0
    rejected: int = 0
    stopped: threading.Event = field(default_factory=threading.Event)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    spans: list[ReceivedSpan] = field(default_factory=list)

    @property
    def settings(self) -> dict[str, Any]:
        """Return the section of the settings that leads here."""
        return {"endpoint": self.endpoint, "protocol": self.protocol}

    def take(self, data: ExportTraceServiceRequest) -> ExportTraceServiceResponse:
        """Keep the spans of a batch, unless it fails."""
        self.sizes.append(data.ByteSize())
        self.stopped.wait(self.delay)
        if self.status == 200:
            self.spans += list(decode(data))
        response = ExportTraceServiceResponse()
        response.partial_success.rejected_spans = self.rejected
        return response

    def trace(self, trace_id: str = "") -> list[ReceivedSpan]:
        """Return the spans of a trace, or of all, by their start."""
        spans = [span for span in self.spans if trace_id in ("", span.trace_id)]
        return sorted(spans, key=lambda span: span.start)

    def call(self, number: int = 0) -> ReceivedSpan:
        """Return the span of a call."""
        return [span for span in self.trace() if span.kind == SERVER][number]

    def attempts(self) -> list[ReceivedSpan]:
        """Return the spans of all attempts, by their start."""
        return [span for span in self.trace() if span.kind == CLIENT]

    def named(self, name: str) -> ReceivedSpan:
        """Return the one span of this name."""
        (span,) = [span for span in self.spans if span.name == name]
        return span


def decode(data: ExportTraceServiceRequest) -> Iterator[ReceivedSpan]:
    """Yield the spans of a batch."""
    for resource_spans in data.resource_spans:
        resource = _attributes(resource_spans.resource)
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                yield ReceivedSpan(
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.name,
                    span.kind,
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    span.trace_state,
                    span.flags,
                    _attributes(span),
                    span.status.code == ERROR,
                    span.status.message,
                    resource,
                )


def read_json(text: bytes) -> ExportTraceServiceRequest:
    """Return a batch in OTLP's JSON, which has ids in hexadecimal."""
    fields = json.loads(text)
    for resource_spans in fields["resourceSpans"]:
        for scope_spans in resource_spans["scopeSpans"]:
            for span in scope_spans["spans"]:
                for name in ("traceId", "spanId", "parentSpanId"):
                    span[name] = b64encode(bytes.fromhex(span.get(name, ""))).decode()
    batch = ExportTraceServiceRequest()
    json_format.ParseDict(fields, batch)
    return batch


def _attributes(message: Any) -> dict[str, Any]:
    pairs = [
        (each.key, getattr(each.value, each.value.WhichOneof("value")))
        for each in message.attributes
    ]
    assert len({key for key, _ in pairs}) == len(pairs), "an attribute is there twice"
    return dict(pairs)


@contextmanager
def trace_receiver(protocol: str = "http") -> Iterator[TraceReceiver]:
    """Run a receiver."""
    receiver = TraceReceiver(protocol)
    with _http(receiver) if protocol == "http" else _grpc(receiver):
        try:
            yield receiver
        finally:
            receiver.stopped.set()


@contextmanager
def _http(receiver: TraceReceiver) -> Iterator[None]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            receiver.headers.append({name.lower(): value for name, value in self.headers.items()})
            receiver.paths.append(self.path)
            is_json = self.headers["Content-Type"] == "application/json"
            data = read_json(body) if is_json else ExportTraceServiceRequest.FromString(body)
            response = receiver.take(data)
            answer = response.SerializeToString() if receiver.status == 200 else b"busy"
            if is_json:
                answer = b"{}"
            try:
                self.send_response(receiver.status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)
            except OSError:
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Handler) as server:
        receiver.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def _grpc(receiver: TraceReceiver) -> Iterator[None]:
    class Servicer:
        def Export(  # noqa: N802  # the name in the service
            self, request: ExportTraceServiceRequest, context: grpc.ServicerContext
        ) -> ExportTraceServiceResponse:
            receiver.headers.append(dict(context.invocation_metadata()))
            response = receiver.take(request)
            if receiver.status != 200:
                context.abort(grpc.StatusCode.UNAVAILABLE, "busy")
            return response

    server = grpc.server(ThreadPoolExecutor(4))
    add_TraceServiceServicer_to_server(Servicer(), server)
    receiver.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield
    finally:
        server.stop(None).wait()
