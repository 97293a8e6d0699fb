"""Pools of scripted endpoints, and what becomes of those."""

from contextlib import suppress

from gateway.errors import GatewayError
from gateway.protocol.operations import ModelName
from gateway.upstream.pool.pool import Pool
from tests.support.doubles.streaming import EventLog, ScriptedEndpoint


def pool_of(count: int) -> Pool:
    """Make a pool of so many, at http://0 and so on."""
    return Pool([ScriptedEndpoint(EventLog(), url=f"http://{number}") for number in range(count)])


class Times:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def failing(pool: Pool, number: int, error: Exception | None, times: int = 1) -> None:
    """Have an endpoint used, and fail with an error or not."""
    others = [each for each in pool.endpoints if each is not pool.endpoints[number]]
    for _ in range(times):
        with suppress(GatewayError, ConnectionError), pool.lease(others):
            if error is not None:
                raise error


def _name(model: str) -> ModelName:
    name, _, version = model.partition("/")
    return ModelName(name, version or None)


def used_by(pool: Pool, model: str | None = None) -> str:
    """Give the endpoints that answer the next exchanges."""
    urls = []
    for _ in range(8):
        with pool.lease(model=None if model is None else _name(model)) as endpoint:
            urls.append(endpoint.url[-1])
    return "".join(urls)
