"""Bounds the time of a whole request that blocks: a socket's timeout bounds each read alone."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException


@contextmanager
def request_deadline(connection: HTTPConnection, seconds: float) -> Iterator[None]:
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
            socket.socket.shutdown(sock, socket.SHUT_RDWR)

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
