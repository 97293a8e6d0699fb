"""Ends an exchange that takes too long, or in which nothing moves any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gateway.errors import ErrorKind, GatewayError

_SLACK = 0.05
"""Part of the idle time by which a turn may last longer, so that few turns move the timer."""


class Deadline:
    """Knows whose turn it is; each turn may take ``idle_time`` seconds."""

    def __init__(self, idle: asyncio.Timeout, idle_time: float) -> None:
        self._idle = idle
        self._idle_time = idle_time
        self._loop = asyncio.get_running_loop()
        self._move_after = 0.0
        self._server: str | None = None

    def wait_for_client(self) -> None:
        """Note that something moved, and that it is the client's turn."""
        self._wait_for(None)

    def wait_for_server(self, url: str) -> None:
        """Note that something moved, and that it is the turn of the server at ``url``."""
        self._wait_for(url)

    def error(self, what: str) -> GatewayError:
        """Make the error that tells whom the exchange was waiting for."""
        if self._server is None:
            return GatewayError(ErrorKind.CLIENT_TIMEOUT, f"waiting for the client: {what}")
        return GatewayError(ErrorKind.SERVER_TIMEOUT, f"waiting for {self._server}: {what}")

    def _wait_for(self, server: str | None) -> None:
        self._server = server
        now = self._loop.time()
        if now >= self._move_after and not self._idle.expired():
            self._move_after = now + self._idle_time * _SLACK
            self._idle.reschedule(self._move_after + self._idle_time)


@asynccontextmanager
async def deadline(idle_time: float, total_time: float) -> AsyncIterator[Deadline]:
    """Give what follows ``total_time`` seconds, and each turn in it ``idle_time``.

    Raises GatewayError where one runs out: 408 if it was the client's turn, 504 if a server's.
    """
    try:
        async with asyncio.timeout(total_time) as total, asyncio.timeout(idle_time) as idle:
            turns = Deadline(idle, idle_time)
            yield turns
    except TimeoutError:
        if idle.expired():
            raise turns.error(f"nothing moved for {idle_time:g} s (limits.idle_time)") from None
        if total.expired():
            raise turns.error(f"not done in {total_time:g} s (limits.total_time)") from None
        raise
