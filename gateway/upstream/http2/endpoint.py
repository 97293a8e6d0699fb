"""An endpoint that speaks HTTP/2: it sends each request on a stream of its connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from typing import Final

from gateway.errors import ErrorKind, GatewayError, ServerName, strip_tracebacks
from gateway.http1.deferrals import DEFER_TIMEOUT
from gateway.http2.header_table import Header
from gateway.http2.hpack import HeaderList
from gateway.sizes import CACHED_HEADS, CACHED_LINES
from gateway.system.bounded_cache import BoundedCache, cached
from gateway.system.buffers import BufferAccount
from gateway.system.timeout_queue import TimeoutQueue
from gateway.upstream.address import ServerAddress
from gateway.upstream.connect_errors import connect_error
from gateway.upstream.http2.connection import (
    Http2ServerConnection,
    ServerStream,
    SilenceLimits,
    forget,
)
from gateway.upstream.http2.connections import MAX_CONNECTIONS, ServerConnections
from gateway.upstream.http2.drained_streams import DrainedStreams
from gateway.upstream.http2.reserved_stream import MAX_SENDS, ReservedStream
from gateway.upstream.http2.response import Http2Response
from gateway.upstream.transport import (
    HOP_BY_HOP,
    CallCounter,
    HeaderLines,
    RequestTemplate,
    ReservedConnection,
    SentBody,
    UpstreamEndpoint,
    UpstreamRequest,
    UpstreamResponse,
)

_WRITE_CHUNK: Final = 256 * 1024
"""Bytes of a buffered body that are sent without a task."""


class Http2Endpoint(UpstreamEndpoint):
    """An endpoint at an address; see ``upstream/http/endpoint.py:HttpEndpoint``.

    ``drained`` takes over the streams of calls that are given up; without it they are reset.
    """

    def __init__(
        self,
        address: ServerAddress,
        connect_timeout: float,
        idle_timeout: float = 180.0,
        buffers: BufferAccount | None = None,
        own_request_headers: HeaderLines = (),
        public_name: str | None = None,
        max_connections: int = MAX_CONNECTIONS,
        silence: SilenceLimits | None = None,
        drained: DrainedStreams | None = None,
    ) -> None:
        self.url = address.url
        self.name = ServerName(address.url, public_name or address.url)
        self.own_request_headers = own_request_headers
        self._address = address
        self._scheme = b"http" if address.tls is None else b"https"
        self._connect_timeout = connect_timeout
        self._buffers = buffers
        self._silence = silence
        self._senders: set[asyncio.Task[None]] = set()
        self._encoded: BoundedCache[RequestTemplate, tuple[Header, ...]] = BoundedCache(
            CACHED_HEADS
        )
        self.deferrals = TimeoutQueue(DEFER_TIMEOUT)
        self.connections = ServerConnections(self._connect, idle_timeout, max_connections)
        self._drained = drained

    async def send(self, request: UpstreamRequest) -> UpstreamResponse:
        """Send a request; see UpstreamEndpoint."""
        for _ in range(MAX_SENDS - 1):
            try:
                return await _Call(self, request).run()
            except GatewayError as error:
                # A body that is an iterator cannot be sent again: its first chunks are gone.
                if error.kind is not ErrorKind.REFUSED or isinstance(request.body, AsyncIterator):
                    raise
                strip_tracebacks(error)
        return await _Call(self, request).run()

    async def close(self) -> None:
        """Close the idle connections, and cancel drained calls; calls in flight close theirs."""
        if self._drained is not None:
            self._drained.close()
        await self.connections.close()
        if self._senders:
            await asyncio.wait(self._senders)

    def after_timeout(self) -> None:
        """Use the connection of a call that has timed out no more; see UpstreamEndpoint."""
        self.connections.after_timeout()

    def try_reserve_stream(self) -> ReservedConnection | None:
        """Take a stream of a connection that has one free; see UpstreamEndpoint."""
        session = self.connections.take()
        return None if session is None else ReservedStream(session, self)

    def count_drained_in(self, counter: CallCounter) -> None:
        """Count drained calls; see UpstreamEndpoint."""
        if self._drained is not None:
            self._drained.counters.append(counter)

    def request_fields(self, request: UpstreamRequest) -> tuple[Header, ...]:
        """Return the header list of a request."""
        return self._fields(request.method, request.target, request.headers.items())

    def template_fields(self, template: RequestTemplate, lines: bytes) -> tuple[Header, ...]:
        """Return the header list of a template, with the lines of further headers."""
        first = self._encoded.get(template)
        if first is None:
            first = self._fields(template.method, template.target, template.headers)
            self._encoded.put(template, first, template.content)
        more = [_encode_line(line) for line in lines.split(b"\r\n") if line]
        return (*first, *[field for field in more if field is not None])

    def _fields(
        self, method: str, target: str, headers: Iterable[tuple[str, str]]
    ) -> tuple[Header, ...]:
        authority = self._address.authority
        fields: list[Header] = []
        for name, value in headers:
            field = _encode_field(name, value)
            if field is None:
                continue
            if field[0] == b"host":
                authority = value
            else:
                fields.append(field)
        return (
            (b":method", method.encode("latin-1")),
            (b":scheme", self._scheme),
            (b":path", target.encode("latin-1")),
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
        task.add_done_callback(self._senders.discard)
        self._senders.add(task)
        return task

    async def _connect(self) -> Http2ServerConnection:
        session = Http2ServerConnection(
            self.name, self.connections, self._buffers, self._silence, self._drained
        )
        try:
            async with asyncio.timeout(self._connect_timeout):
                await self._address.connect(session)
                await session.ready
        except BaseException as error:
            session.drop()
            if isinstance(error, TimeoutError) and session.max_streams <= 0:
                assert session.refusal is not None
                raise session.refusal from error
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
        loop = asyncio.get_running_loop()
        self._sent: asyncio.Future[None] | None = None
        self._head: asyncio.Future[HeaderList] = loop.create_future()
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
            return Http2Response(await self._head, self._stream, self)
        except BaseException:
            self.close()
            raise

    def send_over(self, session: Http2ServerConnection) -> None:
        """Send the request; see WaitingRequest."""
        assert self._sent is not None
        try:
            self._send(session)
        except Exception as error:
            self.on_error(error)
            return
        if not self._sent.done():
            self._sent.set_result(None)

    def on_headers(self, headers: HeaderList) -> None:
        """Let ``run`` return; see StreamReceiver."""
        if not self._head.done():
            self._head.set_result(headers)

    def on_data(self, size: int) -> None:
        """Do nothing: whoever reads the stream is told by it."""

    def on_end(self) -> None:
        """Do nothing: whoever reads the stream is told by it."""

    def on_error(self, error: Exception) -> None:
        """Let ``run`` raise the error; see WaitingRequest and StreamReceiver."""
        for waiting in (self._sent, self._head):
            if waiting is not None and not waiting.done():
                waiting.set_exception(error)
                return

    def close(self) -> None:
        """Release the stream, or reset it if the call is not complete."""
        # A cancelled task keeps its exception, whose frames may refer back here.
        sender, self._sender = self._sender, None
        stream, self._stream = self._stream, None
        self._endpoint.connections.stop_waiting(self)
        if sender is not None:
            sender.cancel()
        if stream is not None:
            stream.close()
        forget(self._head)

    def _send(self, session: Http2ServerConnection) -> None:
        """Send the headers, and a small body; start a task for another one."""
        endpoint, fields, body = self._endpoint, self._fields, self._body
        stream = self._stream = session.open_stream(self)
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
                    await stream.send(data, is_counted=True)  # by the call that has it
        await stream.send(b"", end_stream=True)
    except ConnectionResetError:
        pass  # the stream reports it
    except Exception as error:
        stream.fail(error)  # whoever closes the stream tells the server


@cached(CACHED_LINES)
def _encode_field(name: str, value: str) -> Header | None:
    """Encode a header; None if it has no meaning in HTTP/2: RFC 9113, section 8.2.2."""
    lower = name.lower()
    if lower in HOP_BY_HOP and not (lower == "te" and value.strip().lower() == "trailers"):
        return None
    return lower.encode("latin-1"), value.strip(" \t").encode("latin-1")


@cached(CACHED_LINES)
def _encode_line(line: bytes) -> Header | None:
    """Encode a header line as ``_encode_field`` does; the authority is that of the template."""
    name, _, value = line.decode("latin-1").partition(":")
    return _encode_field(name, value)
