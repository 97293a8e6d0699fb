"""Spans reach a receiver over HTTP and gRPC, or are dropped and counted; the loop only queues."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from gateway.observe import families
from gateway.observe.call_record import CallRecord
from gateway.observe.call_trace import CallTrace
from gateway.observe.gateway_metrics import TraceMetrics
from gateway.observe.metric_store import MetricStore
from gateway.observe.tracing import exporter as module
from gateway.observe.tracing.exporter import MAX_BATCH_BYTES, TraceExporter, size_of
from gateway.observe.tracing.otlp import ExportError, HttpSender, Receiver, Sender, make_sender
from gateway.observe.tracing.spans import SpanWriter
from tests.support.addresses import free_address
from tests.support.certificates import ca_file
from tests.support.compiled import needs_source
from tests.support.servers.trace_receiver import TraceReceiver, trace_receiver


class _Metrics:
    def __init__(self) -> None:
        self._store = MetricStore(families.FAMILIES, 1)
        self.of_exporter = TraceMetrics(self._store.writer(0))

    @property
    def exported(self) -> float:
        return self._store.sums(families.EXPORTED_SPANS)[()][0]

    @property
    def dropped(self) -> dict[str, float]:
        sums = self._store.sums(families.DROPPED_SPANS).items()
        return {reason: count for (reason,), (count,) in sums if count}


class _Sender:
    """Takes batches, unless ``error`` is set; waits for ``gate`` first."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.sizes: list[int] = []
        self.closed = False

    def send(self, request: Any, timeout: float) -> int:
        self.gate.wait(10)
        self.sizes.append(request.ByteSize())
        if self.error is not None:
            raise self.error
        return 0

    def close(self) -> None:
        self.closed = True
        self.gate.set()


def _record(target: str = "/v2/models/m/infer", attempts: int = 1) -> CallRecord:
    record = CallRecord("POST", target, "id", time.perf_counter())
    trace = record.trace = CallTrace(lambda _: None)
    for _ in range(attempts):
        record.set_endpoint("u", "http://a:1")
        record.begin_attempt(time.perf_counter())
        trace.begin_attempt(record, "POST", target)
        trace.set_status(200)
    record.status = 200
    return record


def _size_of(record: CallRecord) -> int:
    assert record.trace is not None
    return size_of(record, record.trace)


@contextmanager
def _exporter(
    sender: Any, metrics: _Metrics, interval: float = 0.01, **more: Any
) -> Iterator[TraceExporter]:
    writer = SpanWriter("test", "1", "i")
    exporter = TraceExporter(
        "http://r:4318", lambda: (writer, sender), metrics.of_exporter, interval, **more
    )
    try:
        yield exporter
    finally:
        exporter.close()


def _until(condition: Any) -> None:
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end, "the condition never held"
        time.sleep(0.005)


PROTOCOLS = ("http", "grpc")


@pytest.fixture(params=PROTOCOLS)
def receiver(request: pytest.FixtureRequest) -> Iterator[TraceReceiver]:
    """A receiver of either protocol."""
    with trace_receiver(request.param) as running:
        yield running


def _sender_to(receiver: TraceReceiver, **more: Any) -> Any:
    return make_sender(Receiver(receiver.endpoint, receiver.protocol, **more))


def test_spans_of_a_call_reach_the_receiver(receiver: TraceReceiver) -> None:
    metrics = _Metrics()
    with _exporter(_sender_to(receiver, headers={"X-Key": "k"}), metrics) as exporter:
        exporter.observe(_record())
        _until(lambda: receiver.spans)
        exporter.observe(_record())
    assert len(receiver.spans) == 4
    assert receiver.spans[0].service == "test"
    assert {headers["x-key"] for headers in receiver.headers} == {"k"}
    assert (metrics.exported, metrics.dropped) == (4, {})
    assert exporter.queued_bytes == 0


def test_call_that_is_not_traced_is_not_queued() -> None:
    sender, metrics = _Sender(), _Metrics()
    with _exporter(sender, metrics) as exporter:
        exporter.observe(CallRecord("GET", "/"))
    assert sender.sizes == []
    assert sender.closed


