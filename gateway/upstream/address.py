"""Addresses of servers, and how to connect to them."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
from dataclasses import dataclass
from ipaddress import ip_address
from typing import ClassVar, Literal
from urllib.parse import urlsplit

from aiohappyeyeballs import start_connection

from gateway.system.descriptors import check_share
from gateway.system.sockets.connection import Connection
from gateway.upstream.tls import connect_tls

_HAPPY_EYEBALLS_DELAY = 0.25
"""Seconds until a host's next address is tried as well: RFC 8305, section 5."""

MAX_DESCRIPTOR_SHARE = 15 / 16
"""A connection to a server is made while less than this share of all descriptors is open: the rest
stays for clients and operators."""

_FULL_QUEUE_RETRY_DELAY = 0.01
"""Seconds until a Unix socket with a full accept queue is tried again."""


class ClosedTransport(asyncio.Transport):
    """The transport of a connection that was never established."""

    def is_closing(self) -> bool:
        """Return True."""
        return True

    def abort(self) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class TlsTarget:
    """The TLS context, and the name that the server's certificate must have."""

    context: ssl.SSLContext
    server_name: str


@dataclass(frozen=True, slots=True)
class GrpcPort:
    """The port of a host at which its server speaks gRPC as well, over TLS if ``tls`` is set."""

    port: int
    tls: TlsTarget | None = None


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A server at a host and port, over TLS if ``tls`` is set.

    ``address`` selects one of the host's addresses. ``scheme`` is ``http``, or ``grpc`` for gRPC
    over HTTP/2, with or without TLS. A server of both protocols has the scheme ``http`` and a
    ``grpc`` port.
    """

    host: str
    port: int
    tls: TlsTarget | None = None
    address: str | None = None
    scheme: Literal["http", "grpc"] = "http"
    grpc: GrpcPort | None = None

    @property
    def grpc_address(self) -> TcpAddress | None:
        """Return where a server of both protocols speaks gRPC; None without that port."""
        if self.grpc is None:
            return None
        return TcpAddress(self.host, self.grpc.port, self.grpc.tls, self.address, "grpc")

    @property
    def url(self) -> str:
        """Return ``http://host:port``, ``https://host:port`` …, with the address if set."""
        url = f"{self.scheme}{'' if self.tls is None else 's'}://{self.authority}"
        return url if self.address is None else f"{url} ({self.address})"

    @property
    def authority(self) -> str:
        """Return the value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def has_host_name(self) -> bool:
        """Tell whether the host is a name rather than an IP address."""
        return not _is_ip_address(self.host)

    async def connect(
        self, protocol: Connection, descriptor_share: float = MAX_DESCRIPTOR_SHARE
    ) -> None:
        """Connect to the first of the host's addresses that accepts. Raises OSError.

        If more than ``descriptor_share`` of all descriptors is open, the error is that of a process
        without descriptors.
        """
        loop = asyncio.get_running_loop()
        host = self.host if self.address is None else self.address
        # uvloop does not tell that a zone (RFC 4007) is unknown.
        if _is_ip_address(host) and "%" not in host:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            sock = _open_socket(descriptor_share, family)
            await _connect_socket(sock, (host, self.port))
        else:
            # A resolver without descriptors says that it does not know the name.
            _open_socket(descriptor_share, socket.AF_INET).close()
            addresses = await loop.getaddrinfo(host, self.port, type=socket.SOCK_STREAM)
            sock = await start_connection(
                addresses,
                happy_eyeballs_delay=_HAPPY_EYEBALLS_DELAY,
                socket_factory=lambda address: _open_socket(descriptor_share, *address[:3]),
            )
        if self.tls is None:
            await loop.create_connection(lambda: protocol, sock=sock)
        else:
            await connect_tls(sock, self.tls.context, self.tls.server_name, protocol)


def _open_socket(
    descriptor_share: float, family: int, kind: int = socket.SOCK_STREAM, protocol: int = 0
) -> socket.socket:
    """Open a socket that does not block. Raises OSError, also above the share of descriptors."""
    sock = socket.socket(family, kind, protocol)
    sock.setblocking(False)
    try:
        check_share(sock.fileno(), descriptor_share)
    except OSError:
        sock.close()
        raise
    return sock


async def _connect_socket(sock: socket.socket, address: tuple[str, int]) -> None:
    """Connect a socket to an IP address, or close it and raise OSError.

    ``sock_connect`` of uvloop resolves the address once more, in a thread: it takes time, and where
    the system allows no more threads, libuv ends the process.
    """
    loop = asyncio.get_running_loop()
    try:
        error = sock.connect_ex(address)
        if error == errno.EINPROGRESS:
            writable = asyncio.Event()
            loop.add_writer(sock, writable.set)
            try:
                await writable.wait()
            finally:
                loop.remove_writer(sock)
            error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
    except BaseException:
        sock.close()
        raise


class _LocalAddress:
    """An address without a host, at which HTTP/1.1 is spoken."""

    __slots__ = ()

    tls: ClassVar[None] = None
    scheme: ClassVar[Literal["http"]] = "http"
    grpc_address: ClassVar[None] = None
    authority: ClassVar[str] = "localhost"
    """The value of the Host header."""


@dataclass(frozen=True, slots=True)
class UnixAddress(_LocalAddress):
    """A server at the path of its Unix socket."""

    path: str

    @property
    def url(self) -> str:
        """Return ``unix:/path``."""
        return f"unix:{self.path}"

    async def connect(
        self, protocol: Connection, descriptor_share: float = MAX_DESCRIPTOR_SHARE
    ) -> None:
        """Connect once the server's accept queue has room; see TcpAddress. Raises OSError."""
        sock = _open_socket(descriptor_share, socket.AF_UNIX)
        try:
            while True:
                try:
                    sock.connect(self.path)
                    break
                except BlockingIOError:
                    # For TCP the kernel waits; for a Unix socket it reports a full queue.
                    await asyncio.sleep(_FULL_QUEUE_RETRY_DELAY)
            await asyncio.get_running_loop().create_connection(lambda: protocol, sock=sock)
        except BaseException:
            sock.close()
            raise


