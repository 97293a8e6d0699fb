"""Shares endpoint ejections, and what health checks find, between workers in shared memory."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from gateway.app.background import BackgroundTask
from gateway.routing.endpoint_health import EjectionState
from gateway.upstream.pool.outlier_detection import EjectionListener
from gateway.upstream.pool.pool import Pool
from gateway.workers.shared_state import RETENTION, SharedEjection, SharedEjections

_POLL_INTERVAL = 0.5
"""Seconds between two looks at the ejections of other workers."""

_log = logging.getLogger("tensorgate")

HealthPublisher = Callable[[str, bool], bool]
"""Called with a URL and whether it is healthy; tells whether another worker has just said so."""


class EjectionSync(BackgroundTask):
    """Publishes a worker's ejections and unreachable upstreams, and applies those of others.

    It applies them while its context is open. Ejections are shared per upstream: another upstream
    may eject the same endpoint for other reasons. Only the first worker logs what all of them find
    out at the start. ``pools`` returns the pools by upstream; it is called each time, as a reload
    replaces them.
    """

    def __init__(
        self,
        shared_ejections: SharedEjections,
        is_first_worker: bool,
        pools: Callable[[], Mapping[str, Pool]],
    ) -> None:
        self.is_first_worker = is_first_worker
        self._shared_ejections = shared_ejections
        self._pools = pools

    def publisher_for(self, upstream: str) -> EjectionListener:
        """Return the listener that publishes the ejections of an upstream's pool."""

        def publish(url: str, state: EjectionState) -> bool:
            name = _name(upstream, url)
            now = time.monotonic()
            known = self._shared_ejections.read(name)
            self._shared_ejections.publish(name, state.ejections, state.until, now)
            return known is not None and _is_same(known, state, now)

        return publish

    def health_publisher_for(self, upstream: str, seconds: float) -> HealthPublisher:
        """Return what publishes the health of an upstream's endpoints, as health checks find it.

        Other workers find the same within so many ``seconds``.
        """

        def publish(url: str, healthy: bool) -> bool:
            name, now = f"health of {_name(upstream, url)}", time.monotonic()
            known = self._shared_ejections.read(name)
            self._shared_ejections.publish(name, int(not healthy), now + seconds, now)
            if known is None or bool(known.ejections) is healthy:
                return False
            return known.until > (now - seconds if healthy else now)

        return publish

    async def run(self) -> None:
        """Look and apply until cancelled."""
        is_first_look = True
        while True:
            try:
                for upstream, pool in self._pools().items():
                    self._apply(upstream, pool, is_first_look)
            except Exception:
                # An error of our own is logged, and must not end the task.
                _log.exception("the ejections of other workers could not be applied")
            is_first_look = False
            await asyncio.sleep(_POLL_INTERVAL)

    def _apply(self, upstream: str, pool: Pool, is_first_look: bool) -> None:
        unreachable = self._read(upstream, "", is_first_look)
        if unreachable is not None and unreachable.ejections:
            pool.outlier_detector.record_remote_unreachable(unreachable.until)
        for member in pool.members:
            state = self._read(upstream, member.endpoint.url, is_first_look)
            if state is not None:
                pool.outlier_detector.record_remote(member, state)

    def _read(self, upstream: str, url: str, is_first_look: bool) -> EjectionState | None:
        """Return what another worker has published last, if that is known.

        After the time of an ejection the endpoint is on trial until a call succeeds. A worker that
        starts meanwhile puts it on trial, too: else it would find and tell the same ejection anew.
        """
        shared = self._shared_ejections.read(_name(upstream, url))
        if shared is None:
            return None
        until, now = shared.until, time.monotonic()
        if is_first_look and shared.ejections and until > now - RETENTION:
            until = max(until, now + _POLL_INTERVAL)
        return EjectionState(ejections=shared.ejections, until=until)


def _is_same(known: SharedEjection, state: EjectionState, now: float) -> bool:
    """Tell whether a state is that which another worker has published, and which lasts."""
    if not state.ejections:
        return not known.ejections
    return known.ejections >= state.ejections and known.until > now


def _name(upstream: str, url: str) -> str:
    """Return the shared name of an endpoint; without a URL, that of the upstream itself."""
    return f"{upstream} {url}"
