"""What HTTP/1.1 and HTTP/2 to a server share: endpoint, exchange, the queue for a connection."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar

from multidict import CIMultiDictProxy

from gateway.errors import GatewayError, ServerName, copy_error
from gateway.http1.deferrals import BodyDeferrals
from gateway.http1.head import ResponseHead
from gateway.system.buffers import BufferAccount
from gateway.system.sockets.body_stream import BodyStream, RelayedChunks, RelaySteps
from gateway.system.sockets.connection import Connection
from gateway.upstream.address import MAX_DESCRIPTOR_SHARE, ServerAddress, connect_error
from gateway.upstream.transport import (
    FieldLines,
    HeaderLines,
    ReservedConnection,
    ResponseReceiver,
    SentBody,
    UpstreamEndpoint,
    UpstreamRequest,
    UpstreamResponse,
)

C = TypeVar("C")
C_contra = TypeVar("C_contra", contravariant=True)

WRITE_CHUNK: Final = 256 * 1024
"""Bytes of a buffered body that are written without a task, in one time slice."""


class PlainHead:
    """The head of a response of which no key is known."""

    reason = ""

    def __init__(self, status: int, headers: CIMultiDictProxy[str]) -> None:
        self.status = status
        self.headers = headers


class BodySink(Protocol):
    """Sends the body of a request."""

    async def send(self, data: bytes | memoryview, *, is_counted: bool = False) -> None:
        """Send a piece as fast as the server reads; ``is_counted`` if it is buffered elsewhere."""

    async def end_sending(self) -> None:
        """End the body."""

    def fail(self, error: Exception) -> None:
        """End the call with an error."""


async def send_body(sink: BodySink, body: SentBody, steps: RelaySteps = ()) -> None:
    """Send a body as fast as the server reads it; an error that it raises fails the call.

    The ``steps`` send a piece, unless that has to wait.
    """
    try:
        if isinstance(body, AsyncIterable):
            chunks = aiter(body)
            async for data in chunks:
                if data:
                    await sink.send(data)
                if steps and isinstance(chunks, RelayedChunks):
                    await chunks.relay(steps)
        else:
            for data in body:
                if data:
                    await sink.send(data, is_counted=True)  # by the call that has it
        await sink.end_sending()
    except ConnectionResetError:
        pass  # the connection or the stream reports it
    except Exception as error:
        sink.fail(error)  # whoever closes the exchange tells the server


class Exchange(ReservedConnection):
    """A request and its response, from the wait for a connection to the end of the call.

    The head of a small response is held back until the body is complete, so that the receiver gets
    both at once: servers often send the one after the other.
    """

    head_delay: float  # declared here, too: an attribute of a class that is not compiled is slow

    def __init__(self, deferrals: BodyDeferrals) -> None:
        self.deferrals = deferrals
        self.receiver: ResponseReceiver | None = None
        """Whoever has yet to get the response, or an error."""
        self._sender: asyncio.Task[None] | None = None
        self.held: ResponseHead | None = None
        """A head that is held back."""
        self._held_at = 0.0
        self.head_delay = 0.0

    async def run(self, request: UpstreamRequest) -> UpstreamResponse:
        """Send a request; return the response once its head is there; see UpstreamEndpoint."""
        waiting = ResponseFuture(request.waits_for_chunks, request.is_idempotent)
        self.receiver = waiting
        try:
            await self._begin(request)
            return await waiting.response
        except BaseException:
            self.close()
            forget(waiting.response)
            raise

    def hold(self, head: ResponseHead, *, is_complete: bool = False) -> None:
        """Hold a head back for a moment; ``is_complete`` if ``complete`` follows at once."""
        self.held = head
        self._held_at = time.perf_counter()
        if not is_complete:
            self.deferrals.add(self, None)

    def take_held(self) -> ResponseHead | None:
        """Hold the head back no longer; return it."""
        head, self.held = self.held, None
        if head is not None:
            self.deferrals.remove(self)
            self.head_delay = time.perf_counter() - self._held_at
        return head

    def on_timeout(self) -> None:
        """Give the receiver a response whose body is not complete soon, or is large."""
        head = self.take_held()
        if head is not None:
            self.hand_over(head)

    def hand_over(self, head: ResponseHead | PlainHead) -> None:
        """Let the receiver read the body itself."""
        receiver, self.receiver = self.receiver, None
        if receiver is not None:
            receiver.on_headers(ServerResponse(self, head, self._body()))

    def complete(
        self, head: ResponseHead, body: bytes | memoryview, trailers: FieldLines = ()
    ) -> None:
        """Give the receiver a complete response, or let it read the body."""
        receiver, self.receiver = self.receiver, None
        if receiver is not None and not receiver.on_complete(head, body, trailers):
            self._keep(body)
            size = len(body) if head.chunked else None
            receiver.on_headers(ServerResponse(self, head, self._body(), size))

    def on_error(self, error: Exception) -> None:
        """Send the request again if that may be; else tell the receiver, if it has no response."""
        self.take_held()
        if self.receiver is None:
            return
        if self._may_resend(error):
            self._resend()
        else:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        receiver, self.receiver = self.receiver, None
        if receiver is not None:
            receiver.on_error(error)

    def _stop_sender(self) -> None:
        # A cancelled task keeps its exception, whose frames may refer back here.
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.cancel()

    @abstractmethod
    async def _begin(self, request: UpstreamRequest) -> None:
        """Send the request, or wait for a connection."""

    @abstractmethod
    def _may_resend(self, error: Exception) -> bool:
        """Tell whether the request may be sent again after this error."""

    @abstractmethod
    def _resend(self) -> None:
        """Send the request again."""

    @abstractmethod
    def _body(self) -> BodyStream:
        """Return the body of the response, to be read."""

    def _keep(self, body: bytes | memoryview) -> None:
        """Keep a complete body for its reader."""


class ServerResponse(UpstreamResponse):
    """A response whose body is read as it arrives; it is closed with its exchange.

    ``size`` is that of a chunked body that is complete.
    """

    def __init__(
        self,
        exchange: Exchange,
        head: ResponseHead | PlainHead,
        body: BodyStream,
        size: int | None = None,
    ) -> None:
        self.status = head.status
        self.reason = head.reason
        self.headers = head.headers
        self._exchange = exchange
        self._body = body
        self._size = size
        self.head_delay = exchange.head_delay

    @property
    def content_length(self) -> int | None:
        """Return the size of the body; None if it is not known yet."""
        return super().content_length if self._size is None else self._size

    @property
    def received_bytes(self) -> int:
        """Return the bytes of the body that were read so far."""
        return self._body.read_bytes

    @property
    def trailers(self) -> HeaderLines:
        """Return the trailers; they are complete once ``read`` has returned the end."""
        return tuple(decode_fields(self._body.trailers))

    def read(self) -> Coroutine[Any, Any, bytes | memoryview]:
        """Return the next piece of the body; see UpstreamResponse."""
        return self._body.read()

    def relay(self, steps: RelaySteps) -> Coroutine[Any, Any, bytes | memoryview]:
        """Let each piece pass these steps; see UpstreamResponse."""
        return self._body.relay(steps)

    def close(self) -> None:
        """Release the connection or the stream; see UpstreamResponse."""
        self._exchange.close()


def decode_fields(fields: Sequence[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    """Return headers of HTTP/2 as text."""
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in fields]


class ResponseFuture:
    """A ResponseReceiver that makes a future of a response, whose body is read as it arrives."""

    def __init__(self, waits_for_chunks: bool = False, is_idempotent: bool = False) -> None:
        self.response: asyncio.Future[UpstreamResponse]
        self.response = asyncio.get_running_loop().create_future()
        self.waits_for_chunks = waits_for_chunks
        self._is_idempotent = is_idempotent

    def is_idempotent(self) -> bool:
        """Tell whether a server may execute the request twice."""
        return self._is_idempotent

    def passes_untouched(self, head: ResponseHead) -> bool:
        """Tell that the reader may convert it as it arrives."""
        return False

    def on_complete(
        self, head: ResponseHead, body: bytes | memoryview, trailers: FieldLines = ()
    ) -> bool:
        """Leave a complete response to ``on_headers``."""
        return False

    def on_headers(self, response: UpstreamResponse) -> None:
        """Set the response, or close it if nobody waits."""
        if self.response.done():  # cancelled
            response.close()
        else:
            self.response.set_result(response)

    def on_error(self, error: Exception) -> None:
        """Set an error."""
        if not self.response.done():
            self.response.set_exception(error)


@dataclass(frozen=True, slots=True)
class EndpointOptions:
    """What the endpoints of an upstream have in common; times are in seconds."""

    connect_timeout: float
    """For DNS, TCP and TLS together."""
    idle_timeout: float = 4.0
    """How long a connection waits for its next request."""
    buffers: BufferAccount | None = None
    """Counts what the connections buffer."""
    own_request_headers: HeaderLines = ()
    public_name: str | None = None
    """How errors for clients name the endpoint; None for its URL."""


class ServerEndpoint(UpstreamEndpoint):
    """An endpoint at an address."""

    def __init__(self, address: ServerAddress, options: EndpointOptions) -> None:
        self.url = address.url
        self.name = ServerName(address.url, options.public_name or address.url)
        self.own_request_headers = options.own_request_headers
        self.deferrals = BodyDeferrals()
        """Ends the waits for the rest of small responses."""
        self._address = address
        self._options = options
        self._senders: set[asyncio.Task[None]] = set()

    def start_task(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Start a task that ``close`` waits for."""
        task = asyncio.create_task(work)
        self._senders.add(task)
        task.add_done_callback(self._senders.discard)
        return task

    async def _wait_for_tasks(self) -> None:
        if self._senders:
            await asyncio.wait(self._senders)

    async def _establish(
        self, connection: Connection, descriptor_share: float = MAX_DESCRIPTOR_SHARE
    ) -> None:
        """Connect; raises GatewayError. The caller drops the connection then, or if cancelled."""
        try:
            async with asyncio.timeout(self._options.connect_timeout):
                await self._address.connect(connection, descriptor_share)
                await self._until_ready(connection)
        # A TimeoutError is an OSError; an invalid host name is a UnicodeError.
        except (OSError, UnicodeError) as error:
            raise self._connect_error(connection, error) from error

    def _connect_error(self, connection: Connection, error: Exception) -> GatewayError:
        return connect_error(error, self.name, self._address)

    async def _until_ready(self, connection: Connection) -> None:
        """Wait until a connection can be used."""


