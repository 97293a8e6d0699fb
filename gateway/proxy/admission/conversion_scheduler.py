"""Large conversions take turns: a small request waits for one chunk of theirs at a time."""

from __future__ import annotations

import asyncio
from collections import deque

MAX_UNSCHEDULED = 32 * 1024
"""Bytes of a request that need no turn: they are converted in little time."""


class ConversionScheduler:
    """Lets one exchange convert a chunk in each turn of the event loop."""

    def __init__(self) -> None:
        self._taken = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def next(self) -> None:
        """Let others have their turn, and wait for the next one; comes between two chunks."""
        if self.take():
            await asyncio.sleep(0)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def take(self) -> bool:
        """Take this turn for a chunk that is converted at once; tell whether it was free."""
        if self._taken:
            return False
        self._taken = True
        asyncio.get_running_loop().call_soon(self._pass_on)
        return True

    def _pass_on(self) -> None:
        """Give the turn to who has waited longest."""
        self._taken = False
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # its exchange was cancelled
                self._taken = True
                turn.set_result(None)
                turn.get_loop().call_soon(self._pass_on)
                return
