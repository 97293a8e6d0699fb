"""Large conversions take turns: a small request waits for one chunk of theirs at a time."""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    """Lets one exchange convert a chunk in each turn of the event loop."""

    def __init__(self) -> None:
        self._taken = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def next(self) -> None:
        """Let others have their turn, and wait for the next one; comes between two chunks."""
        loop = asyncio.get_running_loop()
        if self._taken:
            turn = loop.create_future()
            self._waiting.append(turn)
            await turn
            return
        self._taken = True
        loop.call_soon(self._pass_on)
        await asyncio.sleep(0)

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
