"""Pools of scripted endpoints, and calls to them."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

from gateway.errors import GatewayError
from gateway.protocol.operations import ModelName
from gateway.upstream.pool.pool import Lease, Pool
from gateway.upstream.transport import UpstreamEndpoint
from tests.support.doubles.streaming import EventLog, ScriptedEndpoint
from tests.support.servers.scripted_server import Connection


def scripted_endpoints(count: int) -> list[UpstreamEndpoint]:
    """Make endpoints at http://0, http://1 and so on."""
    return [ScriptedEndpoint(EventLog(), url=f"http://{number}") for number in range(count)]


def make_pool(count: int, *arguments: Any, **options: Any) -> Pool:
    """Make a pool of ``scripted_endpoints``; further arguments are those of Pool."""
    return Pool(scripted_endpoints(count), *arguments, **options)


@asynccontextmanager
async def running(pool: Pool) -> AsyncIterator[Pool]:
    """Run the background checks of a pool."""
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


class Responding:
    """A server's script: it responds to every request with its current ``data``."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    async def __call__(self, connection: Connection) -> None:
        while True:
            await connection.request()
            await connection.send(self.data)


class ManualClock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def used(lease: Lease) -> Iterator[UpstreamEndpoint]:
    """Use the endpoint of a lease for one call, which fails if the block raises."""
    endpoint = lease.acquire()
    try:
        yield endpoint
    except BaseException as error:
        lease.finish(error)
        raise
    lease.finish(None)


def fail_calls(pool: Pool, number: int, error: Exception | None, times: int = 1) -> None:
    """Make calls to one endpoint that fail with an error, or succeed with None."""
    others = [each for each in pool.endpoints if each is not pool.endpoints[number]]
    for _ in range(times):
        with suppress(GatewayError, ConnectionError), used(pool.lease(others)):
            if error is not None:
                raise error


def _name(model: str) -> ModelName:
    name, _, version = model.partition("/")
    return ModelName(name, version or None)


def leased(pool: Pool, model: str | None = None) -> set[str]:
    """Return the URLs of the endpoints that the next calls lease."""
    urls = set()
    for _ in range(2 * len(pool.members)):
        with used(pool.lease(model=None if model is None else _name(model))) as endpoint:
            urls.add(endpoint.url)
    return urls


def used_endpoints(pool: Pool, model: str | None = None) -> str:
    """Return the numbers of the endpoints that the next eight calls lease."""
    urls = []
    for _ in range(8):
        with used(pool.lease(model=None if model is None else _name(model))) as endpoint:
            urls.append(endpoint.url[-1])
    return "".join(urls)
