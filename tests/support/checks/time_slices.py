"""Turns of the event loop: those that others have meanwhile, and clients that leave in one."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest


class Others:
    """Those who want a turn beside what is tested, and take each that they can have."""

    turns = 0
    """How many they had."""

    async def take_time_slices(self) -> None:
        """Take turns until cancelled."""
        while True:
            self.turns += 1
            await asyncio.sleep(0)


@contextmanager
def others() -> Iterator[Others]:
    """Have others take turns inside, and count them."""
    waiting = Others()
    task = asyncio.create_task(waiting.take_time_slices())
    try:
        yield waiting
    finally:
        task.cancel()


async def cancelled_after(moment: int, exchange: Coroutine[Any, Any, object]) -> bool:
    """Have a client leave its exchange after so many turns; false where that is over by then."""
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
