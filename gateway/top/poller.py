"""Reads what the screen shows, in a thread: a slow gateway does not stop the keys."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from gateway.top import formatting
from gateway.top.client import AdminClient, AdminError
from gateway.top.document import Document, number, text
from gateway.top.view import CALLS, ENDPOINTS, MODELS, OVERVIEW

_NOTICE_SECONDS = 15.0
RETRY_SECONDS = 5.0
"""If the gateway cannot be read, it is asked again after this time at most."""
_CALLS = 300
"""Calls that are read: the newest."""
_EVENTS = 100
"""Events of the journal that are read: the newest."""
_TOPICS = {OVERVIEW: "journal", ENDPOINTS: "topology", MODELS: "models", CALLS: "calls"}


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be read: a panel, and which part of its rows."""

    panel: str = OVERVIEW
    search: str = ""
    offset: int = 0
    limit: int = 200
    follows: bool = True

    def query(self) -> dict[str, str]:
        """Return the query of the panel's document."""
        limit = {OVERVIEW: _EVENTS, CALLS: _CALLS}.get(self.panel, self.limit)
        query = {"limit": str(limit)}
        if self.offset:
            query["offset"] = str(self.offset)
        if self.search:
            query["search"] = self.search
        return query


@dataclass(frozen=True, slots=True)
class Reading:
    """A document, and what was wanted."""

    document: Document
    wanted: Wanted


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is known of the gateway."""

    overview: Document | None = None
    panels: Mapping[str, Reading] = field(default_factory=dict)
    read_at: float = 0.0
    """The Unix time of the overview."""
    failure: str = ""
    """Why the last reading failed; empty if it did not."""
    failing_since: float = 0.0
    notice: str = ""
    """That another gateway answers than before."""
    notice_until: float = 0.0


class Poller:
    """Reads the overview and a panel in each interval; another panel at once."""

    def __init__(
        self, client: AdminClient, interval: float, on_change: Callable[[], None] = lambda: None
    ) -> None:
        self._client = client
        self._interval = interval
        self._on_change = on_change
        self._condition = threading.Condition()
        self._wanted = Wanted()
        self._snapshot = Snapshot()
        self._crash: BaseException | None = None

    def start(self) -> None:
        """Read in a thread, which ends with the process."""
        threading.Thread(target=self._run, name="poller", daemon=True).start()

    @property
    def snapshot(self) -> Snapshot:
        """Return what was read last. Raises what ended the thread."""
        if self._crash is not None:
            raise self._crash
        return self._snapshot

    def want(self, wanted: Wanted) -> None:
        """Set what is to be read."""
        with self._condition:
            if wanted != self._wanted:
                self._wanted = wanted
                self._condition.notify()

    def read(self, wanted: Wanted, *, everything: bool = True) -> None:
        """Read what is wanted; ``everything`` is with the overview."""
        old = self._snapshot
        try:
            overview = old.overview
            if everything or overview is None:
                overview = self._client.get("overview")
            panels = dict(old.panels)
            if topic := _TOPICS.get(wanted.panel):
                known = panels.get(wanted.panel)
                stands_still = known and known.wanted == wanted and not wanted.follows
                if not (wanted.panel == CALLS and stands_still):
                    panels[wanted.panel] = Reading(self._read(topic, wanted), wanted)
        except AdminError as error:
            since = old.failing_since if old.failure else time.time()
            self._snapshot = replace(old, failure=str(error), failing_since=since)
            return
        now = time.time()
        new = Snapshot(overview, panels, now, notice=old.notice, notice_until=old.notice_until)
        if notice := _difference(old.overview, overview, now):
            new = replace(new, notice=notice, notice_until=now + _NOTICE_SECONDS)
        self._snapshot = new

    def _read(self, topic: str, wanted: Wanted) -> Document:
        try:
            return self._client.get(topic, wanted.query())
        except AdminError:
            if wanted.panel != OVERVIEW:
                raise
            return {}  # an older gateway has no journal

    def _run(self) -> None:
        try:
            self._poll()
        except BaseException as error:
            self._crash = error
            self._on_change()

    def _poll(self) -> None:
        due = time.monotonic()
        while True:
            everything = time.monotonic() >= due
            if everything:
                due = time.monotonic() + self._interval
            wanted = self._wanted
            self.read(wanted, everything=everything)
            self._on_change()
            if self._snapshot.failure:
                due = min(due, time.monotonic() + RETRY_SECONDS)
            with self._condition:
                self._condition.wait_for(
                    lambda read=wanted: self._wanted != read,  # type: ignore[misc]
                    max(0.0, due - time.monotonic()),
                )


def _difference(old: Document | None, new: Document | None, now: float) -> str:
    """Return that another gateway answers than before; empty if it is the same."""
    if old is None or new is None:
        return ""
    versions = text(old, "version"), text(new, "version")
    if versions[0] != versions[1]:
        return f"version {versions[1]} of the gateway has replaced version {versions[0]}"
    if number(old, "started_at") != number(new, "started_at"):
        at = formatting.clock(number(new, "started_at"), now)
        return f"this is another gateway process than before: it started at {at}"
    return ""
