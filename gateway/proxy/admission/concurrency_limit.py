"""Concurrency limits: so many calls at servers at a time, a short queue behind them, else 503."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from gateway.errors import RETRY_AFTER, ErrorKind, GatewayError
from gateway.observe.gateway_metrics import LimitMetrics
from gateway.proxy.admission.deadline import Deadline


class ConcurrencyLimit:
    """Admits ``max_requests`` calls at a time; ``max_queue`` more may wait ``queue_timeout`` s.

    The queue is first in, first out. A call with less time left waits only that long. ``name`` is
    what the slots belong to, for errors: ``upstream 'triton'``. ``metrics`` counts those that wait
    and those that are refused.
    """

    def __init__(
        self,
        name: str,
        max_requests: int,
        max_queue: int,
        queue_timeout: float,
        metrics: LimitMetrics | None = None,
    ) -> None:
        self.active = 0
        """Calls that have a slot."""
        self._name = name
        self._metrics = metrics
        self.max_requests = max_requests
        """The number of slots."""
        self._max_queue = max_queue
        self._queue_timeout = queue_timeout
        self._queue: deque[asyncio.Future[None]] = deque()

    @property
    def queued(self) -> int:
        """Return the number of calls that wait for a slot."""
        return len(self._queue)

    def try_acquire(self) -> bool:
        """Take a slot if one is free."""
        if self.active >= self.max_requests:
            return False  # calls are queued only then, so that none is overtaken
        self.active += 1
        return True

    def check_room(self) -> None:
        """Raise GatewayError (503) if no slot is free, and the queue is full."""
        if self.active >= self.max_requests and len(self._queue) >= self._max_queue:
            if self._metrics is not None:
                self._metrics.full.add(1.0)
            raise self._full(f"and {self._max_queue} more wait")

    async def acquire(self, deadline: Deadline) -> None:
        """Take a slot, or wait for one; raises GatewayError (503) if that takes too long.

        The error is the same if the deadline ends the wait: no server was late.
        """
        self.check_room()
        if self.try_acquire():
            return
        with deadline.suspended() as left:
            await self._wait(min(self._queue_timeout, left))

    def release(self) -> None:
        """Give the slot to the first call of the queue, or back."""
        self.active -= 1
        if self._queue:
            self._admit_queued()

    def count_call(self) -> None:
        """Count a call that has ended for its client, but not at the server; see CallCounter.

        Its own slot is given back after this.
        """
        self.active += 1

    def uncount_call(self) -> None:
        """Give the slot of such a call to the first one of the queue, or back."""
        self.release()

    def reconfigure(self, max_requests: int, max_queue: int, queue_timeout: float) -> None:
        """Set other limits; calls that have a slot keep it, queued calls wait as they began."""
        self.max_requests = max_requests
        self._max_queue = max_queue
        self._queue_timeout = queue_timeout
        self._admit_queued()

    def _admit_queued(self) -> None:
        while self._queue and self.active < self.max_requests:
            admitted = self._queue.popleft()
            if not admitted.done():
                admitted.set_result(None)
                self.active += 1

    async def _wait(self, seconds: float) -> None:
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(admitted)
        started = time.monotonic()
        try:
            async with asyncio.timeout(seconds):
                await admitted
        except BaseException as error:
            if admitted.done() and not admitted.cancelled():
                self.release()  # it was admitted just before it gave up
            else:
                with suppress(ValueError):
                    self._queue.remove(admitted)
            if isinstance(error, TimeoutError):
                if self._metrics is not None:
                    self._metrics.timed_out.add(1.0)
                why = f"and none ended within {round(seconds, 3):g} s"
                raise self._full(why, "none ended in time") from None
            raise
        finally:
            if self._metrics is not None:
                self._metrics.wait.observe(time.monotonic() - started)

    def _full(self, why: str, cause: str = "") -> GatewayError:
        """Return the error of a call that gets no slot; ``cause`` is ``why`` without numbers."""
        calls = "1 call" if self.max_requests == 1 else f"{self.max_requests} calls"
        return overload_error(
            f"{self._name} is busy: {calls} in progress, {why}",
            f"{self._name}: {cause or why}",
        )


def try_acquire_all(limits: Sequence[ConcurrencyLimit]) -> bool:
    """Take a slot of each limit if all have one free, else none."""
    for number, limit in enumerate(limits):
        if not limit.try_acquire():
            release_all(limits[:number])
            return False
    return True


async def acquire_all(limits: Sequence[ConcurrencyLimit], deadline: Deadline) -> None:
    """Take a slot of each limit in order, or none; raises GatewayError (503)."""
    acquired = 0
    try:
        for limit in limits:
            await limit.acquire(deadline)
            acquired += 1
    except BaseException:
        release_all(limits[:acquired])
        raise


def release_all(limits: Sequence[ConcurrencyLimit]) -> None:
    """Give the slots back."""
    for limit in limits:
        limit.release()


def overload_error(message: str, cause: str | None = None) -> GatewayError:
    """Return the error of a call that the gateway has no room for; see GatewayError."""
    return GatewayError(ErrorKind.OVERLOADED, message, RETRY_AFTER, cause=cause)
