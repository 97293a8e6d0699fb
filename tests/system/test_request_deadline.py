"""A request ends at its deadline, whatever the server sends meanwhile."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException

import pytest

from gateway.system.request_deadline import request_deadline

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
_PAUSE = 0.02


@contextmanager
def _server(start: bytes, drip: bytes = b"") -> Iterator[HTTPConnection]:
    """Serve a response, and then a few bytes time and again; yield a connection to the server."""
    stopped = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(65536)
                try:
                    connection.sendall(start)
                    while drip and not stopped.wait(_PAUSE):
                        connection.sendall(drip)
                except OSError:
                    pass  # it was cut off

        thread = threading.Thread(target=serve)
        thread.start()
        host, port = listening.getsockname()
        client = HTTPConnection(host, port, timeout=10)
        try:
            yield client
        finally:
            client.close()
            stopped.set()
            thread.join(10)


def _get(connection: HTTPConnection, seconds: float) -> bytes:
    with request_deadline(connection, seconds):
        connection.request("GET", "/")
        return connection.getresponse().read()


def test_request_in_time_is_untouched() -> None:
    with _server(OK) as connection:
        assert _get(connection, 10.0) == b"ok"
        assert connection.sock is not None


@pytest.mark.parametrize(
    ("start", "drip"),
    [
        (b"HTTP/1.1 ", b"2"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10000\r\n\r\n", b"x"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
    ],
    ids=["status", "interim", "body", "chunks"],
)
def test_server_that_sends_a_byte_now_and_then_is_cut_off(start: bytes, drip: bytes) -> None:
    with _server(start, drip) as connection, pytest.raises(TimeoutError):
        _get(connection, 0.2)


def test_other_errors_are_raised_as_they_are() -> None:
    with _server(b"SSH-2.0\r\n") as connection, pytest.raises(HTTPException):
        _get(connection, 10.0)
    with pytest.raises(ConnectionRefusedError):
        _get(connection, 10.0)
