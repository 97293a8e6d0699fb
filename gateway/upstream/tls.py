"""TLS to servers: connects, and keeps a response that came before the server closed."""

from __future__ import annotations

import asyncio
import socket
import ssl

from gateway.system.sockets.connection import Connection
from gateway.system.tls_transport import TlsTransport


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
        self.begin_handshake()

    def on_handshake_end(self) -> None:
        """Let ``established`` be done in a later iteration of the event loop."""
        if not self.established.done():
            self.established.set_result(None)

    def on_handshake_error(self, error: ssl.SSLError) -> None:
        """Fail ``established``."""
        self._fail_established(error)

    def on_handshake_lost(self, exc: Exception | None) -> None:
        """Fail ``established``, unless the server's certificate or alert has."""
        self._fail_established(exc or ConnectionResetError("closed within the TLS handshake"))

    def _fail_established(self, error: Exception) -> None:
        if not self.established.done():
            self.established.set_exception(error)


async def connect_tls(
    sock: socket.socket, context: ssl.SSLContext, server_name: str, connection: Connection
) -> None:
    """Do the handshake over a connected socket, for a connection that then uses it.

    Raises OSError: ssl.SSLError if TLS fails, and ConnectionResetError without an errno if the
    server closes within the handshake.
    """
    try:
        transport = ServerTlsTransport(context, connection, server_name)
        await asyncio.get_running_loop().create_connection(lambda: transport, sock=sock)
    except BaseException:
        sock.close()
        raise
    try:
        await transport.established
    except BaseException:
        if not transport.is_closing():  # else an alert may be on its way
            transport.abort()
        raise
