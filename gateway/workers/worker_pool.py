"""The worker processes as the supervisor sees them: their start, state, load and end."""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from operator import attrgetter
from typing import NoReturn

from gateway.workers.ipc import ConnectionKind, FromWorker, ToWorker, WorkerChannel, receive, send
from gateway.workers.shared_state import shared_counters
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

WorkerMain = Callable[[WorkerChannel], None]
"""What a worker runs; it returns when the worker is to exit."""


@dataclass(frozen=True, slots=True)
class PendingConnection:
    """A connection that no worker has received yet."""

    sock: socket.socket
    kind: ConnectionKind


class WorkerState(IntEnum):
    """The life of a worker: the supervisor advances it, or the worker's messages do."""

    STARTING = 0
    READY = 1
    DRAINING = 2
    """It was told to drain: it takes no more clients."""
    DRAINED = 3
    """It said that no client's call is running any more."""
    EXITING = 4
    """It was let exit, or its channel is broken."""


class WorkerProcess:
    """A worker, and the supervisor's end of the channel to it."""

    def __init__(self, pid: int, channel: socket.socket, started_at: float) -> None:
        self.pid = pid
        self.channel = channel
        self.started_at = started_at
        self.state = WorkerState.STARTING
        self.is_leaving = False
        """It got a signal of its own."""
        self.unacknowledged: deque[PendingConnection] = deque()
        """Connections that were sent: another worker gets them if this one dies."""
        self.sent_connections = 0
        self.pending_reloads = 0
        """Reloads that it has not replied to."""
        self.reload_error = ""
        """Its last reply to a reload; empty if it uses the settings."""
        self.dropped_calls = 0

    def accepts(self, kind: ConnectionKind) -> bool:
        """Tell whether it serves such connections: admin ones also while it drains."""
        if kind == ToWorker.CLIENT:
            return self.state is WorkerState.READY
        return WorkerState.READY <= self.state < WorkerState.EXITING

    def send_connection(self, connection: PendingConnection) -> bool:
        """Send a connection, which this owns from then on; false if the worker cannot take it."""
        if not self.accepts(connection.kind) or len(self.unacknowledged) >= MAX_UNACKNOWLEDGED:
            return False
        if not self._send(connection.kind, connection.sock.fileno()):
            return False
        self.sent_connections += 1
        self.unacknowledged.append(connection)
        return True

    def send_reload(self, settings: int) -> bool:
        """Send a descriptor of new settings; false if that is to be tried again."""
        if not self._send(ToWorker.RELOAD, settings):
            return self.state is WorkerState.EXITING
        self.pending_reloads += 1
        return True

    def announce_stop(self) -> None:
        """Tell it that the gateway stops; clients still come."""
        self._send(ToWorker.STOPPING)

    def drain(self) -> None:
        """Tell it that no client comes any more."""
        if self.state < WorkerState.DRAINING and self._send(ToWorker.DRAIN):
            self.state = WorkerState.DRAINING

    def exit_if_drained(self) -> None:
        """Let it exit if no client's call is running any more: nothing else comes."""
        if self.state is WorkerState.DRAINED:
            self.state = WorkerState.EXITING
            with suppress(OSError):  # it is gone already
                self.channel.shutdown(socket.SHUT_WR)

    def read_message(self) -> bool:
        """Handle the next message, if one has come; false if the worker is gone."""
        try:
            message = receive(self.channel)
        except BlockingIOError:
            return True
        if message is None:
            self.state = WorkerState.EXITING
            return False
        self._handle(*message)
        return True

    def _handle(self, kind: int, text: str) -> None:
        if kind == FromWorker.READY:
            self.state = max(self.state, WorkerState.READY)
        elif kind == FromWorker.RECEIVED:
            self.unacknowledged.popleft().sock.close()
        elif kind == FromWorker.RELOADED:
            self.pending_reloads -= 1
            self.reload_error = text
        elif kind == FromWorker.LEAVING:
            self.is_leaving = True
        elif kind == FromWorker.DRAINED:
            self.state = max(self.state, WorkerState.DRAINED)
        elif kind == FromWorker.DROPPED:
            self.dropped_calls = int(text)

    def _send(self, kind: ToWorker, descriptor: int = -1) -> bool:
        try:
            send(self.channel, kind, descriptor=descriptor)
        except ConnectionError:
            self.state = WorkerState.EXITING
            return False
        except OSError:
            return False  # its channel is full, or the system has too many descriptors on the way
        return True


