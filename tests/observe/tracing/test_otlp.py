"""Batches go to a receiver over HTTP and gRPC, and failures say whether to try again."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from gateway.observe.tracing.otlp import ExportError, HttpSender, Receiver, Sender, make_sender
from tests.support.addresses import free_address
from tests.support.certificates import ca_file
from tests.support.servers.trace_receiver import TraceReceiver, trace_receiver

PROTOCOLS = ("http", "grpc")


@pytest.fixture(params=PROTOCOLS)
def receiver(request: pytest.FixtureRequest) -> Iterator[TraceReceiver]:
    """A receiver of either protocol."""
    with trace_receiver(request.param) as running:
        yield running


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
    ("status", "is_retryable"),
    [(400, False), (401, False), (404, False), (429, True), (500, False), (502, True), (503, True)],
)
def test_status_says_whether_to_try_again(status: int, is_retryable: bool) -> None:
    with trace_receiver() as receiver:
        receiver.status = status
        sender = make_sender(Receiver(receiver.endpoint))
        with pytest.raises(ExportError, match=f"the receiver returned {status}: busy") as error:
            sender.send(_batch(), 5.0)
        assert error.value.is_retryable == is_retryable
        sender.close()


def test_unavailable_receiver_over_grpc_is_tried_again() -> None:
    with trace_receiver("grpc") as receiver:
        receiver.status = 503
        sender = make_sender(Receiver(receiver.endpoint, "grpc"))
        with pytest.raises(ExportError, match="UNAVAILABLE: busy") as error:
            sender.send(_batch(), 5.0)
        assert error.value.is_retryable
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
    while not receiver.sizes:
        time.sleep(0.01)
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
