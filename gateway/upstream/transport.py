"""The interface of an endpoint, whatever transport carries its requests."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from multidict import CIMultiDict, CIMultiDictProxy

from gateway.errors import ServerName, bad_request, describe_error
from gateway.http1.head import ResponseHead
from gateway.protocol.dialects import Dialect
from gateway.protocol.grpc.headers import read_error, read_message, read_status
from gateway.protocol.grpc.status import GrpcStatus, http_status, status_name
from gateway.system.shared_memory import Slice
from gateway.system.sockets.body_stream import RelaySteps

FIRST_ERROR_STATUS = 400
"""The first status of an error."""

HeaderLines = tuple[tuple[str, str], ...]
"""Names and values of headers, in order."""

FieldLines = tuple[tuple[bytes, bytes], ...]
"""The same as HTTP/2 has them: names in lower case."""

# RFC 9110, section 7.6.1, and those of older proxies; the listener handles Expect.
HOP_BY_HOP = frozenset(
    (
        "connection",
        "expect",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authentication-info",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)
"""Headers, in lower case, that are for the next host only."""

KEYED_RESPONSE_HEADERS = HOP_BY_HOP | {
    "content-encoding",
    "content-type",
    "date",
    "inference-header-content-length",
    "server",
    "vary",
}
"""Headers of responses that are not just passed on: the key of their heads."""

SentBody = Sequence[bytes | memoryview] | AsyncIterable[bytes | memoryview]
Body = SentBody | None
"""A buffered body, a streamed body, or none.

A streamed body that is not an iterator can be read again from the start.
"""


@dataclass(frozen=True, slots=True)
class UpstreamRequest:
    """A request to a server.

    ``target`` is the raw request target. Over HTTP/1.1, a streamed body without a Content-Length
    header is sent chunked, and a buffered one gets that header; HTTP/2 needs neither.
    """

    method: str
    target: str
    headers: CIMultiDict[str]
    body: Body = None
    waits_for_chunks: bool = False
    """Whether to wait a moment for the rest of a small chunked response: see ResponseReceiver."""
    is_grpc: bool = False
    """Whether it is a gRPC call, whose route was found by what it calls; no header says so."""
    is_idempotent: bool = False
    """Whether a server that executes it twice does no harm: infer of no sequence, or a query.

    Whether the method alone says so is not told here; see ``_may_resend`` in
    ``upstream/http/endpoint.py``.
    """
    is_control: bool = False
    """Whether it is the gateway's own, such as a health check: where descriptors are scarce, it may
    use those that calls to an endpoint with many connections may not."""


def check_lengths(request: UpstreamRequest, dialect: Dialect | None) -> None:
    """Refuse a head for which a server of the dialect would close the connection.

    Raises GatewayError (400) that names the part that is too long.
    """
    longest = None if dialect is None else dialect.max_head_part
    headers = request.headers
    if longest is None or max(map(len, (request.target, *headers, *headers.values()))) <= longest:
        return
    parts = {"the path and query": len(request.target)}
    parts |= {"the name of a header": max(map(len, headers), default=0)}
    parts |= {f"header {name}": len(value) for name, value in headers.items()}
    what, size = next((what, size) for what, size in parts.items() if size > longest)
    raise bad_request(f"{what} has {size} bytes; the server takes at most {longest}")


class UpstreamResponse(ABC):
    """A server's response: the head, and the body to be read."""

    status: int
    reason: str
    headers: CIMultiDictProxy[str]
    head_delay: float = 0.0
    """Seconds between the arrival of the head and this response."""
    lends_memory: bool = False
    """Whether what is read lies in memory that is another call's once this one is over."""

    @property
    def content_length(self) -> int | None:
        """Return the size of the body; None if it is not known yet."""
        length = self.headers.get("Content-Length", "")
        return int(length) if length.isascii() and length.isdigit() else None

    @property
    def final_status(self) -> int:
        """Return the HTTP status that says how the call went, as far as is known.

        For gRPC that is the one that stands for the status of the call. A deadline that has passed
        is the client's, so that it says nothing about the server.
        """
        code = self.grpc_status
        if code is None:
            return self.status
        return http_status(GrpcStatus.CANCELLED if code == GrpcStatus.DEADLINE_EXCEEDED else code)

    @property
    def grpc_status(self) -> int | None:
        """Return the status of a gRPC call; None before its trailers, or without any."""
        return read_status(self.trailers or self.headers.items())

    @property
    def grpc_message(self) -> str:
        """Return the text of the error of a gRPC call; empty if it has none."""
        return read_message(self.trailers or self.headers.items())

    def grpc_error(self, server: str) -> str:
        """Return the text as ``grpc_message``; it names the server if its status is invalid."""
        return read_error(self.trailers or tuple(self.headers.items()), server)

    @property
    def error(self) -> str:
        """Return the status and the message of an error, as far as known; empty for no error."""
        code = self.grpc_status
        if code is None:
            return describe_error(self.status, "") if self.status >= FIRST_ERROR_STATUS else ""
        return describe_error(status_name(code), self.grpc_message) if code else ""

    @property
    def received_bytes(self) -> int:
        """Return the bytes of the body that were read so far."""
        return 0

    @property
    def trailers(self) -> HeaderLines:
        """Return the trailers; they are complete once ``read`` has returned the end."""
        return ()

    @abstractmethod
    async def read(self) -> bytes | memoryview:
        """Return the next chunk of the body, empty at its end.

        Raises GatewayError (502) that names the endpoint if the body is cut short.
        """

    async def relay(self, steps: RelaySteps) -> bytes | memoryview:
        """Let each chunk pass these steps; see ``BodyStream.relay``."""
        return b""

    @abstractmethod
    def close(self) -> None:
        """Return the connection to the pool, or drop it if the body was not read to its end."""


