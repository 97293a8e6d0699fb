"""HTTP/1.1 to one endpoint, on aiohttp's client."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator

import aiohttp
from yarl import URL

from gateway.errors import ErrorKind, GatewayError, bad_answer
from gateway.upstream.base import Body, UpstreamEndpoint, UpstreamRequest, UpstreamResponse

READ_BUFFER = 256 * 1024
"""Bytes of an answer that are read ahead of its reader, doubled at most."""

_KEEP_ALIVE = 4.0
"""Seconds an idle connection is kept: MLServer closes its own after 5."""

_MAX_HEADER = 64 * 1024


def open_session(connect_time: float) -> aiohttp.ClientSession:
    """Open the connections that all endpoints share; ``connect_time`` is in seconds.

    Nothing is added to a request, followed, decompressed or remembered.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE),
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
            reason = getattr(error, "strerror", None) or "no connection in time"
            raise GatewayError(
                ErrorKind.UNREACHABLE, f"cannot connect to {self.url}: {reason}"
            ) from error
        except aiohttp.ClientError as error:
            raise sender.fault or self._broken(error) from error
        return _HttpResponse(self.url, response, sender)

    def _broken(self, error: aiohttp.ClientError) -> GatewayError:
        if isinstance(error, aiohttp.ClientResponseError):
            return bad_answer(f"{self.url} answered what is not HTTP: {error.message}")
        return bad_answer(f"{self.url} closed the connection before it answered")


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
                for chunk in body or ():
                    yield chunk
        except GatewayError as error:
            self.fault = error
            raise


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
            # readchunk, unlike readany, does not join what has come in several pieces.
            content = self._response.content
            while (piece := await content.readchunk()) != (b"", False):
                if piece[0]:
                    yield piece[0]
        except (aiohttp.ClientError, ConnectionError) as error:
            raise self._sender.fault or bad_answer(
                f"{self._url} closed the connection before the end of its answer"
            ) from error

    def close(self) -> None:
        self._response.close()
