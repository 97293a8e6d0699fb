"""The listening sockets of the workers: the supervisor accepts, and hands out the connections.

Decision: the supervisor accepts, not the workers. Each connection goes to the worker with the
fewest connections, and to none that drains. A connection that a worker has not received when it
dies goes to another one. It costs the supervisor some 90 µs per connection, and nothing per
request. The alternatives:

- Workers that accept from one socket race for it. Of 32 connections that wrk opened at once, one of
  two workers got all in three runs of four, although libuv accepts one per turn of its loop.
- With a socket per worker (SO_REUSEPORT) the kernel picks by a hash: 32 connections became 11 and
  21. Unix sockets do not have it, a port in use goes unnoticed, and connections wait for workers
  that drain or have yet to be replaced.
"""

from __future__ import annotations

import logging
import selectors
import socket
import time
from collections import deque
from collections.abc import Mapping
from functools import partial

from gateway.system.accept_queue import (
    HANDSHAKE_POLL_INTERVAL,
    HANDSHAKE_TIMEOUT,
    drain_accept_queue,
    drop_new_connections,
    has_pending_handshakes,
)
from gateway.workers.ipc import ConnectionKind, ToWorker
from gateway.workers.worker_pool import NEVER, PendingConnection, WorkerPool

_RETRY_DELAY = 0.01
"""Seconds until the next try to hand out a connection that no worker could take."""
_ERROR_DELAY = 1.0
"""Seconds without accepting after an error, such as too many open files."""

_log = logging.getLogger("tensorgate.workers")

ListeningSockets = Mapping[socket.socket, ConnectionKind]
"""Listening sockets, with who connects there."""


class Acceptor:
    """Accepts on listening sockets, which it owns, and hands connections to the workers."""

    def __init__(
        self, sockets: ListeningSockets, pool: WorkerPool, selector: selectors.BaseSelector
    ) -> None:
        self.pending: deque[PendingConnection] = deque()
        """Connections that no worker could take yet."""
        self._pool = pool
        self._selector = selector
        self._sockets = _nonblocking(sockets)
        self._is_accepting = False
        self._accept_at = 0.0
        self._drain = ListenerDrain()

    @property
    def next_step(self) -> float:
        """Return when there is something to do, on the clock of ``time.monotonic``."""
        now, due = time.monotonic(), self._drain.next_check
        if self.pending:
            due = min(due, now + _RETRY_DELAY)
        if self._accept_at > now:
            due = min(due, self._accept_at)
        return due

    def accept_if_possible(self) -> None:
        """Accept while a worker can take connections; else they wait in the kernel's queue."""
        kind: ConnectionKind = ToWorker.ADMIN if self._pool.is_stopping else ToWorker.CLIENT
        is_possible = (
            (self._pool.has_started or self._pool.is_stopping)
            and not self.pending
            and time.monotonic() >= self._accept_at
            and any(worker.accepts(kind) for worker in self._pool.workers)
        )
        if is_possible and not self._is_accepting:
            for sock in self._sockets:
                self._selector.register(sock, selectors.EVENT_READ, partial(self._accept, sock))
            self._is_accepting = True
        elif not is_possible:
            self._pause()

    def replace_sockets(self, sockets: ListeningSockets) -> None:
        """Accept on other sockets; those that are not among them are drained and closed."""
        self._pause()
        before, self._sockets = self._sockets, _nonblocking(sockets)
        self._drain.begin({sock: before[sock] for sock in before if sock not in sockets})

    def drain_clients(self, more: ListeningSockets) -> None:
        """Drain and close the sockets of clients, among ``more`` sockets too.

        The admin address goes on.
        """
        self._pause()
        sockets = _nonblocking({**more, **self._sockets})
        clients = {sock: kind for sock, kind in sockets.items() if kind == ToWorker.CLIENT}
        self._sockets = {sock: sockets[sock] for sock in sockets if sock not in clients}
        self._drain.begin(clients)

    def drain_admin(self) -> bool:
        """Drain and close the sockets of the admin address; return whether that is done."""
        if self._sockets:
            self._pause()
            self._drain.begin(self._sockets)
            self._sockets = {}
        return self._drain.next_check == NEVER and not self.pending

    def finish_drain(self, now: float) -> bool:
        """Close the sockets that have drained, if any; return whether that was done now."""
        if now < self._drain.next_check or not self._drain.is_over(now):
            return False
        self.pending.extend(self._drain.close())
        return True

    def hand_out(self) -> None:
        """Hand each connection to the worker with the fewest; keep those that none can take yet."""
        self.pending.extend(self._pool.returned)
        self._pool.returned.clear()
        while self.pending:
            connection = self.pending[0]
            workers = self._pool.workers_by_load
            if not any(worker.send_connection(connection) for worker in workers):
                if not self._pool.is_stopping or any(
                    worker.accepts(connection.kind) for worker in workers
                ):
                    return
                connection.sock.close()  # no worker is left to serve it
            self.pending.popleft()

    def close_in_child(self) -> None:
        """Close, in a child, the sockets of the supervisor."""
        self._drain.close_sockets()
        for sock in self._sockets:
            sock.close()
        for connection in self.pending:
            connection.sock.close()

    def _pause(self) -> None:
        if self._is_accepting:
            for sock in self._sockets:
                self._selector.unregister(sock)
        self._is_accepting = False

    def _accept(self, sock: socket.socket) -> None:
        if not self._is_accepting or sock not in self._sockets:
            return  # another event of this turn has changed that
        try:
            connection, _ = sock.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            _log.error("cannot accept a connection: %s", error.strerror or error)
            self._accept_at = time.monotonic() + _ERROR_DELAY
            return
        self.pending.append(PendingConnection(connection, self._sockets[sock]))


class ListenerDrain:
    """Closes listening sockets once the clients that have begun to connect are accepted."""

    def __init__(self) -> None:
        self._sockets: dict[socket.socket, ConnectionKind] = {}
        self._deadline = NEVER
        self.next_check = NEVER
        """When to look again for handshakes, on the clock of ``time.monotonic``."""

    def begin(self, sockets: ListeningSockets) -> None:
        """Let no client begin to connect any more; this owns the sockets from now on."""
        for sock in sockets:
            drop_new_connections(sock)
        self._sockets.update(sockets)
        now = time.monotonic()
        self._deadline, self.next_check = now + HANDSHAKE_TIMEOUT, now + HANDSHAKE_POLL_INTERVAL

    def is_over(self, now: float) -> bool:
        """Tell whether no handshake is under way, or the time for them is over."""
        if now < self._deadline and any(map(has_pending_handshakes, self._sockets)):
            self.next_check = now + HANDSHAKE_POLL_INTERVAL
            return False
        return True

    def close(self) -> list[PendingConnection]:
        """Close the sockets; return their last connections."""
        connections = [
            PendingConnection(connection, kind)
            for sock, kind in self._sockets.items()
            for connection in drain_accept_queue(sock)
        ]
        self.close_sockets()
        self._sockets.clear()
        self.next_check = NEVER
        return connections

    def close_sockets(self) -> None:
        """Close the sockets without accepting."""
        for sock in self._sockets:
            sock.close()


def _nonblocking(sockets: ListeningSockets) -> ListeningSockets:
    for sock in sockets:
        sock.setblocking(False)
    return sockets
