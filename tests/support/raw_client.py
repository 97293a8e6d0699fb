"""A client that sends any bytes, and reads the bytes that come back."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from tests.support.certificates import client_context
from tests.support.http_messages import Head, read_body, read_chunk, read_head, request
from tests.support.peer import Peer

TIMEOUT = 5.0
"""Seconds after which a test fails that waits for bytes."""


@dataclass(frozen=True, slots=True)
class ReceivedResponse:
    """A complete response."""

    head: Head
    body: bytes

    @property
    def status(self) -> int:
        """Return its status."""
        return self.head.status

    @property
    def json(self) -> Any:
        """Return its body as JSON."""
        return json.loads(self.body)

    @property
    def error(self) -> str:
        """Return the message of an error in the protocol's form."""
        assert self.head.get("Content-Type") == "application/json"
        fields = self.json
        assert list(fields) == ["error"]
        message = fields["error"]
        assert isinstance(message, str)
        assert message
        return message


class RawClient(Peer):
    """A connection to the gateway."""

    async def send(self, *parts: bytes) -> None:
        """Send bytes, each part on its own; waits while the gateway does not take them."""
        for part in parts:
            self._writer.write(part)
            await self._writer.drain()

    def send_nowait(self, data: bytes) -> None:
        """Send bytes without waiting."""
        self._writer.write(data)

    async def head(self) -> Head:
        """Read a response up to its body."""
        async with asyncio.timeout(TIMEOUT):
            return await read_head(self.reader)

    async def chunk(self) -> bytes:
        """Read one chunk of a chunked body."""
        async with asyncio.timeout(TIMEOUT):
            return await read_chunk(self.reader)

    async def whole_body(self) -> bytes:
        """Read what is left of a chunked body; raises IncompleteReadError where it is cut."""
        parts = []
        while part := await self.chunk():
            parts.append(part)
        return b"".join(parts)

    async def read_response(self) -> ReceivedResponse:
        """Read a whole response; raises IncompleteReadError where it is cut short."""
        async with asyncio.timeout(TIMEOUT):
            head = await read_head(self.reader)
            return ReceivedResponse(head, await read_body(self.reader, head))

    async def ask(self, data: bytes) -> ReceivedResponse:
        """Send a request and read the response."""
        await self.send(data)
        return await self.read_response()

    async def call(
        self,
        method: str,
        target: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> ReceivedResponse:
        """Send a request that is well-formed, and read the response."""
        return await self.ask(request(method, target, body, headers))

    async def rest(self) -> bytes:
        """Read until the gateway closes the connection; raises ConnectionResetError."""
        async with asyncio.timeout(TIMEOUT):
            return await self.reader.read()

    def shutdown_write(self) -> None:
        """Close the connection in this direction only."""
        if self._writer.can_write_eof():
            self._writer.write_eof()
        else:
            self.shutdown_write_below_tls()


@asynccontextmanager
async def connect(
    url: str, tls: ssl.SSLContext | None = None, own_host: str | None = None
) -> AsyncIterator[RawClient]:
    """Connect to the gateway at http://host:port, https://host:port or unix:/path.

    ``tls`` is for https, instead of trust in the tests' own authority. ``own_host`` is the address
    of the client.
    """
    if url.startswith("unix:"):
        streams = await asyncio.open_unix_connection(url.removeprefix("unix:"))
    else:
        scheme, _, authority = url.partition("://")
        host, _, port = authority.rpartition(":")
        context = (tls or client_context()) if scheme == "https" else None
        own = None if own_host is None else (own_host, 0)
        streams = await asyncio.open_connection(
            host.strip("[]"), int(port), ssl=context, local_addr=own
        )
    client = RawClient(*streams)
    try:
        yield client
    finally:
        await client.close()