class WrappedResponse(UpstreamResponse):
    """A response that is like another one, but for what a subclass changes."""

    def __init__(self, response: UpstreamResponse) -> None:
        self.status = response.status
        self.reason = response.reason
        self.headers = response.headers
        self.head_delay = response.head_delay
        self._response = response

    @property
    def content_length(self) -> int | None:
        """Return the size of the body; None if it is not known yet."""
        return self._response.content_length

    @property
    def received_bytes(self) -> int:
        """Return the bytes of the body that were read so far."""
        return self._response.received_bytes

    @property
    def trailers(self) -> HeaderLines:
        """Return the trailers."""
        return self._response.trailers

    async def read(self) -> bytes | memoryview:
        """Return the next chunk of the body; see UpstreamResponse."""
        return await self._response.read()

    def close(self) -> None:
        """Close the response."""
        self._response.close()


@contextmanager
def closed_on_error(opened: UpstreamResponse | socket.socket) -> Iterator[None]:
    """Close what was opened if an error keeps it from the caller who would have closed it."""
    try:
        yield
    except BaseException:
        opened.close()
        raise


@dataclass(frozen=True, slots=True, eq=False)
class RequestTemplate:
    """The method, raw target and headers that many requests share.

    Compared by identity, so that an endpoint can cache its encoded form.
    """

    method: str
    target: str
    headers: HeaderLines

    @property
    def content(self) -> tuple[object, ...]:
        """Return what is compared by value."""
        return self.method, self.target, self.headers


class ResponseReceiver(Protocol):
    """Gets the response to a request on a reserved connection: one of these calls."""

    waits_for_chunks: bool
    """Whether to wait a moment for the rest of a small chunked body; events must not be delayed."""

    def is_idempotent(self) -> bool:
        """Tell whether a server may execute the request twice; see UpstreamRequest."""

    def passes_untouched(self, head: ResponseHead) -> bool:
        """Tell whether the body is not converted: then even a large one may be handled at once."""

    def on_complete(
        self, head: ResponseHead, body: bytes | memoryview, trailers: FieldLines = ()
    ) -> bool:
        """Handle a response that arrived completely; False leaves it to ``on_headers``."""

    def on_headers(self, response: UpstreamResponse) -> None:
        """Handle a response whose body is still to come."""

    def on_error(self, error: Exception) -> None:
        """Handle a failure: a GatewayError (502) that names the endpoint."""


