"""One end of a connection, controlled by a test."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import struct
import termios
from typing import cast


class Peer:
    """Reads and writes bytes, and closes the connection cleanly or by a reset."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self._writer = writer

    async def close(self) -> None:
        """Close the connection, with what was sent still delivered."""
        self._writer.close()
        with contextlib.suppress(ConnectionError, TimeoutError):
            await self._writer.wait_closed()

    def stop_reading(self) -> None:
        """Stop reading, so that the buffers of this end fill up."""
        cast("asyncio.ReadTransport", self._writer.transport).pause_reading()

    @property
    def unsent(self) -> int:
        """Return the bytes that the other end's host has not taken yet: tcp(7), SIOCOUTQ."""
        sock = self._writer.get_extra_info("socket")
        in_kernel = struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)))[0]
        return int(in_kernel) + self._writer.transport.get_write_buffer_size()

    def shutdown_write_below_tls(self) -> None:
        """Close the TCP connection in this direction only, of which TLS says nothing."""
        descriptor = os.dup(self._writer.get_extra_info("socket").fileno())
        with socket.socket(fileno=descriptor) as sock:
            sock.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """Drop the connection with a TCP reset, unless it is closed already."""
        if self._writer.is_closing():
            return
        self._writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )
        self._writer.transport.abort()
