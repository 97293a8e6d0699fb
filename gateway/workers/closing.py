"""Listening sockets that are to be closed."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable

from gateway.accept_queue import (
    HANDSHAKES,
    LOOK,
    handshakes_under_way,
    last_connections,
    shut_out,
)

_NEVER = float("inf")


class Closing:
    """Closes sockets when those have connected who have begun to, without ever waiting."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []
        self._until = _NEVER
        self.due = _NEVER
        """When to go on, on the clock of ``time.monotonic``."""

    def begin(self, sockets: Iterable[socket.socket]) -> None:
        """Let nobody begin to connect to sockets any more; this owns them from now on."""
        for sock in sockets:
            shut_out(sock)
            self._sockets.append(sock)
        now = time.monotonic()
        self._until, self.due = now + HANDSHAKES, now + LOOK

    def go_on(self, now: float) -> list[socket.socket] | None:
        """Give the last connections, of sockets that are closed then; None if some are to come."""
        if now < self._until and any(map(handshakes_under_way, self._sockets)):
            self.due = now + LOOK
            return None
        self.due = _NEVER
        connections = [each for sock in self._sockets for each in last_connections(sock)]
        self.leave()
        self._sockets.clear()
        return connections

    def leave(self) -> None:
        """Close, in a child, what is the parent's."""
        for sock in self._sockets:
            sock.close()
