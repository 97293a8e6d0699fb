"""What looks after a pool's members, and the tasks in which that is done."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial

from gateway.upstream.pool.dialect import DialectDetector
from gateway.upstream.pool.dns import Resolver
from gateway.upstream.pool.health_check import HealthChecker
from gateway.upstream.pool.member import Member
from gateway.upstream.pool.model_discovery import ModelDiscovery
from gateway.upstream.transport import UpstreamEndpoint

_FIRST_LOOK_UP = 1.0
"""Seconds for which the start waits for the addresses of names."""

_log = logging.getLogger("tensorgate.upstream")


class PoolSupervisor:
    """Has members probed, asked for models and dialect, and looked up, as far as is wanted."""

    def __init__(
        self,
        prober: HealthChecker | None = None,
        discovery: ModelDiscovery | None = None,
        resolver: Resolver | None = None,
        dialect_detector: DialectDetector | None = None,
    ) -> None:
        self.prober = prober
        self.discovery = discovery
        self.resolver = resolver
        self.dialect_detector = dialect_detector
        attendants = (prober, discovery, dialect_detector)
        self._attendants = [each for each in attendants if each is not None]
        self._of_member: dict[Member, list[asyncio.Task[None]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def look_up(self, use: Callable[[Sequence[UpstreamEndpoint]], None]) -> None:
        """Begin to look names up; wait, but not for long, until that was done once.

        ``use`` is called with the endpoints whenever they are others.
        """
        resolver = self.resolver
        if resolver is None:
            return
        self.run(resolver.watch(lambda: use(resolver.endpoints)))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_LOOK_UP):
                await resolver.answered.wait()

    def take_in(self, members: Iterable[Member], changed: Callable[[Member], None]) -> None:
        """Begin to look after members; ``changed`` is called with one that is up, or no more."""
        for member in members:
            if self.dialect_detector is not None:
                self.dialect_detector.take_in(member)
            told = partial(self._changed, member, changed)
            self._of_member[member] = [
                self.run(attendant.attend(member, told)) for attendant in self._attendants
            ]

    def let_go(self, members: Iterable[Member]) -> None:
        """Look after members no more, and close the connections that no exchange uses."""
        for member in members:
            for task in self._of_member.pop(member, ()):
                task.cancel()
            if self.dialect_detector is not None:
                self.dialect_detector.let_go(member)
            self.run(member.endpoint.close())

    def doubt(self, member: Member) -> None:
        """Take note that a member may be another server by now."""
        if self.dialect_detector is not None:
            self.dialect_detector.doubt(member)

    def _changed(self, member: Member, changed: Callable[[Member], None]) -> None:
        self.doubt(member)
        changed(member)

    async def close(self) -> None:
        """Cancel all that is under way, and wait for its end."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def run(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run what looks after endpoints until it ends, or until ``close``."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end)
        return task

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            _log.error("nobody looks after an endpoint any more", exc_info=fault)
