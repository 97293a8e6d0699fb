"""A cheap HTTP/1.1 client, which shares the cores with what is measured."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from benchmarks.harness.requests import HEADER_LENGTH, Request

HOST = "127.0.0.1"
SCRATCH_BYTES = 1024 * 1024

_LAST_CHUNK = b"\r\n0\r\n\r\n"
_TIMEOUT = 120.0


class BenchmarkError(Exception):
    """A measurement failed; the message says how."""


class NotInstalledError(BenchmarkError):
    """A measurement needs a program that is missing; the message says how to install it."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds until the first byte of a response body, and until the last."""

    first_byte: float
    total: float


@dataclass(frozen=True, slots=True)
class Response:
    """A response body, and the length of its JSON part if it is binary."""

    body: bytes
    json_length: int | None


@dataclass(slots=True)
class _Progress:
    """The missing bytes of a response, None if it is chunked, and its last bytes."""

    missing: int | None
    tail: bytes = b""

    @property
    def ended(self) -> bool:
        return self.tail == _LAST_CHUNK if self.missing is None else self.missing == 0

    def take(self, piece: memoryview) -> None:
        if self.missing is not None:
            self.missing -= len(piece)
        elif len(piece) >= len(_LAST_CHUNK):
            self.tail = bytes(piece[-len(_LAST_CHUNK) :])
        else:
            self.tail = (self.tail + piece)[-len(_LAST_CHUNK) :]


class Connection:
    """One HTTP/1.1 connection, kept alive; a context manager.

    The last bytes of a chunked response tell its end, as those bytes cannot occur within JSON.
    Raises BenchmarkError for any status but 200. ``scratch_bytes`` is the size of a read; it must
    hold the head of a response.
    """

    def __init__(self, port: int, scratch_bytes: int = SCRATCH_BYTES) -> None:
        self._socket = socket.create_connection((HOST, port), _TIMEOUT)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._scratch = memoryview(bytearray(scratch_bytes))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._socket.close()

    def time(self, request: Request, pause: float = 0.0) -> Timing:
        """Send a request, discard the response, and return when it came.

        Reading stops for ``pause`` seconds after the first byte.
        """
        first_byte = 0.0

        def note(_piece: memoryview) -> None:
            nonlocal first_byte
            if not first_byte:
                first_byte = time.perf_counter()
                time.sleep(pause)

        began = time.perf_counter()
        self._exchange(request, note)
        ended = time.perf_counter()
        return Timing(first_byte - began, ended - began - pause)

    def drop(self, request: Request) -> None:
        """Send a request and let the kernel discard the response, which needs a Content-Length.

        That is cheaper than receiving it: tcp(7), MSG_TRUNC.
        """
        self._exchange(request, lambda _piece: None, socket.MSG_TRUNC)

    def fetch(self, request: Request) -> Response:
        """Send a request and return the response."""
        received = bytearray()
        head = self._exchange(request, received.extend)
        json_length = _field(head, HEADER_LENGTH)
        has_length = _field(head, "Content-Length") is not None
        body = bytes(received) if has_length else _unchunked(received)
        return Response(body, None if json_length is None else int(json_length))

    def _exchange(
        self, request: Request, take: Callable[[memoryview], None], flags: int = 0
    ) -> bytes:
        for piece in request.wire:
            self._socket.sendall(piece)
        head, rest = self._read_head()
        length = _field(head, "Content-Length")
        if flags and length is None:
            raise BenchmarkError("a response of unknown length cannot be discarded unread")
        progress = _Progress(None if length is None else int(length))
        while True:
            if rest:
                progress.take(rest)
                take(rest)
            if progress.ended:
                return head
            rest = self._receive(0, flags)

    def _read_head(self) -> tuple[bytes, memoryview]:
        end = 0
        while True:
            end += len(self._receive(end))
            head, mark, _ = bytes(self._scratch[:end]).partition(b"\r\n\r\n")
            if mark:
                break
        rest = self._scratch[len(head) + len(mark) : end]
        if not head.startswith(b"HTTP/1.1 200 "):
            raise BenchmarkError(f"{head.decode('latin-1')}\n{bytes(rest[:500])!r}")
        return head, rest

    def _receive(self, at: int, flags: int = 0) -> memoryview:
        size = self._socket.recv_into(self._scratch[at:], 0, flags)
        if not size:
            raise BenchmarkError("the connection was closed before the end of the response")
        return self._scratch[at : at + size]


def _field(head: bytes, name: str) -> str | None:
    for line in head.decode("latin-1").split("\r\n")[1:]:
        key, _, value = line.partition(":")
        if key.lower() == name.lower():
            return value.strip()
    return None


def _unchunked(text: bytearray) -> bytes:
    pieces: list[bytearray] = []
    position = 0
    while True:
        line_end = text.index(b"\r\n", position)
        size = int(text[position:line_end], 16)
        if not size:
            return b"".join(pieces)
        pieces.append(text[line_end + 2 : line_end + 2 + size])
        position = line_end + 2 + size + 2
