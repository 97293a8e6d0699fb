"""What the log and an operator are told of settings that take the place of others."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence

from gateway.app.reload.diff import settings_needing_restart
from gateway.app.reload.resources import warn
from gateway.app.reload.revision import Revision
from gateway.settings.schema import Settings

_log = logging.getLogger("tensorgate")


class ReloadLog:
    """Keeps which settings are in use, and logs what becomes of newer ones."""

    def __init__(self, revision: Revision) -> None:
        self.revision = revision

    def reloaded(self) -> None:
        """Note that what was read is in use."""
        self.revision = self.revision.reloaded(time.time())

    def log_reloaded(self, changes: str, read: Settings, before: Settings) -> None:
        """Log what has changed, what is unwise, and what has to wait."""
        _log.info("settings reloaded from %s: %s", self.revision.file, changes)
        warn(read, before)
        for name in settings_needing_restart(read, before):
            old, new = getattr(before, name), getattr(read, name)
            _log.warning("%s: %s takes effect at the next start; until then, %s", name, new, old)

    def failed(self, why: str, wished: bool) -> None:
        """Note and log why what was read is not in use.

        A fault that is met again is logged only where that was ``wished``: who asks wants to know.
        """
        is_new = why != self.revision.last_failure
        self.revision = self.revision.failed(why, time.time())
        if is_new or wished:
            _log.error("settings not reloaded: %s; going on with those from before", why)


def log_addresses(addresses: Sequence[str], before: Iterable[str] = ()) -> None:
    """Log where clients reach the gateway, and where they do not any more."""
    before = tuple(before)
    for address in addresses:
        if address not in before:
            _log.info("listening on %s", address)
    for address in before:
        if address not in addresses:
            _log.info("no longer listening on %s", address)
