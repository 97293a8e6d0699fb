"""The background tasks of a pool: health checks, model discovery, dialect detection, DNS."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from gateway.upstream.pool.dialect import DialectDetector
from gateway.upstream.pool.dns import Resolver
from gateway.upstream.pool.health_check import HealthChecker
from gateway.upstream.pool.member import Member
from gateway.upstream.pool.model_discovery import ModelDiscovery
from gateway.upstream.transport import UpstreamEndpoint

_START_DNS_TIMEOUT = 1.0
"""Seconds for which the start waits for the addresses of names."""

_RESTART_DELAY = 1.0
"""Seconds until a task that has failed starts again."""

_log = logging.getLogger("tensorgate.upstream")


@dataclass(eq=False)
class PoolSupervisor:
    """Runs the background tasks of a pool's members, as far as the settings ask for them."""

    health_checker: HealthChecker | None = None
    model_discovery: ModelDiscovery | None = None
    resolver: Resolver | None = None
    dialect_detector: DialectDetector | None = None
    _tasks_by_member: dict[Member, list[asyncio.Task[None]]] = field(default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def resolve_names(self, use: Callable[[Sequence[UpstreamEndpoint]], None]) -> None:
        """Start to resolve names; wait a moment for the first addresses.

        ``use`` gets the endpoints whenever they change.
        """
        resolver = self.resolver
        if resolver is None:
            return
        self.start_task(_keep_running(lambda: resolver.watch(lambda: use(resolver.endpoints))))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_START_DNS_TIMEOUT):
                await resolver.all_resolved.wait()

    def add(self, members: Iterable[Member], changed: Callable[[Member], None]) -> None:
        """Start the tasks of members; ``changed`` gets a member whose health has changed."""
        checks = self.health_checker, self.model_discovery, self.dialect_detector
        for member in members:
            if self.dialect_detector is not None:
                self.dialect_detector.add(member)
            on_change = partial(self._on_change, member, changed)
            self._tasks_by_member[member] = [
                self.start_task(_keep_running(partial(each.run, member, on_change)))
                for each in checks
                if each is not None
            ]

    def remove(self, members: Iterable[Member]) -> None:
        """Stop the tasks of members and close their idle connections."""
        for member in members:
            for task in self._tasks_by_member.pop(member, ()):
                task.cancel()
            if self.dialect_detector is not None:
                self.dialect_detector.remove(member)
            self.start_task(member.endpoint.close())

    def recheck(self, member: Member) -> None:
        """Detect a member's dialect again, as it may be another server by now."""
        if self.dialect_detector is not None:
            self.dialect_detector.recheck(member)

    def _on_change(self, member: Member, changed: Callable[[Member], None]) -> None:
        self.recheck(member)
        changed(member)

    async def close(self) -> None:
        """Cancel all tasks and wait for their end."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def start_task(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run work in the background until it ends, or until ``close``."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end)
        return task

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a background task of an upstream failed and stopped", exc_info=error)


async def _keep_running(work: Callable[[], Coroutine[None, None, None]]) -> None:
    """Do work that ends when it is cancelled; after an error it starts again.

    An endpoint that is never checked again would stay as it is for good.
    """
    while True:
        try:
            return await work()
        except Exception:
            # An error of our own is logged, and must not end the task.
            _log.exception("a background task of an upstream failed and starts again")
        await asyncio.sleep(_RESTART_DELAY)
