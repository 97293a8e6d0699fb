"""HTTP/1.1 to one endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Sequence
from functools import lru_cache

from gateway.errors import RETRY_AFTER, ErrorKind, GatewayError, strip_tracebacks
from gateway.http1.head import ResponseHead, encode_head_lines
from gateway.sizes import CACHED_HEADS
from gateway.system.buffers import BufferAccount
from gateway.upstream.http.address import ServerAddress
from gateway.upstream.http.connect_errors import describe_connect_error, is_local_exhaustion
from gateway.upstream.http.connection import ServerConnection, StaleConnectionError
from gateway.upstream.http.idle_connections import IdleConnections
from gateway.upstream.transport import (
    HeaderLines,
    PendingRequest,
    RequestTemplate,
    ResponseReceiver,
    UpstreamEndpoint,
    UpstreamRequest,
    UpstreamResponse,
)

_WRITE = 256 * 1024
"""Bytes of a body at hand that are written in one turn of the event loop."""


# RFC 9110, section 8.6: a request of these has no Content-Length where it has no body.
_WITHOUT_BODY = frozenset(("GET", "HEAD", "OPTIONS", "TRACE"))


class HttpEndpoint(UpstreamEndpoint):
    """An endpoint at an address.

    ``connect_timeout`` is for all that connecting takes, ``keep_alive`` for a connection that waits
    for its next request, both in seconds. ``buffers`` counts what its connections buffer.
    """

    def __init__(
        self,
        address: ServerAddress,
        connect_timeout: float,
        keep_alive: float = 4.0,
        buffers: BufferAccount | None = None,
        own_request_headers: HeaderLines = (),
    ) -> None:
        self.url = address.url
        self.own_request_headers = own_request_headers
        self._address = address
        self._connect_time = connect_timeout
        self._buffers = buffers
        self._idle = IdleConnections(keep_alive)
        self._senders: set[asyncio.Task[None]] = set()
        self._written = lru_cache(maxsize=CACHED_HEADS)(self._write_start)

    async def send(self, request: UpstreamRequest) -> UpstreamResponse:
        """Send a request; see UpstreamEndpoint."""
        connection = self._idle.take()
        if connection is not None:
            try:
                return await self._exchange(connection, request)
            except StaleConnectionError as error:
                if isinstance(request.body, AsyncIterator):
                    raise  # what was taken of it is gone
                strip_tracebacks(error)
        return await self._exchange(await self._connect(), request)

    async def _exchange(
        self, connection: ServerConnection, request: UpstreamRequest
    ) -> UpstreamResponse:
        answered = connection.expect_response(request.method)
        exchange = _Sent(connection, self._idle)
        try:
            exchange.sender = self._send(connection, request)
            return _HttpResponse(await answered, exchange)
        except BaseException:
            exchange.close()
            raise

    def try_send_nowait(
        self, start: RequestTemplate, headers: HeaderLines, body: bytes, receiver: ResponseReceiver
    ) -> PendingRequest | None:
        """Send a request over a connection that is at hand; see UpstreamEndpoint."""
        connection = self._idle.take()
        if connection is None:
            return None
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers])
        text = b"".join((self._written(start), lines.encode("latin-1"), b"\r\n", body))
        sent = _SentAtOnce(connection, self._idle, receiver, self._send_again)
        sent.send(start.method, text)
        return sent

    def _send_again(self, sent: _SentAtOnce) -> asyncio.Task[None]:
        """Have a task send a request over a new connection."""
        task = asyncio.create_task(self._send_anew(sent))
        self._senders.add(task)
        task.add_done_callback(self._senders.discard)
        return task

    async def _send_anew(self, sent: _SentAtOnce) -> None:
        try:
            sent.move_to(await self._connect())
        except GatewayError as error:
            sent.on_error(error)

    async def close(self) -> None:
        """Close the connections that wait; those in use belong to their exchanges."""
        self._idle.close()
        await asyncio.gather(*self._senders, return_exceptions=True)

    async def _connect(self) -> ServerConnection:
        loop = asyncio.get_running_loop()
        connection = ServerConnection(self.url, self._buffers)
        tls = self._address.tls
        server_name = None if tls is None else tls.server_name
        try:
            async with asyncio.timeout(self._connect_time):
                await loop.create_connection(
                    lambda: connection,
                    sock=await self._address.connect(),
                    ssl=None if tls is None else tls.context,
                    server_hostname=server_name,
                    # Left alone, the event loop allows a minute; the time above is shorter, or not.
                    ssl_handshake_timeout=None if tls is None else self._connect_time,
                )
        except BaseException as error:
            connection.detach_transport()
            # A TimeoutError is an OSError; a host name that cannot be one is a UnicodeError.
            if isinstance(error, (OSError, UnicodeError)):
                raise self._not_connected(
                    error, describe_connect_error(error, server_name)
                ) from error
            raise
        return connection

    def _not_connected(self, error: Exception, reason: str) -> GatewayError:
        if not is_local_exhaustion(error):
            return GatewayError(ErrorKind.UNREACHABLE, f"cannot connect to {self.url}: {reason}")
        # It says nothing of the server. Another one may have a connection at hand.
        message = f"the gateway has no means to connect to {self.url}: {reason}"
        return GatewayError(ErrorKind.EXHAUSTED, message, retry_after=RETRY_AFTER)

    def _send(
        self, connection: ServerConnection, request: UpstreamRequest
    ) -> asyncio.Task[None] | None:
        """Write the request; what does not fit into one write is left to a task."""
        body = () if request.body is None else request.body
        if isinstance(body, AsyncIterable):
            head = self._head(request, None)
        else:
            size = sum(map(len, body))
            head = self._head(request, size)
            if size <= _WRITE:
                connection.transport.write(b"".join((head, *body)))
                return None
        chunked = "Content-Length" not in request.headers
        sender = asyncio.create_task(_send_body(connection, body, chunked))
        self._senders.add(sender)
        sender.add_done_callback(self._senders.discard)
        # Behind the task, of which the first turn comes before: what it has at hand goes with it.
        connection.buffer_write(head)
        return sender

    def _head(self, request: UpstreamRequest, size: int | None) -> bytes:
        """Write the head of a request whose body has this size; None if it is to come."""
        headers = list(request.headers.items())
        if "Content-Length" not in request.headers:
            if size is None:
                headers.append(("Transfer-Encoding", "chunked"))
            elif size or request.method not in _WITHOUT_BODY:
                headers.append(("Content-Length", str(size)))
        return self._write(request.method, request.target, headers) + b"\r\n"

    def _write_start(self, start: RequestTemplate) -> bytes:
        return self._write(start.method, start.target, start.headers)

    def _write(self, method: str, target: str, headers: Iterable[tuple[str, str]]) -> bytes:
        """Write the first lines of a request; more may follow, and then an empty one."""
        lines = list(headers)
        if "host" not in [name.lower() for name, _ in lines]:
            lines.insert(0, ("Host", self._address.authority))
        return encode_head_lines(f"{method} {target} HTTP/1.1", lines)


async def _send_body(
    connection: ServerConnection,
    body: Sequence[bytes | memoryview] | AsyncIterable[bytes | memoryview],
    chunked: bool,
) -> None:
    """Write a body as fast as the server reads it; an error that it raises ends the exchange."""
    try:
        if isinstance(body, AsyncIterable):
            await _send_as_it_comes(connection, body, chunked)
        else:
            await _send_at_hand(connection, body)
    except ConnectionResetError:
        pass  # the answer, or that there is none, says it all
    except Exception as error:
        connection.fail(error)


async def _send_as_it_comes(
    connection: ServerConnection, body: AsyncIterable[bytes | memoryview], chunked: bool
) -> None:
    async for data in body:
        if data:
            connection.write_body(data, chunked)
            await connection.drain()
    connection.end_body(chunked)


async def _send_at_hand(connection: ServerConnection, body: Sequence[bytes | memoryview]) -> None:
    held: list[bytes | memoryview] = []
    size = 0
    for data in body:
        held.append(data)
        size += len(data)
        if size >= _WRITE:
            connection.write(*held)
            held, size = [], 0
            await connection.drain()
            # A server that reads quickly would have it all go out in one turn of the event loop.
            await asyncio.sleep(0)
    connection.write(*held)


class _Sent(PendingRequest):
    """A request under way on its connection."""

    def __init__(self, connection: ServerConnection, idle: IdleConnections) -> None:
        self.connection = connection
        self.sender: asyncio.Task[None] | None = None
        self._idle = idle
        self._closed = False

    def close(self) -> None:
        """Keep the connection, or drop it where the exchange is not at its end."""
        if self._closed:
            return
        self._closed = True
        # A task that is cancelled keeps the exception, whose frames may lead back here.
        sender, self.sender = self.sender, None
        if (sender is None or sender.done()) and self.connection.reusable:
            self.connection.discard_body()
            self._idle.put(self.connection)
            return
        self.connection.drop()
        if sender is not None:
            sender.cancel()


class _SentAtOnce(_Sent):
    """A request whose answer a receiver is called with; ``send_again`` finds a new connection.

    It is the HeadReceiver of its connection.
    """

    def __init__(
        self,
        connection: ServerConnection,
        idle: IdleConnections,
        receiver: ResponseReceiver,
        send_again: Callable[[_SentAtOnce], asyncio.Task[None]],
    ) -> None:
        super().__init__(connection, idle)
        self._receiver = receiver
        self._send_again = send_again
        self._method = ""
        self._text = b""

    def send(self, method: str, text: bytes) -> None:
        """Write the request."""
        self._method, self._text = method, text
        self.connection.begin_request(method, self)
        self.connection.transport.write(text)

    def move_to(self, connection: ServerConnection) -> None:
        """Write the request again, to a new connection."""
        self.connection = connection
        self.sender = None
        self.send(self._method, self._text)

    def on_complete(self, head: ResponseHead, body: bytes | memoryview) -> None:
        self._receiver.on_complete(head, body)

    def on_headers(self, head: ResponseHead) -> None:
        self._receiver.on_headers(_HttpResponse(head, self))

    def on_error(self, error: Exception) -> None:
        if isinstance(error, StaleConnectionError):
            self.sender = self._send_again(self)
        else:
            self.sender = None
            self._receiver.on_error(error)


class _HttpResponse(UpstreamResponse):
    def __init__(self, head: ResponseHead, sent: _Sent) -> None:
        self.status = head.status
        self.reason = head.reason
        self.headers = head.headers
        self._sent = sent

        body = sent.connection.body
        assert body is not None
        self._body = body

    async def read(self) -> bytes | memoryview:
        return await self._body.read()

    def close(self) -> None:
        self._sent.close()
