"""Interfaces between listeners and the proxy, and the parts of a call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Protocol

from multidict import CIMultiDict, CIMultiDictProxy

from gateway.codec.offload_interface import Offloader
from gateway.codec.policies import JsonPolicies
from gateway.errors import ErrorKind, GatewayError
from gateway.observe.call_record import CallRecord
from gateway.protocol.declared_model import DeclaredModel
from gateway.protocol.dialects import Dialect
from gateway.protocol.operations import Operation
from gateway.protocol.tensors import MAX_TENSORS
from gateway.proxy.admission.concurrency_limit import ConcurrencyLimit
from gateway.proxy.admission.conversion_scheduler import ConversionScheduler
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.admission.memory_budget import MemoryBudget
from gateway.proxy.response_headers import ResponseHeaderPolicy
from gateway.routing.retry import SAFE_RETRIES_ONLY, RetryBudget, RetryPolicy
from gateway.upstream.metadata_cache import MetadataCache
from gateway.upstream.pool.dialect import DialectState
from gateway.upstream.pool.pool import Pool
from gateway.upstream.transport import HeaderLines as HeaderLines
from gateway.upstream.transport import KeyedHead

_MIN_OFFLOADED_BODY = 192 * 1024
"""Bytes of the smallest body of which parts are offloaded."""

_UNBOUNDED = 2**63


class ClientRequest(ABC):
    """A client's request, whose body is still to come.

    ``target`` is the raw request target. ``content_length`` is in bytes: None for a chunked body,
    0 without a body. The router replaces target and headers by those for the server.
    """

    method: str
    target: str
    headers: CIMultiDictProxy[str]
    content_length: int | None
    added_headers: HeaderLines = ()
    """Headers that the gateway adds for the server."""

    @abstractmethod
    async def read(self) -> bytes | memoryview:
        """Return the next piece of the body, empty at its end; raises GatewayError (400)."""

    async def read_within(self, deadline: Deadline) -> bytes | memoryview:
        """Read as ``read`` does, with the client expected.

        Raises GatewayError (408) if the body arrives too slowly.
        """
        deadline.expect_client()
        piece = await self.read()
        deadline.count_received(len(piece))
        return piece


class ClientResponse(ABC):
    """The response to a client, written as it becomes known."""

    started: bool = False
    """Whether the client may have seen a part of it."""
    record: CallRecord
    """The record of the call; a wrapper has that of the response that it wraps."""
    header_policy: ResponseHeaderPolicy | None = None
    """What the call's route changes in the headers, once the route is known.

    The listener's response applies it, so that wrappers need not know it.
    """

    @abstractmethod
    async def start(self, status: int, reason: str, headers: CIMultiDict[str]) -> None:
        """Start the response; without a Content-Length its body is sent chunked."""

    @abstractmethod
    async def write(self, data: bytes | memoryview) -> None:
        """Write a part of the body; waits while the client is slow to read."""

    @abstractmethod
    async def finish(self) -> None:
        """End the response."""

    async def send(self, status: int, reason: str, headers: CIMultiDict[str], body: bytes) -> None:
        """Send a whole response with a body that is fully buffered."""
        headers["Content-Length"] = str(len(body))
        await self.start(status, reason, headers)
        await self.write(body)
        await self.finish()

    @abstractmethod
    def abort(self) -> None:
        """Drop the connection, so that the client sees that the response is incomplete."""


class HeaderField(Protocol):
    """A header of a client's request: ``line`` as it came, with its CRLF."""

    @property
    def name(self) -> str:
        """Return the name as it came."""

    @property
    def lower(self) -> str:
        """Return the name in lower case."""

    @property
    def value(self) -> str:
        """Return the value."""

    @property
    def line(self) -> bytes:
        """Return the whole line."""


class ClientHead(KeyedHead, Protocol):
    """The head of a client's request, with its headers by what the gateway does with them.

    Heads with the same ``key`` are served in the same way. ``noted`` are read from each head. All
    other headers are ``passed`` on as they came.
    """

    @property
    def method(self) -> str:
        """Return the method."""

    @property
    def noted(self) -> Sequence[HeaderField]:
        """Return the headers that are read from each head."""

    @property
    def length(self) -> int | None:
        """Return the bytes of the body, 0 without one, None if it is chunked."""

    @property
    def http_1_0(self) -> bool:
        """Tell whether the client speaks HTTP/1.0."""


STATUSES_WITHOUT_BODY = (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED)


