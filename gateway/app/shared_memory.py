"""What all workers of a gateway share in memory."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import orjson

from gateway.app.journal import RING_SIZE, Journal
from gateway.errors import replace_surrogates
from gateway.observe import families
from gateway.observe.metric_store import MetricStore, clean_label
from gateway.observe.recent_calls import RecentCalls
from gateway.workers.control import ControlSockets
from gateway.workers.shared_records import (
    MAX_DOCUMENT,
    SharedDocuments,
    SharedRing,
    shared_counters,
)

_ORDINARY_CALLS, _NOTABLE_CALLS = 512 * 1024, 1024 * 1024
"""Bytes of the rings of a worker. Memory is used as calls are written."""


_MAX_DRAINED = 256 * 1024
"""Bytes of the list of drained endpoints."""
_MAX_EJECTIONS = 1024 * 1024
"""Bytes of the list of a worker's ejections."""
_MAX_STATUSES = 32 * 2**20
"""Bytes of the statuses of all workers."""
_MAX_SETTINGS = 16 * 2**20
"""Bytes of settings."""
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

    def read(self) -> set[tuple[str, str]]:
        """Return all drained endpoints."""
        document = self._documents.read() or b"[]"
        return {(upstream, url) for upstream, url in orjson.loads(document)}

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


class Revision(NamedTuple):
    """The settings in use; times are in seconds since the epoch."""

    loaded_at: float
    file: str | None = None
    number: int = 1
    """Counts the settings that were in use, these included."""
    last_failure: str | None = None
    """Why newer settings could not be used; None if these are the newest."""
    failed_at: float | None = None
    reloads: int = 0
    reload_failures: int = 0
    """Reloads that failed since the start."""


class SharedMemory:
    """It is made before the first fork, and outlives workers and reloads.

    ``control`` is for questions of the admin process to each worker; it is None for a process that
    is alone.
    """

    def __init__(self, workers: int = 1, control: ControlSockets | None = None) -> None:
        self.control = control
        self.ejections = SharedDocuments(workers, _MAX_EJECTIONS)
        self.metric_store = MetricStore(families.FAMILIES, workers + 1)
        """A segment for each worker, and one for who reads the settings."""
        self.statuses = SharedDocuments(workers, max(MAX_DOCUMENT, _MAX_STATUSES // workers))
        """The status of each worker, as JSON."""
        self.worker_pids = shared_counters(workers)
        """The process id of each worker, one number; 0 before the first one."""
        self.heartbeats = shared_counters(workers)
        """When the event loop of each worker last ran, in ms by ``time.monotonic``."""
        self.calls_in_progress = shared_counters(workers)
        """Of each worker, one number."""
        self.recent_calls = SharedCalls(workers)
        """The last calls of each worker."""
        self.drained = DrainedEndpoints()
        self.waiting = WaitingCalls(workers)
        """The calls of each worker to which no endpoint responds."""
        self.new_settings = SharedDocuments(1, _MAX_SETTINGS)
        """Those that processes prepare, pickled."""
        self._revision = SharedDocuments(1)
        self._rings = [SharedRing(RING_SIZE) for _ in range(workers + 2)]
        self.admin_journal = self.journal(workers + 1)
        """The journal for the admin process to record in."""
        self.owner_journal = self.journal(workers)
        """The journal for who reads the settings."""
        self.set_revision(Revision(time.time()))

    @classmethod
    def for_workers(cls, workers: int) -> SharedMemory:
        """Make the memory for so many workers and an admin process."""
        return cls(workers, ControlSockets(workers))

    def journal(self, slot: int) -> Journal:
        """Return the journal for a worker to record in."""
        return Journal(self._rings[slot], self._rings)

    def set_revision(self, revision: Revision) -> None:
        """Tell all processes which settings are in use."""
        fields = revision._asdict()
        for name in ("file", "last_failure"):  # the name of a file need not be UTF-8
            fields[name] = fields[name] and replace_surrogates(fields[name])
        self._revision.publish(0, orjson.dumps(fields))

    def revision(self) -> dict[str, Any]:
        """Return which settings are in use, for the status: the fields of a Revision."""
        fields: dict[str, Any] = orjson.loads(self._revision.read())
        return fields
