"""Gives freed memory back to the system while the process is idle."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from gateway.app.background import BackgroundTask
from gateway.system.memory import has_malloc_trim, resident_bytes, trim_malloc

_INTERVAL = 10.0
"""Seconds between two looks at the memory."""
_IDLE_LOAD = 0.25
"""The share of a core below which a process counts as idle: trimming takes some 100 ms per GiB."""
_RESERVE = 64 * 2**20
"""Bytes beyond those at the start that it keeps."""


class MallocTrim(BackgroundTask):
    """Calls malloc_trim(3) while its context is open.

    By itself, glibc gives back only what is free at the end of its heap. One small object there
    keeps the memory of hundreds of large requests.
    """

    async def run(self) -> None:
        """Trim when much memory is free and the process is idle."""
        if not has_malloc_trim():
            return
        enough = resident_bytes() + _RESERVE
        while True:
            used = time.process_time()
            await asyncio.sleep(_INTERVAL)
            is_idle = time.process_time() - used < _IDLE_LOAD * _INTERVAL
            with suppress(OSError):  # no descriptor is left to look at the memory
                if is_idle and resident_bytes() > enough:
                    # In a thread, so that only allocations wait for it.
                    await asyncio.to_thread(trim_malloc)
