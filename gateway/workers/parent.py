"""The parent of the workers: it accepts connections, hands them out, and replaces what dies.

Why it is the parent that accepts. Workers that all accept from one socket race for each connection:
of 32 that wrk opened at once, one of two workers took all in three runs of four, although libuv
accepts just one in each turn of its loop. With a socket for each (SO_REUSEPORT) the kernel picks by
a hash: 32 connections came to 11 and 21, and two of them come to one worker in every second case;
Unix sockets know no such thing; a port that is taken goes unnoticed; and what is sent to a worker
that drains or has yet to be replaced waits for it. Here each connection goes to the worker that has
the fewest, and to none that leaves or is gone; one that a worker has not received when it dies goes
to another. It costs some 90 µs of the parent for a connection, and nothing for a request.

The parent has one thread and no event loop, so that it can fork at any time.
"""

from __future__ import annotations

import logging
import mmap
import os
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Protocol

from gateway.workers.closing import Closing
from gateway.workers.fork import Work, fork
from gateway.workers.orders import OrderDesk, Orders, Superior
from gateway.workers.orphans import reap_orphans
from gateway.workers.seat import Arrival, Seat, Worker, how_it_ended
from gateway.workers.signals import STOPS, Signals

_LAST_MOMENT = 5.0
"""Seconds that a worker has beyond its time to drain."""
_FULL_PAUSE, _FAULT_PAUSE = 0.01, 1.0
"""Seconds until the next try, where nobody took a connection or where it could not be accepted."""

_NEVER = float("inf")

_log = logging.getLogger("tensorgate.workers")


class NoWorkerError(Exception):
    """Not one worker came up."""


class Events(Protocol):
    """What the parent tells of."""

    def begun(self, workers: Sequence[int]) -> None:
        """Tell that connections are served from now on, by the processes with these ids."""

    def stopping(self) -> None:
        """Tell that no connection is accepted any more."""


