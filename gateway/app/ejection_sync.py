"""What the workers of a gateway tell each other of their upstreams' endpoints."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from gateway.routing.health import EjectionState
from gateway.upstream.pool.outlier_detection import EjectionListener
from gateway.upstream.pool.pool import Pool
from gateway.workers.shared_state import SharedEjections

_LOOK = 0.5
"""Seconds between two looks at what others say."""

_log = logging.getLogger("tensorgate")


class EjectionSync:
    """Tells others which endpoints are ejected and which answer again, and hears them.

    Likewise which upstreams are unreachable.

    An endpoint is told of as one of its upstream: another one may leave it out for other reasons.
    What all of them find out alike as they begin is logged by the ``first`` alone.
    """

    def __init__(self, board: SharedEjections, first: bool = True) -> None:
        self.first = first
        self._board = board
        self._task: asyncio.Task[None] | None = None

    def publisher_for(self, upstream: str) -> EjectionListener:
        """Make what the pool of an upstream tells its changes to."""

        def tell(url: str, health: EjectionState) -> None:
            now = time.monotonic()
            self._board.publish(_name(upstream, url), health.ejections, health.until, now)

        return tell

    def start(self, pools: Callable[[], Mapping[str, Pool]]) -> None:
        """Hear what is said of the endpoints of pools, which are asked for by upstream each time.

        That goes on until ``close``.
        """
        self._task = asyncio.create_task(self._listen(pools))

    async def close(self) -> None:
        """Hear no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _listen(self, pools: Callable[[], Mapping[str, Pool]]) -> None:
        while True:
            try:
                for upstream, pool in pools().items():
                    self._hear(upstream, pool)
            except Exception:
                # A fault of our own: never a silent one, and never one that makes a worker deaf.
                _log.exception("what other workers say was not heard")
            await asyncio.sleep(_LOOK)

    def _hear(self, upstream: str, pool: Pool) -> None:
        news = self._board.read(_name(upstream, ""))
        if news is not None and news.ejections:
            pool.record_remote_unreachable(news.until)
        for member in pool.members:
            news = self._board.read(_name(upstream, member.endpoint.url))
            if news is not None:
                pool.outlier_detector.record_remote(
                    member, EjectionState(ejections=news.ejections, until=news.until)
                )


def _name(upstream: str, url: str) -> str:
    return f"{upstream} {url}"
