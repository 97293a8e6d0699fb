"""What a process that serves does about its memory, once, before it begins."""

from __future__ import annotations

import ctypes
import gc

_MIB = 2**20

# glibc's names: mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT, _LARGEST_KEPT = 32 * _MIB, 1 * _MIB
"""Bytes that are freed and kept for what comes next, and of how large pieces."""

_YOUNG = 10_000
"""Objects made, less those gone, until Python looks for cycles among them; 700 by default."""


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

    Else a full collection would hold the event loop for tens of milliseconds.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG)
