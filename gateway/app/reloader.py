"""Newer settings for a gateway that is a process by itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from gateway.app.background import BackgroundTask
from gateway.app.build.api_keys import ApiKeysError
from gateway.app.build.listen import ListenError
from gateway.app.build.tls import UpstreamTlsError
from gateway.app.gateway import Gateway
from gateway.app.reload.journal import ReloadLog, log_addresses
from gateway.app.reload.source import SettingsSource, failure_text
from gateway.settings.problems import SettingsError
from gateway.settings.schema import Settings
from gateway.system.files import POLL_INTERVAL

SETTINGS_ERRORS = (SettingsError, ListenError, UpstreamTlsError, ApiKeysError)
"""What settings that cannot be used raise."""
INTERNAL_ERROR = "the gateway failed; its log says why"

_log = logging.getLogger("tensorgate")

OnApplied = Callable[[Settings], None]
"""What is called with settings when they are in use."""


class Reloader(BackgroundTask):
    """Has a gateway go on with newer settings, while its context is open.

    That is when the files have changed, unless the settings say ``watch: false``, and whenever it
    is wished. One reload comes after the other; what is wished during one leads to one more.
    """

    def __init__(self, gateway: Gateway, source: SettingsSource, in_use: OnApplied) -> None:
        self._gateway = gateway
        self._source = source
        self._in_use = in_use
        self._journal = ReloadLog(gateway.revision)
        self._wished = asyncio.Event()

    def request_reload(self) -> None:
        """Have the settings read again, whether the files have changed or not."""
        self._wished.set()

    async def run(self) -> None:
        """Look for newer settings, and take them up."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_INTERVAL):
                    await self._wished.wait()
            wished = self._wished.is_set()
            self._wished.clear()
            if wished or self._changed():
                await self._reload(wished)
                self._gateway.revision = self._journal.revision

    def _changed(self) -> bool:
        failed = self._gateway.revision.last_failure is not None
        return self._gateway.settings.watch and self._source.changed(failed)

    async def _reload(self, wished: bool) -> None:
        gateway = self._gateway
        before, addresses = gateway.settings, gateway.addresses
        try:
            settings = await asyncio.to_thread(self._source.read)
            changes = await gateway.reload(settings)
        except SETTINGS_ERRORS as error:
            self._journal.failed(failure_text(error, self._source.file), wished)
        except Exception:
            # A fault of our own: never a silent one, and never one that ends all reloads.
            _log.exception("a reload failed")
            self._journal.failed(f"{self._source.file}: {INTERNAL_ERROR}", wished)
        else:
            self._in_use(gateway.settings)
            self._journal.reloaded()
            self._journal.log_reloaded(changes, settings, before)
            log_addresses(gateway.addresses, addresses)
