"""What a listener gives an exchange, and what an exchange is told of its surroundings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from multidict import CIMultiDict, CIMultiDictProxy

from gateway.codec.offload import Offloader
from gateway.codec.policies import JsonPolicies
from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.declared_model import DeclaredModel
from gateway.protocol.dialects import Dialect
from gateway.protocol.tensors import MAX_TENSORS
from gateway.proxy.admission.concurrency_limit import ConcurrencyLimit
from gateway.proxy.admission.conversion_scheduler import ConversionScheduler
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.admission.memory_budget import MemoryBudget
from gateway.routing.retry import SAFE_RETRIES_ONLY, RetryBudget, RetryPolicy
from gateway.upstream.metadata_cache import MetadataCache
from gateway.upstream.pool.dialect import DialectState
from gateway.upstream.pool.pool import Pool
from gateway.upstream.transport import HeaderLines as HeaderLines

_WORTH_DIVIDING = 192 * 1024
"""Bytes of a body of which parts are converted elsewhere."""

_UNBOUNDED = 2**63


class ClientRequest(ABC):
    """A client's request, of which the body is still to come.

    ``target`` is the raw request target. ``content_length`` is in bytes, None for a chunked body,
    0 where there is none. Once its rule is known, target and headers are those for the server.
    """

    method: str
    target: str
    headers: CIMultiDictProxy[str]
    content_length: int | None
    added_headers: HeaderLines = ()
    """What the gateway adds to the headers for the server."""

    @abstractmethod
    async def read(self) -> bytes | memoryview:
        """Give what came next of the body, none at its end; raises GatewayError (400) if broken."""

    async def read_within(self, deadline: Deadline) -> bytes | memoryview:
        """Give what came next, as ``read`` does, in the client's turn.

        Raises GatewayError (408) where it comes too slowly.
        """
        deadline.expect_client()
        piece = await self.read()
        deadline.received(len(piece))
        return piece


class ClientResponse(ABC):
    """The answer to a client, written as it becomes known."""

    started: bool = False
    """Whether the client may have seen a part of it."""
    request_id: str = ""
    """That of the request, by which the log and the client name the exchange; may be empty."""

    @abstractmethod
    async def start(self, status: int, reason: str, headers: CIMultiDict[str]) -> None:
        """Begin the answer; without a Content-Length its body goes out chunked."""

    @abstractmethod
    async def write(self, data: bytes | memoryview) -> None:
        """Write a part of the body; waits while the client is slow to read."""

    @abstractmethod
    async def finish(self) -> None:
        """End the answer."""

    async def send(self, status: int, reason: str, headers: CIMultiDict[str], body: bytes) -> None:
        """Give a whole answer, of which the body is at hand."""
        headers["Content-Length"] = str(len(body))
        await self.start(status, reason, headers)
        await self.write(body)
        await self.finish()

    @abstractmethod
    def abort(self) -> None:
        """Drop the connection, so that the client sees that the answer is not whole."""


class FastPathClient(Protocol):
    """A client with a request at hand as a whole, which one call answers.

    ``added`` and ``request_id`` are that request's: see ClientRequest and ClientResponse.
    """

    added_headers: HeaderLines
    request_id: str

    def answer(
        self, status: int, reason: str, headers: HeaderLines, body: bytes, *, last: bool = False
    ) -> None:
        """Give the whole answer; ``last`` closes the connection behind it.

        A Content-Length is added to ``headers`` that have none.
        """

    def continue_in_task(
        self, rest: Callable[[ClientResponse], Awaitable[None]], over: Callable[[], None]
    ) -> None:
        """Have the exchange end in a task; ``over`` is called when that has ended, however."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Caps of one exchange: sizes in bytes, times in seconds, rates in bytes a second."""

    request_bytes: int
    header_bytes: int
    json_depth: int
    spool_bytes: int
    idle_timeout: float
    request_timeout: float
    min_body_rate: int = 0
    min_body_rate_grace: float = 0.0
    max_decompression_ratio: int = 100
    """How many times larger than it came a compressed body may become."""
    max_tensors: int = MAX_TENSORS
    """The most inputs of a request, and the most outputs that it asks for."""

    def deadline(self, spent: float = 0.0) -> Deadline:
        """Make the deadline of an exchange that has taken ``spent`` seconds already."""
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
    """Where an exchange has a place for as long as it is at a server."""
    required: bool = True
    """Whether the gateway is ready only if this is."""

    @property
    def dialect(self) -> Dialect:
        """Give the dialect, for which an exchange that needs it has waited (``until_known``).

        Raises GatewayError (503) where it is not known.
        """
        if (dialect := self.dialect_state.dialect) is None:
            raise GatewayError(
                ErrorKind.NOT_READY,
                f"it is not known how upstream '{self.name}' speaks: {self.dialect_state.reason}",
            )
        return dialect


@dataclass(frozen=True, slots=True)
class Route:
    """Where requests go, and what is done with them on the way."""

    upstream: Upstream
    policies: JsonPolicies
    limits: Limits
    offloader: Offloader | None = None
    """Who converts numbers elsewhere, if anybody does."""
    scheduler: ConversionScheduler = field(default_factory=ConversionScheduler)
    held: MemoryBudget = field(default_factory=lambda: MemoryBudget(_UNBOUNDED))
    """What all routes' exchanges hold of bodies."""
    retry: RetryPolicy = SAFE_RETRIES_ONLY
    concurrency_limits: tuple[ConcurrencyLimit, ...] = ()
    """Where an exchange takes places, in order, for as long as it is at a server: its upstream's
    first, then those that upstreams share."""
    models: Mapping[str, DeclaredModel] = field(default_factory=dict)
    """What is declared of models, by the names that servers know."""

    def offloader_for(self, size: int | None) -> Offloader | None:
        """Give the lender for a body of so many bytes, None where it is too small to be divided."""
        return None if size is not None and size < _WORTH_DIVIDING else self.offloader
