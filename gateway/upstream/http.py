"""HTTP/1.1 to one endpoint, on aiohttp's client."""

from __future__ import annotations

import asyncio
import errno
import os
import re
from collections.abc import AsyncIterable, AsyncIterator, Iterator, Sequence
from http import HTTPStatus

import aiohttp
from yarl import URL

from gateway.errors import ErrorKind, GatewayError, bad_answer
from gateway.upstream.base import Body, UpstreamEndpoint, UpstreamRequest, UpstreamResponse
from gateway.upstream.connector import Connector

READ_BUFFER = 256 * 1024
"""Bytes of an answer that are read ahead of its reader, doubled at most."""

_KEEP_ALIVE = 4.0
"""Seconds an idle connection is kept: MLServer closes its own after 5."""

_WRITE = 256 * 1024
"""Bytes of a body at hand that are written at once."""

_MAX_HEADER = 64 * 1024

# RFC 9110, section 5.5: none of these may be in a header.
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


def open_session(connect_time: float) -> aiohttp.ClientSession:
    """Open the connections that all endpoints share; ``connect_time`` is in seconds.

    Nothing is added to a request, followed, decompressed or remembered.
    """
    return aiohttp.ClientSession(
        connector=Connector(_KEEP_ALIVE),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_time),
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
        auto_decompress=False,
        read_bufsize=READ_BUFFER,
        max_line_size=_MAX_HEADER,
        max_field_size=_MAX_HEADER,
    )


class HttpEndpoint(UpstreamEndpoint):
    """An endpoint at ``http://host:port``."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self._session = session

    async def send(self, request: UpstreamRequest) -> UpstreamResponse:
        """Send a request; see UpstreamEndpoint."""
        sender = _Sender(request.body)
        try:
            response = await self._session.request(
                request.method,
                URL(self.url + request.target, encoded=True),
                headers=request.headers,
                data=sender.payload(),
                allow_redirects=False,
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise GatewayError(
                ErrorKind.UNREACHABLE, f"cannot connect to {self.url}: {_reason(error)}"
            ) from error
        except aiohttp.ClientError as error:
            raise sender.fault or self._broken(error) from error
        if fault := _fault(response):
            response.close()
            raise bad_answer(f"{self.url} answered {fault}")
        return _HttpResponse(self.url, response, sender)

    def _broken(self, error: aiohttp.ClientError) -> GatewayError:
        if isinstance(error, aiohttp.ClientResponseError):
            reason = error.message.partition("\n")[0].rstrip(":")
            return bad_answer(f"{self.url} answered what is not HTTP: {reason}")
        return bad_answer(f"{self.url} closed the connection before it answered")


def _reason(error: aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError) -> str:
    number = error.errno
    if number is None:
        return "no connection in time"
    # Numbers that the system does not know are those of the name look-up.
    return os.strerror(number) if number in errno.errorcode else str(error.strerror)


def _fault(response: aiohttp.ClientResponse) -> str | None:
    """Tell what of an answer that aiohttp takes cannot be passed on."""
    if response.status == HTTPStatus.SWITCHING_PROTOCOLS:
        return "101 Switching Protocols, for which it was not asked"
    if any(map(_CONTROL.search, (response.reason or "", *response.headers.values()))):
        return "with control characters in its headers"
    return None


class _Sender:
    """Feeds a body to aiohttp, and keeps the error that it raises."""

    def __init__(self, body: Body) -> None:
        self._body = body
        self.fault: GatewayError | None = None

    def payload(self) -> bytes | AsyncIterator[bytes] | None:
        if self._body is None:
            return None
        if isinstance(self._body, tuple | list) and len(self._body) <= 1:
            return b"".join(self._body)
        return self._chunks(self._body)

    async def _chunks(self, body: Body) -> AsyncIterator[bytes]:
        try:
            if isinstance(body, AsyncIterable):
                async for chunk in body:
                    yield chunk
            else:
                for write in _joined(body or ()):
                    yield write
                    # A large body would go out in one turn of the event loop.
                    await asyncio.sleep(0)
        except GatewayError as error:
            self.fault = error
            raise


def _joined(chunks: Sequence[bytes]) -> Iterator[bytes]:
    """Join chunks at hand into few that are worth a write each."""
    held: list[bytes] = []
    size = 0
    for chunk in chunks:
        held.append(chunk)
        size += len(chunk)
        if size >= _WRITE:
            yield b"".join(held)
            held, size = [], 0
    yield b"".join(held)


class _HttpResponse(UpstreamResponse):
    def __init__(self, url: str, response: aiohttp.ClientResponse, sender: _Sender) -> None:
        self.status = response.status
        self.reason = response.reason or ""
        self.headers = response.headers
        self._url = url
        self._response = response
        self._sender = sender

    async def chunks(self) -> AsyncIterator[bytes]:
        try:
            # readchunk, unlike readany, does not join what has come in several pieces. What it
            # gives at the end is not the same for an empty body and any other.
            content = self._response.content
            while not content.at_eof():
                piece, _ = await content.readchunk()
                if piece:
                    yield piece
        except (aiohttp.ClientError, ConnectionError) as error:
            raise self._sender.fault or bad_answer(
                f"{self._url} closed the connection before the end of its answer"
            ) from error

    def close(self) -> None:
        self._response.close()
