"""An endpoint that speaks HTTP/1.1: it sends requests over pooled connections.

A request takes an idle connection, else the first one that another call releases or that opens.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Sequence
from typing import Final, Literal

from gateway.http1.head import encode_head_lines
from gateway.sizes import CACHED_HEADS
from gateway.system.bounded_cache import BoundedCache
from gateway.system.descriptors import exceeds_share
from gateway.system.sockets.body_stream import BodyStream
from gateway.upstream.address import MAX_DESCRIPTOR_SHARE, ServerAddress
from gateway.upstream.exchange import (
    WRITE_CHUNK,
    ConnectionQueue,
    EndpointOptions,
    Exchange,
    ServerEndpoint,
    WaitingRequest,
    is_repeatable,
    send_body,
)
from gateway.upstream.http.connection import ServerConnection, StaleConnectionError
from gateway.upstream.transport import (
    RequestTemplate,
    ReservedConnection,
    ResponseReceiver,
    SentBody,
    UpstreamRequest,
    UpstreamResponse,
)

_SMALL_SHARE: Final = 1 / 16
_LARGE_DESCRIPTOR_SHARE: Final = 7 / 8
"""An endpoint with more than the small share of all descriptors gets another one for a call only
below this: a server that does not respond must not take those of health checks and of others."""

# RFC 9110, section 8.6: without a body, these requests have no Content-Length.
_BODYLESS_METHODS: Final = frozenset(("GET", "HEAD", "OPTIONS", "TRACE"))


StaleRetry = Literal["safe", "infer", "all"]
"""Which requests are sent again after a close of a reused connection: those of safe methods,
idempotent infer requests as well, or every request."""

# RFC 9110, section 9.2.1. TRACE is not forwarded. PUT and DELETE are idempotent by the RFC, but an
# unknown server need not keep to it.
_SAFE_METHODS: Final = frozenset(("GET", "HEAD", "OPTIONS"))


class HttpConnections(ConnectionQueue[ServerConnection]):
    """Gives each request the first connection that is there; see ConnectionQueue.

    Connections are kept for their next request, each for ``idle_timeout`` seconds. One whose server
    says that it closes earlier is kept for less.
    """

    def __init__(
        self, connect: Callable[[], Awaitable[ServerConnection]], idle_timeout: float
    ) -> None:
        super().__init__(connect)
        self._idle_timeout = idle_timeout
        self._loop = asyncio.get_running_loop()
        self.idle: deque[tuple[float, ServerConnection]] = deque()
        """The idle connections, each with the time at which it is closed."""
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None

    def take(self) -> ServerConnection | None:
        """Return the connection that was used last; None if none is usable.

        Its server may have closed it: see ``take_open``.
        """
        while self.idle:
            expires, connection = self.idle.pop()
            if expires > self._loop.time() and connection.reusable:
                return connection
            connection.drop()
        return None

    def take_open(self, taken: ServerConnection | None = None) -> ServerConnection | None:
        """Return a connection that the server has not closed: the one taken before, or another.

        To be called right before a request is written.
        """
        connection = self.take() if taken is None else taken
        while connection is not None and connection.is_stale():
            connection.drop()
            connection = self.take()
        return connection

    def stop_waiting(self, request: WaitingRequest[ServerConnection]) -> None:
        """Forget a request that is cancelled, and stop a connect that is needless now."""
        super().stop_waiting(request)
        self._cancel_spare()

    def release(self, connection: ServerConnection) -> None:
        """Give a reusable connection to the next request, or keep it idle."""
        if not self.waiting:
            self._put(connection)
        elif connection.is_stale():
            connection.drop()  # each request that waits has a connection on the way
        elif (request := self._take_next()) is not None:
            request.send_over(connection)

    async def close(self) -> None:
        """Close idle connections, and those that become so; stop connects that nobody waits for."""
        self._closed = True
        for _, connection in self.idle:
            connection.drop()
        self.idle.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        await super().close()

    def _add(self, connection: ServerConnection) -> None:
        if (request := self._take_next()) is None:
            connection.set_unused()
            self._put(connection)
        else:
            request.send_over(connection)

    def _put(self, connection: ServerConnection) -> None:
        if self._closed:
            connection.drop()
            return
        lifetime = self._idle_timeout
        if connection.max_idle is not None:
            lifetime = min(lifetime, connection.max_idle)
        expires = self._loop.time() + lifetime
        self.idle.append((expires, connection))
        if self._timer is None:
            self._timer = self._loop.call_at(expires, self._drop_expired)

    def _drop_expired(self) -> None:
        self._timer = None
        now = self._loop.time()
        while self.idle and self.idle[0][0] <= now:
            self.idle.popleft()[1].drop()
        if self.idle:
            self._timer = self._loop.call_at(self.idle[0][0], self._drop_expired)


class HttpEndpoint(ServerEndpoint):
    """An endpoint over HTTP/1.1; see ServerEndpoint.

    ``retry_stale`` says which requests are sent again after a close of a reused connection.
    """

    def __init__(
        self, address: ServerAddress, options: EndpointOptions, retry_stale: StaleRetry = "infer"
    ) -> None:
        super().__init__(address, options)
        self.retry_stale: Final[StaleRetry] = retry_stale
        self.connections = HttpConnections(self.connect, options.idle_timeout)
        self._open: set[ServerConnection] = set()
        self._encoded: BoundedCache[RequestTemplate, bytes] = BoundedCache(CACHED_HEADS)

    async def send(self, request: UpstreamRequest) -> UpstreamResponse:
        """Send a request; see UpstreamEndpoint."""
        return await HttpExchange(self, None).run(request)

    def try_reserve(self) -> ReservedConnection:
        """Take a connection, an idle one if there is one; see UpstreamEndpoint."""
        return HttpExchange(self, self.connections.take())

    def encode(
        self, template: RequestTemplate, lines: bytes, body: Sequence[bytes | memoryview]
    ) -> Sequence[bytes | memoryview]:
        """Return the parts of a request: its template, the lines of further headers, its body."""
        encoded = self._encoded.get(template)
        if encoded is None:
            encoded = self._encode(template.method, template.target, template.headers)
            self._encoded.put(template, encoded, template.content)
        return (encoded, lines, b"\r\n", *body)

    async def close(self) -> None:
        """Close the idle connections; calls in flight close theirs."""
        if self.shared_memory is not None:
            await self.shared_memory.close()
        await self.connections.close()
        await self._wait_for_tasks()
        if not self.deferrals.size:  # else calls in flight still wait for their bodies
            self.deferrals.close()

    async def connect(self, is_control: bool = False) -> ServerConnection:
        """Make a connection; ``is_control`` is that of UpstreamRequest. Raises GatewayError."""
        is_large = not is_control and exceeds_share(len(self._open), _SMALL_SHARE)
        share = _LARGE_DESCRIPTOR_SHARE if is_large else MAX_DESCRIPTOR_SHARE
        connection = ServerConnection(self.name, self._options.buffers, self._open)
        try:
            await self._establish(connection, share)
        except BaseException:
            connection.detach_transport()
            raise
        return connection

    def encode_head(self, request: UpstreamRequest, size: int | None) -> bytes:
        """Encode the head of a request; ``size`` is that of a buffered body, None if streamed."""
        headers = list(request.headers.items())
        if "Content-Length" not in request.headers:
            if size is None:
                headers.append(("Transfer-Encoding", "chunked"))
            elif size or request.method not in _BODYLESS_METHODS:
                headers.append(("Content-Length", str(size)))
        return self._encode(request.method, request.target, headers) + b"\r\n"

    def _encode(self, method: str, target: str, headers: Iterable[tuple[str, str]]) -> bytes:
        """Encode the first lines of a request; more headers may follow, then an empty line."""
        lines = list(headers)
        if "host" not in [name.lower() for name, _ in lines]:
            lines.insert(0, ("Host", self._address.authority))
        return encode_head_lines(f"{method} {target} HTTP/1.1", lines)


class HttpExchange(Exchange):
    """An exchange over a connection that was idle, or one that is made when the request is sent.

    After a StaleConnectionError, the request is sent again over a new connection, if that may be.
    """

    def __init__(self, endpoint: HttpEndpoint, connection: ServerConnection | None) -> None:
        super().__init__(endpoint.deferrals)
        self._endpoint = endpoint
        self._connection = connection
        self._method = ""
        self._parts: Sequence[bytes | memoryview] = ()
        self._rest: SentBody | None = None
        """A body that is streamed, or larger than a chunk."""
        self._chunked = False
        self._is_control = False
        self._closed = False

    def send(
        self,
        template: RequestTemplate,
        lines: bytes,
        body: Sequence[bytes | memoryview],
        receiver: ResponseReceiver,
    ) -> None:
        """Write the request; see ReservedConnection."""
        self.receiver = receiver
        self._method = template.method
        self._parts = self._endpoint.encode(template, lines, body)
        # Only now: the conversion of the request may have taken a while.
        connection = self._connection = self._endpoint.connections.take_open(self._connection)
        if connection is None:
            self._endpoint.connections.wait(self)
        else:
            self._write(connection)

    @property
    def is_waiting(self) -> bool:
        """Whether the request waits for a connection; see ReservedConnection."""
        return self._connection is None

    async def _begin(self, request: UpstreamRequest) -> None:
        endpoint, body = self._endpoint, () if request.body is None else request.body
        self._method, self._is_control = request.method, request.is_control
        size = None if isinstance(body, AsyncIterable) else sum(map(len, body))
        head = endpoint.encode_head(request, size)
        if isinstance(body, AsyncIterable) or (size is not None and size > WRITE_CHUNK):
            # Not with the first chunk, in a later iteration: the server may have closed by then,
            # which was checked just now.
            self._parts = (head,)
            self._rest = body
            self._chunked = size is None and "Content-Length" not in request.headers
        else:
            self._parts = (head, *body)
        connection = endpoint.connections.take_open() or await endpoint.connect(self._is_control)
        self._connection = connection
        self._write(connection)

    def close(self) -> None:
        """Release the connection, or drop it if the call is not complete; end the wait for one."""
        if self._closed:
            return
        self._closed = True
        self.receiver = None
        self.take_held()
        connection, sender = self._connection, self._sender
        if connection is None:
            self._endpoint.connections.stop_waiting(self)
        elif (sender is None or sender.done()) and connection.reusable:
            self._sender = None
            connection.discard_body()
            self._endpoint.connections.release(connection)
        else:
            connection.drop()
        self._stop_sender()

    def send_over(self, connection: ServerConnection) -> None:
        """Write the request; see WaitingRequest."""
        self._sender = None
        try:
            self._write(connection)
        except Exception as error:
            self._fail(error)

    def _write(self, connection: ServerConnection) -> None:
        self._connection = connection
        connection.begin_request(self._method, self)
        if connection.closed:
            return  # the receiver has got the error
        connection.write(self._parts)
        if self._rest is not None:
            connection.chunked = self._chunked
            self._sender = self._endpoint.start_task(send_body(connection, self._rest))

    def _may_resend(self, error: Exception) -> bool:
        """Tell whether a request may be sent again although the server may have executed it.

        RFC 9110, section 9.2.2, forbids more than the policy ``infer``.
        """
        receiver, policy = self.receiver, self._endpoint.retry_stale
        if not isinstance(error, StaleConnectionError) or receiver is None:
            return False
        is_allowed = policy == "all" or self._method in _SAFE_METHODS
        is_allowed = is_allowed or (policy == "infer" and receiver.is_idempotent())
        return is_allowed and is_repeatable(self._rest)

    def _resend(self) -> None:
        self._stop_sender()
        self._sender = self._endpoint.start_task(self._send_over_new_connection())

    async def _send_over_new_connection(self) -> None:
        try:
            self.send_over(await self._endpoint.connect(self._is_control))
        except Exception as error:
            self._sender = None
            self._fail(error)

    def _body(self) -> BodyStream:
        assert self._connection is not None
        assert self._connection.body is not None
        return self._connection.body

    def _keep(self, body: bytes | memoryview) -> None:
        assert self._connection is not None
        self._connection.buffer_body(body)
