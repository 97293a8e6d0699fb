"""Shares endpoint ejections, and what health checks find, between workers in shared memory.

Each worker publishes a list of its own, with the last that it has said of each endpoint. What was
said last of an endpoint, by whichever worker, is what holds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import orjson

from gateway.app.process import BackgroundTask
from gateway.routing.endpoint_health import EjectionState
from gateway.upstream.pool.pool import Pool
from gateway.workers.shared_records import SharedDocuments

POLL_INTERVAL = 0.5
"""Seconds between two looks at the ejections of other workers."""

_RETENTION = 60.0
"""Seconds after the end of an ejection in which a worker that starts puts the endpoint on trial."""
MAX_SAID = 1000
"""Endpoints of which a worker shares what it has said last: the newest ones."""

_log = logging.getLogger("tensorgate")


class Said(NamedTuple):
    """What a worker has said of an endpoint; times are in seconds by ``time.monotonic``."""

    at: float
    ejections: int
    """Ejections in a row; 0 for an endpoint that is in use again."""
    until: float
    """When the last ejection ends."""


class EjectionSync(BackgroundTask):
    """Publishes a worker's ejections and unreachable upstreams, and applies those of others.

    It applies them while its context is open. Ejections are shared per upstream: another upstream
    may eject the same endpoint for other reasons. ``documents`` has the list of each worker, and
    ``slot`` is the number of this one. ``pools`` returns the pools by upstream; it is called each
    time, as a reload replaces them.
    """

    def __init__(
        self, documents: SharedDocuments, slot: int, pools: Callable[[], Mapping[str, Pool]]
    ) -> None:
        self.slot = slot
        self._documents = documents
        self._pools = pools
        # What the worker that this one replaces has said still holds.
        self._own = _decode(documents.read(slot))

    def read(self) -> dict[str, Said]:
        """Return what was said last of each endpoint, by its name."""
        last: dict[str, Said] = {}
        for document in self._documents.read_all():
            for name, said in _decode(document).items():
                last[name] = max(said, last.get(name, said))
        return last

    def _say(self, name: str, ejections: int, until: float, now: float) -> Said | None:
        """Publish what this worker has found; return what was said before."""
        before = self.read().get(name)
        self._own.pop(name, None)
        self._own[name] = Said(now, ejections, until)
        if len(self._own) > MAX_SAID:
            del self._own[next(iter(self._own))]
        self._documents.publish(self.slot, orjson.dumps(self._own, default=tuple))
        return before

    def publish(self, upstream: str, url: str, state: EjectionState) -> bool:
        """Publish an ejection or a recovery; tell whether another worker has just said so."""
        now = time.monotonic()
        known = self._say(_name(upstream, url), state.ejections, state.until, now)
        if known is None or not state.ejections:
            return known is not None and not known.ejections
        return known.ejections >= state.ejections and known.until > now

    def publish_health(self, upstream: str, url: str, healthy: bool, seconds: float) -> bool:
        """Publish what a health check has found; tell whether another worker has just said so.

        Other workers find the same within so many ``seconds``.
        """
        now = time.monotonic()
        name = f"health of {_name(upstream, url)}"
        known = self._say(name, int(not healthy), now + seconds, now)
        return (
            known is not None and bool(known.ejections) is not healthy and known.at + seconds > now
        )

    async def run(self) -> None:
        """Look and apply until cancelled."""
        is_first_look = True
        while True:
            try:
                said = self.read()
                for upstream, pool in self._pools().items():
                    _apply(said, upstream, pool, is_first_look)
            except Exception:
                # An error of our own is logged, and must not end the task.
                _log.exception("the ejections of other workers could not be applied")
            is_first_look = False
            await asyncio.sleep(POLL_INTERVAL)


def _apply(said: Mapping[str, Said], upstream: str, pool: Pool, is_first_look: bool) -> None:
    """Apply what another worker has said last.

    After the time of an ejection the endpoint is on trial until a call succeeds. A worker that
    starts meanwhile puts it on trial, too: else it would find and tell the same ejection anew.
    """
    now = time.monotonic()
    unreachable = said.get(_name(upstream, ""))
    if unreachable is not None and unreachable.ejections:
        pool.outlier_detector.record_remote_unreachable(unreachable.until)
    for member in pool.members:
        last = said.get(_name(upstream, member.endpoint.url))
        if last is not None:
            until = last.until
            if is_first_look and last.ejections and until > now - _RETENTION:
                until = max(until, now + POLL_INTERVAL)
            state = EjectionState(ejections=last.ejections, until=until)
            pool.outlier_detector.record_remote(member, state)


def _decode(document: bytes) -> dict[str, Said]:
    return {name: Said(*said) for name, said in orjson.loads(document or b"{}").items()}


def _name(upstream: str, url: str) -> str:
    """Return the shared name of an endpoint; without a URL, that of the upstream itself."""
    return f"{upstream} {url}"
