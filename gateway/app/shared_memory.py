"""What all workers of a gateway share in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple, Self

import orjson

from gateway.app.journal.journal import Journal, SharedJournal
from gateway.observe.call_metrics import CALL_FAMILIES
from gateway.observe.gateway_metrics import GATEWAY_FAMILIES
from gateway.observe.metric_store import MetricStore, clean_label
from gateway.observe.recent_calls import RecentCalls
from gateway.workers.control import ControlSockets
from gateway.workers.shared_documents import SharedDocuments
from gateway.workers.shared_rings import SharedRing
from gateway.workers.shared_state import SharedEjections, shared_counters

_ORDINARY_CALLS, _NOTABLE_CALLS = 512 * 1024, 1024 * 1024
"""Bytes of the rings of a worker. Memory is used as calls are written."""


_MAX_DRAINED = 256 * 1024
"""Bytes of the list of drained endpoints."""
_WAITING, _MAX_WAITING = 100, 512 * 1024
"""Endpoints and models of a worker whose waiting calls are shared, and bytes of their list."""
_STALE = 5.0
"""Seconds after which the list of a worker, which it writes each second, says nothing of now."""


class SharedCalls:
    """The recent calls of each worker, as JSON, in two rings: see RecentCalls."""

    def __init__(self, workers: int) -> None:
        self._ordinary = [SharedRing(_ORDINARY_CALLS) for _ in range(workers)]
        self._notable = [SharedRing(_NOTABLE_CALLS) for _ in range(workers)]

    def writer(self, slot: int) -> RecentCalls:
        """Return the observer of a worker's calls."""
        return RecentCalls(slot, self._ordinary[slot].append, self._notable[slot].append)

    def read(self, positions: Sequence[int] = ()) -> tuple[list[bytes], list[int]]:
        """Return the calls after positions, and the next positions; without any, all calls."""
        rings = (*self._ordinary, *self._notable)
        if len(positions) != len(rings):
            positions = [0] * len(rings)
        batches = [ring.read(at) for ring, at in zip(rings, positions, strict=True)]
        calls = [record for batch in batches for record in batch.records]
        return calls, [batch.position for batch in batches]


class DrainedEndpoints:
    """The endpoints that operators have drained: their upstreams and URLs."""

    def __init__(self) -> None:
        self._documents = SharedDocuments(1, _MAX_DRAINED)

    @property
    def version(self) -> int:
        """Return a number that changes with each change."""
        return self._documents.published(0)

    def read(self) -> set[tuple[str, str]]:
        """Return all drained endpoints."""
        (document,) = self._documents.read_all()
        return {(upstream, url) for upstream, url in orjson.loads(document or b"[]")}

    def change(self, upstream: str, url: str, drained: bool) -> None:
        """Drain an endpoint, or restore it; one process does so at a time. Raises ValueError."""
        found = self.read() - {(upstream, url)}
        if drained:
            found.add((upstream, url))
        if not self._documents.publish(0, orjson.dumps(sorted(found))):
            raise ValueError("too many endpoints are drained")


Waiting = Mapping[tuple[str, str, str], float]
"""When the oldest call that waits was sent, by upstream, URL and model, as labels."""


class WaitingCalls:
    """Calls that wait for the first byte of a response, as each worker finds them."""

    def __init__(self, workers: int) -> None:
        self._documents = SharedDocuments(workers, _MAX_WAITING)

    def publish(self, slot: int, now: float, waiting: Waiting) -> None:
        """Publish those of a worker; times are on the clock of ``time.monotonic``."""
        oldest = sorted(waiting.items(), key=itemgetter(1))[:_WAITING]
        rows = [[*map(clean_label, key), sent_at] for key, sent_at in oldest]
        self._documents.publish(slot, orjson.dumps([now, rows]))

    def read(self, now: float) -> dict[tuple[str, str, str], float]:
        """Return those of all workers that run, as ``Waiting``."""
        found: dict[tuple[str, str, str], float] = {}
        for document in self._documents.read_all():
            at, rows = orjson.loads(document or b"[0, []]")
            if at > now - _STALE:
                for upstream, url, model, sent_at in rows:
                    key = upstream, url, model
                    found[key] = min(sent_at, found.get(key, sent_at))
        return found


class SharedMemory(NamedTuple):
    """It is made before the first fork, and outlives workers and reloads."""

    ejections: SharedEjections
    metric_store: MetricStore
    """A segment for each worker, and one for the supervisor."""
    statuses: SharedDocuments
    """The status of each worker, as JSON."""
    worker_pids: list[memoryview]
    """The process id of each worker, one number; 0 before the first one."""
    heartbeats: list[memoryview]
    """When the event loop of each worker last ran, in ms on the clock of ``time.monotonic``."""
    calls_in_progress: list[memoryview]
    """Of each worker, one number."""
    recent_calls: SharedCalls
    """The last calls of each worker."""
    drained: DrainedEndpoints
    waiting: WaitingCalls
    """The calls of each worker to which no endpoint responds."""
    journal: SharedJournal
    """The events of each worker, of the supervisor, and of the admin process."""
    control: ControlSockets | None
    """For questions of the admin process to each worker; None if there is but one process."""

    @classmethod
    def for_one_process(cls) -> Self:
        """Make the memory of a process that is alone."""
        return cls._made_for(1, None)

    @classmethod
    def for_workers(cls, workers: int) -> Self:
        """Make the memory for so many workers."""
        return cls._made_for(workers, ControlSockets(workers))

    @classmethod
    def _made_for(cls, workers: int, control: ControlSockets | None) -> Self:
        families = CALL_FAMILIES + GATEWAY_FAMILIES
        store = MetricStore(families, workers + 1)
        return cls(
            SharedEjections(),
            store,
            SharedDocuments(workers),
            shared_counters(workers),
            shared_counters(workers),
            shared_counters(workers),
            SharedCalls(workers),
            DrainedEndpoints(),
            WaitingCalls(workers),
            SharedJournal(workers + 2),
            control,
        )

    @property
    def supervisor_segment(self) -> int:
        """Return the number of the supervisor's segment in the metric store."""
        return self.metric_store.segments - 1

    @property
    def supervisor_journal(self) -> Journal:
        """Return the journal for the supervisor to record in."""
        return self.journal.of_process(len(self.worker_pids))

    @property
    def admin_journal(self) -> Journal:
        """Return the journal for the admin process to record in."""
        return self.journal.of_process(len(self.worker_pids) + 1)
