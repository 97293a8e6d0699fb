"""An endpoint that speaks HTTP/2: it sends each request on a stream of its connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator
from functools import lru_cache
from typing import Final

from multidict import CIMultiDict, CIMultiDictProxy

from gateway.errors import ErrorKind, GatewayError, ServerName, strip_tracebacks
from gateway.http2.header_table import Header
from gateway.http2.hpack import HeaderList
from gateway.sizes import CACHED_LINES
from gateway.system.buffers import BufferAccount
from gateway.upstream.address import ServerAddress
from gateway.upstream.connect_errors import connect_error
from gateway.upstream.http2.connection import ServerSession, ServerStream
from gateway.upstream.http2.connections import MAX_CONNECTIONS, ServerConnections
from gateway.upstream.transport import (
    HOP_BY_HOP,
    HeaderLines,
    SentBody,
    UpstreamEndpoint,
    UpstreamRequest,
    UpstreamResponse,
)

_MAX_SENDS: Final = 3
"""How often a request is sent that the server refuses without having processed it."""

_WRITE_CHUNK: Final = 256 * 1024
"""Bytes of a buffered body that are sent without a task."""


class Http2Endpoint(UpstreamEndpoint):
    """An endpoint at an address; see ``upstream/http/endpoint.py:HttpEndpoint``."""

    def __init__(
        self,
        address: ServerAddress,
        connect_timeout: float,
        idle_timeout: float = 180.0,
        buffers: BufferAccount | None = None,
        own_request_headers: HeaderLines = (),
        public_name: str | None = None,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self.url = address.url
        self.name = ServerName(address.url, public_name or address.url)
        self.own_request_headers = own_request_headers
        self._address = address
        self._scheme = b"http" if address.tls is None else b"https"
        self._connect_timeout = connect_timeout
        self._buffers = buffers
        self._senders: set[asyncio.Task[None]] = set()
        self.connections = ServerConnections(self._connect, idle_timeout, max_connections)

    async def send(self, request: UpstreamRequest) -> UpstreamResponse:
        """Send a request; see UpstreamEndpoint."""
        for _ in range(_MAX_SENDS - 1):
            try:
                return await _Call(self, request).run()
            except GatewayError as error:
                # A body that is an iterator cannot be sent again: its first chunks are gone.
                if error.kind is not ErrorKind.REFUSED or isinstance(request.body, AsyncIterator):
                    raise
                strip_tracebacks(error)
        return await _Call(self, request).run()

    async def close(self) -> None:
        """Close the idle connections; calls in flight close theirs."""
        await self.connections.close()
        if self._senders:
            await asyncio.wait(self._senders)

    def request_fields(self, request: UpstreamRequest) -> tuple[Header, ...]:
        """Return the header list of a request."""
        authority = self._address.authority
        fields: list[Header] = []
        for name, value in request.headers.items():
            field = _encode_field(name, value)
            if field is None:
                continue
            if field[0] == b"host":
                authority = value
            else:
                fields.append(field)
        return (
            (b":method", request.method.encode("latin-1")),
            (b":scheme", self._scheme),
            (b":path", request.target.encode("latin-1")),
            (b":authority", authority.encode("latin-1")),
            *fields,
        )

    def start_sender(
        self,
        stream: ServerStream,
        body: SentBody,
    ) -> asyncio.Task[None]:
        """Start a task that sends a body."""
        task = asyncio.create_task(_send_body(stream, body))
        self._senders.add(task)
        task.add_done_callback(self._senders.discard)
        return task

    async def _connect(self) -> ServerSession:
        session = ServerSession(self.name, self.connections, self._buffers)
        try:
            async with asyncio.timeout(self._connect_timeout):
                # The event loop's own limit of a minute for TLS may be shorter than this one.
                await self._address.connect(session, self._connect_timeout)
                await session.ready
        except BaseException as error:
            session.drop()
            # A TimeoutError is an OSError; an invalid host name is a UnicodeError.
            if isinstance(error, (OSError, UnicodeError)):
                raise connect_error(error, self.name, self._address) from error
            raise
        return session


class _Call:
    """A request, from its wait for a stream to the end of its response."""

    def __init__(self, endpoint: Http2Endpoint, request: UpstreamRequest) -> None:
        self._endpoint = endpoint
        self._body = () if request.body is None else request.body
        self._fields = endpoint.request_fields(request)
        self._sent: asyncio.Future[None] | None = None
        self._stream: ServerStream | None = None
        self._sender: asyncio.Task[None] | None = None

    async def run(self) -> UpstreamResponse:
        """Send the request; return once the headers of the response are there."""
        connections = self._endpoint.connections
        try:
            if (session := connections.take()) is not None:
                self._send(session)
            else:
                self._sent = asyncio.get_running_loop().create_future()
                connections.wait(self)
                await self._sent
            assert self._stream is not None
            return _Http2Response(await self._stream.head, self._stream, self)
        except BaseException:
            connections.stop_waiting(self)
            self.close()
            raise

    def send_over(self, session: ServerSession) -> None:
        """Send the request; see WaitingRequest."""
        assert self._sent is not None
        try:
            self._send(session)
        except Exception as error:
            self.on_error(error)
            return
        if not self._sent.done():
            self._sent.set_result(None)

    def on_error(self, error: Exception) -> None:
        """Handle that the request could not be sent; see WaitingRequest."""
        assert self._sent is not None
        if not self._sent.done():
            self._sent.set_exception(error)

    def close(self) -> None:
        """Release the stream, or reset it if the call is not complete."""
        # A cancelled task keeps its exception, whose frames may refer back here.
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.cancel()
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def _send(self, session: ServerSession) -> None:
        """Send the headers, and a small body; start a task for another one."""
        endpoint, fields, body = self._endpoint, self._fields, self._body
        stream = self._stream = session.open_stream()
        if isinstance(body, AsyncIterable):
            stream.send_headers(fields)
            self._sender = endpoint.start_sender(stream, body)
            return
        size = sum(map(len, body))
        stream.send_headers(fields, end_stream=not size)
        if not size:
            return
        if size > _WRITE_CHUNK or not stream.try_send(body, size):
            self._sender = endpoint.start_sender(stream, body)


async def _send_body(stream: ServerStream, body: SentBody) -> None:
    """Send a body as fast as the server reads it; an error that it raises fails the call."""
    try:
        if isinstance(body, AsyncIterable):
            async for data in body:
                if data:
                    await stream.send(data)
        else:
            for data in body:
                if data:
                    await stream.send(data)
        await stream.send(b"", end_stream=True)
    except ConnectionResetError:
        pass  # the stream reports it
    except Exception as error:
        stream.abort(error)


class _Http2Response(UpstreamResponse):
    def __init__(self, headers: HeaderList, stream: ServerStream, call: _Call) -> None:
        fields = headers.fields
        self.status = int(fields[0][1])
        self.reason = ""
        self.headers = CIMultiDictProxy(CIMultiDict(_decode(fields[1:])))
        self._stream = stream
        self._call = call
        self._received = 0

    @property
    def received_bytes(self) -> int:
        return self._received

    @property
    def trailers(self) -> HeaderLines:
        trailers = self._stream.trailers
        return () if trailers is None else tuple(_decode(trailers.fields))

    async def read(self) -> bytes | memoryview:
        data = await self._stream.read()
        self._received += len(data)
        return data

    def close(self) -> None:
        self._call.close()


@lru_cache(maxsize=CACHED_LINES)
def _encode_field(name: str, value: str) -> Header | None:
    """Encode a header; None if it has no meaning in HTTP/2: RFC 9113, section 8.2.2."""
    lower = name.lower()
    if lower in HOP_BY_HOP and not (lower == "te" and value.strip().lower() == "trailers"):
        return None
    return lower.encode("latin-1"), value.strip(" \t").encode("latin-1")


def _decode(fields: tuple[Header, ...]) -> list[tuple[str, str]]:
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in fields]
