"""A reload in all workers: the supervisor sends new settings, and collects the replies."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from gateway.system.file_watcher import POLL_INTERVAL
from gateway.workers.ipc import ConnectionKind
from gateway.workers.worker_pool import NEVER, WorkerProcess, WorkerState

_RETRY_DELAY = 0.01
"""Seconds until settings are sent again to a worker whose channel was full."""
_REPLY_TIMEOUT = 30.0
"""Seconds for all workers to reply."""


@dataclass(frozen=True, slots=True)
class ConfigUpdate:
    """New settings: the workers apply ``settings``, then the supervisor applies the rest.

    It accepts on these sockets from then on, and closes those that are not among them.
    ``drain_timeout`` is in seconds.
    """

    settings: bytes
    sockets: Mapping[socket.socket, ConnectionKind]
    drain_timeout: float


class ConfigSource(Protocol):
    """Where the supervisor gets new settings from; it applies one update after the other."""

    def poll(self, requested: bool) -> ConfigUpdate | None:
        """Return new settings, if there are any; SIGHUP requests them. Raises nothing."""

    def on_applied(self, errors: Mapping[int, str]) -> None:
        """Handle the end of an update; ``errors`` are of workers that go on with old settings."""


class ReloadBroadcaster:
    """Polls for new settings, and has the workers apply them, without ever waiting."""

    def __init__(self, source: ConfigSource) -> None:
        self._source = source
        self._is_requested = False
        self._poll_at = time.monotonic() + POLL_INTERVAL
        self._broadcast: _Broadcast | None = None

    @property
    def next_step(self) -> float:
        """Return when there is something to do, on the clock of ``time.monotonic``."""
        if self._broadcast is not None:
            return self._broadcast.next_step
        return 0.0 if self._is_requested else self._poll_at

    @property
    def pending_sockets(self) -> Mapping[socket.socket, ConnectionKind]:
        """Return the sockets of an update that is not applied yet."""
        return {} if self._broadcast is None else self._broadcast.update.sockets

    def request(self) -> None:
        """Ask for new settings as soon as no update is being applied."""
        self._is_requested = True

    def step(self, workers: Sequence[WorkerProcess], apply: Callable[[ConfigUpdate], None]) -> None:
        """Poll, send and collect replies; ``apply`` an update that all workers have replied to."""
        if self._broadcast is None and time.monotonic() >= self.next_step:
            self._poll(workers)
        if self._broadcast is not None and self._broadcast.step():
            update, errors = self._broadcast.update, self._broadcast.errors
            self.cancel()
            apply(update)
            self._source.on_applied(errors)

    def cancel(self) -> None:
        """Give up the update that is being applied."""
        if self._broadcast is not None:
            self._broadcast.close()
            self._broadcast = None

    def close_in_child(self) -> None:
        """Close, in a child, what belongs to the supervisor."""
        for sock in self.pending_sockets:
            sock.close()
        self.cancel()

    def _poll(self, workers: Sequence[WorkerProcess]) -> None:
        requested, self._is_requested = self._is_requested, False
        update = self._source.poll(requested)
        self._poll_at = time.monotonic() + POLL_INTERVAL
        if update is not None:
            self._broadcast = _Broadcast(update, list(workers))


@dataclass
class _Broadcast:
    """An update on its way: whom it was not sent to yet, and whose replies are still to come."""

    update: ConfigUpdate
    unsent: list[WorkerProcess]
    unreplied: list[WorkerProcess] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)
    memory: int = -1
    """A descriptor of memory with the settings, as a message cannot hold them."""
    deadline: float = field(default_factory=lambda: time.monotonic() + _REPLY_TIMEOUT)

    @property
    def next_step(self) -> float:
        return min(self.deadline, time.monotonic() + _RETRY_DELAY if self.unsent else NEVER)

    def step(self) -> bool:
        """Send what can be sent, and collect replies; return whether all is done."""
        self.unsent = [worker for worker in self.unsent if not self._send(worker)]
        self.unreplied = [worker for worker in self.unreplied if not self._has_replied(worker)]
        late = [*self.unsent, *self.unreplied]
        if late and time.monotonic() < self.deadline:
            return False
        reason = f"no reply within {_REPLY_TIMEOUT:g} s"
        self.errors.update((worker.pid, reason) for worker in late)
        return True

    def close(self) -> None:
        if self.memory >= 0:
            os.close(self.memory)

    def _send(self, worker: WorkerProcess) -> bool:
        """Send the settings to a worker; false if that is to be tried again."""
        if worker.state >= WorkerState.DRAINING:
            return True
        if self.memory < 0:
            with suppress(OSError):  # too many open files, of which some may be closed soon
                self.memory = _memory_with(self.update.settings)
        if self.memory < 0 or not worker.send_reload(self.memory):
            return False
        self.unreplied.append(worker)
        return True

    def _has_replied(self, worker: WorkerProcess) -> bool:
        if worker.state >= WorkerState.DRAINING:
            return True  # it goes on with the settings that it has, or is gone
        if worker.pending_reloads:
            return False
        if worker.reload_error:
            self.errors[worker.pid] = worker.reload_error
        return True


def _memory_with(content: bytes) -> int:
    memory = os.memfd_create("settings")
    try:
        with open(memory, "wb", closefd=False) as file:
            file.write(content)
    except OSError:
        os.close(memory)
        raise
    return memory
