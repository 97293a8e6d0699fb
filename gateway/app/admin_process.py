"""The admin process: it serves the admin address of a gateway with several workers.

It has no part in calls. It reads what workers publish in shared memory, and asks them.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from types import TracebackType
from typing import Any, Self

from multidict import CIMultiDictProxy

from gateway.app.admin_site import AdminSite
from gateway.app.captured_calls import send_connection
from gateway.app.journal.journal import Event
from gateway.app.loaded_resources import LoadedResources, load_resources
from gateway.app.reload.prepared import CloseReplaced, PreparedReload
from gateway.app.reload.revision import Revision
from gateway.app.shared_memory import SharedMemory
from gateway.app.status_publisher import read_last_statuses, read_statuses
from gateway.observe.metric_store import MetricStore
from gateway.settings.schema import Settings
from gateway.workers.control import ControlClient, Question

_PUBLISH_TIMEOUT = 0.3
"""Seconds for workers to publish their status; older ones are taken of those that need longer."""
_MAX_SILENCE = 15.0
"""Seconds without a sign of life of any worker, until probes learn that the gateway hangs."""
_READY_TIMEOUT = 3.0
"""Seconds for a worker to say whether it is ready, which may take it two."""
_CONNECT_TIMEOUT = 2.0
"""Seconds for a worker to take a connection."""
_NEXT_WORKER_DELAY = 0.5
"""Seconds until another worker is asked too, as the first one may hang."""
_DRAIN_GRACE = 0.1
"""Seconds at the end for operators with an open connection to request a page."""


class AdminProcess:
    """Serves operators while its context is open: see GatewaySource."""

    def __init__(
        self, resources: LoadedResources, shared: SharedMemory, revision: Revision
    ) -> None:
        assert shared.control is not None
        self._resources = resources
        self._shared = shared
        self._journal = shared.admin_journal
        self._control = ControlClient(shared.control)
        self._site = AdminSite(self)
        self._statuses: list[dict[str, Any]] = []
        self._turn = 0
        self._key_watch: asyncio.Task[None] | None = None
        self.revision = revision
        """Which settings are in use; the reloader keeps it up to date."""
        self.draining = False
        """The gateway is stopping."""

    async def __aenter__(self) -> Self:
        self._control.__enter__()
        await self._site.__aenter__()
        self._watch_keys()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._key_watch is not None:
            self._key_watch.cancel()
        await self._site.drain(_DRAIN_GRACE)
        await self._site.__aexit__(kind, error, traceback)
        self._control.__exit__(kind, error, traceback)

    def _watch_keys(self) -> None:
        """Follow the files of API keys; those of before may belong to other settings."""
        if self._key_watch is not None:
            self._key_watch.cancel()
        watch = self._resources.api_keys.watch(lambda: None)
        self._key_watch = asyncio.create_task(watch)

    def take(self, connection: socket.socket) -> None:
        """Serve a connection that was accepted elsewhere; this owns it from now on."""
        self._site.adopt(connection)

    def begin_draining(self) -> None:
        """Be not ready from now on."""
        self.draining = True

    async def prepare(self, settings: Settings) -> PreparedReload:
        """Load what other settings name. Raises UpstreamTlsError, ApiKeysError and ListenError."""
        resources = await asyncio.to_thread(load_resources, settings, self._resources)
        return PreparedReload("", partial(self._swap, resources), AsyncExitStack())

    def _swap(self, resources: LoadedResources) -> CloseReplaced:
        self._resources = resources
        self._watch_keys()
        return _close_nothing

    def reopen_logs(self) -> None:
        """Do nothing: it has no log."""

    @property
    def settings(self) -> Settings:
        """Return the settings in use."""
        return self._resources.settings

    @property
    def metric_store(self) -> MetricStore:
        """Return the counters and histograms of all workers."""
        return self._shared.metric_store

    @property
    def hangs(self) -> bool:
        """Tell whether there are workers, and no event loop of theirs has run for some time."""
        now = time.monotonic() * 1000
        ages = [now - self._shared.heartbeats[slot][0] for slot in self._living_slots()]
        return bool(ages) and min(ages) > _MAX_SILENCE * 1000

    def requests_in_progress(self) -> int:
        """Return the calls in progress of all workers."""
        return sum(int(self._shared.calls_in_progress[slot][0]) for slot in self._living_slots())

    async def worker_statuses(self) -> list[dict[str, Any]]:
        """Return the statuses of all living workers; when the last has ended, those of before."""
        asked = [
            self._ask(slot, Question.PUBLISH, _PUBLISH_TIMEOUT) for slot in self._living_slots()
        ]
        await asyncio.gather(*asked)
        statuses = await asyncio.to_thread(read_statuses, self._shared.statuses)
        if not (statuses or self._statuses):
            # All died before this process asked them.
            statuses = await asyncio.to_thread(read_last_statuses, self._shared.statuses)
        self._statuses = statuses or self._statuses
        if self.draining:
            return [{**each, "draining": True} for each in self._statuses]
        return self._statuses

    async def not_ready_reason(self) -> str:
        """Return why the gateway is not ready, or an empty text: a worker knows."""
        if self.draining:
            return "draining"
        slots = list(self._living_slots())
        self._turn += 1
        first = self._turn % len(slots) if slots else 0
        asked = [
            asyncio.create_task(self._ask_if_ready(slot, min(at * _NEXT_WORKER_DELAY, 2.0)))
            for at, slot in enumerate((*slots[first:], *slots[:first]))
        ]
        try:
            for reply in asyncio.as_completed(asked):
                if (reason := await reply) is not None:
                    return reason
        finally:
            for each in asked:
                each.cancel()
        return "no worker responds"

    async def _ask_if_ready(self, slot: int, delay: float) -> str | None:
        """Ask a worker, after a delay within which another one may have replied."""
        await asyncio.sleep(delay)
        return await self._ask(slot, Question.READY, _READY_TIMEOUT - delay)

    def authorizes(self, headers: CIMultiDictProxy[str]) -> bool:
        """Tell whether a request has a key that allows actions at the admin address."""
        return self._resources.authorizes(headers)

    async def drain_endpoint(self, upstream: str, url: str, drained: bool, operator: str) -> None:
        """Drain an endpoint, or restore it. Raises ValueError."""
        self._shared.drained.change(upstream, url, drained)
        self._journal.record_action(operator, upstream, url, drained)

    async def connect(self) -> socket.socket:
        """Return a connection to a worker, which serves it as that of a client.

        Raises TimeoutError if no worker takes it.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            await self._hand_over(Question.CONNECT, theirs, ours)
        return ours

    async def connect_captured(self, skips_conversion: bool) -> tuple[socket.socket, socket.socket]:
        """Return such a connection for one call, and a socket that gets what is captured of it."""
        (ours, theirs), (source, sink) = socket.socketpair(), socket.socketpair()
        with sink:
            with theirs:
                send_connection(source, theirs, skips_conversion)
            await self._hand_over(Question.CAPTURE, sink, ours, source)
        return ours, source

    async def _hand_over(
        self, question: Question, connection: socket.socket, *ours: socket.socket
    ) -> None:
        """Have a worker serve a connection; close ours if none does. Raises TimeoutError."""
        try:
            for slot in self._living_slots():
                with suppress(TimeoutError):
                    await self._control.ask(slot, question, _CONNECT_TIMEOUT, connection)
                    return
            raise TimeoutError
        except BaseException:
            for each in ours:
                each.close()
            raise

    def recent_calls(self, positions: Sequence[int]) -> tuple[list[bytes], list[int]]:
        """Return the recent calls after positions, and the next positions."""
        return self._shared.recent_calls.read(positions)

    def events(self) -> list[Event]:
        """Return the last events of all processes, newest first."""
        return self._journal.read()

    async def _ask(self, slot: int, question: Question, max_seconds: float) -> str | None:
        """Return the reply of a worker; None if there was none in time."""
        with suppress(TimeoutError):
            return await self._control.ask(slot, question, max_seconds)
        return None

    def _living_slots(self) -> Iterator[int]:
        for slot, pid in enumerate(self._shared.worker_pids):
            with suppress(ProcessLookupError, PermissionError):
                if pid[0]:
                    os.kill(pid[0], 0)
                    yield slot


async def _close_nothing() -> None:
    """Do nothing: nothing has to be closed."""
