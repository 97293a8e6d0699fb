"""Clients that send requests without a pause, and count the outcomes."""

from __future__ import annotations

import asyncio
import json
import random
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum

from tests.support.gateway import until
from tests.support.http_messages import Head, chunked, message, read_body, read_head, request
from tests.support.raw_client import RawClient, connect

_FEW, _MANY = 8, 40_000
"""Numbers in a small request, and in a large one of some 300 KB."""
_TIMEOUT = 20.0
"""Seconds after which a test that waits for a response has failed."""
_BROKEN_OFF = (asyncio.IncompleteReadError, ConnectionError, ssl.SSLError)


class Kind(Enum):
    """How a client sends its requests."""

    SMALL = "small"
    LARGE = "large"
    CHUNKED = "chunked"
    """In pieces, without its length."""
    FRESH = "fresh"
    """Each over a new connection."""


MIXED = (*[Kind.SMALL] * 7, Kind.LARGE, Kind.CHUNKED, Kind.CHUNKED, Kind.FRESH, Kind.FRESH)


@dataclass
class ResponseCounts:
    """Outcomes of requests; each request is in one of these counts."""

    ok: int = 0
    """Answered with the numbers of just this request."""
    errors: Counter[int] = field(default_factory=Counter)
    """Answered with a status other than 200."""
    aborted: int = 0
    """The response began, and broke off where the client sees it."""
    unanswered: int = 0
    """The connection was closed or reset in its handshake, or before a byte of the response."""
    wrong: int = 0
    """Answered with something else."""
    refused: int = 0
    """There was no connection to be had, and so no request."""
    messages: Counter[str] = field(default_factory=Counter)
    """What the errors said."""
    servers: Counter[str] = field(default_factory=Counter)
    """Who gave the good responses."""

    @property
    def failures(self) -> Counter[str]:
        """Return all that was not ok: how many of each kind."""
        kinds = ("aborted", "unanswered", "wrong", "refused")
        counts = {kind: getattr(self, kind) for kind in kinds}
        return +Counter(counts | {str(status): count for status, count in self.errors.items()})


class _Client:
    """A client that keeps its connection as long as it may, and never retries."""

    def __init__(
        self, name: str, kind: Kind, url: str, counts: ResponseCounts, pause: float, model: str
    ) -> None:
        self._path = f"/v2/models/{model}/infer"
        self._name = name
        self._kind = kind
        self._url = url
        self._counts = counts
        self._pause = pause
        self._turn = 0
        self.stopping = False

    async def run(self) -> None:
        """Ask until told to stop, or until nobody listens any more."""
        while not self.stopping:
            async with AsyncExitStack() as stack:
                try:
                    client = await stack.enter_async_context(connect(self._url))
                except ConnectionRefusedError:
                    self._counts.refused += 1
                    return
                except _BROKEN_OFF:
                    self._counts.unanswered += 1
                    continue
                while not self.stopping and await self._ask(client):
                    if self._pause:
                        await asyncio.sleep(self._pause * 2 * random.random())

    async def _ask(self, client: RawClient) -> bool:
        """Make one call, and count it; return whether the connection can be used again."""
        if client.reader.at_eof():
            return False  # it was closed between two requests, as it may be
        self._turn += 1
        size = _MANY if self._kind is Kind.LARGE else _FEW
        asked = f"{self._name}/{self._turn}", [self._turn, *range(size)]
        begun = False
        try:
            async with asyncio.timeout(_TIMEOUT):
                with suppress(ConnectionError):  # a response may be there
                    await client.send(*self._request(*asked))
                head = await read_head(client.reader)
                begun = True
                body = await read_body(client.reader, head)
        except _BROKEN_OFF:
            self._counts.aborted += begun
            self._counts.unanswered += not begun
            return False
        self._count(head, body, *asked)
        return head.get("Connection") != "close" and self._kind is not Kind.FRESH

    def _request(self, name: str, numbers: list[int]) -> list[bytes]:
        entry = {"name": "N", "datatype": "INT32", "shape": [len(numbers)], "data": numbers}
        body = json.dumps({"id": name, "inputs": [entry]}).encode()
        if self._kind is not Kind.CHUNKED:
            return [request("POST", self._path, body)]
        headers = {"Host": "gateway", "Transfer-Encoding": "chunked"}
        pieces = chunked(body[:20], body[20:])
        return [message(f"POST {self._path} HTTP/1.1", headers), pieces[:30], pieces[30:]]

    def _count(self, head: Head, body: bytes, name: str, numbers: list[int]) -> None:
        counts = self._counts
        answer = json.loads(body)
        if head.status != 200:
            counts.errors[head.status] += 1
            counts.messages[answer["error"]] += 1
        elif (answer["id"], answer["outputs"][0]["data"]) == (name, numbers):
            counts.ok += 1
            counts.servers[head.get("Server") or ""] += 1
        else:
            counts.wrong += 1


class Load:
    """Running clients, and the outcomes of their requests."""

    def __init__(self, url: str, kinds: tuple[Kind, ...], pause: float, model: str) -> None:
        self.counts = ResponseCounts()
        self._clients = [
            _Client(str(i), kind, url, self.counts, pause, model) for i, kind in enumerate(kinds)
        ]
        self._tasks = [asyncio.create_task(client.run()) for client in self._clients]

    @property
    def clients(self) -> int:
        """Return the number of clients, and so of requests under way."""
        return len(self._clients)

    async def until(self, condition: Callable[[ResponseCounts], object]) -> None:
        """Wait until a condition holds, while the clients go on."""
        await until(lambda: self._errors() or condition(self.counts), _TIMEOUT)
        assert not self._errors(), self._errors()

    async def wait_for_good(self, count: int = 150) -> Counter[str]:
        """Wait for ``count`` more good responses; return the failures meanwhile."""
        ok, failures = self.counts.ok, self.counts.failures
        await self.until(lambda counts: counts.ok >= ok + count)
        return self.counts.failures - failures

    async def until_refused(self) -> ResponseCounts:
        """Wait until each client has found that nobody listens any more."""
        await asyncio.gather(*self._tasks)
        return self.counts

    async def end(self) -> None:
        """Let each client finish what it is at."""
        for client in self._clients:
            client.stopping = True
        await asyncio.gather(*self._tasks)

    async def drop(self) -> None:
        """End the clients wherever they are."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _errors(self) -> list[BaseException]:
        """Return what went wrong in the clients themselves."""
        done = [task for task in self._tasks if task.done() and not task.cancelled()]
        return [error for task in done if (error := task.exception()) is not None]


@asynccontextmanager
async def load_on(
    url: str, kinds: tuple[Kind, ...] = MIXED, pause: float = 0.0, model: str = "echo"
) -> AsyncIterator[Load]:
    """Have clients of these kinds ask a gateway, with a pause between two requests.

    ``pause`` is in seconds, on average.
    """
    load = Load(url, kinds, pause, model)
    try:
        yield load
    finally:
        await load.drop()
