"""Gives connections with much to process a turn each, one after the other."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from weakref import WeakKeyDictionary


class TurnQueue:
    """Runs one turn in each iteration of the event loop.

    However many wait here, all others wait for one of their turns only.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[Callable[[], None]] = deque()

    def add(self, turn: Callable[[], None]) -> None:
        """Call ``turn`` once, in a later iteration of the event loop."""
        self._waiting.append(turn)
        if len(self._waiting) == 1:
            self._loop.call_soon(self._run)

    def _run(self) -> None:
        turn = self._waiting.popleft()
        if self._waiting:  # also if this turn raises
            self._loop.call_soon(self._run)
        turn()


_queues: WeakKeyDictionary[asyncio.AbstractEventLoop, TurnQueue] = WeakKeyDictionary()


def turn_queue() -> TurnQueue:
    """Return the queue of the running event loop: one for all of its connections."""
    loop = asyncio.get_running_loop()
    queue = _queues.get(loop)
    if queue is None:
        queue = _queues[loop] = TurnQueue(loop)
    return queue
