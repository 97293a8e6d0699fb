"""The journal: what happened to the gateway and its endpoints, with who caused it and why.

Each process appends its events to a ring of its own in shared memory, and any process reads all of
them as one list. What several workers find out, as that an endpoint is unhealthy, is recorded by
the first of them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final, NamedTuple

import orjson

from gateway import __version__
from gateway.errors import replace_surrogates, shorten
from gateway.routing.endpoint_health import EjectionState
from gateway.upstream.pool.member import Member
from gateway.upstream.pool.pool import Pool
from gateway.workers.shared_records import SharedRing

MAX_EVENTS = 1000
"""Events that are kept: the last ones of all processes."""
RING_SIZE = 512 * 1024
"""Bytes of a process's ring. Memory is used as events are written."""
_MAX_TEXT = 300
"""Characters of a text."""

Event = dict[str, Any]
"""The time, the level, the kind and the words of an event, its subject, who caused it, and why."""


class EventKind(NamedTuple):
    """A kind of events: its words for operators, and how bad it is."""

    name: str
    level: str
    words: str


GATEWAY_STARTED: Final = EventKind("gateway_started", "info", "gateway started")
GATEWAY_DRAINING: Final = EventKind("gateway_draining", "warning", "gateway drains and stops")
SETTINGS_RELOADED: Final = EventKind("settings_reloaded", "info", "settings reloaded")
RELOAD_REFUSED: Final = EventKind("reload_refused", "error", "settings not reloaded")
CERTIFICATE_RELOADED: Final = EventKind("certificate_reloaded", "info", "certificate reloaded")
CERTIFICATE_REFUSED: Final = EventKind("certificate_refused", "error", "certificate not reloaded")
WORKER_ENDED: Final = EventKind("worker_ended", "error", "process ended")
WORKER_RESTARTED: Final = EventKind("worker_restarted", "info", "process restarted")
ENDPOINT_DRAINED: Final = EventKind("endpoint_drained", "warning", "endpoint drained")
ENDPOINT_RESTORED: Final = EventKind("endpoint_restored", "info", "endpoint restored")
ENDPOINT_EJECTED: Final = EventKind("endpoint_ejected", "error", "endpoint ejected")
EJECTION_ENDED: Final = EventKind("ejection_ended", "info", "ejection ended")
ENDPOINT_UNHEALTHY: Final = EventKind("endpoint_unhealthy", "error", "endpoint unhealthy")
ENDPOINT_HEALTHY: Final = EventKind("endpoint_healthy", "info", "endpoint healthy again")
UPSTREAM_UNREACHABLE: Final = EventKind(
    "upstream_unreachable", "error", "no endpoint can be reached"
)
UPSTREAM_REACHABLE: Final = EventKind(
    "upstream_reachable", "info", "endpoints can be reached again"
)

_BY_CALLS, _BY_CHECKS = "outlier detection", "health check"


class Journal:
    """Records the events of this process, and reads those of all."""

    def __init__(self, own: SharedRing, rings: Sequence[SharedRing]) -> None:
        self._own = own
        self._rings = rings

    def record(
        self,
        kind: EventKind,
        *,
        who: str,
        why: str = "",
        subject: str = "",
        upstream: str = "",
        endpoint: str = "",
        process: int | None = None,
    ) -> None:
        """Record that something happened now; ``subject`` is what it happened to.

        ``process`` is the process that it is about, or else this one.
        """
        texts = {
            "subject": subject or (f"{endpoint} of {upstream}" if endpoint else upstream),
            "who": who,
            "why": why,
            "upstream": upstream,
            "endpoint": endpoint,
        }
        shown = {name: shorten(replace_surrogates(each), _MAX_TEXT) for name, each in texts.items()}
        now = time.time_ns()
        event: Event = {
            "id": f"{now:x}-{os.getpid()}",
            "time": round(now / 1e9, 3),
            "level": kind.level,
            "kind": kind.name,
            "event": kind.words,
            "process": process or os.getpid(),
        }
        self._own.append(orjson.dumps(event | shown))

    def record_start(self, workers: int) -> None:
        """Record that the gateway serves calls from now on."""
        why = (
            f"version {__version__}, {workers} workers" if workers > 1 else f"version {__version__}"
        )
        self.record(GATEWAY_STARTED, who="", why=why)

    def record_drain(self, seconds: float) -> None:
        """Record that the gateway stops, and the seconds that calls in progress have."""
        why = f"calls in progress have at most {seconds:g} s"
        self.record(GATEWAY_DRAINING, who="SIGTERM or SIGINT", why=why)

    def record_action(self, operator: str, upstream: str, endpoint: str, drained: bool) -> None:
        """Record that an operator has drained an endpoint, or restored it."""
        kind = ENDPOINT_DRAINED if drained else ENDPOINT_RESTORED
        why = "asked at the admin address"
        self.record(kind, who=operator, why=why, upstream=upstream, endpoint=endpoint)

    def read(self) -> list[Event]:
        """Return the last events of all processes, newest first; in any thread."""
        events = [orjson.loads(each) for ring in self._rings for each in ring.read().records]
        return sorted(events, key=itemgetter("time"))[-MAX_EVENTS:][::-1]


@dataclass(frozen=True, slots=True)
class EndpointEvents:
    """Records the ejections and the health of an upstream's endpoints.

    An upstream that is not ``required`` is worth a warning, as everywhere else.
    """

    journal: Journal
    upstream: str
    required: bool

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
        if kind.level == "error" and not self.required:
            kind = kind._replace(level="warning")
        self.journal.record(kind, who=who, why=why, upstream=self.upstream, endpoint=url)


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