@dataclass(frozen=True, slots=True)
class ConnectedAddress(_LocalAddress):
    """A peer that ``sock`` is connected to already; it can be used once."""

    url: str
    """How errors name the peer."""
    sock: socket.socket

    async def connect(
        self, protocol: Connection, descriptor_share: float = MAX_DESCRIPTOR_SHARE
    ) -> None:
        """Use the connection. Raises OSError if it was used before."""
        if self.sock.fileno() < 0:
            raise ConnectionResetError("the connection was lost")
        # The event loop owns a duplicate, so that a second use is told.
        self.sock.setblocking(False)
        sock = self.sock.dup()
        self.sock.close()
        try:
            await asyncio.get_running_loop().create_connection(lambda: protocol, sock=sock)
        except BaseException:
            sock.close()
            raise


ServerAddress = TcpAddress | UnixAddress | ConnectedAddress


def _is_ip_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def parse_server_url(
    url: str, context: ssl.SSLContext | None = None, server_name: str | None = None
) -> ServerAddress:
    """Parse ``http://host:port``, ``grpc://host:port``, both also with TLS, or ``unix:/path``.

    ``context`` is required for https and grpcs, and ignored otherwise. ``server_name`` replaces the
    host as the name that the server's certificate must have.
    """
    if url.startswith("unix:"):
        return UnixAddress(url.removeprefix("unix:"))
    parts = urlsplit(url)
    host, _, port = parts.netloc.rpartition(":")
    host = host.strip("[]")
    scheme: Literal["http", "grpc"] = "grpc" if parts.scheme.startswith("grpc") else "http"
    if not parts.scheme.endswith("s"):
        return TcpAddress(host, int(port), scheme=scheme)
    assert context is not None
    # RFC 6066, section 3: the name has no trailing dot.
    tls = TlsTarget(context, (server_name or host).rstrip("."))
    return TcpAddress(host, int(port), tls, scheme=scheme)
