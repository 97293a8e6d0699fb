"""The composition root: settings → a running gateway."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self

from gateway.certificates import CertificateFileError
from gateway.codec.loans import Lender
from gateway.codec.policies import BytesAs, JsonPolicies, Nonfinite
from gateway.exchange.base import ClientAnswer, ClientRequest, Limits, Route, Upstream
from gateway.exchange.dispatch import exchange
from gateway.exchange.routes import Rewrite, Routes, Rule
from gateway.exchange.straight import Straight
from gateway.exchange.turns import Turns
from gateway.helper.process import HelperProcess
from gateway.listener.http import HttpListener
from gateway.listener.sockets import tcp_sockets, unix_socket
from gateway.listener.tls import ServerTls, TlsFileError, TlsFiles, readable_by_others
from gateway.observe.access_log import AccessLog
from gateway.protocol.dialects import DIALECTS
from gateway.protocol.endpoints import KINDS, EndpointKind
from gateway.routing.matcher import Match, Pattern
from gateway.settings.addresses import Address, UnixAddress
from gateway.settings.routes import Match as MatchSettings
from gateway.settings.routes import RouteLimits
from gateway.settings.schema import Limits as CommonLimits
from gateway.settings.schema import Settings, UpstreamTls
from gateway.settings.schema import Upstream as UpstreamSettings
from gateway.upstream.address import server_at
from gateway.upstream.http import HttpEndpoint
from gateway.upstream.metadata_cache import MetadataCache
from gateway.upstream.pool import Pool
from gateway.upstream.tls import CertificateFiles, client_context
from gateway.workers.cores import usable_cores

_log = logging.getLogger("tensorgate")


class ListenError(Exception):
    """An address that cannot be listened on, or a file needed for that; the message names it."""


class UpstreamTlsError(Exception):
    """A file that TLS to servers needs, and that cannot be used; the message names it."""


class Gateway:
    """A gateway that serves while its context is open; leaving it drains.

    It listens where the settings say; with ``on_closed`` it does not listen at all, but is given
    connections with ``take``, and calls that function for each that is over. ``tls`` is what
    ``client_tls`` gave for these settings, and ``contexts`` what ``server_contexts`` did, if they
    were asked already. Raises ListenError on entering, where an address cannot be had, and
    UpstreamTlsError.
    """

    def __init__(
        self,
        settings: Settings,
        on_closed: Callable[[], None] | None = None,
        tls: ServerTls | None = None,
        contexts: Mapping[str, ssl.SSLContext] | None = None,
    ) -> None:
        self._settings = settings
        self._on_closed = on_closed
        self._tls = tls
        self._contexts = contexts
        self._watch: asyncio.Task[None] | None = None
        self.addresses: list[str] = []
        """Where clients reach it: URLs, or unix:/path."""
        self.dropped = 0
        """Exchanges that took longer than the drain time allows."""

    async def __aenter__(self) -> Self:
        settings = self._settings
        tls = self._tls or client_tls(settings)
        contexts = server_contexts(settings) if self._contexts is None else self._contexts
        sockets = listen(settings.listen) if self._on_closed is None else []
        self._upstreams = _upstreams(settings, contexts)
        self._helper = HelperProcess() if _wants_helper(settings) else None
        routes = _routes(settings, self._upstreams, self._helper)

        async def on_request(request: ClientRequest, answer: ClientAnswer) -> None:
            await exchange(request, answer, routes)

        access_log = AccessLog() if settings.log.access else None
        self._straight = Straight(routes)
        self._listener = HttpListener(on_request, access_log, self._on_closed, self._straight, tls)
        if tls is not None:
            self._watch = asyncio.create_task(tls.watch())
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
        if self._watch is not None:
            self._watch.cancel()
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


def client_tls(settings: Settings) -> ServerTls | None:
    """Load what TLS with clients takes; None where it is not spoken. Raises ListenError."""
    declared = settings.tls
    if declared is None:
        return None
    required = declared.client_certificates != "optional"
    files = TlsFiles(declared.certificate, declared.key, declared.client_ca, required)
    try:
        tls = ServerTls(files)
    except TlsFileError as error:
        raise ListenError(str(error)) from error
    if readable_by_others(files.key):
        _log.warning("tls.key: every user of this machine can read %s", files.key)
    return tls


def server_contexts(settings: Settings) -> dict[str, ssl.SSLContext]:
    """Load what TLS takes towards the upstreams with https endpoints. Raises UpstreamTlsError."""
    contexts = {}
    for name, upstream in settings.upstreams.items():
        if not any(url.startswith("https:") for url in upstream.endpoints):
            continue
        declared = upstream.tls or UpstreamTls()
        files = CertificateFiles(declared.ca, declared.certificate, declared.key)
        try:
            contexts[name] = client_context(files, declared.verify)
        except CertificateFileError as error:
            raise UpstreamTlsError(f"upstreams.{name}.tls.{error}") from error
        if not declared.verify:
            _log.warning(
                "upstreams.%s.tls.verify: certificates are not checked, so that anybody on the way"
                " can pose as a server",
                name,
            )
    return contexts


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


def shown(sock: socket.socket, is_tls: bool = False) -> str:
    """Tell where clients reach a listening socket: a URL, or unix:/path."""
    name = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        return f"unix:{name}"
    host = f"[{name[0]}]" if sock.family == socket.AF_INET6 else name[0]
    return f"{'https' if is_tls else 'http'}://{host}:{name[1]}"


def _upstreams(settings: Settings, contexts: Mapping[str, ssl.SSLContext]) -> dict[str, Upstream]:
    limits = settings.limits
    clock = asyncio.get_running_loop().time
    return {
        name: Upstream(
            name,
            DIALECTS[declared.dialect],
            Pool(_endpoints(declared, contexts.get(name), limits.connect_time)),
            MetadataCache(limits.metadata_time, limits.metadata_models, limits.idle_time, clock),
        )
        for name, declared in settings.upstreams.items()
    }


def _endpoints(
    declared: UpstreamSettings, context: ssl.SSLContext | None, connect_time: float
) -> list[HttpEndpoint]:
    server_name = declared.tls.server_name if declared.tls is not None else None
    return [
        HttpEndpoint(server_at(url, context, server_name), connect_time)
        for url in declared.endpoints
    ]


def _routes(settings: Settings, upstreams: Mapping[str, Upstream], lender: Lender | None) -> Routes:
    turns = Turns()  # one for all: there is one event loop
    rules = []
    for declared in settings.routes:
        policies = JsonPolicies(Nonfinite(declared.nonfinite), BytesAs(declared.bytes))
        limits = _limits(settings.limits, declared.limits)
        rewrite = declared.rewrite
        rules.append(
            Rule(
                _match(declared.match),
                tuple(
                    Route(upstreams[share.name], policies, limits, lender, turns)
                    for share in declared.upstream
                ),
                tuple(share.weight for share in declared.upstream),
                declared.sticky,
                Rewrite(rewrite.model, rewrite.version) if rewrite else None,
                _kinds(declared.deny),
            )
        )
    return Routes(rules)


def _match(declared: MatchSettings) -> Match:
    return Match(
        Pattern.of(declared.model) if declared.model else None,
        Pattern.of(declared.version) if declared.version else None,
        tuple((name, Pattern.of(value)) for name, value in declared.headers.items()),
        _kinds(declared.kinds) if declared.kinds else None,
    )


def _kinds(words: Iterable[str]) -> frozenset[EndpointKind]:
    return frozenset(kind for word in words for kind in KINDS[word])


def _limits(common: CommonLimits, own: RouteLimits) -> Limits:
    """Give a route's limits: its own, and where it says nothing, those of all."""
    said = own.model_dump(exclude_none=True)
    return Limits(
        **{name: said.get(name, getattr(common, name)) for name in type(own).model_fields}
    )
