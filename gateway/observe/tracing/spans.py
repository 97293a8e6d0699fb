"""Writes the spans of traced calls, in OpenTelemetry's messages, from the records of the calls.

Names follow OpenTelemetry's semantic conventions for HTTP and RPC; what they do not have is under
``tensorgate.``. Payloads, queries of URLs and headers are never shown. This module needs the extra
``tensorgate[otel]``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from http import HTTPMethod
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, SpanFlags, Status

from gateway.errors import replace_surrogates, shorten
from gateway.observe.call_record import CallRecord
from gateway.observe.call_trace import ABORTED, AttemptTrace, CallTrace, new_span_id
from gateway.protocol.grpc.status import GrpcStatus
from gateway.system.bounded_cache import cached

Value = str | int | float
Attributes = dict[str, Value]

_MAX_TEXT, _MAX_PATH = 500, 1000
"""Characters of a text."""
_NANOSECONDS = 1_000_000_000
_FIRST_CLIENT_ERROR, _FIRST_SERVER_ERROR = 400, 500
_OTHER = "_OTHER"
"""What the conventions have for a method that may be one of any number."""
_SAMPLED = 0x01

_SERVER, _CLIENT, _INTERNAL = (
    Span.SPAN_KIND_SERVER,
    Span.SPAN_KIND_CLIENT,
    Span.SPAN_KIND_INTERNAL,
)
_LOCAL = _SAMPLED | SpanFlags.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK
_REMOTE = _LOCAL | SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK

_METHODS = frozenset(HTTPMethod)
_GRPC_STATUSES = {int(each): each.name for each in GrpcStatus}
_GRPC_SERVER_ERRORS = frozenset(
    ("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS")
)
"""Statuses that are errors of the server; others are those of its client."""

_PATHS = frozenset(
    (
        "/v1/models",
        "/v2",
        "/v2/health/live",
        "/v2/health/ready",
        "/v2/logging",
        "/v2/models/stats",
        "/v2/repository/index",
        "/v2/trace",
        "/v2/trace/setting",
    )
)
"""The paths of the protocol that name no model."""
_MODEL_PATHS = (
    re.compile(r"(/v1/models)/[^/]+?(/versions/[^/]+?)?(:predict)?"),
    re.compile(
        r"(/v2/models)/[^/]+(/versions/[^/]+)?"
        r"(/infer|/generate|/generate_stream|/ready|/config|/stats|/trace|/trace/setting)?"
    ),
    re.compile(r"(/v2/repository/models)/[^/]+()(/load|/unload)"),
)
"""Those of a model: what is before its name, its version, and what follows."""
_AUTHORITY = re.compile(r"(?P<host>\[[^\]]*\]|[^:]*)(?::(?P<port>[0-9]{1,5}))?")


class SpanWriter:
    """Writes spans of one service.

    Its resource has the attributes in OTEL_RESOURCE_ATTRIBUTES, too.
    """

    def __init__(self, service_name: str, version: str, instance: str) -> None:
        self._template: Final = ExportTraceServiceRequest()
        scope_spans = self._template.resource_spans.add()
        own = {"service.name": service_name, "service.version": version}
        own["service.instance.id"] = instance
        _add(scope_spans.resource, {**_environment_attributes(), **own})
        scope = scope_spans.scope_spans.add().scope
        scope.name, scope.version = "tensorgate", version

    def new_request(self) -> ExportTraceServiceRequest:
        """Return the request of a batch, without spans."""
        request = ExportTraceServiceRequest()
        request.CopyFrom(self._template)
        return request

    def count(self, request: ExportTraceServiceRequest) -> int:
        """Return how many spans a batch has."""
        return len(_spans_of(request))

    def write(self, request: ExportTraceServiceRequest, record: CallRecord, started: int) -> None:
        """Add the spans of a call that began ``started`` nanoseconds after 1970."""
        spans = _spans_of(request)
        before = len(spans)
        try:
            _CallWriter(spans, record, started).write()
        except BaseException:
            del spans[before:]
            raise


def _spans_of(request: ExportTraceServiceRequest) -> Any:
    return request.resource_spans[0].scope_spans[0].spans


class _CallWriter:
    """Writes the spans of one call: its own first, then those below it."""

    def __init__(self, spans: Any, record: CallRecord, started: int) -> None:
        trace = record.trace
        assert trace is not None
        self._spans = spans
        self._record = record
        self._trace: CallTrace = trace
        self._started = started
        self._end = record.started + record.seconds
        self._trace_id = bytes.fromhex(trace.trace_id)
        self._call_id = bytes.fromhex(trace.span_id)

    def write(self) -> None:
        record, trace = self._record, self._trace
        self._write_call()
        if record.server_form and trace.prepared_at:
            elements = record.request_elements
            self._write_part("convert request", trace.preparing_at, trace.prepared_at, elements)
        if trace.queued_at:
            self._write_part("queue", trace.queued_at, trace.admitted_at)
        for number, attempt in enumerate(trace.attempts):
            self._write_attempt(number, attempt)
        if record.response_elements and trace.attempts:
            last = trace.attempts[-1]
            # The streaming path converts a response while it arrives.
            begin = last.started + (last.first_byte_seconds if trace.is_streamed else last.seconds)
            self._write_part("convert response", begin, self._end, record.response_elements)

    def _write_call(self) -> None:
        record, trace = self._record, self._trace
        operation = record.labels.operation
        attributes = _call_attributes(record)
        kind = _SERVER
        if trace.mirror:
            attributes["tensorgate.mirror"] = trace.mirror
            name, kind = f"mirror {trace.mirror}", _INTERNAL
        elif record.labels.client_form == "grpc" or record.grpc_status >= 0:
            name = _describe_rpc(attributes, record.target, operation)
            self._add_connection(attributes)
        else:
            name = _describe_http(attributes, record.method, record.target, operation)
            attributes["url.path"] = _path(record.target)
            attributes["url.scheme"] = trace.scheme
            if route := http_route(record.target.partition("?")[0], operation):
                attributes["http.route"] = route
            self._add_connection(attributes)
        error = self._add_result(attributes)
        span = self._add_span(name, kind, self._call_id, record.started, self._end)
        if trace.parent_id:
            span.parent_span_id = bytes.fromhex(trace.parent_id)
            span.flags = _LOCAL if trace.mirror else _REMOTE
        _add_shared(span, attributes)
        _add(span, _own_attributes(record))
        if error:
            _set_error(span, record.error or record.server_error)

    def _add_connection(self, attributes: Attributes) -> None:
        attributes |= _authority(self._trace.host)
        attributes["network.protocol.version"] = self._trace.http_version

    def _add_result(self, attributes: Attributes) -> str:
        """Add the result of the call; return the type of its error, empty for none."""
        record = self._record
        code, is_error = "", True
        if record.grpc_status >= 0:
            code = attributes["rpc.response.status_code"] = _grpc_status(record.grpc_status)
            is_error = code in _GRPC_SERVER_ERRORS
        elif record.status:
            code = str(record.status)
            attributes["http.response.status_code"] = record.status
            # A response may have broken off.
            is_broken = bool(record.error) and record.status < _FIRST_CLIENT_ERROR
            is_error = is_broken or record.status >= _FIRST_SERVER_ERROR
        kind = "" if record.error_kind is None else record.error_kind.name.lower()
        if kind:
            attributes["tensorgate.error_kind"] = kind
        if not is_error:
            return ""
        has_status = bool(code) and record.status >= _FIRST_CLIENT_ERROR
        error = kind or (code if has_status else ABORTED)
        attributes["error.type"] = error
        return error

    def _write_attempt(self, number: int, attempt: AttemptTrace) -> None:
        record, trace = self._record, self._trace
        operation = record.labels.operation
        attributes: Attributes = {"tensorgate.upstream": attempt.upstream}
        own: Attributes = {
            "tensorgate.sent_bytes": attempt.sent_bytes,
            "tensorgate.received_bytes": attempt.received_bytes,
        }
        if record.labels.model:
            attributes["tensorgate.model"] = _text(record.labels.model)
        if attempt.first_byte_seconds:
            own["tensorgate.first_byte_ms"] = round(attempt.first_byte_seconds * 1000, 3)
        attributes |= _server_of(attempt.endpoint)
        status = "" if attempt.status or attempt.error_type else ABORTED
        if attempt.is_grpc:
            name = _describe_rpc(attributes, attempt.target, operation)
            if attempt.grpc_status >= 0:
                code = attributes["rpc.response.status_code"] = _grpc_status(attempt.grpc_status)
                status = code if attempt.grpc_status else ""
        else:
            name = _describe_http(attributes, attempt.method, attempt.target, operation)
            url = attempt.endpoint.partition(" ")[0]  # the address of a host name may be behind
            attributes["url.full"] = url + _path(attempt.target)
            if attempt.status:
                attributes["http.response.status_code"] = attempt.status
                status = str(attempt.status) if attempt.status >= _FIRST_CLIENT_ERROR else ""
            if number and record.retries and not trace.has_parts:
                own["http.request.resend_count"] = number
        end = min(attempt.started + max(attempt.seconds, 0.0), self._end)
        span_id = bytes.fromhex(attempt.span_id)
        span = self._add_span(name, _CLIENT, span_id, attempt.started, end)
        if error := status or attempt.error_type:
            attributes["error.type"] = error
            _set_error(span, attempt.error)
        span.parent_span_id = self._call_id
        _add_shared(span, attributes)
        _add(span, own)

    def _write_part(self, name: str, begin: float, end: float, elements: int = 0) -> None:
        span_id = bytes.fromhex(new_span_id())
        span = self._add_span(name, _INTERNAL, span_id, begin, min(end, self._end))
        span.parent_span_id = self._call_id
        if elements:
            _add(span, {"tensorgate.elements": elements})

    def _add_span(self, name: str, kind: int, span_id: bytes, begin: float, end: float) -> Any:
        start = self._at(begin)
        return self._spans.add(
            trace_id=self._trace_id,
            span_id=span_id,
            trace_state=self._trace.state,
            name=name,
            kind=kind,
            flags=_LOCAL,
            start_time_unix_nano=start,
            end_time_unix_nano=max(self._at(end), start),
        )

    def _at(self, seconds: float) -> int:
        """Return a time on the clock of the record in nanoseconds after 1970."""
        return self._started + int((seconds - self._record.started) * _NANOSECONDS)


def _add_shared(span: Any, attributes: Mapping[str, Value]) -> None:
    """Add attributes that many spans share: their encoded form is cached."""
    span.MergeFromString(_encode_attributes(tuple(attributes.items())))


@cached(256)
def _encode_attributes(attributes: tuple[tuple[str, Value], ...]) -> bytes:
    span = Span()
    _add(span, dict(attributes))
    return bytes(span.SerializeToString())


def _add(message: Any, attributes: Mapping[str, Value]) -> None:
    """Add attributes to a span or a resource."""
    for name, value in attributes.items():
        added = message.attributes.add(key=name).value
        if isinstance(value, str):
            added.string_value = value
        elif isinstance(value, int):
            added.int_value = value
        else:
            added.double_value = value


def _set_error(span: Any, why: str) -> None:
    span.status.code = Status.STATUS_CODE_ERROR
    if why:
        span.status.message = _text(why)


def _call_attributes(record: CallRecord) -> Attributes:
    labels = record.labels
    texts = {
        "tensorgate.operation": labels.operation,
        "tensorgate.route": labels.route,
        "tensorgate.model": _text(labels.model),
        "tensorgate.version": _text(labels.version),
        "tensorgate.upstream": record.upstream,
        "tensorgate.client_form": labels.client_form,
        "tensorgate.server_form": record.server_form,
    }
    return {name: value for name, value in texts.items() if value}


def _own_attributes(record: CallRecord) -> Attributes:
    """Return the attributes that differ from call to call."""
    optional: Attributes = {
        "client.address": record.client,
        "tensorgate.request_id": record.request_id,
        "tensorgate.retries": record.retries,
    }
    return {
        "tensorgate.attempts": record.attempts,
        "tensorgate.request_bytes": record.request_bytes,
        "tensorgate.response_bytes": record.response_bytes,
        **{name: value for name, value in optional.items() if value},
    }


def _describe_http(attributes: Attributes, method: str, target: str, operation: str) -> str:
    """Add the method of a request; return the name of its span."""
    known = method if method in _METHODS else _OTHER
    attributes["http.request.method"] = known
    if known is _OTHER:
        attributes["http.request.method_original"] = _text(method)
    name = "HTTP" if known is _OTHER else known
    route = http_route(target.partition("?")[0], operation)
    return f"{name} {route}" if route else name


def _describe_rpc(attributes: Attributes, target: str, operation: str) -> str:
    """Add the method of a gRPC call; return the name of its span."""
    method = _path(target).removeprefix("/")
    attributes["rpc.system.name"] = "grpc"
    if operation in ("", "other"):  # clients could make any number of them
        attributes["rpc.method"], attributes["rpc.method_original"] = _OTHER, method
        return "grpc"
    attributes["rpc.method"] = method
    return method


def http_route(path: str, operation: str) -> str:
    """Return the template of a path of the protocol; empty for any other path."""
    return _path_template(path, operation) if len(path) <= _MAX_PATH else ""


@cached(256)
def _path_template(path: str, operation: str) -> str:
    if operation in ("", "other"):
        return ""
    if path in _PATHS:
        return path
    for pattern in _MODEL_PATHS:
        if found := pattern.fullmatch(path):
            models, version, rest = found.groups("")
            return f"{models}/{{model}}{'/versions/{version}' if version else ''}{rest}"
    return ""


def _grpc_status(code: int) -> str:
    return _GRPC_STATUSES.get(code, str(code))


def _path(target: str) -> str:
    """Return the path of a target, without its query, which may hold secrets."""
    return shorten(replace_surrogates(target.partition("?")[0]), _MAX_PATH)


def _text(text: str) -> str:
    return shorten(replace_surrogates(text), _MAX_TEXT)


@cached(256)
def _authority(host: str) -> Mapping[str, Value]:
    found = _AUTHORITY.fullmatch(host)
    if found is None or not found["host"]:
        return {}
    attributes: Attributes = {"server.address": _text(found["host"].strip("[]"))}
    if found["port"]:
        attributes["server.port"] = int(found["port"])
    return attributes


@cached(256)
def _server_of(endpoint: str) -> Mapping[str, Value]:
    url, _, address = endpoint.partition(" ")
    if url.startswith("unix:"):
        return {"server.address": url.removeprefix("unix:"), "network.transport": "unix"}
    attributes = dict(_authority(urlsplit(url).netloc))
    if address:
        attributes["network.peer.address"] = address.strip("()")
    return attributes


def _environment_attributes() -> Attributes:
    """Return the attributes of OTEL_RESOURCE_ATTRIBUTES: name=value pairs, percent-encoded."""
    pairs = os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "").split(",")
    split = [pair.partition("=") for pair in pairs]
    return {name.strip(): unquote(value.strip()) for name, is_pair, value in split if is_pair}
