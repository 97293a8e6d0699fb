"""What a process that serves does about its memory, once, before it begins."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import time
from contextlib import suppress
from pathlib import Path

_MIB = 2**20

# glibc's names: mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT, _LARGEST_KEPT = 32 * _MIB, 1 * _MIB
"""Bytes that are freed and kept for what comes next, and of how large pieces."""

_YOUNG = 10_000
"""Objects made, less those gone, until Python looks for cycles among them; 700 by default."""

_LOOK = 10.0
"""Seconds between two looks at how much memory there is."""
_QUIET = 0.25
"""The share of a core below which a process has time to give memory back: 10 ms for 100 MiB."""
_SPARE = 64 * _MIB
"""Bytes beyond those at the start that are not looked for."""


def keep_what_is_freed() -> None:
    """Have the C library keep the memory of chunks that come and go by the thousand.

    Given back to the system each time, it is mapped and cleared anew for the next chunk, which
    takes longer than all that is done with the chunk.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # not every C library has it
        mallopt(_M_TRIM_THRESHOLD, _KEPT)
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT)


def settle() -> None:
    """Have Python's collector leave out what is loaded by now, and look at the rest less often.

    Else a full collection would hold the event loop for tens of milliseconds. In a running loop,
    memory goes back to the system from now on when little is to be done.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG)
    with suppress(RuntimeError):  # the parent of workers has no loop, and holds no bodies
        _Surplus(asyncio.get_running_loop())


class _Surplus:
    """Gives back what is free.

    By itself the C library gives back only what is free at the end of its memory, so that one small
    object there would keep what hundreds of large requests took before.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._enough = _resident() + _SPARE
        self._used = time.process_time()
        if self._trim is not None:  # not every C library has it
            loop.call_later(_LOOK, self._look)

    def _look(self) -> None:
        used = time.process_time()
        if used - self._used < _QUIET * _LOOK and _resident() > self._enough:
            assert self._trim is not None
            self._trim(0)
        self._used = time.process_time()
        self._loop.call_later(_LOOK, self._look)


def _resident() -> int:
    """Give the bytes of memory in use: proc(5), statm."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
