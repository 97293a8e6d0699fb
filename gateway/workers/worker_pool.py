"""The workers: how each is started and heard, and how those that end are replaced."""

from __future__ import annotations

import logging
import mmap
import os
import selectors
import signal
import time
from functools import partial
from typing import Protocol

from gateway.workers.fork import WorkerMain, fork
from gateway.workers.reaper import reap_adopted_children
from gateway.workers.seat import WorkerProcess, WorkerSlot, exit_text
from gateway.workers.signals import STOP_SIGNALS

_NEVER = float("inf")

_log = logging.getLogger("tensorgate.workers")


class WorkerObserver(Protocol):
    """Who has the workers."""

    def leave(self) -> None:
        """Close, in a child, what is the parent's, and give signals up."""

    def see_off(self, worker: WorkerProcess) -> None:
        """Hear that a worker was told to leave."""

    def has_drained(self, worker: WorkerProcess) -> None:
        """Hear that a worker serves no client any more."""

    def take_back(self, worker: WorkerProcess) -> None:
        """Hear that a worker has ended, with connections on the way to it perhaps."""


class WorkerPool:
    """Has so many workers work, each in a seat of its own, until they are told to stop."""

    def __init__(
        self,
        workers: int,
        work: WorkerMain,
        employer: WorkerObserver,
        selector: selectors.BaseSelector,
    ) -> None:
        closed = memoryview(mmap.mmap(-1, 8 * workers)).cast("Q")
        self.seats = [WorkerSlot(closed[i : i + 1]) for i in range(workers)]
        self.begun = False
        """All first workers have come up, or failed: from now on, those that end are replaced."""
        self.stopping = False
        """Those that end are not replaced any more."""
        self.dropped = 0
        """Exchanges that those which have ended did not finish."""
        self._work = work
        self._employer = employer
        self._selector = selector

    @property
    def workers(self) -> list[WorkerProcess]:
        """Give those that there are."""
        return [seat.worker for seat in self.seats if seat.worker is not None]

    @property
    def due(self) -> float:
        """Tell when the next one starts, on the clock of ``time.monotonic``."""
        return min((seat.due for seat in self.seats if seat.worker is None), default=_NEVER)

    def fill(self, now: float) -> None:
        """Start a worker in each empty seat in which it is time for one."""
        for seat in self.seats:
            if seat.worker is None and now >= seat.due:
                self._start(seat)

    def kill(self) -> None:
        """End those that did not stop in time."""
        for worker in self.workers:
            _log.error("worker %d did not stop in time and is killed", worker.pid)
            os.kill(worker.pid, signal.SIGKILL)

    def reap(self) -> None:
        """Let those go that dead workers have left behind."""
        reap_adopted_children([worker.pid for worker in self.workers])

    def leave(self) -> None:
        """Close, in a child, what is the parent's."""
        for worker in self.workers:
            worker.channel.close()
            for arrival in worker.on_the_way:
                arrival.connection.close()

    def _start(self, seat: WorkerSlot) -> None:
        now = time.monotonic()
        try:
            seat.closed[0] = 0
            is_first = seat is self.seats[0]
            pid, channel = fork(self._work, seat.closed, is_first, self._employer.leave)
            seat.worker = WorkerProcess(pid, channel, now)
        except OSError as error:
            pause = seat.vacate(now, now)
            _log.error("cannot start a worker: %s; next try in %g s", error.strerror, pause)
            return
        self._selector.register(channel, selectors.EVENT_READ, partial(self._listen_to, seat))

    def _listen_to(self, seat: WorkerSlot) -> None:
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
            if self.begun and seat.worker.up and not was_up:
                _log.info("worker %d is up", seat.worker.pid)
            if seat.worker.leaving:
                self._employer.see_off(seat.worker)
            if seat.worker.drained:
                self._employer.has_drained(seat.worker)
        else:
            self._bury(seat, seat.worker)

    def _bury(self, seat: WorkerSlot, worker: WorkerProcess) -> None:
        self._selector.unregister(worker.channel)
        worker.channel.close()
        code = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
        self.dropped += worker.dropped
        pause = seat.vacate(worker.began, time.monotonic())
        self.reap()
        self._employer.take_back(worker)
        if not self.stopping:
            then = f"in {pause:g} s" if pause else "at once"
            ended = exit_text(code)
            _log.error("worker %d %s; another one starts %s", worker.pid, ended, then)
        elif code and -code not in STOP_SIGNALS:
            # As for those: they can come before a worker handles them, and after it has finished.
            _log.error("worker %d %s", worker.pid, exit_text(code))
