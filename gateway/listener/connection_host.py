"""What the connections of clients and their listener know of each other."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from gateway.errors import RETRY_AFTER, ErrorKind, GatewayError
from gateway.http1.deferrals import BodyDeferrals
from gateway.http1.head import HeadParser, RequestHead
from gateway.listener.messages import ListenerResponse
from gateway.observe.call_record import CallLabels, CallRecord
from gateway.proxy.calls.buffered import BufferedCall
from gateway.proxy.filters.forwarded_headers import ForwardedPolicy
from gateway.proxy.filters.trace_sampling import TraceSampler
from gateway.proxy.interfaces import ClientRequest, ClientResponse, FastPathClient
from gateway.system.buffers import NO_ROOM, Body, BufferAccount
from gateway.system.hangups import HangupWatch

CLIENT_CLOSED = "the client closed the connection"
NO_RECORD = CallRecord("", "")

Continuation = Callable[[ClientResponse], Awaitable[None]]
"""The rest of a call that started on the fast path."""


def stalled_body_error() -> GatewayError:
    """Return the error of a request whose body makes room for others."""
    message = "the body of the request stalled, or came slowly, and "
    return GatewayError(ErrorKind.CLIENT_TIMEOUT, message + NO_ROOM, RETRY_AFTER)


def unread_response_error() -> GatewayError:
    """Return the error of a response that makes room for others as its client does not read it."""
    message = "the client did not read its response, or read it slowly, while others needed the "
    return GatewayError(ErrorKind.OVERLOADED, message + "room (limits.max_buffered_bytes)")


@dataclass(frozen=True, slots=True)
class IdleTimeouts:
    """Seconds after which an idle connection is closed, or a request that goes on is dropped."""

    request_header_timeout: float = 60.0
    """From the first byte of a request's head to its last."""
    keep_alive_timeout: float = 3600.0
    """From a response to the next request."""
    idle_timeout: float = 300.0
    """In which a client must read some of the rest of a response."""
    linger_timeout: float = 10.0
    """In which a client must end what it still sends after a complete response."""


class UnreadCheck:
    """Tells for how long a client has read nothing.

    A closing connection stays open until all is sent, which may be forever.
    """

    def __init__(self) -> None:
        self._unsent = 0
        self._since = 0.0

    def reset(self) -> None:
        """Start anew at the next check."""
        self._unsent = 0

    def seconds(self, unsent: int, now: float) -> float:
        """Return for how many seconds the number of ``unsent`` bytes has not changed."""
        if not unsent or unsent != self._unsent:
            self._unsent, self._since = unsent, now
        return now - self._since


def seconds_stalled(body: Body, now: float) -> float:
    """Return how slow a body is, or a response that is read; 0 if its client is not waited for."""
    progress = body.progress
    return progress.slowness(now) if progress.is_waited_for and body.is_reading() else 0.0


class ListenerConnection(Protocol):
    """A connection of a client, as its listener sees it."""

    transport: asyncio.Transport

    @property
    def is_idle(self) -> bool:
        """Whether it has no call."""

    def seconds_stalled(self, now: float) -> float:
        """Return for how many seconds all its calls have waited for the client, 0 if one has not.

        ``now`` is of ``time.monotonic``. A call whose request is complete waits for its server.
        """

    def drop(self, why: str) -> None:
        """Reset the connection; ``why`` is the error of its calls."""

    def close_if_idle(self) -> None:
        """Close the connection if its client has done nothing for too long."""

    def announce_drain(self) -> None:
        """Tell the client that the gateway drains, if the protocol has a way."""

    def close_for_drain(self, grace: float) -> None:
        """Close the connection if it was idle for ``grace`` seconds; see ``drain``."""


class CallClient(FastPathClient, Protocol):
    """The client of one call: an HTTP/1.1 connection, or a stream of an HTTP/2 connection."""

    @property
    def has_sent_all(self) -> bool:
        """Tell whether its whole request is there."""

    def start_deferred_task(self) -> None:
        """Start the deferred call on the streaming path."""

    def finish_call(self, response: ListenerResponse) -> None:
        """End the call, whose task has ended."""


class ConnectionHost(ABC):
    """What a connection needs of the listener: settings, calls and their observers."""

    draining: bool
    idle_timeouts: IdleTimeouts
    forwarding: ForwardedPolicy
    buffers: BufferAccount
    hangups: HangupWatch
    head_parser: HeadParser
    trace_sampler: TraceSampler | None
    """Decides which calls are traced; None if none is."""
    deferrals: BodyDeferrals

    @abstractmethod
    def add_connection(self, connection: ListenerConnection) -> None:
        """Register a new connection."""

    @abstractmethod
    def remove_connection(self, connection: ListenerConnection) -> None:
        """Unregister a closed connection."""

    @abstractmethod
    def replace_connection(self, old: ListenerConnection, new: ListenerConnection) -> None:
        """Register what serves an open connection from now on."""

    @abstractmethod
    def fast_path_labels(self, head: RequestHead) -> CallLabels | None:
        """Return the labels of a request if it can take the fast path once its body is there."""

    @abstractmethod
    def add_call(self, call: Call, client: CallClient) -> None:
        """Register a call, before it starts."""

    @abstractmethod
    def prepare_fast_path(
        self, client: CallClient, head: RequestHead, body: bytes | memoryview
    ) -> BufferedCall | None:
        """Prepare a fully buffered request for the fast path; None if it must be streamed.

        Nothing is sent yet. The client owns the call: it registers it with ``add_call``, and then
        starts it, or cancels it. The call ends with ``respond`` or ``continue_in_task`` of the
        client.
        """

    @abstractmethod
    def start_task(
        self,
        client: CallClient,
        request: ClientRequest,
        response: ListenerResponse,
        rest: Continuation | None = None,
    ) -> asyncio.Task[None]:
        """Start a task that handles a request, or the rest of a fast-path call.

        It ends with ``finish_call`` of the client.
        """

    @abstractmethod
    def remove_call(self, call: Call) -> None:
        """Unregister an ended call; tasks do so by themselves."""

    @abstractmethod
    def observe_call(self, record: CallRecord) -> None:
        """Give the record of an ended call to the observers."""


class DeferredCall:
    """A call that waits for the rest of its small body: many clients send it after the head."""

    def __init__(self, client: CallClient) -> None:
        self._client = client

    def on_timeout(self) -> None:
        """Start on the streaming path, which reads the body as it arrives."""
        self._client.start_deferred_task()

    def cancel(self) -> None:
        """Do nothing: nothing has started."""


Call = asyncio.Task[None] | BufferedCall | DeferredCall
