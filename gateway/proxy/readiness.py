"""Whether the gateway is ready: whether its upstreams are."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress

from multidict import CIMultiDict

from gateway.errors import ErrorKind, GatewayError, strip_tracebacks
from gateway.proxy.destination import Upstream
from gateway.upstream.transport import UpstreamEndpoint, UpstreamRequest

READINESS_TIMEOUT = 2.0
"""Seconds for an endpoint to report that it is ready."""

CACHE_SECONDS = 1.0
"""Seconds for which an outcome is cached, so that probes of the gateway do not multiply."""

_READY = "/v2/health/ready"

FindUnready = Callable[[Upstream], Awaitable[tuple[str, ...]]]
"""Returns why each endpoint of an upstream is not ready; nothing if one of them is."""


class Readiness:
    """Checks whether every required upstream has an endpoint that is ready.

    There is one check at a time, which concurrent clients share. Its outcome is cached for a while.
    ``clock`` returns seconds.
    """

    def __init__(
        self,
        upstreams: Iterable[Upstream],
        find_unready: FindUnready | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._upstreams = [upstream for upstream in upstreams if upstream.required]
        self._find_unready = find_unready or unready_endpoints
        self._clock = clock
        self.draining = False
        """Whether the gateway is about to stop, whatever its upstreams do."""
        self.replaced = False
        """Whether other settings are in use."""
        self._unready = ""
        self._public_reason = ""
        self._expires = float("-inf")
        self._check: asyncio.Task[str] | None = None

    @property
    def names(self) -> list[str]:
        """Return the names of the required upstreams."""
        return [upstream.name for upstream in self._upstreams]

    @property
    def end_of_streams(self) -> str:
        """Say why calls that may run for days have to end; empty if they need not."""
        if self.draining:
            return "the gateway is stopping"
        return "the gateway has new settings" if self.replaced else ""

    async def check(self) -> str:
        """Describe the upstreams that are not ready, and why; empty if all are.

        A draining gateway is not ready for that reason alone.
        """
        if self.draining:
            return "draining"
        if self._check is None:
            # Calls may have found an upstream unreachable since all were ready.
            unreachable = any(each.pool.unreachable for each in self._upstreams)
            if self._clock() < self._expires and (self._unready or not unreachable):
                return self._unready
            self._check = asyncio.create_task(self._check_all())
            self._check.add_done_callback(self._on_checked)
        # A client that disconnects must not cancel the check for the others.
        return await asyncio.shield(self._check)

    @property
    def public_reason(self) -> str:
        """Return what clients are told of the last outcome: the upstreams that are not ready."""
        return "draining" if self.draining else self._public_reason

    async def close(self) -> None:
        """Cancel the check under way."""
        if self._check is not None:
            self._check.cancel()
            await asyncio.gather(self._check, return_exceptions=True)

    async def _check_all(self) -> str:
        async with asyncio.TaskGroup() as group:
            checks = [group.create_task(self._check_one(upstream)) for upstream in self._upstreams]
        self._unready = ", ".join(filter(None, (each.result() for each in checks)))
        self._public_reason = ", ".join(
            each.result() if upstream.pool.exposes_endpoints else f"upstream {upstream.name}"
            for upstream, each in zip(self._upstreams, checks, strict=True)
            if each.result()
        )
        self._expires = self._clock() + CACHE_SECONDS
        return self._unready

    async def _check_one(self, upstream: Upstream) -> str:
        whys = await self._find_unready(upstream)
        return f"upstream {upstream.name} ({'; '.join(whys)})" if whys else ""

    def _on_checked(self, check: asyncio.Task[str]) -> None:
        self._check = None
        if not check.cancelled():
            check.exception()  # retrieved, even if every client has disconnected


async def unready_endpoints(upstream: Upstream) -> tuple[str, ...]:
    """Return why no endpoint of an upstream is ready; nothing if one is.

    No endpoint is ready while recent calls could not connect to any. Else the health checks decide,
    if there are any; the first ones are awaited for a short time. Without health checks all
    endpoints are queried in parallel, and the first that is ready ends the check.
    """
    pool = upstream.pool
    if not pool.endpoints or pool.is_drained:
        return (pool.empty_reason,)
    if pool.unreachable is not None:
        records = [member.calls for member in pool.members]
        whys = [each.last_error if each.connect_failures else None for each in records]
        return tuple(dict.fromkeys(why or pool.unreachable for why in whys))
    if pool.any_healthy is not None:
        with suppress(TimeoutError):
            async with asyncio.timeout(READINESS_TIMEOUT):
                await pool.wait_until_probed()
        states = () if pool.any_healthy else pool.snapshot()
        return tuple(
            f"{state.url}: {state.health_check_result or 'not probed yet'}" for state in states
        )
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
    """Return why an endpoint is not ready; None if it is."""
    try:
        async with asyncio.timeout(READINESS_TIMEOUT):
            headers = CIMultiDict(endpoint.own_request_headers)
            response = await endpoint.send(UpstreamRequest("GET", _READY, headers))
            try:
                while await response.read():
                    pass  # a body read to its end lets the connection be reused
            finally:
                response.close()
    except GatewayError as error:
        strip_tracebacks(error)
        # Without descriptors or ports of its own, the gateway learns nothing of the server.
        return None if error.kind is ErrorKind.EXHAUSTED else error.message
    except TimeoutError:
        return f"{endpoint.url} did not say in {READINESS_TIMEOUT:g} s that it is ready"
    return None if response.status == 200 else f"{endpoint.url} returned {response.status}"


NOTHING_REQUIRED = Readiness(())
"""The readiness of a gateway that needs no server."""
