"""The worker processes as the supervisor sees them: their start, state, load and end.

The admin process, which serves the admin address, lives and dies like a worker. There is one while
there is an admin address.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from operator import attrgetter
from typing import NoReturn, Protocol

from gateway.workers.ipc import (
    ConnectionKind,
    FromWorker,
    ListeningSockets,
    ReloadStep,
    ToWorker,
    WorkerChannel,
    receive,
    send,
)
from gateway.workers.shared_records import shared_counters
from gateway.workers.signals import HANDLED_SIGNALS, STOP_SIGNALS

NEVER = float("inf")

MAX_UNACKNOWLEDGED = 128
"""Connections on the way to a worker. A socket's default buffer of 208 KiB takes 278 messages, so
neither the supervisor nor the worker, which acknowledges each, finds it full."""

_STABLE_TIME = 10.0
"""Seconds after which the exit of a worker has nothing to do with its start."""
_FIRST_DELAY, _MAX_DELAY = 0.1, 5.0
"""Seconds before the next start in a slot where one worker after the other exits early."""

_log = logging.getLogger("tensorgate.workers")


class WorkerState(IntEnum):
    """The life of a worker: the supervisor advances it, or the worker's messages do."""

    STARTING = 0
    READY = 1
    DRAINING = 2
    """It was told to drain: it takes no more connections, and exits."""
    EXITING = 3
    """Its channel is broken."""


@dataclass(eq=False, slots=True)
class WorkerProcess:
    """A worker or the admin process, and the supervisor's end of the channel to it."""

    pid: int
    channel: socket.socket
    started_at: float
    serves: ConnectionKind = ToWorker.CLIENT
    """Who connects to it."""
    state: WorkerState = WorkerState.STARTING
    is_first: bool = False
    """The gateway started with it."""
    is_leaving: bool = False
    """It got a signal of its own, or could not use new settings: another one takes its place."""
    unacknowledged: deque[socket.socket] = field(default_factory=deque)
    """Connections that were sent: another worker gets them if this one dies."""
    sent_connections: int = 0
    pending_reload_steps: deque[ReloadStep] = field(default_factory=deque)
    """Steps of reloads that it has not replied to, the oldest first."""
    reload_error: str = ""
    """Its last reply to a step of a reload: why that failed, or an empty text."""
    dropped_calls: int = 0

    @property
    def name(self) -> str:
        """Return how the log names it."""
        return f"{'worker' if self.serves == ToWorker.CLIENT else 'admin process'} {self.pid}"

    def accepts(self, kind: ConnectionKind) -> bool:
        """Tell whether it serves such connections now."""
        return kind == self.serves and self.state is WorkerState.READY

    def send_connection(self, connection: socket.socket) -> bool:
        """Send a connection, which this owns from then on; false if the worker cannot take it."""
        if len(self.unacknowledged) >= MAX_UNACKNOWLEDGED:
            return False
        if not self.send(self.serves, connection.fileno()):
            return False
        self.sent_connections += 1
        self.unacknowledged.append(connection)
        return True

    def send_reload_step(self, step: ReloadStep) -> bool:
        """Send a step of a reload; false: try that again."""
        if not self.send(step):
            return self.state is WorkerState.EXITING
        self.pending_reload_steps.append(step)
        return True

    def drain(self) -> None:
        """Tell it that no connection comes any more."""
        if self.state < WorkerState.DRAINING and self.send(ToWorker.DRAIN):
            self.state = WorkerState.DRAINING

    def read_message(self) -> bool:
        """Handle the next message, if one has come; false if the worker is gone."""
        try:
            message = receive(self.channel)
        except BlockingIOError:
            return True
        if message is None:
            self.state = WorkerState.EXITING
            return False
        kind, text, _ = message
        if kind == FromWorker.READY:
            self.state = max(self.state, WorkerState.READY)
        elif kind == FromWorker.RECEIVED:
            self.unacknowledged.popleft().close()
        elif kind == FromWorker.RELOAD_DONE:
            self.reload_error = text
            if self.pending_reload_steps.popleft() == ToWorker.COMMIT and text:
                _log.error("%s did not get all of the new settings, and is replaced", self.name)
                self.is_leaving = True
        elif kind == FromWorker.LEAVING:
            self.is_leaving = True
        elif kind == FromWorker.DROPPED:
            self.dropped_calls = int(text)
        return True

    def send(self, kind: ToWorker, descriptor: int = -1) -> bool:
        """Send a message; false if it cannot take it now, or is gone."""
        try:
            send(self.channel, kind, descriptor=descriptor)
        except ConnectionError:
            self.state = WorkerState.EXITING
            return False
        except OSError:
            return False  # its channel is full, or the system has too many descriptors on the way
        return True


