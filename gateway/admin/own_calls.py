"""Calls of the admin address to the gateway itself, as a client over a Unix socket makes them."""

from __future__ import annotations

import asyncio
import http.client
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from gateway.admin.source import GatewaySource

_TIMEOUT = 10.0
"""Seconds without a byte until a call is given up."""
_MAX_DOCUMENT = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Reply:
    """The response to a call."""

    status: int
    body: bytes


class OwnCallError(Exception):
    """A call without the response that was asked for; the message says why, for operators."""


class OwnCalls:
    """Makes calls to a gateway, with its routes and limits; each has a connection of its own."""

    def __init__(self, source: GatewaySource) -> None:
        self._source = source

    async def get_document(self, path: str) -> Any:
        """Return a JSON document. Raises OwnCallError."""
        return await self._document("GET", path, {}, b"")

    async def post_document(self, path: str, document: object) -> Any:
        """Send a JSON document; return the one that comes back. Raises OwnCallError."""
        headers = {"Content-Type": "application/json"}
        return await self._document("POST", path, headers, orjson.dumps(document))

    async def _document(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> Any:
        reply = await self.call(method, path, headers, body)
        try:
            document = orjson.loads(reply.body)
        except orjson.JSONDecodeError:
            document = None
        if reply.status != http.HTTPStatus.OK:
            error = document.get("error") if isinstance(document, dict) else None
            raise OwnCallError(error or f"the response has the status {reply.status}")
        if document is None:
            raise OwnCallError("the response is not JSON")
        return document

    async def call(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Reply:
        """Make a call. Raises OwnCallError if there is no whole response of up to 4 MiB."""
        try:
            sock = await self._source.connect()
        except TimeoutError:
            raise OwnCallError("no worker responds") from None
        return await asyncio.to_thread(_call, sock, method, path, headers, body)


def _call(
    sock: socket.socket, method: str, path: str, headers: Mapping[str, str], body: bytes
) -> Reply:
    sock.settimeout(_TIMEOUT)
    connection = http.client.HTTPConnection("localhost")
    connection.sock = sock
    try:
        connection.request(method, path, body or None, dict(headers))
        response = connection.getresponse()
        received = response.read(_MAX_DOCUMENT + 1)
    except TimeoutError:
        raise OwnCallError(f"no response within {_TIMEOUT:g} s") from None
    except (OSError, http.client.HTTPException) as error:
        raise OwnCallError(f"no response: {error}") from None
    finally:
        connection.close()
    if len(received) > _MAX_DOCUMENT:
        raise OwnCallError(f"the response has more than {_MAX_DOCUMENT} bytes")
    if response.length:  # ``read`` with a number of bytes does not tell
        raise OwnCallError("no response: it was cut off")
    return Reply(response.status, received)
