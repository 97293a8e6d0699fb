"""Listening sockets that are to be closed."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping

from gateway.system.accept_queue import (
    HANDSHAKES,
    LOOK,
    handshakes_under_way,
    last_connections,
    shut_out,
)
from gateway.workers.seat import Arrival

_NEVER = float("inf")


class Closing:
    """Closes sockets when those have connected who have begun to, without ever waiting."""

    def __init__(self) -> None:
        self._sockets: dict[socket.socket, bytes] = {}
        self._until = _NEVER
        self.due = _NEVER
        """When to go on, on the clock of ``time.monotonic``."""

    def begin(self, sockets: Mapping[socket.socket, bytes]) -> None:
        """Let nobody begin to connect to sockets any more; this owns them from now on.

        With each comes the word for who connects there.
        """
        for sock in sockets:
            shut_out(sock)
        self._sockets.update(sockets)
        now = time.monotonic()
        self._until, self.due = now + HANDSHAKES, now + LOOK

    def go_on(self, now: float) -> list[Arrival] | None:
        """Give the last connections, of sockets that are closed then; None if some are to come."""
        if now < self._until and any(map(handshakes_under_way, self._sockets)):
            self.due = now + LOOK
            return None
        self.due = _NEVER
        arrivals = [
            Arrival(connection, word)
            for sock, word in self._sockets.items()
            for connection in last_connections(sock)
        ]
        self.leave()
        self._sockets.clear()
        return arrivals

    def leave(self) -> None:
        """Close, in a child, what is the parent's."""
        for sock in self._sockets:
            sock.close()
