"""Interfaces between listeners and the proxy, and the parts of a call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from multidict import CIMultiDict, CIMultiDictProxy

from gateway.http1.head import STATUSES_WITHOUT_BODY, RequestHead
from gateway.observe.call_record import CallRecord
from gateway.protocol.messages import InferRequest
from gateway.protocol.operations import Operation
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.admission.memory_budget import Reservation
from gateway.proxy.admission.request_slice import RequestSlice
from gateway.proxy.destination import Destination, Upstream
from gateway.proxy.headers import ResponseHeaderPolicy
from gateway.proxy.readiness import NOTHING_REQUIRED, Readiness
from gateway.system.sockets.body_stream import RelaySteps
from gateway.upstream.transport import FieldLines as FieldLines
from gateway.upstream.transport import HeaderLines as HeaderLines


class ClientRequest(ABC):
    """A client's request, whose body is still to come.

    ``target`` is the raw request target. ``content_length`` is in bytes: None for a chunked body,
    0 without a body. The router replaces target and headers by those for the server.
    """

    head: RequestHead
    """The head as its client sent it, of requests that a listener got."""
    method: str
    target: str
    headers: CIMultiDictProxy[str]
    content_length: int | None
    added_headers: HeaderLines = ()
    """Headers that the gateway adds for the server."""
    carries_trailers: bool = False
    """Whether its connection carries trailers, as that of HTTP/2 does."""
    placed: RequestSlice | None = None
    """The shared memory that the body is received into, if it is."""
    infer_request: InferRequest | None = None
    """The request, if its body was read before the call began."""

    @abstractmethod
    async def read(self) -> bytes | memoryview:
        """Return the next piece of the body, empty at its end; raises GatewayError (400)."""

    def read_within(self, deadline: Deadline) -> Awaitable[bytes | memoryview]:
        """Read as ``read`` does, with the client expected; see ``Deadline.receive``."""
        return deadline.receive(self)

    async def relay(self, steps: RelaySteps) -> bytes | memoryview:
        """Let each piece pass these steps; see ``BodyStream.relay``."""
        return b""


class ClientResponse(ABC):
    """The response to a client, written as it becomes known."""

    started: bool = False
    """Whether the client may have seen a part of it."""
    is_grpc: bool = False
    """Whether the client is told of errors by a gRPC status."""
    record: CallRecord
    """The record of the call; a wrapper has that of the response that it wraps."""
    header_policy: ResponseHeaderPolicy | None = None
    """What the call's route changes in the headers, once the route is known.

    The listener's response applies it, so that wrappers need not know it.
    """

    can_wait_until_sent: bool = False
    """Whether ``wait_until_sent`` works: else what is written must never change."""

    async def wait_until_sent(self) -> None:
        """Wait until the memory of all that was written may change."""
        raise NotImplementedError

    @property
    def unwrapped(self) -> ClientResponse:
        """Return the response that gets the status of a gRPC call."""
        return self

    @abstractmethod
    async def start(self, status: int, reason: str, headers: CIMultiDict[str]) -> None:
        """Start the response; without a Content-Length its body is sent chunked."""

    @abstractmethod
    async def write(self, data: bytes | memoryview) -> None:
        """Write a part of the body; waits while the client is slow to read."""

    def relay_steps(self) -> RelaySteps:
        """Return the steps that write a part of the body, unless that has to wait; none if none."""
        return ()

    @abstractmethod
    async def finish(self, trailers: HeaderLines = ()) -> None:
        """End the response; trailers are dropped where the connection carries none."""

    async def send(self, status: int, reason: str, headers: CIMultiDict[str], body: bytes) -> None:
        """Send a whole response with a body that is fully buffered."""
        if status not in STATUSES_WITHOUT_BODY:  # RFC 9110, section 8.6
            headers["Content-Length"] = str(len(body))
        await self.start(status, reason, headers)
        await self.write(body)
        await self.finish()

    @abstractmethod
    def abort(self) -> None:
        """Drop the connection, so that the client sees that the response is incomplete."""

    def take_back(self) -> bool:
        """Forget a response that has started if nothing of it was sent; return whether it was so.

        Then an error can be told instead.
        """
        return False


@dataclass(slots=True, eq=False)
class ResponseTemplate:
    """Status and headers that many responses share; the listener caches the ``encoded`` head.

    ``encoded`` is by whether the connection closes after the response; ``fields`` are the same for
    HTTP/2. ``dropped`` are headers, in lower case, that the server's Connection header keeps from
    being passed on. ``states_length`` is False for gRPC, whose responses have no Content-Length.
    """

    status: int
    reason: str
    headers: HeaderLines
    dropped: frozenset[str] = frozenset()
    states_length: bool = True
    has_date: bool = field(init=False)
    has_server: bool = field(init=False)
    encoded: dict[bool, bytes] = field(init=False, default_factory=dict)
    fields: tuple[tuple[bytes, bytes], ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        """Note which headers the listener need not add."""
        names = {name.lower() for name, _ in self.headers}
        self.has_date = "date" in names
        self.has_server = "server" in names


class FastPathClient(Protocol):
    """A client whose request is fully buffered.

    ``added_headers``, ``carries_trailers``, ``placed``, ``infer_request`` and ``record`` are as in
    ClientRequest and ClientResponse; ``added_lines`` are the lines of these headers.
    """

    added_headers: HeaderLines
    added_lines: bytes
    carries_trailers: bool
    placed: RequestSlice | None
    infer_request: InferRequest | None
    record: CallRecord

    def respond(
        self,
        template: ResponseTemplate,
        lines: bytes,
        body: bytes | memoryview,
        *,
        last: bool = False,
        trailers: FieldLines = (),
    ) -> None:
        """Send the whole response; ``last`` closes the connection after it.

        ``lines`` are headers in addition to those of the template. Content-Length is added if the
        template states it. ``trailers`` are for connections that carry them. The status of a gRPC
        call stands in the record already.
        """

    def continue_in_task(
        self, continuation: Callable[[ClientResponse], Awaitable[None]], on_done: Callable[[], None]
    ) -> None:
        """Continue the call in a task; ``on_done`` is called when it has ended, however."""

    def drop_call(self) -> None:
        """Cancel the call, so that the client sees that the response is incomplete."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request with its response, and what decides how it is served."""

    request: ClientRequest
    response: ClientResponse
    operation: Operation
    destination: Destination
    deadline: Deadline
    upstreams: tuple[Upstream, ...] = ()
    """All that serve an operation over several servers."""
    readiness: Readiness = NOTHING_REQUIRED
    """That of the gateway."""

    def reserve(self) -> Reservation:
        """Return a reservation for what is buffered of the call; others may have to make room."""
        return self.destination.memory_budget.reserve(self.response.record.reserved)