class ResponseTemplate:
    """Status and headers that many responses share; the listener caches the ``encoded`` head.

    ``encoded`` is by whether the connection closes after the response. ``dropped`` are headers, in
    lower case, that the server's Connection header keeps from being passed on.
    """

    __slots__ = ("dropped", "encoded", "has_date", "has_server", "headers", "reason", "status")

    def __init__(
        self,
        status: int,
        reason: str,
        headers: HeaderLines,
        dropped: frozenset[str] = frozenset(),
    ) -> None:
        self.status = status
        self.reason = reason
        self.headers = headers
        self.dropped = dropped
        names = {name.lower() for name, _ in headers}
        self.has_date = "date" in names
        self.has_server = "server" in names
        self.encoded: dict[bool, bytes] = {}


class FastPathClient(Protocol):
    """A client whose request is fully buffered.

    ``added_headers`` and ``record`` are as in ClientRequest and ClientResponse; ``added_lines`` are
    the lines of these headers.
    """

    added_headers: HeaderLines
    added_lines: bytes
    record: CallRecord

    def respond(
        self, template: ResponseTemplate, lines: bytes, body: bytes, *, last: bool = False
    ) -> None:
        """Send the whole response; ``last`` closes the connection after it.

        ``lines`` are headers in addition to those of the template. Content-Length is added.
        """

    def continue_in_task(
        self,
        continuation: Callable[[ClientResponse], Awaitable[None]],
        on_done: Callable[[], None],
    ) -> None:
        """Continue the call in a task; ``on_done`` is called when it has ended, however."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one call: sizes in bytes, times in seconds, rates in bytes a second."""

    max_request_bytes: int
    max_inference_header_bytes: int
    max_json_depth: int
    max_buffered_body_bytes: int
    idle_timeout: float
    request_timeout: float
    min_body_rate: int = 0
    min_body_rate_grace: float = 0.0
    max_decompression_ratio: int = 100
    """How many times larger than received a compressed body may become."""
    max_tensors: int = MAX_TENSORS
    """Inputs of a request, and outputs that it lists."""

    def new_deadline(self, spent: float = 0.0) -> Deadline:
        """Return the deadline of a call that has taken ``spent`` seconds already."""
        return Deadline(
            self.idle_timeout,
            self.request_timeout,
            spent,
            self.min_body_rate,
            self.min_body_rate_grace,
        )


@dataclass(frozen=True, slots=True)
class Upstream:
    """A named group of servers that speak one dialect."""

    name: str
    dialect_state: DialectState
    pool: Pool
    metadata: MetadataCache
    retry_budget: RetryBudget = field(default_factory=RetryBudget)
    concurrency_limit: ConcurrencyLimit | None = None
    required: bool = True
    """Whether the gateway is ready only if this upstream is."""

    @property
    def dialect(self) -> Dialect:
        """Return the dialect; a call that needs it waits first (``wait_for_dialects``).

        Raises GatewayError (503) if it is not known.
        """
        if (dialect := self.dialect_state.dialect) is None:
            raise GatewayError(
                ErrorKind.NOT_READY,
                f"the dialect of upstream '{self.name}' is not known: {self.dialect_state.reason}",
            )
        return dialect


@dataclass(frozen=True, slots=True)
class Destination:
    """Where calls go, and what applies to them on the way."""

    upstream: Upstream
    policies: JsonPolicies
    limits: Limits
    offloader: Offloader | None = None
    """Converts numbers on another core, if there is one."""
    scheduler: ConversionScheduler = field(default_factory=ConversionScheduler)
    memory_budget: MemoryBudget = field(default_factory=lambda: MemoryBudget(_UNBOUNDED))
    retry_policy: RetryPolicy = SAFE_RETRIES_ONLY
    concurrency_limits: tuple[ConcurrencyLimit, ...] = ()
    """A call takes a slot of each while it is at a server, in this order.

    The limit of the upstream comes first, then limits that upstreams share.
    """
    declared_models: Mapping[str, DeclaredModel] = field(default_factory=dict)
    """Models of the settings, by their names at the servers."""

    def offloader_for(self, size: int | None) -> Offloader | None:
        """Return the offloader for a body of ``size`` bytes; None if the body is too small."""
        return None if size is not None and size < _MIN_OFFLOADED_BODY else self.offloader


@dataclass(frozen=True, slots=True)
class Call:
    """One request with its response, and what decides how it is served."""

    request: ClientRequest
    response: ClientResponse
    operation: Operation
    destination: Destination
    deadline: Deadline
