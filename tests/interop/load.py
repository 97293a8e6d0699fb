"""A server with models of known speed, and clients that count what they send to them."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import numpy as np

from tests.support.http_messages import http_response, request
from tests.support.inference_messages import binary_response, json_request, metadata
from tests.support.raw_client import RawClient, ReceivedResponse, connect
from tests.support.servers.scripted_server import Connection, ScriptedServer

DELAY, LONG_DELAY = 0.003, 0.16
"""Seconds that calls take at the server; the second is well within a bucket."""
SLOW_CALLS = 20
"""Each call of so many to the model ``mixed`` is a slow one."""
LARGE = 200_000
"""Elements of a body that is worth other threads."""

_SMALL_RESPONSE = binary_response(np.full(4, 0.5, "<f4").tobytes())
_LARGE_RESPONSE = binary_response(np.full(LARGE, 0.5, "<f4").tobytes())
_FAILURE = http_response(b'{"error":"out of memory"}', status="500 Internal Server Error")
_LOST = (asyncio.IncompleteReadError, ConnectionError)


@asynccontextmanager
async def model_server() -> AsyncIterator[str]:
    """Run a server with the models mixed, slow, large and broken; all others are fast."""
    calls = itertools.count(1)

    async def script(connection: Connection) -> None:
        while True:
            head = (await connection.request()).head
            connection.requests.clear()
            await connection.send(await _respond(head.target, calls))

    async with ScriptedServer(script) as server:
        yield server.url


async def _respond(target: str, calls: Iterator[int]) -> bytes:
    if not target.endswith("/infer"):
        return http_response(metadata(-1))
    model = target.split("/")[3]
    is_slow = model == "slow" or (model == "mixed" and next(calls) % SLOW_CALLS == 0)
    await asyncio.sleep(LONG_DELAY if is_slow else DELAY)
    if model == "broken":
        return _FAILURE
    return _LARGE_RESPONSE if model == "large" else _SMALL_RESPONSE


def infer(model: str, count: int = 4, headers: dict[str, str] | None = None) -> bytes:
    """Write a JSON infer request."""
    return request("POST", f"/v2/models/{model}/infer", json_request(*[0.5] * count), headers)


@dataclass(slots=True)
class Ledger:
    """What clients have sent, and what became of it."""

    answered: int = 0
    """Requests that got a response."""
    lost: int = 0
    """Requests whose connection ended before the response was there."""
    seconds: list[float] = field(default_factory=list)
    """How long the load's calls took."""

    async def call(self, client: RawClient, data: bytes) -> ReceivedResponse:
        """Send a request and read the response."""
        try:
            reply = await client.ask(data)
        except _LOST:
            self.lost += 1
            raise
        self.answered += 1
        return reply

    async def load(self, url: str, data: bytes, calls: int, clients: int = 8) -> None:
        """Send a request again and again over several connections, and measure each call."""
        left = iter(range(calls))
        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(self._client(url, data, left))

    async def _client(self, url: str, data: bytes, left: Iterator[int]) -> None:
        while True:
            async with AsyncExitStack() as stack:
                try:
                    client = await stack.enter_async_context(connect(url))
                    for _ in left:
                        start = time.perf_counter()
                        reply = await self.call(client, data)
                        assert reply.status == 200, reply.body
                        self.seconds.append(time.perf_counter() - start)
                except _LOST:
                    continue
                return

    def quantile(self, share: float) -> float:
        """Return the time that a share of the load's calls did not exceed."""
        return sorted(self.seconds)[math.ceil(share * len(self.seconds)) - 1]