class SupervisedGateway(Protocol):
    """What the supervisor serves, asks for new settings, and reports to.

    It applies one update of settings after the other. After each update the supervisor calls
    ``commit`` and later ``on_applied``, or ``abort``, or neither if it stops. Of these functions,
    none raises.
    """

    @property
    def sockets(self) -> ListeningSockets:
        """Return the listening sockets; the supervisor owns them."""

    @property
    def drain_timeout(self) -> float:
        """Return the seconds that calls in progress have when the gateway stops."""

    def run(self, channel: WorkerChannel, serves: ConnectionKind) -> None:
        """Run in a worker or the admin process; return when it is to exit."""

    def poll(self, requested: bool) -> ListeningSockets | None:
        """Look for new settings, which SIGHUP requests; return their sockets if they can be used.

        They are where all processes read them. The supervisor accepts on these sockets once the
        settings are in use, and closes those that are not among them.
        """

    def commit(self) -> None:
        """Use the settings for processes that start from now on: each running one is ready."""

    def abort(self, errors: Mapping[str, str]) -> None:
        """Give back what the settings needed; ``errors`` are of processes, by their names."""

    def on_applied(self, late: Sequence[str]) -> None:
        """Handle the end of an update; it names processes that have not replied yet."""

    def on_started(self, workers: Sequence[int]) -> None:
        """Handle that workers with these process ids serve connections from now on."""

    def on_stopping(self) -> None:
        """Handle that no client is accepted any more."""

    def on_worker_ended(self, process: WorkerProcess, why: str) -> None:
        """Handle that a process has ended unexpectedly."""

    def on_worker_restarted(self, process: WorkerProcess) -> None:
        """Handle that a process was started in the place of one that had ended unexpectedly."""


@dataclass(eq=False, slots=True)
class WorkerSlot:
    """One position of a worker or the admin process, filled again when that ends."""

    closed_connections: memoryview
    """One number that it shares with the worker."""
    serves: ConnectionKind = ToWorker.CLIENT
    is_wanted: bool = True
    """Whether a process is to run here."""
    worker: WorkerProcess | None = None
    start_at: float = 0.0
    """When the next worker starts, on the clock of ``time.monotonic``, if there is none."""
    replaces: bool = False
    """Whether the next process takes the place of one that has ended unexpectedly."""
    _early_exits: int = field(default=0, init=False)

    @property
    def open_connections(self) -> int:
        """Return the number of connections that the worker has, or is getting."""
        if self.worker is None:
            return 0
        return self.worker.sent_connections - int(self.closed_connections[0])

    def remove_worker(self, started_at: float, now: float) -> float:
        """Remove the worker; return the seconds until the next one starts."""
        self.worker = None
        delay = 0.0
        if now - started_at >= _STABLE_TIME:
            self._early_exits = 0
        else:
            delay = min(_FIRST_DELAY * 2.0 ** min(self._early_exits, 16), _MAX_DELAY)
            self._early_exits += 1
        self.start_at = now + delay
        return delay


