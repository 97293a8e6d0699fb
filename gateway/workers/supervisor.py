"""The parent of the workers: what it does and in which order, from the first worker to the last.

It has one thread and no event loop, so that it can fork at any time.
"""

from __future__ import annotations

import selectors
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from gateway.workers.acceptor import Acceptor
from gateway.workers.fork import WorkerMain
from gateway.workers.reload_broadcast import ConfigSource, ConfigUpdate, ReloadBroadcaster
from gateway.workers.seat import WorkerProcess
from gateway.workers.signals import STOP_SIGNALS, Signals
from gateway.workers.worker_pool import WorkerPool

_LAST_MOMENT = 5.0
"""Seconds that a worker has beyond its time to drain."""

_NEVER = float("inf")


class NoWorkerError(Exception):
    """Not one worker came up."""


class SupervisorEvents(Protocol):
    """What the parent tells of."""

    def begun(self, workers: Sequence[int]) -> None:
        """Tell that connections are served from now on, by the processes with these ids."""

    def stopping(self) -> None:
        """Tell that no client is accepted any more."""


class Supervisor:
    """Has so many workers serve what comes on listening sockets, which it owns.

    With each comes the word for who connects there, CLIENT or OPERATOR. ``patience`` is the time in
    seconds in which workers drain. What ``superior`` orders, if there is one, changes that, and
    what the workers do.
    """

    def __init__(
        self,
        sockets: Mapping[socket.socket, bytes],
        workers: int,
        work: WorkerMain,
        patience: float,
        events: SupervisorEvents,
        superior: ConfigSource | None = None,
    ) -> None:
        self._patience = patience
        self._events = events
        # Unlike epoll, poll keeps nothing in the kernel that a fork would share.
        self._selector = selectors.PollSelector()
        self._crew = WorkerPool(workers, work, self, self._selector)
        self._door = Acceptor(sockets, self._crew, self._selector)
        self._desk = None if superior is None else ReloadBroadcaster(superior, self._selector)
        self._signals = Signals()
        self._kill_at = _NEVER

    def run(self) -> int:
        """Serve until SIGTERM or SIGINT, then let the workers drain.

        Gives the number of exchanges that they dropped. Raises NoWorkerError.
        """
        self._selector.register(self._signals, selectors.EVENT_READ, self._hear_signals)
        with self._signals.hearing():
            self._crew.fill(time.monotonic())
            while self._crew.workers or not self._door.all_taken:
                if not self._crew.begun:
                    self._begin_if_ready()
                self._door.accept_if_possible()
                for key, _ in self._selector.select(self._wait()):
                    key.data()
                self._do_what_is_due(time.monotonic())
        return self._crew.dropped

    def leave(self) -> None:
        """Close, in a child, what is the parent's, and give signals up."""
        self._signals.leave()
        self._door.leave()
        self._crew.leave()
        if self._desk is not None:
            self._desk.leave()

    def see_off(self, worker: WorkerProcess) -> None:
        """Let a worker go that was told to leave."""
        # What it was told by may be a signal to all processes: then it still takes what waits.
        self._hear_signals()
        if not self._crew.stopping:
            worker.taking = False
            self._door.place()

    def has_drained(self, worker: WorkerProcess) -> None:
        """Let a worker end that has drained; of all that stop, the last serves operators on."""
        self._door.place()

    def take_back(self, worker: WorkerProcess) -> None:
        """Give others the connections that a worker which has ended did not get."""
        self._door.place_new(worker.on_the_way)

    def _begin_if_ready(self) -> None:
        """Begin once each first worker is up or has failed, so that not one gets all that waits."""
        if self._crew.stopping:
            return
        workers = self._crew.workers
        if not workers:
            raise NoWorkerError("no worker came up")
        if all(worker.taking for worker in workers):
            self._crew.begun = True
            self._events.begun([worker.pid for worker in workers])

    @property
    def _at_work(self) -> bool:
        return self._crew.begun and not self._crew.stopping

    def _wait(self) -> float | None:
        """Give the seconds until something is due."""
        due = [self._door.closing_due, self._kill_at, self._door.due]
        if self._at_work:
            due.append(self._crew.due)
            if self._desk is not None:
                due.append(self._desk.due)
        first = min(due)
        return None if first == _NEVER else max(0.0, first - time.monotonic())

    def _do_what_is_due(self, now: float) -> None:
        if now >= self._door.closing_due:
            self._close_if_possible(now)
        if now >= self._kill_at:
            self._kill_at = _NEVER
            self._crew.kill()
        if now >= self._door.due:
            self._door.place()
        if self._at_work:
            self._crew.fill(now)
            if self._desk is not None:
                self._desk.go_on(self._crew.workers, self._execute)

    def _close_if_possible(self, now: float) -> None:
        """Take the last connections of sockets that are closed; behind clients' workers drain."""
        drains = self._door.all_taken
        if not self._door.take_last(now):
            return
        if self._crew.stopping and not drains:
            self._kill_at = now + self._patience + _LAST_MOMENT
            self._events.stopping()
        self._door.place_new()

    def _hear_signals(self) -> None:
        heard = self._signals.heard()
        if signal.SIGHUP in heard and self._desk is not None:
            self._desk.wish()
        if signal.SIGCHLD in heard:
            self._crew.reap()
        if heard & set(STOP_SIGNALS) and not self._crew.stopping:
            self._stop()

    def _stop(self) -> None:
        """Take clients who have begun to connect, and no more; the workers drain with them."""
        self._crew.stopping = True
        others: Mapping[socket.socket, bytes] = {}
        if self._desk is not None:
            # Orders under way may keep some sockets, and whoever has connected to others counts.
            others = self._desk.sockets
            self._desk.close()
        self._door.close(others)

    def _execute(self, orders: ConfigUpdate) -> None:
        """Accept from other sockets from now on, and have workers drain in another time."""
        self._patience = orders.patience
        self._door.change(orders.sockets)
