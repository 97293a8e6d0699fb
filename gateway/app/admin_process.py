"""The admin process: it serves the admin address of a gateway with several workers.

It has no part in calls.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import AsyncExitStack
from functools import partial
from typing import Self

from gateway.admin.application import AdminSite
from gateway.app.admin_source import DRAIN_GRACE, AdminSource
from gateway.app.loaded_resources import LoadedResources, load_resources
from gateway.app.reload.prepared import CloseReplaced, PreparedReload
from gateway.app.reload.revision import Revision
from gateway.app.shared_memory import SharedMemory
from gateway.settings.schema import Settings
from gateway.workers.control import ControlClient


class AdminProcess:
    """Serves operators while its context is open."""

    def __init__(
        self, resources: LoadedResources, shared: SharedMemory, revision: Revision
    ) -> None:
        assert shared.control is not None
        self._control = ControlClient(shared.control)
        self.source = AdminSource(resources, shared, shared.admin_journal, self._control.ask)
        """What operators see."""
        self._site = AdminSite(self.source)
        self._key_watch: asyncio.Task[None] | None = None
        self.revision = revision
        """Which settings are in use; the reloader keeps it up to date."""

    async def __aenter__(self) -> Self:
        self._control.__enter__()
        await self._site.__aenter__()
        self._watch_keys()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._key_watch is not None:
            self._key_watch.cancel()
        await self._site.close(DRAIN_GRACE)
        self._control.__exit__()

    def _watch_keys(self) -> None:
        """Follow the files of API keys; those of before may belong to other settings."""
        if self._key_watch is not None:
            self._key_watch.cancel()
        watch = self.source.resources.api_keys.watch(lambda: None)
        self._key_watch = asyncio.create_task(watch)

    def take(self, connection: socket.socket) -> None:
        """Serve a connection that was accepted elsewhere; this owns it from now on."""
        self._site.adopt(connection)

    def begin_draining(self) -> None:
        """Be not ready from now on."""
        self.source.draining = True

    async def prepare(self, settings: Settings) -> PreparedReload:
        """Load what other settings name. Raises UpstreamTlsError, ApiKeysError and ListenError."""
        resources = await asyncio.to_thread(load_resources, settings, self.source.resources)
        return PreparedReload("", partial(self._swap, resources), AsyncExitStack())

    def _swap(self, resources: LoadedResources) -> CloseReplaced:
        self.source.resources = resources
        self._watch_keys()
        return _close_nothing

    def reopen_logs(self) -> None:
        """Do nothing: it has no log."""


async def _close_nothing() -> None:
    """Do nothing: nothing has to be closed."""