def test_queue_is_bounded_in_bytes() -> None:
    sender, metrics = _Sender(), _Metrics()
    sender.gate.clear()
    record = _record()
    most = 5 * _size_of(record)
    with _exporter(sender, metrics, max_queued_bytes=most) as exporter:
        for _ in range(8):
            exporter.observe(record)
            assert exporter.queued_bytes <= most
        assert metrics.dropped == {"queue_full": 6}
        sender.gate.set()
        _until(lambda: exporter.queued_bytes == 0)
        exporter.observe(record)
    assert metrics.exported == 12


def test_batches_are_bounded_in_bytes() -> None:
    sender, metrics = _Sender(), _Metrics()
    with _exporter(sender, metrics, interval=60.0, max_queued_bytes=2**30) as exporter:
        for _ in range(400):
            exporter.observe(_record("/" + "x" * 900))
    assert len(sender.sizes) > 1
    assert max(sender.sizes) <= MAX_BATCH_BYTES
    assert (metrics.exported, metrics.dropped) == (800, {})


@pytest.mark.parametrize("attempts", [0, 1, 32])
@pytest.mark.parametrize("target", ["/v2/models/m/infer", "/" + "x" * 60_000])
def test_size_of_a_call_is_more_than_its_spans_take(attempts: int, target: str) -> None:
    record = _record(target, attempts)
    assert record.trace is not None
    record.error = "e" * 2000
    record.trace.end_attempt(record)
    writer = SpanWriter("test", "1", "i")
    request = writer.new_request()
    empty = request.ByteSize()
    writer.write(request, record, 10**18)
    assert request.ByteSize() - empty < _size_of(record)


def test_full_batch_does_not_wait_for_the_interval() -> None:
    sender, metrics = _Sender(), _Metrics()
    with _exporter(sender, metrics, interval=60.0) as exporter:
        while exporter.queued_bytes < MAX_BATCH_BYTES and not sender.sizes:
            exporter.observe(_record())
        _until(lambda: sender.sizes)


