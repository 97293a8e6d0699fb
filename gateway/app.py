"""The composition root: settings → a running gateway."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

from gateway.codec.loans import Lender
from gateway.codec.policies import BytesAs, JsonPolicies, Nonfinite
from gateway.exchange.base import ClientAnswer, ClientRequest, Limits, Route, Upstream
from gateway.exchange.dispatch import exchange
from gateway.exchange.straight import Straight
from gateway.helper.process import HelperProcess
from gateway.listener.http import HttpListener
from gateway.listener.sockets import tcp_sockets, unix_socket
from gateway.observe.access_log import AccessLog
from gateway.protocol.dialects import DIALECTS
from gateway.settings.addresses import Address, UnixAddress
from gateway.settings.schema import Settings
from gateway.upstream.http import HttpEndpoint
from gateway.upstream.metadata_cache import MetadataCache
from gateway.upstream.pool import Pool
from gateway.workers.cores import usable_cores


class ListenError(Exception):
    """An address that cannot be listened on; the message names it."""


class Gateway:
    """A gateway that serves while its context is open; leaving it drains.

    It listens where the settings say; with ``on_closed`` it does not listen at all, but is given
    connections with ``take``, and calls that function for each that is over. Raises ListenError on
    entering, where an address cannot be had.
    """

    def __init__(self, settings: Settings, on_closed: Callable[[], None] | None = None) -> None:
        self._settings = settings
        self._on_closed = on_closed
        self.addresses: list[str] = []
        """Where clients reach it: URLs, or unix:/path."""
        self.dropped = 0
        """Exchanges that took longer than the drain time allows."""

    async def __aenter__(self) -> Self:
        settings = self._settings
        sockets = listen(settings.listen) if self._on_closed is None else []
        self._upstreams = _upstreams(settings)
        self._helper = HelperProcess() if _wants_helper(settings) else None
        route = _route(settings, self._upstreams, self._helper)

        async def on_request(request: ClientRequest, answer: ClientAnswer) -> None:
            await exchange(request, answer, route)

        access_log = AccessLog() if settings.log.access else None
        self._straight = Straight(route)
        self._listener = HttpListener(on_request, access_log, self._on_closed, self._straight)
        for sock in sockets:
            self.addresses.append(shown(sock))
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
        self._straight.close()
        for upstream in self._upstreams.values():
            await upstream.metadata.close()
            await upstream.pool.close()
        if self._helper is not None:
            await self._helper.close()


def _wants_helper(settings: Settings) -> bool:
    """Tell whether a process is to have a helper: where cores are left over for it."""
    if settings.helper != "auto":
        return settings.helper == "always"
    return settings.workers != "auto" and usable_cores() > settings.workers


def listen(addresses: Sequence[Address]) -> list[socket.socket]:
    """Listen on all addresses, or on none. Raises ListenError."""
    sockets: list[socket.socket] = []
    try:
        for address in addresses:
            sockets += _listen_on(address)
    except ListenError:
        for sock in sockets:
            sock.close()
        raise
    return sockets


def _listen_on(address: Address) -> list[socket.socket]:
    try:
        if isinstance(address, UnixAddress):
            return [unix_socket(address.path)]
        return tcp_sockets(address.host, address.port)
    except OSError as error:
        raise ListenError(f"cannot listen on {address}: {error.strerror or error}") from error


def shown(sock: socket.socket) -> str:
    """Tell where clients reach a listening socket: a URL, or unix:/path."""
    name = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        return f"unix:{name}"
    host = f"[{name[0]}]" if sock.family == socket.AF_INET6 else name[0]
    return f"http://{host}:{name[1]}"


def _upstreams(settings: Settings) -> dict[str, Upstream]:
    limits = settings.limits
    clock = asyncio.get_running_loop().time
    return {
        name: Upstream(
            name,
            DIALECTS[declared.dialect],
            Pool([HttpEndpoint(url, limits.connect_time) for url in declared.endpoints]),
            MetadataCache(limits.metadata_time, limits.metadata_models, limits.idle_time, clock),
        )
        for name, declared in settings.upstreams.items()
    }


def _route(settings: Settings, upstreams: Mapping[str, Upstream], lender: Lender | None) -> Route:
    declared, limits = settings.routes[0], settings.limits
    return Route(
        upstreams[declared.upstream],
        JsonPolicies(Nonfinite(declared.nonfinite), BytesAs(declared.bytes)),
        Limits(
            request_bytes=limits.request_bytes,
            header_bytes=limits.header_bytes,
            json_depth=limits.json_depth,
            spool_bytes=limits.spool_bytes,
            idle_time=limits.idle_time,
            total_time=limits.total_time,
        ),
        lender,
    )
