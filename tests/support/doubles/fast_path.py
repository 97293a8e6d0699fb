"""A server and a client without sockets, for exchanges that go the straight way.

The server notes what it is asked, and answers when the test calls whoever waits; the client notes
what it is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from multidict import CIMultiDict, CIMultiDictProxy

from gateway.proxy.interfaces import ClientAnswer
from gateway.upstream.transport import (
    HeaderLines,
    Receiver,
    RequestStart,
    Sent,
    UpstreamEndpoint,
    UpstreamRequest,
    UpstreamResponse,
)
from tests.support.doubles.streaming import URL, Log


@dataclass(frozen=True, eq=False)
class ScriptedHead:
    """The head of a server's answer."""

    status: int = 200
    reason: str = "OK"
    headers: CIMultiDictProxy[str] = field(
        default_factory=lambda: CIMultiDictProxy(CIMultiDict[str]())
    )


def head_of(
    status: int = 200, headers: dict[str, str] | None = None, reason: str = "OK"
) -> ScriptedHead:
    """Make a head of an answer."""
    return ScriptedHead(status, reason, CIMultiDictProxy(CIMultiDict(headers or {})))


@dataclass
class Asked(Sent):
    """A request under way, in the test's hands."""

    start: RequestStart
    headers: HeaderLines
    body: bytes
    receiver: Receiver
    log: Log

    @property
    def lines(self) -> list[tuple[str, str]]:
        """Give all headers, as they go to the server."""
        return [*self.start.headers, *self.headers]

    def close(self) -> None:
        """Note that nobody waits any more."""
        self.log.append("server is let go")


class ReadyEndpoint(UpstreamEndpoint):
    """A server with a connection at hand, as long as it is ``ready``."""

    def __init__(self, log: Log | None = None, url: str = URL) -> None:
        self.url = url
        self.ready = True
        self.asked: list[Asked] = []
        self.log = Log() if log is None else log

    def send_at_once(
        self, start: RequestStart, headers: HeaderLines, body: bytes, receiver: Receiver
    ) -> Sent | None:
        """Note a request."""
        if not self.ready:
            return None
        self.log.append(f"server is asked {start.method} {start.target}")
        self.asked.append(Asked(start, headers, body, receiver, self.log))
        return self.asked[-1]

    async def send(self, request: UpstreamRequest) -> UpstreamResponse:
        """Fail: nothing goes the ordinary way here."""
        raise AssertionError("nothing goes the ordinary way here")

    async def close(self) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class Told:
    """An answer, as a client was given it."""

    status: int
    reason: str
    headers: HeaderLines
    body: bytes
    last: bool


class ScriptedClient:
    """Notes its answers; the test runs the tasks."""

    def __init__(self, log: Log | None = None) -> None:
        self.added: HeaderLines = ()
        self.request_id = ""
        self.told: list[Told] = []
        self.rest: Callable[[ClientAnswer], Awaitable[None]] | None = None
        self.over: Callable[[], None] | None = None
        self.log = Log() if log is None else log

    def answer(
        self, status: int, reason: str, headers: HeaderLines, body: bytes, *, last: bool = False
    ) -> None:
        """Note an answer."""
        self.log.append(f"client gets {status}")
        self.told.append(Told(status, reason, headers, body, last))

    def go_on(
        self, rest: Callable[[ClientAnswer], Awaitable[None]], over: Callable[[], None]
    ) -> None:
        """Note what a task is to do."""
        self.log.append("client waits for a task")
        self.rest, self.over = rest, over

    def begin_task(self, answer: ClientAnswer) -> asyncio.Task[None]:
        """Do it, as a listener does."""
        rest, over = self.rest, self.over
        assert rest is not None
        assert over is not None

        async def serve() -> None:
            await rest(answer)

        task = asyncio.get_running_loop().create_task(serve())
        task.add_done_callback(lambda _: over())
        return task
