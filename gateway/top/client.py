"""Read documents from the admin address; what goes wrong is said in one sentence."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import aiohttp
from yarl import URL

from gateway.settings.values.addresses import UnixAddress, parse_address
from gateway.top.document import Document, text
from gateway.top.plain_text import cut, plain

TIMEOUT = 5.0
"""Seconds to wait for the gateway."""
_MOST_BYTES = 4 * 1024 * 1024
"""Bytes of a document. Read as JSON, it may take a hundred times as much memory."""
_MOST_SENTENCE = 300
_HEADERS = {
    "Accept": "application/json",
    "Accept-Encoding": "identity",
    "User-Agent": "tensorgate-top",
}


@dataclass(frozen=True, slots=True)
class AdminAddress:
    """Where the admin address is; a proxy before it may have it below a path."""

    shown: str
    """As the operator knows it."""
    url: URL
    socket: str | None = None


def parse_admin_address(value: str) -> AdminAddress:
    """Return the address of ``HOST:PORT``, ``http://HOST/PATH`` or ``unix:/PATH``.

    Raises ValueError.
    """
    if value.startswith(("http://", "https://")):
        url = URL(value).with_fragment(None)
        if not url.host:
            raise ValueError(f"a host is missing in {value!r}")
        if url.raw_authority.rpartition("@")[1]:
            raise ValueError("a user name or password in the URL is not supported")
        if url.raw_query_string:
            raise ValueError(f"expected no query in the URL, got {url.raw_query_string!r}")
        url = url.with_path(url.path.rstrip("/"))
        address = AdminAddress(str(url).rstrip("/"), url)
    elif isinstance(parsed := parse_address(value), UnixAddress):
        return AdminAddress(str(parsed), URL("http://localhost"), parsed.path)
    else:
        url = URL.build(scheme="http", host=parsed.host, port=parsed.port)
        address = AdminAddress(str(parsed), url)
    if not url.port:
        raise ValueError("expected a port from 1 to 65535, got 0")
    return address


class AdminError(Exception):
    """Why a document could not be read, as a sentence for operators."""


class AdminClient:
    """Reads documents of an admin address while its context is open."""

    def __init__(self, address: AdminAddress, seconds: float = TIMEOUT) -> None:
        self._address = address
        self._seconds = seconds

    async def __aenter__(self) -> Self:
        socket = self._address.socket
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(socket) if socket else aiohttp.TCPConnector(),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=_HEADERS,
            timeout=aiohttp.ClientTimeout(self._seconds),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def get(self, name: str, query: Mapping[str, str] | None = None) -> Document:
        """Return a document of the API. Raises AdminError."""
        url = self._address.url / "api" / name
        try:
            async with self._session.get(url, params=query, allow_redirects=False) as response:
                body = bytearray()
                async for piece in response.content.iter_any():
                    body += piece
                    if len(body) > _MOST_BYTES:
                        break
        except (OSError, aiohttp.ClientError) as error:
            raise AdminError(self._sentence(error)) from None
        if len(body) > _MOST_BYTES:
            raise AdminError(f"{self._address.shown} answers with more than {_MOST_BYTES} bytes")
        return self._document(response.status, bytes(body))

    def _document(self, status: int, body: bytes) -> Document:
        shown = self._address.shown
        try:
            document = json.loads(body)
        except (ValueError, RecursionError):
            document = None
        if status == 200 and isinstance(document, dict):
            return document
        said = cut(plain(text(document, "error")), _MOST_SENTENCE)
        if status == 403:
            raise AdminError(f"{shown} refuses to answer: {said or 'it gives no reason'}")
        if status in (401, 407):
            raise AdminError(f"{shown} wants a login, which this program does not have")
        kind = "another kind of document" if status == 200 else f"status {status}"
        reason = f": {said}" if said else ""
        question = "; is it the admin address of a Tensorgate?" if status < 500 else ""
        raise AdminError(f"{shown} answers with {kind}{reason}{question}")

    def _sentence(self, error: Exception) -> str:
        shown = self._address.shown
        if isinstance(error, asyncio.TimeoutError):
            return f"{shown} did not answer within {self._seconds:g} s"
        if isinstance(error, aiohttp.ClientConnectorDNSError):
            return f"the host of {shown} is not known: {error.os_error.strerror}"
        if isinstance(error, aiohttp.ClientSSLError):
            return f"no TLS connection to {shown}: {_reason(error)}"
        if isinstance(error, aiohttp.ClientConnectorError):
            cause = error.os_error
            if isinstance(cause, ConnectionRefusedError | FileNotFoundError):
                reason = "the connection was refused"
                if isinstance(cause, FileNotFoundError):
                    reason = "there is no such socket"
                return f"no gateway has its admin address at {shown}: {reason}"
            return f"cannot connect to {shown}: {_reason(error)}"
        if isinstance(error, OSError | aiohttp.ServerDisconnectedError):
            return f"{shown} closed the connection before it answered"
        return f"{shown} does not speak HTTP as expected"


def _reason(error: Exception) -> str:
    cause = getattr(error, "os_error", error)
    return str(getattr(cause, "reason", None) or getattr(cause, "strerror", None) or cause)
