"""Lets so many exchanges go to servers at a time; a few more wait for a short while."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from gateway.errors import RETRY_AFTER, ErrorKind, GatewayError
from gateway.proxy.admission.deadline import Deadline


class ConcurrencyLimit:
    """Has ``most`` places; for one of them ``waiting`` exchanges may wait, ``patience`` seconds.

    Who has less time left waits for that long. Who comes first is let in first. ``place`` tells of
    what these are the places: ``upstream 'triton'``.
    """

    def __init__(self, place: str, most: int, waiting: int, patience: float) -> None:
        self.active = 0
        """Exchanges that were let in and have not left."""
        self._place = place
        self._most = most
        self._most_waiting = waiting
        self._patience = patience
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        """Give the exchanges that wait."""
        return len(self._waiting)

    def try_acquire(self) -> bool:
        """Take a place if one is free, and nobody waits for it."""
        if self.active >= self._most:
            return False  # only then does anybody wait
        self.active += 1
        return True

    async def enter(self, deadline: Deadline) -> None:
        """Take a place, or wait for one; raises GatewayError (503) where that takes too long.

        That is where the deadline would come, too: it is no server that has not answered.
        """
        if self.try_acquire():
            return
        if len(self._waiting) >= self._most_waiting:
            raise self._full(f"and {self._most_waiting} more wait")
        with deadline.suspended() as left:
            await self._wait(min(self._patience, left))

    def leave(self) -> None:
        """Give the place to who has waited longest, or back."""
        self.active -= 1
        if self._waiting:
            self._let_in()

    def change(self, most: int, waiting: int, patience: float) -> None:
        """Have other numbers from now on; who is inside stays, and who waits does as it began."""
        self._most = most
        self._most_waiting = waiting
        self._patience = patience
        self._let_in()

    def _let_in(self) -> None:
        """Give the places that are free to those who have waited longest."""
        while self._waiting and self.active < self._most:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                self.active += 1

    async def _wait(self, seconds: float) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(seconds):
                await turn
        except BaseException as error:
            self._give_up(turn)
            if isinstance(error, TimeoutError):
                raise self._full(f"and none ended within {round(seconds, 3):g} s") from None
            raise

    def _give_up(self, turn: asyncio.Future[None]) -> None:
        if turn.done() and not turn.cancelled():
            self.leave()  # its turn had come just before
        else:
            with suppress(ValueError):
                self._waiting.remove(turn)

    def _full(self, why: str) -> GatewayError:
        return overloaded(f"{self._place} is busy: {self._most} requests are under way, {why}")


def try_acquire(concurrency_limits: Sequence[ConcurrencyLimit]) -> bool:
    """Take a place at each, or at none."""
    for number, concurrency_limit in enumerate(concurrency_limits):
        if not concurrency_limit.try_acquire():
            leave(concurrency_limits[:number])
            return False
    return True


async def enter(concurrency_limits: Sequence[ConcurrencyLimit], deadline: Deadline) -> None:
    """Take a place at each, one after the other, or at none; raises GatewayError (503)."""
    entered = 0
    try:
        for concurrency_limit in concurrency_limits:
            await concurrency_limit.enter(deadline)
            entered += 1
    except BaseException:
        leave(concurrency_limits[:entered])
        raise


def leave(concurrency_limits: Sequence[ConcurrencyLimit]) -> None:
    """Give the places back."""
    for concurrency_limit in concurrency_limits:
        concurrency_limit.leave()


def overloaded(message: str) -> GatewayError:
    """Make the error of a request that comes when too much is under way."""
    return GatewayError(ErrorKind.OVERLOADED, message, retry_after=RETRY_AFTER)