class Parent:
    """Has so many workers serve what comes on listening sockets, which it owns.

    With each comes the word for who connects there, CLIENT or OPERATOR. ``patience`` is the time in
    seconds in which workers drain. What ``superior`` orders, if there is one, changes that, and
    what the workers do.
    """

    def __init__(
        self,
        sockets: Mapping[socket.socket, bytes],
        workers: int,
        work: Work,
        patience: float,
        events: Events,
        superior: Superior | None = None,
    ) -> None:
        self._sockets = sockets
        self._work = work
        self._patience = patience
        self._events = events
        closed = memoryview(mmap.mmap(-1, 8 * workers)).cast("Q")
        self._seats = [Seat(closed[i : i + 1]) for i in range(workers)]
        # Unlike epoll, poll keeps nothing in the kernel that a fork would share.
        self._selector = selectors.PollSelector()
        self._desk = None if superior is None else OrderDesk(superior, self._selector)
        self._signals = Signals()
        self._accepting = False
        self._unplaced: deque[Arrival] = deque()
        self._retry_at = _NEVER
        self._closing = Closing()
        self._begun = False
        self._stopping = False
        self._all_taken = False
        self._kill_at = _NEVER
        self._dropped = 0

    def run(self) -> int:
        """Serve until SIGTERM or SIGINT, then let the workers drain.

        Gives the number of exchanges that they dropped. Raises NoWorkerError.
        """
        for sock in self._sockets:
            sock.setblocking(False)
        self._selector.register(self._signals, selectors.EVENT_READ, self._hear_signals)
        with self._signals.hearing():
            for seat in self._seats:
                self._start(seat)
            while self._workers or not self._all_taken:
                if not self._begun:
                    self._begin_if_ready()
                self._accept_if_possible()
                for key, _ in self._selector.select(self._wait()):
                    key.data()
                self._do_what_is_due(time.monotonic())
        return self._dropped

    @property
    def _workers(self) -> list[Worker]:
        return [seat.worker for seat in self._seats if seat.worker is not None]

    def _begin_if_ready(self) -> None:
        """Begin once each first worker is up or has failed, so that not one gets all that waits."""
        if self._stopping:
            return
        workers = self._workers
        if not workers:
            raise NoWorkerError("no worker came up")
        if all(worker.taking for worker in workers):
            self._begun = True
            self._events.begun([worker.pid for worker in workers])

    def _wait(self) -> float | None:
        """Give the seconds until something is due."""
        due = [self._closing.due, self._kill_at, self._retry_at]
        if self._begun and not self._stopping:
            due += [seat.due for seat in self._seats if seat.worker is None]
            if self._desk is not None:
                due.append(self._desk.due)
        first = min(due)
        return None if first == _NEVER else max(0.0, first - time.monotonic())

    def _do_what_is_due(self, now: float) -> None:
        if now >= self._closing.due:
            self._close_if_possible(now)
        if now >= self._kill_at:
            self._kill_at = _NEVER
            for worker in self._workers:
                _log.error("worker %d did not stop in time and is killed", worker.pid)
                os.kill(worker.pid, signal.SIGKILL)
        if now >= self._retry_at:
            self._place()
        if self._begun and not self._stopping:
            for seat in self._seats:
                if seat.worker is None and now >= seat.due:
                    self._start(seat)
            if self._desk is not None:
                self._desk.go_on(self._workers, self._execute)

    # Signals

    def _hear_signals(self) -> None:
        heard = self._signals.heard()
        if signal.SIGHUP in heard and self._desk is not None:
            self._desk.wish()
        if signal.SIGCHLD in heard:
            self._reap()
        if heard & set(STOPS) and not self._stopping:
            self._stop()

    def _stop(self) -> None:
        """Take those who have begun to connect, and nobody more; the workers drain with them."""
        self._stopping = True
        self._accept_if_possible()
        sockets = dict(self._sockets)
        if self._desk is not None:
            # Orders under way may keep some of those, and whoever has connected to others counts.
            sockets = {**self._desk.sockets, **sockets}
            self._desk.close()
        for sock in sockets:
            sock.setblocking(False)
        self._closing.begin(sockets)

    def _execute(self, orders: Orders) -> None:
        """Accept from other sockets from now on; whoever has connected before is served."""
        before, self._sockets = self._sockets, orders.sockets
        self._patience = orders.patience
        if self._accepting:
            for sock in before:
                self._selector.unregister(sock)
        self._accepting = False  # until the next turn
        gone = {sock: word for sock, word in before.items() if sock not in self._sockets}
        self._closing.begin(gone)
        for sock in self._sockets:
            sock.setblocking(False)

    # Connections

    def _close_if_possible(self, now: float) -> None:
        """Take the last connections of sockets that are closed; if all are, have workers drain."""
        arrivals = self._closing.go_on(now)
        if arrivals is None:
            return
        self._unplaced.extend(arrivals)
        if self._stopping:
            self._all_taken = True
            self._kill_at = now + self._patience + _LAST_MOMENT
            self._events.stopping()
        if self._stopping or self._retry_at == _NEVER:
            self._place()

    def _accept_if_possible(self) -> None:
        """Leave connections in the system's queue while they could not be handed out."""
        possible = (
            self._begun
            and not self._stopping
            and self._retry_at == _NEVER
            and any(worker.taking for worker in self._workers)
        )
        if possible and not self._accepting:
            for sock in self._sockets:
                self._selector.register(sock, selectors.EVENT_READ, partial(self._accept, sock))
        elif self._accepting and not possible:
            for sock in self._sockets:
                self._selector.unregister(sock)
        self._accepting = possible

    def _accept(self, sock: socket.socket) -> None:
        if self._stopping or self._retry_at != _NEVER:
            return  # something else that came in this turn has changed what is possible
        try:
            connection, _ = sock.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            _log.error("cannot accept a connection: %s", error.strerror or error)
            self._retry_at = time.monotonic() + _FAULT_PAUSE
            return
        self._unplaced.append(Arrival(connection, self._sockets[sock]))
        self._place()

    def _place(self) -> None:
        """Give each connection to the worker with the fewest that takes it, or wait for one."""
        self._retry_at = _NEVER
        while self._unplaced:
            if not self._give(self._unplaced[0]):
                if self._stopping and not any(worker.taking for worker in self._workers):
                    self._drop_unplaced()
                    break
                self._retry_at = time.monotonic() + _FULL_PAUSE
                return
            self._unplaced.popleft()
        ending = self._workers if self._all_taken else [each for each in self._workers if each.left]
        stopped = [worker.stop() for worker in ending]
        if not all(stopped):
            self._retry_at = time.monotonic() + _FULL_PAUSE

    def _give(self, arrival: Arrival) -> bool:
        seats = sorted(self._seats, key=attrgetter("open"))
        workers = [seat.worker for seat in seats if seat.worker is not None]
        return any(worker.taking and worker.give(arrival) for worker in workers)

    def _drop_unplaced(self) -> None:
        while self._unplaced:
            self._unplaced.popleft().connection.close()

    # Workers

    def _start(self, seat: Seat) -> None:
        now = time.monotonic()
        try:
            seat.closed[0] = 0
            pid, channel = fork(self._work, seat.closed, seat is self._seats[0], self._leave)
            seat.worker = Worker(pid, channel, now)
        except OSError as error:
            pause = seat.vacate(now, now)
            _log.error("cannot start a worker: %s; next try in %g s", error.strerror, pause)
            return
        self._selector.register(channel, selectors.EVENT_READ, partial(self._listen_to, seat))

    def _leave(self) -> None:
        """Close, in a child, what is the parent's."""
        self._signals.leave()
        self._closing.leave()
        for sock in self._sockets:
            sock.close()
        self._drop_unplaced()
        for worker in self._workers:
            worker.channel.close()
            for arrival in worker.on_the_way:
                arrival.connection.close()
        if self._desk is not None:
            self._desk.leave()

    def _listen_to(self, seat: Seat) -> None:
        assert seat.worker is not None
        try:
            words = seat.worker.channel.recv(1024)
        except BlockingIOError:
            return
        except OSError:
            words = b""
        if words:
            was_up = seat.worker.up
            seat.worker.hear(words)
            if self._begun and seat.worker.up and not was_up:
                _log.info("worker %d is up", seat.worker.pid)
            if seat.worker.leaving:
                self._see_off(seat.worker)
        else:
            self._bury(seat, seat.worker)

    def _reap(self) -> None:
        reap_orphans([worker.pid for worker in self._workers])

    def _see_off(self, worker: Worker) -> None:
        """Let a worker go that was told to leave."""
        # What it was told by may be a signal to all processes: then it still takes what waits.
        self._hear_signals()
        if not self._stopping:
            worker.taking = False
            self._place()

    def _bury(self, seat: Seat, worker: Worker) -> None:
        self._selector.unregister(worker.channel)
        worker.channel.close()
        code = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
        self._dropped += worker.dropped
        pause = seat.vacate(worker.began, time.monotonic())
        self._reap()
        self._unplaced.extend(worker.on_the_way)
        if self._stopping or self._retry_at == _NEVER:
            self._place()
        if not self._stopping:
            then = f"in {pause:g} s" if pause else "at once"
            ended = how_it_ended(code)
            _log.error("worker %d %s; another one starts %s", worker.pid, ended, then)
        elif code and -code not in STOPS:
            # As for those: they can come before a worker handles them, and after it has finished.
            _log.error("worker %d %s", worker.pid, how_it_ended(code))
