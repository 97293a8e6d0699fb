"""Lets an event loop run, and nothing else."""

from __future__ import annotations

import asyncio


async def iterations(count: int) -> None:
    """Wait for so many iterations of the event loop."""
    for _ in range(count):
        await asyncio.sleep(0)
