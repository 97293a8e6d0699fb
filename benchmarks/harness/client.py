"""A client that costs next to nothing: it shares the cores with what is measured."""

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
_PATIENCE = 120.0


class BenchmarkError(Exception):
    """What was to be measured did not work; the message says what happened."""


class NotInstalledError(BenchmarkError):
    """A program that a measurement needs is not there; the message says how to get it."""


@dataclass(frozen=True, slots=True)
class Timing:
    """When the first byte of an answer's body was there, and when the last; in seconds."""

    first_byte: float
    total: float


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer that was kept: its body, and how much of it is JSON if it is binary."""

    body: bytes
    json_length: int | None


@dataclass(slots=True)
class _Progress:
    """How far an answer has come: bytes missing, None for a chunked one, and its last bytes."""

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

    A chunked answer is known to be over by its last bytes, which in JSON, unlike in binary data,
    can be nothing else. Raises BenchmarkError for any answer but 200. ``scratch_bytes`` is how much
    is received at a time, and has to hold an answer's head.
    """

    def __init__(self, port: int, scratch_bytes: int = SCRATCH_BYTES) -> None:
        self._socket = socket.create_connection((HOST, port), _PATIENCE)
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
        """Send a request and drop the answer as it comes.

        ``pause`` is a time in seconds in which, once, nothing of the answer is read.
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
        """Send a request and let the kernel drop the answer, which has to tell its length.

        That is cheaper than to receive it: tcp(7), MSG_TRUNC.
        """
        self._exchange(request, lambda _piece: None, socket.MSG_TRUNC)

    def fetch(self, request: Request) -> Answer:
        """Send a request and keep the answer."""
        kept = bytearray()
        head = self._exchange(request, kept.extend)
        json_length = _field(head, HEADER_LENGTH)
        body = bytes(kept) if _field(head, "Content-Length") is not None else _unchunked(kept)
        return Answer(body, None if json_length is None else int(json_length))

    def _exchange(
        self, request: Request, take: Callable[[memoryview], None], flags: int = 0
    ) -> bytes:
        for piece in request.wire:
            self._socket.sendall(piece)
        head, rest = self._read_head()
        length = _field(head, "Content-Length")
        if flags and length is None:
            raise BenchmarkError("an answer of unknown length cannot be dropped unseen")
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
            raise BenchmarkError("the connection was closed before the end of the answer")
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
