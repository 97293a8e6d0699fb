"""A gateway that is one process: it opens its addresses, and serves clients and operators there."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Iterable
from contextlib import AsyncExitStack, suppress
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple, Self

from gateway.app.admin_source import DRAIN_GRACE, AdminSource
from gateway.app.build import listening
from gateway.app.build.listening import BoundAddress
from gateway.app.gateway import Gateway, Parts, logged
from gateway.app.loaded_resources import load_resources
from gateway.app.process import (
    BackgroundTask,
    MallocTrim,
    handle_signals,
    log_started,
    log_stopped,
    log_stopping,
    run,
)
from gateway.app.reload import (
    CloseReplaced,
    PreparedReload,
    ReloadLog,
    SettingsSource,
    describe_changes,
    failure_text,
)
from gateway.app.shared_memory import SharedMemory
from gateway.listener.accept import AcceptingSockets
from gateway.settings.schema import Settings
from gateway.system.file_watcher import POLL_INTERVAL
from gateway.system.memory import tune_garbage_collector
from gateway.workers.control import Question

if TYPE_CHECKING:
    from gateway.admin.application import AdminSite


def serve(settings: Settings, source: SettingsSource) -> None:
    """Serve until SIGTERM or Ctrl-C, and finish the calls in progress.

    Raises UnusableSettingsError.
    """
    run(_serve(settings, source))


async def _serve(settings: Settings, source: SettingsSource) -> None:
    stop = asyncio.Event()
    # Until it serves, Ctrl-C is not for it to handle.
    handle_signals(stop.set, signal.SIGTERM)
    async with StandaloneGateway(settings) as gateway:
        async with SingleProcessReloader(gateway, source) as reloader, MallocTrim():
            handle_signals(stop.set, signal.SIGINT)
            handle_signals(reloader.requested.set, signal.SIGHUP)
            log_started(gateway.addresses)
            await gateway.operators_served
            tune_garbage_collector()
            await stop.wait()
        log_stopping(gateway.settings)
    log_stopped(gateway.dropped)


class _Doors(NamedTuple):
    """The addresses of one version of the settings, and what accepts connections there.

    That is ``clients``, and at the address for operators ``admin``, if that is served yet.
    """

    clients: AcceptingSockets
    bound: tuple[BoundAddress, ...]
    admin: AdminSite | None = None

    def sockets(self, each: BoundAddress) -> AcceptingSockets:
        """Return what accepts at an address."""
        return self.clients if self.admin is None or not each.is_admin else self.admin.sockets

    def open(self, opened: Iterable[BoundAddress]) -> None:
        """Accept connections at addresses."""
        for each in opened:
            for sock in each.sockets:
                self.sockets(each).listen(sock)

    def close(self, opened: Iterable[BoundAddress]) -> None:
        """Undo ``open``, also if it has failed half-way."""
        for each in opened:
            self.sockets(each).close_sockets(each.sockets)


class StandaloneGateway(Gateway):
    """A gateway that serves at the addresses of its settings while its context is open.

    Raises UnusableSettingsError, as entering does.
    """

    def __init__(self, settings: Settings) -> None:
        resources, shared = load_resources(settings), SharedMemory()
        super().__init__(resources, shared, 0, lambda: None)  # nobody counts connections
        self.source = AdminSource(resources, shared, self.journal, self._ask_itself)
        """What operators see of it."""

    @property
    def addresses(self) -> list[str]:
        """Return where clients and operators connect: URLs, or unix:/path."""
        return listening.describe(self._doors.bound, self.settings)

    async def __aenter__(self) -> Self:
        settings = self.source.settings
        bound = listening.listen(settings.listen, settings.admin.listen)
        try:
            await super().__aenter__()
        except BaseException:
            listening.close(bound)
            raise
        self._doors = _Doors(self.listener.sockets, bound)
        self._doors.open(each for each in bound if not each.is_admin)
        self.operators_served = asyncio.create_task(self._serve_operators())
        """Ends once operators are served, shortly after clients are."""
        self.journal.record_start(1)
        return self

    async def _serve_operators(self) -> None:
        admin = [each for each in self._doors.bound if each.is_admin]
        if admin:
            # It imports aiohttp. The event loop, which serves clients already, has its turns.
            await asyncio.to_thread(import_module, "gateway.admin.application")
            site = await self._admin_site(self.settings)
            self._doors = self._doors._replace(admin=site)
            self._doors.open(admin)

    async def __aexit__(self, *_: object) -> None:
        self.journal.record_drain(self.settings.limits.drain_timeout)
        await super().__aexit__(None, None, None)
        listening.close(self._doors.bound)

    async def _drain(self) -> None:
        await super()._drain()
        self.operators_served.cancel()
        await asyncio.gather(self.operators_served, return_exceptions=True)
        if self._doors.admin is not None:
            await self._doors.admin.close(DRAIN_GRACE)

    async def reload(self, settings: Settings) -> str:
        """Apply other settings, as ``prepare`` and a commit do; return what has changed."""
        prepared, before = await self.prepare(settings), self.parts.resources
        # Nothing is awaited in between, as ``prepare`` has begun to accept connections.
        await prepared.commit()()
        return describe_changes(self.parts.resources, before)

    async def prepare(self, settings: Settings) -> PreparedReload:
        """Do so for the addresses too, at which it has accepted no connection yet."""
        await self.operators_served
        before = self._doors
        async with AsyncExitStack() as undo:
            parts = await super().prepare(settings)
            undo.push_async_callback(parts.abort)
            # An address that clients and operators swap needs sockets of its own for either.
            bound = listening.listen(
                settings.listen, settings.admin.listen, before.bound, rebinds=True
            )
            opened = listening.difference(bound, before.bound)
            undo.callback(listening.close, opened)
            admin = await self._admin_site(settings)
            undo.push_async_callback(_close_admin, admin, before.admin)
            doors = before._replace(bound=bound, admin=admin)
            # Nothing is awaited from here on, so that nobody connects in between.
            undo.callback(doors.close, opened)
            doors.open(opened)
            swap = partial(self._swap_doors, doors, parts)
            return PreparedReload(swap, undo.pop_all().aclose)

    def _swap_doors(self, doors: _Doors, parts: PreparedReload) -> CloseReplaced:
        replaced, self._doors = self._doors, doors
        return partial(self._close_doors, replaced, parts.commit())

    def _use(self, parts: Parts) -> None:
        super()._use(parts)
        self.source.resources = parts.resources

    async def _close_doors(self, replaced: _Doors, close_parts: CloseReplaced) -> None:
        """Close what is not used any more; what fails is logged, as the reload has happened."""
        kept_addresses = {each.address for each in self._doors.bound}
        for each in listening.difference(replaced.bound, self._doors.bound):
            sockets = replaced.sockets(each)
            with logged(f"the address {each.address}"):
                try:
                    if each.address not in kept_addresses:
                        await sockets.stop_listening(each.sockets)
                finally:
                    sockets.close_sockets(each.sockets)
        with logged("the admin address"):
            await _close_admin(replaced.admin, self._doors.admin)
        await close_parts()

    async def _admin_site(self, settings: Settings) -> AdminSite | None:
        """Return what serves the admin address, if there is one: the current one, or a new one."""
        if settings.admin.listen is None:
            return None
        if self._doors.admin is not None:
            return self._doors.admin
        from gateway.admin.application import AdminSite  # imports aiohttp, which takes time

        admin = AdminSite(self.source)
        # Clients can take all descriptors, operators cannot.
        admin.sockets.make_room = self.make_room
        try:
            await admin.__aenter__()
        except BaseException:
            await admin.drain(0.0)
            raise
        return admin

    async def _ask_itself(
        self, _: int, question: Question, __: float, connection: socket.socket | None
    ) -> str:
        """Reply to operators without a socket, however long it takes."""
        return await self.reply(question, connection and connection.dup())


async def _close_admin(admin: AdminSite | None, kept: AdminSite | None) -> None:
    """Close what serves the admin address, unless it is kept."""
    if admin is not None and admin is not kept:
        await admin.close()


class SingleProcessReloader(BackgroundTask):
    """Reloads a gateway when its files change, and on request, while its context is open.

    With ``watch: false`` in the settings, only on request. Requests during a reload lead to one
    more.
    """

    def __init__(self, gateway: StandaloneGateway, source: SettingsSource) -> None:
        self._gateway = gateway
        store = gateway.shared.metric_store
        self._log = ReloadLog(source, gateway.shared, store.writer(store.segments - 1))
        self.requested = asyncio.Event()
        """Have the settings read again, whether the files have changed or not."""

    async def run(self) -> None:
        """Look for changes, and reload."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_INTERVAL):
                    await self.requested.wait()
            requested = self.requested.is_set()
            self.requested.clear()
            if requested or self._log.is_due(self._gateway.settings):
                await self._reload(requested)

    async def _reload(self, requested: bool) -> None:
        gateway, source = self._gateway, self._log.source
        before, addresses = gateway.settings, gateway.addresses
        gateway.reopen_logs()
        try:
            settings = await asyncio.to_thread(source.read)
            changes = await gateway.reload(settings)
        except Exception as error:  # whatever it is, it must not end the task
            self._log.record_failure(failure_text(error, source.file), requested)
            return
        self._log.record_reload()
        self._log.log_reload(changes, settings, before, (gateway.addresses, addresses), requested)
