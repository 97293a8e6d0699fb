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
from functools import partial

from gateway.system.accept_queue import (
    HANDSHAKE_POLL_INTERVAL,
    HANDSHAKE_TIMEOUT,
    drain_accept_queue,
    drop_new_connections,
    has_pending_handshakes,
)
from gateway.workers.ipc import ConnectionKind, ListeningSockets, ToWorker
from gateway.workers.worker_pool import NEVER, WorkerPool

_RETRY_DELAY = 0.01
"""Seconds until the next try to hand out a connection that no process could take."""
_ERROR_DELAY = 0.05
"""Seconds without accepting after an error, such as too many open files: this process closes a
connection once a worker has it."""
_LOG_INTERVAL = 1.0
"""Seconds in which such errors are logged once."""

_log = logging.getLogger("tensorgate.workers")


class Acceptor:
    """Accepts on listening sockets, which it owns, and hands out the connections.

    Clients go to the workers, and operators to the admin process. Neither waits for the other.
    """

    def __init__(
        self, sockets: ListeningSockets, pool: WorkerPool, selector: selectors.BaseSelector
    ) -> None:
        self._pool = pool
        self._pending = pool.pending
        self._selector = selector
        self._sockets = _nonblocking(sockets)
        self._accepting: set[socket.socket] = set()
        self._accept_at = self._log_after = 0.0
        self._draining: dict[socket.socket, ConnectionKind] = {}
        """Sockets that are closed once the clients that have begun to connect are accepted."""
        self._drain_deadline = self._next_check = NEVER
        """When to stop the wait for them, and when to look again for handshakes."""

    @property
    def next_step(self) -> float:
        """Return when there is something to do, on the clock of ``time.monotonic``."""
        now, due = time.monotonic(), self._next_check
        if any(self._pending.values()):
            due = min(due, now + _RETRY_DELAY)
        if self._accept_at > now:
            due = min(due, self._accept_at)
        return due

    @property
    def has_pending_clients(self) -> bool:
        """Tell whether there are clients that no worker could take yet."""
        return bool(self._pending[ToWorker.CLIENT])

    @property
    def has_operators(self) -> bool:
        """Tell whether operators can connect, or have connected and no process has them yet."""
        kinds = (*self._sockets.values(), *self._draining.values())
        return ToWorker.ADMIN in kinds or bool(self._pending[ToWorker.ADMIN])

    def accept_if_possible(self) -> None:
        """Accept while a process can take connections; else they wait in the kernel's queue."""
        kinds = {kind for kind in self._pending if self._can_accept(kind)}
        for sock, kind in self._sockets.items():
            if kind in kinds and sock not in self._accepting:
                self._selector.register(sock, selectors.EVENT_READ, partial(self._accept, sock))
                self._accepting.add(sock)
            elif kind not in kinds and sock in self._accepting:
                self._pause(sock)

    def _can_accept(self, kind: ConnectionKind) -> bool:
        return (
            (self._pool.has_started or self._pool.is_stopping)
            and not self._pending[kind]
            and time.monotonic() >= self._accept_at
            and any(process.accepts(kind) for process in self._pool.processes)
        )

    def replace_sockets(self, sockets: ListeningSockets) -> None:
        """Accept on other sockets; those that are not among them are drained and closed."""
        self._pause_all()
        before, self._sockets = self._sockets, _nonblocking(sockets)
        self._begin_drain({sock: before[sock] for sock in before if sock not in sockets})

    def drain_clients(self, more: ListeningSockets) -> None:
        """Drain and close the sockets of clients, among ``more`` sockets too.

        The admin address goes on.
        """
        self._pause_all()
        sockets = _nonblocking({**more, **self._sockets})
        clients = {sock: kind for sock, kind in sockets.items() if kind == ToWorker.CLIENT}
        self._sockets = {sock: sockets[sock] for sock in sockets if sock not in clients}
        self._begin_drain(clients)

    def drain_admin(self) -> bool:
        """Drain and close the sockets of the admin address; return whether that is done."""
        if self._sockets:
            self._pause_all()
            self._begin_drain(self._sockets)
            self._sockets = {}
        return self._next_check == NEVER and not self._pending[ToWorker.ADMIN]

    def finish_drain(self, now: float) -> bool:
        """Close the sockets that have drained, if any; return whether that was done now."""
        if now < self._next_check:
            return False
        if now < self._drain_deadline and any(map(has_pending_handshakes, self._draining)):
            self._next_check = now + HANDSHAKE_POLL_INTERVAL
            return False
        for sock, kind in self._draining.items():
            self._pending[kind].extend(drain_accept_queue(sock))
            sock.close()
        self._draining.clear()
        self._next_check = NEVER
        return True

    def _begin_drain(self, sockets: ListeningSockets) -> None:
        """Let no client begin to connect any more."""
        for sock in sockets:
            drop_new_connections(sock)
        self._draining.update(sockets)
        now = time.monotonic()
        self._drain_deadline = now + HANDSHAKE_TIMEOUT
        self._next_check = now + HANDSHAKE_POLL_INTERVAL

    def hand_out(self) -> None:
        """Hand each client to the worker with the fewest, and each operator to the admin process.

        Connections that none can take yet are kept.
        """
        for kind, pending in self._pending.items():
            while pending:
                processes = [each for each in self._pool.processes_by_load if each.accepts(kind)]
                if not any(each.send_connection(pending[0]) for each in processes):
                    if processes or not self._pool.is_stopping:
                        break
                    pending[0].close()  # no process is left to serve it
                pending.popleft()

    def close_in_child(self) -> None:
        """Close, in a child, the sockets of the supervisor."""
        for sock in (*self._sockets, *self._draining):
            sock.close()

    def _pause_all(self) -> None:
        for sock in tuple(self._accepting):
            self._pause(sock)

    def _pause(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        self._accepting.discard(sock)

    def _accept(self, sock: socket.socket) -> None:
        if sock not in self._accepting:
            return  # another event of this turn has changed that
        try:
            connection, _ = sock.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            now = time.monotonic()
            self._accept_at = now + _ERROR_DELAY
            if now >= self._log_after:
                self._log_after = now + _LOG_INTERVAL
                _log.error("cannot accept a connection: %s", error.strerror or error)
            return
        self._pending[self._sockets[sock]].append(connection)


def _nonblocking(sockets: ListeningSockets) -> ListeningSockets:
    for sock in sockets:
        sock.setblocking(False)
    return sockets