@pytest.mark.parametrize("error", [ExportError("no such tenant", False), ZeroDivisionError("bug")])
def test_failed_export_is_counted_and_logged_once(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    sender, metrics = _Sender(), _Metrics()
    sender.error = error
    with _exporter(sender, metrics) as exporter:
        for number in range(1, 4):
            exporter.observe(_record())
            _until(lambda number=number: len(sender.sizes) == number)
        _until(lambda: metrics.dropped == {"export_failed": 6})
        sender.error = None
        exporter.observe(_record())
        _until(lambda: metrics.exported == 2)
    assert [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING] == [
        f"2 spans were not exported to http://r:4318: {error}",
        "2 more exports of spans failed within 10 s",
    ]


@needs_source
def test_export_is_tried_again_while_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_BACKOFF", 0.01)
    sender, metrics = _Sender(), _Metrics()
    sender.error = ExportError("busy", True)
    with _exporter(sender, metrics) as exporter:
        exporter.observe(_record())
        _until(lambda: len(sender.sizes) > 2)
        sender.error = None
        _until(lambda: metrics.exported == 2)
    assert metrics.dropped == {}


@pytest.mark.parametrize(
    ("said", "rejected"), [(1, {"rejected": 1}), (-5, {}), (2**62, {"rejected": 2})]
)
def test_receiver_cannot_reject_other_than_what_it_got(
    receiver: TraceReceiver, said: int, rejected: dict[str, float]
) -> None:
    """A counter would go down."""
    metrics = _Metrics()
    receiver.rejected = said
    with _exporter(_sender_to(receiver), metrics) as exporter:
        exporter.observe(_record())
    assert metrics.dropped == rejected
    assert metrics.exported == 2 - sum(rejected.values())


def test_end_is_bounded_with_a_receiver_that_hangs() -> None:
    sender, metrics = _Sender(), _Metrics()
    sender.gate.clear()
    with _exporter(sender, metrics) as exporter:
        exporter.observe(_record())
    assert sender.closed
    exporter.observe(_record())
    assert metrics.dropped == {"shutdown": 2}
    assert metrics.exported == 2


def test_packages_that_cannot_be_loaded_cost_spans_only(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> Any:
        raise ImportError("no such package")

    metrics = _Metrics()
    exporter = TraceExporter("http://r:4318", fail, metrics.of_exporter, 0.01)
    exporter._thread.join(5)
    exporter.observe(_record())
    exporter.close()
    assert metrics.dropped == {"shutdown": 2}
    assert "ImportError: no such package" in caplog.text


def test_call_whose_spans_cannot_be_written_does_not_end_the_export(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sender, metrics = _Sender(), _Metrics()
    broken = _record()
    assert broken.trace is not None
    broken.trace.attempts[0].seconds = float("nan")
    broken.seconds = float("nan")
    with _exporter(sender, metrics, interval=60.0) as exporter:
        exporter.observe(broken)
        exporter.observe(_record())
    assert (metrics.exported, metrics.dropped) == (2, {"export_failed": 2})
    assert "its spans failed" in caplog.text


def test_attempts_without_a_span_are_counted() -> None:
    sender, metrics = _Sender(), _Metrics()
    with _exporter(sender, metrics) as exporter:
        exporter.observe(_record(attempts=40))
    assert (metrics.exported, metrics.dropped) == (33, {"too_many_attempts": 8})


def test_thread_goes_on_after_an_error_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(SpanWriter):
        failed = False

        def count(self, request: Any) -> int:
            if not self.failed:
                self.failed = True
                raise ZeroDivisionError("a bug")
            return super().count(request)

    sender: Any = _Sender()
    metrics, writer = _Metrics(), Failing("test", "1", "i")
    exporter = TraceExporter("http://r", lambda: (writer, sender), metrics.of_exporter, 0.01)
    exporter.observe(_record())
    _until(lambda: writer.failed and not exporter.queued_bytes)
    exporter.observe(_record())
    _until(lambda: metrics.exported)
    exporter.close()
    assert "a bug" in caplog.text


def test_receiver_that_is_down_costs_spans_only(
    receiver: TraceReceiver, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = _Metrics()
    receiver.status = 503
    with _exporter(_sender_to(receiver), metrics) as exporter:
        exporter.observe(_record())
        _until(lambda: receiver.sizes)
    assert metrics.dropped == {"export_failed": 2}
    assert "the receiver returned" in caplog.text
    assert "Traceback" not in caplog.text


# Batches to a receiver


@pytest.fixture
def sender(receiver: TraceReceiver) -> Iterator[Sender]:
    """What sends to the receiver."""
    made = make_sender(Receiver(receiver.endpoint, receiver.protocol))
    yield made
    made.close()


def _batch() -> ExportTraceServiceRequest:
    batch = ExportTraceServiceRequest()
    scope = batch.resource_spans.add().scope_spans.add()
    scope.scope.name = "tensorgate"
    batch.resource_spans[0].resource.attributes.add(key="service.name").value.string_value = "s"
    scope.spans.add(name="one")
    return batch


@pytest.mark.parametrize(
    ("protocol", "status", "is_retryable"),
    [
        *(("http", status, False) for status in (400, 404, 500)),
        *(("http", status, True) for status in (429, 502, 503)),
        ("grpc", 503, True),
    ],
)
def test_status_says_whether_to_try_again(protocol: str, status: int, is_retryable: bool) -> None:
    said = "UNAVAILABLE" if protocol == "grpc" else f"the receiver returned {status}"
    with trace_receiver(protocol) as receiver:
        receiver.status = status
        sender = make_sender(Receiver(receiver.endpoint, protocol))
        with pytest.raises(ExportError, match=f"{said}: busy") as error:
            sender.send(_batch(), 5.0)
        assert error.value.is_retryable == is_retryable
        sender.close()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_receiver_that_is_not_there_is_tried_again(protocol: str) -> None:
    sender = make_sender(Receiver(f"http://{free_address()}", protocol))
    with pytest.raises(ExportError) as error:
        sender.send(_batch(), 5.0)
    assert error.value.is_retryable
    sender.close()


def test_slow_receiver_is_given_up(sender: Sender, receiver: TraceReceiver) -> None:
    receiver.delay = 0.5
    with pytest.raises(ExportError) as error:
        sender.send(_batch(), 0.1)
    assert error.value.is_retryable


def test_close_ends_an_export_in_progress(sender: Sender, receiver: TraceReceiver) -> None:
    receiver.delay = 30.0
    errors: list[Exception] = []

    def send() -> None:
        try:
            sender.send(_batch(), 20.0)
        except ExportError as error:
            errors.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    _until(lambda: receiver.sizes)
    sender.close()
    thread.join(10)
    assert not thread.is_alive()
    assert len(errors) == len(receiver.sizes) == 1


@pytest.mark.parametrize(
    ("path", "posted"),
    [("", "/v1/traces"), ("/otlp/v1/traces", "/otlp/v1/traces"), ("/own", "/own")],
)
def test_path_of_the_endpoint_is_kept(path: str, posted: str) -> None:
    with trace_receiver() as receiver:
        sender = make_sender(Receiver(receiver.endpoint + path))
        sender.send(_batch(), 5.0)
        sender.close()
    assert receiver.paths == [posted]
    assert receiver.headers[0]["content-type"] == "application/x-protobuf"


def test_no_proxy_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "grpc_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://{free_address()}")
    for protocol in PROTOCOLS:
        with trace_receiver(protocol) as receiver:
            sender = make_sender(Receiver(receiver.endpoint, protocol))
            sender.send(_batch(), 5.0)
            sender.close()
            assert len(receiver.spans) == 1


def test_connection_that_the_receiver_has_closed_is_replaced() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = HttpSender(Receiver(f"http://127.0.0.1:{server.getsockname()[1]}"))

        def serve() -> None:
            for _ in range(2):  # each connection serves one request, and says nothing of it
                connection, _ = server.accept()
                with connection:
                    received = b""
                    while b"one" not in received:
                        received += connection.recv(65536)
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        for _ in range(2):
            assert sender.send(_batch(), 5.0) == 0
        thread.join(5)
        sender.close()


@pytest.mark.parametrize(
    ("start", "drip"),
    [
        (b"HTTP/1.1 200 ", b"x"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10000\r\n\r\n", b"x"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
    ],
    ids=["status", "interim", "body", "chunks"],
)
def test_receiver_that_sends_a_byte_now_and_then_is_given_up(start: bytes, drip: bytes) -> None:
    stopped = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = HttpSender(Receiver(f"http://127.0.0.1:{server.getsockname()[1]}"))

        def serve() -> None:
            connection, _ = server.accept()
            with connection, suppress(OSError):
                connection.sendall(start)
                while not stopped.wait(0.02):
                    connection.sendall(drip)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with pytest.raises(ExportError, match="did not respond in time") as error:
                sender.send(_batch(), 0.2)
            assert error.value.is_retryable
        finally:
            stopped.set()
            thread.join(5)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_tls_needs_a_certificate_of_the_ca(protocol: str, tmp_path: Path) -> None:
    """A receiver without TLS is none: nothing is sent in plain text."""
    with trace_receiver(protocol) as receiver:
        endpoint = receiver.endpoint.replace("http://", "https://")
        sender = make_sender(Receiver(endpoint, protocol, ca=ca_file(tmp_path)))
        with pytest.raises(ExportError):
            sender.send(_batch(), 2.0)
        sender.close()
        assert receiver.spans == []


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_ca_that_cannot_be_read_is_an_error(protocol: str, tmp_path: Path) -> None:
    with pytest.raises(OSError):
        make_sender(Receiver("https://127.0.0.1:1", protocol, ca=str(tmp_path / "missing")))


def test_headers_are_not_shown() -> None:
    assert "secret" not in repr(Receiver("http://a:1", headers={"key": "secret"}))
