"""Records in the journal what calls and health checks of this process find out of endpoints."""

from __future__ import annotations

from gateway.app.journal.journal import (
    EJECTION_ENDED,
    ENDPOINT_EJECTED,
    ENDPOINT_HEALTHY,
    ENDPOINT_UNHEALTHY,
    UPSTREAM_REACHABLE,
    UPSTREAM_UNREACHABLE,
    EventKind,
    Journal,
)
from gateway.routing.endpoint_health import EjectionState
from gateway.upstream.pool.member import Member
from gateway.upstream.pool.pool import Pool

_BY_CALLS, _BY_CHECKS = "outlier detection", "health check"


class EndpointEvents:
    """Records the ejections and the health of an upstream's endpoints.

    An upstream that is not ``required`` is worth a warning, as everywhere else.
    """

    def __init__(self, journal: Journal, upstream: str, required: bool) -> None:
        self._journal = journal
        self._upstream = upstream
        self._required = required

    def record_ejection(self, pool: Pool, url: str, state: EjectionState) -> None:
        """Record an ejection or a recovery; without a URL, that of all endpoints together.

        An ejection that follows another one is no new event.
        """
        if not url:
            why = pool.unreachable or "a connection was made"
            kind = UPSTREAM_UNREACHABLE if state.ejections else UPSTREAM_REACHABLE
            self._record(kind, "calls", why)
        elif not state.ejections:
            self._record(EJECTION_ENDED, _BY_CALLS, "a call or a health check succeeded", url)
        elif state.ejections == 1:
            self._record(ENDPOINT_EJECTED, _BY_CALLS, _reason(pool, url, state), url)

    def record_health(self, member: Member) -> None:
        """Record that health checks of this worker have found an endpoint healthy, or unhealthy."""
        kind = ENDPOINT_HEALTHY if member.is_healthy else ENDPOINT_UNHEALTHY
        self._record(kind, _BY_CHECKS, member.reason, member.endpoint.url)

    def _record(self, kind: EventKind, who: str, why: str, url: str = "") -> None:
        if kind.level == "error" and not self._required:
            kind = kind._replace(level="warning")
        self._journal.record(kind, who=who, why=why, upstream=self._upstream, endpoint=url)


def _reason(pool: Pool, url: str, state: EjectionState) -> str:
    """Return why an endpoint is ejected: it is slow, or calls failed."""
    count = "1 failure" if state.failures == 1 else f"{state.failures} failures in a row"
    for member in pool.members:
        if member.endpoint.url == url:
            if member.ejection_reason:
                return member.ejection_reason
            if member.calls.last_error:
                return f"{count}: {member.calls.last_error}"
    return count
