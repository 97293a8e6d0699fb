"""Sends batches of spans to a receiver: OTLP over HTTP, and over gRPC.

https://opentelemetry.io/docs/specs/otlp/ is the specification; sections are those of it. The
messages are OpenTelemetry's own. Its exporters are not used: they would take 0.4 ms more for each
sampled call, see docs/decisions.md. This module needs the extra ``tensorgate[otel]``.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from socket import SHUT_RDWR, socket
from typing import Any, Final
from urllib.parse import urlsplit

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

_TRACES_PATH = "/v1/traces"
_MAX_RESPONSE = 64 * 1024
_QUOTED = 200
# Section "Failures": only these may be sent again.
_RETRYABLE_STATUSES = frozenset((429, 502, 503, 504))
_RETRYABLE_CODES = frozenset(
    (
        *("CANCELLED", "DEADLINE_EXCEEDED", "ABORTED", "OUT_OF_RANGE", "UNAVAILABLE"),
        *("DATA_LOSS", "RESOURCE_EXHAUSTED"),
    )
)


@dataclass(frozen=True, slots=True)
class Receiver:
    """Where spans go; ``headers`` may hold secrets."""

    endpoint: str
    protocol: str = "http"
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    ca: str | None = None


class ExportError(Exception):
    """A batch was not taken; it may be sent again if ``is_retryable``."""

    def __init__(self, message: str, is_retryable: bool) -> None:
        super().__init__(message)
        self.is_retryable: Final = is_retryable


@contextmanager
def _request_deadline(connection: HTTPConnection, seconds: float) -> Iterator[None]:
    """Connect if need be, and cut the connection off ``seconds`` later.

    Raises TimeoutError then, also if the server has sent a byte now and then. The connection's own
    timeout bounds the time to connect.
    """
    if connection.sock is None:
        connection.connect()
    sock = connection.sock  # the connection forgets it before a last response is read
    is_late = threading.Event()

    def cut_off() -> None:
        is_late.set()
        with suppress(OSError):  # it is not connected any more
            # Not that of an SSLSocket, which another thread is reading.
            socket.shutdown(sock, SHUT_RDWR)

    timer = threading.Timer(seconds, cut_off)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (OSError, HTTPException):
        if not is_late.is_set():
            raise
    finally:
        timer.cancel()
    if is_late.is_set():
        raise TimeoutError


class HttpSender:
    """Posts batches over one connection, which stays open; it blocks. It uses no proxy."""

    def __init__(self, receiver: Receiver) -> None:
        parts = urlsplit(receiver.endpoint)
        self._path: Final = parts.path if parts.path not in ("", "/") else _TRACES_PATH
        self._headers: Final = {
            **receiver.headers,
            "Content-Type": "application/x-protobuf",
            "User-Agent": "tensorgate",
        }
        host, port = parts.hostname or "", parts.port
        self._connection = HTTPConnection(host, port)
        """It connects with the next request, as often as need be."""
        if parts.scheme == "https":
            tls = ssl.create_default_context(cafile=receiver.ca)
            self._connection = HTTPSConnection(host, port, context=tls)
        self._closed = False

    def send(self, request: ExportTraceServiceRequest, timeout: float) -> int:
        """Send a batch; return how many of its spans the receiver has rejected.

        Raises ExportError.
        """
        is_reused = self._connection.sock is not None
        try:
            status, body = self._post(request.SerializeToString(), timeout)
        except (OSError, HTTPException) as error:
            self._disconnect()
            is_late = isinstance(error, TimeoutError)
            if is_reused and not self._closed and not is_late:
                return self.send(request, timeout)  # it may have closed the idle connection
            reason = "it did not respond in time" if is_late else str(error) or type(error).__name__
            raise ExportError(reason, True) from None
        if not 200 <= status < 300:
            text = body[:_QUOTED].decode(errors="replace").strip()
            why = f"the receiver returned {status}" + (f": {text}" if text.isprintable() else "")
            raise ExportError(why, status in _RETRYABLE_STATUSES)
        return _rejected(body)

    def _post(self, data: bytes, timeout: float) -> tuple[int, bytes]:
        connection = self._connection
        connection.timeout = timeout
        if connection.sock is not None:
            connection.sock.settimeout(timeout)
        with _request_deadline(connection, timeout):
            connection.request("POST", self._path, body=data, headers=self._headers)
            response = connection.getresponse()
            body = response.read(_MAX_RESPONSE)
        if not response.isclosed():
            self._disconnect()  # the rest of it is dropped
        return response.status, body

    def close(self) -> None:
        """Close the connection; an export in progress in another thread ends with an error."""
        self._closed = True
        self._disconnect()

    def _disconnect(self) -> None:
        sock = self._connection.sock
        if sock is not None:
            with suppress(OSError):  # it is not connected any more
                sock.shutdown(SHUT_RDWR)  # wakes a thread that waits for the response
        self._connection.close()


class GrpcSender:
    """Exports batches over gRPC, as HttpSender does."""

    def __init__(self, receiver: Receiver) -> None:
        # Only here: a gateway that exports over HTTP need not load it.
        import grpc
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceStub

        self._error: Final = grpc.RpcError
        parts = urlsplit(receiver.endpoint)
        options = [("grpc.enable_http_proxy", 0), ("grpc.primary_user_agent", "tensorgate")]
        self._channel: Any = None
        if parts.scheme == "https":
            authority = None if receiver.ca is None else Path(receiver.ca).read_bytes()
            credentials = grpc.ssl_channel_credentials(authority)
            self._channel = grpc.secure_channel(parts.netloc, credentials, options)
        else:
            self._channel = grpc.insecure_channel(parts.netloc, options)
        self._metadata: Final = [(name.lower(), value) for name, value in receiver.headers.items()]
        self._export: Final = TraceServiceStub(self._channel).Export

    def send(self, request: ExportTraceServiceRequest, timeout: float) -> int:
        """Send a batch."""
        try:
            response = self._export(request, timeout=timeout, metadata=self._metadata)
        except self._error as error:
            code = error.code().name
            why = f"the receiver returned {code}: {str(error.details())[:_QUOTED]}"
            raise ExportError(why, code in _RETRYABLE_CODES) from None
        except ValueError as error:  # the channel was closed
            raise ExportError(str(error), False) from None
        return int(response.partial_success.rejected_spans)

    def close(self) -> None:
        """Close the channel, which ends an export in progress."""
        self._channel.close()


Sender = HttpSender | GrpcSender


def make_sender(receiver: Receiver) -> Sender:
    """Return the sender of a receiver; raises OSError if its CA cannot be loaded."""
    return GrpcSender(receiver) if receiver.protocol == "grpc" else HttpSender(receiver)


def _rejected(body: bytes) -> int:
    """Return how many spans a response says were rejected; it may be no message at all."""
    try:
        return int(ExportTraceServiceResponse.FromString(body).partial_success.rejected_spans)
    except Exception:  # DecodeError of whatever implementation of protobuf there is
        return 0
