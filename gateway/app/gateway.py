"""The composition root: settings → a running gateway."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

from gateway.app.forwarding import forwarding
from gateway.app.keys import ClientKeys
from gateway.app.listen import listen, shown
from gateway.app.runtime import Runtime
from gateway.app.tls import client_tls, server_contexts
from gateway.exchange.base import ClientAnswer, ClientRequest
from gateway.exchange.dispatch import exchange
from gateway.helper.process import HelperProcess
from gateway.listener.http import HttpListener
from gateway.listener.tls import ServerTls
from gateway.observe.access_log import AccessLog
from gateway.settings.schema import Settings
from gateway.workers.cores import usable_cores


class Gateway:
    """A gateway that serves while its context is open; leaving it drains.

    It listens where the settings say; with ``on_closed`` it does not listen at all, but is given
    connections with ``take``, and calls that function for each that is over. ``tls`` is what
    ``client_tls`` gave for these settings, and ``contexts`` what ``server_contexts`` did, if they
    were asked already; ``keys`` are those that were loaded already. Raises ListenError on entering,
    where an address cannot be had, UpstreamTlsError and KeysError.
    """

    def __init__(
        self,
        settings: Settings,
        on_closed: Callable[[], None] | None = None,
        tls: ServerTls | None = None,
        contexts: Mapping[str, ssl.SSLContext] | None = None,
        keys: ClientKeys | None = None,
    ) -> None:
        self._settings = settings
        self._on_closed = on_closed
        self._tls = tls
        self._contexts = contexts
        self._keys = keys
        self._watches: list[asyncio.Task[None]] = []
        self.addresses: list[str] = []
        """Where clients reach it: URLs, or unix:/path."""
        self.dropped = 0
        """Exchanges that took longer than the drain time allows."""

    async def __aenter__(self) -> Self:
        settings = self._settings
        tls = self._tls or client_tls(settings)
        contexts = server_contexts(settings) if self._contexts is None else self._contexts
        keys = self._keys or ClientKeys(settings, os.environ)
        sockets = listen(settings.listen) if self._on_closed is None else []
        self._helper = HelperProcess() if _wants_helper(settings) else None
        self.runtime = Runtime(settings, contexts, self._helper, keys.groups)
        access_log = AccessLog() if settings.log.access else None
        self._listener = HttpListener(
            self._exchange,
            access_log,
            self._on_closed,
            self.runtime.straight,
            tls,
            forwarding(settings),
        )
        if tls is not None:
            self._watches.append(asyncio.create_task(tls.watch()))
        if keys.groups:
            renewed = keys.watch(self._listener.forget_plans)
            self._watches.append(asyncio.create_task(renewed))
        for sock in sockets:
            self.addresses.append(shown(sock, tls is not None))
            await self._listener.listen(sock)
        return self

    def take(self, connection: socket.socket) -> None:
        """Serve a connection that was accepted elsewhere; this owns it from now on."""
        self._listener.take(connection)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.dropped = await self._listener.drain(self._settings.limits.drain_time)
        for watch in self._watches:
            watch.cancel()
        await self.runtime.close()
        if self._helper is not None:
            await self._helper.close()

    async def _exchange(self, request: ClientRequest, answer: ClientAnswer) -> None:
        await exchange(request, answer, self.runtime.routes)


def _wants_helper(settings: Settings) -> bool:
    """Tell whether a process is to have a helper: where cores are left over for it."""
    if settings.helper != "auto":
        return settings.helper == "always"
    return settings.workers != "auto" and usable_cores() > settings.workers
