"""Which settings are in use, and why newer ones are not: for the status and the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gateway.app.journal.journal import RELOAD_REFUSED, SETTINGS_RELOADED, EventKind, Journal
from gateway.app.reload.diff import settings_needing_restart
from gateway.observe.gateway_metrics import ReloadMetrics
from gateway.settings.schema import Settings

_log = logging.getLogger("tensorgate")


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

    def after_reload(self, now: float) -> Revision:
        """Return the revision of settings that have replaced these."""
        return self._replace(
            loaded_at=now,
            number=self.number + 1,
            last_failure=None,
            failed_at=None,
            reloads=self.reloads + 1,
        )

    def after_failure(self, reason: str, now: float) -> Revision:
        """Return the revision of these settings after a reload that failed."""
        return self._replace(
            last_failure=reason, failed_at=now, reload_failures=self.reload_failures + 1
        )


class ReloadLog:
    """Keeps the revision up to date, and logs and counts each reload."""

    def __init__(self, revision: Revision, metrics: ReloadMetrics, journal: Journal) -> None:
        self.revision = revision
        self._metrics = metrics
        self._journal = journal

    def record_reload(self, revision: Revision) -> None:
        """Record that the settings of this revision are in use, and count the reload."""
        self.revision = revision
        self._metrics.reloads.add(1.0)

    def log_reload(self, changes: str, read: Settings, before: Settings, requested: bool) -> None:
        """Log and record what has changed and what needs a restart."""
        _log.info("settings reloaded from %s: %s", self.revision.file, changes)
        self._record(SETTINGS_RELOADED, changes, requested)
        for name in settings_needing_restart(read, before):
            old, new = getattr(before, name), getattr(read, name)
            _log.warning("%s: %s takes effect after a restart; until then it is %s", name, new, old)

    def record_failure(self, reason: str, requested: bool) -> None:
        """Record and log why the settings that were read are not in use.

        The same reason is logged again only if an operator requested the reload.
        """
        is_new = reason != self.revision.last_failure
        self.revision = self.revision.after_failure(reason, time.time())
        self._metrics.failures.add(1.0)
        if is_new or requested:
            _log.error("settings not reloaded: %s; keeping the previous settings", reason)
            self._record(RELOAD_REFUSED, reason, requested)

    def _record(self, kind: EventKind, why: str, requested: bool) -> None:
        who = "SIGHUP" if requested else "file watch"
        self._journal.record(kind, who=who, why=why, subject=self.revision.file or "")


def log_addresses(addresses: Sequence[str], before: Iterable[str] = ()) -> None:
    """Log the addresses that the gateway listens on now, and those that it has left."""
    before = tuple(before)
    for address in addresses:
        if address not in before:
            _log.info("listening on %s", address)
    for address in before:
        if address not in addresses:
            _log.info("no longer listening on %s", address)
