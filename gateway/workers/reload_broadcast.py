"""A reload in all processes, in two phases: all of them prepare it, then all of them use it.

1. PREPARE: each worker, and the admin process, makes all that the new settings need and that can
   fail. The source has done the same for the supervisor before. A process that starts meanwhile
   has the previous settings, and prepares the new ones too.
2. COMMIT, once every process is ready: what is prepared is swapped in by assignments that cannot
   fail. The source commits first, so that a process that starts from then on has the new settings.
   A process that fails here, by a bug, drains and is replaced.
   ABORT, if a process refuses or does not reply in time: each one gives back what it has prepared.

A process that dies or drains is not waited for: the one that takes its place has what holds then.
The channel keeps the order, so that a process that was stopped for a while does the same steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from gateway.system.file_watcher import POLL_INTERVAL
from gateway.workers.ipc import ListeningSockets, ReloadStep, ToWorker
from gateway.workers.worker_pool import SupervisedGateway, WorkerProcess, WorkerState

PREPARE_TIMEOUT = 30.0
"""Seconds for all processes to prepare new settings; the reload is aborted after them."""
COMMIT_TIMEOUT = 5.0
"""Seconds until the supervisor accepts at new addresses although a process has not replied: one
that is stopped uses the new settings as soon as it goes on."""

_RETRY_DELAY = 0.01
"""Seconds until a message is sent again to a process whose channel was full."""


class ReloadBroadcaster:
    """Polls for new settings, and has all processes use them or none, without ever waiting."""

    def __init__(self, source: SupervisedGateway) -> None:
        self._source = source
        self.is_requested = False
        """Whether to look for new settings as soon as no update is in progress."""
        self.pending_sockets: ListeningSockets = {}
        """The sockets of an update that is not applied yet."""
        self._poll_at = time.monotonic() + POLL_INTERVAL
        self._broadcast: _Broadcast | None = None

    @property
    def next_step(self) -> float:
        """Return when there is something to do, on the clock of ``time.monotonic``."""
        if self._broadcast is not None:
            return self._broadcast.next_step
        return 0.0 if self.is_requested else self._poll_at

    def step(
        self, processes: Sequence[WorkerProcess], apply: Callable[[ListeningSockets], None]
    ) -> None:
        """Poll, send and collect replies; ``apply`` an update that all processes use."""
        if self._broadcast is None and time.monotonic() >= self.next_step:
            self._poll(processes)
        while (broadcast := self._broadcast) is not None and broadcast.step(processes):
            self._broadcast = None
            if broadcast.message == ToWorker.PREPARE:
                self._decide(broadcast)
            elif broadcast.message == ToWorker.COMMIT:
                sockets, self.pending_sockets = self.pending_sockets, {}
                apply(sockets)
                self._source.on_applied([process.name for process in broadcast.late])

    def _poll(self, processes: Sequence[WorkerProcess]) -> None:
        requested, self.is_requested = self.is_requested, False
        sockets = self._source.poll(requested)
        self._poll_at = time.monotonic() + POLL_INTERVAL
        if sockets is not None:
            self.pending_sockets = sockets
            self._broadcast = _Broadcast(ToWorker.PREPARE, processes, PREPARE_TIMEOUT)
        elif requested:
            # The settings cannot be used, but the processes open their logs anew.
            self._broadcast = _Broadcast(ToWorker.ABORT, processes, COMMIT_TIMEOUT)

    def _decide(self, prepared: _Broadcast) -> None:
        """Have all processes use what all have prepared, or none."""
        step: ReloadStep = ToWorker.COMMIT
        if errors := prepared.errors:
            step, self.pending_sockets = ToWorker.ABORT, {}
            self._source.abort(errors)
        else:
            self._source.commit()
        self._broadcast = _Broadcast(step, prepared.processes, COMMIT_TIMEOUT)


class _Broadcast:
    """A message on its way: whom it was not sent to yet, and whose replies are still to come.

    COMMIT is sent again until each process has it or is gone. Nobody waits for replies to ABORT:
    what comes next for a process is behind it in its channel.
    """

    def __init__(
        self, message: ReloadStep, processes: Iterable[WorkerProcess], timeout: float
    ) -> None:
        self.message = message
        self.processes = list(processes)
        self.errors: dict[str, str] = {}
        """Why processes, by their names, have failed or not replied."""
        self._unsent = list(self.processes)
        self._unreplied: list[WorkerProcess] = []
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout

    @property
    def next_step(self) -> float:
        return time.monotonic() + _RETRY_DELAY if self._unsent else self._deadline

    @property
    def late(self) -> list[WorkerProcess]:
        """Return the processes that have not replied."""
        return [*self._unsent, *self._unreplied]

    def step(self, processes: Sequence[WorkerProcess]) -> bool:
        """Send what can be sent, and collect replies; return whether all is done."""
        if self.message == ToWorker.PREPARE:
            started = [process for process in processes if process not in self.processes]
            self.processes += started
            self._unsent += started
        self._unsent = [process for process in self._unsent if not self._send(process)]
        self._unreplied = [process for process in self._unreplied if not self._has_replied(process)]
        if self.message == ToWorker.ABORT:
            return not self._unsent or time.monotonic() >= self._deadline
        if self.late and (
            time.monotonic() < self._deadline or (self._unsent and self.message == ToWorker.COMMIT)
        ):
            return False
        reason = f"no reply within {self._timeout:g} s"
        self.errors.update((process.name, reason) for process in self.late)
        return True

    def _send(self, process: WorkerProcess) -> bool:
        """Send the message to a process; false if that is to be tried again."""
        if process.state >= WorkerState.DRAINING:
            return True
        if not process.send_reload_step(self.message):
            return False
        self._unreplied.append(process)
        return True

    def _has_replied(self, process: WorkerProcess) -> bool:
        if process.state >= WorkerState.DRAINING:
            return True  # it goes on with the settings that it has, or is gone
        if process.pending_reload_steps:
            return False
        if process.reload_error:
            self.errors[process.name] = process.reload_error
        return True
