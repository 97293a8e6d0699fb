"""The supervisor of the worker processes: what it does, and in which order.

- Start: it forks the workers, and the admin process if there is an admin address. It accepts
  clients once each worker is ready or has failed, and operators once the admin process is ready.
- Run: it hands each client to the worker with the fewest, and each operator to the admin process.
  It replaces processes that exit, and broadcasts new settings.
- SIGHUP: it reads the settings again.
- SIGTERM, SIGINT: it stops.
  1. It closes the sockets of clients, once those who have begun to connect are connected.
  2. It hands out the last clients, then tells the workers to drain.
  3. Each drained worker exits. The admin process goes on until the last one has.
  4. It closes the admin address in the same way, and tells the admin process to drain.

  It kills processes that need longer than the drain timeout and a moment.

It has one thread and no event loop, so that it can fork at any time. A turn of its loop waits for
sockets, workers, signals and timers, and then does what has become possible.
"""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Sequence

from gateway.workers.acceptor import Acceptor
from gateway.workers.ipc import ListeningSockets, ToWorker
from gateway.workers.reload_broadcast import ReloadBroadcaster
from gateway.workers.signals import STOP_SIGNALS, SignalWatcher
from gateway.workers.worker_pool import (
    NEVER,
    SupervisedGateway,
    WorkerPool,
    WorkerProcess,
    WorkerState,
)

_KILL_DELAY = 5.0
"""Seconds that a worker has beyond the drain timeout."""


class NoWorkerError(Exception):
    """Not one worker came up."""


class Supervisor:
    """Serves connections to the sockets of a gateway with so many worker processes."""

    def __init__(self, workers: int, gateway: SupervisedGateway) -> None:
        self._gateway = gateway
        # Unlike epoll, poll keeps nothing in the kernel that a fork would share.
        self._selector = selectors.PollSelector()
        self._pool = WorkerPool(workers, gateway, self._selector, self._close_in_child)
        self._pool.admin.is_wanted = ToWorker.ADMIN in gateway.sockets.values()
        self._acceptor = Acceptor(gateway.sockets, self._pool, self._selector)
        self._reloads = ReloadBroadcaster(gateway)
        self._signals = SignalWatcher()
        self._is_interrupted = False
        self._all_clients_accepted = False
        self._kill_at = NEVER

    def run(self) -> int:
        """Serve until SIGTERM or SIGINT, and drain; return the number of calls that were cut.

        Raises NoWorkerError; KeyboardInterrupt if SIGINT came before it served.
        """
        self._selector.register(self._signals, selectors.EVENT_READ, self._handle_signals)
        with self._signals.handling():
            self._pool.start_missing(time.monotonic())
            while self._pool.processes or not self._all_clients_accepted:
                self._note_start()
                self._acceptor.accept_if_possible()
                for key, _ in self._selector.select(self._timeout()):
                    key.data()
                self._step(time.monotonic())
        if self._is_interrupted and not self._pool.has_started:
            raise KeyboardInterrupt
        return self._pool.dropped_calls

    def _close_in_child(self) -> None:
        self._signals.reset_in_child()
        self._acceptor.close_in_child()
        self._pool.close_in_child()
        for sock in self._reloads.pending_sockets:
            sock.close()

    def _note_start(self) -> None:
        """Serve once each first worker is ready or has failed: else one would get all clients."""
        if self._pool.has_started or self._pool.is_stopping:
            return
        workers = self._pool.workers
        if not workers:
            raise NoWorkerError("no worker came up")
        # Operators wait a moment longer: the admin process has more to load.
        if all(worker.state is WorkerState.READY for worker in workers):
            self._pool.has_started = True
            self._gateway.on_started([worker.pid for worker in workers])

    def _timeout(self) -> float | None:
        """Return the seconds until a timer is due."""
        due = min(self._acceptor.next_step, self._kill_at)
        if self._pool.has_started and not self._pool.is_stopping:
            due = min(due, self._pool.next_start, self._reloads.next_step)
        return None if due == NEVER else max(0.0, due - time.monotonic())

    def _step(self, now: float) -> None:
        """Do what events and timers have made possible."""
        if self._acceptor.finish_drain(now) and self._pool.is_stopping:
            self._note_last_client(now)
        leaving = [process for process in self._pool.processes if process.is_leaving]
        if leaving:
            self._retire(leaving)
        self._acceptor.hand_out()
        if self._pool.is_stopping:
            self._drain_workers()
        elif self._pool.has_started:
            self._pool.start_missing(now)
            self._stop_admin_if_unused()
            self._reloads.step(self._pool.processes, self._apply)
        if now >= self._kill_at:
            self._kill_at = NEVER
            self._pool.kill_all()

    def _handle_signals(self) -> None:
        received = self._signals.received()
        if signal.SIGHUP in received:
            self._reloads.is_requested = True
        if signal.SIGCHLD in received:
            self._pool.reap_adopted_children()
        self._is_interrupted |= signal.SIGINT in received
        if received & set(STOP_SIGNALS) and not self._pool.is_stopping:
            self._stop()

    def _stop(self) -> None:
        """Accept the clients that have begun to connect, and no more."""
        self._pool.is_stopping = True
        # An update under way may have opened sockets to which clients have connected.
        self._acceptor.drain_clients(self._reloads.pending_sockets)
        for process in self._pool.processes:
            process.send(ToWorker.STOPPING)

    def _note_last_client(self, now: float) -> None:
        if not self._all_clients_accepted:
            self._all_clients_accepted = True
            self._kill_at = now + self._gateway.drain_timeout + _KILL_DELAY
            self._gateway.on_stopping()

    def _retire(self, leaving: Sequence[WorkerProcess]) -> None:
        """Drain processes that got a stop signal of their own."""
        # The signal may be one to all processes. Then they still take the last clients.
        self._handle_signals()
        if not self._pool.is_stopping:
            for worker in leaving:
                worker.drain()

    def _drain_workers(self) -> None:
        """Have the workers drain behind the last client; the admin process exits behind them."""
        workers, admin = self._pool.workers, self._pool.admin.worker
        if self._all_clients_accepted and not self._acceptor.has_pending_clients:
            for worker in workers:
                worker.drain()
        # The last operators who have connected come first.
        if not workers and self._acceptor.drain_admin() and admin is not None:
            admin.drain()

    def _stop_admin_if_unused(self) -> None:
        """Have the admin process end behind the last operator once there is no admin address."""
        slot = self._pool.admin
        if slot.worker is not None and not slot.is_wanted and not self._acceptor.has_operators:
            slot.worker.drain()

    def _apply(self, sockets: ListeningSockets) -> None:
        self._pool.admin.is_wanted = ToWorker.ADMIN in sockets.values()
        self._acceptor.replace_sockets(sockets)