class WorkerSlot:
    """One worker position, filled again when its worker ends.

    ``closed_connections`` is one number that it shares with the worker.
    """

    def __init__(self, closed_connections: memoryview) -> None:
        self.closed_connections = closed_connections
        self.worker: WorkerProcess | None = None
        self.start_at = 0.0
        """When the next worker starts, on the clock of ``time.monotonic``, if there is none."""
        self._early_exits = 0

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

    ``close_in_child`` runs in each forked worker: it closes what belongs to the supervisor.
    """

    def __init__(
        self,
        size: int,
        main: WorkerMain,
        selector: selectors.BaseSelector,
        close_in_child: Callable[[], None],
    ) -> None:
        self.slots = [WorkerSlot(counter) for counter in shared_counters(size)]
        self.has_started = False
        """Each first worker has become ready, or has failed."""
        self.is_stopping = False
        """Workers that exit are not replaced any more."""
        self.dropped_calls = 0
        """Calls that workers cut at the drain timeout."""
        self.returned: list[PendingConnection] = []
        """Connections that were on the way to a worker when it died."""
        self._main = main
        self._selector = selector
        self._close_in_child = close_in_child

    @property
    def workers(self) -> list[WorkerProcess]:
        """Return the running workers."""
        return [slot.worker for slot in self.slots if slot.worker is not None]

    @property
    def workers_by_load(self) -> list[WorkerProcess]:
        """Return the running workers: the one with the fewest connections first, drains last."""
        slots = sorted(self.slots, key=attrgetter("open_connections"))
        workers = [slot.worker for slot in slots if slot.worker is not None]
        return sorted(workers, key=lambda worker: worker.state >= WorkerState.DRAINING)

    @property
    def next_start(self) -> float:
        """Return when the next worker starts, on the clock of ``time.monotonic``."""
        return min((slot.start_at for slot in self.slots if slot.worker is None), default=NEVER)

    def start_missing(self, now: float) -> None:
        """Start a worker in each empty slot whose delay is over."""
        for slot in self.slots:
            if slot.worker is None and now >= slot.start_at:
                self._start(slot)

    def kill_all(self) -> None:
        """Kill the workers that did not exit in time."""
        for worker in self.workers:
            _log.error("worker %d did not stop in time and is killed", worker.pid)
            os.kill(worker.pid, signal.SIGKILL)

    def reap_adopted_children(self) -> None:
        """Reap what dead workers have left behind."""
        reap_adopted_children([worker.pid for worker in self.workers])

    def close_in_child(self) -> None:
        """Close, in a child, the channels and connections of the other workers."""
        for worker in self.workers:
            worker.channel.close()
            for connection in worker.unacknowledged:
                connection.sock.close()
        for connection in self.returned:
            connection.sock.close()

    def _start(self, slot: WorkerSlot) -> None:
        now = time.monotonic()
        slot.closed_connections[0] = 0
        number = self.slots.index(slot)
        try:
            pid, channel = _fork(self._main, slot.closed_connections, number, self._close_in_child)
        except OSError as error:
            delay = slot.remove_worker(now, now)
            _log.error("cannot start a worker: %s; next try in %g s", error.strerror, delay)
            return
        slot.worker = WorkerProcess(pid, channel, now)
        self._selector.register(
            channel, selectors.EVENT_READ, partial(self._read, slot, slot.worker)
        )

    def _read(self, slot: WorkerSlot, worker: WorkerProcess) -> None:
        was_starting = worker.state is WorkerState.STARTING
        is_alive = worker.read_message()
        if self.has_started and was_starting and worker.state is WorkerState.READY:
            _log.info("worker %d is up", worker.pid)
        if not is_alive:
            self._remove(slot, worker)

    def _remove(self, slot: WorkerSlot, worker: WorkerProcess) -> None:
        self._selector.unregister(worker.channel)
        worker.channel.close()
        code = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
        self.dropped_calls += worker.dropped_calls
        self.returned += worker.unacknowledged
        delay = slot.remove_worker(worker.started_at, time.monotonic())
        self.reap_adopted_children()
        if not self.is_stopping:
            then = f"in {delay:g} s" if delay else "at once"
            ended = exit_text(code)
            _log.error("worker %d %s; another one starts %s", worker.pid, ended, then)
        elif code and -code not in STOP_SIGNALS:
            # A stop signal may come before the worker handles it, and after it has finished.
            _log.error("worker %d %s", worker.pid, exit_text(code))


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


def _fork(
    main: WorkerMain,
    closed_connections: memoryview,
    slot: int,
    close_in_child: Callable[[], None],
) -> tuple[int, socket.socket]:
    """Fork a worker; return its process id, and the supervisor's end of its channel."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    # Until the child has reset its handlers, its signals would wake the parent.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_SIGNALS)
    try:
        pid = os.fork()
        if pid == 0:
            ours.close()
            channel = WorkerChannel(theirs, closed_connections, slot)
            _run_worker(main, channel, close_in_child, mask)
    except OSError:
        ours.close()
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        theirs.close()
    return pid, ours


def _run_worker(
    main: WorkerMain,
    channel: WorkerChannel,
    close_in_child: Callable[[], None],
    mask: set[signal.Signals | int],
) -> NoReturn:
    """Run a worker in a forked child; none of the parent's code runs after it."""
    status = 1
    try:
        close_in_child()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        main(channel)
        status = 0
    except BaseException:
        _log.exception("a worker failed")
    finally:
        with suppress(Exception):
            sys.stderr.flush()
        os._exit(status)
