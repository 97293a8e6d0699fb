"""An endpoint that speaks HTTP/1.1: it sends requests over pooled connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Coroutine, Iterable, Sequence

from gateway.errors import ServerName, strip_tracebacks
from gateway.http1.deferrals import DEFER_TIMEOUT
from gateway.http1.head import ResponseHead, encode_head_lines
from gateway.sizes import CACHED_HEADS
from gateway.system.bounded_cache import BoundedCache
from gateway.system.buffers import BufferAccount
from gateway.system.descriptors import exceeds_share
from gateway.system.timeout_queue import TimeoutQueue
from gateway.upstream.address import MAX_DESCRIPTOR_SHARE, ServerAddress
from gateway.upstream.connect_errors import connect_error
from gateway.upstream.http.connection import (
    OpenConnections,
    ServerConnection,
    StaleConnectionError,
)
from gateway.upstream.http.connection_queue import ConnectionQueue
from gateway.upstream.http.idle_connections import IdleConnections
from gateway.upstream.http.stale_retry import StaleRetry, may_send_again
from gateway.upstream.transport import (
    HeaderLines,
    RequestTemplate,
    ReservedConnection,
    ResponseReceiver,
    SentBody,
    UpstreamEndpoint,
    UpstreamRequest,
    UpstreamResponse,
)

_WRITE_CHUNK = 256 * 1024
"""Bytes of a buffered body that are written in one time slice of the event loop."""

_SMALL_SHARE = 1 / 16
_LARGE_DESCRIPTOR_SHARE = 7 / 8
"""An endpoint with more than the small share of all descriptors gets another one for a call only
below this: a server that does not respond must not take those of health checks and of others."""

# RFC 9110, section 8.6: without a body, these requests have no Content-Length.
_BODYLESS_METHODS = frozenset(("GET", "HEAD", "OPTIONS", "TRACE"))


class HttpEndpoint(UpstreamEndpoint):
    """An endpoint at an address.

    ``connect_timeout`` covers DNS, TCP and TLS; ``idle_timeout`` is how long a connection waits for
    its next request; both in seconds. ``buffers`` counts what the connections buffer. Errors for
    clients name the endpoint by its ``public_name``, or by its URL. ``retry_stale`` says which
    requests are sent again after a close of a reused connection.
    """

    def __init__(
        self,
        address: ServerAddress,
        connect_timeout: float,
        idle_timeout: float = 4.0,
        buffers: BufferAccount | None = None,
        own_request_headers: HeaderLines = (),
        public_name: str | None = None,
        retry_stale: StaleRetry = "infer",
    ) -> None:
        self.url = address.url
        self.name = ServerName(address.url, public_name or address.url)
        self.own_request_headers = own_request_headers
        self._address = address
        self._connect_timeout = connect_timeout
        self._buffers = buffers
        self._retry_stale: StaleRetry = retry_stale
        self.idle = IdleConnections(idle_timeout)
        self._deferrals = TimeoutQueue(DEFER_TIMEOUT)
        self._open_connections = OpenConnections()
        self._connecting = 0
        self._senders: set[asyncio.Task[None]] = set()
        self.connections = ConnectionQueue(self.idle, self._connect)
        self._encoded: BoundedCache[RequestTemplate, bytes] = BoundedCache(CACHED_HEADS)

    async def send(self, request: UpstreamRequest) -> UpstreamResponse:
        """Send a request; see UpstreamEndpoint."""
        connection = self.idle.take_open()
        if connection is not None:
            try:
                return await self._call(connection, request)
            except StaleConnectionError as error:
                # A body that is an iterator cannot be sent again: its first chunks are gone.
                is_gone = isinstance(request.body, AsyncIterator)
                if is_gone or not self.may_resend(request.method, request.is_idempotent):
                    raise
                strip_tracebacks(error)
        return await self._call(await self._connect(request.is_control), request)

    async def _call(
        self, connection: ServerConnection, request: UpstreamRequest
    ) -> UpstreamResponse:
        head = connection.expect_response(request.method, request.waits_for_chunks)
        pending = _Pending(connection, self)
        try:
            pending.sender = self._send(connection, request)
            return _HttpResponse(await head, connection, pending)
        except BaseException:
            pending.close()
            raise

    def may_resend(self, method: str, is_idempotent: bool) -> bool:
        """Tell whether a request may be sent again after a StaleConnectionError."""
        return may_send_again(self._retry_stale, method, is_idempotent=is_idempotent)

    def try_reserve(self) -> ReservedConnection:
        """Take a connection, an idle one if there is one; see UpstreamEndpoint."""
        return _ReservedConnection(self.idle.take(), self)

    def encode(
        self, template: RequestTemplate, lines: bytes, body: Sequence[bytes | memoryview]
    ) -> Sequence[bytes | memoryview]:
        """Return the parts of a request: its template, the lines of further headers, its body."""
        encoded = self._encoded.get(template)
        if encoded is None:
            encoded = self._encoded.put(template, self._encode_template(template), template.content)
        return (encoded, lines, b"\r\n", *body)

    def resend(self, pending: _ReservedConnection) -> asyncio.Task[None]:
        """Start a task that sends a request again, over a new connection."""
        return self._start_task(self._send_over_new_connection(pending))

    def _start_task(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._senders.add(task)
        task.add_done_callback(self._senders.discard)
        return task

    async def _send_over_new_connection(self, pending: _ReservedConnection) -> None:
        try:
            pending.send_over(await self._connect())
        except Exception as error:
            pending.on_error(error)

    async def close(self) -> None:
        """Close the idle connections; calls in flight close theirs."""
        self.idle.close()
        await self.connections.close()
        if self._senders:
            await asyncio.wait(self._senders)
        if not self._deferrals.size:  # else calls in flight still wait for their bodies
            self._deferrals.close()

    async def _connect(self, is_control: bool = False) -> ServerConnection:
        connection = ServerConnection(
            self.name, self._buffers, self._deferrals, self._open_connections
        )
        taken = self._open_connections.count + self._connecting
        is_large = not is_control and exceeds_share(taken, _SMALL_SHARE)
        share = _LARGE_DESCRIPTOR_SHARE if is_large else MAX_DESCRIPTOR_SHARE
        self._connecting += 1
        try:
            async with asyncio.timeout(self._connect_timeout):
                await self._address.connect(connection, share)
        except BaseException as error:
            connection.detach_transport()
            # A TimeoutError is an OSError; an invalid host name is a UnicodeError.
            if isinstance(error, (OSError, UnicodeError)):
                raise connect_error(error, self.name, self._address) from error
            raise
        finally:
            self._connecting -= 1
        return connection

    def _send(
        self, connection: ServerConnection, request: UpstreamRequest
    ) -> asyncio.Task[None] | None:
        """Write the request; start a task for a body that is streamed or larger than a chunk."""
        body = () if request.body is None else request.body
        if isinstance(body, AsyncIterable):
            head = self._encode_head(request, None)
        else:
            size = sum(map(len, body))
            head = self._encode_head(request, size)
            if size <= _WRITE_CHUNK:
                connection.write(head, *body)
                return None
        chunked = "Content-Length" not in request.headers
        # Not with the first chunk, in a later iteration: the server may have closed by then, which
        # was checked just now.
        connection.write(head)
        return self._start_task(_send_body(connection, body, chunked))

    def _encode_head(self, request: UpstreamRequest, size: int | None) -> bytes:
        """Encode the head of a request; ``size`` is that of a buffered body, None if streamed."""
        headers = list(request.headers.items())
        if "Content-Length" not in request.headers:
            if size is None:
                headers.append(("Transfer-Encoding", "chunked"))
            elif size or request.method not in _BODYLESS_METHODS:
                headers.append(("Content-Length", str(size)))
        return self._encode(request.method, request.target, headers) + b"\r\n"

    def _encode_template(self, template: RequestTemplate) -> bytes:
        return self._encode(template.method, template.target, template.headers)

    def _encode(self, method: str, target: str, headers: Iterable[tuple[str, str]]) -> bytes:
        """Encode the first lines of a request; more headers may follow, then an empty line."""
        lines = list(headers)
        if "host" not in [name.lower() for name, _ in lines]:
            lines.insert(0, ("Host", self._address.authority))
        return encode_head_lines(f"{method} {target} HTTP/1.1", lines)


async def _send_body(
    connection: ServerConnection,
    body: SentBody,
    chunked: bool,
) -> None:
    """Write a body as fast as the server reads it; an error that it raises fails the call."""
    try:
        if isinstance(body, AsyncIterable):
            await _send_streamed(connection, body, chunked)
        else:
            await _send_buffered(connection, body)
    except ConnectionResetError:
        pass  # the connection reports it
    except Exception as error:
        connection.fail(error)


async def _send_streamed(
    connection: ServerConnection, body: AsyncIterable[bytes | memoryview], chunked: bool
) -> None:
    async for data in body:
        if data:
            connection.write_body(data, chunked)
            await connection.drain()
    connection.end_body(chunked)


async def _send_buffered(connection: ServerConnection, body: Sequence[bytes | memoryview]) -> None:
    chunk: list[bytes | memoryview] = []
    size = 0
    for data in body:
        chunk.append(data)
        size += len(data)
        if size >= _WRITE_CHUNK:
            connection.write(*chunk)
            chunk, size = [], 0
            await connection.drain()
            # With a fast server, all chunks would go out in one time slice of the event loop.
            await asyncio.sleep(0)
    connection.write(*chunk)


class _Pending:
    """A request in flight on its connection, or one that waits for a connection."""

    def __init__(self, connection: ServerConnection | None, endpoint: HttpEndpoint) -> None:
        self.connection = connection
        self.sender: asyncio.Task[None] | None = None
        self._endpoint = endpoint
        self._closed = False

    def close(self) -> None:
        """Release the connection, or drop it if the call is not complete."""
        if self._closed:
            return
        self._closed = True
        # A cancelled task keeps its exception, whose frames may refer back here.
        sender, self.sender = self.sender, None
        connection = self.connection
        if connection is not None:
            if (sender is None or sender.done()) and connection.reusable:
                connection.discard_body()
                self._endpoint.connections.release(connection)
                return
            connection.drop()
        if sender is not None:
            sender.cancel()


class _ReservedConnection(_Pending, ReservedConnection):
    """A connection that was idle, or is made for the request.

    It is the HeadReceiver of its response. After a StaleConnectionError, the endpoint sends the
    request again over a new connection, if that may be.
    """

    def __init__(self, connection: ServerConnection | None, endpoint: HttpEndpoint) -> None:
        super().__init__(connection, endpoint)
        self._receiver: ResponseReceiver | None = None
        self._method = ""
        self._parts: Sequence[bytes | memoryview] = ()
        self.waits_for_body = True
        self.waits_for_chunks = False

    def send(
        self,
        template: RequestTemplate,
        lines: bytes,
        body: Sequence[bytes | memoryview],
        receiver: ResponseReceiver,
    ) -> None:
        """Write the request."""
        self._receiver = receiver
        self.waits_for_chunks = receiver.waits_for_chunks
        self._method = template.method
        self._parts = self._endpoint.encode(template, lines, body)
        # Only now: the conversion of the request may have taken a while.
        self.connection = self._endpoint.idle.take_open(self.connection)
        if self.connection is None:
            self._endpoint.connections.wait(self)
        else:
            self._write(self.connection)

    @property
    def head_delay(self) -> float:
        """Return the seconds for which the head was held back; see ReservedConnection."""
        return 0.0 if self.connection is None else self.connection.head_delay

    def close(self) -> None:
        """End the wait for a connection, or release it; see ReservedConnection."""
        if self.connection is None:
            self._endpoint.connections.stop_waiting(self)
        super().close()

    def _write(self, connection: ServerConnection) -> None:
        connection.begin_request(self._method, self)
        if not connection.closed:  # else the receiver has got the error
            connection.write(*self._parts)

    def send_over(self, connection: ServerConnection) -> None:
        """Write the request."""
        self.connection = connection
        self.sender = None
        try:
            self._write(connection)
        except Exception as error:
            self.on_error(error)

    def passes_untouched(self, head: ResponseHead) -> bool:
        assert self._receiver is not None
        return self._receiver.passes_untouched(head)

    def on_complete(self, head: ResponseHead, body: bytes | memoryview) -> bool:
        assert self._receiver is not None
        return self._receiver.on_complete(head, body)

    def on_headers(self, head: ResponseHead) -> None:
        assert self._receiver is not None
        assert self.connection is not None
        self._receiver.on_headers(_HttpResponse(head, self.connection, self))

    def on_error(self, error: Exception) -> None:
        receiver = self._receiver
        assert receiver is not None
        if isinstance(error, StaleConnectionError) and self._endpoint.may_resend(
            self._method, receiver.is_idempotent()
        ):
            self.sender = self._endpoint.resend(self)
            return
        self.sender = None
        receiver.on_error(error)


class _HttpResponse(UpstreamResponse):
    def __init__(self, head: ResponseHead, connection: ServerConnection, pending: _Pending) -> None:
        self.status = head.status
        self.reason = head.reason
        self.headers = head.headers
        self._pending = pending

        self._received = 0
        assert connection.body is not None
        self._body = connection.body
        self._size = connection.chunks_size
        self._head_delay = connection.head_delay

    @property
    def head_delay(self) -> float:
        return self._head_delay

    @property
    def content_length(self) -> int | None:
        return super().content_length if self._size is None else self._size

    @property
    def received_bytes(self) -> int:
        return self._received

    async def read(self) -> bytes | memoryview:
        data = await self._body.read()
        self._received += len(data)
        return data

    def close(self) -> None:
        self._pending.close()
