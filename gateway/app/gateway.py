"""The composition root: settings → a running gateway, and others in their place."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

from gateway.admin.listener import Admin
from gateway.admin.pages import pages
from gateway.app.build.limits import shared_limits
from gateway.app.build.listen import BoundAddress, close, listen, listen_addresses, shown, without
from gateway.app.build.processes import uses_offload
from gateway.app.build.routes import build_routes
from gateway.app.build.upstreams import SharedUpstream, build_upstreams, upstreams_by_name
from gateway.app.ejection_sync import EjectionSync
from gateway.app.reload.diff import changes, keep_startup_settings
from gateway.app.reload.resources import Resources, gather, warn
from gateway.app.reload.revision import Revision
from gateway.app.runtime import RetiredRuntimes, Runtime
from gateway.listener.connection import IdleTimeouts
from gateway.listener.server import HttpListener
from gateway.observe.access_log import AccessLog
from gateway.offload.process import OffloadProcess
from gateway.proxy.admission.concurrency_limit import ConcurrencyLimit
from gateway.proxy.interfaces import ClientRequest, ClientResponse, Upstream
from gateway.settings.schema import Settings
from gateway.upstream.pool.pool import Pool
from gateway.workers.shared_state import SharedEjections

_LAST_PAGE, _LAST_REQUEST = 0.5, 0.1
"""Seconds at the end for an operator to get a page, and to ask for it once connected."""


class Gateway:
    """A gateway that serves while its context is open; leaving it drains.

    It listens where the settings say; with ``on_closed`` it does not listen at all, but is given
    connections with ``take``, and calls that function for each that is over. ``material`` is what
    ``gather`` gave for these settings, if it was asked already; ``board`` is what it shares with
    other workers, if there are any, of which one is the ``first``. ``drained`` is awaited when no
    call of a client is under way any more; operators are served until it returns. Raises
    ListenError on entering, where an address cannot be had, UpstreamTlsError and ApiKeysError.
    """

    def __init__(
        self,
        settings: Settings,
        on_closed: Callable[[], None] | None = None,
        material: Resources | None = None,
        revision: Revision | None = None,
        board: SharedEjections | None = None,
        first: bool = True,
        drained: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._settings = settings
        self._drained = drained
        self._on_closed = on_closed
        self._given = material
        self._ejection_sync = None if board is None else EjectionSync(board, first)
        self._helper: OffloadProcess | None = None
        self._listening: tuple[BoundAddress, ...] = ()
        self._watches: list[asyncio.Task[None]] = []
        self._retired = RetiredRuntimes()
        self.revision = revision or Revision(time.time())
        """Which settings are in use; whoever reloads keeps it."""
        self.addresses: list[str] = []
        """Where clients reach it: URLs, or unix:/path."""
        self.dropped = 0
        """Exchanges that took longer than the drain time allows."""
        self.draining = False
        """It stops, and finishes the calls that are under way."""

    @property
    def listener(self) -> HttpListener:
        """Give what clients connect to."""
        return self._listener

    @property
    def settings(self) -> Settings:
        """Give the settings in use."""
        return self._settings

    @property
    def upstreams(self) -> dict[str, Upstream]:
        """Return the upstreams by name."""
        return self.runtime.upstreams

    @property
    def concurrency_limit(self) -> ConcurrencyLimit | None:
        """Return the limit of all calls together, if there is one."""
        return self.runtime.shared.concurrency_limit

    @property
    def buffered_bytes(self) -> int:
        """Return the bytes of bodies that are buffered."""
        return self.runtime.shared.held.total

    @property
    def settings_status(self) -> dict[str, Any]:
        """Return which settings are in use, and why newer ones are not."""
        return asdict(self.revision)

    async def not_ready_reason(self) -> str:
        """Return why it is not ready, or an empty text."""
        return await self.runtime.routes.readiness.check()

    async def __aenter__(self) -> Self:
        settings = self._settings
        material = self._given
        if material is None:
            material = gather(settings)
            warn(settings)
        self._material = material
        self._listening = self._listen(settings)
        self._helper = OffloadProcess() if uses_offload(settings) else None
        self._shared = shared_limits(settings)
        buffers = self._shared.held.buffers
        held = build_upstreams(material.upstream_specs, {}, buffers, self._ejection_sync)
        try:
            await _start(held)
        except BaseException:
            close(self._listening)
            await _give_up(held)
            raise
        routes = build_routes(
            settings,
            upstreams_by_name(held),
            self._shared,
            self._helper,
            material.keys.groups,
            material.forwarding,
        )
        self.runtime = Runtime(held, routes, self._shared)
        self._listener = HttpListener(
            self._exchange,
            _access_log(settings),
            self._on_closed,
            self.runtime.straight,
            material.tls,
            _patience(settings),
            material.forwarding,
            buffers,
        )
        self._admin = HttpListener(Admin(pages(self)), None, self._on_closed)
        self._watch_files_of(material)
        await self._serve_on(self._listening)
        if self._ejection_sync is not None:
            self._ejection_sync.start(self._pools)
        return self

    def take(self, connection: socket.socket, is_operator: bool = False) -> None:
        """Serve a connection that was accepted elsewhere; this owns it from now on."""
        listener = self._admin if is_operator else self._listener
        listener.adopt(connection)

    def begin_draining(self) -> None:
        """Say from now on that it drains, and so is not ready; leaving the context drains."""
        self.draining = self.runtime.routes.readiness.draining = True

    async def reload(self, settings: Settings) -> str:
        """Go on with other settings, but for the number of workers; tell what has changed.

        Exchanges under way end as they began. Raises ListenError and UpstreamTlsError, and has
        changed nothing then. There is one such call at a time.
        """
        settings = keep_startup_settings(settings, self._settings)
        before = self._material
        material = await asyncio.to_thread(gather, settings, before)
        helper = (self._helper or OffloadProcess()) if uses_offload(settings) else None
        shared = shared_limits(settings, self._shared)
        held = build_upstreams(
            material.upstream_specs, self.runtime.held, shared.held.buffers, self._ejection_sync
        )
        try:
            await _start(held)
            routes = await asyncio.to_thread(
                build_routes,
                settings,
                upstreams_by_name(held),
                shared,
                helper,
                material.keys.groups,
                material.forwarding,
            )
            listening = self._listen(settings)
        except BaseException:
            await _give_up(held)
            raise
        self._shared = shared
        await self._swap(material, listening, Runtime(held, routes, shared), helper)
        return changes(material, before)

    async def _swap(
        self,
        material: Resources,
        listening: tuple[BoundAddress, ...],
        runtime: Runtime,
        helper: OffloadProcess | None,
    ) -> None:
        """Begin with the new before anything else happens; then end the old."""
        opened = without(listening, self._listening)
        closed = [(self._listener_at(each), each) for each in without(self._listening, listening)]
        self._settings, self._listening = material.settings, listening
        self._watch_files_of(material)
        self._material = material
        self._listener.reconfigure(
            runtime.straight,
            _access_log(material.settings),
            material.tls,
            _patience(material.settings),
            material.forwarding,
        )
        self._retired.add(self.runtime)
        self.runtime = runtime
        old_helper, self._helper = self._helper, helper
        await self._serve_on(opened)
        stay = {each.address for each in listening}
        for listener, each in closed:
            if each.address in stay:
                listener.close_sockets(each.sockets)
            else:
                await listener.stop_listening(each.sockets)
        if old_helper is not None and old_helper is not helper:
            await old_helper.close()  # what it has not done is done here

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        limits = self._settings.limits
        self.begin_draining()
        self.dropped = await self._listener.drain(limits.drain_timeout, limits.drain_grace)
        if self._drained is not None:
            await self._drained()
        await self._admin.drain(_LAST_PAGE, _LAST_REQUEST)
        close(self._listening)
        self._watch_nothing()
        if self._ejection_sync is not None:
            await self._ejection_sync.close()
        await self._retired.close()
        await self.runtime.close()
        if self._helper is not None:
            await self._helper.close()

    def _pools(self) -> dict[str, Pool]:
        return {name: each.pool for name, each in self.upstreams.items()}

    def _listen(self, settings: Settings) -> tuple[BoundAddress, ...]:
        if self._on_closed is not None:
            return ()
        # An address that is clients' and becomes operators', or the other way round.
        changing_hands = {self._settings.admin} ^ {settings.admin}
        return listen(listen_addresses(settings), self._listening, changing_hands)

    async def _serve_on(self, opened: Iterable[BoundAddress]) -> None:
        self.addresses = shown(self._listening, self._settings)
        for each in opened:
            for sock in each.sockets:
                await self._listener_at(each).listen(sock)

    def _listener_at(self, each: BoundAddress) -> HttpListener:
        return self._admin if each.address == self._settings.admin else self._listener

    def _watch_files_of(self, material: Resources) -> None:
        self._watch_nothing()
        if material.tls is not None:
            self._watches.append(asyncio.create_task(material.tls.watch()))
        if material.keys.groups:
            renewed = material.keys.watch(self._listener.clear_plan_cache)
            self._watches.append(asyncio.create_task(renewed))

    def _watch_nothing(self) -> None:
        for watch in self._watches:
            watch.cancel()
        self._watches.clear()

    async def _exchange(self, request: ClientRequest, answer: ClientResponse) -> None:
        await self.runtime.handle_request(request, answer)


def _access_log(settings: Settings) -> AccessLog | None:
    return AccessLog() if settings.log.access else None


def _patience(settings: Settings) -> IdleTimeouts:
    limits = settings.limits
    return IdleTimeouts(
        limits.request_header_timeout, limits.keep_alive_timeout, limits.idle_timeout
    )


async def _start(held: Mapping[str, SharedUpstream]) -> None:
    """Have all upstreams looked after, those that are not yet."""
    await asyncio.gather(*(each.start() for each in held.values()))


async def _give_up(held: Mapping[str, SharedUpstream]) -> None:
    for each in held.values():
        await each.close_if_unused()
