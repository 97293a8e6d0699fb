"""What exchanges run on, as the settings say."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from gateway.app.build.limits import SharedLimits
from gateway.app.build.upstreams import SharedUpstream, upstreams_by_name
from gateway.proxy.dispatch import handle_request
from gateway.proxy.fast_path.planner import FastPath
from gateway.proxy.interfaces import ClientRequest, ClientResponse, Upstream
from gateway.proxy.router import Router

_LOOK = 0.1
"""Seconds between two looks whether the exchanges of a runtime are over: nobody tells."""


class Runtime:
    """Holds upstreams, which it may share with other runtimes, and the routes to them."""

    def __init__(
        self, held: Mapping[str, SharedUpstream], routes: Router, shared: SharedLimits
    ) -> None:
        self.held = held
        for each in held.values():
            each.hold()
        shared.apply()
        self.routes = routes
        self.shared = shared
        self.straight = FastPath(routes)
        self._exchanges = 0

    @property
    def upstreams(self) -> dict[str, Upstream]:
        """Give the upstreams by name."""
        return upstreams_by_name(self.held)

    @property
    def in_use(self) -> bool:
        """Tell whether exchanges need it that began on it."""
        under_way = self._exchanges or self.straight.in_flight
        return bool(under_way) or any(held.busy_with_last_holder for held in self.held.values())

    async def handle_request(self, request: ClientRequest, answer: ClientResponse) -> None:
        """Answer a request."""
        self._exchanges += 1
        try:
            await handle_request(request, answer, self.routes)
        finally:
            self._exchanges -= 1

    async def close(self) -> None:
        """Let go of all that no other runtime has, when no exchange is under way."""
        self.straight.close()
        for rule in self.routes.rules:
            if rule.mirror is not None:
                await rule.mirror.close()
        await self.routes.readiness.close()
        for held in self.held.values():
            await held.release()


class RetiredRuntimes:
    """Closes runtimes that others have replaced, each when its exchanges are over."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, runtime: Runtime) -> None:
        """Take a runtime, on which no exchange begins any more."""
        task = asyncio.create_task(_retire(runtime))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Close them all, whatever is under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _retire(runtime: Runtime) -> None:
    try:
        while runtime.in_use:  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(_LOOK)
    finally:
        await runtime.close()
