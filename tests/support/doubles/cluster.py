"""Several scripted servers without sockets, and requests to all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace

from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.dialects import TRITON, Dialect
from gateway.proxy.calls.dispatch import handle_request
from gateway.proxy.calls.planner import Planner
from gateway.proxy.destination import Destination, Limits
from gateway.proxy.router import Route, Router
from gateway.routing.matcher import Match
from gateway.upstream.pool.checks import ModelDiscovery, PoolSupervisor
from gateway.upstream.pool.dialect import DialectState
from gateway.upstream.shared_memory import SharedMemoryLanes
from tests.support.doubles.streaming import (
    LIMITS,
    BodyStep,
    EventLog,
    ScriptedClientResponse,
    ScriptedEndpoint,
    ScriptedRequest,
    ScriptedUpstreamResponse,
    make_destination,
    server_name,
)

ServerStep = ScriptedUpstreamResponse | BaseException | asyncio.Event

A, B, C, D = (f"http://{name}:8000" for name in "abcd")


class UndetectedDialectState(DialectState):
    """How servers speak that tell it once somebody waits for it, unless they cannot be asked.

    ``fault`` is what that fails with, or what it waits for.
    """

    def __init__(self, dialect: Dialect, fault: BaseException | asyncio.Event | None) -> None:
        super().__init__(None, "it was not asked")
        self._told = dialect
        self._fault = fault

    async def wait_until_known(self) -> None:
        if isinstance(self._fault, BaseException):
            raise self._fault
        if self._fault is not None:
            await self._fault.wait()
        self.dialect = self._told


def scripted_response(
    body: bytes, status: int = 200, headers: Mapping[str, str] | None = None
) -> ServerStep:
    """Make a response."""
    return ScriptedUpstreamResponse(status, headers, [body])


def connect_error(url: str) -> GatewayError:
    """Return the error of an endpoint where nobody listens."""
    message = f"cannot connect to {url}: Connection refused"
    return GatewayError(ErrorKind.UNREACHABLE, message, server=server_name(url))


Turns = ServerStep | tuple[ServerStep, ...]


def servers(**turns: Turns) -> list[ScriptedEndpoint]:
    """Return a server for each name, at http://NAME:8000, with its script; they share a log."""
    log = EventLog()
    return [
        ScriptedEndpoint(
            log, *(script if isinstance(script, tuple) else (script,)), url=f"http://{name}:8000"
        )
        for name, script in turns.items()
    ]


def weighted_destinations(*destinations: Destination) -> Router:
    """Make the routes where all requests choose from these by equal weights."""
    return Router([Route(Match(), destinations, (1,) * len(destinations))], lambda: 0.0)


async def send_request(
    destinations: Router,
    method: str,
    target: str,
    *body: BodyStep,
    headers: Mapping[str, str] | None = None,
    log: EventLog | None = None,
) -> ScriptedClientResponse:
    """Send a request, and return its response."""
    log = EventLog() if log is None else log
    answer = ScriptedClientResponse(log)
    request = ScriptedRequest(log, method, target, headers, body)
    await handle_request(request, answer, Planner(destinations))
    return answer


def received_requests(*endpoints: ScriptedEndpoint) -> list[list[str]]:
    """Return what each server was asked."""
    return [[f"{each.method} {each.target}" for each in server.requests] for server in endpoints]


@dataclass(frozen=True)
class Cluster:
    """Servers, and the routes to them."""

    endpoints: list[ScriptedEndpoint]
    destinations: tuple[Destination, ...]
    router: Router

    async def ask(
        self, method: str, target: str, *body: BodyStep, headers: Mapping[str, str] | None = None
    ) -> ScriptedClientResponse:
        """Send a request, and return its response; no lease of an endpoint may be left."""
        response = await send_request(
            self.router, method, target, *body, headers=headers, log=self.log
        )
        assert self.outstanding == 0
        return response

    @property
    def log(self) -> EventLog:
        """Return the log of the servers, and of the clients that have asked."""
        return self.endpoints[0]._log

    @property
    def received(self) -> list[list[str]]:
        """Return what each server was asked."""
        return received_requests(*self.endpoints)

    @property
    def outstanding(self) -> int:
        """Return the number of leases of all endpoints."""
        return sum(sum(each.upstream.pool.outstanding) for each in self.destinations)


def one_upstream(
    *,
    limits: Limits = LIMITS,
    discovers_models: bool = False,
    dialect: Dialect | DialectState = TRITON,
    codings: tuple[str, ...] = (),
    lanes: SharedMemoryLanes | None = None,
    **turns: Turns,
) -> Cluster:
    """Make an upstream of servers, by the letter in their URLs, and a route to it."""
    endpoints = servers(**turns)
    supervisor = PoolSupervisor(model_discovery=ModelDiscovery(60)) if discovers_models else None
    destination = make_destination(*endpoints, limits=limits, supervisor=supervisor)
    destination = _speaking(destination, dialect)
    destination = replace(destination, upstream=replace(destination.upstream, lanes=lanes))
    router = Router([Route(Match(), (destination,), codings=codings)])
    return Cluster(endpoints, (destination,), router)


def upstreams_of(
    *,
    limits: Limits = LIMITS,
    dialects: Mapping[str, Dialect | DialectState] | None = None,
    **turns: Turns,
) -> Cluster:
    """Make an upstream of each server, with its letter as name, and one route to all of them."""
    endpoints = servers(**turns)
    speaks = dialects or {}
    destinations = tuple(
        _speaking(make_destination(each, name=name, limits=limits), speaks.get(name, TRITON))
        for name, each in zip(turns, endpoints, strict=True)
    )
    return Cluster(endpoints, destinations, weighted_destinations(*destinations))


def _speaking(destination: Destination, dialect: Dialect | DialectState) -> Destination:
    state = dialect if isinstance(dialect, DialectState) else DialectState(dialect)
    return replace(destination, upstream=replace(destination.upstream, dialect_state=state))
