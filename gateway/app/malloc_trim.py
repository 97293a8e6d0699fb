"""Memory that is free goes back to the system in quiet times."""

from __future__ import annotations

import asyncio
import time

from gateway.app.background import BackgroundTask
from gateway.system.memory import has_malloc_trim, resident_bytes, trim_malloc

_LOOK = 10.0
"""Seconds between two looks at how much memory there is."""
_QUIET = 0.25
"""The share of a core below which a process has time for it: some 100 ms for a gibibyte."""
_SPARE = 64 * 2**20
"""Bytes beyond those at the start that may stay."""


class MallocTrim(BackgroundTask):
    """Gives back what is free while its context is open.

    By itself the C library gives back only what is free at the end of its memory, so that one small
    object there would keep what hundreds of large requests took before.
    """

    async def run(self) -> None:
        """Look every so often whether there is much, and time for it."""
        if not has_malloc_trim():
            return
        enough = resident_bytes() + _SPARE
        while True:
            used = time.process_time()
            await asyncio.sleep(_LOOK)
            is_quiet = time.process_time() - used < _QUIET * _LOOK
            if is_quiet and resident_bytes() > enough:
                # In a thread: only who needs memory has to wait for it.
                await asyncio.to_thread(trim_malloc)