def is_repeatable(body: SentBody | None) -> bool:
    """Tell whether a body can be sent from its start: the first chunks of an iterator are gone."""
    return not isinstance(body, AsyncIterator)


def forget(future: asyncio.Future[Any]) -> None:
    """Cancel a future that nobody waits for, or whose error nobody needs to see."""
    if not future.cancel() and not future.cancelled():
        future.exception()


class WaitingRequest(Protocol[C_contra]):
    """A request that waits for a connection; it gets one of these calls."""

    def send_over(self, connection: C_contra) -> None:
        """Send the request."""

    def on_error(self, error: Exception) -> None:
        """Handle that no connection could be made."""


class ConnectionQueue(ABC, Generic[C]):
    """Gives waiting requests, in their order, what becomes free, and connects for them.

    ``connect`` makes a connection. Its error goes to as many requests as the connection would have
    served, but only to those that came before it began, and that have no other connection on the
    way: for later ones, another connect begins.
    """

    def __init__(self, connect: Callable[[], Awaitable[C]]) -> None:
        self._connect = connect
        self.waiting: dict[WaitingRequest[C], float] = {}
        """The requests that wait, each with its time."""
        self.connecting: dict[asyncio.Task[None], None] = {}
        """The connects on their way, in their order."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._streams = 1
        """Requests that one connection is expected to carry at a time."""

    def wait(self, request: WaitingRequest[C]) -> None:
        """Give a request what becomes free first; connect if that is needed."""
        self.waiting[request] = time.monotonic()
        self._grow()

    def stop_waiting(self, request: WaitingRequest[C]) -> None:
        """Forget a request that is cancelled."""
        self.waiting.pop(request, None)

    async def close(self) -> None:
        """Stop the connects that no request waits for, and wait for the others."""
        self._cancel_spare()
        if self._tasks:
            await asyncio.wait(self._tasks)

    @abstractmethod
    def _add(self, connection: C) -> None:
        """Use a new connection; raises the error of those that wait for it if it is useless."""

    def _max_connects(self) -> int:
        """Return how many connections may be on the way."""
        return len(self.waiting)

    def _has_other(self) -> bool:
        """Tell whether requests can wait for what becomes free, although a connect has failed."""
        return False

    @property
    def _wanted(self) -> int:
        """The connections that should be on the way."""
        return min(-(-len(self.waiting) // self._streams), self._max_connects())

    def _take_next(self) -> WaitingRequest[C] | None:
        for request in self.waiting:
            del self.waiting[request]
            return request
        return None

    def _grow(self) -> None:
        while len(self.connecting) < self._wanted:
            task = asyncio.create_task(self._connect_for_waiting())
            self.connecting[task] = None
            self._tasks.add(task)
            task.add_done_callback(self._end_connect)

    def _cancel_spare(self) -> None:
        while len(self.connecting) > self._wanted:
            newest, _ = self.connecting.popitem()
            newest.cancel()

    def _end_connect(self, task: asyncio.Task[None]) -> None:
        """Fail the requests that wait for a connect which has failed unexpectedly."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._fail_waiting(error, time.monotonic())

    async def _connect_for_waiting(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        began = time.monotonic()
        try:
            if len(self.connecting) > self._wanted:
                return  # something became free first
            connection = await self._connect()
            self.connecting.pop(task, None)
            self._add(connection)
        except Exception as error:
            self.connecting.pop(task, None)
            self._fail_waiting(error, began)
        finally:
            self.connecting.pop(task, None)

    def _fail_waiting(self, error: Exception, began: float) -> None:
        if self._has_other() or len(self.connecting) >= self._wanted:
            return
        for request, since in tuple(self.waiting.items())[: self._streams]:
            if since <= began:
                del self.waiting[request]
                request.on_error(copy_error(error) if isinstance(error, GatewayError) else error)
        self._grow()
