"""Addresses of servers: how to connect to them, and why that fails, in plain words."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
from dataclasses import dataclass, replace
from ipaddress import ip_address
from typing import ClassVar, Literal
from urllib.parse import urlsplit

from aiohappyeyeballs import start_connection

from gateway.errors import RETRY_AFTER, ErrorKind, GatewayError, ServerName
from gateway.system.descriptors import check_share
from gateway.system.sockets.connection import Connection
from gateway.system.tls_transport import TlsTransport
from gateway.upstream.transport import closed_on_error

_HAPPY_EYEBALLS_DELAY = 0.25
"""Seconds until a host's next address is tried as well: RFC 8305, section 5."""

MAX_DESCRIPTOR_SHARE = 15 / 16
"""A connection to a server is made while less than this share of all descriptors is open: the rest
stays for clients and operators."""

_FULL_QUEUE_RETRY_DELAY = 0.01
"""Seconds until a Unix socket with a full accept queue is tried again."""


# Numbers of <openssl/x509_vfy.h>.
_DISTRUST = {9: "its certificate is not valid yet", 10: "its certificate has expired"}
_UNKNOWN_ISSUER = frozenset((2, 18, 19, 20, 21))
_NAME_MISMATCH = frozenset((62, 64))

_REJECTED = "it does not accept the gateway's certificate"
_CERTIFICATE_REFUSALS = {
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "it asks for a client certificate",
    "TLSV1_ALERT_UNKNOWN_CA": _REJECTED,
    "TLSV1_ALERT_ACCESS_DENIED": _REJECTED,
    "SSLV3_ALERT_BAD_CERTIFICATE": _REJECTED,
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": _REJECTED,
    "SSLV3_ALERT_CERTIFICATE_REVOKED": _REJECTED,
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": _REJECTED,
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": _REJECTED,
}
# OpenSSL's errors if the server's first bytes are not TLS.
_NOT_TLS = (
    "WRONG_VERSION_NUMBER",
    "RECORD_LAYER_FAILURE",
    "PACKET_LENGTH_TOO_LONG",
    "HTTP_REQUEST",
)
_OLD_TLS = ("UNSUPPORTED_PROTOCOL", "TLSV1_ALERT_PROTOCOL_VERSION")
_TLS_ERRORS = {
    **_CERTIFICATE_REFUSALS,
    **dict.fromkeys(_NOT_TLS, "it does not speak TLS"),
    **dict.fromkeys(_OLD_TLS, "it speaks no TLS of version 1.2 or newer"),
    "TLSV1_ALERT_NO_APPLICATION_PROTOCOL": "it does not speak this version of HTTP",
}

# The machine or the process ran out of something. Ports run out per server.
_EXHAUSTED = frozenset(
    (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL)
)


class ServerTlsTransport(TlsTransport):
    """The gateway's side of TLS with a server, whose certificate must have ``server_name``.

    ``established`` is done once ``connection_made`` of the connection was called, or raises
    ssl.SSLError or ConnectionResetError.
    """

    def __init__(self, context: ssl.SSLContext, connection: Connection, server_name: str) -> None:
        super().__init__(context, connection, server_name)
        self.established: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Nobody learns of an error if the connect was cancelled before.
        self.established.add_done_callback(lambda done: done.cancelled() or done.exception())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the first message of the handshake."""
        super().connection_made(transport)
        self._process_received()

    def forget_socket(self) -> None:
        """Break the reference cycle that a cancelled connect leaves: uvloop does not end it."""
        self._socket = ClosedTransport()

    def on_handshake_end(self) -> None:
        """Let ``established`` be done in a later iteration of the event loop."""
        if not self.established.done():
            self.established.set_result(None)

    def on_handshake_error(self, error: ssl.SSLError) -> bytes | None:
        """Fail ``established``."""
        self.on_handshake_lost(error)
        return None

    def on_handshake_lost(self, exc: Exception | None) -> None:
        """Fail ``established``, unless the server's certificate or alert has."""
        if not self.established.done():
            error = exc or ConnectionResetError("closed within the TLS handshake")
            self.established.set_exception(error)


async def connect_tls(
    sock: socket.socket, context: ssl.SSLContext, server_name: str, connection: Connection
) -> None:
    """Do the handshake over a connected socket, for a connection that then uses it.

    Raises OSError: ssl.SSLError if TLS fails, and ConnectionResetError without an errno if the
    server closes within the handshake.
    """
    with closed_on_error(sock):
        transport = ServerTlsTransport(context, connection, server_name)
        try:
            await asyncio.get_running_loop().create_connection(lambda: transport, sock=sock)
        except BaseException:
            transport.forget_socket()
            raise
    try:
        await transport.established
    except BaseException:
        if not transport.is_closing():  # else an alert may be on its way
            transport.abort()
        raise


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
class TcpAddress:
    """A server at a host and port, over TLS if ``tls`` is set.

    ``address`` selects one of the host's addresses. ``scheme`` is ``http``, or ``grpc`` for gRPC
    over HTTP/2, with or without TLS. A server of both protocols has the scheme ``http``, and its
    port for gRPC in ``grpc``.
    """

    host: str
    port: int
    tls: TlsTarget | None = None
    address: str | None = None
    scheme: Literal["http", "grpc"] = "http"
    grpc: TcpAddress | None = None

    @property
    def grpc_address(self) -> TcpAddress | None:
        """Return where a server of both protocols speaks gRPC; None without that port."""
        return None if self.grpc is None else replace(self.grpc, address=self.address)

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
    def is_local(self) -> bool:
        """Tell whether the host is this machine for certain: loopback."""
        host = self.host if self.address is None else self.address
        if not _is_ip_address(host):
            return host.lower().rstrip(".") == "localhost"
        return ip_address(host.partition("%")[0]).is_loopback

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
    with closed_on_error(sock):
        check_share(sock.fileno(), descriptor_share)
    return sock


