"""Where a server is, and what it takes to connect to it."""

from __future__ import annotations

import asyncio
import socket
import ssl
from dataclasses import dataclass
from ipaddress import ip_address
from typing import ClassVar
from urllib.parse import urlsplit

from aiohappyeyeballs import start_connection

_NEXT_ADDRESS = 0.25
"""Seconds after which a host's next address is tried as well: RFC 8305, section 5."""

_QUEUE_IS_FULL = 0.01
"""Seconds after which a Unix socket whose queue is full is tried again."""


@dataclass(frozen=True, slots=True)
class TlsTarget:
    """Hold what TLS to a server takes: its settings, and what the server's certificate names."""

    context: ssl.SSLContext
    server_name: str


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """Name a server by host and port; ``tls`` where it is spoken to over TLS.

    ``address`` is the one of the host's that is meant, if not any of them is.
    """

    host: str
    port: int
    tls: TlsTarget | None = None
    address: str | None = None

    @property
    def url(self) -> str:
        """Give ``http://host:port`` or ``https://host:port``, followed by the address if given."""
        url = f"{'http' if self.tls is None else 'https'}://{self.authority}"
        return url if self.address is None else f"{url} ({self.address})"

    @property
    def authority(self) -> str:
        """Give what a Host header says of it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def has_host_name(self) -> bool:
        """Tell whether the host is a name, of which the addresses can be looked up."""
        try:
            ip_address(self.host)
        except ValueError:
            return True
        return False

    async def connect(self) -> socket.socket:
        """Connect to the first of the host's addresses that answers. Raises OSError."""
        loop = asyncio.get_running_loop()
        host = self.host if self.address is None else self.address
        found = await loop.getaddrinfo(host, self.port, type=socket.SOCK_STREAM)
        return await start_connection(found, happy_eyeballs_delay=_NEXT_ADDRESS)


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """Name a server by the path of its Unix socket."""

    tls: ClassVar[None] = None

    path: str

    @property
    def url(self) -> str:
        """Give ``unix:/path``."""
        return f"unix:{self.path}"

    @property
    def authority(self) -> str:
        """Give what a Host header says of it."""
        return "localhost"

    async def connect(self) -> socket.socket:
        """Connect, once the server's queue takes the connection. Raises OSError."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            while True:
                try:
                    sock.connect(self.path)
                except BlockingIOError:
                    # For TCP the system waits; here it only says that there is no room yet.
                    await asyncio.sleep(_QUEUE_IS_FULL)
                else:
                    return sock
        except BaseException:
            sock.close()
            raise


ServerAddress = TcpAddress | UnixAddress


def parse_server_url(
    url: str, context: ssl.SSLContext | None = None, server_name: str | None = None
) -> ServerAddress:
    """Give the address that ``http://host:port``, ``https://host:port`` or ``unix:/path`` names.

    ``context`` is needed for https, and used for it alone; ``server_name`` is what the server's
    certificate must name instead of the host.
    """
    if url.startswith("unix:"):
        return UnixAddress(url.removeprefix("unix:"))
    parts = urlsplit(url)
    host, _, port = parts.netloc.rpartition(":")
    host = host.strip("[]")
    if parts.scheme != "https":
        return TcpAddress(host, int(port))
    assert context is not None
    # RFC 6066, section 3: without the dot that a name may end in.
    return TcpAddress(host, int(port), TlsTarget(context, (server_name or host).rstrip(".")))
