"""Several scripted servers without sockets, and requests to all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.dialects import Dialect
from gateway.proxy.calls.dispatch import handle_request
from gateway.proxy.destination import Destination
from gateway.proxy.router import Route, Router
from gateway.routing.matcher import Match
from gateway.upstream.pool.dialect import DialectState
from tests.support.doubles.streaming import (
    BodyStep,
    EventLog,
    ScriptedClientResponse,
    ScriptedEndpoint,
    ScriptedRequest,
    ScriptedUpstreamResponse,
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


def servers(**turns: ServerStep | tuple[ServerStep, ...]) -> list[ScriptedEndpoint]:
    """Return a server for each name, at http://NAME:8000, with its script."""
    return [
        ScriptedEndpoint(
            EventLog(),
            *(script if isinstance(script, tuple) else (script,)),
            url=f"http://{name}:8000",
        )
        for name, script in turns.items()
    ]


def weighted_destinations(
    *destinations: Destination, weights: tuple[int, ...] | None = None
) -> Router:
    """Make the routes where all requests choose from these by weight."""
    return Router([Route(Match(), destinations, weights or (1,) * len(destinations))], lambda: 0.0)


async def send_request(
    destinations: Router,
    method: str,
    target: str,
    *body: BodyStep,
    headers: Mapping[str, str] | None = None,
) -> ScriptedClientResponse:
    """Send a request, and return its response."""
    log = EventLog()
    answer = ScriptedClientResponse(log)
    await handle_request(ScriptedRequest(log, method, target, headers, body), answer, destinations)
    return answer


def received_requests(*endpoints: ScriptedEndpoint) -> list[list[str]]:
    """Return what each server was asked."""
    return [[f"{each.method} {each.target}" for each in server.requests] for server in endpoints]
