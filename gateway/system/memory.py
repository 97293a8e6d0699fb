"""What a process that serves does about its memory, once, before it begins."""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path

_MIB = 2**20

# glibc's names: mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT, _LARGEST_KEPT = 32 * _MIB, 1 * _MIB
"""Bytes that are freed and kept for what comes next, and of how large pieces."""

_YOUNG = 10_000
"""Objects made, less those gone, until Python looks for cycles among them; 700 by default."""


def tune_malloc() -> None:
    """Have the C library keep the memory of chunks that come and go by the thousand.

    Given back to the system each time, it is mapped and cleared anew for the next chunk, which
    takes longer than all that is done with the chunk.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # not every C library has it
        mallopt(_M_TRIM_THRESHOLD, _KEPT)
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT)


def tune_garbage_collector() -> None:
    """Have Python's collector leave out what is loaded by now, and look at the rest less often.

    Else a full collection would hold the event loop for tens of milliseconds.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG)


def has_malloc_trim() -> bool:
    """Tell whether the C library can give back what is free: not every one can."""
    return hasattr(ctypes.CDLL(None), "malloc_trim")


def trim_malloc() -> None:
    """Give back to the system what is free, wherever it is: malloc_trim(3)."""
    ctypes.CDLL(None).malloc_trim(0)


def resident_bytes() -> int:
    """Give the bytes of memory in use: proc(5), statm."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
