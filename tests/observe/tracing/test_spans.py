"""What the spans of a call tell, and what they never tell."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.errors import ErrorKind, GatewayError
from gateway.observe.call_record import CallLabels, CallRecord
from gateway.observe.call_trace import CallTrace
from gateway.observe.tracing.spans import SpanWriter, http_route
from tests.support.servers.trace_receiver import CLIENT, INTERNAL, SERVER, ReceivedSpan, decode

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
BEGAN = 1_700_000_000_000_000_000
JSON = CallLabels("main", "infer", "m", "2", "json")
GRPC = CallLabels("main", "infer", "m", "", "grpc")
RPC = "/inference.GRPCInferenceService/ModelInfer"


def _call(
    method: str = "POST", target: str = "/v2/models/m/infer", labels: CallLabels = JSON
) -> tuple[CallRecord, CallTrace]:
    """Return a call that took a second and began at 5 on the clock of the record."""
    record = CallRecord(method, target, "id-1", 5.0)
    record.labels, record.client = labels, "10.0.0.1"
    record.seconds, record.status = 1.0, 200
    trace = record.trace = CallTrace(lambda _: None, TRACE, SPAN)
    trace.scheme, trace.host, trace.http_version = "https", "gw.example:8443", "1.1"
    return record, trace


def _attempt(
    record: CallRecord,
    status: int = 200,
    target: str = "/v2/models/m/infer",
    endpoint: str = "http://127.0.0.1:8000",
    is_grpc: bool = False,
) -> None:
    assert record.trace is not None
    record.set_endpoint("triton", endpoint)
    record.begin_attempt(5.25)
    record.trace.begin_attempt(record, "POST", target, is_grpc)
    record.trace.set_status(status)
    record.server_seconds, record.first_byte_seconds = 0.5, 0.125
    record.sent_bytes, record.received_bytes = 10, 20


def _spans(record: CallRecord) -> list[ReceivedSpan]:
    assert record.trace is not None
    record.trace.end_attempt(record)
    writer = SpanWriter("tensorgate", "1", "i")
    request = writer.new_request()
    writer.write(request, record, BEGAN)
    assert writer.count(request) == len(list(decode(request)))
    return list(decode(request))


def test_spans_of_a_conversion() -> None:
    record, trace = _call()
    record.server_form, record.request_elements, record.response_elements = "binary", 3, 4
    trace.set_prepared(5.0, 5.125)
    trace.set_queued(5.125, 5.25)
    _attempt(record)
    call, convert, queue, attempt, back = _spans(record)
    shown = [
        (each.name, each.kind, (each.start - BEGAN) // 10**6, (each.end - BEGAN) // 10**6)
        for each in (call, convert, queue, attempt, back)
    ]
    assert shown == [
        ("POST /v2/models/{model}/infer", SERVER, 0, 1000),
        ("convert request", INTERNAL, 0, 125),
        ("queue", INTERNAL, 125, 250),
        ("POST /v2/models/{model}/infer", CLIENT, 250, 750),
        ("convert response", INTERNAL, 750, 1000),
    ]
    assert (call.trace_id, call.parent_id) == (TRACE, SPAN)
    assert all(call.holds(each) for each in (convert, queue, attempt, back))
    assert convert.attributes == {"tensorgate.elements": 3}
    assert back.attributes == {"tensorgate.elements": 4}
    assert _shown(call) == _listed(
        """
        http.request.method=POST http.route=/v2/models/{model}/infer http.response.status_code=200
        url.path=/v2/models/m/infer url.scheme=https server.address=gw.example server.port=8443
        client.address=10.0.0.1 network.protocol.version=1.1 tensorgate.operation=infer
        tensorgate.route=main tensorgate.model=m tensorgate.version=2 tensorgate.upstream=triton
        tensorgate.client_form=json tensorgate.server_form=binary tensorgate.request_id=id-1
        tensorgate.attempts=1 tensorgate.request_bytes=0 tensorgate.response_bytes=0
        """
    )
    assert _shown(attempt) == _listed(
        """
        http.request.method=POST http.response.status_code=200 server.address=127.0.0.1
        url.full=http://127.0.0.1:8000/v2/models/m/infer server.port=8000 tensorgate.model=m
        tensorgate.upstream=triton tensorgate.sent_bytes=10 tensorgate.received_bytes=20
        tensorgate.first_byte_ms=125.0
        """
    )


def _shown(span: ReceivedSpan) -> set[str]:
    return {f"{name}={value}" for name, value in span.attributes.items()}


def _listed(attributes: str) -> set[str]:
    return set(attributes.split())


def test_response_that_streams_is_converted_from_its_first_byte() -> None:
    record, trace = _call()
    record.server_form, record.response_elements = "binary", 4
    _attempt(record)
    trace.is_streamed = True
    back = _spans(record)[-1]
    assert back.name == "convert response"
    assert (back.start - BEGAN, back.end - BEGAN) == (375_000_000, 1_000_000_000)


def test_spans_of_a_grpc_call() -> None:
    record, _ = _call("POST", RPC, GRPC)
    record.grpc_status, record.status = 14, 503
    record.error, record.error_kind = "no endpoint", ErrorKind.UNREACHABLE
    _attempt(record, target=RPC, endpoint="grpc://[::1]:8001", is_grpc=True)
    call, attempt = _spans(record)
    name = "inference.GRPCInferenceService/ModelInfer"
    assert (call.name, attempt.name) == (name, name)
    for span in (call, attempt):
        assert span.error
        assert span.attributes["rpc.system.name"] == "grpc"
        assert span.attributes["rpc.method"] == name
        assert span.attributes["rpc.response.status_code"] == "UNAVAILABLE"
        assert not any(key.startswith(("http.", "url.")) for key in span.attributes)
    assert (call.message, call.attributes["error.type"]) == ("no endpoint", "unreachable")
    assert attempt.attributes["error.type"] == "UNAVAILABLE"
    assert (attempt.attributes["server.address"], attempt.attributes["server.port"]) == (
        "::1",
        8001,
    )


@pytest.mark.parametrize(
    ("code", "name", "is_error"),
    [
        (0, "OK", False),
        (2, "UNKNOWN", True),
        (4, "DEADLINE_EXCEEDED", True),
        (15, "DATA_LOSS", True),
        (99, "99", False),
    ],
)
def test_grpc_status_is_an_error_if_it_is_the_servers(code: int, name: str, is_error: bool) -> None:
    record, _ = _call("POST", RPC, GRPC)
    record.grpc_status = code
    (call,) = _spans(record)
    assert call.attributes["rpc.response.status_code"] == name
    assert call.error == is_error


@pytest.mark.parametrize(
    ("status", "error", "kind", "error_type"),
    [
        (200, "", None, None),
        (404, "no route", ErrorKind.NOT_FOUND, None),
        (500, "", None, "500"),
        (503, "full", ErrorKind.OVERLOADED, "overloaded"),
        (200, "cut short", ErrorKind.BAD_RESPONSE, "bad_response"),
        (200, "the client closed the connection", None, "aborted"),
        (0, "the client closed the connection", None, "aborted"),
    ],
)
def test_result_of_a_call(
    status: int, error: str, kind: ErrorKind | None, error_type: str | None
) -> None:
    record, _ = _call()
    record.status, record.error, record.error_kind = status, error, kind
    (call,) = _spans(record)
    assert call.attributes.get("error.type") == error_type
    assert call.error == (error_type is not None)
    assert call.attributes.get("http.response.status_code") == (status or None)
    if call.error:
        assert call.message == error


@pytest.mark.parametrize(("status", "error"), [(400, "400"), (503, "503"), (0, "aborted")])
def test_attempt_fails_by_its_status_or_without_a_response(status: int, error: str) -> None:
    record, _ = _call()
    _attempt(record, status)
    attempt = _spans(record)[1]
    assert attempt.error
    assert attempt.attributes["error.type"] == error


def test_retry_says_how_often_the_request_was_sent_before() -> None:
    record, trace = _call()
    _attempt(record, endpoint="http://a:1")
    trace.fail_attempt(GatewayError(ErrorKind.NO_RESPONSE, "closed"))
    record.retries = 1
    _attempt(record, endpoint="http://b:1")
    _, one, two = _spans(record)
    assert (one.error, one.message) == (True, "closed")
    assert "http.request.resend_count" not in one.attributes
    assert two.attributes["http.request.resend_count"] == 1
    assert not two.error


def test_span_of_a_mirrored_copy_is_below_its_call() -> None:
    record, trace = _call()
    copy, _ = _call()
    copy.trace = trace.copy_for_mirror("shadow")
    (call,), (mirror,) = _spans(record), _spans(copy)
    assert (mirror.name, mirror.kind) == ("mirror shadow", INTERNAL)
    assert (mirror.trace_id, mirror.parent_id) == (TRACE, call.span_id)
    assert mirror.attributes["tensorgate.mirror"] == "shadow"
    # OTLP: bit 8 says that bit 9 is known, which says that the parent is remote.
    assert (call.flags, mirror.flags) == (0x301, 0x101)


def test_queries_long_texts_and_other_than_utf_8_are_not_shown() -> None:
    secret = "/v2/models/m/infer?token=secret"
    record, _ = _call(target=secret)
    record.status, record.error = 500, "e" * 10_000
    _attempt(record, target=secret)
    call, attempt = _spans(record)
    assert "secret" not in repr((call, attempt))
    assert len(call.message) < 600
    record, _ = _call("GET", "/\udcff" + "x" * 60_000, CallLabels("", "other", "\udcff"))
    (call,) = _spans(record)
    assert call.attributes["url.path"][:3] == "/?x"
    assert len(call.attributes["url.path"]) < 1100
    assert call.name == "GET"


def test_unknown_methods_have_no_names_of_their_own() -> None:
    record, _ = _call("PURGE", "/x", CallLabels("", "other"))
    (call,) = _spans(record)
    assert call.name == "HTTP"
    assert call.attributes["http.request.method"] == "_OTHER"
    assert call.attributes["http.request.method_original"] == "PURGE"
    record, _ = _call("POST", "/any.Service/Any", CallLabels("", "other", "", "", "grpc"))
    (call,) = _spans(record)
    assert (call.name, call.attributes["rpc.method"]) == ("grpc", "_OTHER")
    assert call.attributes["rpc.method_original"] == "any.Service/Any"


@pytest.mark.parametrize(
    ("path", "operation", "route"),
    [
        ("/v2/models/m/infer", "infer", "/v2/models/{model}/infer"),
        ("/v2/models/m/versions/3/infer", "infer", "/v2/models/{model}/versions/{version}/infer"),
        ("/v2/models/versions/versions/1", "metadata", "/v2/models/{model}/versions/{version}"),
        ("/v1/models/m:predict", "infer", "/v1/models/{model}:predict"),
        (
            "/v1/models/m/versions/3:predict",
            "infer",
            "/v1/models/{model}/versions/{version}:predict",
        ),
        ("/v2/models/a:predict", "metadata", "/v2/models/{model}"),
        ("/v1/models", "repository", "/v1/models"),
        ("/v2/models/stats", "statistics", "/v2/models/stats"),
        ("/v2/repository/models/m/load", "repository", "/v2/repository/models/{model}/load"),
        ("/v2/repository/own/models/m/load", "repository", ""),
        ("/v2/repository/models/versions/anything-42/load", "repository", ""),
        ("/v2/systemsharedmemory/region/r/status", "shared_memory", ""),
        ("/v2/models/m/infer", "other", ""),
        ("/v2/" + "models/" * 500, "metadata", ""),
        ("", "", ""),
    ],
)
def test_route_is_the_template_of_a_path(path: str, operation: str, route: str) -> None:
    assert http_route(path, operation) == route


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("http://h:8000 (10.0.0.2)", {"server.address": "h", "network.peer.address": "10.0.0.2"}),
        ("unix:/run/s.sock", {"server.address": "/run/s.sock", "network.transport": "unix"}),
        ("https://[::1]:8000", {"server.address": "::1", "server.port": 8000}),
    ],
)
def test_endpoint_is_told_as_the_conventions_have_it(
    endpoint: str, expected: dict[str, Any]
) -> None:
    record, _ = _call()
    _attempt(record, endpoint=endpoint)
    attributes = _spans(record)[1].attributes
    assert {name: attributes[name] for name in expected} == expected


def test_resource_has_the_attributes_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = "k8s.pod.name=pod-1, team=a%20b,service.name=other,nonsense"
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", pairs)
    record, _ = _call()
    (call,) = _spans(record)
    assert call.resource["k8s.pod.name"] == "pod-1"
    assert call.resource["team"] == "a b"
    assert call.resource["service.name"] == "tensorgate"
