"""The journal: what happened to the gateway and its endpoints, with who caused it and why.

Each process appends its events to a ring of its own in shared memory, and any process reads all of
them as one list. Several workers may find out the same, as that an endpoint is unhealthy: that is
one event.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import orjson

from gateway import __version__
from gateway.errors import replace_surrogates, shorten
from gateway.workers.shared_rings import SharedRing

MAX_EVENTS = 1000
"""Events that are kept: the last ones of all processes."""
_RING_SIZE = 512 * 1024
"""Bytes of a process's ring. Memory is used as events are written."""
_MAX_TEXT = 300
"""Characters of a text."""

Event = dict[str, Any]
"""The time, the level, the kind and the words of an event, its subject, who caused it, and why."""


class EventKind(NamedTuple):
    """A kind of events: its words for operators, and how bad it is.

    ``ends`` is the kind of events whose end it is.
    """

    name: str
    level: str
    words: str
    ends: EventKind | None = None


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
EJECTION_ENDED: Final = EventKind("ejection_ended", "info", "ejection ended", ENDPOINT_EJECTED)
ENDPOINT_UNHEALTHY: Final = EventKind("endpoint_unhealthy", "error", "endpoint unhealthy")
ENDPOINT_HEALTHY: Final = EventKind(
    "endpoint_healthy", "info", "endpoint healthy again", ENDPOINT_UNHEALTHY
)
UPSTREAM_UNREACHABLE: Final = EventKind(
    "upstream_unreachable", "error", "no endpoint can be reached"
)
UPSTREAM_REACHABLE: Final = EventKind(
    "upstream_reachable", "info", "endpoints can be reached again", UPSTREAM_UNREACHABLE
)

_TRANSITIONS = {
    kind.name: kind.ends.name if kind.ends else kind.name
    for pair in (EJECTION_ENDED, ENDPOINT_HEALTHY, UPSTREAM_REACHABLE)
    for kind in (pair, pair.ends)
    if kind is not None
}
"""The kinds that several workers find out, by the kind whose begin or end they are."""


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
        records = (orjson.loads(each) for ring in self._rings for each in ring.read().records)
        return merge_events(records)[-MAX_EVENTS:][::-1]


class SharedJournal:
    """The rings of all processes, by their number; it is made before the first fork."""

    def __init__(self, processes: int) -> None:
        self._rings = [SharedRing(_RING_SIZE) for _ in range(processes)]

    def of_process(self, number: int) -> Journal:
        """Return the journal for a process to record in."""
        return Journal(self._rings[number], self._rings)


@dataclass(slots=True)
class _Known:
    """The last transition of an endpoint or an upstream, and the processes that have found it."""

    kind: str
    found_by: set[int] = field(default_factory=set)


def merge_events(records: Iterable[Event]) -> list[Event]:
    """Return the events in the order of their times; what several workers found is one event.

    A worker that finds what another one has found before does not make it happen again. One that
    finds it for the second time has missed the end in between, so that it has happened again.
    """
    known: dict[tuple[str, str, str], _Known] = {}
    events = []
    for event in sorted(records, key=lambda each: float(each["time"])):
        kind, process = event["kind"], event["process"]
        if kind == WORKER_ENDED.name:
            _forget(known, process)
        elif kind in _TRANSITIONS:
            key = _TRANSITIONS[kind], event["upstream"], event["endpoint"]
            last = known.get(key)
            if last is not None and last.kind == kind and process not in last.found_by:
                last.found_by.add(process)
                continue
            known[key] = _Known(kind, {process})
        events.append(event)
    return events


def _forget(known: dict[tuple[str, str, str], _Known], process: int) -> None:
    """Forget what only a process knew that has ended; its successor finds out anew."""
    for key, each in list(known.items()):
        each.found_by.discard(process)
        if not each.found_by:
            del known[key]
