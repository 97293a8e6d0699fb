"""What operators see of a gateway: it is read from shared memory, and asked of its workers."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from multidict import CIMultiDictProxy

from gateway.app.captured_calls import send_connection
from gateway.app.journal import Event, Journal
from gateway.app.loaded_resources import LoadedResources
from gateway.app.shared_memory import SharedMemory
from gateway.app.status_publisher import read_statuses
from gateway.observe.metric_store import MetricStore
from gateway.settings.schema import Settings
from gateway.workers.control import Question
from gateway.workers.worker_watch import is_alive

DRAIN_GRACE = 0.1
"""Seconds at the end for operators with an open connection to request a page."""
PUBLISH_TIMEOUT = 0.3
"""Seconds for workers to publish their status; older ones are taken of those that need longer."""
_MAX_SILENCE = 15.0
"""Seconds without a sign of life of any worker, until probes learn that the gateway hangs."""
READY_TIMEOUT = 3.0
"""Seconds for a worker to say whether it is ready, which may take it two."""
CONNECT_TIMEOUT = 2.0
"""Seconds for a worker to take a connection."""
NEXT_WORKER_DELAY = 0.5
"""Seconds until another worker is asked too, as the first one may hang."""


AskWorker = Callable[[int, Question, float, socket.socket | None], Awaitable[str]]
"""Asks the worker in a slot, with seconds for its reply and a connection: see ControlClient.ask."""


@dataclass(eq=False)
class AdminSource:
    """Reads a gateway for its admin address: see GatewaySource."""

    resources: LoadedResources
    """Those in use."""
    shared: SharedMemory
    journal: Journal
    ask: AskWorker
    draining: bool = False
    """The gateway is stopping."""
    turn: int = 0
    """Counts who is asked first whether it is ready."""

    @property
    def settings(self) -> Settings:
        """Return the settings in use."""
        return self.resources.settings

    @property
    def metric_store(self) -> MetricStore:
        """Return the counters and histograms of all workers."""
        return self.shared.metric_store

    @property
    def hangs(self) -> bool:
        """Tell whether there are workers, and no event loop of theirs has run for some time."""
        now = time.monotonic() * 1000
        ages = [now - self.shared.heartbeats[slot][0] for slot in self._living_slots()]
        return bool(ages) and min(ages) > _MAX_SILENCE * 1000

    def requests_in_progress(self) -> int:
        """Return the calls in progress of all workers."""
        return sum(int(self.shared.calls_in_progress[slot][0]) for slot in self._living_slots())

    async def worker_statuses(self) -> list[dict[str, Any]]:
        """Return the statuses of all living workers; when the last has ended, those of before."""
        asked = [
            self._ask(slot, Question.PUBLISH, PUBLISH_TIMEOUT) for slot in self._living_slots()
        ]
        await asyncio.gather(*asked)
        statuses = await asyncio.to_thread(read_statuses, self.shared.statuses)
        return [{**each, "draining": True} for each in statuses] if self.draining else statuses

    async def not_ready_reason(self) -> str:
        """Return why the gateway is not ready, or an empty text: a worker knows."""
        if self.draining:
            return "draining"
        slots = self._living_slots()
        self.turn += 1
        first = self.turn % len(slots) if slots else 0
        asked = [
            asyncio.create_task(self._ask_if_ready(slot, min(at * NEXT_WORKER_DELAY, 2.0)))
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
        return await self._ask(slot, Question.READY, READY_TIMEOUT - delay)

    def authorizes(self, headers: CIMultiDictProxy[str]) -> bool:
        """Tell whether a request has a key that allows actions at the admin address."""
        group = self.resources.api_keys.groups.get(self.settings.admin.keys or "")
        return group is not None and group.authenticates(headers)

    async def drain_endpoint(self, upstream: str, url: str, drained: bool, operator: str) -> None:
        """Drain an endpoint, or restore it. Raises ValueError."""
        self.shared.drained.change(upstream, url, drained)
        self.journal.record_action(operator, upstream, url, drained)

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
                    await self.ask(slot, question, CONNECT_TIMEOUT, connection)
                    return
            raise TimeoutError
        except BaseException:
            for each in ours:
                each.close()
            raise

    def recent_calls(self, positions: Sequence[int]) -> tuple[list[bytes], list[int]]:
        """Return the recent calls after positions, and the next positions."""
        return self.shared.recent_calls.read(positions)

    def events(self) -> list[Event]:
        """Return the last events of all processes, newest first."""
        return self.journal.read()

    async def _ask(self, slot: int, question: Question, max_seconds: float) -> str | None:
        """Return the reply of a worker; None if there was none in time."""
        with suppress(TimeoutError):
            return await self.ask(slot, question, max_seconds, None)
        return None

    def _living_slots(self) -> list[int]:
        return [slot for slot, pid in enumerate(self.shared.worker_pids) if is_alive(pid[0])]
