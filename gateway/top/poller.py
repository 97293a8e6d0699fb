"""Reads what the screen shows: a slow gateway does not stop the keys."""

from __future__ import annotations

import asyncio
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
_LIMITS = {OVERVIEW: 100, CALLS: 300}
"""The events and the calls that are read: the newest."""
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
        limit = _LIMITS.get(self.panel, self.limit)
        query = {"limit": str(limit), "offset": str(self.offset or ""), "search": self.search}
        return {name: value for name, value in query.items() if value}


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
        self._wanted = Wanted()
        self._others_wanted = asyncio.Event()
        self.snapshot = Snapshot()
        """What was read last."""

    def want(self, wanted: Wanted) -> None:
        """Set what is to be read."""
        if wanted != self._wanted:
            self._wanted = wanted
            self._others_wanted.set()

    async def run(self) -> None:
        """Read until cancelled."""
        due = time.monotonic()
        while True:
            everything = time.monotonic() >= due
            if everything:
                due = time.monotonic() + self._interval
            self._others_wanted.clear()
            await self.read(self._wanted, everything=everything)
            self._on_change()
            if self.snapshot.failure:
                due = min(due, time.monotonic() + RETRY_SECONDS)
            try:
                async with asyncio.timeout(max(0.0, due - time.monotonic())):
                    await self._others_wanted.wait()
            except TimeoutError:
                pass

    async def read(self, wanted: Wanted, *, everything: bool = True) -> None:
        """Read what is wanted; ``everything`` is with the overview."""
        old = self.snapshot
        try:
            overview = old.overview
            if everything or overview is None:
                overview = await self._client.get("overview")
            known = old.panels.get(wanted.panel)
            is_paused = wanted.panel == CALLS and not wanted.follows
            panels = old.panels
            if known is None or known.wanted != wanted or not is_paused:
                panels = {**panels, wanted.panel: Reading(await self._read(wanted), wanted)}
        except AdminError as error:
            since = old.failing_since if old.failure else time.time()
            self.snapshot = replace(old, failure=str(error), failing_since=since)
            return
        now = time.time()
        new = replace(old, overview=overview, panels=panels, read_at=now, failure="")
        if notice := _difference(old.overview, overview, now):
            new = replace(new, notice=notice, notice_until=now + _NOTICE_SECONDS)
        self.snapshot = new

    async def _read(self, wanted: Wanted) -> Document:
        try:
            return await self._client.get(_TOPICS[wanted.panel], wanted.query())
        except AdminError:
            if wanted.panel != OVERVIEW:
                raise
            return {}  # an older gateway has no journal


def _difference(old: Document | None, new: Document, now: float) -> str:
    """Return that another gateway answers than before; empty if it is the same."""
    if old is None:
        return ""
    versions = text(old, "version"), text(new, "version")
    if versions[0] != versions[1]:
        return f"version {versions[1]} of the gateway has replaced version {versions[0]}"
    if number(old, "started_at") != number(new, "started_at"):
        at = formatting.clock(number(new, "started_at"), now)
        return f"this is another gateway process than before: it started at {at}"
    return ""