class ReservedConnection(ABC):
    """A connection that was taken for one request; perhaps it is made when that is sent."""

    head_delay: float = 0.0
    """Seconds from the arrival of the response's head until the receiver got it."""

    @property
    def is_waiting(self) -> bool:
        """Whether the request waits for a connection: the server has got nothing of it."""
        return False

    @abstractmethod
    def send(
        self,
        template: RequestTemplate,
        lines: bytes,
        body: Sequence[bytes | memoryview],
        receiver: ResponseReceiver,
    ) -> None:
        """Send a buffered request, once.

        ``lines`` are headers in addition to those of the template, each with its CRLF. The receiver
        is called later, once.
        """

    @abstractmethod
    def close(self) -> None:
        """Return the connection to the pool, or drop it if a response is not complete."""


class CallCounter(Protocol):
    """Counts calls that a server works on although nobody waits for them."""

    def count_call(self) -> None:
        """Count a call more."""

    def uncount_call(self) -> None:
        """Count a call less."""


class SharedMemory(Protocol):
    """What an endpoint's server shares with the gateway; see ``SharedMemoryLane``."""

    min_bytes: int

    @property
    def size(self) -> int:
        """The bytes of the region; 0 without one."""

    def start(self) -> None:
        """Register a region, and another one after the server has forgotten it; once."""

    def set_supported(self, is_supported: bool) -> None:
        """Learn from the server's metadata whether it takes a registration."""

    async def close(self) -> None:
        """Unregister the region once no call uses it, or leave it for the next start."""

    def describe(self) -> dict[str, int | str] | None:
        """Describe it for the admin address: bytes of the region, of calls and in quarantine.

        None if there is nothing to tell.
        """

    def take(self, size: int) -> Slice | None:
        """Return a slice; None without a region, and if it has no room."""

    def is_certain(self, model: str) -> bool:
        """Tell whether the outputs of a model have been as its metadata say."""

    def distrust(self, model: str) -> None:
        """Remember that outputs of a model were larger than its metadata say."""

    def forget_region(self, name: str) -> None:
        """Have another region registered, as the server does not know this one."""

    async def send(self, request: UpstreamRequest, slices: Sequence[Slice]) -> UpstreamResponse:
        """Send a request whose tensors are in slices."""

    def reserve(
        self, connection: ReservedConnection, slices: Sequence[Slice]
    ) -> ReservedConnection:
        """Return a connection for a request whose tensors are in slices."""


class UpstreamEndpoint(ABC):
    """One server of an upstream.

    ``name`` is how errors name it. ``own_request_headers`` mark the gateway's own requests, which
    no client has made.
    """

    url: str
    name: ServerName
    own_request_headers: HeaderLines = ()
    speaks_grpc: bool = False
    """Whether it is reached over gRPC alone."""
    shared_memory: SharedMemory | None = None
    """What the server shares with the gateway, if it may."""
    drain_counters: list[CallCounter] | None = None
    """They count calls whose clients are gone, until the server is done with them."""

    @property
    def addresses(self) -> tuple[UpstreamEndpoint, ...]:
        """Return its addresses, each as an endpoint; most endpoints have one."""
        return (self,)

    @property
    def probe_targets(self) -> tuple[UpstreamEndpoint, ...]:
        """Return the addresses that must respond before it counts as reachable again."""
        return (self,)

    def server_for(self, *, is_grpc: bool) -> ServerName:
        """Return how errors of a request name the endpoint; gRPC may have another address."""
        return self.name

    @abstractmethod
    async def send(self, request: UpstreamRequest) -> UpstreamResponse:
        """Send a request and return when the response's headers are there.

        The headers may arrive before the whole body was sent. An error that the body raises is
        passed on and drops the connection, or over HTTP/2 the stream. Raises GatewayError that
        names the endpoint: 503 if the gateway cannot connect or the server refuses the request
        unseen, 502 if the server closes or does not respond in HTTP.
        """

    def after_timeout(self) -> None:
        """Handle that a call, which has released its connection, got no response in time.

        A connection that one call has for itself was dropped with it; one that calls share gets no
        new ones, as its server may be silent for ever.
        """
        return

    def try_reserve(self) -> ReservedConnection | None:
        """Take a connection for a request: an idle one, or one that is made for it.

        None if the transport can only stream.
        """
        return None

    def try_reserve_stream(self) -> ReservedConnection | None:
        """Take a stream for a gRPC call, over a connection that is there; None if there is none."""
        return None

    @abstractmethod
    async def close(self) -> None:
        """Close the idle connections."""