class WorkerPool:
    """Runs a fixed number of workers, and replaces those that exit until the gateway stops.

    It runs the admin process while ``admin.is_wanted``. ``close_in_child`` runs in each forked
    process: it closes what belongs to the supervisor.
    """

    def __init__(
        self,
        size: int,
        gateway: SupervisedGateway,
        selector: selectors.BaseSelector,
        close_in_child: Callable[[], None],
    ) -> None:
        *counters, admin_counter = shared_counters(size + 1)
        self._gateway = gateway
        self._slots = [WorkerSlot(counter) for counter in counters]
        self.admin = WorkerSlot(admin_counter, ToWorker.ADMIN, is_wanted=False)
        self._all_slots = [*self._slots, self.admin]
        self.has_started = False
        """Each first process has become ready, or has failed."""
        self.is_stopping = False
        """Workers that exit are not replaced any more."""
        self.dropped_calls = 0
        """Calls that workers cut at the drain timeout."""
        self.pending: dict[ConnectionKind, deque[socket.socket]] = {
            ToWorker.CLIENT: deque(),
            ToWorker.ADMIN: deque(),
        }
        """Connections that no process could take yet, or that were on the way to one that died."""
        self._selector = selector
        self._close_in_child = close_in_child

    @property
    def workers(self) -> list[WorkerProcess]:
        """Return the running workers."""
        return [slot.worker for slot in self._slots if slot.worker is not None]

    @property
    def processes(self) -> list[WorkerProcess]:
        """Return the running workers and the admin process."""
        return [slot.worker for slot in self._all_slots if slot.worker is not None]

    @property
    def processes_by_load(self) -> list[WorkerProcess]:
        """Return the running processes: the one with the fewest connections first."""
        slots = sorted(self._all_slots, key=attrgetter("open_connections"))
        return [slot.worker for slot in slots if slot.worker is not None]

    @property
    def next_start(self) -> float:
        """Return when the next process starts, on the clock of ``time.monotonic``."""
        return min((slot.start_at for slot in self._missing), default=NEVER)

    @property
    def _missing(self) -> list[WorkerSlot]:
        return [slot for slot in self._all_slots if slot.is_wanted and slot.worker is None]

    def start_missing(self, now: float) -> None:
        """Start a process in each empty slot whose delay is over."""
        for slot in self._missing:
            if now >= slot.start_at:
                self._start(slot)

    def kill_all(self) -> None:
        """Kill the processes that did not exit in time."""
        for worker in self.processes:
            _log.error("%s did not stop in time and is killed", worker.name)
            os.kill(worker.pid, signal.SIGKILL)

    def reap_adopted_children(self) -> None:
        """Reap what dead workers have left behind."""
        reap_adopted_children([worker.pid for worker in self.processes])

    def close_in_child(self) -> None:
        """Close, in a child, the channels and connections of the other processes."""
        for worker in self.processes:
            worker.channel.close()
            for connection in worker.unacknowledged:
                connection.close()
        for pending in self.pending.values():
            for connection in pending:
                connection.close()

    def _start(self, slot: WorkerSlot) -> None:
        now = time.monotonic()
        slot.closed_connections[0] = 0
        try:
            pid, channel = self._fork(slot)
        except OSError as error:
            delay = slot.remove_worker(now, now)
            _log.error("cannot start a worker: %s; next try in %g s", error.strerror, delay)
            return
        slot.worker = WorkerProcess(pid, channel, now, slot.serves)
        slot.worker.is_first = not self.has_started
        self._selector.register(
            channel, selectors.EVENT_READ, partial(self._read, slot, slot.worker)
        )
        if slot.replaces:
            slot.replaces = False
            self._gateway.on_worker_restarted(slot.worker)

    def _fork(self, slot: WorkerSlot) -> tuple[int, socket.socket]:
        """Fork a worker; return its process id, and the supervisor's end of its channel."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        # Until the child has reset its handlers, its signals would wake the parent.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_SIGNALS)
        try:
            pid = os.fork()
            if pid == 0:
                ours.close()
                number = self._all_slots.index(slot)
                channel = WorkerChannel(theirs, slot.closed_connections, number)
                self._run_in_child(partial(self._gateway.run, channel, slot.serves), mask)
        except OSError:
            ours.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            theirs.close()
        return pid, ours

    def _run_in_child(self, main: Callable[[], None], mask: set[signal.Signals | int]) -> NoReturn:
        """Run a worker in a forked child; none of the parent's code runs after it."""
        status = 1
        try:
            self._close_in_child()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            main()
            status = 0
        except BaseException:
            _log.exception("a worker failed")
        finally:
            with suppress(Exception):
                sys.stderr.flush()
            os._exit(status)

    def _read(self, slot: WorkerSlot, worker: WorkerProcess) -> None:
        was_starting = worker.state is WorkerState.STARTING
        is_alive = worker.read_message()
        if was_starting and worker.state is WorkerState.READY and not worker.is_first:
            _log.info("%s is up", worker.name)
        if not is_alive:
            self._remove(slot, worker)

    def _remove(self, slot: WorkerSlot, worker: WorkerProcess) -> None:
        self._selector.unregister(worker.channel)
        worker.channel.close()
        code = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
        self.dropped_calls += worker.dropped_calls
        self.pending[worker.serves].extend(worker.unacknowledged)
        delay = slot.remove_worker(worker.started_at, time.monotonic())
        self.reap_adopted_children()
        if slot.is_wanted and not self.is_stopping:
            then = f"in {delay:g} s" if delay else "at once"
            ended = exit_text(code)
            _log.error("%s %s; another one starts %s", worker.name, ended, then)
            slot.replaces = True
            self._gateway.on_worker_ended(worker, ended)
        elif code and -code not in STOP_SIGNALS:
            # A stop signal may come before the worker handles it, and after it has finished.
            _log.error("%s %s", worker.name, exit_text(code))


def exit_text(code: int) -> str:
    """Describe an exit code, which is negative for a signal."""
    if code >= 0:
        return f"ended with status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # real-time signals have no names
        return f"was killed by signal {-code}"


def reap_adopted_children(workers: Collection[int]) -> None:
    """Reap children that are no workers: process 1 of a container gets those of dead processes.

    Workers are reaped elsewhere, for their status. What exited behind such a worker is seen once
    that one is reaped.
    """
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if found is None or found.si_pid in workers:
            return
        os.waitpid(found.si_pid, 0)
