"""Counts time slices of the event loop, and cancels calls in any of them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest


class Others:
    """A task that runs in every iteration of the event loop."""

    turns = 0
    """The number of its runs."""

    async def take_time_slices(self) -> None:
        """Run until cancelled."""
        while True:
            self.turns += 1
            await asyncio.sleep(0)


@contextmanager
def others() -> Iterator[Others]:
    """Run a competing task inside, which counts its runs."""
    waiting = Others()
    task = asyncio.create_task(waiting.take_time_slices())
    try:
        yield waiting
    finally:
        task.cancel()


async def cancelled_after(moment: int, exchange: Coroutine[Any, Any, object]) -> bool:
    """Cancel a call after so many iterations; returns False if it is over by then."""
    task = asyncio.create_task(exchange)
    for _ in range(moment):
        await asyncio.sleep(0)
    if task.done():
        await task
        return False
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return True
