"""Where connections come in: they are accepted, and handed to the workers.

Why it is the parent that accepts. Workers that all accept from one socket race for each connection:
of 32 that wrk opened at once, one of two workers took all in three runs of four, although libuv
accepts just one in each turn of its loop. With a socket for each (SO_REUSEPORT) the kernel picks by
a hash: 32 connections came to 11 and 21, and two of them come to one worker in every second case;
Unix sockets know no such thing; a port that is taken goes unnoticed; and what is sent to a worker
that drains or has yet to be replaced waits for it. Here each connection goes to the worker that has
the fewest, and to none that leaves or is gone; one that a worker has not received when it dies goes
to another. It costs some 90 µs of the parent for a connection, and nothing for a request.
"""

from __future__ import annotations

import logging
import selectors
import socket
import time
from collections import deque
from collections.abc import Iterable, Mapping
from functools import partial
from operator import attrgetter

from gateway.workers.closing import ListenerDrain
from gateway.workers.ipc import ADMIN, CLIENT
from gateway.workers.seat import PendingConnection
from gateway.workers.worker_pool import WorkerPool

_FULL_PAUSE, _FAULT_PAUSE = 0.01, 1.0
"""Seconds until the next try, where nobody took a connection or where it could not be accepted."""

_NEVER = float("inf")

_log = logging.getLogger("tensorgate.workers")


class Acceptor:
    """Hands what comes on listening sockets, which it owns, to the worker with the fewest.

    With each socket comes the word for who connects there, CLIENT or OPERATOR.
    """

    def __init__(
        self,
        sockets: Mapping[socket.socket, bytes],
        crew: WorkerPool,
        selector: selectors.BaseSelector,
    ) -> None:
        self.all_taken = False
        """No client comes any more; workers are told so behind the last."""
        self._crew = crew
        self._selector = selector
        self._accepting = False
        self._unplaced: deque[PendingConnection] = deque()
        self._retry_at = _NEVER
        self._closing = ListenerDrain()
        self._take_care_of(sockets)

    def _take_care_of(self, sockets: Mapping[socket.socket, bytes]) -> None:
        self._sockets = sockets
        for sock in sockets:
            sock.setblocking(False)

    @property
    def due(self) -> float:
        """Tell when to place again what nobody took, on the clock of ``time.monotonic``."""
        return self._retry_at

    @property
    def closing_due(self) -> float:
        """Tell when to look again at sockets that are to be closed, on the same clock."""
        return self._closing.due

    def accept_if_possible(self) -> None:
        """Leave connections in the system's queue while they could not be handed out."""
        crew = self._crew
        word = ADMIN if crew.stopping else CLIENT
        possible = (
            (crew.begun or crew.stopping)
            and self._retry_at == _NEVER
            and any(worker.takes(word) for worker in crew.workers)
        )
        if possible and not self._accepting:
            for sock in self._sockets:
                self._selector.register(sock, selectors.EVENT_READ, partial(self._accept, sock))
            self._accepting = True
        elif not possible:
            self._pause()

    def _pause(self) -> None:
        """Accept nothing until it is looked again whether that is possible."""
        if self._accepting:
            for sock in self._sockets:
                self._selector.unregister(sock)
        self._accepting = False

    def change(self, sockets: Mapping[socket.socket, bytes]) -> None:
        """Accept from other sockets from now on; whoever has connected before is served."""
        self._pause()
        before = self._sockets
        self._closing.begin({sock: word for sock, word in before.items() if sock not in sockets})
        self._take_care_of(sockets)

    def close(self, others: Mapping[socket.socket, bytes]) -> None:
        """Take clients who have begun to connect, and no more of them; likewise at other sockets.

        Operators come as before, until no worker has a client.
        """
        self._pause()
        sockets = {**others, **self._sockets}
        self._take_care_of({sock: word for sock, word in sockets.items() if word == ADMIN})
        clients = {sock: word for sock, word in sockets.items() if word == CLIENT}
        for sock in clients:
            sock.setblocking(False)
        self._closing.begin(clients)
        for worker in self._crew.workers:
            worker.warn()

    def take_last(self, now: float) -> bool:
        """Take the last connections of sockets that are closed; false if some are to come."""
        arrivals = self._closing.go_on(now)
        if arrivals is None:
            return False
        self._unplaced.extend(arrivals)
        self.all_taken = self._crew.stopping
        return True

    def place_new(self, arrivals: Iterable[PendingConnection] = ()) -> None:
        """Place connections that were not accepted just now, unless others wait before them."""
        self._unplaced.extend(arrivals)
        if self._crew.stopping or self._retry_at == _NEVER:
            self.place()

    def place(self) -> None:
        """Give each connection to the worker with the fewest that takes it, or wait for one."""
        self._retry_at = _NEVER
        while self._unplaced:
            arrival = self._unplaced[0]
            if not self._give(arrival):
                if not self._crew.stopping or self._can_be_taken(arrival):
                    self._retry_at = time.monotonic() + _FULL_PAUSE
                    return
                arrival.connection.close()  # there is nobody left to serve it
            self._unplaced.popleft()
        if not self._tell_workers():
            self._retry_at = time.monotonic() + _FULL_PAUSE

    def _can_be_taken(self, arrival: PendingConnection) -> bool:
        return any(worker.takes(arrival.word) for worker in self._crew.workers)

    def _tell_workers(self) -> bool:
        """Tell workers that nobody more comes; false where one of them has yet to be told."""
        workers = self._crew.workers
        leaving = workers if self.all_taken else [each for each in workers if each.left]
        told = [worker.stop() for worker in leaving]
        drained = [worker for worker in workers if worker.drained]
        if self._crew.stopping and len(drained) == len(workers):
            if self._sockets:
                self._pause()
                self._closing.begin(self._sockets)
                self._sockets = {}
            if self._closing.due != _NEVER:
                return all(told)  # the last operators come first
        told += [worker.end() for worker in drained]
        return all(told)

    def leave(self) -> None:
        """Close, in a child, what is the parent's."""
        self._closing.leave()
        for sock in self._sockets:
            sock.close()
        self._drop_unplaced()

    def _accept(self, sock: socket.socket) -> None:
        if sock not in self._sockets or self._retry_at != _NEVER:
            return  # something else that came in this turn has changed what is possible
        try:
            connection, _ = sock.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            _log.error("cannot accept a connection: %s", error.strerror or error)
            self._retry_at = time.monotonic() + _FAULT_PAUSE
            return
        self._unplaced.append(PendingConnection(connection, self._sockets[sock]))
        self.place()

    def _give(self, arrival: PendingConnection) -> bool:
        seats = sorted(self._crew.seats, key=attrgetter("open"))
        workers = [seat.worker for seat in seats if seat.worker is not None]
        workers.sort(key=attrgetter("stopped"))  # one that drains may end soon
        return any(worker.takes(arrival.word) and worker.give(arrival) for worker in workers)

    def _drop_unplaced(self) -> None:
        while self._unplaced:
            self._unplaced.popleft().connection.close()
