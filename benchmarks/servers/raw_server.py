"""A server that is never the bottleneck: it discards requests and sends prepared bytes.

It speaks just enough HTTP to stand in for an inference server. A request for the model
``answer_SIZE`` is answered with an FP32 tensor of SIZE bytes in binary form; for
``answer_SIZE_pausing`` it stops for half a second before it reads the request's body.

Usage: python -m benchmarks.servers.raw_server; it prints its port.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from dataclasses import dataclass

import orjson

from benchmarks.harness.client import HOST, SCRATCH_BYTES
from benchmarks.harness.requests import HEADER_LENGTH, normal

PAUSE = 0.5
"""Seconds that a pausing model waits before it reads the request."""

_TARGET = re.compile(rb"POST /v2/models/answer_(\d+)(_pausing)?/infer ")
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_BLOCK = memoryview(normal(SCRATCH_BYTES // 4).tobytes())


def model_responding(size: int, pausing: bool = False) -> str:
    """Return the name of the model whose response has so many bytes."""
    return f"answer_{size}{'_pausing' if pausing else ''}"


def main() -> None:
    """Serve until the process is ended."""
    with socket.create_server((HOST, 0)) as listening:
        print(listening.getsockname()[1], flush=True)
        while True:
            connection, _ = listening.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=_serve, args=(connection,), daemon=True).start()


@dataclass(frozen=True, slots=True)
class _Head:
    response_size: int
    pausing: bool
    missing: int
    """Bytes of the body that were not read with the head."""


def _serve(connection: socket.socket) -> None:
    scratch = bytearray(SCRATCH_BYTES)
    # A client may leave at any time.
    with connection, contextlib.suppress(ConnectionError):
        while (head := _read_head(connection)) is not None:
            if head.pausing:
                time.sleep(PAUSE)
            missing = head.missing
            while missing:
                # The kernel drops the bytes instead of copying them: tcp(7), MSG_TRUNC.
                size = connection.recv_into(scratch, min(missing, SCRATCH_BYTES), socket.MSG_TRUNC)
                if not size:
                    return
                missing -= size
            _response(connection, head.response_size)


def _read_head(connection: socket.socket) -> _Head | None:
    text = b""
    while b"\r\n\r\n" not in text:
        piece = connection.recv(4096)
        if not piece:
            return None
        text += piece
    head, _, rest = text.partition(b"\r\n\r\n")
    target, length = _TARGET.match(head), _LENGTH.search(head)
    if target is None or length is None:
        connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        return None
    return _Head(int(target[1]), target[2] is not None, int(length[1]) - len(rest))


def _response(connection: socket.socket, size: int) -> None:
    output = {
        "name": "OUTPUT0",
        "datatype": "FP32",
        "shape": [size // 4],
        "parameters": {"binary_data_size": size},
    }
    text = orjson.dumps({"model_name": "raw", "model_version": "1", "outputs": [output]})
    lines = (
        "HTTP/1.1 200 OK",
        "Content-Type: application/octet-stream",
        f"{HEADER_LENGTH}: {len(text)}",
        f"Content-Length: {len(text) + size}",
    )
    connection.sendall("\r\n".join((*lines, "", "")).encode() + text)
    for start in range(0, size, SCRATCH_BYTES):
        connection.sendall(_BLOCK[: size - start])


if __name__ == "__main__":
    main()
