"""Shares the event loop among conversions: at most one chunk is converted per time slice."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from gateway.system.time_slices import FairQueue

TimeSliceWaiter = Callable[[], Awaitable[None]]
"""Lets other calls have a time slice, and waits for the next one."""


class ConversionScheduler:
    """Lets one call convert one chunk in each iteration of the event loop.

    So a small request waits for one chunk of the large ones at a time. Clients take turns, however
    many of their calls wait.
    """

    def __init__(self) -> None:
        self._taken = False
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()

    async def next_slice(self, client: str = "") -> None:
        """Yield to other calls and wait for the next time slice; call it between two chunks."""
        if self.try_take_slice():
            await asyncio.sleep(0)
            return
        granted = asyncio.get_running_loop().create_future()
        self._waiting.append(granted, client)
        await granted

    def try_take_slice(self) -> bool:
        """Take the current time slice if it is free, for a chunk that is converted at once."""
        if self._taken:
            return False
        self._taken = True
        asyncio.get_running_loop().call_soon(self._grant_next)
        return True

    def _grant_next(self) -> None:
        """Grant the next time slice to the call that has waited longest, of the next client."""
        self._taken = False
        while self._waiting:
            granted = self._waiting.popleft()
            if not granted.done():  # else its call was cancelled
                self._taken = True
                granted.set_result(None)
                granted.get_loop().call_soon(self._grant_next)
                return
