"""One end of a connection, in a test's hands."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct


class Peer:
    """Reads and writes as a test says, and closes in either way."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self._writer = writer

    async def close(self) -> None:
        """Close the connection, with what was sent still delivered."""
        self._writer.close()
        with contextlib.suppress(ConnectionError, TimeoutError):
            await self._writer.wait_closed()

    def end_sending_below_tls(self) -> None:
        """Close the TCP connection in this direction only, of which TLS says nothing."""
        descriptor = os.dup(self._writer.get_extra_info("socket").fileno())
        with socket.socket(fileno=descriptor) as sock:
            sock.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """Drop the connection with a TCP reset."""
        self._writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )
        self._writer.transport.abort()