async def _connect_socket(sock: socket.socket, address: tuple[str, int]) -> None:
    """Connect a socket to an IP address, or close it and raise OSError.

    ``sock_connect`` of uvloop resolves the address once more, in a thread: it takes time, and where
    the system allows no more threads, libuv ends the process.
    """
    loop = asyncio.get_running_loop()
    with closed_on_error(sock):
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


class _LocalAddress:
    """An address without a host, at which HTTP/1.1 is spoken."""

    __slots__ = ()

    tls: ClassVar[None] = None
    scheme: ClassVar[Literal["http"]] = "http"
    grpc_address: ClassVar[None] = None
    is_local: ClassVar[bool] = True
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
        with closed_on_error(sock):
            while True:
                try:
                    sock.connect(self.path)
                    break
                except BlockingIOError:
                    # For TCP the kernel waits; for a Unix socket it reports a full queue.
                    await asyncio.sleep(_FULL_QUEUE_RETRY_DELAY)
            await asyncio.get_running_loop().create_connection(lambda: protocol, sock=sock)


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
        with closed_on_error(sock):
            await asyncio.get_running_loop().create_connection(lambda: protocol, sock=sock)


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


def connect_error(error: Exception, name: ServerName, address: ServerAddress) -> GatewayError:
    """Make the error of a call for which there is no connection."""
    tls = address.tls
    reason = describe_connect_error(error, None if tls is None else tls.server_name)
    public_reason = reason if name.public == name.url else describe_for_clients(error)
    kind, what, retry_after = ErrorKind.UNREACHABLE, "cannot connect to", None
    if isinstance(error, OSError) and error.errno in _EXHAUSTED:
        # The server is not at fault, and another endpoint may have an idle connection.
        kind, retry_after = ErrorKind.EXHAUSTED, RETRY_AFTER
        what = "the gateway is out of local resources (ports or file descriptors) for"
    public = f"{what} {name.public}: {public_reason}"
    return GatewayError(kind, f"{what} {name.url}: {reason}", retry_after, public_message=public)


def describe_connect_error(error: Exception, server_name: str | None = None) -> str:
    """Say why a connect failed; ``server_name`` is the name that TLS expects."""
    match error:
        case TimeoutError():
            return "no connection in time"
        case ssl.SSLCertVerificationError():
            return _describe_distrust(error, server_name)
        case ssl.SSLError():
            reason = error.reason or ""
            text = f"TLS failed: {reason.lower().replace('_', ' ') or error}"
            return _TLS_ERRORS.get(reason, text)
        case ConnectionResetError(errno=None):
            # The event loop raises it at an unexpected end of the handshake.
            return "it closed the connection within the TLS handshake"
        # Numbers that are no errno come from getaddrinfo.
        case OSError(errno=int(number)) if number in errno.errorcode:
            return os.strerror(number)
        case OSError(strerror=str(text)):
            return text
        case _:
            return str(error)


def describe_for_clients(error: Exception) -> str:
    """Say why a connect failed, without an address or a name of the server."""
    match error:
        case ssl.SSLCertVerificationError(verify_code=int(code)) if code in _NAME_MISMATCH:
            return "its certificate is for another name"
        case TimeoutError() | ssl.SSLError() | ConnectionResetError() | socket.gaierror():
            return describe_connect_error(error)
        case OSError(errno=int(number)) if number in errno.errorcode:
            return os.strerror(number)
        case _:
            # Errors of several addresses quote each of them.
            return "no connection"


def describe_certificate_refusal(error: Exception | None) -> str | None:
    """Say why the server refused the gateway's certificate; None for another error."""
    return _CERTIFICATE_REFUSALS.get(error.reason) if isinstance(error, ssl.SSLError) else None


def _describe_distrust(error: ssl.SSLCertVerificationError, server_name: str | None) -> str:
    code = error.verify_code
    if code in _NAME_MISMATCH:
        return f"its certificate does not name {server_name}"
    what = "is not trusted" if code in _UNKNOWN_ISSUER else "cannot be used"
    return _DISTRUST.get(code) or f"its certificate {what} ({error.verify_message})"
