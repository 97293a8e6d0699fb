"""Listening sockets that are to be closed."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping

from gateway.system.accept_queue import (
    HANDSHAKE_POLL_INTERVAL,
    HANDSHAKE_TIMEOUT,
    drain_accept_queue,
    drop_new_connections,
    has_pending_handshakes,
)
from gateway.workers.seat import PendingConnection

_NEVER = float("inf")


class ListenerDrain:
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
            drop_new_connections(sock)
        self._sockets.update(sockets)
        now = time.monotonic()
        self._until, self.due = now + HANDSHAKE_TIMEOUT, now + HANDSHAKE_POLL_INTERVAL

    def go_on(self, now: float) -> list[PendingConnection] | None:
        """Give the last connections, of sockets that are closed then; None if some are to come."""
        if now < self._until and any(map(has_pending_handshakes, self._sockets)):
            self.due = now + HANDSHAKE_POLL_INTERVAL
            return None
        self.due = _NEVER
        arrivals = [
            PendingConnection(connection, word)
            for sock, word in self._sockets.items()
            for connection in drain_accept_queue(sock)
        ]
        self.leave()
        self._sockets.clear()
        return arrivals

    def leave(self) -> None:
        """Close, in a child, what is the parent's."""
        for sock in self._sockets:
            sock.close()
