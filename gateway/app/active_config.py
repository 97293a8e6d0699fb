"""The router, upstreams and limits built from one version of the settings."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping

from gateway.app.build.limits import SharedLimits
from gateway.app.build.upstreams import SharedUpstream, upstreams_by_name
from gateway.proxy.calls.dispatch import handle_request
from gateway.proxy.calls.planner import Planner
from gateway.proxy.destination import Upstream
from gateway.proxy.filters.mirror import Mirror
from gateway.proxy.interfaces import ClientRequest, ClientResponse
from gateway.proxy.router import Router

_POLL_INTERVAL = 0.1
"""Seconds between two looks whether the calls of a retired configuration have ended."""


class ActiveConfig:
    """A router and its upstreams, which it may share with the runtimes before and after it."""

    def __init__(
        self, shared_upstreams: Mapping[str, SharedUpstream], router: Router, limits: SharedLimits
    ) -> None:
        self.shared_upstreams = shared_upstreams
        self.router = router
        self.limits = limits
        self.planner = Planner(router)
        self._calls = 0

    def activate(self) -> None:
        """Hold the upstreams, and apply the limits, from now on; that cannot fail."""
        for each in self.shared_upstreams.values():
            each.acquire()
        self.limits.apply()

    @property
    def upstreams(self) -> dict[str, Upstream]:
        """Return the upstreams by name."""
        return upstreams_by_name(self.shared_upstreams)

    @property
    def in_use(self) -> bool:
        """Tell whether calls that began on it are still running."""
        calls = self._calls or self.planner.in_flight
        return bool(calls) or any(
            each.has_calls_of_last_user for each in self.shared_upstreams.values()
        )

    async def handle_request(self, request: ClientRequest, response: ClientResponse) -> None:
        """Serve a request on the streaming path."""
        self._calls += 1
        try:
            await handle_request(request, response, self.planner)
        finally:
            self._calls -= 1

    def flush_mirror_logs(self) -> None:
        """Log how many mirrored requests have failed, where that is due; call it once a second."""
        for mirror in self._mirrors():
            mirror.stats.flush_if_due()

    def _mirrors(self) -> Iterator[Mirror]:
        return (route.mirror for route in self.router.routes if route.mirror is not None)

    async def close(self) -> None:
        """Close all that no other configuration uses, once no call is running."""
        self.planner.close()
        for mirror in self._mirrors():
            await mirror.close()
        await self.router.readiness.close()
        for each in self.shared_upstreams.values():
            await each.release()

    async def close_when_idle(self) -> None:
        """Close all that no other configuration uses, when the calls have ended; none begins."""
        try:
            # Polled: nothing signals the end of the last call.
            while self.in_use:  # noqa: ASYNC110
                await asyncio.sleep(_POLL_INTERVAL)
        finally:
            await self.close()
