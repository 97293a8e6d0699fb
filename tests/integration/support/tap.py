"""A TCP relay between the gateway and a server, which records the traffic."""

import contextlib
import re
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from tests.integration.triton.server import HOST

# Behind the body of the request before, without a line end between.
_REQUEST_LINE = re.compile(rb"(GET|HEAD|POST|PUT|DELETE|OPTIONS) (/\S*) HTTP/1\.1\r\n")
_PIECE = 64 * 1024
# More than any test needs: what goes to the server is kept for the tests to look at.
_KEPT_BYTES = 4 * 1024 * 1024


class Tap:
    """A relay to a server's port at a port of its own; a context manager."""

    def __init__(self, port: int) -> None:
        self._server_port = port
        self._listener = socket.create_server((HOST, 0))
        self.url = f"http://{HOST}:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._sent = bytearray()
        self._answered = 0
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Shut down first: closing alone does not wake a thread that waits.
        for sock in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join(10)

    @property
    def sent(self) -> bytes:
        """All that went to the server since the last ``forget``, up to a cap."""
        with self._lock:
            return bytes(self._sent)

    @property
    def answered(self) -> int:
        """How many bytes came from the server since the last ``forget``."""
        with self._lock:
            return self._answered

    @property
    def requests(self) -> list[str]:
        """The requests that began to go to the server, as method and path."""
        return [b" ".join(found).decode() for found in _REQUEST_LINE.findall(self.sent)]

    def forget(self) -> None:
        """Begin anew."""
        with self._lock:
            self._sent.clear()
            self._answered = 0

    def wait_until_still(self, quiet: float = 0.5) -> int:
        """Wait until the server's response stops, and tell how many bytes have come by then."""
        before = -1
        while before != (now := self.answered):
            before = now
            time.sleep(quiet)
        return now

    def _start(self, run: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=run, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # the test is over
            try:
                server = socket.create_connection((HOST, self._server_port))
            except OSError:
                client.close()  # as if the server itself had done so
                continue
            for sock in (client, server):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._sockets.append(sock)
            self._start(self._relay, client, server, self._note_sent)
            self._start(self._relay, server, client, self._note_answered)

    def _relay(
        self, source: socket.socket, target: socket.socket, note: Callable[[bytes], None]
    ) -> None:
        try:
            while piece := source.recv(_PIECE):
                note(piece)
                target.sendall(piece)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            # One side is gone: the other shall know.
            for sock in (source, target):
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _note_sent(self, piece: bytes) -> None:
        with self._lock:
            self._sent += piece[: _KEPT_BYTES - len(self._sent)]

    def _note_answered(self, piece: bytes) -> None:
        with self._lock:
            self._answered += len(piece)
