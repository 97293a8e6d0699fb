"""The gateway's own health: it lives if it answers, and is ready if it can reach its servers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress

from multidict import CIMultiDict

from gateway.errors import ErrorKind, GatewayError, strip_tracebacks
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.interfaces import ClientResponse, Upstream
from gateway.upstream.transport import UpstreamEndpoint, UpstreamRequest

PROBE_TIME = 2.0
"""Seconds within which an endpoint has to say that it is ready."""

CACHE_SECONDS = 1.0
"""Seconds for which an outcome holds, so that probes of the gateway do not multiply."""

_READY = "/v2/health/ready"

# The protocol wants an object as the body. Triton sends none, and its clients look at the status;
# KServe's client looks into the object.
_JSON = {"Content-Type": "application/json"}

Check = Callable[[Upstream], Awaitable[tuple[str, ...]]]
"""Tells of each endpoint of an upstream why it cannot be used, or nothing if one of them can."""


async def live(answer: ClientResponse) -> None:
    """Answer that the gateway lives, whatever its servers do."""
    await answer.send(200, "", CIMultiDict(_JSON), b'{"live":true}')


async def ready(answer: ClientResponse, readiness: Readiness, deadline: Deadline) -> None:
    """Answer that the gateway is ready; raises GatewayError (503) that tells what is not."""
    deadline.expect_server(f"the endpoints of {', '.join(readiness.names)}")
    missing = await readiness.missing()
    if missing:
        raise GatewayError(ErrorKind.NOT_READY, f"not ready: {missing}")
    deadline.expect_client()
    await answer.send(200, "", CIMultiDict(_JSON), b'{"ready":true}')


class Readiness:
    """Finds out whether each of the upstreams that are required has an endpoint to be used.

    One check at a time is made, which all wait for who ask meanwhile, and its outcome is kept for a
    while. ``clock`` gives seconds.
    """

    def __init__(
        self,
        upstreams: Iterable[Upstream],
        check: Check | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._upstreams = [upstream for upstream in upstreams if upstream.required]
        self._check = check or unusable
        self._clock = clock
        self.draining = False
        """The gateway is about to end, whatever its upstreams do."""
        self._missing = ""
        self._expires = float("-inf")
        self._look: asyncio.Task[str] | None = None

    @property
    def names(self) -> list[str]:
        """Give the names of the upstreams."""
        return [upstream.name for upstream in self._upstreams]

    async def missing(self) -> str:
        """Tell which upstreams cannot be used, and why; nothing if all can.

        While the gateway drains, that it does is all there is to tell.
        """
        if self.draining:
            return "draining"
        if self._look is None:
            if self._clock() < self._expires and not self._is_lost:
                return self._missing
            self._look = asyncio.create_task(self._look_at_all())
            self._look.add_done_callback(self._looked)
        # One client that leaves must not take the outcome from the others.
        return await asyncio.shield(self._look)

    @property
    def _is_lost(self) -> bool:
        """Tell whether calls have found an upstream unreachable since all were ready."""
        return not self._missing and any(each.pool.unreachable for each in self._upstreams)

    async def close(self) -> None:
        """End the check under way."""
        if self._look is not None:
            self._look.cancel()
            await asyncio.gather(self._look, return_exceptions=True)

    async def _look_at_all(self) -> str:
        async with asyncio.TaskGroup() as group:
            looks = [group.create_task(self._look_at(upstream)) for upstream in self._upstreams]
        self._missing = ", ".join(filter(None, (look.result() for look in looks)))
        self._expires = self._clock() + CACHE_SECONDS
        return self._missing

    async def _look_at(self, upstream: Upstream) -> str:
        whys = await self._check(upstream)
        return f"upstream {upstream.name} ({'; '.join(whys)})" if whys else ""

    def _looked(self, look: asyncio.Task[str]) -> None:
        self._look = None
        if not look.cancelled():
            look.exception()  # seen, even where every client that waited has left


async def unusable(upstream: Upstream) -> tuple[str, ...]:
    """Tell why no endpoint of an upstream is ready, or nothing if one is.

    None is while recent calls could not connect to any. Else its probes know, if there are any; the
    first ones are waited for, but not for long. Without probes all endpoints are asked at once, and
    the first that is ready settles it.
    """
    pool = upstream.pool
    if not pool.endpoints:
        return (pool.empty_reason,)
    if pool.unreachable is not None:
        records = [member.calls for member in pool.members]
        whys = [each.last_error if each.connect_failures else None for each in records]
        return tuple(dict.fromkeys(why or pool.unreachable for why in whys))
    if pool.any_healthy is not None:
        with suppress(TimeoutError):
            async with asyncio.timeout(PROBE_TIME):
                await pool.wait_until_probed()
        states = () if pool.any_healthy else pool.snapshot()
        return tuple(f"{state.url}: {state.reason or 'not probed yet'}" for state in states)
    probes = [asyncio.create_task(_why_not_ready(each)) for each in upstream.pool.endpoints]
    try:
        for probe in asyncio.as_completed(probes):
            if await probe is None:
                return ()
        return tuple(why for probe in probes if (why := probe.result()) is not None)
    finally:
        for each in probes:
            each.cancel()
        await asyncio.gather(*probes, return_exceptions=True)


async def _why_not_ready(endpoint: UpstreamEndpoint) -> str | None:
    """Tell why an endpoint is not ready; None if it is."""
    try:
        async with asyncio.timeout(PROBE_TIME):
            headers = CIMultiDict(endpoint.own_request_headers)
            response = await endpoint.send(UpstreamRequest("GET", _READY, headers))
            try:
                while await response.read():
                    pass  # so that the connection can be kept
            finally:
                response.close()
    except GatewayError as error:
        strip_tracebacks(error)
        return error.message
    except TimeoutError:
        return f"{endpoint.url} did not say in {PROBE_TIME:g} s that it is ready"
    return None if response.status == 200 else f"{endpoint.url} answered {response.status}"
