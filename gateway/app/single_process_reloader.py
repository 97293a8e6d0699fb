"""Reloads the settings of a single-process gateway."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress

from gateway.app.background import BackgroundTask
from gateway.app.gateway import Gateway
from gateway.app.reload.failure import failure_text
from gateway.app.reload.revision import ReloadLog, log_addresses
from gateway.app.reload.source import SettingsSource
from gateway.settings.schema import Settings
from gateway.system.file_watcher import POLL_INTERVAL

_log = logging.getLogger("tensorgate")

OnApplied = Callable[[Settings], None]
"""Called with settings once they are in use."""


def notify_applied(on_applied: OnApplied, settings: Settings) -> None:
    """Call it; its errors are logged, as the settings are in use in any case."""
    try:
        on_applied(settings)
    except Exception:
        _log.exception("the new settings are in use, but not all has taken note of them")


class SingleProcessReloader(BackgroundTask):
    """Reloads a gateway when its files change, and on request, while its context is open.

    With ``watch: false`` in the settings, only on request. Requests during a reload lead to one
    more.
    """

    def __init__(self, gateway: Gateway, source: SettingsSource, on_applied: OnApplied) -> None:
        self._gateway = gateway
        self._source = source
        self._on_applied = on_applied
        self._reload_log = ReloadLog(gateway.revision, gateway.reload_metrics, gateway.journal)
        self._requested = asyncio.Event()

    def request_reload(self) -> None:
        """Read the settings again, whether the files have changed or not."""
        self._requested.set()

    async def run(self) -> None:
        """Look for changes, and reload."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_INTERVAL):
                    await self._requested.wait()
            requested = self._requested.is_set()
            self._requested.clear()
            if requested or self._changed():
                await self._reload(requested)
                self._gateway.revision = self._reload_log.revision

    def _changed(self) -> bool:
        failed = self._gateway.revision.last_failure is not None
        return self._gateway.settings.watch and self._source.changed(failed)

    async def _reload(self, requested: bool) -> None:
        gateway = self._gateway
        before, addresses = gateway.settings, gateway.addresses
        gateway.reopen_logs()
        try:
            settings = await asyncio.to_thread(self._source.read)
            changes = await gateway.reload(settings)
        except Exception as error:  # whatever it is, it must not end the task
            self._reload_log.record_failure(failure_text(error, self._source.file), requested)
            return
        self._reload_log.record_reload(self._reload_log.revision.after_reload(time.time()))
        notify_applied(self._on_applied, gateway.settings)
        self._reload_log.log_reload(changes, settings, before, requested)
        self._source.log_warnings(before)
        log_addresses(gateway.addresses, addresses)
