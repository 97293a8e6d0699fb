"""A scripted server and client without sockets, for calls of the fast path.

The server notes what it is asked, and answers when the test calls whoever waits; the client notes
what it is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from gateway.http1.head import HeadParser, ResponseHead, encode_head, parse_lines
from gateway.observe.call_record import CallRecord
from gateway.protocol.messages import InferRequest
from gateway.proxy.admission.request_slice import RequestSlice
from gateway.proxy.interfaces import ClientResponse, ResponseTemplate
from gateway.upstream.transport import (
    KEYED_RESPONSE_HEADERS,
    FieldLines,
    HeaderLines,
    RequestTemplate,
    ReservedConnection,
    ResponseReceiver,
    UpstreamEndpoint,
    UpstreamRequest,
    UpstreamResponse,
)
from tests.support.doubles.streaming import URL, EventLog, server_name

_RESPONSE_PARSER = HeadParser(KEYED_RESPONSE_HEADERS, ("content-length",))


def response_head(status: int = 200, headers: dict[str, str] | None = None) -> ResponseHead:
    """Make a head of a response."""
    head = encode_head(f"HTTP/1.1 {status} OK", (headers or {}).items())
    return _RESPONSE_PARSER.parse_response(head, "GET")


@dataclass
class SentRequest:
    """A request under way, in the test's hands."""

    start: RequestTemplate
    headers: HeaderLines
    body: bytes
    receiver: ResponseReceiver

    @property
    def lines(self) -> list[tuple[str, str]]:
        """Return all headers, as they go to the server."""
        return [*self.start.headers, *self.headers]


class _Reserved(ReservedConnection):
    def __init__(self, endpoint: ReadyEndpoint) -> None:
        self._endpoint = endpoint
        self._is_used = False

    def send(
        self,
        template: RequestTemplate,
        lines: bytes,
        body: Sequence[bytes | memoryview],
        receiver: ResponseReceiver,
    ) -> None:
        """Note a request."""
        self._is_used = True
        self._endpoint.log.append(f"server is asked {template.method} {template.target}")
        self._endpoint.asked.append(
            SentRequest(template, parse_lines(lines), b"".join(body), receiver)
        )

    def close(self) -> None:
        """Note that nobody waits any more."""
        self._endpoint.log.append("server is let go" if self._is_used else "connection is not used")


class ReadyEndpoint(UpstreamEndpoint):
    """A server with an idle connection, as long as it is ``ready``."""

    def __init__(self, log: EventLog | None = None, url: str = URL) -> None:
        self.url = url
        self.name = server_name(url)
        self.ready = True
        self.asked: list[SentRequest] = []
        self.log = EventLog() if log is None else log

    def try_reserve(self) -> ReservedConnection | None:
        """Take the connection, if the server is ready."""
        return _Reserved(self) if self.ready else None

    async def send(self, request: UpstreamRequest) -> UpstreamResponse:
        """Fail: nothing takes the streaming path here."""
        raise AssertionError("nothing takes the streaming path here")

    async def close(self) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class DeliveredResponse:
    """A response, as a client was given it."""

    status: int
    reason: str
    headers: HeaderLines
    body: bytes
    last: bool


class ScriptedClient:
    """Notes its responses; the test runs the tasks."""

    def __init__(self, log: EventLog | None = None) -> None:
        self.added_headers: HeaderLines = ()
        self.added_lines = b""
        self.carries_trailers = False
        self.placed: RequestSlice | None = None
        self.infer_request: InferRequest | None = None
        self.record = CallRecord("POST", "/")
        self.responses: list[DeliveredResponse] = []
        self.rest: Callable[[ClientResponse], Awaitable[None]] | None = None
        self.over: Callable[[], None] | None = None
        self.log = EventLog() if log is None else log
        self.fault: Exception | None = None
        """What it fails with when it is to respond, or to go on in a task."""

    def respond(
        self,
        template: ResponseTemplate,
        lines: bytes,
        body: bytes | memoryview,
        *,
        last: bool = False,
        trailers: FieldLines = (),
    ) -> None:
        """Note a response."""
        if self.fault is not None:
            raise self.fault
        self.log.append(f"client gets {template.status}")
        headers = (*template.headers, *parse_lines(lines))
        self.responses.append(
            DeliveredResponse(template.status, template.reason, headers, bytes(body), last)
        )

    def continue_in_task(
        self, rest: Callable[[ClientResponse], Awaitable[None]], over: Callable[[], None]
    ) -> None:
        """Note what a task is to do."""
        if self.fault is not None:
            raise self.fault
        self.log.append("client waits for a task")
        self.rest, self.over = rest, over

    def drop_call(self) -> None:
        """Note that it is cut off."""
        self.log.append("client is cut off")

    def begin_task(self, answer: ClientResponse) -> asyncio.Task[None]:
        """Do it, as a listener does."""
        rest, over = self.rest, self.over
        assert rest is not None
        assert over is not None

        async def serve() -> None:
            await rest(answer)

        task = asyncio.get_running_loop().create_task(serve())
        task.add_done_callback(lambda _: over())
        return task
